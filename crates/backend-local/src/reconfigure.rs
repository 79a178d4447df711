//! Changes to running sandboxes, which the launcher makes.

use backend::{BackendError, EnforcedMeasures, Reconfigure};
use domain::{MountSpec, NetworkAccess, ResourceLimits, SandboxId};
use launcher::protocol::{LauncherOp, OpResult, ResizeRequest};

use crate::{LocalBackend, explicit_limits, mount_plans, network_mode, unexpected_response};

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

    async fn resize(
        &self,
        id: &SandboxId,
        resources: &ResourceLimits,
    ) -> Result<EnforcedMeasures, BackendError> {
        let resize = ResizeRequest {
            id: id.clone(),
            limits: self.effective_limits(resources),
            named: explicit_limits(resources),
            require_limits: self.defaults().require_limits,
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
        let question = LauncherOp::Connect { id: id.clone(), network: network_mode(network)? };
        match self.request_result(question).await? {
            OpResult::Changed(measures) => Ok(measures),
            _ => Err(unexpected_response()),
        }
    }
}
