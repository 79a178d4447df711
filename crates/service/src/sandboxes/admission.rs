//! How a create is admitted: image, warm sandbox, room on the server and in the quota, eviction, driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::{
    Bytes, EndCause, FilesState, OnDeath, Owner, Phase, ResourceLimits, SandboxId, SandboxKey, SandboxSpec,
};
use tokio::sync::oneshot;

use crate::core::{Core, io_error, new_process_id};
use crate::error::error_chain;
use crate::pools::{ReservedWarm, RoomWaiter};
use crate::sandboxes::driver::{Driver, DriverCommand};
use crate::sandboxes::registry::{NoRoom, RoomRequirement, SandboxHandle};
use crate::sandboxes::sandbox_keys::chosen_name;
use crate::snapshots::SnapshotGuard;
use crate::store::SandboxRecord;
use crate::telemetry::service_metrics;
use crate::tenancy::quota::{OwnerQuota, ResourceCost};
use crate::tenancy::tokens::random_bytes;
use crate::{
    CreateSandboxRequest, Enforced, ImageSource, ResumeOutcome, Sandbox, SandboxRevival, ServiceError,
};

impl Core {
    /// Creates a sandbox, from a warm one if one fits; otherwise it is recorded first and then made.
    pub(crate) async fn create_sandbox(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&SandboxKey>,
        request: CreateSandboxRequest,
    ) -> Result<Sandbox, ServiceError> {
        self.create_successor(owner, key, request, None).await
    }

    /// Creates a sandbox like [`Core::create_sandbox`]. If it succeeds a dead one, its first event says so.
    pub(crate) async fn create_successor(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&SandboxKey>,
        mut request: CreateSandboxRequest,
        revival: Option<SandboxRevival>,
    ) -> Result<Sandbox, ServiceError> {
        let cause = revival.and_then(|revival| revival.how.cause_of_successor());
        if self.tasks.is_stopping() {
            return Err(ServiceError::Stopping);
        }
        let _files = self.prepare_request(owner, &mut request).await?;
        self.check_network(&request.spec)?;
        self.complete_network(&mut request.spec);
        // How long it took to fetch the image says nothing about this server.
        let began = Instant::now();
        let created = self.create_prepared(owner, key, request, cause).await?;
        service_metrics::record_create_time(began.elapsed());
        Ok(created)
    }

    async fn create_prepared(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&SandboxKey>,
        mut request: CreateSandboxRequest,
        cause: Option<EndCause>,
    ) -> Result<Sandbox, ServiceError> {
        let nothing_to_start =
            request.spec.snapshot.is_none() && self.resolve_entrypoint(&mut request.spec).await;
        let record = |request| {
            let record = self.new_record(owner, key, request)?;
            let entrypoint = record.entrypoint.filter(|_| !nothing_to_start);
            Ok::<_, ServiceError>(SandboxRecord { entrypoint, ..record })
        };
        self.make_room(owner, self.spared_source(&request.spec).as_ref()).await;
        if let Some(warm) = self.reserve_warm(&request).await {
            match self.start_sandbox(record(request.clone())?, Some(warm), cause).await {
                Err(error) if should_retry_without_warm(&error) => {
                    tracing::warn!(error = %error_chain(&error), "failed to use a warm sandbox; creating a new one");
                }
                brought => return brought,
            }
        }
        self.start_sandbox(record(request)?, None, cause).await
    }

    /// Completes a request and fetches its image. Refuses one that can never be fulfilled, before
    /// anything is changed. The snapshot is kept until the returned guard is dropped.
    pub(crate) async fn prepare_request(
        self: &Arc<Self>,
        owner: &Owner,
        request: &mut CreateSandboxRequest,
    ) -> Result<Option<SnapshotGuard>, ServiceError> {
        if request.spec.on_death == Some(OnDeath::Restart) && !self.host.capabilities.restart {
            return Err(ServiceError::NoRestarts);
        }
        let credentials = match request.source.clone() {
            ImageSource::Snapshot(id) => return self.apply_snapshot(owner, id, request).map(Some),
            ImageSource::Named { name, credentials } => {
                request.spec.image = name;
                credentials
            }
            ImageSource::Pool(name) => {
                self.complete_from_pool(&name, request)?;
                None
            }
        };
        request.spec.snapshot = None;
        self.ensure_image(owner, &request.spec, credentials).await?;
        Ok(None)
    }

    /// Has a driver make the sandbox of a new record, from a warm one if given.
    async fn start_sandbox(
        self: &Arc<Self>,
        mut record: SandboxRecord,
        warm: Option<ReservedWarm>,
        cause: Option<EndCause>,
    ) -> Result<Sandbox, ServiceError> {
        if let Some(warm) = &warm {
            warm.mark_record(&mut record);
        }
        let (owner, id) = (record.sandbox.owner.clone(), record.sandbox.id.clone());
        let uses = self.claim_volumes(&owner, &id, &mut record.sandbox.spec.mounts).await?;
        let (handle, driver) = Driver::new(self, record);
        let room = if warm.is_some() {
            RoomRequirement::OfWarm
        } else {
            RoomRequirement::Below(self.config().sandboxes)
        };
        self.admit_sandbox(&handle, room).await?;
        uses.keep_until_end();
        let (reply, claim) = oneshot::channel();
        // If the caller disconnects while the hook before the entrypoint runs, the hook is not waited for.
        let gone = handle.abandoned.clone().drop_guard();
        self.tasks.spawn(driver.create(warm.map(ReservedWarm::into_claimed), cause, reply));
        let claim = claim.await;
        gone.disarm();
        claim.unwrap_or(Err(ServiceError::Stopping)).map(|claim| claim.into_sandbox())
    }

    /// Adds a new sandbox to the registry if there is room for it on the server and in its owner's quota. To make room,
    /// a dead sandbox is evicted first, then a warm one, then a parked one. A dead sandbox that still has its files is
    /// evicted only for its own owner, and never for a sandbox that is made from a snapshot of it.
    async fn admit_sandbox(
        self: &Arc<Self>,
        handle: &Arc<SandboxHandle>,
        room: RoomRequirement,
    ) -> Result<(), ServiceError> {
        let limit = self.config().sandboxes;
        self.check_quota_alone(&handle.owner, handle.cost)?;
        let quota = self.quota_left_by_disks(&handle.owner);
        let spared = self.spared_source(&handle.state.borrow().spec);
        let spared = spared.as_ref();
        let mut waiting = None;
        loop {
            let (evicted, refusal) = match self.lifecycle.registry.add(Arc::clone(handle), room, &quota) {
                Ok(()) => return Ok(()),
                Err(NoRoom::Full) => {
                    waiting.get_or_insert_with(|| RoomWaiter::begin(self));
                    let owner = &handle.owner;
                    let evicted = self.evict_dead(owner, spared).await
                        || self.evict_warm().await
                        || self.evict_parked(None, spared).await
                        || self.evict_restartable(owner, spared).await;
                    (evicted, ServiceError::TooManySandboxes { limit })
                }
                Err(NoRoom::OverQuota(excess)) => {
                    let owner = handle.owner.clone();
                    (
                        self.evict_for_quota(&owner, excess.what, spared).await,
                        ServiceError::OverQuota { owner, excess },
                    )
                }
            };
            if !evicted {
                return Err(refusal);
            }
        }
    }

    /// The sandbox that is not evicted to make room for one with this spec: the source of the snapshot that it is made
    /// from. `coracle cp` reads the files of a dead sandbox in this way and must not remove what it reads.
    fn spared_source(&self, spec: &SandboxSpec) -> Option<SandboxId> {
        self.catalog.snapshots.source_of(spec.snapshot.as_ref()?)
    }

    /// Restarts a dead sandbox. Parked sandboxes of the same owner are evicted if it needs room.
    pub(crate) async fn restart_sandbox(
        &self,
        handle: &Arc<SandboxHandle>,
    ) -> Result<ResumeOutcome, ServiceError> {
        loop {
            match self.send_command(handle, DriverCommand::Restart).await {
                Err(ServiceError::OverQuota { owner, excess })
                    if self.evict_for_quota(&owner, excess.what, Some(&handle.id)).await => {}
                restarted => return restarted,
            }
        }
    }

    /// Refuses a request that would exceed the quota even if the owner had nothing else, since deleting would not help.
    fn check_quota_alone(&self, owner: &Owner, cost: ResourceCost) -> Result<(), ServiceError> {
        match cost.exceeds(&self.config().quotas.quota_of(owner)) {
            Some(excess) => Err(ServiceError::BeyondQuota { owner: owner.clone(), excess }),
            None => Ok(()),
        }
    }

    /// The quota of an owner, minus the disk space that its snapshots and volumes take.
    pub(crate) fn quota_left_by_disks(&self, owner: &Owner) -> OwnerQuota {
        let mut quota = self.config().quotas.quota_of(owner);
        let kept =
            self.catalog.snapshots.size_of(owner).saturating_add(self.catalog.volumes.total_bytes(owner));
        quota.disk = quota.disk.map(|disk| Bytes(disk.0.saturating_sub(kept)));
        quota
    }

    /// Checks whether another sandbox would find room now, before work is done for it. Nothing is reserved; dead and
    /// parked sandboxes count as room because they can be evicted.
    pub(crate) fn check_room_for(
        &self,
        owner: &Owner,
        resources: &ResourceLimits,
    ) -> Result<(), ServiceError> {
        let limit = self.config().sandboxes;
        if self.lifecycle.registry.count() >= limit && !self.has_evictable_at_limit(owner) {
            return Err(ServiceError::TooManySandboxes { limit });
        }
        let own = ResourceCost::from_limits(resources, self.config().default_limits);
        self.check_quota_alone(owner, own)?;
        match self.lifecycle.registry.owner_cost(owner).and(own).exceeds(&self.quota_left_by_disks(owner)) {
            Some(excess) if !self.has_evictable_for_quota(owner, excess.what) => {
                Err(ServiceError::OverQuota { owner: owner.clone(), excess })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn new_record(
        &self,
        owner: &Owner,
        key: Option<&SandboxKey>,
        request: CreateSandboxRequest,
    ) -> Result<SandboxRecord, ServiceError> {
        let now = self.clock.now();
        let timeout = request.timeout.filter(|timeout| !timeout.is_zero());
        let timeout = timeout.map(|timeout| self.check_timeout(timeout)).transpose()?;
        let expires = timeout.map(|timeout| now.after(timeout).ok_or_else(timeout_overflow)).transpose()?;
        let entrypoint = if request.spec.entrypoint.is_idle() { None } else { Some(new_process_id()?) };
        let sandbox = Sandbox {
            id: SandboxId::from_entropy(random_bytes().map_err(io_error("draw a random id"))?),
            owner: owner.clone(),
            origin: request.origin.to_owned(),
            in_force: Enforced { image: request.spec.image.clone(), ..Enforced::default() },
            pool: None,
            name: key.and_then(chosen_name),
            idle_timeout: request.idle_timeout.filter(|limit| !limit.is_zero()),
            spec: request.spec,
            labels: request.labels,
            notes: request.notes,
            phase: Phase::Starting,
            phase_since: now.wall,
            created: now.wall,
            expires: expires.map(|moment| moment.wall),
            files: FilesState::Kept,
        };
        Ok(SandboxRecord {
            sandbox,
            key: key.cloned(),
            timeout,
            expires_boot: expires.map(|moment| moment.boot),
            idle_timeout: request.idle_timeout.filter(|limit| !limit.is_zero()),
            entrypoint,
            epoch: 0,
            boot_id: self.host.boot_id.clone(),
        })
    }

    /// Checks a time to live from now against the longest that this server allows.
    pub(crate) fn check_timeout(&self, timeout: Duration) -> Result<Duration, ServiceError> {
        match self.config().max_timeout {
            Some(longest) if timeout > longest => Err(ServiceError::Invalid(format!(
                "the timeout is longer than {} seconds, the longest this server allows",
                longest.as_secs()
            ))),
            _ => Ok(timeout),
        }
    }
}

/// Whether a create that failed with a warm sandbox may succeed with a new one.
fn should_retry_without_warm(error: &ServiceError) -> bool {
    matches!(error, ServiceError::Backend { .. } | ServiceError::Agent { .. } | ServiceError::Store { .. })
}

fn timeout_overflow() -> ServiceError {
    ServiceError::Invalid("the timeout ends after the latest representable time".to_owned())
}
