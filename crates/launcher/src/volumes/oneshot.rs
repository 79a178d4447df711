//! Disks of sandboxes that live as long as one command (`coracle run`): ext4 images that are used again and again.
//!
//! ```text
//!  oneshot/<limit>.template   a formatted image of which only the few blocks of an empty filesystem exist
//!  oneshot/<limit>.<n>.img    an image; its blocks of the last command are meaningless
//!  oneshot/mount              the mount point; every process mounts in its own mount namespace
//!  oneshot/checked            exists once such an image could be mounted on this host
//! ```
//!
//! Opening a disk writes the blocks of the template over the same blocks of an image, which formats it anew. Its
//! cost depends neither on what earlier commands wrote nor on their number. Images are not removed after each
//! command, because allocating and freeing their blocks on the host takes longer than everything else here.
//!
//! A process locks the image that it uses. The lock belongs to the open file, which the loop device shares, so the
//! image stays locked until the device is released, even if the process is killed. Then nothing of its disk remains
//! except the content of the image, which a later sandbox cannot read: for its filesystem these blocks are free.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use domain::{Bytes, SandboxId};
use linux::loopdev::LoopDevice;
use rustix::fs::{FlockOperation, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use super::ext4::{copy_extents, find_formatter, format_image};
use super::{
    DISK_PART, DiskUsage, PreparedVolume, SandboxVolume, VolumeError, VolumeErrorContext,
    VolumeStoreSettings, check_free_space, make_directory, make_trees,
};

const MIN_LIMIT: u64 = domain::MIN_DISK.0;
/// An image that takes more space on the host than this is emptied after use.
const MAX_IDLE_SIZE: u64 = 4 << 20;
/// When there are more images than this, those that are not in use are removed before another is made.
const MAX_IMAGES: usize = 64;
/// The metadata of every group in one place and no tables for features that are not used, so that a template
/// consists of few blocks.
const FEATURES: &str = "^has_journal,^resize_inode,^metadata_csum,uninit_bg,flex_bg";
const LAYOUT: &str = "lazy_itable_init=1,nodiscard,root_owner=0:0,packed_meta_blocks=1";
/// Nothing has to survive the command, so the device is never flushed. The tables of inodes are not cleared in the
/// background, because a table that was not used has no meaning.
const MOUNT_OPTIONS: &std::ffi::CStr = c"barrier=0,noinit_itable";
/// An image contains the tables of the filesystem in addition to what the limit counts: an inode of 256 bytes for
/// every 8 KiB, and a little more.
const INODE_TABLE_SHARE: u64 = 32;
const OTHER_TABLES_SHARE: u64 = 512;
const OTHER_TABLES: u64 = 96 << 10;
/// The kernel keeps a fiftieth of the blocks, but not more than this, for its own tables.
const RESERVED_SHARE: u64 = 50;
const MAX_RESERVED: u64 = 16 << 20;
const BLOCK_SIZE: u64 = 4096;

/// The images of one state directory, of which this process uses at most one.
#[derive(Debug)]
pub(crate) struct OneshotImages {
    directory: PathBuf,
    settings: VolumeStoreSettings,
    used: Option<UsedImage>,
}

#[derive(Debug)]
struct UsedImage {
    id: SandboxId,
    /// Locked while the image is in use.
    file: File,
    path: PathBuf,
    limit: Bytes,
}

impl OneshotImages {
    /// Opens the images in `directory`. When this is first done there, it tries whether the host can mount one.
    pub(super) fn open(directory: &Path, settings: VolumeStoreSettings) -> Result<Self, VolumeError> {
        let pool = directory.join(super::POOL_FILE);
        let directory = directory.join("oneshot");
        let checked = directory.join("checked");
        let images = Self { directory, settings, used: None };
        if checked.exists() {
            return Ok(images);
        }
        find_formatter()?;
        make_directory(&images.directory, 0o700)?;
        make_directory(&images.mount_point(), 0o700)?;
        let tried = images.attach_image(Bytes(MIN_LIMIT))?;
        images.unmount()?;
        fs::remove_file(&tried.1).during("remove", &tried.1)?;
        // Earlier versions kept these disks in a pool.
        match fs::remove_file(&pool) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).during("remove", &pool);
            }
            _ => {}
        }
        File::create(&checked).during("make", &checked)?;
        Ok(images)
    }

    /// Returns the directory of the image files.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Attaches, formats and mounts an image of the size of the limit.
    pub(super) fn assign(&mut self, id: &SandboxId, limit: Bytes) -> Result<SandboxVolume, VolumeError> {
        if limit.0 < MIN_LIMIT {
            return Err(VolumeError::TooSmall { limit: limit.0, least: MIN_LIMIT });
        }
        check_free_space(&self.directory, self.settings.floor)?;
        let (file, path) = self.attach_image(limit)?;
        self.used = Some(UsedImage { id: id.clone(), file, path, limit });
        let volume = self.mounted_volume();
        make_directory(&volume.disk, 0o755)?;
        make_trees(&volume, &self.settings)?;
        Ok(volume)
    }

    pub(super) fn sandbox_volume(&self, id: &SandboxId) -> Result<SandboxVolume, VolumeError> {
        self.find(id).map(|_| self.mounted_volume())
    }

    pub(super) fn has_image(&self, id: &SandboxId) -> bool {
        self.find(id).is_ok()
    }

    pub(super) fn usage(&self, id: &SandboxId) -> Result<DiskUsage, VolumeError> {
        let limit = self.find(id)?.limit;
        let target = self.mount_point();
        let status =
            rustix::fs::statvfs(&target).map_err(io::Error::from).during("measure the space of", &target)?;
        let blocks = status.f_blocks.saturating_sub(status.f_bfree);
        Ok(DiskUsage { used: Bytes(blocks.saturating_mul(status.f_frsize)), limit })
    }

    /// Unmounts the disk of `id` and returns space to the host. If `id` was the sandbox of a process that was killed, the
    /// kernel has unmounted its disk.
    pub(super) fn remove(&mut self, id: &SandboxId) -> Result<(), VolumeError> {
        if let Some(used) = self.used.take_if(|used| used.id == *id) {
            self.unmount()?;
            empty_large_image(&used.file, &used.path)?;
        }
        // The kernel may still have been writing to the image of a killed process when its remains were removed.
        self.empty_unused_images()
    }

    pub(super) fn list_ids(&self) -> Vec<SandboxId> {
        self.used.iter().map(|used| used.id.clone()).collect()
    }

    fn find(&self, id: &SandboxId) -> Result<&UsedImage, VolumeError> {
        let found = self.used.as_ref().filter(|used| used.id == *id);
        found.ok_or_else(|| VolumeError::Unknown(id.to_string()))
    }

    /// The mounted image. The journal is not on it, because a full disk must not block the output of commands.
    fn mounted_volume(&self) -> SandboxVolume {
        SandboxVolume { disk: self.mount_point().join(DISK_PART), journal: None }
    }

    fn mount_point(&self) -> PathBuf {
        self.directory.join("mount")
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        let target = self.mount_point();
        rustix::mount::unmount(&target, UnmountFlags::DETACH)
            .map_err(io::Error::from)
            .during("unmount", &target)
    }

    /// Mounts an image that no other process uses, as an empty filesystem.
    fn attach_image(&self, limit: Bytes) -> Result<(File, PathBuf), VolumeError> {
        let template_path = self.directory.join(format!("{}.template", limit.0));
        let template = match File::open(&template_path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_template(&template_path, limit)?;
                File::open(&template_path)
            }
            template => template,
        };
        let template = template.during("open", &template_path)?;
        let (file, path) = self.lock_image(limit)?;
        // The size of the template and not the computed one: another version may have made it.
        let size = template.metadata().during("measure", &template_path)?.len();
        file.set_len(size).during("grow", &path)?;
        let device = LoopDevice::attach_cached(&file).during("attach", &path)?;
        // Attaching waits until the file is on the disk, so the template is written afterwards. It is written through
        // the device: another program may have read the device meanwhile, and its cache would hide what is written to
        // the file.
        let written = device.try_clone_file().and_then(|device| copy_extents(&template, &device));
        written.during("format", &path)?;
        let target = self.mount_point();
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        rustix::mount::mount(device.path(), &target, c"ext4", flags, Some(MOUNT_OPTIONS))
            .map_err(io::Error::from)
            .during("mount", &path)?;
        Ok((file, path))
    }

    /// Returns an image of this limit that no other process uses, locked.
    fn lock_image(&self, limit: Bytes) -> Result<(File, PathBuf), VolumeError> {
        let mut number = 0_u32;
        loop {
            let path = self.directory.join(format!("{}.{number}.img", limit.0));
            let file = match open_image(&path, OpenOptions::new().read(true).write(true)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.remove_surplus_images()?;
                    open_image(&path, OpenOptions::new().read(true).write(true).create(true))
                }
                file => file,
            };
            let file = file.during("open", &path)?;
            if try_lock(&file).during("lock", &path)? {
                return Ok((file, path));
            }
            number += 1;
        }
    }

    /// Empties large images that no process uses.
    fn empty_unused_images(&self) -> Result<(), VolumeError> {
        for (file, path) in self.lock_unused_images()? {
            empty_large_image(&file, &path)?;
        }
        Ok(())
    }

    fn remove_surplus_images(&self) -> Result<(), VolumeError> {
        if self.list_images()?.len() < MAX_IMAGES {
            return Ok(());
        }
        for (_locked, path) in self.lock_unused_images()? {
            fs::remove_file(&path).during("remove", &path)?;
        }
        Ok(())
    }

    fn lock_unused_images(&self) -> Result<Vec<(File, PathBuf)>, VolumeError> {
        let mut unused = Vec::new();
        for path in self.list_images()? {
            let file = match open_image(&path, OpenOptions::new().read(true).write(true)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file.during("open", &path)?,
            };
            if try_lock(&file).during("lock", &path)? {
                unused.push((file, path));
            }
        }
        Ok(unused)
    }

    fn list_images(&self) -> Result<Vec<PathBuf>, VolumeError> {
        let mut images = Vec::new();
        for entry in fs::read_dir(&self.directory).during("list", &self.directory)? {
            let path = entry.during("list", &self.directory)?.path();
            images.extend(Some(path).filter(|path| path.extension().is_some_and(|word| word == "img")));
        }
        Ok(images)
    }
}

/// A volume that is made when it is assigned.
pub(super) fn unmade_volume(limit: Bytes) -> PreparedVolume {
    PreparedVolume { name: String::new(), limit }
}

/// The size of an image whose filesystem has as much space for files as the limit says.
fn image_size(limit: Bytes) -> u64 {
    let shares = limit.0 / INODE_TABLE_SHARE + limit.0 / OTHER_TABLES_SHARE;
    let tables = shares + (limit.0 / RESERVED_SHARE).min(MAX_RESERVED) + OTHER_TABLES;
    limit.0.saturating_add(tables) / BLOCK_SIZE * BLOCK_SIZE
}

fn make_template(path: &Path, limit: Bytes) -> Result<(), VolumeError> {
    let draft = path.with_extension("new");
    format_image(&draft, Bytes(image_size(limit)), FEATURES, LAYOUT)?;
    fs::rename(&draft, path).during("keep the template", path)
}

fn open_image(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options.mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(path)
}

/// Locks an image, unless another process uses it.
fn try_lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the space of an image to the host if a command wrote much to it.
fn empty_large_image(file: &File, path: &Path) -> Result<(), VolumeError> {
    const SECTOR_SIZE: u64 = 512;
    let allocated = file.metadata().during("measure", path)?.blocks().saturating_mul(SECTOR_SIZE);
    if allocated > MAX_IDLE_SIZE { file.set_len(0).during("empty", path) } else { Ok(()) }
}
