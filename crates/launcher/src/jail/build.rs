//! Building a sandbox from outside: clone the child, write its id maps, send it its layers.
//!
//! ```text
//! launcher                                      child
//!   clone into new namespaces ────────────────► joins its groups, waits
//!   write uid and gid maps
//!   clone and idmap layers, volume, mounts
//!   send their descriptors ───────────────────► builds its root, becomes the agent
//!   ◄── one byte, or the step that failed ────
//! ```
//!
//! The launcher never waits for the child: the report pipe becomes readable when there is an
//! outcome, so that many sandboxes can be started at once.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces::{self, IdMapExtent, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, SingleThread};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;

use super::enter::{self, HandoverMounts, JailEntry};
use super::id_maps;
use super::sources::{MappingTarget, OpenedSource, SourceMapper};
use super::stages::StageTime;
use super::step::{FailureReport, JailError, JailStep, StepContext};

/// Everything about a sandbox that is decided before its first process exists.
pub(crate) struct JailParts {
    pub entry: JailEntry,
    /// The agent's v2 group.
    pub group: Option<OwnedFd>,
    pub network: JailNetwork,
    /// Whether the sandbox has a cgroup namespace of its own.
    pub cgroup_namespace: bool,
    pub id_mapping: IdMapping,
    /// The pipe to which the child writes a failure and the agent its report; the agent inherits a copy.
    pub report: OwnedFd,
}

pub(crate) enum JailNetwork {
    /// A namespace that was made in advance, and the launcher's own, to return to.
    Prepared { namespace: OwnedFd, home: OwnedFd },
    /// Made together with the other namespaces; the child brings its loopback up.
    New,
}

/// The host ids of the sandbox.
pub(crate) enum IdMapping {
    /// A range of host ids that begins at `base`; all mounts are mapped to it.
    Range {
        base: u32,
        user: (u32, u32),
        volume: PathBuf,
        journal: Option<PathBuf>,
        mounts: Vec<OpenedSource>,
    },
    /// The caller's own id as root, and no other users.
    Single { uid: u32, gid: u32 },
}

/// A child that has been sent everything it needs.
#[derive(Debug)]
pub(crate) struct StartedChild {
    pub pidfd: OwnedFd,
    /// The socket on which the child sends the durations of its stages before it becomes the agent.
    pub socket: OwnedFd,
    pub cloned: Instant,
}

/// Clones the child and sends it everything it needs. If this fails, the child is gone.
pub(crate) fn start_jail(
    thread: &SingleThread,
    parts: JailParts,
    record: impl FnOnce(Pid) -> io::Result<()>,
) -> Result<StartedChild, JailError> {
    let JailParts { entry, group, network, cgroup_namespace, id_mapping: ownership, report } = parts;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .at_step(JailStep::Handover)?;
    match fork_child(thread, group.as_ref().map(AsFd::as_fd), &network, cgroup_namespace, &ownership)? {
        ForkResult::Child => {
            drop(ours);
            let raise = matches!(network, JailNetwork::New);
            run_child(entry, theirs, raise, report)
        }
        ForkResult::Parent { pid, pidfd } => {
            drop(theirs);
            let cloned = Instant::now();
            let supplied = record(pid)
                .at_step(JailStep::Record)
                .and_then(|()| raise_oom_score(pid).at_step(JailStep::ResourceLimits))
                .and_then(|()| prepare_handover(thread, pid, &entry, &ownership))
                .and_then(|descriptors| {
                    send_descriptors(ours.as_fd(), &descriptors).at_step(JailStep::Handover)
                });
            if let Err(error) = supplied {
                // The child waits for a message; closing the socket ends it.
                drop(ours);
                spawn::wait_for_child(pidfd.as_fd()).at_step(JailStep::Clone)?;
                return Err(error);
            }
            Ok(StartedChild { pidfd, socket: ours, cloned })
        }
    }
}

fn fork_child(
    thread: &SingleThread,
    group: Option<BorrowedFd<'_>>,
    network: &JailNetwork,
    cgroup_namespace: bool,
    id_mapping: &IdMapping,
) -> Result<ForkResult, JailError> {
    let groups = if cgroup_namespace { NamespaceSet::CGROUP } else { NamespaceSet::NONE };
    let all = NamespaceSet::USER
        .and(NamespaceSet::MOUNT)
        .and(NamespaceSet::PID)
        .and(NamespaceSet::IPC)
        .and(NamespaceSet::UTS)
        .and(groups);
    match network {
        JailNetwork::New => {
            fork_as_owner(thread, id_mapping, all.and(NamespaceSet::NET), group).at_step(JailStep::Clone)
        }
        JailNetwork::Prepared { namespace, home } => {
            namespaces::enter_namespace(namespace.as_fd(), NamespaceSet::NET)
                .at_step(JailStep::NetNamespace)?;
            let fork = fork_as_owner(thread, id_mapping, all, group).at_step(JailStep::Clone);
            if !matches!(fork, Ok(ForkResult::Child)) {
                namespaces::enter_namespace(home.as_fd(), NamespaceSet::NET)
                    .at_step(JailStep::NetNamespace)?;
            }
            fork
        }
    }
}

/// Forks so that the sandbox's root owns its user namespace. The kernel also charges resources that
/// are used in a namespace (watches, timers, queues, locked memory) to its owner, and they must not
/// be charged to the host's root.
fn fork_as_owner(
    thread: &SingleThread,
    id_mapping: &IdMapping,
    all: NamespaceSet,
    group: Option<BorrowedFd<'_>>,
) -> io::Result<ForkResult> {
    match id_mapping {
        IdMapping::Range { base, .. } => namespaces::fork_as(thread, *base, all, group),
        IdMapping::Single { .. } => thread.fork(all, group),
    }
}

/// Makes the kernel prefer sandboxes over other processes when the host runs out of memory.
fn raise_oom_score(pid: Pid) -> io::Result<()> {
    std::fs::write(format!("/proc/{}/oom_score_adj", pid.as_raw_pid()), "500")
}

fn run_child(entry: JailEntry, socket: OwnedFd, raise: bool, report: OwnedFd) -> ! {
    let Ok(copy) = report.try_clone() else { spawn::exit_now(2) };
    let wait = || {
        let handover = receive_descriptors(socket.as_fd()).at_step(JailStep::Handover)?;
        if raise {
            namespaces::set_loopback_up().at_step(JailStep::NetNamespace)?;
        }
        Ok(handover)
    };
    let send_stages = |stages: &[StageTime]| {
        // A create does not fail because its durations are unknown.
        rustix::net::send(&socket, &serde_json::to_vec(stages).unwrap_or_default(), SendFlags::NOSIGNAL).ok();
    };
    let Err(error) = enter::enter_jail(entry, wait, send_stages, copy);
    let reported = std::fs::File::from(report).write_all(&FailureReport::from(error).to_json()).is_ok();
    spawn::exit_now(if reported { 1 } else { 2 })
}

/// Receives the durations that a child sent; there are none if it was not able to send them.
pub(crate) fn receive_stages(socket: BorrowedFd<'_>) -> Vec<StageTime> {
    const MAX_STAGES_BYTES: usize = 8192;
    let mut buffer = vec![0; MAX_STAGES_BYTES];
    let received = rustix::net::recv(socket, buffer.as_mut_slice(), RecvFlags::DONTWAIT);
    let length = received.map_or(0, |(_, length)| length.min(MAX_STAGES_BYTES));
    serde_json::from_slice(&buffer[..length]).unwrap_or_default()
}

/// Writes the child's id maps and makes the mounts that only the launcher can make.
fn prepare_handover(
    thread: &SingleThread,
    pid: Pid,
    entry: &JailEntry,
    id_mapping: &IdMapping,
) -> Result<Vec<OwnedFd>, JailError> {
    match id_mapping {
        IdMapping::Single { uid, gid } => {
            let map = |id: u32| [IdMapExtent { inside: 0, outside: id, count: 1 }];
            namespaces::write_id_maps(pid, &map(*uid), &map(*gid), SetgroupsPolicy::Deny)
                .at_step(JailStep::IdMaps)?;
            Ok(Vec::new())
        }
        IdMapping::Range { base, user, volume, journal, mounts } => {
            let map = id_maps::sandbox_map(*base);
            namespaces::write_id_maps(pid, &map, &map, SetgroupsPolicy::Allow).at_step(JailStep::IdMaps)?;
            let range = std::fs::File::open(format!("/proc/{}/ns/user", pid.as_raw_pid()))
                .at_step(JailStep::IdMaps)?;
            let mut all = Vec::new();
            let layer = MountAttrs::READ_ONLY.and(MountAttrs::NO_DEV);
            for lower in entry.trees.iter().flat_map(|tree| &tree.lowers) {
                let clone =
                    mounts::clone_tree(lower, MountDepth::Single).at_path(JailStep::CloneLowers, lower)?;
                mounts::set_attributes(clone.as_fd(), layer, Some(range.as_fd()), MountDepth::Single)
                    .at_path(JailStep::CloneLowers, lower)?;
                all.push(clone);
            }
            let own = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV);
            for part in [Some(volume), journal.as_ref()].into_iter().flatten() {
                let clone =
                    mounts::clone_tree(part, MountDepth::Single).at_path(JailStep::CloneVolume, part)?;
                mounts::set_attributes(clone.as_fd(), own, Some(range.as_fd()), MountDepth::Single)
                    .at_path(JailStep::CloneVolume, part)?;
                all.push(clone);
            }
            let target = MappingTarget { namespace: range.as_fd(), base: *base, user: *user };
            let mut mapper = SourceMapper::new(thread, target);
            for (mount, opened) in entry.mounts.iter().zip(mounts) {
                let copy = mapper.clone_source(opened, mount.read_only);
                all.push(copy.at_path(JailStep::CloneMounts, &mount.target)?);
            }
            Ok(all)
        }
    }
}

/// Sends descriptors to the process that calls [`receive_descriptors`] at the other end.
pub(crate) fn send_descriptors(socket: BorrowedFd<'_>, descriptors: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); 32 + 4 * borrowed.len().next_multiple_of(2)];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::Error::other("too many mounts for one message"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(b"go")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(crate) fn receive_descriptors(socket: BorrowedFd<'_>) -> io::Result<HandoverMounts> {
    // Enough for the largest number of descriptors that the kernel allows in one message.
    let mut space = vec![MaybeUninit::uninit(); 32 + 4 * 254];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0; 2];
    let mut slices = [IoSliceMut::new(&mut word)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        rustix::io::retry_on_intr(|| rustix::net::recvmsg(socket, &mut slices, &mut control, flags))?;
    if received.bytes != 2 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(descriptors)
}
