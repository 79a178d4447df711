//! Ending a sandbox: kill its first process, wait, and remove everything it had.
//!
//! The kernel kills all processes of a pid namespace with the first one, including frozen ones, and
//! reports the first process as ended only when the others are gone. The record is removed last, so
//! that the next launcher continues if this one is killed half-way.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use domain::SandboxId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::{Launcher, LauncherRights};
use crate::cgroups::CgroupHierarchies;

/// The parts of a sandbox that are kept after its processes have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptParts {
    Nothing,
    /// Its disk, if that can outlive the processes, and its record.
    Disk,
}

/// The progress of ending a sandbox.
#[derive(Debug)]
pub enum KillOutcome {
    Done,
    /// Call [`Launcher::remove_dead_sandbox`] when the descriptor is readable.
    Dying(OwnedFd),
}

impl Launcher {
    /// Kills a sandbox. It is not an error if it does not exist.
    pub fn kill_sandbox(&mut self, id: &SandboxId) -> io::Result<KillOutcome> {
        if let Some(pidfd) = self.records.pidfd(id) {
            match pidfd_send_signal(&pidfd, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
            return Ok(KillOutcome::Dying(pidfd));
        }
        // A process that died by itself stays a child of ours until it is reaped.
        if let Some(remains) = self.records.read(id).and_then(|record| record.unreaped_pidfd()) {
            reap_process(&remains)?;
        }
        if let Some(groups) = self.rights.groups() {
            groups.kill_processes(id)?;
        }
        Ok(KillOutcome::Done)
    }

    /// Removes the parts of a dead sandbox that are not kept. `WouldBlock` means that the kernel has not
    /// released something yet; the caller must try again.
    pub fn remove_dead_sandbox(
        &mut self,
        id: &SandboxId,
        pidfd: Option<&OwnedFd>,
        keep: KeptParts,
    ) -> io::Result<()> {
        if let Some(pidfd) = pidfd {
            reap_process(pidfd)?;
        }
        if let Some(groups) = self.rights.groups() {
            groups.remove(id)?;
        }
        let kept = keep == KeptParts::Disk && self.rights.has_disk(id);
        if let LauncherRights::Root(root) = &mut self.rights
            && !kept
        {
            root.volumes.remove(id).map_err(io::Error::other)?;
        }
        self.sockets.remove(id)?;
        self.forget_filtered(id);
        if let LauncherRights::Root(root) = &mut self.rights {
            root.ranges.release(id).map_err(io::Error::other)?;
        }
        if kept { self.records.mark_stopped(id) } else { self.records.remove(id) }
    }

    /// Marks a dead sandbox of which nothing is kept, so that its remains can be removed later. Returns `false` if it has
    /// no record that could be marked.
    pub(super) fn mark_ended(&mut self, id: &SandboxId, pidfd: Option<&OwnedFd>) -> io::Result<bool> {
        if let Some(pidfd) = pidfd {
            reap_process(pidfd)?;
        }
        // A client that connects is told that the sandbox does not exist.
        self.sockets.remove(id)?;
        self.forget_filtered(id);
        self.records.mark_ended(id)
    }

    /// Ends a sandbox and waits until it is removed completely.
    pub fn destroy_and_wait(&mut self, id: &SandboxId) -> io::Result<()> {
        let pidfd = match self.kill_sandbox(id)? {
            KillOutcome::Done => None,
            KillOutcome::Dying(pidfd) => Some(pidfd),
        };
        if let Some(pidfd) = &pidfd {
            wait_readable(pidfd)?;
        }
        const MAX_REMOVE_ATTEMPTS: u32 = 2000;
        for _ in 0..MAX_REMOVE_ATTEMPTS {
            match self.remove_dead_sandbox(id, pidfd.as_ref(), KeptParts::Nothing) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep_one_millisecond()?,
                other => return other,
            }
        }
        Err(io::Error::from(io::ErrorKind::TimedOut))
    }

    /// Removes prepared disks, and the packet filter and control groups of this instance if no sandbox
    /// uses them. A failed step does not stop the others; the first error is returned.
    pub fn close(&mut self) -> io::Result<()> {
        let discarded = self.rights.discard_prepared();
        let disconnected = self.close_network().and(self.remove_egress_guard());
        let groups = self.rights.groups().map_or(Ok(()), CgroupHierarchies::close);
        discarded.and(disconnected).and(groups)
    }
}

/// Reaps the process if it is a child of ours; an adopted sandbox is the child of another process.
fn reap_process(pidfd: &OwnedFd) -> io::Result<()> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    match waitid(WaitId::PidFd(pidfd.as_fd()), options) {
        Ok(_) | Err(rustix::io::Errno::CHILD) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn wait_readable(pidfd: &OwnedFd) -> io::Result<()> {
    let mut watched = [PollFd::new(pidfd, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
    Ok(())
}

/// Waits for a millisecond. The kernel removes the last tasks from a group shortly after their end, and
/// there is no notification for a v1 group.
pub(super) fn sleep_one_millisecond() -> io::Result<()> {
    let moment = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    poll(&mut [], Some(&moment))?;
    Ok(())
}
