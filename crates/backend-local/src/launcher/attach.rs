//! Mounts into a living sandbox.
//!
//! ```text
//! launcher                                 child
//!   opens, copies and idmaps the sources
//!   forks ───────────────────────────────► goes into the sandbox's user and mount namespace
//!   goes on with other things              makes the targets, following no link
//!   ◄── one byte, or the step that failed  moves the copies there, and ends
//! ```
//!
//! The child stays in our pid namespace: nothing inside can see, trace or signal it. It ends by
//! itself after a bounded time, whatever it met in there.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use linux::mounts;
use linux::namespaces::{self, Namespaces, Setgroups};
use linux::spawn::{self, Forked};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::mounts::{Gathered, writes_outside};
use super::protocol::{MountFault, Refusal};
use super::record::{Record, ended};
use super::{Launcher, Rights};
use crate::jail::enter::make_target;
use crate::jail::plan::MountPlan;
use crate::jail::sources::{self, Viewer};
use crate::jail::step::{At, Failure, JailError, Step};

/// How long the child may take, in seconds.
const PATIENCE: u32 = 10;

/// Mounts on their way into a sandbox. When `status` is readable,
/// [`Launcher::conclude_attach`] says what became of them.
#[derive(Debug)]
pub struct Attaching {
    pub status: OwnedFd,
    child: OwnedFd,
    measures: Vec<(String, String)>,
}

impl Launcher {
    /// Whether mounts can be added to a living sandbox.
    pub fn can_attach(&self) -> bool {
        matches!(self.rights, Rights::Root(_))
    }

    /// Begins to add mounts to a living sandbox: all of them, or none.
    pub fn begin_attach(&mut self, id: &str, plans: &[MountPlan]) -> Result<Attaching, Refusal> {
        let record = self.records.read(id).ok_or_else(Refusal::gone)?;
        let pidfd = record.pidfd().ok_or_else(Refusal::gone)?;
        if !record.without_set_id && plans.iter().any(writes_outside) {
            let message = "this sandbox was made when no directories of the host could be mounted";
            let hint = "mount it read-only, or make the sandbox anew";
            return Err(Refusal::mount(MountFault::NotAllowed, message, Some(hint)));
        }
        let gathered = self.gather_mounts(plans)?;
        let copies = self.copies(id, &record, &pidfd, &gathered)?;
        let targets = gathered.entries.into_iter().map(|entry| entry.target);
        let attachment = Attachment { sandbox: pidfd, mounts: copies.into_iter().zip(targets).collect() };
        let (status, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).at(Step::AttachMounts)?;
        match self.thread.fork(Namespaces::NONE, None).at(Step::AttachMounts)? {
            Forked::Child => {
                drop(status);
                attachment.run(report)
            }
            Forked::Parent { pidfd: child, .. } => {
                Ok(Attaching { status, child, measures: gathered.measures })
            }
        }
    }

    /// What became of mounts whose status is readable.
    pub fn conclude_attach(&mut self, attaching: Attaching) -> Result<Vec<(String, String)>, Refusal> {
        // One read: a report is shorter than what a pipe takes whole.
        let mut report = [0; 4096];
        let read = rustix::io::read(&attaching.status, &mut report).at(Step::AttachMounts)?;
        // It has written its report, or its end of the pipe closed with it.
        spawn::wait(attaching.child.as_fd()).at(Step::AttachMounts)?;
        match &report[..read] {
            [] => Err(JailError::new(Step::AttachMounts, io::ErrorKind::TimedOut.into()).into()),
            [b'{', ..] => match serde_json::from_slice::<Failure>(&report[..read]) {
                Ok(failure) => Err(JailError::from(failure).into()),
                Err(error) => Err(JailError::new(Step::AttachMounts, io::Error::other(error)).into()),
            },
            _ => Ok(attaching.measures),
        }
    }

    fn copies(
        &self,
        id: &str,
        record: &Record,
        pidfd: &OwnedFd,
        gathered: &Gathered,
    ) -> Result<Vec<OwnedFd>, Refusal> {
        let Rights::Root(root) = &self.rights else {
            let message = "an ordinary user's living sandbox takes no further mounts";
            return Err(Refusal::unsupported(message, Some("name them when it is created")));
        };
        let range = root.ranges.of(id).ok_or_else(Refusal::gone)?;
        let pid = record.process.as_ref().ok_or_else(Refusal::gone)?.pid;
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/user")).at(Step::IdMaps)?;
        if ended(pidfd) {
            // The number could have been another's by now.
            return Err(Refusal::gone());
        }
        let viewer = Viewer { namespace: namespace.as_fd(), base: range.first, user: record.user };
        let pairs = gathered.opened.iter().zip(&gathered.entries);
        let shown = pairs.map(|(opened, entry)| {
            sources::show(&self.thread, opened, viewer, entry.read_only)
                .at_path(Step::CloneMounts, &entry.target)
                .map_err(Refusal::from)
        });
        shown.collect()
    }
}

/// What the child does.
struct Attachment {
    sandbox: OwnedFd,
    mounts: Vec<(OwnedFd, String)>,
}

impl Attachment {
    fn run(self, report: OwnedFd) -> ! {
        spawn::end_after(PATIENCE);
        let told = match self.attach() {
            Ok(()) => b"1".to_vec(),
            Err(error) => Failure::from(error).told(),
        };
        let told = std::fs::File::from(report).write_all(&told).is_ok();
        spawn::exit_now(i32::from(!told))
    }

    fn attach(&self) -> Result<(), JailError> {
        // By its pidfd, which means this very sandbox and nothing that took its number.
        namespaces::enter(self.sandbox.as_fd(), Namespaces::USER.and(Namespaces::MOUNT))
            .at(Step::AttachMounts)?;
        namespaces::become_ids(0, 0, Setgroups::Allow).at(Step::BecomeRoot)?;
        set_dumpable_behavior(DumpableBehavior::NotDumpable).at(Step::BecomeRoot)?;
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty()).at(Step::AttachMounts)?;
        for (place, (mount, target)) in self.mounts.iter().enumerate() {
            // Whoever runs inside may have made links; a mount goes where its target says.
            let plain = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let attached = make_target(root.as_fd(), target, mount.as_fd(), plain)
                .and_then(|target| mounts::attach_on(mount.as_fd(), target.as_fd()));
            if let Err(error) = attached {
                self.undo(place)?;
                return Err(error).at_path(Step::AttachMounts, target);
            }
        }
        Ok(())
    }

    /// Takes the first `count` mounts away again.
    fn undo(&self, count: usize) -> Result<(), JailError> {
        for (mount, target) in self.mounts[..count].iter().rev() {
            mounts::detach_of(mount.as_fd()).at_path(Step::AttachMounts, target)?;
        }
        Ok(())
    }
}
