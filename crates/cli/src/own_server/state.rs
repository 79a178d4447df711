//! The state directories of servers of one's own: `own/<name>` below the state directory of this host.
//!
//! ```text
//! own.lock      held while directories are made or found, so that none is taken for a leftover before it is locked
//! own/<name>    a server, as long as its `lock` is held; otherwise what a killed one left
//! own/<name>.gone   all sandboxes were removed; only files are left
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use launcher::images::OWN_SERVERS_DIRECTORY;
use rustix::fs::FlockOperation;

use crate::output::WithHint;
use crate::serve::{lock_file, make_state_dir, state_dir_hint};

/// The suffix of a directory whose sandboxes are gone.
const GONE_SUFFIX: &str = "gone";

/// The directory with the state of all servers of one's own, locked against other starts.
pub(super) struct OwnServersDir {
    path: PathBuf,
    _turn: File,
}

impl OwnServersDir {
    pub(super) fn open(host_state: &Path) -> Result<Self> {
        let path = host_state.join(OWN_SERVERS_DIRECTORY);
        let opened = make_state_dir(host_state)
            .and_then(|()| make_state_dir(&path))
            .and_then(|()| lock_file(&host_state.join("own.lock"), FlockOperation::LockExclusive));
        match opened {
            Ok(turn) => Ok(Self { path, _turn: turn }),
            Err(error) => {
                let hint = state_dir_hint(&error);
                Err(error).with_context(|| format!("could not make `{}`", path.display())).with_hint(hint)
            }
        }
    }

    /// Makes the directory of a new server. The caller locks it while this value exists.
    pub(super) fn create(&self) -> Result<PathBuf> {
        let mut entropy = [0; 4];
        rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
        let path = self.path.join(format!("{:08x}", u32::from_ne_bytes(entropy)));
        make_state_dir(&path).with_context(|| format!("could not make `{}`", path.display()))?;
        Ok(path)
    }

    /// The directories of servers that were killed. Those of which only files are left are removed at once.
    pub(super) fn find_leftovers(&self) -> Result<Vec<PathBuf>> {
        let mut leftovers = Vec::new();
        let entries = fs::read_dir(&self.path);
        for entry in entries.with_context(|| format!("could not list `{}`", self.path.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|suffix| suffix == GONE_SUFFIX) {
                remove_files(&path);
            } else if is_unlocked(&path) {
                leftovers.push(path);
            }
        }
        Ok(leftovers)
    }
}

fn is_unlocked(directory: &Path) -> bool {
    lock_file(&directory.join("lock"), FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Removes the directory of a server whose sandboxes are gone.
pub(super) fn remove_state(directory: &Path) {
    let gone = directory.with_extension(GONE_SUFFIX);
    match fs::rename(directory, &gone) {
        Ok(()) => remove_files(&gone),
        Err(error) => warn_of_remains(directory, &error),
    }
}

fn remove_files(directory: &Path) {
    match fs::remove_dir_all(directory) {
        // Another start may remove it as well.
        Err(error) if error.kind() != io::ErrorKind::NotFound => warn_of_remains(directory, &error),
        _ => {}
    }
}

fn warn_of_remains(directory: &Path, error: &io::Error) {
    tracing::warn!(directory = %directory.display(), %error, "state directory was not removed; the next start retries");
}
