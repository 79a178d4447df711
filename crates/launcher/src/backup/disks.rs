//! The disks of a state directory, as they were in one moment.
//!
//! A disk that is attached to a loop device may be written to. Its filesystem is frozen while it is
//! copied: by reference where the host's filesystem can do that, else without its holes. A process
//! of its own thaws it if we are killed meanwhile, and a launcher that starts thaws it too.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;
use linux::loopdev::LoopDevice;
use linux::mounts::{self, MountAttrs};
use linux::spawn::{self, ForkResult, SingleThread};
use linux::{freeze, namespaces};
use rustix::pipe::PipeFlags;

use super::{BackupError, BackupErrorContext};
use crate::volumes::{POOL_FILE, copy_image};

const BLOCK_SIZE: u64 = 512;

/// A disk that will be saved.
pub(super) struct DiskSource {
    path: PathBuf,
    /// Its name in the archive.
    name: String,
    /// Without holes.
    pub(super) bytes: u64,
}

/// A disk that can be read without blocking writers.
pub(super) struct ReadableDisk {
    pub(super) path: PathBuf,
    pub(super) name: String,
}

/// The files that hold disks, volumes and their snapshots.
pub(super) fn find_disks(directory: &Path) -> Result<Vec<DiskSource>, BackupError> {
    let mut found = Vec::new();
    let pool = directory.join(POOL_FILE);
    if !pool.exists()
        && fs::read_dir(directory.join("pool")).is_ok_and(|mut entries| entries.next().is_some())
    {
        return Err(BackupError::HostSubvolumes(directory.to_owned()));
    }
    add_disk(&mut found, &pool, format!("disk/{POOL_FILE}"))?;
    for folder in ["ext4", "ext4/snapshots"] {
        let path = directory.join(folder);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.during("list", &path)?,
        };
        for entry in entries {
            let file = entry.during("list", &path)?.path();
            let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if name.ends_with(".img") && !name.starts_with("prepared-") {
                add_disk(&mut found, &file, format!("disk/{folder}/{name}"))?;
            }
        }
    }
    Ok(found)
}

fn add_disk(found: &mut Vec<DiskSource>, path: &Path, name: String) -> Result<(), BackupError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        facts => {
            let facts = facts.during("measure", path)?;
            if facts.is_file() {
                let bytes = facts.blocks().saturating_mul(BLOCK_SIZE);
                found.push(DiskSource { path: path.to_owned(), name, bytes });
            }
            Ok(())
        }
    }
}

/// Whether files in a directory can be copied by reference.
pub(super) fn supports_reflink(directory: &Path) -> bool {
    let (one, two) = (directory.join("share.1"), directory.join("share.2"));
    let tried = fs::write(&one, [1; 4096]).and_then(|()| {
        let copy = File::create(&two)?;
        rustix::fs::ioctl_ficlone(&copy, &File::open(&one)?).map_err(io::Error::from)
    });
    for path in [&one, &two] {
        fs::remove_file(path).ok();
    }
    tried.is_ok()
}

/// Makes all disks readable without blocking writers; those in use are copied to `draft`. `small` copies
/// the small files that belong to them and is called while the first disk is frozen.
pub(super) fn copy_disks(
    thread: &SingleThread,
    sources: &[DiskSource],
    draft: &Path,
    stopped: bool,
    small: &mut dyn FnMut() -> Result<(), BackupError>,
) -> Result<Vec<ReadableDisk>, BackupError> {
    let mut copied = Vec::new();
    let mut pending = Some(small);
    for (number, source) in sources.iter().enumerate() {
        let file = File::open(&source.path).during("open", &source.path)?;
        let device = LoopDevice::find_attached(&file).during("look for the device of", &source.path)?;
        let path = match device {
            Some(device) => {
                let target = draft.join(format!("disk-{number}"));
                let mut frozen = FrozenDisk::freeze(thread, &device, source)?;
                if let Some(small) = pending.take() {
                    small()?;
                }
                copy_image(&source.path, &target).during("copy", &source.path)?;
                frozen.thaw().during("thaw", &source.path)?;
                target
            }
            None if stopped || !is_live(source) => source.path.clone(),
            None => return Err(BackupError::Starting),
        };
        copied.push(ReadableDisk { path, name: source.name.clone() });
    }
    if let Some(small) = pending {
        small()?;
    }
    Ok(copied)
}

/// Whether a running server may mount this file. It keeps copies, but never mounts them.
fn is_live(source: &DiskSource) -> bool {
    !source.name.contains("/snapshots/")
}

/// A filesystem that is frozen until this is dropped.
struct FrozenDisk {
    /// Opened through a mount that is attached nowhere, so that nothing done to a path can reach the
    /// files of the disk. The mount goes with the last descriptor.
    directory: File,
    /// Closed when writers may continue.
    alive: Option<OwnedFd>,
    guard: OwnedFd,
}

impl FrozenDisk {
    fn freeze(thread: &SingleThread, device: &LoopDevice, source: &DiskSource) -> Result<Self, BackupError> {
        let path = &source.path;
        let kind = if source.name.ends_with(POOL_FILE) { c"btrfs" } else { c"ext4" };
        // The mount alone is read-only; the filesystem is the one that the server writes to.
        let attributes =
            MountAttrs::READ_ONLY.and(MountAttrs::NO_SUID).and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
        let mount = mounts::mount_detached(kind, &device.path(), attributes).during("mount", path)?;
        let top = RootDirectory::from_descriptor(mount);
        let directory = top.open_read(Path::new(".")).during("open", path)?;
        let (ended, alive) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from).during("guard", path)?;
        let guard = match thread.fork(namespaces::NamespaceSet::NONE, None).during("guard", path)? {
            ForkResult::Parent { pidfd, .. } => pidfd,
            ForkResult::Child => {
                drop(alive);
                spawn::exit_now(i32::from(thaw_when_parent_ends(&ended, &directory).is_err()))
            }
        };
        // From here on every return thaws the disk, even after a failed freeze.
        let frozen = Self { directory, alive: Some(alive), guard };
        freeze::freeze_filesystem(&frozen.directory).during("freeze", path)?;
        Ok(frozen)
    }

    /// Lets writers continue.
    fn thaw(&mut self) -> io::Result<()> {
        let thawed = freeze::thaw_filesystem(&self.directory);
        if let Some(alive) = self.alive.take() {
            drop(alive);
            spawn::wait_for_child(self.guard.as_fd())?;
        }
        thawed
    }
}

impl Drop for FrozenDisk {
    fn drop(&mut self) {
        if self.alive.is_some()
            && let Err(error) = self.thaw()
        {
            tracing::error!(%error, "could not thaw a disk; the next start of the server does");
        }
    }
}

/// Waits until our parent is done, however it ends, and then lets writers continue. It has its own
/// session, so that a signal to the process group of its parent does not reach it.
fn thaw_when_parent_ends(ended: &OwnedFd, directory: &File) -> io::Result<()> {
    rustix::process::setsid().ok();
    while rustix::io::retry_on_intr(|| rustix::io::read(ended, &mut [0; 1]))? > 0 {}
    freeze::thaw_filesystem(directory)
}
