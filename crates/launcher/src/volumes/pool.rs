//! Volumes as btrfs subvolumes: a directory per sandbox with one subvolume for its disk and one
//! for its journal, each with a quota.

mod named;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use domain::{Bytes, SandboxId};
use linux::btrfs::{self, FsId, QuotaMode};
use rustix::mount::MountFlags;

use super::{
    DISK_PART, DiskUsage, JOURNAL_PART, POOL_FILE, PREPARED_PREFIX, PreparedVolume, SandboxVolume,
    VolumeError, VolumeErrorContext, VolumeStoreSettings, check_free_space, free_space, make_directory,
    make_trees, pool_file,
};

/// The largest size of a sandbox's journal.
const MAX_JOURNAL_SIZE: u64 = 512 << 20;
/// The smallest limit: below it the kernel's own reservations leave no space to write.
const MIN_LIMIT: u64 = domain::MIN_DISK.0;
/// The largest number of quota groups of removed volumes that wait for removal.
const MAX_DEAD_QUOTAS: usize = 100_000;

/// A mounted btrfs that holds the volumes of one state directory.
#[derive(Debug)]
pub(crate) struct BtrfsPool {
    directory: PathBuf,
    root: PathBuf,
    handle: File,
    fsid: FsId,
    settings: VolumeStoreSettings,
    /// The space that must stay free inside the pool.
    pool_floor: Bytes,
    prepared: u64,
    /// Quota groups of removed subvolumes whose space is still being freed.
    dead: VecDeque<u64>,
}

impl BtrfsPool {
    pub(super) fn open(directory: &Path, settings: VolumeStoreSettings) -> Result<Self, VolumeError> {
        let root = directory.join("pool");
        make_directory(&root, 0o700)?;
        if host_has_quota(directory)? {
            mount_in_place(&root)?;
        } else {
            pool_file::mount_pool(&directory.join(POOL_FILE), &root, settings.pool)?;
        }
        let handle = File::open(&root).during("open", &root)?;
        let fsid = btrfs::filesystem_id(&handle).during("identify", &root)?;
        if btrfs::quota_mode(&fsid).is_none() {
            btrfs::enable_quota(&handle).during("turn on the quota of", &root)?;
        }
        let pool_floor = Bytes(settings.floor.0.min(free_space(&root)? / 16));
        let directory = directory.to_owned();
        let dead = VecDeque::new();
        let mut pool = Self { directory, root, handle, fsid, settings, pool_floor, prepared: 0, dead };
        pool.remove_leftovers()?;
        Ok(pool)
    }

    /// Returns the directory at which the pool is mounted.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn prepare(&mut self, limit: Bytes) -> Result<PreparedVolume, VolumeError> {
        check_limit(limit)?;
        self.check_free_space()?;
        let name = self.next_name();
        match self.fill_volume(&name, limit) {
            Ok(()) => Ok(PreparedVolume { name, limit }),
            Err(error) => {
                self.remove(&name)?;
                Err(error)
            }
        }
    }

    /// Makes a volume without a disk, and returns the directory in which the disk has to be made. The
    /// limit is set when the volume is assigned.
    pub(super) fn prepare_without_disk(&mut self) -> Result<(PreparedVolume, PathBuf), VolumeError> {
        self.check_free_space()?;
        let name = self.next_name();
        let directory = self.root.join(&name);
        let made = make_directory(&directory, 0o700).and_then(|()| {
            let parent = File::open(&directory).during("open", &directory)?;
            self.add_part(&parent, &directory, JOURNAL_PART, MAX_JOURNAL_SIZE)
        });
        match made {
            Ok(()) => Ok((PreparedVolume { name, limit: Bytes(0) }, directory)),
            Err(error) => {
                self.remove(&name)?;
                Err(error)
            }
        }
    }

    fn next_name(&mut self) -> String {
        self.prepared += 1;
        format!("{PREPARED_PREFIX}{}", self.prepared)
    }

    /// Fails if the host or the pool has too little free space.
    pub(super) fn check_free_space(&self) -> Result<(), VolumeError> {
        check_free_space(&self.directory, self.settings.floor)?;
        check_free_space(&self.root, self.pool_floor)
    }

    fn add_part(&self, parent: &File, directory: &Path, part: &str, bytes: u64) -> Result<(), VolumeError> {
        let path = directory.join(part);
        btrfs::create_subvolume(parent, part).during("make the subvolume", &path)?;
        self.set_limit(&path, bytes)
    }

    fn fill_volume(&self, name: &str, limit: Bytes) -> Result<(), VolumeError> {
        let directory = self.root.join(name);
        make_directory(&directory, 0o700)?;
        let parent = File::open(&directory).during("open", &directory)?;
        for (part, bytes) in [(DISK_PART, limit.0), (JOURNAL_PART, MAX_JOURNAL_SIZE)] {
            self.add_part(&parent, &directory, part, bytes)?;
        }
        make_trees(&SandboxVolume::at_directory(&directory), &self.settings)
    }

    pub(super) fn assign(
        &mut self,
        prepared: PreparedVolume,
        id: &SandboxId,
        limit: Bytes,
    ) -> Result<SandboxVolume, VolumeError> {
        check_limit(limit)?;
        check_free_space(&self.directory, self.settings.floor)?;
        let from = self.root.join(&prepared.name);
        if limit != prepared.limit {
            self.set_limit(&from.join(DISK_PART), limit.0)?;
        }
        let to = self.root.join(id.as_str());
        // Renaming the directory assigns disk and journal in one step.
        rustix::fs::renameat_with(
            rustix::fs::CWD,
            &from,
            rustix::fs::CWD,
            &to,
            rustix::fs::RenameFlags::NOREPLACE,
        )
        .map_err(io::Error::from)
        .during("assign the volume", &to)?;
        Ok(SandboxVolume::at_directory(&to))
    }

    pub(super) fn sandbox_volume(&self, id: &SandboxId) -> SandboxVolume {
        SandboxVolume::at_directory(&self.root.join(id.as_str()))
    }

    pub(super) fn resize(&self, id: &SandboxId, limit: Bytes) -> Result<(), VolumeError> {
        check_limit(limit)?;
        self.set_limit(&self.root.join(id.as_str()).join(DISK_PART), limit.0)
    }

    pub(super) fn usage(&self, id: &SandboxId) -> Result<DiskUsage, VolumeError> {
        let path = self.root.join(id.as_str()).join(DISK_PART);
        let subvolume = match subvolume_at(&path)? {
            Some(subvolume) => subvolume,
            None => return Err(VolumeError::Unknown(id.to_string())),
        };
        let usage = btrfs::subvolume_usage(&self.fsid, subvolume).during("read the quota of", &path)?;
        Ok(DiskUsage { used: Bytes(usage.used), limit: Bytes(usage.limit.unwrap_or(u64::MAX)) })
    }

    pub(super) fn remove(&mut self, name: &str) -> Result<(), VolumeError> {
        let directory = self.root.join(name);
        let parent = match File::open(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => result.during("open", &directory)?,
        };
        self.remove_parts(&parent, &directory)?;
        if let Err(error) = fs::remove_dir(&directory) {
            // The copy that a killed launcher had begun may have appeared meanwhile.
            if error.kind() != io::ErrorKind::DirectoryNotEmpty {
                return Err(error).during("remove", &directory);
            }
            self.remove_parts(&parent, &directory)?;
            fs::remove_dir(&directory).during("remove", &directory)?;
        }
        Ok(())
    }

    fn remove_parts(&mut self, parent: &File, directory: &Path) -> Result<(), VolumeError> {
        for part in [DISK_PART, JOURNAL_PART] {
            let path = directory.join(part);
            let Some(subvolume) = subvolume_at(&path)? else { continue };
            btrfs::destroy_subvolume(parent, part).during("drop the subvolume", &path)?;
            self.dead.push_back(subvolume);
        }
        self.remove_dead_quotas()
    }

    pub(super) fn remove_snapshot(&mut self, name: &str) -> Result<(), VolumeError> {
        let path = self.root.join(name);
        let Some(subvolume) = subvolume_at(&path)? else { return Ok(()) };
        btrfs::destroy_subvolume(&self.handle, name).during("drop the subvolume", &path)?;
        self.dead.push_back(subvolume);
        self.remove_dead_quotas()
    }

    /// Whether shared extents count in every subvolume that uses them.
    pub(super) fn counts_shared(&self) -> bool {
        btrfs::quota_mode(&self.fsid) == Some(QuotaMode::Full)
    }

    /// Tries to remove the two oldest quota groups. Every removal of a volume does this, so their number
    /// stays bounded on kernels that do not remove them automatically.
    fn remove_dead_quotas(&mut self) -> Result<(), VolumeError> {
        for _ in 0..2 {
            let Some(oldest) = self.dead.pop_front() else { break };
            let gone =
                btrfs::remove_quota_group(&self.handle, oldest).during("forget a quota of", &self.root)?;
            if !gone && self.dead.len() < MAX_DEAD_QUOTAS {
                self.dead.push_back(oldest);
            }
        }
        Ok(())
    }

    pub(super) fn list_ids(&self) -> Result<Vec<SandboxId>, VolumeError> {
        Ok(self.list_names()?.iter().filter_map(|name| SandboxId::parse(name).ok()).collect())
    }

    pub(super) fn list_names(&self) -> Result<Vec<String>, VolumeError> {
        let entries = fs::read_dir(&self.root).during("list", &self.root)?;
        let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().into_string().ok());
        let names: io::Result<Vec<Option<String>>> = entries.map(name).collect();
        Ok(names.during("list", &self.root)?.into_iter().flatten().collect())
    }

    /// Removes volumes that were only prepared: they may be incomplete and are no longer needed.
    fn remove_leftovers(&mut self) -> Result<(), VolumeError> {
        for name in self.list_names()?.iter().filter(|name| name.starts_with(PREPARED_PREFIX)) {
            self.remove(name)?;
        }
        self.remove_named_leftovers()
    }

    fn set_limit(&self, path: &Path, bytes: u64) -> Result<(), VolumeError> {
        let subvolume =
            subvolume_at(path)?.ok_or_else(|| VolumeError::Unknown(path.display().to_string()))?;
        btrfs::limit_subvolume(&self.handle, subvolume, bytes).during("set the limit of", path)
    }
}

/// Whether a pool without a file of its own has volumes: those of the host's btrfs are directories.
pub(super) fn holds_volumes(directory: &Path) -> Result<bool, VolumeError> {
    let root = directory.join("pool");
    match fs::read_dir(&root) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).during("list", &root),
    }
}

fn check_limit(limit: Bytes) -> Result<(), VolumeError> {
    if limit.0 < MIN_LIMIT { Err(VolumeError::TooSmall { limit: limit.0, least: MIN_LIMIT }) } else { Ok(()) }
}

/// Returns the number of the subvolume at `path`, or `None` if the path does not exist.
fn subvolume_at(path: &Path) -> Result<Option<u64>, VolumeError> {
    match File::open(path) {
        Ok(file) => btrfs::subvolume_id(&file).during("identify the subvolume", path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).during("open", path),
    }
}

/// Whether the state directory is on a btrfs on which the operator has enabled quotas. Enabling them
/// here would change the host's filesystem permanently, so without quotas a pool file is used there
/// too.
fn host_has_quota(directory: &Path) -> Result<bool, VolumeError> {
    let handle = File::open(directory).during("open", directory)?;
    if !btrfs::is_btrfs(&handle).during("look at the filesystem of", directory)? {
        return Ok(false);
    }
    let fsid = btrfs::filesystem_id(&handle).during("identify", directory)?;
    Ok(btrfs::quota_mode(&fsid).is_some())
}

/// Mounts the host's directory onto itself, to get the mount flags that a pool file has.
fn mount_in_place(root: &Path) -> Result<(), VolumeError> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    rustix::mount::mount_bind(root, root)
        .and_then(|()| rustix::mount::mount_remount(root, MountFlags::BIND | flags, c""))
        .map_err(io::Error::from)
        .during("mount", root)
}
