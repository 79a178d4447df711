//! After a restart: compares the volumes that the store remembers with those that the backend has.

use std::collections::HashMap;
use std::sync::Arc;

use backend::FoundVolume;
use domain::{Source, Volume, VolumeId, VolumeName};

use crate::ServiceError;
use crate::core::Core;
use crate::error::chain;
use crate::store::{KeptVolume, Record, VolumeChange};

/// Takes over the volumes of the server that was here before, and who uses them.
pub(crate) async fn settle(
    core: &Arc<Core>,
    kept: Vec<KeptVolume>,
    records: &[Record],
) -> Result<(), ServiceError> {
    let found = core.ask_for_volume("list the volumes", core.backend.volumes()).await?;
    let mut found: HashMap<VolumeId, FoundVolume> =
        found.into_iter().map(|found| (found.volume.id.clone(), found)).collect();
    for kept in kept {
        let there = found.remove(&kept.volume.id).is_some();
        if kept.removing {
            finish(core, &kept.volume.id).await;
        } else if there {
            core.volumes.add(kept.volume, kept.created, None);
        } else {
            forget(core, &kept.volume).await;
        }
    }
    for (_, stranger) in found {
        adopt(core, stranger.volume).await?;
    }
    for record in records {
        for mount in &record.sandbox.spec.mounts {
            if let Source::Volume(id) = &mount.source {
                core.volumes.adopt_use(id, &record.sandbox.id);
            }
        }
    }
    core.remove_unused(core.volumes.unused());
    Ok(())
}

/// Removes what is left of a volume that was being removed.
async fn finish(core: &Arc<Core>, id: &VolumeId) {
    tracing::info!(volume = %id, "a volume was half removed");
    if let Err(error) = core.drop_volume(id).await {
        // Its row stays, so the next start finds it again.
        tracing::error!(volume = %id, error = %chain(&error), "it is removed at the next start");
    }
}

/// Forgets a volume that the backend does not show. It was never made, or it cannot be read now:
/// nothing is removed, so that one that can be read at a later start is known again.
async fn forget(core: &Arc<Core>, volume: &Volume) {
    tracing::error!(volume = %volume.id, name = %volume.name, "a volume is not there, or cannot be read");
    if let Err(error) = core.note_volume(VolumeChange::Forget(volume.id.clone())).await {
        tracing::warn!(volume = %volume.id, error = %chain(&error), "its row stays for now");
    }
}

/// The backend knows whose a volume is, so one that the store has forgotten, as after a power
/// loss, is not lost.
async fn adopt(core: &Arc<Core>, mut volume: Volume) -> Result<(), ServiceError> {
    tracing::warn!(volume = %volume.id, name = %volume.name, "found a volume that nobody knew");
    if core.volumes.find(&volume.owner, &volume.name).is_some() {
        let other = format!("{}-{}", volume.name.as_str().chars().take(230).collect::<String>(), volume.id);
        volume.name = VolumeName::parse(&other).unwrap_or(volume.name);
    }
    let created = crate::clock::whole_micros(core.clock.now().wall);
    let kept = KeptVolume { volume: volume.clone(), created, removing: false };
    core.note_volume(VolumeChange::Insert(kept)).await?;
    core.volumes.add(volume, created, None);
    Ok(())
}
