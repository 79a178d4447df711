//! The server's database in a backup.
//!
//! The server faces the network and owns the directory in which its database lies, so its files
//! are not trusted: a pipe in place of a journal would make us wait for ever while disks are frozen.
//! The copy is made by a process with the rights of the owner, which has a few seconds:
//!
//! ```text
//!  backup                                    child, as the owner of `server/`
//!    makes a directory of the owner's
//!    forks ────────────────────────────────► copies the database there
//!    waits, but not for long ◄────────────── says what failed, if anything
//!    takes the copy
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use linux::namespaces::{self, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, ProcessExit, SingleThread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::pipe::PipeFlags;
use rustix::process::{Signal, pidfd_send_signal};

use super::{BackupError, BackupErrorContext, CopyDatabase};

/// How long disks may be frozen for the copy. A database has a few megabytes.
pub(super) const COPY_TIMEOUT: Duration = Duration::from_secs(10);
/// The directory of the child in the draft.
const COPY_DIRECTORY: &str = "database";
const DATABASE_FILE: &str = "coracle.db";
/// The files that SQLite reads beside the database, by what is added to its name.
const DATABASE_SUFFIXES: [&str; 4] = ["", "-wal", "-shm", "-journal"];
/// The maximum size of a copy. The child's directory belongs to the server, which could put a file there
/// that fills the disk while a sandbox's disk is frozen.
const MAX_DATABASE_SIZE: u64 = 1 << 30;
/// The maximum length of a message from the child.
const MAX_MESSAGE_LENGTH: u64 = 4 << 10;

/// The owner of the server's directory.
#[derive(Clone, Copy)]
struct DirectoryOwner {
    uid: u32,
    gid: u32,
}

/// Copies the database of the server of `state` into `draft`, within `timeout`. A server that never
/// started has none.
pub(super) fn save_database(
    thread: &SingleThread,
    state: &Path,
    draft: &Path,
    timeout: Duration,
    copy_database: &mut CopyDatabase<'_>,
) -> Result<(), BackupError> {
    let server = state.join("server");
    let owner = match fs::symlink_metadata(&server) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        facts => {
            let facts = facts.during("look at", &server)?;
            DirectoryOwner { uid: facts.uid(), gid: facts.gid() }
        }
    };
    check_files(&server, owner)?;
    let directory = draft.join(COPY_DIRECTORY);
    make_copy_directory(&directory, owner)?;
    let copied = directory.join(DATABASE_FILE);
    let (message, report) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from).during("copy", &server)?;
    let pidfd = match thread.fork(NamespaceSet::NONE, None).during("copy the database in", &server)? {
        ForkResult::Parent { pidfd, .. } => pidfd,
        ForkResult::Child => spawn::exit_now(i32::from(!run_copy(owner, &report, &copied, copy_database))),
    };
    drop(report);
    match wait_or_kill(&pidfd, timeout).during("wait for the copy of", &server)? {
        None => Err(BackupError::DatabaseTimeout(timeout.as_secs())),
        Some(ProcessExit::Code(0)) => take_copy(&copied, &draft.join(DATABASE_FILE), owner),
        Some(_) => {
            let mut text = String::new();
            File::from(message).take(MAX_MESSAGE_LENGTH).read_to_string(&mut text).during("copy", &server)?;
            Err(BackupError::Database(if text.is_empty() {
                "its copy broke off".into()
            } else {
                text.into()
            }))
        }
    }
}

/// Refuses files that the server's database would not leave. Replacing them later gains nothing, since
/// the child has only the rights of the owner.
fn check_files(server: &Path, owner: DirectoryOwner) -> Result<(), BackupError> {
    for ending in DATABASE_SUFFIXES {
        let path = server.join(format!("{DATABASE_FILE}{ending}"));
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            facts => {
                let facts = facts.during("look at", &path)?;
                if !facts.is_file() || facts.uid() != owner.uid || facts.nlink() != 1 {
                    return Err(BackupError::ForeignDatabase(path));
                }
            }
        }
    }
    Ok(())
}

/// Makes the directory into which the child copies.
fn make_copy_directory(path: &Path, owner: DirectoryOwner) -> Result<(), BackupError> {
    fs::DirBuilder::new().mode(0o700).create(path).during("make", path)?;
    if linux::privileges::is_host_root() {
        std::os::unix::fs::lchown(path, Some(owner.uid), Some(owner.gid)).during("give away", path)?;
    }
    Ok(())
}

/// Makes the copy, in the child; `false` if it failed.
fn run_copy(
    owner: DirectoryOwner,
    report: &OwnedFd,
    target: &Path,
    copy_database: &mut CopyDatabase<'_>,
) -> bool {
    let outcome = become_owner(owner, report).map_err(Into::into).and_then(|()| copy_database(target));
    let Err(error) = outcome else { return true };
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    let written = report.try_clone().and_then(|report| File::from(report).write_all(text.as_bytes()));
    // The parent learns from the exit code that it failed.
    written.unwrap_or_default();
    false
}

/// Drops everything that is not needed to open a database. The locks of the backup and the descriptors
/// that thaw disks are closed too.
fn become_owner(owner: DirectoryOwner, report: &OwnedFd) -> io::Result<()> {
    linux::descriptors::close_all_except_these([report.as_fd()].into_iter())?;
    if linux::privileges::is_host_root() && owner.uid != 0 {
        namespaces::switch_ids(owner.uid, owner.gid, SetgroupsPolicy::Allow)?;
    }
    linux::set_no_new_privs()?;
    // A change of ids would undo this, so it comes last.
    namespaces::die_with_parent()
}

/// How the child ended; `None` if it had to be killed.
fn wait_or_kill(pidfd: &OwnedFd, timeout: Duration) -> io::Result<Option<ProcessExit>> {
    let patience = Timespec::try_from(timeout).map_err(io::Error::other)?;
    let ended = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&patience)));
    let in_time = ended.as_ref().is_ok_and(|count| *count > 0);
    if !in_time {
        pidfd_send_signal(pidfd, Signal::KILL)?;
    }
    let end = spawn::wait_for_child(pidfd.as_fd())?;
    ended?;
    Ok(in_time.then_some(end))
}

/// Copies the child's result to `target`. It belongs to the owner and may be anything.
fn take_copy(copied: &Path, target: &Path, owner: DirectoryOwner) -> Result<(), BackupError> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(copied);
    let mut file = match file {
        // There was no database.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file.during("open", copied)?,
    };
    let facts = file.metadata().during("look at", copied)?;
    if !facts.is_file() || facts.uid() != owner.uid || facts.nlink() != 1 {
        return Err(BackupError::ForeignDatabase(copied.to_owned()));
    }
    if facts.len() > MAX_DATABASE_SIZE {
        return Err(BackupError::LargeDatabase { path: copied.to_owned(), limit: MAX_DATABASE_SIZE });
    }
    let mut options = OpenOptions::new();
    let mut to = options.write(true).create_new(true).mode(0o600).open(target).during("make", target)?;
    io::copy(&mut (&mut file).take(facts.len()), &mut to).map(drop).during("copy", copied)
}

#[cfg(test)]
mod tests;
