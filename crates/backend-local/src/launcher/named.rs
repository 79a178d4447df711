//! Named volumes in the launcher: they outlive sandboxes.

use std::io;

use domain::volume::Lifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};

use super::protocol::{Refusal, VolumePlan};
use super::{Launcher, Rights, Root};
use crate::jail::step::{JailError, Step};
use crate::volumes::VolumeError;

impl Launcher {
    /// Whether named volumes with a hard limit are supported here.
    pub fn keeps_volumes(&self) -> bool {
        matches!(self.rights, Rights::Root(_))
    }

    pub fn make_volume(&mut self, plan: &VolumePlan) -> Result<(), Refusal> {
        let volume = volume(plan)?;
        let most = self.settings.maxima.disk.map(Bytes);
        let root = self.root()?;
        if let Some(most) = most.or(root.volumes.capacity()).filter(|most| volume.size > *most) {
            let message = format!("a volume of {} is more than the {most} allowed here", volume.size);
            return Err(Refusal::amount(message, format!("name at most {most}")));
        }
        root.volumes.make_named(&volume).map_err(refuse)
    }

    pub fn remove_volume(&mut self, id: &str) -> Result<(), Refusal> {
        self.root()?.volumes.remove_named(id).map_err(refuse)
    }

    pub fn volumes(&self) -> Result<Vec<(VolumePlan, u64)>, Refusal> {
        let Rights::Root(root) = &self.rights else { return Ok(Vec::new()) };
        let found = root.volumes.named().map_err(refuse)?;
        let plan = |volume: Volume| VolumePlan {
            id: volume.id.to_string(),
            owner: volume.owner.as_str().to_owned(),
            name: volume.name.to_string(),
            size: volume.size.0,
            kept: volume.lifetime == Lifetime::Kept,
        };
        Ok(found.into_iter().map(|found| (plan(found.volume), found.used.0)).collect())
    }

    /// Returns the usage of these volumes; those that cannot be read are left out.
    pub fn volumes_hold(&self, ids: Vec<String>) -> Vec<(String, u64)> {
        let Rights::Root(root) = &self.rights else { return Vec::new() };
        let held = |id: String| root.volumes.named_usage(&id).map(|usage| (id, usage.used.0));
        ids.into_iter().filter_map(held).collect()
    }

    fn root(&mut self) -> Result<&mut Root, Refusal> {
        match &mut self.rights {
            Rights::Root(root) => Ok(root),
            Rights::User { .. } => {
                let message = "an ordinary user's server keeps no volumes: nothing would bound their size";
                Err(Refusal::unsupported(message, Some("run the server as root")))
            }
        }
    }
}

/// Checks the plan of a volume. The server is not trusted: the values become names on disk, and other
/// code reads them.
fn volume(plan: &VolumePlan) -> Result<Volume, Refusal> {
    let wrong = |_error| Refusal::unsupported("this is not a volume", None);
    Ok(Volume {
        id: VolumeId::parse(&plan.id).map_err(|error| wrong(error.to_string()))?,
        owner: Owner::parse(&plan.owner).map_err(|error| wrong(error.to_string()))?,
        name: VolumeName::parse(&plan.name).map_err(|error| wrong(error.to_string()))?,
        size: Bytes(plan.size),
        lifetime: if plan.kept { Lifetime::Kept } else { Lifetime::WithSandboxes },
    })
}

fn refuse(error: VolumeError) -> Refusal {
    match &error {
        VolumeError::TooSmall { least, .. } => {
            Refusal::amount(error.to_string(), format!("name at least {}", Bytes(*least)))
        }
        _ => JailError::new(Step::Volume, io::Error::other(error)).into(),
    }
}
