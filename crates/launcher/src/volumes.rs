//! The disk of a sandbox: a volume with a hard limit, made in advance and removed as a whole.
//!
//! ```text
//!  <id>/disk/      root.upper root.work usr.upper usr.work ...   limited by the sandbox's limit
//!  <id>/journal/   the output of its commands                    limited separately (btrfs)
//! ```
//!
//! A server uses a btrfs pool or, without btrfs, an image for each sandbox. `coracle run` has a single sandbox and
//! uses images in turns: see [`oneshot`].
//!
//! Ids on disk are canonical (0 to 65535): the launcher mounts a volume idmapped, so it fits any
//! sandbox. In a plain btrfs directory a sandbox could make subvolumes, to which no limit applies. A
//! sandbox uses its disk only through an overlay. Named volumes and the journal are not behind an
//! overlay, so the system call filters refuse all btrfs operations. Named volumes outlive sandboxes:
//! see [`named`].
//!
//! Everything is mounted in the caller's mount namespace, which must be private. This module is
//! synchronous and belongs to the launcher.

pub(crate) mod copied_disks;
mod ext4;
pub(crate) mod named;
mod oneshot;
mod pool;
mod pool_file;
mod snapshots;

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use domain::{Bytes, SandboxId};
use serde::{Deserialize, Serialize};

use ext4::Ext4Images;
use oneshot::OneshotImages;
use pool::BtrfsPool;

pub(crate) use ext4::copy_image;
pub(crate) use snapshots::VolumeCopy;

/// The file with the pool, in the directory of all volumes.
pub(crate) const POOL_FILE: &str = "pool.btrfs";
/// The part of a volume that holds the layers.
const DISK_PART: &str = "disk";
/// The part that holds the output of commands.
const JOURNAL_PART: &str = "journal";
/// The name prefix of volumes that belong to no sandbox yet; no id can begin like this.
const PREPARED_PREFIX: &str = "prepared-";

/// All volumes of one state directory.
#[derive(Debug)]
pub(crate) enum VolumeStore {
    /// A subvolume with a quota for each sandbox.
    Btrfs(BtrfsPool),
    /// An image file of the limit's size for each sandbox.
    Ext4(Ext4Images),
    /// An image file that is used again and again, for a process with a single sandbox.
    Oneshot(OneshotImages),
    /// Nothing on disk: the jail mounts a sized tmpfs, charged to the sandbox's memory.
    Tmpfs,
}

/// Settings for storing volumes.
#[derive(Clone, Debug)]
pub(crate) struct VolumeStoreSettings {
    /// A kind that is set is never replaced by another; `None` selects the kind of the volumes that exist, or else the
    /// best that the kernel supports.
    pub kind: Option<VolumeKind>,
    /// The size that the pool may grow to; by default 80 % of the free space, at most 64 GiB.
    pub pool: Option<Bytes>,
    /// New volumes are refused while the host has less free space than this.
    pub floor: Bytes,
    /// The trees for which a prepared volume has directories.
    pub trees: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeKind {
    Btrfs,
    Ext4,
    /// For a process with a single sandbox, without snapshots and named volumes. Where it cannot be used, the best
    /// of the others takes its place.
    Oneshot,
    Tmpfs,
}

/// A volume that belongs to no sandbox yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PreparedVolume {
    name: String,
    limit: Bytes,
}

/// The volume of a sandbox, as paths in the launcher's mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxVolume {
    pub disk: PathBuf,
    /// `None` if the output of commands is kept in memory.
    pub journal: Option<PathBuf>,
}

/// The usage and the limit of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskUsage {
    pub used: Bytes,
    pub limit: Bytes,
}

#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("`{path}` has {} free, less than the minimum of {}", Bytes(*free).human_readable(), Bytes(*floor).human_readable())]
    NoRoom { path: PathBuf, free: u64, floor: u64 },
    #[error("this kernel does not support btrfs")]
    NoBtrfs,
    #[error("could not mount the pool `{path}`")]
    BadPool { path: PathBuf, source: io::Error },
    #[error("`mkfs.ext4` is not installed on this host")]
    NoFormatter,
    #[error("`mkfs.ext4` failed: {0}")]
    Format(String),
    #[error("a disk of {} is less than the {} that a file system takes", Bytes(*limit), Bytes(*least))]
    TooSmall { limit: u64, least: u64 },
    #[error("volume `{0}` does not exist")]
    Unknown(String),
    #[error("this host has no volumes on disk")]
    OnlyMemory,
    #[error("the disk of a single command has no snapshots and no named volumes")]
    OnlyOneshot,
    #[error("a disk that is restored from an image of {image} bytes cannot have a limit of {limit}")]
    OtherSize { limit: u64, image: u64 },
    #[error("a volume that is an image file cannot be resized")]
    FixedSize,
    #[error("`disks` requires {}, but `{path}` has {}", kind_words(*required), kind_words(*found))]
    OtherKind { path: PathBuf, required: VolumeKind, found: VolumeKind },
}

/// How an error names a kind of volumes.
fn kind_words(kind: VolumeKind) -> &'static str {
    match kind {
        VolumeKind::Btrfs => "a btrfs pool",
        VolumeKind::Ext4 => "ext4 images",
        VolumeKind::Oneshot => "images of single commands",
        VolumeKind::Tmpfs => "memory",
    }
}

impl Default for VolumeStoreSettings {
    fn default() -> Self {
        let trees = ["root", "usr"].map(str::to_owned).to_vec();
        Self { kind: None, pool: None, floor: Bytes::from_mib(1024), trees }
    }
}

impl VolumeError {
    /// Returns advice for the operator.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoRoom { .. } => Some("free some space, or lower the floor in the configuration"),
            Self::NoFormatter => Some("install e2fsprogs, or load the btrfs module"),
            Self::NoBtrfs => {
                Some("load the btrfs module, or use a new state directory with `disks` as `ext4`")
            }
            Self::OtherKind { .. } => {
                Some("set `disks` to `auto`, which uses the disks that exist, or use a new state directory")
            }
            Self::BadPool { .. } => Some(
                "restore the file, or move it away: it contains snapshots, all volumes and disks of sandboxes",
            ),
            Self::OtherSize { .. } => Some("leave the disk limit out, or use the one of the snapshot"),
            _ => None,
        }
    }
}

/// The kind of the volumes in a directory; `None` if it has none. If it has both kinds, the pool is used, as earlier
/// versions did.
fn existing_kind(dir: &Path) -> Result<Option<VolumeKind>, VolumeError> {
    if pool_file::was_mounted(&dir.join(POOL_FILE))? || pool::holds_volumes(dir)? {
        return Ok(Some(VolumeKind::Btrfs));
    }
    Ok(ext4::holds_volumes(dir)?.then_some(VolumeKind::Ext4))
}

impl VolumeStore {
    /// Opens the volumes stored in `dir` and mounts them where necessary. Volumes that a killed launcher
    /// left are adopted; those that were only prepared are removed.
    pub(crate) fn open(dir: &Path, settings: VolumeStoreSettings) -> Result<Self, VolumeError> {
        if settings.kind == Some(VolumeKind::Tmpfs) {
            return Ok(Self::Tmpfs);
        }
        make_directory(dir, 0o700)?;
        let kind = match (settings.kind, existing_kind(dir)?) {
            (None, found) => found,
            // Without this, the server would start without the disks that it has.
            (Some(required @ (VolumeKind::Btrfs | VolumeKind::Ext4)), Some(found)) if required != found => {
                return Err(VolumeError::OtherKind { path: dir.to_owned(), required, found });
            }
            (required, _) => required,
        };
        match kind {
            Some(VolumeKind::Ext4) => Ext4Images::open(dir, settings).map(Self::Ext4),
            Some(VolumeKind::Oneshot) => match OneshotImages::open(dir, settings.clone()) {
                Ok(images) => Ok(Self::Oneshot(images)),
                Err(error) => {
                    tracing::debug!(?error, "failed to mount an ext4 image; another kind of disk is used");
                    Self::open(dir, VolumeStoreSettings { kind: None, ..settings })
                }
            },
            Some(VolumeKind::Btrfs | VolumeKind::Tmpfs) | None => {
                let may_be_ext4 = settings.kind.is_none() && (kind.is_none() || ext4::holds_volumes(dir)?);
                match BtrfsPool::open(dir, settings.clone()) {
                    Err(VolumeError::NoBtrfs) if may_be_ext4 => {
                        Ext4Images::open(dir, settings).map(Self::Ext4)
                    }
                    pool => pool.map(Self::Btrfs),
                }
            }
        }
    }

    /// The kind of these volumes.
    pub(crate) fn kind(&self) -> VolumeKind {
        match self {
            Self::Btrfs(_) => VolumeKind::Btrfs,
            Self::Ext4(_) => VolumeKind::Ext4,
            Self::Oneshot(_) => VolumeKind::Oneshot,
            Self::Tmpfs => VolumeKind::Tmpfs,
        }
    }

    /// Returns the capacity for all volumes together; the sum of their limits may exceed it.
    pub(crate) fn capacity(&self) -> Option<Bytes> {
        let directory = match self {
            Self::Btrfs(pool) => pool.root(),
            Self::Ext4(images) => images.directory(),
            Self::Oneshot(images) => images.directory(),
            Self::Tmpfs => return None,
        };
        let status = rustix::fs::statvfs(directory).ok()?;
        Some(Bytes(status.f_blocks.saturating_mul(status.f_frsize)))
    }

    /// Makes a new volume with its directories, ready to be assigned.
    pub(crate) fn prepare(&mut self, limit: Bytes) -> Result<PreparedVolume, VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.prepare(limit),
            Self::Ext4(images) => images.prepare(limit),
            Self::Oneshot(_) => Ok(oneshot::unmade_volume(limit)),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Assigns a prepared volume to the sandbox `id` with this limit.
    pub(crate) fn assign(
        &mut self,
        prepared: PreparedVolume,
        id: &SandboxId,
        limit: Bytes,
    ) -> Result<SandboxVolume, VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.assign(prepared, id, limit),
            Self::Ext4(images) => images.assign(prepared, id, limit),
            Self::Oneshot(images) => images.assign(id, limit),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Returns the paths of the volume of `id`.
    pub(crate) fn sandbox_volume(&self, id: &SandboxId) -> Result<SandboxVolume, VolumeError> {
        match self {
            Self::Btrfs(pool) => Ok(pool.sandbox_volume(id)),
            Self::Ext4(images) => images.sandbox_volume(id),
            Self::Oneshot(images) => images.sandbox_volume(id),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Whether `id` has a volume, even one that cannot be mounted now.
    pub(crate) fn has_volume(&self, id: &SandboxId) -> bool {
        match self {
            Self::Btrfs(pool) => pool.sandbox_volume(id).disk.is_dir(),
            Self::Ext4(images) => images.has_image(id),
            Self::Oneshot(images) => images.has_image(id),
            Self::Tmpfs => false,
        }
    }

    /// Changes the limit of the volume of `id`.
    pub(crate) fn resize(&mut self, id: &SandboxId, limit: Bytes) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.resize(id, limit),
            Self::Ext4(_) | Self::Oneshot(_) => Err(VolumeError::FixedSize),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Returns the usage of the volume of `id`; with btrfs the journal is not counted.
    pub(crate) fn usage(&self, id: &SandboxId) -> Result<DiskUsage, VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.usage(id),
            Self::Ext4(images) => images.usage(id.as_str()),
            Self::Oneshot(images) => images.usage(id),
            Self::Tmpfs => Err(VolumeError::OnlyMemory),
        }
    }

    /// Removes the volume of `id` without walking it. It is not an error if it does not exist.
    pub(crate) fn remove(&mut self, id: &SandboxId) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.remove(id.as_str()),
            Self::Ext4(images) => images.remove(id.as_str()),
            Self::Oneshot(images) => images.remove(id),
            Self::Tmpfs => Ok(()),
        }
    }

    /// Removes a prepared volume that is not needed.
    pub(crate) fn discard(&mut self, prepared: PreparedVolume) -> Result<(), VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.remove(&prepared.name),
            Self::Ext4(images) => images.remove(&prepared.name),
            Self::Oneshot(_) | Self::Tmpfs => Ok(()),
        }
    }

    /// Returns the ids of all sandboxes that have a volume.
    pub(crate) fn list_ids(&self) -> Result<Vec<SandboxId>, VolumeError> {
        match self {
            Self::Btrfs(pool) => pool.list_ids(),
            Self::Ext4(images) => Ok(images.list_ids()),
            Self::Oneshot(images) => Ok(images.list_ids()),
            Self::Tmpfs => Ok(Vec::new()),
        }
    }
}

impl SandboxVolume {
    fn at_directory(directory: &Path) -> Self {
        Self { disk: directory.join(DISK_PART), journal: Some(directory.join(JOURNAL_PART)) }
    }

    /// Returns the upper and work directory of a tree.
    pub(crate) fn tree_directories(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.disk.join(upper_name(name)), self.disk.join(format!("{name}.work")))
    }

    /// Makes the directories of a tree that the volume was not prepared for.
    pub(crate) fn add_tree(&self, name: &str) -> Result<(), VolumeError> {
        let (upper, work) = self.tree_directories(name);
        make_directory(&upper, 0o755)?;
        make_directory(&work, 0o755)
    }
}

/// Returns the name of the directory of a disk that holds the changes of a tree.
pub(crate) fn upper_name(tree: &str) -> String {
    format!("{tree}.upper")
}

/// Returns the name that a volume uses for the tree mounted at `mount_point`.
pub(crate) fn tree_name(mount_point: &str) -> String {
    match mount_point.trim_matches('/') {
        "" => "root".to_owned(),
        path => path.replace('/', "-"),
    }
}

/// Fails if the filesystem of `path` has less than `floor` bytes free.
fn check_free_space(path: &Path, floor: Bytes) -> Result<(), VolumeError> {
    let free = free_space(path)?;
    if free < floor.0 {
        return Err(VolumeError::NoRoom { path: path.to_owned(), free, floor: floor.0 });
    }
    Ok(())
}

fn free_space(path: &Path) -> Result<u64, VolumeError> {
    let status = rustix::fs::statvfs(path).map_err(io::Error::from).during("measure the space of", path)?;
    Ok(status.f_bavail.saturating_mul(status.f_frsize))
}

/// Makes a directory with exactly this mode; an existing directory keeps its content.
fn make_directory(path: &Path, mode: u32) -> Result<(), VolumeError> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path).during("make the directory", path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).during("set the mode of", path)
}

fn make_trees(volume: &SandboxVolume, settings: &VolumeStoreSettings) -> Result<(), VolumeError> {
    settings.trees.iter().try_for_each(|tree| volume.add_tree(tree))
}

/// Adds the attempted action and the path to an error.
trait VolumeErrorContext<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, VolumeError>;
}

impl<T> VolumeErrorContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, VolumeError> {
        self.map_err(|source| VolumeError::Io { action, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
