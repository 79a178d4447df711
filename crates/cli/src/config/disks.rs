//! `disks`: the kind of storage that the disks of sandboxes and volumes have.

use anyhow::{Result, bail};
use launcher::VolumeKind;
use serde::{Deserialize, Serialize};

/// How the disks of sandboxes and volumes are stored, as root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskStorage {
    /// As those that exist; for a new state directory the best that the kernel supports.
    Auto,
    Btrfs,
    Ext4,
}

impl DiskStorage {
    pub(super) fn parse(text: Option<&str>) -> Result<Self> {
        match text {
            None | Some("auto") => Ok(Self::Auto),
            Some("btrfs") => Ok(Self::Btrfs),
            Some("ext4") => Ok(Self::Ext4),
            Some(other) => bail!("`disks` is `{other}`, which is none of `auto`, `btrfs` and `ext4`"),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Btrfs => "btrfs",
            Self::Ext4 => "ext4",
        }
    }

    /// The kind that the launcher must use; `None` if it decides.
    pub(crate) fn required_kind(self) -> Option<VolumeKind> {
        match self {
            Self::Auto => None,
            Self::Btrfs => Some(VolumeKind::Btrfs),
            Self::Ext4 => Some(VolumeKind::Ext4),
        }
    }
}
