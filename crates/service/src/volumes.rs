//! Volumes that outlive sandboxes: their owners, the sandboxes that use them, and their removal.
//!
//! ```text
//!  a claim (a name) ─► the volume, made if absent ─► a use by one sandbox ─► the sandbox ends
//! ```
//! A volume in use is never removed. A volume whose lifetime is that of its sandboxes is removed when the last of them
//! has ended, and one that is kept for a time after its last use when that has passed. The store is written before the backend acts, so that after a crash either both know a volume or the
//! incomplete one is removed.

mod index;
mod reconcile;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use backend::BackendError;
use domain::volume::{MissingVolume, VolumeClaim, VolumeLifetime};
use domain::{Bytes, MountSource, MountSpec, Owner, SandboxId, Volume, VolumeId, VolumeName};

use crate::clock;
use crate::core::Core;
use crate::error::error_chain;
use crate::sandboxes::driver::DriverCommand;
use crate::store::{StoredVolume, VolumeChange};
use crate::tenancy::quota::{QuotaExcess, QuotaResource};
use crate::tenancy::tokens::random_bytes;
use crate::{Outcome, ServiceError};

pub(crate) use index::VolumeIndex;
use index::{BegunUse, UnusedVolumes, VolumeAvailability, VolumeLookup};
pub(crate) use reconcile::reconcile_volumes;

/// How long a backend may take to make or remove a volume.
const VOLUME_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a claim waits for a volume of the same name to be removed.
const REMOVAL_WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of a volume at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    pub volume: Volume,
    pub created: SystemTime,
    /// The sandboxes that use the volume.
    pub sandboxes: Vec<SandboxId>,
    /// How many bytes it holds, if the backend reports that.
    pub used: Option<Bytes>,
}

/// The result of a request to make a volume.
struct MadeVolume {
    volume: Volume,
    outcome: Outcome,
    /// The use of a volume that was made for a sandbox. It is part of the answer, so that the use ends when the caller
    /// no longer waits for it.
    uses: Option<VolumeUses>,
}

/// The volumes that a sandbox is about to use. Dropping this releases them, unless [`VolumeUses::keep_until_end`] was called.
pub(crate) struct VolumeUses {
    core: Arc<Core>,
    sandbox: SandboxId,
    /// Only volumes that the sandbox did not use before.
    volumes: Vec<VolumeId>,
}

impl VolumeUses {
    /// From here on the volumes are released when the sandbox ends.
    pub(crate) fn keep_until_end(mut self) {
        self.volumes.clear();
    }

    /// Takes over the volumes of another value for the same sandbox.
    fn absorb(&mut self, mut other: Self) {
        self.volumes.append(&mut other.volumes);
    }
}

impl Drop for VolumeUses {
    fn drop(&mut self) {
        if !self.volumes.is_empty() {
            self.core.end_volume_uses(&self.sandbox, Some(&self.volumes));
        }
    }
}

/// Volumes that are kept while a dead sandbox is replaced.
pub(crate) struct HeldVolumes {
    core: Arc<Core>,
    holder: SandboxId,
}

impl Drop for HeldVolumes {
    fn drop(&mut self) {
        self.core.release_volumes(&self.holder);
    }
}

impl Core {
    /// Resolves claims to volumes, which the sandbox uses from now on.
    pub(crate) async fn claim_volumes(
        self: &Arc<Self>,
        owner: &Owner,
        sandbox: &SandboxId,
        mounts: &mut [MountSpec],
    ) -> Result<VolumeUses, ServiceError> {
        let mut uses = VolumeUses { core: Arc::clone(self), sandbox: sandbox.clone(), volumes: Vec::new() };
        for mount in mounts {
            match &mount.source {
                MountSource::Host(_) | MountSource::Reserved { .. } => {}
                MountSource::Claim(claim) => {
                    mount.source =
                        MountSource::Volume(self.claim_volume(owner, claim.clone(), &mut uses).await?);
                }
                // A volume of another sandbox whose spec was copied.
                MountSource::Volume(id) => {
                    let begun = self.catalog.volumes.use_by_id(owner, id, sandbox)?;
                    self.record_use(id.clone(), begun, &mut uses).await?;
                }
            }
        }
        Ok(uses)
    }

    async fn claim_volume(
        self: &Arc<Self>,
        owner: &Owner,
        claim: VolumeClaim,
        uses: &mut VolumeUses,
    ) -> Result<VolumeId, ServiceError> {
        loop {
            if let VolumeLookup::Used { id, begun } =
                self.use_volume(owner, &claim.name, &uses.sandbox).await?
            {
                self.record_use(id.clone(), begun, uses).await?;
                return Ok(id);
            }
            let MissingVolume::Make { size, lifetime } = claim.absent else {
                return Err(no_volume(&claim.name));
            };
            let made = self.make_volume(owner, &claim.name, size, lifetime, Some(&uses.sandbox)).await?;
            if let Some(own) = made.uses {
                uses.absorb(own);
                return Ok(made.volume.id);
            }
            // Another request made it meanwhile.
        }
    }

    /// Records that a sandbox has begun to use a volume. The stored time of its last use is deleted before the sandbox is
    /// made: after a crash the volume must not be removed because of an earlier use.
    async fn record_use(
        &self,
        id: VolumeId,
        begun: BegunUse,
        uses: &mut VolumeUses,
    ) -> Result<(), ServiceError> {
        if begun.new {
            uses.volumes.push(id.clone());
        }
        if begun.was_due {
            self.record_volume(VolumeChange::Used(id)).await?;
        }
        Ok(())
    }

    /// Makes a sandbox use the volume of this name, if there is one. If it is being removed, this waits for a limited
    /// time: then a new volume can have its name.
    async fn use_volume(
        &self,
        owner: &Owner,
        name: &VolumeName,
        sandbox: &SandboxId,
    ) -> Result<VolumeLookup, ServiceError> {
        match self.catalog.volumes.use_by_name(owner, name, sandbox) {
            Err(going @ ServiceError::VolumeRemoving(_)) => {
                // The remover holds the turn. If the volume is still closed afterwards, its removal failed.
                let turn = tokio::time::timeout(REMOVAL_WAIT_TIMEOUT, self.catalog.volumes.turn.lock()).await;
                let _turn = turn.map_err(|_elapsed| going)?;
                self.catalog.volumes.use_by_name(owner, name, sandbox)
            }
            taken => taken,
        }
    }

    /// Makes a volume, or finds an existing one. Once begun it is finished even if the caller disconnects.
    async fn make_volume(
        self: &Arc<Self>,
        owner: &Owner,
        name: &VolumeName,
        size: Option<Bytes>,
        lifetime: VolumeLifetime,
        user: Option<&SandboxId>,
    ) -> Result<MadeVolume, ServiceError> {
        if !self.host.capabilities.volumes {
            return Err(self.volumes_unsupported());
        }
        let entropy =
            random_bytes().map_err(|source| ServiceError::Io { action: "draw a random id", source })?;
        let size = size.unwrap_or(self.config().volume_size);
        let (owner, name) = (owner.clone(), name.clone());
        let volume = Volume { id: VolumeId::from_entropy(entropy), owner, name, size, lifetime };
        let (core, user) = (Arc::clone(self), user.cloned());
        let work = self.tasks.spawn(async move { core.finish_making(volume, user).await });
        work.await.unwrap_or(Err(ServiceError::Stopping))
    }

    async fn finish_making(
        self: Arc<Self>,
        volume: Volume,
        user: Option<SandboxId>,
    ) -> Result<MadeVolume, ServiceError> {
        let _turn = self.catalog.volumes.turn.lock().await;
        if let Some(there) = self.catalog.volumes.find(&volume.owner, &volume.name) {
            return Ok(MadeVolume { volume: there, outcome: Outcome::Unchanged, uses: None });
        }
        self.check_volume_quota(&volume)?;
        let created = clock::truncate_to_micros(self.clock.now().wall);
        let kept = StoredVolume { volume: volume.clone(), created, removing: false, unused_since: None };
        self.record_volume(VolumeChange::Insert(kept)).await?;
        let make = async { self.host.backend.required_volumes()?.create_volume(&volume).await };
        let made = self.ask_volume_backend("make a volume", make).await;
        if let Err(error) = made {
            self.drop_volume(&volume.id).await.inspect_err(|why| {
                tracing::warn!(volume = %volume.id, error = %error_chain(why), "failed to remove an incomplete volume; the next start retries")
            }).ok();
            return Err(error);
        }
        tracing::info!(volume = %volume.id, name = %volume.name, size = %volume.size, "volume made");
        self.catalog.volumes.add(volume.clone(), created, user.clone());
        let volumes = vec![volume.id.clone()];
        let uses = user.map(|sandbox| VolumeUses { core: Arc::clone(&self), sandbox, volumes });
        Ok(MadeVolume { volume, outcome: Outcome::Done, uses })
    }

    /// Removes an unused volume, and finishes that even if the caller disconnects.
    async fn remove_volume(self: &Arc<Self>, id: VolumeId) -> Result<(), ServiceError> {
        let core = Arc::clone(self);
        let work = self.tasks.spawn(async move { core.finish_removing(&id).await });
        work.await.unwrap_or(Err(ServiceError::Stopping))
    }

    async fn finish_removing(self: Arc<Self>, id: &VolumeId) -> Result<(), ServiceError> {
        let _turn = self.catalog.volumes.turn.lock().await;
        match self.catalog.volumes.close(id) {
            VolumeAvailability::Gone => return Ok(()),
            VolumeAvailability::Used(volume, count) => {
                return Err(ServiceError::VolumeInUse { name: volume.name, sandboxes: count });
            }
            VolumeAvailability::Closed => {}
        }
        self.remove_closed(id).await
    }

    /// Removes the volumes that were unused for as long as they are kept.
    pub(crate) fn remove_due_volumes(self: &Arc<Self>, now: Duration) {
        for id in self.catalog.volumes.take_due(now) {
            let core = Arc::clone(self);
            self.tasks.spawn(async move {
                let _turn = core.catalog.volumes.turn.lock().await;
                if !core.catalog.volumes.close_due(&id) {
                    return;
                }
                tracing::info!(volume = %id, "volume was not used for as long as it is kept; removing it");
                if let Err(error) = core.remove_closed(&id).await {
                    tracing::warn!(volume = %id, error = %error_chain(&error), "failed to remove an unused volume; the next start retries");
                }
            });
        }
    }

    /// Removes a volume that no sandbox can begin to use.
    async fn remove_closed(&self, id: &VolumeId) -> Result<(), ServiceError> {
        self.drop_volume(id).await?;
        self.catalog.volumes.forget(id);
        tracing::info!(volume = %id, "volume removed");
        Ok(())
    }

    /// Removes a volume, and records that intent first.
    async fn drop_volume(&self, id: &VolumeId) -> Result<(), ServiceError> {
        self.record_volume(VolumeChange::Remove(id.clone())).await?;
        let remove = async { self.host.backend.required_volumes()?.remove_volume(id).await };
        self.ask_volume_backend("remove a volume", remove).await?;
        self.record_volume(VolumeChange::Forget(id.clone())).await
    }

    /// Has unused volumes removed whose lifetime is that of their sandboxes.
    pub(crate) fn remove_unused_volumes(self: &Arc<Self>, unused: Vec<VolumeId>) {
        for id in unused {
            let core = Arc::clone(self);
            self.tasks.spawn(async move {
                if let Err(error) = Arc::clone(&core).finish_removing(&id).await {
                    tracing::warn!(volume = %id, error = %error_chain(&error), "failed to remove an unused volume; the next start retries");
                }
            });
        }
    }

    /// Ends all uses of volumes by a sandbox that has ended.
    pub(crate) fn release_volumes(self: &Arc<Self>, sandbox: &SandboxId) {
        self.end_volume_uses(sandbox, None);
    }

    /// Ends uses of volumes by a sandbox, of all or of the given ones, and has those removed that no longer exist without
    /// it.
    fn end_volume_uses(self: &Arc<Self>, sandbox: &SandboxId, only: Option<&[VolumeId]>) {
        let now = self.clock.now();
        let UnusedVolumes { remove, keep } = self.catalog.volumes.end_uses(sandbox, only, now.boot);
        self.remove_unused_volumes(remove);
        if !keep.is_empty() {
            self.lifecycle.schedule.wake_reaper();
            let core = Arc::clone(self);
            self.tasks.spawn(async move {
                // A volume that is used again has no time of its last use.
                for id in keep.into_iter().filter(|id| core.catalog.volumes.is_due(id)) {
                    core.record_last_use(id, now.wall).await;
                }
            });
        }
    }

    /// Stores the time of a volume's last use. If that fails, the time of the next start is used instead.
    async fn record_last_use(&self, id: VolumeId, wall: SystemTime) {
        if let Err(error) = self.record_volume(VolumeChange::Unused(id.clone(), wall)).await {
            tracing::warn!(volume = %id, error = %error_chain(&error), "failed to store when a volume was last used; it is kept longer after a restart");
        }
    }

    /// Keeps the volumes of a sandbox that is being replaced until the result is dropped, so that its successor finds
    /// them.
    pub(crate) fn hold_volumes(self: &Arc<Self>, sandbox: &SandboxId) -> Result<HeldVolumes, ServiceError> {
        let entropy =
            random_bytes().map_err(|source| ServiceError::Io { action: "draw a random id", source })?;
        let holder = SandboxId::from_entropy(entropy);
        self.catalog.volumes.share_uses(sandbox, &holder);
        Ok(HeldVolumes { core: Arc::clone(self), holder })
    }

    fn check_volume_quota(&self, volume: &Volume) -> Result<(), ServiceError> {
        let limit = self.config().volumes_per_owner;
        if self.catalog.volumes.count(&volume.owner) >= limit {
            return Err(ServiceError::TooManyVolumes { limit });
        }
        let Some(most) = self.config().quotas.quota_of(&volume.owner).disk else { return Ok(()) };
        let parts = [
            self.lifecycle.registry.owner_cost(&volume.owner).disk,
            self.catalog.snapshots.size_of(&volume.owner),
            self.catalog.volumes.total_bytes(&volume.owner),
            volume.size.0,
        ];
        let sum = parts.into_iter().fold(0, u64::saturating_add);
        let owner = volume.owner.clone();
        if volume.size > most {
            let excess = QuotaExcess::new(QuotaResource::Disk, volume.size, most);
            return Err(ServiceError::BeyondQuota { owner, excess });
        }
        if sum > most.0 {
            let excess = QuotaExcess::new(QuotaResource::Disk, Bytes(sum), most);
            return Err(ServiceError::OverQuota { owner, excess });
        }
        Ok(())
    }

    async fn record_volume(&self, change: VolumeChange) -> Result<(), ServiceError> {
        let failed = |source| ServiceError::Store { action: "record a volume", source };
        self.store.change_volume(change).await.map_err(failed)
    }

    pub(crate) async fn ask_volume_backend<T>(
        &self,
        action: &'static str,
        work: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, ServiceError> {
        let late = || {
            let source = std::io::ErrorKind::TimedOut.into();
            BackendError::Io { action: "finish in time", source }
        };
        let done = tokio::time::timeout(VOLUME_TIMEOUT, work).await.unwrap_or_else(|_elapsed| Err(late()));
        let backend = self.host.backend.name();
        done.map_err(|source| ServiceError::VolumeWork { backend, action, source: Box::new(source) })
    }

    /// The refusal to attach, before a volume is made for it.
    fn attach_unsupported(&self, id: &SandboxId) -> ServiceError {
        let message = "this server cannot mount into a running sandbox".to_owned();
        let hint = Some("name the mounts when the sandbox is created".to_owned());
        let source = Box::new(BackendError::Unsupported { message, hint });
        ServiceError::Backend {
            backend: self.host.backend.name(),
            action: "attach to",
            id: id.clone(),
            source,
        }
    }

    fn volumes_unsupported(&self) -> ServiceError {
        let message = "this server has no volumes, because it cannot limit their size".to_owned();
        let source = BackendError::Unsupported { message, hint: Some("run the server as root".to_owned()) };
        let (backend, action) = (self.host.backend.name(), "make a volume");
        ServiceError::VolumeWork { backend, action, source: Box::new(source) }
    }
}

fn no_volume(name: &VolumeName) -> ServiceError {
    ServiceError::NoVolume(name.clone())
}

impl crate::Service {
    /// Makes a volume. An existing volume of the same size is returned; another size is a conflict.
    pub async fn create_volume(
        &self,
        owner: &Owner,
        name: &VolumeName,
        size: Option<Bytes>,
    ) -> Result<(VolumeStatus, Outcome), ServiceError> {
        let made = self.0.make_volume(owner, name, size, VolumeLifetime::Kept, None).await;
        let MadeVolume { volume, outcome, .. } =
            made.inspect_err(self.0.record_failure("create a volume", owner, None))?;
        if size.is_some_and(|size| size != volume.size) {
            return Err(ServiceError::VolumeExists(name.clone()));
        }
        Ok((self.find_volume(owner, name).await?, outcome))
    }

    pub async fn find_volume(&self, owner: &Owner, name: &VolumeName) -> Result<VolumeStatus, ServiceError> {
        let mut statuses = self.0.catalog.volumes.list(owner);
        statuses.retain(|status| status.volume.name == *name);
        self.measure_volumes(statuses).await?.pop().ok_or_else(|| no_volume(name))
    }

    /// All volumes of an owner, sorted by name.
    pub async fn list_volumes(&self, owner: &Owner) -> Result<Vec<VolumeStatus>, ServiceError> {
        self.measure_volumes(self.0.catalog.volumes.list(owner)).await
    }

    /// Adds how many bytes the volumes hold. Only these volumes are measured: other owners may have many.
    pub(crate) async fn measure_volumes(
        &self,
        mut statuses: Vec<VolumeStatus>,
    ) -> Result<Vec<VolumeStatus>, ServiceError> {
        let ids: Vec<VolumeId> = statuses.iter().map(|status| status.volume.id.clone()).collect();
        if ids.is_empty() {
            return Ok(statuses);
        }
        let measure = async { self.0.host.backend.required_volumes()?.volume_sizes(&ids).await };
        let held = self.0.ask_volume_backend("measure volumes", measure).await?;
        let held: HashMap<VolumeId, Bytes> = held.into_iter().collect();
        for status in &mut statuses {
            status.used = held.get(&status.volume.id).copied();
        }
        Ok(statuses)
    }

    /// Removes a volume with its content. A volume that a sandbox uses is refused.
    pub async fn remove_volume(&self, owner: &Owner, name: &VolumeName) -> Result<(), ServiceError> {
        let id = self.0.catalog.volumes.find_id(owner, name).ok_or_else(|| no_volume(name))?;
        self.0.remove_volume(id).await.inspect_err(self.0.record_failure("remove a volume", owner, None))
    }
}

impl crate::SandboxRef {
    /// Makes mounts visible inside a living sandbox: all of them, or none.
    pub async fn attach_mounts(&self, mut mounts: Vec<MountSpec>) -> Result<crate::Sandbox, ServiceError> {
        if !self.core.host.capabilities.attach {
            return Err(self.core.attach_unsupported(self.id()));
        }
        let uses = self.core.claim_volumes(self.owner(), self.id(), &mut mounts).await?;
        let (core, handle) = (Arc::clone(&self.core), Arc::clone(&self.handle));
        // Once ordered, the mounts are added and the volumes are in use, even if the caller disconnects.
        let work = self.core.tasks.spawn(async move {
            let attached = core.send_command(&handle, |answer| DriverCommand::Attach(mounts, answer)).await;
            attached.inspect(|_| uses.keep_until_end())
        });
        let attached = work.await.unwrap_or(Err(ServiceError::Stopping));
        attached.inspect_err(self.record_failure("attach"))
    }
}
