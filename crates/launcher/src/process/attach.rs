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

use backend::EnforcedMeasures;
use domain::SandboxId;
use linux::mounts;
use linux::namespaces::{self, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, ProcessExit, SingleThread};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::mounts::{OpenedMounts, writes_to_host};
use super::record::{LauncherRecord, has_ended};
use super::{Launcher, LauncherRights, RootState};
use crate::jail::build;
use crate::jail::enter::{EntryMount, clone_mount_source, make_mount_target};
use crate::jail::plan::MountPlan;
use crate::jail::sources::{MappingTarget, SourceMapper};
use crate::jail::step::{FailureReport, JailError, JailStep, StepContext};
use crate::protocol::{MountFault, OpError};

/// How long the child may take, in seconds.
const ATTACH_TIMEOUT_SECONDS: u32 = 10;

/// Mounts that are being added to a sandbox. When `status` is readable,
/// [`PendingAttach::read_outcome`] returns the outcome.
#[derive(Debug)]
pub struct PendingAttach {
    pub status: OwnedFd,
    child: OwnedFd,
    measures: EnforcedMeasures,
}

impl Launcher {
    /// Begins to add mounts to a running sandbox: all of them, or none.
    pub fn begin_attach(&mut self, id: &SandboxId, plans: &[MountPlan]) -> Result<PendingAttach, OpError> {
        let record = self.records.read(id).ok_or_else(OpError::gone)?;
        let pidfd = record.pidfd().ok_or_else(OpError::gone)?;
        if !record.without_set_id && plans.iter().any(writes_to_host) {
            let message = "sandbox was made when this server did not mount host directories";
            let hint = "mount it read-only, or make a new sandbox";
            return Err(OpError::mount(MountFault::NotAllowed, message, Some(hint)));
        }
        let gathered = self.mount_opener().open_mounts(plans)?;
        let copies = match &self.rights {
            LauncherRights::Root(root) => {
                Some(root.clone_mapped_sources(&self.thread, id, &record, &pidfd, &gathered)?)
            }
            LauncherRights::User { .. } => None,
        };
        let setgroups = self.rights.setgroups_policy();
        let attachment = AttachTask { sandbox: pidfd, setgroups, entries: gathered.entries, copies };
        let (status, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).at_step(JailStep::AttachMounts)?;
        match self.thread.fork(NamespaceSet::NONE, None).at_step(JailStep::AttachMounts)? {
            ForkResult::Child => {
                drop(status);
                attachment.run(&self.thread, report)
            }
            ForkResult::Parent { pidfd: child, .. } => {
                Ok(PendingAttach { status, child, measures: gathered.measures })
            }
        }
    }
}

impl PendingAttach {
    /// Returns the outcome for mounts whose status is readable. [`PendingAttach::reap`] must follow.
    pub fn read_outcome(&mut self) -> Result<EnforcedMeasures, OpError> {
        // One read is enough: a report is short enough that a pipe takes it whole.
        let mut report = [0; 4096];
        let read = rustix::io::read(&self.status, &mut report).at_step(JailStep::AttachMounts)?;
        match &report[..read] {
            [] => Err(JailError::new(JailStep::AttachMounts, io::ErrorKind::TimedOut.into()).into()),
            [b'{', ..] => match serde_json::from_slice::<FailureReport>(&report[..read]) {
                Ok(failure) => Err(JailError::from(failure).into()),
                Err(error) => Err(JailError::new(JailStep::AttachMounts, io::Error::other(error)).into()),
            },
            _ => Ok(std::mem::take(&mut self.measures)),
        }
    }

    /// Waits for the child, which ends after its report, or has died and so closed its end of the pipe. A child takes a
    /// while to end, so the outcome is sent to the client before.
    pub fn reap(self) -> io::Result<()> {
        spawn::wait_for_child(self.child.as_fd()).map(drop)
    }
}

impl RootState {
    fn clone_mapped_sources(
        &self,
        thread: &SingleThread,
        id: &SandboxId,
        record: &LauncherRecord,
        pidfd: &OwnedFd,
        gathered: &OpenedMounts,
    ) -> Result<Vec<OwnedFd>, OpError> {
        let range = self.ranges.range_of(id).ok_or_else(OpError::gone)?;
        let pid = record.process.as_ref().ok_or_else(OpError::gone)?.pid;
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/user")).at_step(JailStep::IdMaps)?;
        if has_ended(pidfd) {
            // The pid may belong to another process now.
            return Err(OpError::gone());
        }
        let target = MappingTarget { namespace: namespace.as_fd(), base: range.first, user: record.user };
        let mut mapper = SourceMapper::new(thread, target);
        let pairs = gathered.opened.iter().zip(&gathered.entries);
        let copies = pairs.map(|(opened, entry)| {
            mapper
                .clone_source(opened, entry.read_only)
                .at_path(JailStep::CloneMounts, &entry.target)
                .map_err(OpError::from)
        });
        copies.collect()
    }
}

/// The work of the child.
struct AttachTask {
    sandbox: OwnedFd,
    setgroups: SetgroupsPolicy,
    entries: Vec<EntryMount>,
    /// The copies, if root has already made them.
    copies: Option<Vec<OwnedFd>>,
}

impl AttachTask {
    fn run(mut self, thread: &SingleThread, report: OwnedFd) -> ! {
        spawn::set_exit_alarm(ATTACH_TIMEOUT_SECONDS);
        let copies = match self.copies.take() {
            Some(copies) => Ok(copies),
            None => copy_in_own_namespaces(thread, &self.entries).at_step(JailStep::CloneMounts),
        };
        let message = match copies.and_then(|copies| self.attach_copies(&copies)) {
            Ok(()) => b"1".to_vec(),
            Err(error) => FailureReport::from(error).to_json(),
        };
        let reported = std::fs::File::from(report).write_all(&message).is_ok();
        spawn::exit_now(i32::from(!reported))
    }

    fn attach_copies(&self, copies: &[OwnedFd]) -> Result<(), JailError> {
        // The pidfd refers to exactly this sandbox, even if its pid was reused.
        namespaces::enter_namespace(self.sandbox.as_fd(), NamespaceSet::USER.and(NamespaceSet::MOUNT))
            .at_step(JailStep::AttachMounts)?;
        namespaces::switch_ids(0, 0, self.setgroups).at_step(JailStep::BecomeRoot)?;
        set_dumpable_behavior(DumpableBehavior::NotDumpable).at_step(JailStep::BecomeRoot)?;
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty()).at_step(JailStep::AttachMounts)?;
        for (index, (mount, entry)) in copies.iter().zip(&self.entries).enumerate() {
            // Code inside may have made links; they are not followed, so that a mount is always attached
            // at its target.
            let plain = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let attached = make_mount_target(root.as_fd(), &entry.target, mount.as_fd(), plain)
                .and_then(|target| mounts::attach_mount_on(mount.as_fd(), target.as_fd()));
            if let Err(error) = attached {
                detach_mounts(&copies[..index])?;
                return Err(error).at_path(JailStep::AttachMounts, &entry.target);
            }
        }
        Ok(())
    }
}

/// Detaches mounts again.
fn detach_mounts(mounts: &[OwnedFd]) -> Result<(), JailError> {
    mounts
        .iter()
        .rev()
        .try_for_each(|mount| mounts::detach_mount_of(mount.as_fd()).at_step(JailStep::AttachMounts))
}

/// Copies the sources in a child with its own namespaces, where an ordinary user may do so.
fn copy_in_own_namespaces(thread: &SingleThread, entries: &[EntryMount]) -> io::Result<Vec<OwnedFd>> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    match thread.fork(NamespaceSet::USER.and(NamespaceSet::MOUNT), None)? {
        ForkResult::Child => {
            spawn::set_exit_alarm(ATTACH_TIMEOUT_SECONDS);
            let copies: io::Result<Vec<OwnedFd>> =
                entries.iter().map(|entry| clone_mount_source(&entry.location, entry.read_only)).collect();
            let sent = copies.and_then(|copies| build::send_descriptors(theirs.as_fd(), &copies));
            spawn::exit_now(sent.err().map_or(0, |error| error.raw_os_error().unwrap_or(1)))
        }
        ForkResult::Parent { pidfd, .. } => {
            drop(theirs);
            let received = build::receive_descriptors(ours.as_fd());
            match spawn::wait_for_child(pidfd.as_fd())? {
                ProcessExit::Code(errno) if errno != 0 => Err(io::Error::from_raw_os_error(errno)),
                ProcessExit::Code(_) | ProcessExit::Signal(_) => received,
            }
        }
    }
}
