//! Named volumes as image files: `ext4/volume-<id>.img`, formatted with a journal, because they must
//! survive a power loss.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use backend::FoundVolume;
use domain::Volume;

use super::super::named::{DATA, read, readable, sync, write_label};
use super::super::{DiskUsage, During, PREPARED, VolumeError, check_room, make_directory};
use super::{Ext4, LEAST, format};

/// The prefix of the names of their images; no sandbox's id begins like this.
const NAMED: &str = "volume-";

impl Ext4 {
    /// Returns the mount point of a volume's image.
    pub(in super::super) fn named_directory(&self, id: &str) -> Option<PathBuf> {
        self.mounted.get(&format!("{NAMED}{id}")).cloned()
    }

    pub(in super::super) fn make_named(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        let name = format!("{NAMED}{}", volume.id);
        if self.mounted.contains_key(&name) {
            return Ok(());
        }
        if volume.size.0 < LEAST {
            return Err(VolumeError::TooSmall { limit: volume.size.0, least: LEAST });
        }
        check_room(&self.directory, self.settings.floor)?;
        // Images with this prefix are removed at the next start.
        let partial = format!("{PREPARED}{name}");
        match self.fill_named(&partial, volume) {
            Ok(()) => {}
            Err(error) => {
                self.remove(&partial)?;
                return Err(error);
            }
        }
        let whole = self.image(&name);
        fs::rename(self.image(&partial), &whole).during("finish the volume", &whole)?;
        let target = self.mounted.remove(&partial).expect("the image was just mounted");
        self.mounted.insert(name, target);
        sync(&self.directory)
    }

    fn fill_named(&mut self, partial: &str, volume: &Volume) -> Result<(), VolumeError> {
        let image = self.image(partial);
        match fs::remove_file(&image) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.during("remove", &image)?,
        }
        format(&image, volume.size, "has_journal")?;
        let target = self.mount(partial)?;
        make_directory(&target, 0o700)?;
        make_directory(&target.join(DATA), 0o755)?;
        write_label(&target, volume)?;
        // The label is in the image now, but the image may not be on the disk yet.
        File::open(&image).and_then(|file| file.sync_all()).during("flush", &image)
    }

    pub(in super::super) fn remove_named(&mut self, id: &str) -> Result<(), VolumeError> {
        self.remove(&format!("{NAMED}{id}"))
    }

    pub(in super::super) fn named(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        let named =
            self.mounted.iter().filter_map(|(name, target)| Some((name.strip_prefix(NAMED)?, target)));
        let read = |id, target| read(target, id, self.usage_of_named(id)?);
        Ok(named.filter_map(|(id, target)| readable(id, read(id, target))).collect())
    }

    pub(in super::super) fn usage_of_named(&self, id: &str) -> Result<DiskUsage, VolumeError> {
        self.usage(&format!("{NAMED}{id}"))
    }
}
