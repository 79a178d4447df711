//! Named volumes: disks that outlive sandboxes, each with its own hard limit.
//!
//! ```text
//!  <id>/data/   the files for sandboxes, with canonical ids     limited by a quota group or the image's size
//!  <id>/label   the owner and the owner's name for the volume, so that it can be identified later
//! ```
//!
//! A volume is made under a temporary name and renamed when it is complete, and renamed again before
//! it is removed. So a volume with its final name is complete, and everything else is removed at a
//! start. All data is flushed before the rename, because a volume must survive a power loss. A volume
//! that still cannot be read is left in place and only reported in the log.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use backend::FoundVolume;
use domain::volume::VolumeLifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};
use serde::{Deserialize, Serialize};

use super::{DiskUsage, VolumeError, VolumeErrorContext, VolumeStore};

/// The directory that sandboxes see.
pub(super) const DATA_DIRECTORY: &str = "data";
const LABEL_FILE: &str = "label";
/// The largest size of a label.
const MAX_LABEL_SIZE: u64 = 4096;

/// The content of a volume's label file.
#[derive(Serialize, Deserialize)]
struct VolumeLabel {
    owner: String,
    name: String,
    size: u64,
    kept: bool,
}

impl VolumeStore {
    /// Makes a volume. An existing volume is not changed.
    pub(crate) fn make_named(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.make_named(volume),
            Self::Ext4(images) => images.make_named(volume),
            Self::Oneshot(_) => Err(VolumeError::OnlyOneshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Removes a volume with its content. It is not an error if it does not exist.
    pub(crate) fn remove_named(&mut self, id: &VolumeId) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.remove_named(id),
            Self::Ext4(images) => images.remove_named(id),
            Self::Oneshot(_) | Self::Tmpfs => Ok(()),
        }
    }

    /// Returns all complete volumes.
    pub(crate) fn list_named(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.list_named(),
            Self::Ext4(images) => images.list_named(),
            Self::Oneshot(_) | Self::Tmpfs => Ok(Vec::new()),
        }
    }

    /// Returns the usage of a volume, if it exists and can be read.
    pub(crate) fn named_usage(&self, id: &VolumeId) -> Option<DiskUsage> {
        let usage = match self {
            Self::Btrfs(pool) => pool.named_usage(id),
            Self::Ext4(images) => images.named_usage(id),
            Self::Oneshot(_) | Self::Tmpfs => return None,
        };
        usage.ok()
    }

    /// Returns the data directory of a volume, if it exists.
    pub(crate) fn named_data(&self, id: &VolumeId) -> Option<PathBuf> {
        let directory = match self {
            Self::Btrfs(pool) => pool.named_directory(id),
            Self::Ext4(images) => images.named_directory(id)?,
            Self::Oneshot(_) | Self::Tmpfs => return None,
        };
        Some(directory.join(DATA_DIRECTORY)).filter(|data| data.is_dir())
    }
}

/// Writes the label of the volume in `directory` and waits until it is durable.
pub(super) fn write_label(directory: &Path, volume: &Volume) -> Result<(), VolumeError> {
    let label = VolumeLabel {
        owner: volume.owner.as_str().to_owned(),
        name: volume.name.as_str().to_owned(),
        size: volume.size.0,
        kept: volume.lifetime != VolumeLifetime::WithSandboxes,
    };
    let path = directory.join(LABEL_FILE);
    let text = serde_json::to_vec(&label).expect("a label can always be serialised");
    let mut file = fs::File::create(&path).during("make", &path)?;
    file.write_all(&text).and_then(|()| file.sync_all()).during("write", &path)?;
    sync_directory(directory)
}

/// Waits until the names in a directory are durable.
pub(super) fn sync_directory(directory: &Path) -> Result<(), VolumeError> {
    fs::File::open(directory).and_then(|directory| directory.sync_all()).during("flush", directory)
}

/// Logs and skips a volume that cannot be read, so that the others stay usable.
pub(super) fn skip_unreadable<T>(id: &VolumeId, read: Result<T, VolumeError>) -> Option<T> {
    let log =
        |error: &VolumeError| tracing::error!(volume = %id, ?error, "failed to read volume; it is skipped");
    read.inspect_err(log).ok()
}

/// Reads the label of the volume in `directory`.
pub(super) fn read_label(
    directory: &Path,
    id: &VolumeId,
    usage: DiskUsage,
) -> Result<FoundVolume, VolumeError> {
    let path = directory.join(LABEL_FILE);
    let mut text = Vec::new();
    let file = fs::File::open(&path).during("open", &path)?;
    file.take(MAX_LABEL_SIZE).read_to_end(&mut text).during("read", &path)?;
    let unreadable = || VolumeError::Unknown(id.to_string());
    let label: VolumeLabel = serde_json::from_slice(&text).map_err(|_malformed| unreadable())?;
    let volume = Volume {
        id: id.clone(),
        owner: Owner::parse(&label.owner).map_err(|_not_one| unreadable())?,
        name: VolumeName::parse(&label.name).map_err(|_not_one| unreadable())?,
        size: Bytes(label.size),
        lifetime: if label.kept { VolumeLifetime::Kept } else { VolumeLifetime::WithSandboxes },
    };
    Ok(FoundVolume { volume, used: usage.used })
}
