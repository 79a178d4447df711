//! After a restart: compares the volumes in the store with those that the backend has.

use std::collections::HashMap;
use std::sync::Arc;

use backend::FoundVolume;
use domain::{MountSource, Volume, VolumeId, VolumeName};

use crate::ServiceError;
use crate::core::Core;
use crate::error::error_chain;
use crate::store::{SandboxRecord, StoredVolume, VolumeChange};

/// Takes over the volumes of the former server, and their uses.
pub(crate) async fn reconcile_volumes(
    core: &Arc<Core>,
    kept: Vec<StoredVolume>,
    records: &[SandboxRecord],
) -> Result<(), ServiceError> {
    let found = match core.backend.volumes() {
        Some(volumes) => core.ask_volume_backend("list the volumes", volumes.list_volumes()).await?,
        None => Vec::new(),
    };
    let mut found: HashMap<VolumeId, FoundVolume> =
        found.into_iter().map(|found| (found.volume.id.clone(), found)).collect();
    for kept in kept {
        let exists = found.remove(&kept.volume.id).is_some();
        if kept.removing {
            finish_removal(core, &kept.volume.id).await;
        } else if exists {
            core.volumes.add(kept.volume, kept.created, None);
        } else {
            forget_missing(core, &kept.volume).await;
        }
    }
    for (_, stranger) in found {
        adopt_volume(core, stranger.volume).await?;
    }
    for record in records {
        for mount in &record.sandbox.spec.mounts {
            if let MountSource::Volume(id) = &mount.source {
                core.volumes.adopt_use(id, &record.sandbox.id);
            }
        }
    }
    core.remove_unused_volumes(core.volumes.unused_volumes());
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

/// Deletes the row of a volume that the backend does not list. The volume was never made, or it cannot be read now.
/// Nothing else is removed, so that a volume that can be read at a later start is adopted again.
async fn forget_missing(core: &Arc<Core>, volume: &Volume) {
    tracing::error!(volume = %volume.id, name = %volume.name, "volume is missing or cannot be read; deleting its row");
    if let Err(error) = core.record_volume(VolumeChange::Forget(volume.id.clone())).await {
        tracing::warn!(volume = %volume.id, error = %error_chain(&error), "failed to delete the row of a missing volume; the next start retries");
    }
}

/// The backend knows the owner of a volume, so a volume that is missing in the store, for example after a power loss,
/// is not lost.
async fn adopt_volume(core: &Arc<Core>, mut volume: Volume) -> Result<(), ServiceError> {
    tracing::warn!(volume = %volume.id, name = %volume.name, "found a volume that is not in the store; adopting it");
    if core.volumes.find(&volume.owner, &volume.name).is_some() {
        let other = format!("{}-{}", volume.name.as_str().chars().take(230).collect::<String>(), volume.id);
        volume.name = VolumeName::parse(&other).unwrap_or(volume.name);
    }
    let created = crate::clock::truncate_to_micros(core.clock.now().wall);
    let kept = StoredVolume { volume: volume.clone(), created, removing: false };
    core.record_volume(VolumeChange::Insert(kept)).await?;
    core.volumes.add(volume, created, None);
    Ok(())
}
