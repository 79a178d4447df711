//! After a restart: compares the volumes in the store with those that the backend has, and does with each what
//! [`crate::reconcile`] decides.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use backend::FoundVolume;
use domain::{MountSource, Volume, VolumeId, VolumeName};

use crate::ServiceError;
use crate::core::Core;
use crate::error::error_chain;
use crate::reconcile::{StoredVolumeState, VolumePlan, plan_volume};
use crate::store::{SandboxRecord, StoredVolume, VolumeChange};

/// Takes over the volumes of the former server, and their uses.
pub(crate) async fn reconcile_volumes(
    core: &Arc<Core>,
    kept: Vec<StoredVolume>,
    records: &[SandboxRecord],
) -> Result<(), ServiceError> {
    let found = match core.host.backend.volumes() {
        Some(volumes) => core.ask_volume_backend("list the volumes", volumes.list_volumes()).await?,
        None => Vec::new(),
    };
    let mut found: HashMap<VolumeId, FoundVolume> =
        found.into_iter().map(|found| (found.volume.id.clone(), found)).collect();
    let mut last_uses = HashMap::new();
    for kept in kept {
        last_uses.insert(kept.volume.id.clone(), kept.unused_since);
        let exists = found.remove(&kept.volume.id).is_some();
        let stored = if kept.removing { StoredVolumeState::Removing } else { StoredVolumeState::Kept };
        reconcile_one(core, kept.volume, kept.created, plan_volume(stored, exists)).await?;
    }
    let now = crate::clock::truncate_to_micros(core.clock.now().wall);
    for (_, stranger) in found {
        let plan = plan_volume(StoredVolumeState::Unknown, true);
        reconcile_one(core, stranger.volume, now, plan).await?;
    }
    for record in records {
        for mount in &record.sandbox.spec.mounts {
            if let MountSource::Volume(id) = &mount.source {
                core.catalog.volumes.adopt_use(id, &record.sandbox.id);
            }
        }
    }
    core.remove_unused_volumes(core.catalog.volumes.unused_volumes());
    schedule_removals(core, last_uses).await;
    Ok(())
}

/// Continues the time for which unused volumes are kept. The boot clock may have begun anew, so the wall clock says how
/// much of it has passed.
async fn schedule_removals(core: &Arc<Core>, last_uses: HashMap<VolumeId, Option<SystemTime>>) {
    let now = core.clock.now();
    for (id, last_use) in last_uses {
        let unused = last_use.and_then(|time| now.wall.duration_since(time).ok()).unwrap_or_default();
        if core.catalog.volumes.schedule_removal(&id, now.boot, unused) && last_use.is_none() {
            core.record_last_use(id, now.wall).await;
        }
    }
}

async fn reconcile_one(
    core: &Arc<Core>,
    volume: Volume,
    created: SystemTime,
    plan: VolumePlan,
) -> Result<(), ServiceError> {
    match plan {
        VolumePlan::Keep => core.catalog.volumes.add(volume, created, None),
        VolumePlan::FinishRemoval => finish_removal(core, &volume.id).await,
        VolumePlan::ForgetRow => forget_missing(core, &volume).await,
        VolumePlan::Adopt => adopt_volume(core, volume, created).await?,
    }
    Ok(())
}

/// Removes the remains of a volume that was being removed.
async fn finish_removal(core: &Arc<Core>, id: &VolumeId) {
    tracing::info!(volume = %id, "found a partly removed volume; removing the rest");
    if let Err(error) = core.drop_volume(id).await {
        // The row stays, so the next start finds it again.
        tracing::error!(volume = %id, error = %error_chain(&error), "failed to remove a partly removed volume; the next start retries");
    }
}

/// Deletes the row of a volume that the backend does not list, and nothing else.
async fn forget_missing(core: &Arc<Core>, volume: &Volume) {
    tracing::error!(volume = %volume.id, name = %volume.name, "volume is missing or cannot be read; deleting its row");
    if let Err(error) = core.record_volume(VolumeChange::Forget(volume.id.clone())).await {
        tracing::warn!(volume = %volume.id, error = %error_chain(&error), "failed to delete the row of a missing volume; the next start retries");
    }
}

/// Adds a volume that only the backend knows, under another name if its owner uses its name for another one.
async fn adopt_volume(core: &Arc<Core>, mut volume: Volume, created: SystemTime) -> Result<(), ServiceError> {
    tracing::warn!(volume = %volume.id, name = %volume.name, "found a volume that is not in the store; adopting it");
    if core.catalog.volumes.find(&volume.owner, &volume.name).is_some() {
        let other = format!("{}-{}", volume.name.as_str().chars().take(230).collect::<String>(), volume.id);
        volume.name = VolumeName::parse(&other).unwrap_or(volume.name);
    }
    let kept = StoredVolume { volume: volume.clone(), created, removing: false, unused_since: None };
    core.record_volume(VolumeChange::Insert(kept)).await?;
    core.catalog.volumes.add(volume, created, None);
    Ok(())
}
