//! Adding mounts to a running sandbox.
//!
//! ```text
//! launcher                                 child
//!   opens, copies and idmaps the sources
//!   forks ───────────────────────────────► enters the sandbox's user and mount namespace
//!   continues with other requests          makes the targets, following no link
//!   ◄── one byte, or the step that failed  moves the copies there, and ends
//! ```
//!
//! The child stays in the launcher's pid namespace, so processes inside cannot see, trace or signal it.
//! It always ends after a limited time. An ordinary user may copy mounts only in a mount namespace that
//! it owns, which another child makes for that purpose.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use linux::mounts;
use linux::namespaces::{self, Namespaces, Setgroups};
use linux::spawn::{self, End, Forked, SingleThread};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::mounts::{Gathered, writes_outside};
use super::protocol::{MountFault, Refusal};
use super::record::{Record, ended};
use super::{Launcher, Rights, Root};
use crate::jail::build;
use crate::jail::enter::{EntryMount, clone_site, make_target};
use crate::jail::plan::MountPlan;
use crate::jail::sources::{self, Viewer};
use crate::jail::step::{At, Failure, JailError, Step};

/// How long the child may take, in seconds.
const PATIENCE: u32 = 10;

/// Mounts that are being added to a sandbox. When `status` is readable,
/// [`Launcher::conclude_attach`] returns the outcome.
#[derive(Debug)]
pub struct Attaching {
    pub status: OwnedFd,
    child: OwnedFd,
    measures: Vec<(String, String)>,
}

impl Launcher {
    /// Begins to add mounts to a running sandbox: all of them, or none.
    pub fn begin_attach(&mut self, id: &str, plans: &[MountPlan]) -> Result<Attaching, Refusal> {
        let record = self.records.read(id).ok_or_else(Refusal::gone)?;
        let pidfd = record.pidfd().ok_or_else(Refusal::gone)?;
        if !record.without_set_id && plans.iter().any(writes_outside) {
            let message = "sandbox was made when this server did not mount host directories";
            let hint = "mount it read-only, or make a new sandbox";
            return Err(Refusal::mount(MountFault::NotAllowed, message, Some(hint)));
        }
        let gathered = self.gather_mounts(plans)?;
        let (copies, setgroups) = match &self.rights {
            Rights::Root(root) => {
                (Some(self.copies(root, id, &record, &pidfd, &gathered)?), Setgroups::Allow)
            }
            Rights::User { .. } => (None, Setgroups::Deny),
        };
        let attachment = Attachment { sandbox: pidfd, setgroups, entries: gathered.entries, copies };
        let (status, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).at(Step::AttachMounts)?;
        match self.thread.fork(Namespaces::NONE, None).at(Step::AttachMounts)? {
            Forked::Child => {
                drop(status);
                attachment.run(&self.thread, report)
            }
            Forked::Parent { pidfd: child, .. } => {
                Ok(Attaching { status, child, measures: gathered.measures })
            }
        }
    }

    /// Returns the outcome for mounts whose status is readable.
    pub fn conclude_attach(&mut self, attaching: Attaching) -> Result<Vec<(String, String)>, Refusal> {
        // One read is enough: a report is short enough that a pipe takes it whole.
        let mut report = [0; 4096];
        let read = rustix::io::read(&attaching.status, &mut report).at(Step::AttachMounts)?;
        // The child has written its report, or it died and its end of the pipe was closed.
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
        root: &Root,
        id: &str,
        record: &Record,
        pidfd: &OwnedFd,
        gathered: &Gathered,
    ) -> Result<Vec<OwnedFd>, Refusal> {
        let range = root.ranges.of(id).ok_or_else(Refusal::gone)?;
        let pid = record.process.as_ref().ok_or_else(Refusal::gone)?.pid;
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/user")).at(Step::IdMaps)?;
        if ended(pidfd) {
            // The pid may belong to another process now.
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

/// The work of the child.
struct Attachment {
    sandbox: OwnedFd,
    setgroups: Setgroups,
    entries: Vec<EntryMount>,
    /// The copies, if root has already made them.
    copies: Option<Vec<OwnedFd>>,
}

impl Attachment {
    fn run(mut self, thread: &SingleThread, report: OwnedFd) -> ! {
        spawn::end_after(PATIENCE);
        let copies = match self.copies.take() {
            Some(copies) => Ok(copies),
            None => copy_apart(thread, &self.entries).at(Step::CloneMounts),
        };
        let message = match copies.and_then(|copies| self.attach(&copies)) {
            Ok(()) => b"1".to_vec(),
            Err(error) => Failure::from(error).told(),
        };
        let reported = std::fs::File::from(report).write_all(&message).is_ok();
        spawn::exit_now(i32::from(!reported))
    }

    fn attach(&self, copies: &[OwnedFd]) -> Result<(), JailError> {
        // The pidfd refers to exactly this sandbox, even if its pid was reused.
        namespaces::enter(self.sandbox.as_fd(), Namespaces::USER.and(Namespaces::MOUNT))
            .at(Step::AttachMounts)?;
        namespaces::become_ids(0, 0, self.setgroups).at(Step::BecomeRoot)?;
        set_dumpable_behavior(DumpableBehavior::NotDumpable).at(Step::BecomeRoot)?;
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty()).at(Step::AttachMounts)?;
        for (index, (mount, entry)) in copies.iter().zip(&self.entries).enumerate() {
            // Code inside may have made links; they are not followed, so that a mount is always attached
            // at its target.
            let plain = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let attached = make_target(root.as_fd(), &entry.target, mount.as_fd(), plain)
                .and_then(|target| mounts::attach_on(mount.as_fd(), target.as_fd()));
            if let Err(error) = attached {
                undo(&copies[..index])?;
                return Err(error).at_path(Step::AttachMounts, &entry.target);
            }
        }
        Ok(())
    }
}

/// Detaches mounts again.
fn undo(mounts: &[OwnedFd]) -> Result<(), JailError> {
    mounts.iter().rev().try_for_each(|mount| mounts::detach_of(mount.as_fd()).at(Step::AttachMounts))
}

/// Copies the sources in a child with its own namespaces, where an ordinary user may do so.
fn copy_apart(thread: &SingleThread, entries: &[EntryMount]) -> io::Result<Vec<OwnedFd>> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    match thread.fork(Namespaces::USER.and(Namespaces::MOUNT), None)? {
        Forked::Child => {
            spawn::end_after(PATIENCE);
            let copies: io::Result<Vec<OwnedFd>> =
                entries.iter().map(|entry| clone_site(&entry.site, entry.read_only)).collect();
            let sent = copies.and_then(|copies| build::send(theirs.as_fd(), &copies));
            spawn::exit_now(sent.err().map_or(0, |error| error.raw_os_error().unwrap_or(1)))
        }
        Forked::Parent { pidfd, .. } => {
            drop(theirs);
            let received = build::receive(ours.as_fd());
            match spawn::wait(pidfd.as_fd())? {
                End::Code(errno) if errno != 0 => Err(io::Error::from_raw_os_error(errno)),
                End::Code(_) | End::Signal(_) => received,
            }
        }
    }
}
