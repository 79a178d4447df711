//! The identity and the times of a file of the host, which change whenever the file does.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A path and what was found there.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PathStamp {
    pub(super) path: PathBuf,
    /// `None` if nothing was there.
    found: Option<[i64; 6]>,
}

impl PathStamp {
    /// Returns the stamp of the entry itself, even if it is a link.
    pub(super) fn of(path: &Path) -> Self {
        Self::new(path, fs::symlink_metadata(path).ok())
    }

    /// Returns the stamp of the file that the path leads to.
    pub(super) fn of_target(path: &Path) -> Self {
        Self::new(path, fs::metadata(path).ok())
    }

    fn new(path: &Path, found: Option<Metadata>) -> Self {
        let found = found.map(|found| {
            let [dev, ino] = [found.dev(), found.ino()].map(u64::cast_signed);
            [dev, ino, found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()]
        });
        Self { path: path.to_owned(), found }
    }
}
