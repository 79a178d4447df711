//! Changes to running sandboxes, which the launcher makes.

use backend::{BackendError, EnforcedMeasures, LimitPlan, Reconfigure};
use domain::{MountSpec, NetworkAccess, SandboxId};
use launcher::protocol::{LauncherOp, OpResult, ResizeRequest};

use crate::{LocalBackend, limit_names, mount_plans, network_mode, unexpected_response};

#[async_trait::async_trait]
impl Reconfigure for LocalBackend {
    async fn attach_mounts(
        &self,
        id: &SandboxId,
        mounts: &[MountSpec],
    ) -> Result<EnforcedMeasures, BackendError> {
        let mounts = mount_plans(mounts)?;
        match self.request_result(LauncherOp::Attach { id: id.clone(), mounts }).await? {
            OpResult::Changed(measures) => Ok(measures),
            _ => Err(unexpected_response()),
        }
    }

    async fn resize(&self, id: &SandboxId, limits: &LimitPlan) -> Result<EnforcedMeasures, BackendError> {
        let resize = ResizeRequest {
            id: id.clone(),
            limits: limits.limits.into(),
            named: limit_names(limits),
            require_limits: limits.require_all,
        };
        match self.request_result(LauncherOp::Resize(resize)).await? {
            OpResult::Changed(measures) => Ok(measures),
            _ => Err(unexpected_response()),
        }
    }

    async fn connect_network(
        &self,
        id: &SandboxId,
        network: NetworkAccess,
    ) -> Result<EnforcedMeasures, BackendError> {
        let question = LauncherOp::Connect { id: id.clone(), network: network_mode(network) };
        match self.request_result(question).await? {
            OpResult::Changed(measures) => Ok(measures),
            _ => Err(unexpected_response()),
        }
    }
}
