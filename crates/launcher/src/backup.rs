//! A state directory as one file, and back.
//!
//! ```text
//!  server/     a consistent copy of the database; the secret only if asked for
//!  records     the identity, the records of sandboxes and of snapshots
//!  disks       the pool file or the image files, as they were in one moment
//!  images      names and layers
//!  manifest    the checksum of each part and of all of them
//! ```
//!
//! The file is a tar archive in a zstd frame, with mode 0600. Holes are not stored (GNU sparse
//! entries) and are holes again when it is restored. [`write_backup()`] works beside a running server: disks
//! in use are frozen while they are copied. [`restore_backup()`] unpacks beside the target, compares the
//! checksums, and only then renames what it made into place.

mod archive;
mod database;
mod disks;
mod restore;
mod tree;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use domain::Bytes;
use linux::fs::RootDirectory;
use linux::spawn::SingleThread;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use self::archive::{ArchiveTooLarge, ArchiveWriter};
use crate::images;
use crate::process::record::ENDED_SUFFIX;

pub use self::restore::{RestoredState, restore_backup};

/// The directory in the state directory for the files of a backup that is being made.
const DRAFT_DIRECTORY: &str = "backup.draft";
const LOCK_FILE: &str = "backup.lock";
/// The space that must stay free on the filesystem of the state directory.
const MIN_FREE_SPACE: u64 = 64 << 20;
/// How long a backup waits for a pull or an import of an image.
const IMAGES_TIMEOUT: Duration = Duration::from_secs(60);
/// A secret is a few dozen bytes.
const MAX_SECRET_SIZE: u64 = 4 << 10;

/// The contents and the target of a new backup.
pub struct BackupRequest<'a> {
    pub state_dir: &'a Path,
    pub target: &'a Path,
    /// The backup may not become larger than this.
    pub max_size: Option<u64>,
    /// Whether the secret from which tokens are derived is part of it.
    pub with_secrets: bool,
}

/// The contents of a backup. It is the last entry of the archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupManifest {
    pub version: u32,
    /// Whether it was made from a state directory of root, whose files have many owners.
    pub of_root: bool,
    pub with_secrets: bool,
    pub parts: Vec<BackupPart>,
    /// The checksum of all parts together.
    pub checksum: String,
    /// Sandboxes whose disks are in memory and were not saved.
    pub not_saved: Vec<String>,
}

/// One part of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupPart {
    pub name: String,
    /// Before compression, without holes.
    pub bytes: u64,
    pub checksum: String,
}

/// A backup that was written.
#[derive(Clone, Debug, Serialize)]
pub struct WrittenBackup {
    pub file: PathBuf,
    pub bytes: u64,
    pub manifest: BackupManifest,
}

/// An error of the server's database, which this crate does not interpret.
pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Copies the server's database to a path. It is called in a separate process, which has the rights of
/// the owner of the database.
pub type CopyDatabase<'a> = dyn FnMut(&Path) -> Result<(), AnyError> + 'a;

/// Called with the number of bytes that are done.
pub type ProgressReport<'a> = &'a mut dyn FnMut(u64);

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("another backup of this state directory is being made")]
    Busy,
    #[error("`{0}` is not a state directory")]
    NoState(PathBuf),
    #[error("`{0}` exists already")]
    Exists(PathBuf),
    #[error("the backup would be larger than {}", Bytes(*.0).human_readable())]
    TooLarge(u64),
    #[error("`{path}` has {} free, and {} are needed", Bytes(*free).human_readable(), Bytes(*needed).human_readable())]
    NoSpace { path: PathBuf, free: u64, needed: u64 },
    #[error("the directory `{0}` does not exist")]
    NoDirectory(PathBuf),
    #[error("the disks in `{0}` are subvolumes of the host's own btrfs")]
    HostSubvolumes(PathBuf),
    #[error("the server of this state directory is just starting")]
    Starting,
    #[error("`{0}` was not made by the server of this state directory")]
    ForeignSecret(PathBuf),
    #[error("could not copy the database")]
    Database(#[source] AnyError),
    #[error("the database could not be copied within {0} s")]
    DatabaseTimeout(u64),
    #[error("`{0}` is not a file that the server of this state directory made")]
    ForeignDatabase(PathBuf),
    #[error("the database `{path}` is larger than {}", Bytes(*limit).human_readable())]
    LargeDatabase { path: PathBuf, limit: u64 },
    #[error("the images in `{0}` are being changed")]
    ImagesBusy(PathBuf),
    #[error("`{path}` is not a backup, or damaged: {why}")]
    Damaged { path: PathBuf, why: String },
    #[error("`{0}` is not empty")]
    NotEmpty(PathBuf),
    #[error("the backup was made by {0}, and you are not")]
    OtherUser(&'static str),
}

impl BackupError {
    /// Advice about what the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Busy => Some("wait until it is done"),
            Self::Starting => Some("try again in a moment"),
            Self::NoState(_) => Some("name the state directory with --state-dir"),
            Self::Exists(_) => Some("choose another file, or remove it first"),
            Self::TooLarge(_) => Some("raise --max-size, or remove images, snapshots or sandboxes first"),
            Self::NoSpace { .. } => Some("free some space, or name a file on another filesystem"),
            Self::NoDirectory(_) => Some("make the directory, or name a file in another one"),
            Self::HostSubvolumes(_) => Some("back them up with `btrfs send`"),
            Self::Damaged { .. } => Some("nothing was changed; use another backup"),
            Self::NotEmpty(_) => Some("choose another directory with --state-dir, or move this one away"),
            Self::OtherUser(_) => Some("restore it as the user who made it"),
            Self::ForeignSecret(_) => {
                Some("find out who put it there; without --with-secrets it is not read")
            }
            Self::DatabaseTimeout(_) => Some("try again; if it happens again, stop the server first"),
            Self::ForeignDatabase(_) => {
                Some("find out who put it there, stop the server, and move the file away")
            }
            Self::LargeDatabase { .. } => Some("stop the server, and find out what fills its database"),
            Self::ImagesBusy(_) => Some("wait until pulls, imports and commits of images are done"),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("run it as root, or as the user whose server has this state directory")
            }
            Self::Io { .. } | Self::Database(_) => None,
        }
    }
}

/// Writes a backup. `copy_database` copies the server's database to a path.
pub fn write_backup(
    request: &BackupRequest<'_>,
    copy_database: &mut CopyDatabase<'_>,
    report: ProgressReport<'_>,
) -> Result<WrittenBackup, BackupError> {
    let thread = SingleThread::prove().during("count the threads of", Path::new("/proc/self"))?;
    let state = request.state_dir;
    if !state.join("identity").is_file() {
        return Err(BackupError::NoState(state.to_owned()));
    }
    if fs::symlink_metadata(request.target).is_ok() {
        return Err(BackupError::Exists(request.target.to_owned()));
    }
    let parent = parent_of(request.target);
    if !parent.is_dir() {
        return Err(BackupError::NoDirectory(parent.to_owned()));
    }
    let _turn = lock_backup(state)?;
    // If no server runs, none may start meanwhile: it would begin to write to the disks.
    let stopped = try_lock(&state.join("lock"))?;
    let is_root = linux::privileges::is_host_root();
    let draft = BackupDraft::make(state)?;
    let held = images::lock_images(state, IMAGES_TIMEOUT).map_err(|error| BackupError::Io {
        action: "lock the images in",
        path: state.to_owned(),
        source: io::Error::other(error),
    })?;
    let _images = held.ok_or_else(|| BackupError::ImagesBusy(state.to_owned()))?;
    let sources = disks::find_disks(&state.join("disk"))?;
    check_space(request, &draft, &sources, is_root)?;
    let mut small = || {
        database::save_database(&thread, state, &draft.path, database::COPY_TIMEOUT, copy_database)?;
        draft.copy_records(state)
    };
    let disks = disks::copy_disks(&thread, &sources, &draft.path, stopped.is_some(), &mut small)?;
    let partial = partial_name(request.target);
    let file = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(BackupError::Exists(partial));
        }
        file => file.during("make", &partial)?,
    };
    let outcome = write_archive(request, &draft, &disks, (file, &partial), report);
    if outcome.is_err() {
        // A file that cannot be removed is not mistaken for a backup, since it has another name.
        fs::remove_file(&partial).ok();
    }
    let (bytes, manifest) = outcome?;
    rustix::fs::renameat_with(
        rustix::fs::CWD,
        &partial,
        rustix::fs::CWD,
        request.target,
        rustix::fs::RenameFlags::NOREPLACE,
    )
    .map_err(io::Error::from)
    .during("name", request.target)?;
    sync_parent(request.target)?;
    Ok(WrittenBackup { file: request.target.to_owned(), bytes, manifest })
}

fn write_archive(
    request: &BackupRequest<'_>,
    draft: &BackupDraft,
    disks: &[disks::ReadableDisk],
    (file, partial): (File, &Path),
    report: ProgressReport<'_>,
) -> Result<(u64, BackupManifest), BackupError> {
    let state = request.state_dir;
    let failed = |error: io::Error| match error.downcast::<ArchiveTooLarge>() {
        Ok(ArchiveTooLarge(most)) => BackupError::TooLarge(most),
        Err(source) => BackupError::Io { action: "write", path: partial.to_owned(), source },
    };
    let mut archive = ArchiveWriter::new(file, request.max_size, report).map_err(failed)?;
    archive.begin_part("server").map_err(failed)?;
    let database = draft.path.join("coracle.db");
    if database.exists() {
        let file = File::open(&database).during("open", &database)?;
        let size = file.metadata().during("measure", &database)?.len();
        archive.add_private("server/coracle.db", size, file.take(size)).map_err(failed)?;
    }
    if request.with_secrets
        && let Some(secret) = read_secret(state)?
    {
        archive.add_private("server/secret", secret.len() as u64, secret.as_slice()).map_err(failed)?;
    }
    archive.begin_part("records").map_err(failed)?;
    for name in ["identity", "boxes", "snapshots"] {
        tree::add_tree(&mut archive, &draft.root, name).map_err(failed)?;
    }
    archive.begin_part("disks").map_err(failed)?;
    for disk in disks {
        archive.add_file(&disk.name, &disk.path).map_err(failed)?;
    }
    archive.begin_part("images").map_err(failed)?;
    let root = RootDirectory::open(state).during("open", state)?;
    for name in ["images/names", "images/layers", "images/base-1"] {
        tree::add_tree(&mut archive, &root, name).map_err(failed)?;
    }
    let is_root = linux::privileges::is_host_root();
    let manifest = BackupManifest {
        version: archive::ARCHIVE_VERSION,
        of_root: is_root,
        with_secrets: request.with_secrets,
        parts: Vec::new(),
        checksum: String::new(),
        not_saved: if is_root { Vec::new() } else { draft.recorded_sandboxes()? },
    };
    archive.finish(manifest).map_err(failed)
}

/// The server's secret, if there is one. The directory belongs to the server, which faces the network;
/// a link in it must not make us save another file of this host.
fn read_secret(state: &Path) -> Result<Option<Vec<u8>>, BackupError> {
    let path = state.join("server/secret");
    let open = || -> io::Result<(u32, File)> {
        let directory = RootDirectory::open(state)?.open_subdirectory(Path::new("server"))?;
        let owner = rustix::fs::fstat(&directory)?.st_uid;
        Ok((owner, directory.open_read(Path::new("secret"))?))
    };
    let (owner, file) = match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.during("open", &path)?,
    };
    let facts = file.metadata().during("measure", &path)?;
    if !facts.is_file() || facts.uid() != owner || facts.nlink() != 1 || facts.len() > MAX_SECRET_SIZE {
        return Err(BackupError::ForeignSecret(path));
    }
    let mut secret = Vec::new();
    file.take(MAX_SECRET_SIZE).read_to_end(&mut secret).during("read", &path)?;
    Ok(Some(secret))
}

/// The name of a backup until it is complete.
fn partial_name(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Files that are only needed while a backup is made.
struct BackupDraft {
    path: PathBuf,
    root: RootDirectory,
}

impl BackupDraft {
    /// Makes the directory anew; the remains of a killed backup are removed.
    fn make(state: &Path) -> Result<Self, BackupError> {
        let path = state.join(DRAFT_DIRECTORY);
        let above = RootDirectory::open(state).during("open", state)?;
        above.remove_tree(Path::new(DRAFT_DIRECTORY)).during("clear", &path)?;
        // The process that copies the database passes through; the contents are closed to others.
        fs::DirBuilder::new().mode(0o700).create(&path).during("make", &path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711)).during("open to the server", &path)?;
        let root = RootDirectory::open(&path).during("open", &path)?;
        Ok(Self { path, root })
    }

    /// Copies the small files that say what the disks hold.
    fn copy_records(&self, state: &Path) -> Result<(), BackupError> {
        let identity = self.path.join("identity");
        fs::copy(state.join("identity"), &identity).during("copy", &identity)?;
        for (name, ending) in [("boxes", ""), ("snapshots", ".json")] {
            let to = self.path.join(name);
            fs::DirBuilder::new().mode(0o700).create(&to).during("make", &to)?;
            let from = state.join(name);
            let entries = match fs::read_dir(&from) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries.during("list", &from)?,
            };
            for entry in entries {
                let file = entry.during("list", &from)?;
                let name = file.file_name();
                let is_ended = name.as_encoded_bytes().ends_with(ENDED_SUFFIX.as_bytes());
                if is_ended || !name.as_encoded_bytes().ends_with(ending.as_bytes()) {
                    continue;
                }
                match fs::copy(file.path(), to.join(name)) {
                    // Its sandbox ended meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    copied => copied.map(drop).during("copy", &file.path())?,
                }
            }
        }
        Ok(())
    }

    /// The sandboxes that there are records of.
    fn recorded_sandboxes(&self) -> Result<Vec<String>, BackupError> {
        let entries = fs::read_dir(self.path.join("boxes")).during("list", &self.path)?;
        let names: io::Result<Vec<String>> = entries
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
            .collect();
        names.during("list", &self.path)
    }
}

impl Drop for BackupDraft {
    fn drop(&mut self) {
        let above = self.path.parent().map(RootDirectory::open);
        if let Some(Err(error)) = above.map(|above| above?.remove_tree(Path::new(DRAFT_DIRECTORY))) {
            tracing::warn!(%error, "could not remove the files of a backup; the next backup does");
        }
    }
}

/// Refuses a backup that will not fit: the copies of disks in use beside them, and the archive at its
/// target.
fn check_space(
    request: &BackupRequest<'_>,
    draft: &BackupDraft,
    sources: &[disks::DiskSource],
    is_root: bool,
) -> Result<(), BackupError> {
    let copied: u64 = sources.iter().filter(|_| is_root).map(|source| source.bytes).sum();
    let images = images::stored_image_bytes(request.state_dir).map_err(|error| BackupError::Io {
        action: "measure the images in",
        path: request.state_dir.to_owned(),
        source: io::Error::other(error),
    })?;
    let beside = if disks::supports_reflink(&draft.path) { 0 } else { copied };
    require_space(&draft.path, beside.saturating_add(MIN_FREE_SPACE))?;
    // Data that compresses well takes less space, but how much is only known afterwards.
    require_space(parent_of(request.target), copied.saturating_add(images).saturating_add(MIN_FREE_SPACE))
}

/// The directory that a file is in.
fn parent_of(file: &Path) -> &Path {
    file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Fails if the filesystem of `path` has less than this free.
fn require_space(path: &Path, needed: u64) -> Result<(), BackupError> {
    let status = rustix::fs::statvfs(path).map_err(io::Error::from).during("measure the space of", path)?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    let path = path.to_owned();
    if free < needed { Err(BackupError::NoSpace { path, free, needed }) } else { Ok(()) }
}

/// Waits until no backup has disks frozen, for a launcher that is about to mount them, and removes the
/// remains of a killed backup. No other backup begins while the returned file is open.
pub(crate) fn wait_for_backup(state: &Path) -> io::Result<File> {
    let options =
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(state.join(LOCK_FILE));
    let file = options?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    if let Err(error) = RootDirectory::open(state)?.remove_tree(Path::new(DRAFT_DIRECTORY)) {
        tracing::warn!(%error, "could not remove the files of a killed backup; the next start retries");
    }
    Ok(file)
}

fn lock_backup(state: &Path) -> Result<File, BackupError> {
    try_lock(&state.join(LOCK_FILE))?.ok_or(BackupError::Busy)
}

/// Locks a file, unless another process holds the lock.
fn try_lock(path: &Path) -> Result<Option<File>, BackupError> {
    let options = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = options.during("open", path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(io::Error::from(error)).during("lock", path),
    }
}

/// Waits until the name of a file is durable.
fn sync_parent(path: &Path) -> Result<(), BackupError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).during("write out", parent)
}

/// Adds what was attempted on which path to an error.
trait BackupErrorContext<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, BackupError>;
}

impl<T> BackupErrorContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, BackupError> {
        self.map_err(|source| BackupError::Io { action, path: path.to_owned(), source })
    }
}
