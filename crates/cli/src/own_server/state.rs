//! The state directories of servers of one's own: `own/<name>` below the state directory of this host.
//!
//! ```text
//! own.lock      held while directories are made or found, so that none is taken for a leftover before it is locked
//! own/<name>    a server, as long as its `lock` is held; otherwise what a killed one left
//! own/<name>.gone   all sandboxes were removed; only files are left
//! ```
//!
//! A start removes whole directories here, so nothing that another user could have placed is taken for a leftover: the
//! directories must be ours and closed to others, and only names that [`OwnServersDir::create`] chooses are considered.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use launcher::images::OWN_SERVERS_DIRECTORY;
use rustix::fs::FlockOperation;

use crate::output::WithHint;
use crate::serve::state::check_owners;
use crate::serve::{lock_file, make_state_dir, state_dir_hint};

/// The suffix of a directory whose sandboxes are gone.
const GONE_SUFFIX: &str = "gone";
/// How many hexadecimal digits the name of a directory has.
const NAME_DIGITS: usize = 8;
/// Others may pass through, because the server of a supervisor that is root has its own uid.
const DIRECTORY_MODE: u32 = 0o711;

/// The directory with the state of all servers of one's own, locked against other starts.
pub(super) struct OwnServersDir {
    path: PathBuf,
    _turn: File,
}

impl OwnServersDir {
    /// Makes the directory if it does not exist. One that others can change is refused.
    pub(super) fn open(host_state: &Path) -> Result<Self> {
        let path = host_state.join(OWN_SERVERS_DIRECTORY);
        with_state_hint(make_state_dir(host_state), host_state)?;
        check_owners(host_state)?;
        // A link to the state directory is the choice of its owner, who was just checked.
        check_closed(host_state, fs::metadata(host_state))?;
        match make_new_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => with_state_hint(made, &path)?,
        }
        check_closed(&path, fs::symlink_metadata(&path))?;
        let turn = lock_file(&host_state.join("own.lock"), FlockOperation::LockExclusive);
        Ok(Self { _turn: with_state_hint(turn, &path)?, path })
    }

    /// Makes the directory of a new server. The caller locks it while this value exists.
    pub(super) fn create(&self) -> Result<PathBuf> {
        let mut entropy = [0; 4];
        rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
        let path = self.path.join(format!("{:0NAME_DIGITS$x}", u32::from_ne_bytes(entropy)));
        make_new_dir(&path).with_context(|| format!("could not make `{}`", path.display()))?;
        Ok(path)
    }

    /// The directories of servers that were killed. Those of which only files are left are removed at once.
    pub(super) fn find_leftovers(&self) -> Result<Vec<PathBuf>> {
        let mut leftovers = Vec::new();
        let entries = fs::read_dir(&self.path);
        for entry in entries.with_context(|| format!("could not list `{}`", self.path.display()))? {
            let path = entry?.path();
            let Some(kind) = leftover_kind(&path) else { continue };
            match kind {
                LeftoverKind::Files => remove_files(&path),
                LeftoverKind::Sandboxes if is_unlocked(&path) => leftovers.push(path),
                LeftoverKind::Sandboxes => {}
            }
        }
        Ok(leftovers)
    }
}

/// What a directory of a server may hold.
enum LeftoverKind {
    /// Perhaps sandboxes; the server may still run.
    Sandboxes,
    /// Only files.
    Files,
}

/// Recognizes a directory that a server of ours has made. Everything else, also what a link leads to, was put there by
/// someone else and is left alone.
fn leftover_kind(path: &Path) -> Option<LeftoverKind> {
    let name = path.file_name()?.to_str()?;
    let (digits, kind) = match name.rsplit_once('.') {
        None => (name, LeftoverKind::Sandboxes),
        Some((digits, GONE_SUFFIX)) => (digits, LeftoverKind::Files),
        Some(_) => return None,
    };
    let is_ours = digits.len() == NAME_DIGITS
        && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
        && fs::symlink_metadata(path).is_ok_and(|facts| facts.is_dir() && is_owned(&facts));
    is_ours.then_some(kind)
}

/// Refuses what is not a directory of ours, and one in which others may make or replace something.
fn check_closed(directory: &Path, facts: io::Result<Metadata>) -> Result<()> {
    let shown = directory.display();
    let facts = facts.with_context(|| format!("could not look at `{shown}`"))?;
    if !facts.is_dir() {
        return Err(anyhow!("`{shown}` is not a directory"))
            .with_hint("remove it, or name another directory with --state-dir");
    }
    if !is_owned(&facts) {
        return Err(anyhow!("`{shown}` belongs to uid {}", facts.uid()))
            .with_hint("name a directory of your own with --state-dir");
    }
    if facts.mode() & 0o022 != 0 {
        return Err(anyhow!("other users may write to `{shown}`"))
            .with_hint("close it with `chmod go-w`, or name another directory with --state-dir");
    }
    Ok(())
}

fn is_owned(facts: &Metadata) -> bool {
    facts.uid() == rustix::process::geteuid().as_raw()
}

/// Makes a directory that must not exist, so that no link is followed.
fn make_new_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(DIRECTORY_MODE).create(path)?;
    // The umask may have removed something.
    fs::set_permissions(path, fs::Permissions::from_mode(DIRECTORY_MODE))
}

fn with_state_hint<T>(result: io::Result<T>, path: &Path) -> Result<T> {
    result.or_else(|error| {
        let hint = state_dir_hint(&error);
        Err(error).with_context(|| format!("could not make `{}`", path.display())).with_hint(hint)
    })
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use tempfile::TempDir;

    use super::*;

    fn open_error(host_state: &Path) -> String {
        OwnServersDir::open(host_state).err().expect("it is refused").to_string()
    }

    #[test]
    fn killed_servers_are_found_and_files_of_gone_ones_removed() {
        let state = TempDir::new().unwrap();
        let own = OwnServersDir::open(state.path()).unwrap();
        let (killed, running) = (own.create().unwrap(), own.create().unwrap());
        let _lock = lock_file(&running.join("lock"), FlockOperation::LockExclusive).unwrap();
        let gone = own.path.join("0123abcd.gone");
        fs::create_dir(&gone).unwrap();
        fs::write(gone.join("file"), "x").unwrap();
        assert_eq!(own.find_leftovers().unwrap(), [killed]);
        assert!(!gone.exists());
    }

    #[test]
    fn what_no_server_has_made_is_left_alone() {
        let (state, outside) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        fs::write(outside.path().join("file"), "x").unwrap();
        let own = OwnServersDir::open(state.path()).unwrap();
        let names =
            ["documents", "documents.gone", "0123abcd.gone.gone", "0123ABCD", "0123abcde", "012.gone"];
        let directories = names.map(|name| own.path.join(name));
        for directory in &directories {
            fs::create_dir(directory).unwrap();
            fs::write(directory.join("file"), "x").unwrap();
        }
        for name in ["00000001", "00000001.gone"] {
            symlink(outside.path(), own.path.join(name)).unwrap();
        }
        for name in ["00000002", "00000002.gone"] {
            fs::write(own.path.join(name), "x").unwrap();
        }
        if testkit::is_root() {
            for name in ["00000003", "00000003.gone"] {
                fs::create_dir(own.path.join(name)).unwrap();
                chown(own.path.join(name), Some(4711), None).unwrap();
            }
        }
        let count = || fs::read_dir(&own.path).unwrap().count();
        let before = count();
        assert_eq!(own.find_leftovers().unwrap(), Vec::<PathBuf>::new());
        assert_eq!(count(), before);
        for directory in directories.iter().map(PathBuf::as_path).chain([outside.path()]) {
            let files: Vec<_> =
                fs::read_dir(directory).unwrap().map(|file| file.unwrap().file_name()).collect();
            assert_eq!(files, ["file"], "{}", directory.display());
        }
    }

    #[test]
    fn directory_of_servers_that_is_a_link_or_a_file_is_refused() {
        let (state, outside) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let own = state.path().join(OWN_SERVERS_DIRECTORY);
        symlink(outside.path(), &own).unwrap();
        assert!(open_error(state.path()).contains("own` is not a directory"));
        fs::remove_file(&own).unwrap();
        fs::write(&own, "x").unwrap();
        assert!(open_error(state.path()).contains("own` is not a directory"));
    }

    #[test]
    fn directories_that_others_may_write_to_are_refused() {
        let state = TempDir::new().unwrap();
        drop(OwnServersDir::open(state.path()).unwrap());
        for directory in [state.path().join(OWN_SERVERS_DIRECTORY), state.path().to_owned()] {
            for mode in [0o720, 0o1777] {
                fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
                assert!(open_error(state.path()).contains("other users may write"), "{mode:o}");
            }
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        }
        OwnServersDir::open(state.path()).unwrap();
    }

    #[test]
    fn directories_of_another_user_are_refused() {
        if !testkit::needs_root() {
            return;
        }
        let (state, links) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        drop(OwnServersDir::open(state.path()).unwrap());
        let link = links.path().join("link");
        symlink(state.path(), &link).unwrap();
        for directory in [state.path().join(OWN_SERVERS_DIRECTORY), state.path().to_owned()] {
            chown(&directory, Some(4711), None).unwrap();
            assert!(open_error(state.path()).contains("belongs to uid 4711"));
            assert!(open_error(&link).contains("belongs to uid 4711"));
            chown(&directory, Some(0), None).unwrap();
        }
        OwnServersDir::open(&link).unwrap();
    }
}
