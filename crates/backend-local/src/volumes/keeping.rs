//! Snapshots of volumes, and volumes made from them.
//!
//! ```text
//!  btrfs   pool/snapshot-<id>        a read-only subvolume; extents are shared, so neither taking
//!                                    nor restoring one depends on its size
//!  ext4    ext4/snapshots/<id>.img   a copy of the image, by reference if the host's filesystem
//!                                    supports that, otherwise byte by byte
//! ```
//!
//! Both wait for the disk, so they are described here as a [`Copying`] and executed by a process that
//! may wait. The journal is never included.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use domain::{Bytes, SnapshotId};
use linux::btrfs::{self, Writing};
use linux::freeze;

use super::ext4::copy_image;
use super::{DISK, During, Kind, Prepared, VolumeError, Volumes, check_name};

/// The prefix of snapshot names in the pool; no id of a sandbox can begin like this.
pub(super) const SNAPSHOT: &str = "snapshot-";

/// A copy of a volume that will be made.
#[derive(Clone, Debug)]
pub enum Copying {
    Subvolume {
        source: PathBuf,
        parent: PathBuf,
        name: String,
        writing: Writing,
    },
    Image {
        source: PathBuf,
        target: PathBuf,
        /// The directory at which the image is mounted, if processes may be writing to it.
        mounted: Option<PathBuf>,
    },
}

impl Copying {
    /// Makes the copy and waits until it is durable. If this fails, there is no partial copy.
    pub fn run(&self) -> io::Result<()> {
        match self {
            Self::Subvolume { source, parent, name, writing } => {
                btrfs::snapshot_subvolume(File::open(source)?, File::open(parent)?, name, *writing)
            }
            Self::Image { source, target, mounted: None } => copy_whole(source, target),
            Self::Image { source, target, mounted: Some(mounted) } => {
                let mounted = File::open(mounted)?;
                freeze::freeze(&mounted)?;
                let copied = copy_whole(source, target);
                freeze::thaw(&mounted)?;
                copied
            }
        }
    }

    /// Returns the number of copied bytes and the total; `None` if no bytes are copied.
    pub fn progress(&self) -> Option<(Bytes, Bytes)> {
        const BLOCK: u64 = 512;
        let size = |path: &Path| fs::metadata(path).map_or(0, |facts| facts.blocks().saturating_mul(BLOCK));
        match self {
            Self::Subvolume { .. } => None,
            Self::Image { source, target, .. } => {
                let total = size(source);
                let done = size(&draft_of(target)).max(size(target));
                Some((Bytes(done.min(total)), Bytes(total)))
            }
        }
    }
}

/// Copies to a temporary file and renames it to the target when it is complete and durable.
fn copy_whole(source: &Path, target: &Path) -> io::Result<()> {
    let draft = draft_of(target);
    copy_image(source, &draft)?;
    File::open(&draft)?.sync_all()?;
    fs::rename(&draft, target)
}

/// Ids become parts of paths, so nothing that could be a path is one.
fn check_snapshot(id: &str) -> Result<(), VolumeError> {
    SnapshotId::parse(id).map(drop).map_err(|_malformed| VolumeError::BadName(id.to_owned()))
}

fn draft_of(target: &Path) -> PathBuf {
    target.with_extension("new")
}

impl Volumes {
    /// Whether snapshots can be taken of volumes of this kind.
    pub fn can_keep(&self) -> bool {
        self.kind() != Kind::Tmpfs
    }

    /// Returns the copy that makes the snapshot `snapshot` of the disk of `id`.
    pub fn keep(&self, id: &str, snapshot: &str) -> Result<Copying, VolumeError> {
        check_name(id)?;
        check_snapshot(snapshot)?;
        match self {
            Self::Btrfs(pool) => {
                pool.check_room()?;
                Ok(Copying::Subvolume {
                    source: pool.volume(id).disk,
                    parent: pool.root().to_owned(),
                    name: format!("{SNAPSHOT}{snapshot}"),
                    writing: Writing::Forbidden,
                })
            }
            Self::Ext4(images) => images.keep(id, snapshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Begins a volume whose disk will be a copy of a snapshot. Returns the unfinished volume and the
    /// copy that has to be made. [`Volumes::restored`] finishes the volume.
    pub fn restore(&mut self, snapshot: &str) -> Result<(Prepared, Copying), VolumeError> {
        check_snapshot(snapshot)?;
        match self {
            Self::Btrfs(pool) => {
                let (prepared, parent) = pool.prepare_without_disk()?;
                let source = pool.root().join(format!("{SNAPSHOT}{snapshot}"));
                let copying =
                    Copying::Subvolume { source, parent, name: DISK.to_owned(), writing: Writing::Allowed };
                Ok((prepared, copying))
            }
            Self::Ext4(images) => images.restore(snapshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Prepares a volume for assignment after its copy was made.
    pub fn restored(&mut self, prepared: &Prepared) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(_) => Ok(()),
            Self::Ext4(images) => images.restored(prepared),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Thaws the disk of `id` after an interrupted copy, so that it can be written again.
    pub fn thaw(&self, id: &str) -> Result<(), VolumeError> {
        let Self::Ext4(images) = self else { return Ok(()) };
        let Ok(volume) = images.volume(id) else { return Ok(()) };
        File::open(&volume.disk).and_then(freeze::thaw).during("thaw", &volume.disk)
    }

    /// Removes a snapshot. It is not an error if it does not exist.
    pub fn forget(&mut self, snapshot: &str) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.drop_snapshot(&format!("{SNAPSHOT}{snapshot}")),
            Self::Ext4(images) => images.drop_snapshot(snapshot),
            Self::Tmpfs => Ok(()),
        }
    }

    /// Returns the ids of all snapshots, including unfinished copies.
    pub fn snapshots(&self) -> Result<Vec<String>, VolumeError> {
        match self {
            Self::Btrfs(pool) => {
                let names = pool.names()?.into_iter();
                Ok(names.filter_map(|name| name.strip_prefix(SNAPSHOT).map(str::to_owned)).collect())
            }
            Self::Ext4(images) => images.snapshots(),
            Self::Tmpfs => Ok(Vec::new()),
        }
    }

    /// Returns the directory with the files of a snapshot. The caller must be a separate process that
    /// does this once and ends soon: if the files are in an image, it is mounted only for that process.
    pub fn open_snapshot(&self, snapshot: &str) -> Result<PathBuf, VolumeError> {
        check_snapshot(snapshot)?;
        match self {
            Self::Btrfs(pool) => Ok(pool.root().join(format!("{SNAPSHOT}{snapshot}"))),
            Self::Ext4(images) => images.open_snapshot(snapshot),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Whether the files that a volume was restored from count against its limit.
    pub fn counts_restored(&self) -> bool {
        match self {
            Self::Btrfs(pool) => pool.counts_shared(),
            Self::Ext4(_) | Self::Tmpfs => true,
        }
    }
}
