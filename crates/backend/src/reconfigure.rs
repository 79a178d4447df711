//! Changes to a running sandbox, for backends that offer them.

use domain::{MountSpec, NetworkAccess, SandboxId};

use crate::{BackendError, EnforcedMeasures, LimitPlan};

/// Gives a running sandbox what it was created without. Warm sandboxes are bound to their owners with this.
#[async_trait::async_trait]
pub trait Reconfigure: Send + Sync {
    /// Mounts into a running sandbox: all of the mounts, or none.
    async fn attach_mounts(
        &self,
        id: &SandboxId,
        mounts: &[MountSpec],
    ) -> Result<EnforcedMeasures, BackendError>;
    /// Changes the limits of a running sandbox and returns those now in force. A limit that cannot be enforced
    /// but must be is an error, and then the limits in force are unknown.
    async fn resize(&self, id: &SandboxId, limits: &LimitPlan) -> Result<EnforcedMeasures, BackendError>;
    /// Connects a running sandbox that was created without a network, or makes the network of any sandbox a filtered one,
    /// for which its policy is set before. Repeating the call changes nothing. Nothing else takes away what a sandbox has:
    /// a filtered one stays filtered.
    async fn connect_network(
        &self,
        id: &SandboxId,
        network: NetworkAccess,
    ) -> Result<EnforcedMeasures, BackendError>;
}
