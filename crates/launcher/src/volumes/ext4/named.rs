//! Named volumes as image files: `ext4/volume-<id>.img`, formatted with a journal, because they must
//! survive a power loss.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use backend::FoundVolume;
use domain::{Volume, VolumeId};

use super::super::named::{DATA_DIRECTORY, read_label, skip_unreadable, sync_directory, write_label};
use super::super::{
    DiskUsage, PREPARED_PREFIX, VolumeError, VolumeErrorContext, check_free_space, make_directory,
};
use super::{Ext4Images, LAYOUT, MIN_LIMIT, format_image};

/// The prefix of the names of their images; no sandbox's id begins like this.
const NAMED_PREFIX: &str = "volume-";

impl Ext4Images {
    /// Returns the mount point of a volume's image.
    pub(in super::super) fn named_directory(&self, id: &VolumeId) -> Option<PathBuf> {
        self.mounted.get(&format!("{NAMED_PREFIX}{id}")).cloned()
    }

    pub(in super::super) fn make_named(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        let name = format!("{NAMED_PREFIX}{}", volume.id);
        if self.mounted.contains_key(&name) {
            return Ok(());
        }
        if volume.size.0 < MIN_LIMIT {
            return Err(VolumeError::TooSmall { limit: volume.size.0, least: MIN_LIMIT });
        }
        check_free_space(&self.directory, self.settings.floor)?;
        // Images with this prefix are removed at the next start.
        let partial = format!("{PREPARED_PREFIX}{name}");
        match self.fill_named(&partial, volume) {
            Ok(()) => {}
            Err(error) => {
                self.remove(&partial)?;
                return Err(error);
            }
        }
        let whole = self.image_path(&name);
        fs::rename(self.image_path(&partial), &whole).during("finish the volume", &whole)?;
        let target = self.mounted.remove(&partial).expect("the image was just mounted");
        self.mounted.insert(name, target);
        sync_directory(&self.directory)
    }

    fn fill_named(&mut self, partial: &str, volume: &Volume) -> Result<(), VolumeError> {
        let image = self.image_path(partial);
        match fs::remove_file(&image) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.during("remove", &image)?,
        }
        format_image(&image, volume.size, "has_journal", LAYOUT)?;
        let target = self.mount_image(partial)?;
        make_directory(&target, 0o700)?;
        make_directory(&target.join(DATA_DIRECTORY), 0o755)?;
        write_label(&target, volume)?;
        // The label is in the image now, but the image may not be on the disk yet.
        File::open(&image).and_then(|file| file.sync_all()).during("flush", &image)
    }

    pub(in super::super) fn remove_named(&mut self, id: &VolumeId) -> Result<(), VolumeError> {
        self.remove(&format!("{NAMED_PREFIX}{id}"))
    }

    pub(in super::super) fn list_named(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        let named = self.mounted.iter().filter_map(|(name, target)| {
            Some((VolumeId::parse(name.strip_prefix(NAMED_PREFIX)?).ok()?, target))
        });
        let read = |id: &VolumeId, target| read_label(target, id, self.named_usage(id)?);
        Ok(named.filter_map(|(id, target)| skip_unreadable(&id, read(&id, target))).collect())
    }

    pub(in super::super) fn named_usage(&self, id: &VolumeId) -> Result<DiskUsage, VolumeError> {
        self.usage(&format!("{NAMED_PREFIX}{id}"))
    }
}
