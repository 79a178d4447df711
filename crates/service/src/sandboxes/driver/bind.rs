//! Giving a warm sandbox to an owner.

use std::path::Path;
use std::time::Duration;

use backend::{EnforcedMeasures, Measure};
use domain::{MountAccess, MountSource, MountSpec, NetworkAccess};

use super::Driver;
use crate::ServiceError;
use crate::files;
use crate::pools::ClaimedWarm;

/// How long a backend may take to bind one resource.
const BIND_TIMEOUT: Duration = Duration::from_secs(30);

impl Driver {
    /// Records the owner, and then gives the sandbox everything that the owner asked for. The sandbox either has all of
    /// that in the end, or is removed: nothing of one owner ever reaches another.
    pub(super) async fn bind_warm(&mut self, warm: ClaimedWarm) -> Result<(), ServiceError> {
        let bound = self.bind_resources(&warm).await;
        if bound.is_err() {
            warm.count_failure();
        }
        bound
    }

    async fn bind_resources(&mut self, warm: &ClaimedWarm) -> Result<(), ServiceError> {
        let noted = self.core.store.claim_sandbox(&self.record).await;
        noted.map_err(|source| ServiceError::Store { action: "record the owner of the sandbox", source })?;
        self.start_metering(true);
        // The steps are independent of each other, so they run concurrently.
        let hello = self.handle.agent.set_environment(&self.record.sandbox.spec);
        let (limits, mounts, network, ()) =
            tokio::try_join!(self.bind_limits(warm), self.bind_mounts(), self.bind_network(warm), hello)?;
        let pool = vec![Measure::Pool(warm.pool().to_owned())];
        for measures in [limits, mounts, network, pool] {
            self.record.sandbox.in_force.replace_measures(measures);
        }
        self.prepare_volume_directories().await?;
        self.start_entrypoint().await
    }

    async fn bind_network(&self, warm: &ClaimedWarm) -> Result<EnforcedMeasures, ServiceError> {
        let (spec, template) = (&self.record.sandbox.spec, warm.template());
        let (core, id, network) = (&self.core, &self.handle.id, spec.network);
        if network == NetworkAccess::Filtered
            && (network, &spec.policy) != (template.network, &template.policy)
        {
            core.set_network_policy(id, &spec.policy_or_deny_all()).await?;
        }
        if network == template.network {
            return Ok(EnforcedMeasures::new());
        }
        core.connect_network(id, network).await
    }

    async fn bind_mounts(&self) -> Result<EnforcedMeasures, ServiceError> {
        let (core, id, mounts) = (&self.core, &self.handle.id, &self.record.sandbox.spec.mounts);
        if mounts.is_empty() {
            return Ok(EnforcedMeasures::new());
        }
        let attach = async { core.host.backend.required_reconfigure()?.attach_mounts(id, mounts).await };
        core.host.ask_backend("attach", id, BIND_TIMEOUT, attach).await
    }

    /// Makes the directories of the guest that are on volumes. When the warm sandbox was made, it had none.
    async fn prepare_volume_directories(&self) -> Result<(), ServiceError> {
        let spec = &self.record.sandbox.spec;
        for (directory, owner) in &spec.guest.directories {
            let is_around = |mount: &&MountSpec| Path::new(directory).starts_with(&mount.target);
            let around = spec.mounts.iter().filter(is_around);
            let innermost = around.max_by_key(|mount| Path::new(&mount.target).components().count());
            let is_writable_volume = innermost.is_some_and(|mount| {
                matches!(mount.source, MountSource::Volume(_)) && mount.access == MountAccess::ReadWrite
            });
            if is_writable_volume {
                let is_target = innermost.is_some_and(|mount| mount.target == *directory);
                files::make_guest_directory(&self.handle.agent, directory, owner, is_target).await?;
            }
        }
        Ok(())
    }

    async fn bind_limits(&self, warm: &ClaimedWarm) -> Result<EnforcedMeasures, ServiceError> {
        let resources = &self.record.sandbox.spec.resources;
        if *resources == warm.template().resources {
            return Ok(EnforcedMeasures::new());
        }
        let (core, id) = (&self.core, &self.handle.id);
        let limits = core.plan_limits(resources);
        let resize = async { core.host.backend.required_reconfigure()?.resize(id, &limits).await };
        core.host.ask_backend("resize", id, BIND_TIMEOUT, resize).await
    }
}
