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
use rustix::fs::{CWD, FileType, Mode, OFlags};

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
    let mut above = PathBuf::from(".");
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let parent = root.open_with(&above, OFlags::PATH | OFlags::DIRECTORY, 0)?;
        let mode = if parts.peek().is_some() { PLAIN_MODE } else { last_mode };
        make_directory_as_owner(thread, parent.as_fd(), part.as_ref(), mode)?;
        above.push(part);
    }
    Ok(())
}

/// Makes a directory with the rights of its parent's owner, so that it belongs to that owner from the
/// beginning. Changing the owner afterwards would need a second lookup, and the directory could have
/// been replaced in the meantime.
fn make_directory_as_owner(
    thread: &SingleThread,
    parent: BorrowedFd<'_>,
    name: &Path,
    mode: u32,
) -> io::Result<()> {
    match rustix::fs::statat(parent, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => return Ok(()),
        Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let facts = rustix::fs::fstat(parent)?;
    let own = linux::privileges::is_host_root();
    match thread.fork(NamespaceSet::NONE, None)? {
        ForkResult::Child => {
            let ready = if own {
                namespaces::switch_ids(facts.st_uid, facts.st_gid, SetgroupsPolicy::Allow)
            } else {
                Ok(())
            };
            rustix::process::umask(Mode::empty());
            let made = ready.and_then(|()| {
                rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)).map_err(io::Error::from)
            });
            let errno = made.err().map_or(0, |error| error.raw_os_error().unwrap_or(1));
            spawn::exit_now(errno)
        }
        ForkResult::Parent { pidfd, .. } => match spawn::wait_for_child(pidfd.as_fd())? {
            ProcessExit::Code(0) => Ok(()),
            ProcessExit::Code(errno) => match io::Error::from_raw_os_error(errno) {
                error if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                error => Err(error),
            },
            ProcessExit::Signal(_) => Err(io::Error::other("the process that makes the directory died")),
        },
    }
}

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

/// Makes a detached copy of a source, mapped for a sandbox with a range of ids. Submounts of the host
/// are left out: each would need its own map and check.
pub(crate) fn clone_mapped_source(
    thread: &SingleThread,
    opened: &OpenedSource,
    viewer: MappingTarget<'_>,
    read_only: bool,
) -> io::Result<OwnedFd> {
    let copy = mounts::clone_tree_of(opened.source.as_fd(), MountDepth::Single)?;
    let flags = mount_attributes(read_only);
    match opened.ids {
        SourceIds::Canonical => {
            mounts::set_attributes(copy.as_fd(), flags, Some(viewer.namespace), MountDepth::Single)?;
        }
        SourceIds::Host { uid, gid } => {
            // A directory of root stays root's; otherwise any user inside could act as root there.
            let user = if uid == 0 { 0 } else { viewer.user.0 };
            let group = if gid == 0 { 0 } else { viewer.user.1 };
            let map = make_host_id_map(thread, viewer.base, (uid, user), (gid, group))?;
            mounts::set_attributes(copy.as_fd(), flags, Some(map.as_fd()), MountDepth::Single)?;
        }
        SourceIds::Reserved { uid, gid } => {
            let map = make_host_id_map(thread, viewer.base, (uid, viewer.user.0), (gid, viewer.user.1))?;
            mounts::set_attributes(copy.as_fd(), flags, Some(map.as_fd()), MountDepth::Single)?;
        }
    }
    Ok(copy)
}

/// Makes the id map for a directory of the host. Both pairs are the id of the directory's owner on the host, and the id
/// that it has inside.
fn make_host_id_map(
    thread: &SingleThread,
    base: u32,
    (uid, user): (u32, u32),
    (gid, group): (u32, u32),
) -> io::Result<OwnedFd> {
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
