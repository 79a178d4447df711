//! Deciding what the spec of a sandbox leaves open, before a backend makes it: the image that a name stands for,
//! and the limits that its creator did not name.

use backend::{BackendError, Enforced, LimitPlan, ResolvedSpec};
use domain::{ResourceLimits, SandboxId, SandboxSpec};

use crate::core::Core;

impl Core {
    /// Makes a sandbox of the image that the name in its spec stands for.
    pub(crate) async fn create_in_backend(
        &self,
        id: &SandboxId,
        mut spec: SandboxSpec,
    ) -> Result<Enforced, BackendError> {
        let mut stand_in = None;
        // A snapshot has its image beneath its files, whatever the name stands for now.
        if spec.snapshot.is_none() {
            let resolved = self.resolve_image(&spec.image).await?;
            spec.image = resolved.name;
            stand_in = resolved.stand_in;
        }
        if let Some(stand_in) = &stand_in {
            self.log_stand_in(stand_in);
        }
        let made = self.host.backend.create(id, &self.plan_sandbox(spec)).await?;
        Ok(Enforced { stand_in: stand_in.map(|stand_in| stand_in.to_string()), ..made })
    }

    /// Completes a spec whose image exists.
    pub(crate) fn plan_sandbox(&self, spec: SandboxSpec) -> ResolvedSpec {
        let limits = self.plan_limits(&spec.resources);
        ResolvedSpec { spec, limits, max_processes: self.config().commands_per_sandbox }
    }

    /// Completes limits with the server's defaults.
    pub(crate) fn plan_limits(&self, named: &ResourceLimits) -> LimitPlan {
        let config = self.config();
        LimitPlan::new(named, config.default_limits, config.require_limits)
    }
}
