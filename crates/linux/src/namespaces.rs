//! Namespaces: creating them, their id maps, and entering one. See namespaces(7),
//! user_namespaces(7).

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::process::Pid;

use crate::check_int;
use crate::spawn::{self, ForkResult, SingleThread};

/// A set of new namespaces, as `CLONE_NEW*` flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceSet(u64);

impl NamespaceSet {
    pub const NONE: Self = Self(0);
    pub const USER: Self = Self(libc::CLONE_NEWUSER as u64);
    pub const MOUNT: Self = Self(libc::CLONE_NEWNS as u64);
    pub const PID: Self = Self(libc::CLONE_NEWPID as u64);
    pub const IPC: Self = Self(libc::CLONE_NEWIPC as u64);
    pub const UTS: Self = Self(libc::CLONE_NEWUTS as u64);
    pub const CGROUP: Self = Self(libc::CLONE_NEWCGROUP as u64);
    pub const NET: Self = Self(libc::CLONE_NEWNET as u64);

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn flags(self) -> u64 {
        self.0
    }
}

/// One line of a uid or gid map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdMapExtent {
    pub inside: u32,
    pub outside: u32,
    pub count: u32,
}

/// Whether a process in the new namespace may change its supplementary groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetgroupsPolicy {
    Allow,
    /// Required before an unprivileged process may write a gid map.
    Deny,
}

/// Writes the id maps of the user namespace of `pid`.
pub fn write_id_maps(
    pid: Pid,
    users: &[IdMapExtent],
    groups: &[IdMapExtent],
    setgroups: SetgroupsPolicy,
) -> io::Result<()> {
    let text = |extents: &[IdMapExtent]| {
        let line = |e: &IdMapExtent| format!("{} {} {}\n", e.inside, e.outside, e.count);
        extents.iter().map(line).collect::<String>()
    };
    let pid = pid.as_raw_pid();
    if setgroups == SetgroupsPolicy::Deny {
        fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    }
    fs::write(format!("/proc/{pid}/uid_map"), text(users))?;
    fs::write(format!("/proc/{pid}/gid_map"), text(groups))
}

/// Creates a user namespace with these maps and without processes; it exists as long as the
/// descriptor. Idmapped mounts take their maps from such a namespace.
pub fn create_user_namespace(
    thread: &SingleThread,
    users: &[IdMapExtent],
    groups: &[IdMapExtent],
) -> io::Result<OwnedFd> {
    let (hold, wait) = std::os::unix::net::UnixStream::pair()?;
    match thread.fork(NamespaceSet::USER, None)? {
        ForkResult::Child => {
            drop(hold);
            let mut byte = [0];
            // Ends when the parent closes its end, even if the parent dies.
            let ended = io::Read::read(&mut &wait, &mut byte).is_ok();
            spawn::exit_now(i32::from(!ended))
        }
        ForkResult::Parent { pid, pidfd } => {
            let made = write_id_maps(pid, users, groups, SetgroupsPolicy::Allow)
                .and_then(|()| fs::File::open(format!("/proc/{}/ns/user", pid.as_raw_pid())));
            drop(hold);
            spawn::wait_for_child(pidfd.as_fd())?;
            made.map(OwnedFd::from)
        }
    }
}

/// Moves this thread into the namespace behind `fd`.
pub fn enter_namespace(fd: BorrowedFd<'_>, kind: NamespaceSet) -> io::Result<()> {
    let kind = libc::c_int::try_from(kind.0).map_err(io::Error::other)?;
    // SAFETY: the call takes a descriptor, borrowed for its duration, and an integer.
    check_int(unsafe { libc::setns(fd.as_raw_fd(), kind) }).map(drop)
}

/// Moves this thread into new namespaces.
pub fn unshare_namespaces(namespaces: NamespaceSet) -> io::Result<()> {
    let flags = libc::c_int::try_from(namespaces.0).map_err(io::Error::other)?;
    // SAFETY: the call takes one integer. No flag that unshares memory or descriptors is among
    // those that `NamespaceSet` can hold.
    check_int(unsafe { libc::unshare(flags) }).map(drop)
}

/// SIOCSIFFLAGS. Its type differs between C libraries.
const SET_INTERFACE_FLAGS: libc::Ioctl = 0x8914;

/// Brings the loopback device of the current net namespace up.
pub fn set_loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: an all-zero request is a valid value of this plain C structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *place = byte.cast_signed();
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the flags of an interface are a short by definition"
    )]
    let up = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    request.ifr_ifru.ifru_flags = up;
    // SAFETY: this request reads one `ifreq`, which outlives the call.
    check_int(unsafe { libc::ioctl(socket.as_raw_fd(), SET_INTERFACE_FLAGS, &raw const request) }).map(drop)
}

/// Makes the kernel kill this process when its parent thread ends. Changing ids resets this.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: the option takes one integer.
    check_int(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) })
        .map(drop)
}

/// Makes this process the parent of its orphaned descendants.
pub fn adopt_orphans() -> io::Result<()> {
    // SAFETY: the option takes one integer.
    check_int(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1 as libc::c_ulong, 0, 0, 0) }).map(drop)
}

/// Switches to ids inside a user namespace, and drops supplementary groups where that is allowed.
pub fn switch_ids(uid: u32, gid: u32, setgroups: SetgroupsPolicy) -> io::Result<()> {
    if setgroups == SetgroupsPolicy::Allow {
        // SAFETY: a count of zero reads nothing from the pointer.
        check_int(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    }
    // SAFETY: both calls take integers; the process is single-threaded, so no other thread keeps
    // the old ids.
    check_int(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: as above.
    check_int(unsafe { libc::setresuid(uid, uid, uid) }).map(drop)
}

/// Like [`SingleThread::fork`], but the new namespaces, and the kernel's resource counts for them,
/// belong to the user `uid`. Our own capabilities are unchanged.
pub fn fork_as(
    thread: &SingleThread,
    uid: u32,
    namespaces: NamespaceSet,
    group: Option<BorrowedFd<'_>>,
) -> io::Result<ForkResult> {
    // SAFETY: the option takes no argument.
    let before = check_int(unsafe { libc::prctl(libc::PR_GET_SECUREBITS, 0, 0, 0, 0) })?;
    // Otherwise changing ids would drop the capabilities. A new user namespace starts with the
    // default again, so this does not affect the child.
    const KEEP_ON_CHANGE: libc::c_int = 1 << 2;
    if before & KEEP_ON_CHANGE == 0 {
        let keep = libc::c_ulong::try_from(before | KEEP_ON_CHANGE).map_err(io::Error::other)?;
        // SAFETY: the option takes one integer.
        check_int(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, keep, 0, 0, 0) })?;
    }
    let bond = ParentDeathSignal::of_this_process()?;
    set_effective_user(uid)?;
    let forked = thread.fork(namespaces, group);
    if !matches!(forked, Ok(ForkResult::Child)) {
        set_effective_user(rustix::process::getuid().as_raw())?;
        bond.restore()?;
    }
    forked
}

/// The signal that this process gets when its parent dies. The kernel resets it with every change
/// of ids.
struct ParentDeathSignal {
    signal: libc::c_int,
    parent: Option<rustix::process::Pid>,
}

impl ParentDeathSignal {
    fn of_this_process() -> io::Result<Self> {
        let mut signal = 0;
        // SAFETY: the kernel writes one int, which outlives the call.
        check_int(unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut signal) })?;
        Ok(Self { signal, parent: rustix::process::getppid() })
    }

    /// Restores the signal. If the parent died in between, raises the signal now.
    fn restore(&self) -> io::Result<()> {
        if self.signal == 0 {
            return Ok(());
        }
        let signal = libc::c_ulong::try_from(self.signal).map_err(io::Error::other)?;
        // SAFETY: the option takes one integer.
        check_int(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) })?;
        if rustix::process::getppid() != self.parent {
            // SAFETY: the call takes one integer.
            check_int(unsafe { libc::raise(self.signal) })?;
        }
        Ok(())
    }
}

fn set_effective_user(uid: u32) -> io::Result<()> {
    const SAME: libc::uid_t = libc::uid_t::MAX;
    // SAFETY: the call takes integers; the process is single-threaded, so no other thread keeps
    // the old id.
    check_int(unsafe { libc::setresuid(SAME, uid, SAME) }).map(drop)
}

/// Sets the host name of the current UTS namespace.
pub fn set_host_name(name: &str) -> io::Result<()> {
    rustix::system::sethostname(name.as_bytes()).map_err(Into::into)
}

/// Lowers both values of a resource limit. See getrlimit(2).
pub fn set_resource_limit(resource: rustix::process::Resource, value: u64) -> io::Result<()> {
    let limit = rustix::process::Rlimit { current: Some(value), maximum: Some(value) };
    rustix::process::setrlimit(resource, limit).map_err(Into::into)
}
