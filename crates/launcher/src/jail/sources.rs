//! The sources of mounts, opened once and then used by descriptor.
//!
//! ```text
//! allowed prefix ─► path beneath it ─► sub path beneath that ─► a detached copy ─► the sandbox
//!    (operator)        (client)            (client)               (idmapped, nosuid, nodev)
//! ```
//!
//! Another sandbox may be writing to a shared directory at the same time and replace directories with
//! links. So no name is looked up twice: the source is opened below the prefix without following
//! links, and that descriptor is checked and copied.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;
use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces::{self, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, ProcessExit, SingleThread};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};

use super::id_maps;

/// The location of a mount's source.
#[derive(Clone, Debug)]
pub(crate) struct SourceLocation {
    pub origin: MountOrigin,
    pub sub_path: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub(crate) enum MountOrigin {
    /// A path from a caller who could read and write there anyway, so links in it are followed.
    Named(PathBuf),
    /// A path below a directory that the operator allows. Missing directories there are made.
    Beneath { prefix: PathBuf, path: PathBuf, sharing: HostSharing },
    /// A volume of this server, which has canonical ids.
    Volume(PathBuf),
}

/// How a directory of the host is shared with a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostSharing {
    /// Files of root stay root's.
    Listed,
    /// A program of the host and the sandbox's default user work on the same files, even if the program runs as root. If
    /// the sandbox may write, the last directory that is made can be written by every user: the program may be another
    /// user than the owner of the directories above.
    Reserved { writable: bool },
}

/// The source of a mount, open.
#[derive(Debug)]
pub(crate) struct OpenedSource {
    pub source: OwnedFd,
    pub ids: SourceIds,
}

/// The kind of ids that the files of a source have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceIds {
    /// Ids of the host's users; these are the owner and group of the source itself.
    Host { uid: u32, gid: u32 },
    /// The same, and the owner's files belong to the sandbox's default user even if the owner is root.
    Reserved { uid: u32, gid: u32 },
    /// Ids that are the same in every sandbox.
    Canonical,
}

/// The reason why a source could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountSourceError {
    #[error("`{0}` does not exist or is not a directory")]
    Missing(PathBuf, #[source] io::Error),
    #[error("could not make directory `{0}`")]
    NotMade(PathBuf, #[source] io::Error),
    #[error("sub path `{0}` is not a directory below its source")]
    SubPath(PathBuf, #[source] io::Error),
    #[error("could not open `{0}` for a mount")]
    Io(PathBuf, #[source] io::Error),
}

impl MountSourceError {
    /// Whether the source does not exist, and nothing is in its way.
    pub(crate) fn is_missing(&self) -> bool {
        let (Self::Missing(_, error)
        | Self::NotMade(_, error)
        | Self::SubPath(_, error)
        | Self::Io(_, error)) = self;
        error.kind() == io::ErrorKind::NotFound
    }
}

impl SourceLocation {
    /// Opens the source and makes missing directories where that is allowed.
    pub(crate) fn open(&self, thread: &SingleThread) -> Result<OpenedSource, MountSourceError> {
        self.open_with(MissingDirectories::Make { thread, last_mode: PLAIN_MODE })
    }

    /// Opens a source that exists.
    pub(crate) fn open_existing(&self) -> Result<OpenedSource, MountSourceError> {
        self.open_with(MissingDirectories::Fail)
    }

    fn open_with(&self, missing: MissingDirectories<'_>) -> Result<OpenedSource, MountSourceError> {
        let (whole, named) = match &self.origin {
            MountOrigin::Named(path) => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let opened = rustix::fs::openat(CWD, path, flags, Mode::empty());
                (opened.map_err(|error| MountSourceError::Io(path.clone(), error.into()))?, path)
            }
            MountOrigin::Volume(path) => {
                let root =
                    RootDirectory::open(path).map_err(|error| MountSourceError::Io(path.clone(), error))?;
                (root.into(), path)
            }
            MountOrigin::Beneath { prefix, path, sharing } => {
                (open_beneath(prefix, path, missing.with_sharing(*sharing))?, prefix)
            }
        };
        let source = match &self.sub_path {
            None => whole,
            Some(sub_path) => open_directory_beneath(&RootDirectory::from(whole), sub_path, missing)
                .map_err(|error| MountSourceError::SubPath(sub_path.clone(), error.into()))?,
        };
        let ids = match &self.origin {
            MountOrigin::Volume(_) => SourceIds::Canonical,
            MountOrigin::Named(_) | MountOrigin::Beneath { .. } => {
                let (uid, gid) = read_host_ids(source.as_fd())
                    .map_err(|error| MountSourceError::Io(named.clone(), error))?;
                match &self.origin {
                    MountOrigin::Beneath { sharing: HostSharing::Reserved { .. }, .. } => {
                        SourceIds::Reserved { uid, gid }
                    }
                    _ => SourceIds::Host { uid, gid },
                }
            }
        };
        Ok(OpenedSource { source, ids })
    }
}

/// The action for missing directories.
#[derive(Clone, Copy)]
enum MissingDirectories<'thread> {
    Fail,
    Make {
        thread: &'thread SingleThread,
        /// The mode of the last directory; those above it have [`PLAIN_MODE`].
        last_mode: u32,
    },
}

/// The mode of directories that are made.
const PLAIN_MODE: u32 = 0o755;
/// The mode of a directory that every user of the host may write to.
const SHARED_MODE: u32 = 0o777;

impl MissingDirectories<'_> {
    fn with_sharing(self, sharing: HostSharing) -> Self {
        match (self, sharing) {
            (Self::Make { thread, .. }, HostSharing::Reserved { writable: true }) => {
                Self::Make { thread, last_mode: SHARED_MODE }
            }
            (missing, _) => missing,
        }
    }
}

fn open_beneath(
    prefix: &Path,
    path: &Path,
    missing: MissingDirectories<'_>,
) -> Result<OwnedFd, MountSourceError> {
    let root = RootDirectory::open_without_symlinks(prefix)
        .map_err(|error| MountSourceError::Missing(prefix.to_owned(), error))?;
    if path == Path::new("") {
        return Ok(root.into());
    }
    let whole = || prefix.join(path);
    let opened = match open_directory_beneath(&root, path, missing) {
        Err(DescendError::Open(error)) if error.kind() == io::ErrorKind::NotADirectory => {
            open_file(&root, path).map_err(DescendError::Open)
        }
        opened => opened,
    };
    opened.map_err(|failure| match failure {
        DescendError::Open(error) => MountSourceError::Missing(whole(), error),
        DescendError::Make(error) => MountSourceError::NotMade(whole(), error),
    })
}

/// Opens a source that is a regular file. Links and devices cannot be mounted.
fn open_file(root: &RootDirectory, path: &Path) -> io::Result<OwnedFd> {
    let file = root.open_with(path, OFlags::PATH, 0)?;
    let is_file = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file();
    if is_file { Ok(file.into()) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

enum DescendError {
    Open(io::Error),
    Make(io::Error),
}

impl From<DescendError> for io::Error {
    fn from(descent: DescendError) -> Self {
        match descent {
            DescendError::Open(error) | DescendError::Make(error) => error,
        }
    }
}

/// Opens the directory `path` below `root`.
fn open_directory_beneath(
    root: &RootDirectory,
    path: &Path,
    missing: MissingDirectories<'_>,
) -> Result<OwnedFd, DescendError> {
    let directory = OFlags::PATH | OFlags::DIRECTORY;
    match (root.open_with(path, directory, 0), missing) {
        (Err(error), MissingDirectories::Make { thread, last_mode })
            if error.kind() == io::ErrorKind::NotFound =>
        {
            make_missing_directories(thread, root, path, last_mode).map_err(DescendError::Make)?;
            root.open_with(path, directory, 0).map(Into::into).map_err(DescendError::Open)
        }
        (opened, _) => opened.map(Into::into).map_err(DescendError::Open),
    }
}

/// Makes the missing directories of `path`, each as the owner of its parent directory.
fn make_missing_directories(
    thread: &SingleThread,
    root: &RootDirectory,
    path: &Path,
    last_mode: u32,
) -> io::Result<()> {
    let names: Vec<&Path> = path.iter().map(Path::new).collect();
    // Each further attempt finds at least one more directory, unless another process removes some.
    for _ in 0..=names.len() {
        if make_missing_once(thread, root, &names, last_mode)? == MakeOutcome::Complete {
            return Ok(());
        }
    }
    Err(io::Error::other("another process changes the directories above it"))
}

fn make_missing_once(
    thread: &SingleThread,
    root: &RootDirectory,
    names: &[&Path],
    last_mode: u32,
) -> io::Result<MakeOutcome> {
    let mut above = PathBuf::from(".");
    for (index, name) in names.iter().enumerate() {
        let parent = root.open_with(&above, OFlags::PATH | OFlags::DIRECTORY, 0)?;
        match rustix::fs::statat(&parent, *name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => above.push(name),
            Err(rustix::io::Errno::NOENT) => {
                return NewDirectories::new(parent.into(), &names[index..], last_mode)?.make(thread);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(MakeOutcome::Complete)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MakeOutcome {
    Complete,
    /// Another process made one of the directories, perhaps with another owner.
    Interrupted,
}

/// Directories to be made below one another. They get the owner of the first one's parent.
struct NewDirectories<'a> {
    parent: OwnedFd,
    names: &'a [&'a Path],
    /// The owner and group of `parent`.
    owner: (u32, u32),
    last_mode: u32,
}

impl<'a> NewDirectories<'a> {
    fn new(parent: OwnedFd, names: &'a [&'a Path], last_mode: u32) -> io::Result<Self> {
        let facts = rustix::fs::fstat(&parent)?;
        Ok(Self { parent, names, owner: (facts.st_uid, facts.st_gid), last_mode })
    }

    /// Makes the directories with the rights of their owner, so that they belong to that owner from the beginning.
    /// Changing the owner afterwards would need a second lookup, and a directory could have been replaced in the
    /// meantime. Only another owner than this process needs a child process.
    fn make(self, thread: &SingleThread) -> io::Result<MakeOutcome> {
        if !linux::privileges::is_host_root() || self.owner == (0, 0) {
            let umask = rustix::process::umask(Mode::empty());
            let made = self.make_all();
            rustix::process::umask(umask);
            return made;
        }
        match thread.fork(NamespaceSet::NONE, None)? {
            ForkResult::Child => {
                let (uid, gid) = self.owner;
                let switched = namespaces::switch_ids(uid, gid, SetgroupsPolicy::Allow);
                rustix::process::umask(Mode::empty());
                spawn::exit_now(match switched.and_then(|()| self.make_all()) {
                    Ok(MakeOutcome::Complete) => 0,
                    Ok(MakeOutcome::Interrupted) => INTERRUPTED_CODE,
                    Err(error) => error.raw_os_error().unwrap_or(1),
                })
            }
            ForkResult::Parent { pidfd, .. } => match spawn::wait_for_child(pidfd.as_fd())? {
                ProcessExit::Code(0) => Ok(MakeOutcome::Complete),
                ProcessExit::Code(INTERRUPTED_CODE) => Ok(MakeOutcome::Interrupted),
                ProcessExit::Code(errno) => Err(io::Error::from_raw_os_error(errno)),
                ProcessExit::Signal(_) => Err(io::Error::other("the process that makes the directory died")),
            },
        }
    }

    fn make_all(self) -> io::Result<MakeOutcome> {
        let Self { mut parent, names, owner, last_mode } = self;
        for (index, name) in names.iter().enumerate() {
            let is_last = index + 1 == names.len();
            let mode = if is_last { last_mode } else { PLAIN_MODE };
            match rustix::fs::mkdirat(&parent, *name, Mode::from_raw_mode(mode)) {
                Ok(()) => {}
                Err(rustix::io::Errno::EXIST) => return Ok(MakeOutcome::Interrupted),
                Err(error) => return Err(error.into()),
            }
            if is_last {
                break;
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            parent = rustix::fs::openat(&parent, *name, flags, Mode::empty())?;
            let facts = rustix::fs::fstat(&parent)?;
            if (facts.st_uid, facts.st_gid) != owner {
                return Ok(MakeOutcome::Interrupted);
            }
        }
        Ok(MakeOutcome::Complete)
    }
}

/// The exit code for [`MakeOutcome::Interrupted`], which is no errno.
const INTERRUPTED_CODE: i32 = 255;

/// Returns the owner of a source. Files and directories can be mounted; devices, pipes and sockets
/// cannot.
fn read_host_ids(source: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let facts = rustix::fs::fstat(source)?;
    match FileType::from_raw_mode(facts.st_mode) {
        FileType::Directory | FileType::RegularFile => {}
        _ => return Err(io::Error::other("the source is neither a file nor a directory")),
    }
    Ok((facts.st_uid, facts.st_gid))
}

/// Returns the attributes of a mount: set-id bits and devices on it have no effect.
pub(crate) fn mount_attributes(read_only: bool) -> MountAttrs {
    let always = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV);
    if read_only { always.and(MountAttrs::READ_ONLY) } else { always }
}

/// The sandbox for which sources are mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappingTarget<'fd> {
    /// The sandbox's user namespace.
    pub namespace: BorrowedFd<'fd>,
    /// The first id of its range.
    pub base: u32,
    /// The uid and gid that its commands start with.
    pub user: (u32, u32),
}

/// Copies the sources of one sandbox. Each id map is a user namespace, which takes a fork to make, so directories with
/// the same owner share one.
pub(crate) struct SourceMapper<'a> {
    thread: &'a SingleThread,
    target: MappingTarget<'a>,
    made: Vec<(HostIdMap, OwnedFd)>,
}

/// The two pairs of an id map: the owner and the group of a directory on the host, and the ids that they have inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HostIdMap {
    users: (u32, u32),
    groups: (u32, u32),
}

impl<'a> SourceMapper<'a> {
    pub(crate) fn new(thread: &'a SingleThread, target: MappingTarget<'a>) -> Self {
        Self { thread, target, made: Vec::new() }
    }

    /// Makes a detached copy of a source, mapped for the sandbox's range of ids. Submounts of the host are left out: each
    /// would need its own map and check.
    pub(crate) fn clone_source(&mut self, opened: &OpenedSource, read_only: bool) -> io::Result<OwnedFd> {
        let copy = mounts::clone_tree_of(opened.source.as_fd(), MountDepth::Single)?;
        let map = match HostIdMap::of_source(opened.ids, self.target.user) {
            None => self.target.namespace,
            Some(map) => self.find_or_make(map)?,
        };
        mounts::set_attributes(copy.as_fd(), mount_attributes(read_only), Some(map), MountDepth::Single)?;
        Ok(copy)
    }

    fn find_or_make(&mut self, map: HostIdMap) -> io::Result<BorrowedFd<'_>> {
        let index = match self.made.iter().position(|(known, _)| *known == map) {
            Some(index) => index,
            None => {
                let namespace = map.make_namespace(self.thread, self.target.base)?;
                self.made.push((map, namespace));
                self.made.len() - 1
            }
        };
        Ok(self.made[index].1.as_fd())
    }
}

impl HostIdMap {
    /// Returns the map for a source; `None` if its files have the ids of every sandbox.
    fn of_source(ids: SourceIds, (user, group): (u32, u32)) -> Option<Self> {
        match ids {
            SourceIds::Canonical => None,
            SourceIds::Host { uid, gid } => {
                // A directory of root stays root's; otherwise any user inside could act as root there.
                let user = if uid == 0 { 0 } else { user };
                let group = if gid == 0 { 0 } else { group };
                Some(Self { users: (uid, user), groups: (gid, group) })
            }
            SourceIds::Reserved { uid, gid } => Some(Self { users: (uid, user), groups: (gid, group) }),
        }
    }

    fn make_namespace(self, thread: &SingleThread, base: u32) -> io::Result<OwnedFd> {
        let ((uid, user), (gid, group)) = (self.users, self.groups);
        // An owner in the id range of sandboxes would collide with the map of every other id.
        if uid >= id_maps::IDS_PER_SANDBOX || gid >= id_maps::IDS_PER_SANDBOX {
            return Err(io::Error::other(
                "the directory does not belong to root or an ordinary user of this host",
            ));
        }
        let users = id_maps::mount_map(base, uid, user)?;
        let groups = id_maps::mount_map(base, gid, group)?;
        namespaces::create_user_namespace(thread, &users, &groups)
    }
}
