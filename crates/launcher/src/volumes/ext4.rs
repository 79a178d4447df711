//! Volumes as image files, for kernels without btrfs: a copy of a formatted template, attached
//! to a loop device and mounted. The size of the file is the limit.
//!
//! ```text
//!  ext4/<name>.img        the image of a sandbox, or of a volume that is only prepared
//!  ext4/snapshots/<id>.img a copy of an image
//!  ext4/templates/<size>  formatted once for each requested size
//!  ext4/mounts/<n>        the mount point of image number n of this launcher
//! ```

mod journal;
mod named;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use domain::{Bytes, SandboxId, SnapshotId};
use linux::freeze;
use linux::loopdev::{self, LoopDevice};
use linux::namespaces::{self, NamespaceSet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, SeekFrom};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::snapshots::VolumeCopy;
use super::{
    DISK_PART, DiskUsage, JOURNAL_PART, PREPARED_PREFIX, PreparedVolume, SandboxVolume, VolumeError,
    VolumeErrorContext, VolumeStoreSettings, check_free_space, make_directory, make_trees,
};

/// The smallest limit: below it a filesystem has no space for its own tables.
const MIN_LIMIT: u64 = domain::MIN_DISK.0;
/// How many seconds `mkfs.ext4` may take; the launcher does nothing else meanwhile. It writes only a
/// few blocks.
const FORMAT_TIMEOUT_SECONDS: i64 = 10;
/// The directory with copies of images.
const SNAPSHOT_DIRECTORY: &str = "snapshots";
/// One inode for this many bytes: the limit on files follows from the limit on bytes.
const BYTES_PER_INODE: u64 = 8 << 10;
/// The tables of inodes are cleared once the image is mounted.
const LAYOUT: &str = "lazy_itable_init=1,nodiscard,root_owner=0:0";
/// A placeholder limit for an image that was copied from a snapshot: its size is the limit.
const RESTORED_LIMIT: Bytes = Bytes(0);

/// The image files of one state directory.
#[derive(Debug)]
pub(crate) struct Ext4Images {
    directory: PathBuf,
    settings: VolumeStoreSettings,
    /// The mount point of each image.
    mounted: BTreeMap<String, PathBuf>,
    /// Images that could not be mounted at the start. They stay until they are removed explicitly.
    broken: BTreeSet<String>,
    numbered: u64,
}

impl Ext4Images {
    /// Returns the directory of the image files.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn open(directory: &Path, settings: VolumeStoreSettings) -> Result<Self, VolumeError> {
        let directory = directory.join("ext4");
        for part in ["", "templates", "mounts", SNAPSHOT_DIRECTORY] {
            make_directory(&directory.join(part), 0o700)?;
        }
        find_formatter()?;
        // Unused device nodes are removed here and not with each volume, because that would take longer
        // than the rest of the removal.
        loopdev::remove_unused_devices().during("forget devices of", &directory)?;
        let (mounted, broken) = (BTreeMap::new(), BTreeSet::new());
        let mut images = Self { directory, settings, mounted, broken, numbered: 0 };
        images.adopt_images()?;
        Ok(images)
    }

    /// Mounts the images of all sandboxes again. An image that is still attached to a device is found
    /// by its inode and not attached twice.
    fn adopt_images(&mut self) -> Result<(), VolumeError> {
        for entry in fs::read_dir(&self.directory).during("list", &self.directory)? {
            let path = entry.during("list", &self.directory)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.ends_with(".new") {
                // An interrupted copy of a snapshot.
                fs::remove_file(&path).during("remove", &path)?;
            }
            let Some(name) = name.strip_suffix(".img").map(str::to_owned) else { continue };
            if name.starts_with(PREPARED_PREFIX) {
                fs::remove_file(&path).during("remove", &path)?;
            } else if let Err(error) = self.mount_image(&name) {
                tracing::error!(image = name, ?error, "failed to mount disk image; it is left unchanged");
                self.broken.insert(name);
            }
        }
        Ok(())
    }

    pub(super) fn prepare(&mut self, limit: Bytes) -> Result<PreparedVolume, VolumeError> {
        if limit.0 < MIN_LIMIT {
            return Err(VolumeError::TooSmall { limit: limit.0, least: MIN_LIMIT });
        }
        check_free_space(&self.directory, self.settings.floor)?;
        let template = self.ensure_template(limit)?;
        let name = format!("{PREPARED_PREFIX}{}", self.numbered);
        match self.make_image(&template, &name) {
            Ok(()) => Ok(PreparedVolume { name, limit }),
            Err(error) => {
                self.remove(&name)?;
                Err(error)
            }
        }
    }

    fn make_image(&mut self, template: &Path, name: &str) -> Result<(), VolumeError> {
        let image = self.image_path(name);
        copy_sparse(template, &image).during("copy the template to", &image)?;
        let target = self.mount_image(name)?;
        make_directory(&target, 0o700)?;
        let volume = SandboxVolume::at_directory(&target);
        make_directory(&target.join(DISK_PART), 0o755)?;
        make_directory(&target.join(JOURNAL_PART), 0o755)?;
        make_trees(&volume, &self.settings)
    }

    pub(super) fn assign(
        &mut self,
        mut prepared: PreparedVolume,
        id: &SandboxId,
        limit: Bytes,
    ) -> Result<SandboxVolume, VolumeError> {
        if prepared.limit == RESTORED_LIMIT {
            // The files cannot move to another image, and an image cannot be resized.
            let image =
                fs::metadata(self.image_path(&prepared.name)).during("measure", &self.directory)?.len();
            if image != limit.0 {
                self.remove(&prepared.name)?;
                return Err(VolumeError::OtherSize { limit: limit.0, image });
            }
            prepared.limit = limit;
        }
        if prepared.limit != limit {
            // The size of an image is its limit, so another limit needs another image.
            let other = self.prepare(limit)?;
            self.remove(&prepared.name)?;
            prepared = other;
        }
        let (from, to) = (self.image_path(&prepared.name), self.image_path(id.as_str()));
        // The device is attached to the file and not to its name, so the rename does not affect it.
        fs::rename(&from, &to).during("assign the volume", &to)?;
        let target = self.mounted.remove(&prepared.name).expect("a prepared volume is mounted");
        let volume = SandboxVolume::at_directory(&target);
        self.mounted.insert(id.to_string(), target);
        Ok(volume)
    }

    pub(super) fn sandbox_volume(&self, id: &SandboxId) -> Result<SandboxVolume, VolumeError> {
        let target = self.mounted.get(id.as_str()).ok_or_else(|| VolumeError::Unknown(id.to_string()))?;
        Ok(SandboxVolume::at_directory(target))
    }

    pub(super) fn usage(&self, name: &str) -> Result<DiskUsage, VolumeError> {
        let target = self.mounted.get(name).ok_or_else(|| VolumeError::Unknown(name.to_owned()))?;
        let status =
            rustix::fs::statvfs(target).map_err(io::Error::from).during("measure the space of", target)?;
        let blocks = status.f_blocks.saturating_sub(status.f_bfree);
        let limit = fs::metadata(self.image_path(name)).during("measure", &self.image_path(name))?.len();
        Ok(DiskUsage { used: Bytes(blocks.saturating_mul(status.f_frsize)), limit: Bytes(limit) })
    }

    pub(super) fn remove(&mut self, name: &str) -> Result<(), VolumeError> {
        if let Some(target) = self.mounted.remove(name) {
            rustix::mount::unmount(&target, UnmountFlags::DETACH)
                .map_err(io::Error::from)
                .during("unmount", &target)?;
            fs::remove_dir(&target).during("remove", &target)?;
        }
        remove_image(&self.image_path(name))?;
        self.broken.remove(name);
        Ok(())
    }

    pub(super) fn has_image(&self, id: &SandboxId) -> bool {
        self.mounted.contains_key(id.as_str()) || self.broken.contains(id.as_str())
    }

    pub(super) fn list_ids(&self) -> Vec<SandboxId> {
        let all = self.mounted.keys().chain(&self.broken);
        all.filter_map(|name| SandboxId::parse(name).ok()).collect()
    }

    pub(super) fn plan_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<VolumeCopy, VolumeError> {
        check_free_space(&self.directory, self.settings.floor)?;
        let mounted = self.mounted.get(id.as_str()).ok_or_else(|| VolumeError::Unknown(id.to_string()))?;
        let (source, target) = (self.image_path(id.as_str()), self.snapshot_path(snapshot));
        Ok(VolumeCopy::Image { source, target, mounted: Some(mounted.clone()) })
    }

    pub(super) fn plan_restore(
        &mut self,
        snapshot: &SnapshotId,
    ) -> Result<(PreparedVolume, VolumeCopy), VolumeError> {
        check_free_space(&self.directory, self.settings.floor)?;
        let name = format!("{PREPARED_PREFIX}{}", self.numbered);
        self.numbered += 1;
        let (source, target) = (self.snapshot_path(snapshot), self.image_path(&name));
        Ok((
            PreparedVolume { name, limit: RESTORED_LIMIT },
            VolumeCopy::Image { source, target, mounted: None },
        ))
    }

    /// Mounts a copy and empties its journal: the output of the original sandbox is not part of the copy.
    pub(super) fn finish_restore(&mut self, prepared: &PreparedVolume) -> Result<(), VolumeError> {
        let journal = self.mount_image(&prepared.name)?.join(JOURNAL_PART);
        journal::empty_journal(&journal).during("empty", &journal)
    }

    pub(super) fn remove_snapshot(&mut self, snapshot: &SnapshotId) -> Result<(), VolumeError> {
        remove_image(&self.snapshot_path(snapshot))
    }

    /// Returns the ids of all snapshots, including unfinished copies.
    pub(super) fn list_snapshots(&self) -> Result<Vec<SnapshotId>, VolumeError> {
        let directory = self.directory.join(SNAPSHOT_DIRECTORY);
        let mut found = Vec::new();
        for entry in fs::read_dir(&directory).during("list", &directory)? {
            let path = entry.during("list", &directory)?.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            found.extend(name.and_then(|name| SnapshotId::parse(name).ok()));
        }
        Ok(found)
    }

    /// Mounts a snapshot in a new mount namespace of this process. The device is released with the
    /// namespace.
    pub(super) fn open_snapshot(&self, snapshot: &SnapshotId) -> Result<PathBuf, VolumeError> {
        let image = self.snapshot_path(snapshot);
        let file = open_image(&image)?;
        namespaces::unshare_namespaces(NamespaceSet::MOUNT).during("make a mount namespace for", &image)?;
        linux::mounts::make_private().during("make a mount namespace for", &image)?;
        let device = LoopDevice::for_file(&file).during("attach", &image)?;
        let target = self.directory.join("mounts");
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
        rustix::mount::mount(device.path(), &target, c"ext4", flags, None)
            .map_err(io::Error::from)
            .during("mount", &image)?;
        Ok(SandboxVolume::at_directory(&target).disk)
    }

    fn snapshot_path(&self, id: &SnapshotId) -> PathBuf {
        self.directory.join(SNAPSHOT_DIRECTORY).join(format!("{id}.img"))
    }

    fn image_path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.img"))
    }

    fn mount_image(&mut self, name: &str) -> Result<PathBuf, VolumeError> {
        let image = self.image_path(name);
        let file = open_image(&image)?;
        let device = LoopDevice::for_file(&file).during("attach", &image)?;
        let target = self.directory.join("mounts").join(self.numbered.to_string());
        self.numbered += 1;
        make_directory(&target, 0o700)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        rustix::mount::mount(device.path(), &target, c"ext4", flags, Some(c"discard"))
            .map_err(io::Error::from)
            .during("mount", &image)?;
        // A backup that was killed may have left the filesystem frozen.
        File::open(&target).and_then(freeze::thaw_filesystem).during("thaw", &target)?;
        self.mounted.insert(name.to_owned(), target.clone());
        Ok(target)
    }

    /// Returns the formatted image of this size, making it when it is first needed.
    fn ensure_template(&self, limit: Bytes) -> Result<PathBuf, VolumeError> {
        let path = self.directory.join("templates").join(limit.0.to_string());
        if !path.exists() {
            let draft = path.with_extension("new");
            format_image(&draft, limit, "^has_journal", LAYOUT)?;
            fs::rename(&draft, &path).during("keep the template", &path)?;
        }
        Ok(path)
    }
}

/// Formats a file of this size. The filesystem of a sandbox has no journal, because no sandbox survives
/// a power loss.
pub(super) fn format_image(
    path: &Path,
    size: Bytes,
    features: &str,
    layout: &str,
) -> Result<(), VolumeError> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|file| file.set_len(size.0)).during("make the template", path)?;
    let mut formatting = Command::new(find_formatter()?)
        .args(["-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-O", features])
        .args(["-E", layout, "-i", &BYTES_PER_INODE.to_string()])
        .arg(path)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .during("run mkfs.ext4 on", path)?;
    if !exits_in_time(&formatting).during("wait for mkfs.ext4 on", path)? {
        formatting.kill().during("end mkfs.ext4 on", path)?;
        formatting.wait().during("end mkfs.ext4 on", path)?;
        return Err(VolumeError::Format(format!("timeout after {FORMAT_TIMEOUT_SECONDS} s")));
    }
    let output = formatting.wait_with_output().during("wait for mkfs.ext4 on", path)?;
    if output.status.success() {
        return Ok(());
    }
    let message: String = String::from_utf8_lossy(&output.stderr).chars().take(500).collect();
    Err(VolumeError::Format(message.trim().to_owned()))
}

fn exits_in_time(child: &Child) -> io::Result<bool> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let timeout = Timespec { tv_sec: FORMAT_TIMEOUT_SECONDS, tv_nsec: 0 };
    let mut watched = [PollFd::new(&pidfd, PollFlags::IN)];
    Ok(rustix::io::retry_on_intr(|| poll(&mut watched, Some(&timeout)))? > 0)
}

pub(super) fn find_formatter() -> Result<PathBuf, VolumeError> {
    let directories = ["/usr/sbin", "/sbin", "/usr/bin", "/usr/local/sbin"];
    let paths = directories.iter().map(|directory| Path::new(directory).join("mkfs.ext4"));
    paths.into_iter().find(|path| path.exists()).ok_or(VolumeError::NoFormatter)
}

/// Whether a directory has images of sandboxes, named volumes or snapshots.
pub(super) fn holds_volumes(directory: &Path) -> Result<bool, VolumeError> {
    let directory = directory.join("ext4");
    for path in [directory.join(SNAPSHOT_DIRECTORY), directory] {
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).during("list", &path),
        };
        for entry in entries {
            let name = entry.during("list", &path)?.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(".img") && !name.starts_with(PREPARED_PREFIX) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Opens an image for a loop device. Only files of this server may be mounted, so links are not
/// followed, and devices and pipes are refused.
fn open_image(image: &Path) -> Result<File, VolumeError> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags.bits().cast_signed());
    let file = options.open(image).during("open", image)?;
    if !file.metadata().during("measure", image)?.is_file() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput)).during("attach", image);
    }
    Ok(file)
}

/// Removes an image and its unfinished copy, if there is one. It is not an error if neither exists.
fn remove_image(image: &Path) -> Result<(), VolumeError> {
    for path in [&image.with_extension("new"), image] {
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result.during("remove", path)?,
        }
    }
    Ok(())
}

/// Copies an image, by reference if the filesystem supports it.
pub(crate) fn copy_image(from: &Path, to: &Path) -> io::Result<()> {
    let copy = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(to)?;
    match rustix::fs::ioctl_ficlone(&copy, &File::open(from)?) {
        Ok(()) => Ok(()),
        Err(_not_here) => copy_sparse(from, to),
    }
}

/// Copies only data and leaves holes out.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    let copy = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(to)?;
    copy.set_len(source.metadata()?.len())?;
    copy_extents(&source, &copy)
}

/// Writes the data of `source` to the same places of `copy`.
pub(super) fn copy_extents(mut source: &File, mut copy: &File) -> io::Result<()> {
    let mut position = 0;
    while let Some(data) = seek_extent(source, SeekFrom::Data(position))? {
        let hole = seek_extent(source, SeekFrom::Hole(data))?.unwrap_or(data);
        source.seek(io::SeekFrom::Start(data))?;
        copy.seek(io::SeekFrom::Start(data))?;
        io::copy(&mut source.take(hole - data), &mut copy)?;
        position = hole;
    }
    Ok(())
}

/// Returns the position of the next data or hole, or `None` after the last one.
fn seek_extent(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(position) => Ok(Some(position)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
