//! Volumes with a name: disks that outlive sandboxes, each with a hard limit of its own.
//!
//! ```text
//!  <id>/data/   what sandboxes see, with canonical ids     bounded: a quota group, or the image's size
//!  <id>/label   whose it is and what its owner calls it, so that it can be known again
//! ```
//!
//! A volume is made under another name and renamed when it is whole, and renamed before it is
//! taken apart. So what has its own name is whole, and everything else is removed at a start. All
//! is on the disk before the rename, since a volume outlives a power loss. One that cannot be read
//! all the same is left where it is, and told to nobody but the log.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use backend::FoundVolume;
use domain::volume::Lifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};
use serde::{Deserialize, Serialize};

use super::{DiskUsage, During, VolumeError, Volumes, check_name};

/// The directory that sandboxes see.
pub(super) const DATA: &str = "data";
const LABEL: &str = "label";
/// No label is longer.
const LONGEST_LABEL: u64 = 4096;

/// What is written beside the data.
#[derive(Serialize, Deserialize)]
struct Label {
    owner: String,
    name: String,
    size: u64,
    kept: bool,
}

impl Volumes {
    /// Makes a volume. One that exists already stays as it is.
    pub fn make_named(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        check_name(volume.id.as_str())?;
        match self {
            Self::Btrfs(pool) => pool.make_named(volume),
            Self::Ext4(images) => images.make_named(volume),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Drops a volume with all it holds. One that is gone already is no error.
    pub fn remove_named(&mut self, id: &str) -> Result<(), VolumeError> {
        check_name(id)?;
        match self {
            Self::Btrfs(pool) => pool.remove_named(id),
            Self::Ext4(images) => images.remove_named(id),
            Self::Tmpfs => Ok(()),
        }
    }

    /// All volumes that are whole.
    pub fn named(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.named(),
            Self::Ext4(images) => images.named(),
            Self::Tmpfs => Ok(Vec::new()),
        }
    }

    /// What a volume holds, if there is such a volume and it can be read.
    pub fn named_usage(&self, id: &str) -> Option<DiskUsage> {
        check_name(id).ok()?;
        let usage = match self {
            Self::Btrfs(pool) => pool.usage_of_named(id),
            Self::Ext4(images) => images.usage_of_named(id),
            Self::Tmpfs => return None,
        };
        usage.ok()
    }

    /// Where the data of a volume is, if there is such a volume.
    pub fn named_data(&self, id: &str) -> Option<PathBuf> {
        check_name(id).ok()?;
        let directory = match self {
            Self::Btrfs(pool) => pool.named_directory(id),
            Self::Ext4(images) => images.named_directory(id)?,
            Self::Tmpfs => return None,
        };
        Some(directory.join(DATA)).filter(|data| data.is_dir())
    }
}

/// Writes down whose the volume in `directory` is, and waits until that cannot be lost.
pub(super) fn write_label(directory: &Path, volume: &Volume) -> Result<(), VolumeError> {
    let label = Label {
        owner: volume.owner.as_str().to_owned(),
        name: volume.name.as_str().to_owned(),
        size: volume.size.0,
        kept: volume.lifetime == Lifetime::Kept,
    };
    let path = directory.join(LABEL);
    let text = serde_json::to_vec(&label).expect("a label is text and numbers");
    let mut file = fs::File::create(&path).during("make", &path)?;
    file.write_all(&text).and_then(|()| file.sync_all()).during("write", &path)?;
    sync(directory)
}

/// Waits until the names in a directory cannot be lost.
pub(super) fn sync(directory: &Path) -> Result<(), VolumeError> {
    fs::File::open(directory).and_then(|directory| directory.sync_all()).during("flush", directory)
}

/// Leaves out a volume that cannot be read: it must not keep anybody from all the others.
pub(super) fn readable<T>(id: &str, read: Result<T, VolumeError>) -> Option<T> {
    let complain = |error: &VolumeError| tracing::error!(volume = id, ?error, "a volume cannot be read");
    read.inspect_err(complain).ok()
}

/// Reads the volume in `directory` back.
pub(super) fn read(directory: &Path, id: &str, usage: DiskUsage) -> Result<FoundVolume, VolumeError> {
    let path = directory.join(LABEL);
    let mut text = Vec::new();
    let file = fs::File::open(&path).during("open", &path)?;
    file.take(LONGEST_LABEL).read_to_end(&mut text).during("read", &path)?;
    let unreadable = || VolumeError::Unknown(id.to_owned());
    let label: Label = serde_json::from_slice(&text).map_err(|_malformed| unreadable())?;
    let volume = Volume {
        id: VolumeId::parse(id).map_err(|_not_one| unreadable())?,
        owner: Owner::parse(&label.owner).map_err(|_not_one| unreadable())?,
        name: VolumeName::parse(&label.name).map_err(|_not_one| unreadable())?,
        size: Bytes(label.size),
        lifetime: if label.kept { Lifetime::Kept } else { Lifetime::WithSandboxes },
    };
    Ok(FoundVolume { volume, used: usage.used })
}
