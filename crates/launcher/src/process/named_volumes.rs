//! Named volumes in the launcher: they outlive sandboxes.

use std::io;

use domain::volume::VolumeLifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};

use super::{LauncherRights, RootState};
use crate::jail::step::{JailError, JailStep};
use crate::protocol::{OpError, VolumePlan};
use crate::volumes::VolumeError;

impl LauncherRights {
    /// Whether named volumes with a hard limit are supported here.
    pub(super) fn supports_named_volumes(&self) -> bool {
        matches!(self, Self::Root(_))
    }

    /// Makes a volume, of at most `most` bytes if the operator limits them.
    pub(super) fn make_volume(&mut self, plan: &VolumePlan, most: Option<Bytes>) -> Result<(), OpError> {
        let volume = parse_volume_plan(plan)?;
        let root = self.require_root()?;
        if let Some(most) = most.or(root.volumes.capacity()).filter(|most| volume.size > *most) {
            let message = format!("a volume of {} is more than the {most} allowed here", volume.size);
            return Err(OpError::amount(message, format!("name at most {most}")));
        }
        root.volumes.make_named(&volume).map_err(volume_op_error)
    }

    pub(super) fn remove_volume(&mut self, id: &VolumeId) -> Result<(), OpError> {
        self.require_root()?.volumes.remove_named(id).map_err(volume_op_error)
    }

    pub(super) fn list_volumes(&self) -> Result<Vec<(VolumePlan, u64)>, OpError> {
        let Self::Root(root) = self else { return Ok(Vec::new()) };
        let found = root.volumes.list_named().map_err(volume_op_error)?;
        let plan = |volume: Volume| VolumePlan {
            id: volume.id,
            owner: volume.owner.as_str().to_owned(),
            name: volume.name.to_string(),
            size: volume.size.0,
            kept: volume.lifetime != VolumeLifetime::WithSandboxes,
        };
        Ok(found.into_iter().map(|found| (plan(found.volume), found.used.0)).collect())
    }

    /// Returns the usage of these volumes; those that cannot be read are left out.
    pub(super) fn volume_usage(&self, ids: Vec<VolumeId>) -> Vec<(VolumeId, u64)> {
        let Self::Root(root) = self else { return Vec::new() };
        let held = |id: VolumeId| root.volumes.named_usage(&id).map(|usage| (id, usage.used.0));
        ids.into_iter().filter_map(held).collect()
    }

    fn require_root(&mut self) -> Result<&mut RootState, OpError> {
        match self {
            Self::Root(root) => Ok(root),
            Self::User { .. } => {
                let message = "an ordinary user's server keeps no volumes: nothing would bound their size";
                Err(OpError::unsupported(message, Some("run the server as root")))
            }
        }
    }
}

/// Checks the plan of a volume. The server is not trusted: the values become names on disk, and other
/// code reads them.
fn parse_volume_plan(plan: &VolumePlan) -> Result<Volume, OpError> {
    let wrong = |_error| OpError::unsupported("this is not a volume", None);
    Ok(Volume {
        id: plan.id.clone(),
        owner: Owner::parse(&plan.owner).map_err(|error| wrong(error.to_string()))?,
        name: VolumeName::parse(&plan.name).map_err(|error| wrong(error.to_string()))?,
        size: Bytes(plan.size),
        lifetime: if plan.kept { VolumeLifetime::Kept } else { VolumeLifetime::WithSandboxes },
    })
}

fn volume_op_error(error: VolumeError) -> OpError {
    match &error {
        VolumeError::TooSmall { least, .. } => {
            OpError::amount(error.to_string(), format!("name at least {}", Bytes(*least)))
        }
        _ => JailError::new(JailStep::Volume, io::Error::other(error)).into(),
    }
}
