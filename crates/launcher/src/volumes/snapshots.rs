//! Snapshots of volumes, and volumes made from them.
//!
//! ```text
//!  btrfs   pool/snapshot-<id>        a read-only subvolume; extents are shared, so neither taking
//!                                    nor restoring one depends on its size
//!  ext4    ext4/snapshots/<id>.img   a copy of the image, by reference if the host's filesystem
//!                                    supports that, otherwise byte by byte
//! ```
//!
//! Both wait for the disk, so they are described here as a [`VolumeCopy`] and executed by a process that
//! may wait. The journal is never included.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use domain::{Bytes, SandboxId, SnapshotId};
use linux::btrfs::{self, SnapshotWrites};
use linux::freeze;

use super::ext4::copy_image;
use super::{DISK_PART, PreparedVolume, VolumeError, VolumeErrorContext, VolumeKind, VolumeStore};

/// The prefix of snapshot names in the pool; no id of a sandbox can begin like this.
pub(super) const SNAPSHOT_PREFIX: &str = "snapshot-";

/// A copy of a volume that will be made.
#[derive(Clone, Debug)]
pub(crate) enum VolumeCopy {
    Subvolume {
        source: PathBuf,
        parent: PathBuf,
        name: String,
        writing: SnapshotWrites,
    },
    Image {
        source: PathBuf,
        target: PathBuf,
        /// The directory at which the image is mounted, if processes may be writing to it.
        mounted: Option<PathBuf>,
    },
}

impl VolumeCopy {
    /// Makes the copy and waits until it is durable. If this fails, there is no partial copy.
    pub(crate) fn run(&self) -> io::Result<()> {
        match self {
            Self::Subvolume { source, parent, name, writing } => {
                btrfs::snapshot_subvolume(File::open(source)?, File::open(parent)?, name, *writing)
            }
            Self::Image { source, target, mounted: None } => copy_via_draft(source, target),
            Self::Image { source, target, mounted: Some(mounted) } => {
                let mounted = File::open(mounted)?;
                freeze::freeze_filesystem(&mounted)?;
                let copied = copy_via_draft(source, target);
                freeze::thaw_filesystem(&mounted)?;
                copied
            }
        }
    }

    /// Returns the number of copied bytes and the total; `None` if no bytes are copied.
    pub(crate) fn progress(&self) -> Option<(Bytes, Bytes)> {
        const BLOCK_SIZE: u64 = 512;
        let size =
            |path: &Path| fs::metadata(path).map_or(0, |facts| facts.blocks().saturating_mul(BLOCK_SIZE));
        match self {
            Self::Subvolume { .. } => None,
            Self::Image { source, target, .. } => {
                let total = size(source);
                let done = size(&draft_path(target)).max(size(target));
                Some((Bytes(done.min(total)), Bytes(total)))
            }
        }
    }
}

/// Copies to a temporary file and renames it to the target when it is complete and durable.
fn copy_via_draft(source: &Path, target: &Path) -> io::Result<()> {
    let draft = draft_path(target);
    copy_image(source, &draft)?;
    File::open(&draft)?.sync_all()?;
    fs::rename(&draft, target)
}

fn draft_path(target: &Path) -> PathBuf {
    target.with_extension("new")
}

impl VolumeStore {
    /// Whether snapshots can be taken of volumes of this kind.
    pub(crate) fn supports_snapshots(&self) -> bool {
        !matches!(self.kind(), VolumeKind::Oneshot | VolumeKind::Tmpfs)
    }

    /// Returns the copy that makes the snapshot `snapshot` of the disk of `id`.
    pub(crate) fn plan_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<VolumeCopy, VolumeError> {
        match self {
            Self::Btrfs(pool) => {
                pool.check_free_space()?;
                Ok(VolumeCopy::Subvolume {
                    source: pool.sandbox_volume(id).disk,
                    parent: pool.root().to_owned(),
                    name: format!("{SNAPSHOT_PREFIX}{snapshot}"),
                    writing: SnapshotWrites::Forbidden,
                })
            }
            Self::Ext4(images) => images.plan_snapshot(id, snapshot),
            Self::Oneshot(_) => Err(VolumeError::OnlyOneshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Begins a volume whose disk will be a copy of a snapshot. Returns the unfinished volume and the
    /// copy that has to be made. [`VolumeStore::finish_restore`] finishes the volume.
    pub(crate) fn plan_restore(
        &mut self,
        snapshot: &SnapshotId,
    ) -> Result<(PreparedVolume, VolumeCopy), VolumeError> {
        match self {
            Self::Btrfs(pool) => {
                let (prepared, parent) = pool.prepare_without_disk()?;
                let source = pool.root().join(format!("{SNAPSHOT_PREFIX}{snapshot}"));
                let copying = VolumeCopy::Subvolume {
                    source,
                    parent,
                    name: DISK_PART.to_owned(),
                    writing: SnapshotWrites::Allowed,
                };
                Ok((prepared, copying))
            }
            Self::Ext4(images) => images.plan_restore(snapshot),
            Self::Oneshot(_) => Err(VolumeError::OnlyOneshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Prepares a volume for assignment after its copy was made.
    pub(crate) fn finish_restore(&mut self, prepared: &PreparedVolume) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(_) => Ok(()),
            Self::Ext4(images) => images.finish_restore(prepared),
            Self::Oneshot(_) => Err(VolumeError::OnlyOneshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Thaws the disk of `id` after an interrupted copy, so that it can be written again.
    pub(crate) fn thaw_disk(&self, id: &SandboxId) -> Result<(), VolumeError> {
        let Self::Ext4(images) = self else { return Ok(()) };
        let Ok(volume) = images.sandbox_volume(id) else { return Ok(()) };
        File::open(&volume.disk).and_then(freeze::thaw_filesystem).during("thaw", &volume.disk)
    }

    /// Removes a snapshot. It is not an error if it does not exist.
    pub(crate) fn remove_snapshot(&mut self, snapshot: &SnapshotId) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.remove_snapshot(&format!("{SNAPSHOT_PREFIX}{snapshot}")),
            Self::Ext4(images) => images.remove_snapshot(snapshot),
            Self::Oneshot(_) | Self::Tmpfs => Ok(()),
        }
    }

    /// Returns the ids of all snapshots, including unfinished copies.
    pub(crate) fn list_snapshots(&self) -> Result<Vec<SnapshotId>, VolumeError> {
        match self {
            Self::Btrfs(pool) => {
                let names = pool.list_names()?;
                let ids = names.iter().filter_map(|name| name.strip_prefix(SNAPSHOT_PREFIX));
                Ok(ids.filter_map(|id| SnapshotId::parse(id).ok()).collect())
            }
            Self::Ext4(images) => images.list_snapshots(),
            Self::Oneshot(_) | Self::Tmpfs => Ok(Vec::new()),
        }
    }

    /// Returns the directory with the files of a snapshot. The caller must be a separate process that
    /// does this once and ends soon: if the files are in an image, it is mounted only for that process.
    pub(crate) fn open_snapshot(&self, snapshot: &SnapshotId) -> Result<PathBuf, VolumeError> {
        match self {
            Self::Btrfs(pool) => Ok(pool.root().join(format!("{SNAPSHOT_PREFIX}{snapshot}"))),
            Self::Ext4(images) => images.open_snapshot(snapshot),
            Self::Oneshot(_) => Err(VolumeError::OnlyOneshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Whether the files that a volume was restored from count against its limit.
    pub(crate) fn counts_restored(&self) -> bool {
        match self {
            Self::Btrfs(pool) => pool.counts_shared(),
            Self::Ext4(_) | Self::Oneshot(_) | Self::Tmpfs => true,
        }
    }
}
