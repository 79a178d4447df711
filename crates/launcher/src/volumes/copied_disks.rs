//! Disks of a state directory that is a copy of another.
//!
//! A copied pool file still has the filesystem identifier of the original, and the kernel does not
//! mount two filesystems with one identifier. So a copy gets a new one before it is first mounted.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use linux::loopdev::LoopDevice;

use super::{POOL_FILE, VolumeError, VolumeErrorContext, pool_file};

/// Returns the first disk below `directory` that is attached to a loop device: another server uses the
/// same file under another name.
pub(crate) fn disk_in_use(directory: &Path) -> Result<Option<PathBuf>, VolumeError> {
    let pool = directory.join(POOL_FILE);
    let mut disks = vec![pool];
    let images = directory.join("ext4");
    match fs::read_dir(&images) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        entries => {
            for entry in entries.during("list", &images)? {
                let path = entry.during("list", &images)?.path();
                if path.extension().is_some_and(|extension| extension == "img") {
                    disks.push(path);
                }
            }
        }
    }
    for disk in disks {
        let file = match File::open(&disk) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file.during("open", &disk)?,
        };
        // Only root attaches disks, and only root may search for them.
        if linux::privileges::is_host_root()
            && LoopDevice::find_attached(&file).during("look for the device of", &disk)?.is_some()
        {
            return Ok(Some(disk));
        }
    }
    Ok(None)
}

/// Gives the pool a new identifier.
pub(crate) fn renew_pool_identifier(directory: &Path) -> Result<(), VolumeError> {
    let pool = directory.join(POOL_FILE);
    match OpenOptions::new().read(true).write(true).open(&pool) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        file => file
            .and_then(|file| pool_file::set_random_identifier(&file))
            .during("give an identifier to", &pool),
    }
}
