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

use linux::mounts::{self, Attributes, Depth};
use linux::namespaces::{self, Extent, Namespaces, Setgroups};
use linux::spawn::{self, Forked, SingleThread};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;

use super::enter::{self, Entry, Handover};
use super::owners;
use super::sources::{self, Opened, Viewer};
use super::step::{At, Failure, JailError, Step};

/// Everything about a sandbox that is decided before its first process exists.
pub struct Parts {
    pub entry: Entry,
    /// The agent's v2 group.
    pub group: Option<OwnedFd>,
    pub network: NetworkPart,
    /// Whether the sandbox has a cgroup namespace of its own.
    pub cgroup_namespace: bool,
    pub ownership: Ownership,
    /// The pipe to which the child writes a failure and the agent its report; the agent inherits a copy.
    pub report: OwnedFd,
}

pub enum NetworkPart {
    /// A namespace that was made in advance, and the launcher's own, to return to.
    Prepared { namespace: OwnedFd, home: OwnedFd },
    /// Made together with the other namespaces; the child brings its loopback up.
    New,
}

/// The host ids of the sandbox.
pub enum Ownership {
    /// A range of host ids that begins at `base`; all mounts are mapped to it.
    Range { base: u32, user: (u32, u32), volume: PathBuf, journal: PathBuf, mounts: Vec<Opened> },
    /// The caller's own id as root, and no other users.
    Single { uid: u32, gid: u32 },
}

/// The first process of a sandbox that is being built.
#[derive(Debug)]
pub struct Begun {
    pub pid: Pid,
    pub pidfd: OwnedFd,
}

/// Clones the child and sends it everything it needs. If this fails, the child is gone.
pub fn begin(
    thread: &SingleThread,
    parts: Parts,
    record: impl FnOnce(Pid) -> io::Result<()>,
) -> Result<Begun, JailError> {
    let Parts { entry, group, network, cgroup_namespace, ownership, report } = parts;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .at(Step::Handover)?;
    match fork(thread, group.as_ref().map(AsFd::as_fd), &network, cgroup_namespace, &ownership)? {
        Forked::Child => {
            drop(ours);
            let raise = matches!(network, NetworkPart::New);
            run_child(entry, theirs, raise, report)
        }
        Forked::Parent { pid, pidfd } => {
            drop(theirs);
            let supplied = record(pid)
                .at(Step::Record)
                .and_then(|()| yield_memory(pid).at(Step::ResourceLimits))
                .and_then(|()| supply(thread, pid, &entry, &ownership))
                .and_then(|descriptors| send(ours.as_fd(), &descriptors).at(Step::Handover));
            if let Err(error) = supplied {
                // The child waits for a message; closing the socket ends it.
                drop(ours);
                spawn::wait(pidfd.as_fd()).at(Step::Clone)?;
                return Err(error);
            }
            Ok(Begun { pid, pidfd })
        }
    }
}

fn fork(
    thread: &SingleThread,
    group: Option<BorrowedFd<'_>>,
    network: &NetworkPart,
    cgroup_namespace: bool,
    ownership: &Ownership,
) -> Result<Forked, JailError> {
    let groups = if cgroup_namespace { Namespaces::CGROUP } else { Namespaces::NONE };
    let all = Namespaces::USER
        .and(Namespaces::MOUNT)
        .and(Namespaces::PID)
        .and(Namespaces::IPC)
        .and(Namespaces::UTS)
        .and(groups);
    match network {
        NetworkPart::New => fork_as(thread, ownership, all.and(Namespaces::NET), group).at(Step::Clone),
        NetworkPart::Prepared { namespace, home } => {
            namespaces::enter(namespace.as_fd(), Namespaces::NET).at(Step::NetNamespace)?;
            let fork = fork_as(thread, ownership, all, group).at(Step::Clone);
            if !matches!(fork, Ok(Forked::Child)) {
                namespaces::enter(home.as_fd(), Namespaces::NET).at(Step::NetNamespace)?;
            }
            fork
        }
    }
}

/// Forks so that the sandbox's root owns its user namespace. The kernel also charges resources that
/// are used in a namespace (watches, timers, queues, locked memory) to its owner, and they must not
/// be charged to the host's root.
fn fork_as(
    thread: &SingleThread,
    ownership: &Ownership,
    all: Namespaces,
    group: Option<BorrowedFd<'_>>,
) -> io::Result<Forked> {
    match ownership {
        Ownership::Range { base, .. } => namespaces::fork_as(thread, *base, all, group),
        Ownership::Single { .. } => thread.fork(all, group),
    }
}

/// Makes the kernel prefer sandboxes over other processes when the host runs out of memory.
fn yield_memory(pid: Pid) -> io::Result<()> {
    std::fs::write(format!("/proc/{}/oom_score_adj", pid.as_raw_pid()), "500")
}

fn run_child(entry: Entry, socket: OwnedFd, raise: bool, report: OwnedFd) -> ! {
    let Ok(copy) = report.try_clone() else { spawn::exit_now(2) };
    let wait = || {
        let handover = receive(socket.as_fd())?;
        if raise {
            namespaces::raise_loopback()?;
        }
        Ok(handover)
    };
    let Err(error) = enter::enter(entry, wait, copy);
    let reported = std::fs::File::from(report).write_all(&Failure::from(error).told()).is_ok();
    spawn::exit_now(if reported { 1 } else { 2 })
}

/// Writes the child's id maps and makes the mounts that only the launcher can make.
fn supply(
    thread: &SingleThread,
    pid: Pid,
    entry: &Entry,
    ownership: &Ownership,
) -> Result<Vec<OwnedFd>, JailError> {
    match ownership {
        Ownership::Single { uid, gid } => {
            let map = |id: u32| [Extent { inside: 0, outside: id, count: 1 }];
            namespaces::write_maps(pid, &map(*uid), &map(*gid), Setgroups::Deny).at(Step::IdMaps)?;
            Ok(Vec::new())
        }
        Ownership::Range { base, user, volume, journal, mounts } => {
            let map = owners::sandbox_map(*base);
            namespaces::write_maps(pid, &map, &map, Setgroups::Allow).at(Step::IdMaps)?;
            let range =
                std::fs::File::open(format!("/proc/{}/ns/user", pid.as_raw_pid())).at(Step::IdMaps)?;
            let mut all = Vec::new();
            let layer = Attributes::READ_ONLY.and(Attributes::NO_DEV);
            for lower in entry.trees.iter().flat_map(|tree| &tree.lowers) {
                let clone = mounts::clone_tree(lower, Depth::Single).at_path(Step::CloneLowers, lower)?;
                mounts::set_attributes(clone.as_fd(), layer, Some(range.as_fd()), Depth::Single)
                    .at_path(Step::CloneLowers, lower)?;
                all.push(clone);
            }
            let own = Attributes::NO_SUID.and(Attributes::NO_DEV);
            for part in [volume, journal] {
                let clone = mounts::clone_tree(part, Depth::Single).at_path(Step::CloneVolume, part)?;
                mounts::set_attributes(clone.as_fd(), own, Some(range.as_fd()), Depth::Single)
                    .at_path(Step::CloneVolume, part)?;
                all.push(clone);
            }
            let viewer = Viewer { namespace: range.as_fd(), base: *base, user: *user };
            for (mount, opened) in entry.mounts.iter().zip(mounts) {
                let shown = sources::show(thread, opened, viewer, mount.read_only);
                all.push(shown.at_path(Step::CloneMounts, &mount.target)?);
            }
            Ok(all)
        }
    }
}

/// Sends descriptors to the process that calls [`receive`] at the other end.
pub fn send(socket: BorrowedFd<'_>, descriptors: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); 32 + 4 * borrowed.len().next_multiple_of(2)];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::Error::other("too many mounts for one message"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(b"go")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Handover> {
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
