//! Named volumes in a pool: each is a directory with one subvolume and its quota.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use backend::FoundVolume;
use domain::{Bytes, Volume, VolumeId};
use linux::btrfs;

use super::super::named::{DATA_DIRECTORY, read_label, skip_unreadable, sync_directory, write_label};
use super::super::{DiskUsage, VolumeError, VolumeErrorContext, check_free_space, make_directory};
use super::{BtrfsPool, check_limit, subvolume_at};

/// The directory of the pool that holds named volumes; no sandbox's id looks like this.
const NAMED_DIRECTORY: &str = "named-volumes";
/// The name prefix of incomplete volumes, which are being made or removed.
const PARTIAL_PREFIX: &str = "partial-";

impl BtrfsPool {
    pub(in super::super) fn named_directory(&self, id: &VolumeId) -> PathBuf {
        self.root.join(NAMED_DIRECTORY).join(id.as_str())
    }

    /// The directory of a volume while it is being made or removed.
    fn partial_directory(&self, id: &VolumeId) -> PathBuf {
        self.root.join(NAMED_DIRECTORY).join(format!("{PARTIAL_PREFIX}{id}"))
    }

    pub(in super::super) fn make_named(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        check_limit(volume.size)?;
        let whole = self.named_directory(&volume.id);
        if whole.exists() {
            return Ok(());
        }
        check_free_space(&self.directory, self.settings.floor)?;
        check_free_space(&self.root, self.pool_floor)?;
        make_directory(&self.root.join(NAMED_DIRECTORY), 0o700)?;
        let partial = self.partial_directory(&volume.id);
        self.remove_named_directory(&partial)?;
        if let Err(error) = self.fill_named(&partial, volume) {
            self.remove_named_directory(&partial)?;
            return Err(error);
        }
        fs::rename(&partial, &whole).during("finish the volume", &whole)?;
        sync_directory(&self.root.join(NAMED_DIRECTORY))
    }

    /// Fills the directory of a new volume. The label is written last: flushing a directory with a new
    /// subvolume commits everything that was done before, including the quota.
    fn fill_named(&self, partial: &Path, volume: &Volume) -> Result<(), VolumeError> {
        make_directory(partial, 0o700)?;
        let parent = File::open(partial).during("open", partial)?;
        let data = partial.join(DATA_DIRECTORY);
        btrfs::create_subvolume(&parent, DATA_DIRECTORY).during("make the subvolume", &data)?;
        self.set_limit(&data, volume.size.0)?;
        fs::set_permissions(&data, fs::Permissions::from_mode(0o755)).during("set the mode of", &data)?;
        write_label(partial, volume)
    }

    pub(in super::super) fn remove_named(&mut self, id: &VolumeId) -> Result<(), VolumeError> {
        let whole = self.named_directory(id);
        let partial = self.partial_directory(id);
        match fs::rename(&whole, &partial) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.during("rename the volume", &whole)?,
        }
        self.remove_named_directory(&partial)
    }

    pub(in super::super) fn list_named(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        let names = self.list_named_entries()?;
        let whole = names.iter().filter_map(|name| VolumeId::parse(name).ok());
        Ok(whole.filter_map(|id| skip_unreadable(&id, self.read_named(&id))).collect())
    }

    fn read_named(&self, id: &VolumeId) -> Result<FoundVolume, VolumeError> {
        read_label(&self.named_directory(id), id, self.named_usage(id)?)
    }

    pub(in super::super) fn named_usage(&self, id: &VolumeId) -> Result<DiskUsage, VolumeError> {
        let path = self.named_directory(id).join(DATA_DIRECTORY);
        let subvolume = subvolume_at(&path)?.ok_or_else(|| VolumeError::Unknown(id.to_string()))?;
        let usage = btrfs::subvolume_usage(&self.fsid, subvolume).during("read the quota of", &path)?;
        Ok(DiskUsage { used: Bytes(usage.used), limit: Bytes(usage.limit.unwrap_or(u64::MAX)) })
    }

    pub(super) fn remove_named_leftovers(&mut self) -> Result<(), VolumeError> {
        for name in self.list_named_entries()?.iter().filter(|name| name.starts_with(PARTIAL_PREFIX)) {
            if let Err(error) = self.remove_named_directory(&self.root.join(NAMED_DIRECTORY).join(name)) {
                tracing::error!(volume = name, %error, "failed to remove incomplete volume; the next start retries");
            }
        }
        Ok(())
    }

    fn list_named_entries(&self) -> Result<Vec<String>, VolumeError> {
        let directory = self.root.join(NAMED_DIRECTORY);
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.during("list", &directory)?,
        };
        let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().into_string().ok());
        let names: io::Result<Vec<Option<String>>> = entries.map(name).collect();
        Ok(names.during("list", &directory)?.into_iter().flatten().collect())
    }

    /// Removes the directory of an incomplete volume. It is not an error if it does not exist.
    fn remove_named_directory(&mut self, directory: &Path) -> Result<(), VolumeError> {
        let parent = match File::open(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => result.during("open", directory)?,
        };
        let data = directory.join(DATA_DIRECTORY);
        if let Some(subvolume) = subvolume_at(&data)? {
            btrfs::destroy_subvolume(&parent, DATA_DIRECTORY).during("drop the subvolume", &data)?;
            self.dead.push_back(subvolume);
        }
        self.remove_dead_quotas()?;
        fs::remove_dir_all(directory).during("remove", directory)
    }
}
