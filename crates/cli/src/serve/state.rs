//! The state directory of a server: locked first, then examined, then changed.
//!
//! [`StateDir::examine`] changes nothing that was there, so a start that fails leaves the directory as
//! it was. [`StateDir::prepare`] repairs the owners of files and determines the identity of the
//! directory.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use launcher::identity::{self, ExaminedIdentity, IdentityError, ServerIdentity};
use linux::fs::RootDirectory;
use rustix::fs::{FileType, FlockOperation, Gid, Uid};

use crate::config::Config;
use crate::output::WithHint;

/// How long the lock of a killed supervisor may outlive it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum depth of the server's own directory: its database, its secret, and downloads.
const MAX_SERVER_DEPTH: usize = 16;
/// How many paths with a wrong owner an error names.
const MAX_LISTED_PATHS: usize = 10;
/// The directories in which every file belongs to the launcher.
const RECORD_DIRECTORIES: [&str; 3] = ["boxes", "ranges", "snapshots"];

/// A state directory that is locked and was found usable.
pub(crate) struct StateDir {
    lock: File,
    examined: ExaminedIdentity,
}

impl StateDir {
    /// Makes the state directory if it does not exist, locks it and checks everything that a start
    /// depends on.
    pub(crate) fn examine(config: &Config) -> Result<Self> {
        let directory = &config.state_dir;
        let action = || format!("could not prepare the state directory `{}`", directory.display());
        let unusable = |error: io::Error| {
            let hint = state_dir_hint(&error);
            Err(error).with_context(action).with_hint(hint)
        };
        if let Err(error) = make_state_dir(directory) {
            return unusable(error);
        }
        check_owners(directory)?;
        let lock = match lock_until(&directory.join("lock"), Instant::now() + LOCK_TIMEOUT) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(anyhow!("another server uses the state directory `{}`", directory.display()))
                    .with_hint("stop it, or choose another directory with --state-dir");
            }
            Err(error) => return unusable(error),
        };
        if linux::privileges::is_host_root() {
            check_reachable(directory)?;
        }
        let examined = identity::examine_identity(directory, &config.naming).map_err(with_identity_hint)?;
        Ok(Self { lock, examined })
    }

    /// Gives the server its directory and the state directory its identity. The lock is held as long as
    /// the returned file is open.
    pub(crate) fn prepare(self, config: &Config) -> Result<(File, ServerIdentity)> {
        let directory = &config.state_dir;
        let own = server_dir(directory);
        let action = || format!("could not prepare the state directory `{}`", directory.display());
        fs::set_permissions(directory, fs::Permissions::from_mode(0o711)).with_context(action)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&own).with_context(action)?;
        if let Some(uid) = server_uid(config, &self.examined.identity) {
            chown_server_dir(&own, uid)
                .with_context(|| format!("could not give `{}` to uid {uid}", own.display()))?;
        }
        let identity = self.examined.assign_identity().map_err(with_identity_hint)?;
        Ok((self.lock, identity))
    }
}

/// An error of the state directory's identity, with its hint.
pub(crate) fn with_identity_hint(error: IdentityError) -> anyhow::Error {
    let hint = error.hint();
    let error = anyhow::Error::from(error);
    match hint {
        Some(hint) => Err::<(), _>(error).with_hint(hint).expect_err("it is an error"),
        None => error,
    }
}

/// Advice for a state directory that cannot be used, if the cause is permissions or a full disk.
pub(crate) fn state_dir_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "choose a directory that you may write to with --state-dir",
        io::ErrorKind::ReadOnlyFilesystem => "name a directory on a writable disk with --state-dir",
        io::ErrorKind::StorageFull => "free some space, or name a directory on another disk with --state-dir",
        _ => "name another directory with --state-dir",
    }
}

/// The uid of the server: one of our range, and usually not the same as that of another server on this
/// host.
pub(crate) fn server_uid(config: &Config, identity: &ServerIdentity) -> Option<u32> {
    let place =
        identity.instance.bytes().fold(0u16, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    linux::privileges::is_host_root().then_some(config.uid_base + u32::from(place))
}

/// Makes the state directory. It belongs to the user who starts us; others may only pass through, and
/// only we can replace what lies in it.
pub(crate) fn make_state_dir(directory: &Path) -> std::io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    fs::DirBuilder::new().recursive(true).mode(0o711).create(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o711))
}

/// Everything but the server's own directory and the socket for it must belong to us: another owner could replace it, and an
/// ordinary user could not write to it. Copying a directory may change owners.
///
/// Files of images and disks have their own owners, so only the directory itself and those that hold the
/// launcher's records are listed.
pub(crate) fn check_owners(directory: &Path) -> Result<()> {
    let own = rustix::process::geteuid();
    // A killed supervisor leaves the socket, which the next one replaces.
    let of_server = [server_dir(directory), directory.join(egress_protocol::EGRESS_SOCKET)];
    let server_has_own_uid = linux::privileges::is_host_root();
    let mut paths = vec![directory.to_owned()];
    paths.extend(list_directory(directory)?);
    for name in RECORD_DIRECTORIES {
        paths.extend(list_directory(&directory.join(name))?);
    }
    let mut foreign = Vec::new();
    for path in paths.into_iter().filter(|path| !server_has_own_uid || !of_server.contains(path)) {
        let facts = match fs::symlink_metadata(&path) {
            // A socket or a draft was removed meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            facts => facts.with_context(|| format!("could not look at `{}`", path.display()))?,
        };
        if facts.uid() != own.as_raw() {
            foreign.push((path, facts.uid()));
        }
    }
    if foreign.is_empty() { Ok(()) } else { Err(refuse_owners(directory, &foreign, own.as_raw())) }
}

/// The paths in a directory; none if it does not exist or is not a directory.
fn list_directory(directory: &Path) -> Result<Vec<PathBuf>> {
    let action = || format!("could not list `{}`", directory.display());
    let listed = match fs::read_dir(directory) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        listed => listed
            .with_context(action)
            .with_hint("choose a directory that you may write to with --state-dir")?,
    };
    let mut paths = listed
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<PathBuf>>>()
        .with_context(action)?;
    paths.sort();
    Ok(paths)
}

/// Names the paths that belong to others, and one command that gives all of them to `own`. The command
/// is not recursive: the files of images and disks have their own owners.
fn refuse_owners(directory: &Path, foreign: &[(PathBuf, u32)], own: u32) -> anyhow::Error {
    let shown: Vec<String> = foreign
        .iter()
        .take(MAX_LISTED_PATHS)
        .map(|(path, uid)| format!("`{}` belongs to uid {uid}", path.display()))
        .collect();
    let more = match foreign.len().saturating_sub(MAX_LISTED_PATHS) {
        0 => String::new(),
        more => format!(", and {more} more belong to other users"),
    };
    let message = format!("{}{more}, and this server runs as uid {own}", shown.join(", "));
    let command = if foreign.len() <= MAX_LISTED_PATHS {
        let paths: Vec<String> = foreign.iter().map(|(path, _)| shell_word(path)).collect();
        format!("chown -h {own} {}", paths.join(" "))
    } else {
        let records = RECORD_DIRECTORIES.map(|name| directory.join(name));
        let roots =
            std::iter::once(directory.to_owned()).chain(records.into_iter().filter(|path| path.is_dir()));
        let roots: Vec<String> = roots.map(|path| shell_word(&path)).collect();
        let server = shell_word(&server_dir(directory));
        format!("find {} -maxdepth 1 ! -path {server} -exec chown -h {own} {{}} +", roots.join(" "))
    };
    let error = Err::<(), _>(anyhow!(message)).with_hint(format!("make all of it yours first: `{command}`"));
    error.expect_err("it is an error")
}

/// A path quoted as one word of a shell.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+:@".contains(&byte);
    if text.bytes().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// The server has its own uid and must be able to pass through to its directory.
fn check_reachable(directory: &Path) -> Result<()> {
    for above in directory.ancestors().skip(1) {
        let facts =
            fs::metadata(above).with_context(|| format!("could not look at `{}`", above.display()))?;
        if facts.permissions().mode() & 0o001 == 0 {
            return Err(anyhow!("the server's own user cannot pass through `{}`", above.display()))
                .with_hint("choose another directory with --state-dir, or let others pass with `chmod o+x`");
        }
    }
    Ok(())
}

/// The one directory that belongs to the server: the database and the secret. Everything else is the
/// launcher's, which must not read files that a compromised server has put there.
pub(crate) fn server_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("server")
}

/// Gives the server's directory and everything in it to `uid`: a copied or restored directory belongs to
/// root or to the uid of the server it was copied from.
///
/// A compromised server may have put something there. Links are not followed, and a file that has
/// another owner than the directory, or a second name somewhere else, is left alone.
fn chown_server_dir(directory: &Path, uid: u32) -> std::io::Result<()> {
    // The directory above belongs to root; this one may be a link that another user made.
    let above = RootDirectory::open(directory.parent().unwrap_or(Path::new("/")))?;
    let directory = above.open_subdirectory(Path::new(directory.file_name().unwrap_or_default()))?;
    let former = rustix::fs::fstat(&directory)?.st_uid;
    if former != uid {
        chown_tree(&directory, former, uid, MAX_SERVER_DEPTH)?;
        // Last: an interrupted repair is repeated.
        rustix::fs::fchown(&directory, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid)))?;
    }
    Ok(())
}

fn chown_tree(directory: &RootDirectory, former: u32, uid: u32, depth: usize) -> std::io::Result<()> {
    for entry in directory.list_entries()? {
        let name = Path::new(std::ffi::OsStr::from_bytes(entry.name.as_bytes()));
        let facts = directory.stat(name)?;
        let alone = entry.kind == FileType::RegularFile && facts.st_nlink == 1;
        if facts.st_uid != former || !(alone || entry.kind == FileType::Directory) {
            continue;
        }
        if entry.kind == FileType::Directory && depth > 0 {
            chown_tree(&directory.open_subdirectory(name)?, former, uid, depth - 1)?;
        }
        directory.set_owner(name, uid, uid)?;
    }
    Ok(())
}

/// Locks a file that another process may hold permanently, or only for a moment: the child of a
/// supervisor that was killed while starting it holds the lock until it executes its program.
pub(crate) fn lock_until(path: &Path, end: Instant) -> io::Result<File> {
    const RETRY_INTERVAL: Duration = Duration::from_millis(10);
    loop {
        match lock_file(path, FlockOperation::NonBlockingLockExclusive) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::park_timeout(RETRY_INTERVAL);
            }
            locked => return locked,
        }
    }
}

/// Opens a file and locks it. The kernel releases the lock when its holder dies.
pub(crate) fn lock_file(path: &Path, operation: FlockOperation) -> io::Result<File> {
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    rustix::fs::flock(&file, operation)?;
    Ok(file)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn directory_of_another_user_is_refused_with_the_fix() {
        if !testkit::needs_root() {
            return;
        }
        let state = TempDir::new().unwrap();
        check_owners(state.path()).unwrap();
        fs::create_dir(state.path().join("boxes")).unwrap();
        std::os::unix::fs::chown(state.path().join("boxes"), Some(4711), None).unwrap();
        let error = check_owners(state.path()).unwrap_err();
        assert!(format!("{error:?}").contains("belongs to uid 4711"), "{error:?}");
    }

    #[test]
    fn all_foreign_owners_are_named_at_once_with_a_command_that_helps() {
        if !testkit::needs_root() {
            return;
        }
        for count in [2, 100] {
            let above = TempDir::new().unwrap();
            let state = above.path().join("it's a copy");
            let own = state.join("server");
            fs::create_dir_all(&own).unwrap();
            let names = (0..count).map(|number| format!("boxes/{number}.json"));
            let paths: Vec<PathBuf> = names.chain(["lock".to_owned()]).map(|name| state.join(name)).collect();
            fs::create_dir(state.join("boxes")).unwrap();
            for path in paths.iter().chain([&own]) {
                if path != &own {
                    fs::write(path, "x").unwrap();
                }
                std::os::unix::fs::chown(path, Some(4711), None).unwrap();
            }
            let error = check_owners(&state).unwrap_err();
            let message = error.to_string();
            assert!(message.contains("boxes/0.json` belongs to uid 4711"), "{message}");
            assert!(message.len() < 4096 && message.contains("this server runs as uid 0"), "{message}");
            let hint = error.chain().find_map(crate::output::find_hint).expect("there is a fix");
            let command = hint.split('`').nth(1).expect("a command").to_owned();
            let ran = std::process::Command::new("sh").args(["-c", &command]).status().unwrap();
            assert!(ran.success(), "{command}");
            check_owners(&state).unwrap();
            assert_eq!(fs::metadata(&own).unwrap().uid(), 4711, "the server's own directory is left alone");
        }
    }

    #[test]
    fn server_directory_is_given_to_a_new_uid_without_its_links() {
        if !testkit::needs_root() {
            return;
        }
        let state = TempDir::new().unwrap();
        let (own, outside) = (state.path().join("server"), state.path().join("outside"));
        fs::create_dir_all(own.join("downloads")).unwrap();
        for file in [own.join("secret"), own.join("downloads/a"), outside.clone()] {
            fs::write(file, "x").unwrap();
        }
        fs::hard_link(&outside, own.join("hard")).unwrap();
        std::os::unix::fs::symlink(&outside, own.join("soft")).unwrap();
        chown_server_dir(&own, 4711).unwrap();
        let owner = |path: &Path| fs::metadata(path).unwrap().uid();
        for ours in [own.clone(), own.join("secret"), own.join("downloads"), own.join("downloads/a")] {
            assert_eq!(owner(&ours), 4711, "{}", ours.display());
        }
        assert_eq!(owner(&outside), 0);
    }

    #[test]
    fn server_directory_that_is_a_link_is_refused() {
        if !testkit::needs_root() {
            return;
        }
        let state = TempDir::new().unwrap();
        let (own, outside) = (state.path().join("server"), state.path().join("outside"));
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, &own).unwrap();
        assert!(chown_server_dir(&own, 4711).is_err());
        for path in [outside.join("file"), outside] {
            assert_eq!(fs::metadata(path).unwrap().uid(), 0);
        }
    }
}
