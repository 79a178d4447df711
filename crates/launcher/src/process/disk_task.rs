//! Work that waits for the disk, done by a child process, so that the launcher's only thread does not
//! wait.
//!
//! A disk task ends with the launcher. The kernel may let it finish one system call before it dies, so a
//! later launcher calls [`DiskTaskRunner::wait_for_former`] before it examines the results.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use linux::spawn::{self, ForkResult, SingleThread};
use linux::{descriptors, namespaces};
use rustix::fs::FlockOperation;
use rustix::pipe::PipeFlags;
use rustix::process::{Signal, pidfd_send_signal};

/// The message of a child that succeeded; any other message is an error.
const DONE_MESSAGE: &[u8] = b"+";
/// The largest part of an error message that is read.
const MAX_REPORT_BYTES: u64 = 2048;

/// The disk tasks of one state directory, which share a lock file.
#[derive(Clone, Debug)]
pub(crate) struct DiskTaskRunner {
    lock: PathBuf,
}

/// A running child process.
#[derive(Debug)]
pub struct DiskTask {
    /// Readable when the child has finished.
    pub report: OwnedFd,
    pidfd: OwnedFd,
}

impl DiskTaskRunner {
    pub(crate) fn open(state_dir: &Path) -> io::Result<Self> {
        let lock = state_dir.join("errands");
        // Other users must not be able to open the file: they could hold the lock and block the
        // launcher. Older versions made the file readable for all.
        let file = File::options().create(true).append(true).mode(0o600).open(&lock)?;
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        Ok(Self { lock })
    }

    /// Waits for the disk tasks of a killed launcher. They are killed with it, but a task that is in a
    /// system call finishes that call first.
    pub(crate) fn wait_for_former(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(File::open(&self.lock)?, FlockOperation::LockExclusive)?)
    }

    /// Starts a child that does `work`, which must not use descriptors that were opened before.
    pub(crate) fn start(
        &self,
        thread: &SingleThread,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<DiskTask> {
        let (report, ours) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let parent = rustix::process::getpid();
        match thread.fork(namespaces::NamespaceSet::NONE, None)? {
            ForkResult::Parent { pidfd, .. } => Ok(DiskTask { report, pidfd }),
            ForkResult::Child => {
                let reported = descriptors::close_all_except(ours).and_then(|report| {
                    let outcome = self.run_in_child(parent, work);
                    let text = outcome
                        .map_or_else(|error| error.to_string().into_bytes(), |()| DONE_MESSAGE.to_vec());
                    File::from(report).write_all(&text)
                });
                spawn::exit_now(i32::from(reported.is_err()))
            }
        }
    }

    fn run_in_child(
        &self,
        parent: rustix::process::Pid,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        namespaces::die_with_parent()?;
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::other("the launcher is gone"));
        }
        // The lock is held until this process ends, in whatever way.
        let lock = File::open(&self.lock)?;
        rustix::fs::flock(&lock, FlockOperation::LockShared)?;
        work()
    }
}

impl DiskTask {
    /// Kills the child; it has ended when its report is readable.
    pub fn cancel(&self) {
        // It does not matter if the child has already ended.
        pidfd_send_signal(&self.pidfd, Signal::KILL).ok();
    }

    /// Waits until the child has ended and returns the outcome.
    pub fn wait_outcome(self) -> io::Result<()> {
        let mut message = Vec::new();
        File::from(self.report).take(MAX_REPORT_BYTES).read_to_end(&mut message)?;
        spawn::wait_for_child(self.pidfd.as_fd())?;
        match message.as_slice() {
            DONE_MESSAGE => Ok(()),
            [] => Err(io::Error::from(io::ErrorKind::Interrupted)),
            error => Err(io::Error::other(String::from_utf8_lossy(error).into_owned())),
        }
    }
}
