//! Work that waits for the disk, done by a child, so that the launcher's one thread need not.
//!
//! An errand ends with the launcher. The kernel may let it finish one call before it dies, so a
//! later launcher waits for [`Errands::wait_for_former`] before it looks at what was made.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use linux::spawn::{self, Forked, SingleThread};
use linux::{descriptors, namespaces};
use rustix::fs::FlockOperation;
use rustix::pipe::PipeFlags;
use rustix::process::{Signal, pidfd_send_signal};

/// What a child says that has done its work; anything else is what went wrong.
const DONE: &[u8] = b"+";
/// The longest complaint that is read.
const LONGEST: u64 = 2048;

/// Where the errands of one state directory meet.
#[derive(Clone, Debug)]
pub struct Errands {
    lock: PathBuf,
}

/// A child on its way.
#[derive(Debug)]
pub struct Errand {
    /// Readable when it is over.
    pub report: OwnedFd,
    pidfd: OwnedFd,
}

impl Errands {
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        let lock = state_dir.join("errands");
        // Closed to others, who could hold the lock and keep us waiting. Older versions made it open.
        let file = File::options().create(true).append(true).mode(0o600).open(&lock)?;
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        Ok(Self { lock })
    }

    /// Waits for the errands of a launcher that was killed. They are killed too, but one that is
    /// in the middle of a call finishes it first.
    pub fn wait_for_former(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(File::open(&self.lock)?, FlockOperation::LockExclusive)?)
    }

    /// Sends a child to do `work`, which must not use a descriptor that was opened before.
    pub fn send(&self, thread: &SingleThread, work: impl FnOnce() -> io::Result<()>) -> io::Result<Errand> {
        let (report, ours) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let parent = rustix::process::getpid();
        match thread.fork(namespaces::Namespaces::NONE, None)? {
            Forked::Parent { pidfd, .. } => Ok(Errand { report, pidfd }),
            Forked::Child => {
                let told = descriptors::keep_only(ours).and_then(|report| {
                    let outcome = self.do_it(parent, work);
                    let text =
                        outcome.map_or_else(|error| error.to_string().into_bytes(), |()| DONE.to_vec());
                    File::from(report).write_all(&text)
                });
                spawn::exit_now(i32::from(told.is_err()))
            }
        }
    }

    fn do_it(&self, parent: rustix::process::Pid, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        namespaces::die_with_parent()?;
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::other("the launcher is gone"));
        }
        // Held until this process is gone, however it goes.
        let lock = File::open(&self.lock)?;
        rustix::fs::flock(&lock, FlockOperation::LockShared)?;
        work()
    }
}

impl Errand {
    /// Ends it early; it is over when its report says so.
    pub fn cancel(&self) {
        // One that is over already cannot be ended, and need not.
        pidfd_send_signal(&self.pidfd, Signal::KILL).ok();
    }

    /// What became of it. Waits until it is over.
    pub fn outcome(self) -> io::Result<()> {
        let mut told = Vec::new();
        File::from(self.report).take(LONGEST).read_to_end(&mut told)?;
        spawn::wait(self.pidfd.as_fd())?;
        match told.as_slice() {
            DONE => Ok(()),
            [] => Err(io::Error::from(io::ErrorKind::Interrupted)),
            complaint => Err(io::Error::other(String::from_utf8_lossy(complaint).into_owned())),
        }
    }
}
