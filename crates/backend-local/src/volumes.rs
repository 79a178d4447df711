//! Volumes that outlive sandboxes: the launcher keeps them, this converts to and from its plans.

use backend::{BackendError, FoundVolume, Volumes};
use domain::volume::VolumeLifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};
use launcher::protocol::{LauncherOp, OpResult, VolumePlan};

use crate::{LocalBackend, unexpected_response};

#[async_trait::async_trait]
impl Volumes for LocalBackend {
    async fn create_volume(&self, volume: &Volume) -> Result<(), BackendError> {
        let plan = VolumePlan {
            id: volume.id.clone(),
            owner: volume.owner.as_str().to_owned(),
            name: volume.name.to_string(),
            size: volume.size.0,
            kept: volume.lifetime != VolumeLifetime::WithSandboxes,
        };
        self.request_result(LauncherOp::MakeVolume(plan)).await.map(drop)
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError> {
        self.request_result(LauncherOp::RemoveVolume { id: id.clone() }).await.map(drop)
    }

    async fn list_volumes(&self) -> Result<Vec<FoundVolume>, BackendError> {
        match self.request_result(LauncherOp::Volumes).await? {
            OpResult::Volumes(found) => {
                Ok(found.into_iter().filter_map(|(plan, used)| found_volume(plan, used)).collect())
            }
            _ => Err(unexpected_response()),
        }
    }

    async fn volume_sizes(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError> {
        let ids = ids.to_vec();
        match self.request_result(LauncherOp::VolumesHold { ids }).await? {
            OpResult::VolumesHold(held) => Ok(held.into_iter().map(|(id, used)| (id, Bytes(used))).collect()),
            _ => Err(unexpected_response()),
        }
    }
}

fn found_volume(plan: VolumePlan, used: u64) -> Option<FoundVolume> {
    let volume = Volume {
        id: plan.id,
        owner: Owner::parse(&plan.owner).ok()?,
        name: VolumeName::parse(&plan.name).ok()?,
        size: Bytes(plan.size),
        lifetime: if plan.kept { VolumeLifetime::Kept } else { VolumeLifetime::WithSandboxes },
    };
    Some(FoundVolume { volume, used: Bytes(used) })
}
