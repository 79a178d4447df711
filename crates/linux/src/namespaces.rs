//! Making processes in namespaces of their own. See clone(2), user_namespaces(7).

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::{check, check_long};

/// A set of new namespaces, as `CLONE_NEW*` flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespaces(u64);

impl Namespaces {
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
}

/// Which side of a fork this is.
#[derive(Debug)]
pub enum Fork {
    Child,
    Parent { pid: i32, pidfd: OwnedFd },
}

/// Forks into new namespaces and, if given, into a v2 control group.
///
/// The caller must be single-threaded: the child goes on as a copy of this thread only, and a
/// lock held by another thread would stay locked there for ever. Processes of ours that fork
/// (launcher, agent, `run`) never start a thread; this is checked.
pub fn fork_into(namespaces: Namespaces, group: Option<BorrowedFd<'_>>) -> io::Result<Fork> {
    // The directory has one link for each thread besides its own two.
    if fs::metadata("/proc/self/task")?.nlink() != 3 {
        return Err(io::Error::other("a process with several threads must not fork"));
    }
    let mut pidfd: libc::c_int = -1;
    let mut flags = namespaces.0 | libc::CLONE_PIDFD as u64;
    if group.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let arguments = CloneArguments {
        flags,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: group.map_or(0, |fd| u64::from(fd.as_raw_fd().unsigned_abs())),
        ..CloneArguments::default()
    };
    // SAFETY: without CLONE_VM the child has its own copy of memory, as with fork(2), and the
    // check above keeps this process single-threaded. The kernel reads the structure of the
    // size given and writes one int to `pidfd`, which outlives the call.
    let pid = check_long(unsafe {
        libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArguments>())
    })?;
    if pid == 0 {
        return Ok(Fork::Child);
    }
    // SAFETY: the kernel just opened this descriptor for us alone.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Fork::Parent { pid: i32::try_from(pid).map_err(io::Error::other)?, pidfd })
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `struct clone_args` up to `cgroup`, which Linux 5.7 knows.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// One line of a uid or gid map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub inside: u32,
    pub outside: u32,
    pub count: u32,
}

/// Whether a process in the new namespace may change its supplementary groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setgroups {
    Allow,
    /// Must be said before an unprivileged process may write a gid map.
    Deny,
}

/// Gives the user namespace of `pid` its maps.
pub fn write_maps(pid: i32, users: &[Extent], groups: &[Extent], setgroups: Setgroups) -> io::Result<()> {
    let text = |extents: &[Extent]| {
        let line = |e: &Extent| format!("{} {} {}\n", e.inside, e.outside, e.count);
        extents.iter().map(line).collect::<String>()
    };
    if setgroups == Setgroups::Deny {
        fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    }
    fs::write(format!("/proc/{pid}/uid_map"), text(users))?;
    fs::write(format!("/proc/{pid}/gid_map"), text(groups))
}

/// Makes a user namespace with these maps that no process is in; it lives as long as the
/// descriptor. Idmapped mounts take their maps from such a one.
pub fn empty_user_namespace(users: &[Extent], groups: &[Extent]) -> io::Result<OwnedFd> {
    let (hold, wait) = std::os::unix::net::UnixStream::pair()?;
    match fork_into(Namespaces::USER, None)? {
        Fork::Child => {
            drop(hold);
            let mut byte = [0];
            // Ends when the parent closes its side, whatever happens to it.
            let ended = io::Read::read(&mut &wait, &mut byte).is_ok();
            exit_now(i32::from(!ended))
        }
        Fork::Parent { pid, pidfd } => {
            let made = write_maps(pid, users, groups, Setgroups::Allow)
                .and_then(|()| fs::File::open(format!("/proc/{pid}/ns/user")));
            drop(hold);
            reap(pidfd.as_fd())?;
            made.map(OwnedFd::from)
        }
    }
}

/// Waits for a child by its pidfd and forgets it. `true` if it exited with status 0.
pub fn reap(pidfd: BorrowedFd<'_>) -> io::Result<bool> {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let status = rustix::io::retry_on_intr(|| waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED))?;
    Ok(status.and_then(|status| status.exit_status()) == Some(0))
}

/// The pid of a child that has ended and waits to be collected, without collecting it.
pub fn ended_child() -> io::Result<Option<i32>> {
    // SAFETY: an all-zero value is valid for this plain C structure.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes one `siginfo_t`, which outlives the call.
    match check(unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) }) {
        // SAFETY: after a successful wait the union holds the fields of a child, or stays zero.
        Ok(_) => Ok(Some(unsafe { info.si_pid() }).filter(|pid| *pid != 0)),
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Moves this thread into the namespace behind `fd`.
pub fn enter(fd: BorrowedFd<'_>, kind: Namespaces) -> io::Result<()> {
    let kind = libc::c_int::try_from(kind.0).map_err(io::Error::other)?;
    // SAFETY: the call takes a descriptor, borrowed for its duration, and an integer.
    check(unsafe { libc::setns(fd.as_raw_fd(), kind) }).map(drop)
}

/// Takes this thread into new namespaces.
pub fn unshare(namespaces: Namespaces) -> io::Result<()> {
    let flags = libc::c_int::try_from(namespaces.0).map_err(io::Error::other)?;
    // SAFETY: the call takes one integer. No flag that unshares memory or descriptors is among
    // those that `Namespaces` can hold.
    check(unsafe { libc::unshare(flags) }).map(drop)
}

/// Brings the loopback device of the current net namespace up.
pub fn raise_loopback() -> io::Result<()> {
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
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which outlives the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }).map(drop)
}

/// Replaces this process by the program behind `fd`. Returns only on failure.
pub fn execute(fd: BorrowedFd<'_>, arguments: &[&CStr], environment: &[&CStr]) -> io::Error {
    let pointers = |words: &[&CStr]| -> Vec<*const libc::c_char> {
        words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: both arrays end with a null pointer and hold C strings that outlive the call; the
    // path is an empty C string, which AT_EMPTY_PATH turns into the descriptor itself.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            fd.as_raw_fd(),
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Ends this process at once, without running anything registered for its exit. Forked
/// children use it: what is registered belongs to the parent.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process; nothing of it is used afterwards.
    unsafe { libc::_exit(code) }
}

/// Asks the kernel to kill this process when its parent thread ends. Changing ids clears it.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: the option takes one integer.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) }).map(drop)
}

/// Makes this process the parent of its orphaned descendants.
pub fn adopt_orphans() -> io::Result<()> {
    // SAFETY: the option takes one integer.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1 as libc::c_ulong, 0, 0, 0) }).map(drop)
}

/// Takes on ids inside a user namespace, without supplementary groups where they may be given up.
pub fn become_ids(uid: u32, gid: u32, setgroups: Setgroups) -> io::Result<()> {
    if setgroups == Setgroups::Allow {
        // SAFETY: a count of zero reads nothing from the pointer.
        check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    }
    // SAFETY: both calls take integers; the process is single-threaded, so no other thread keeps
    // the old ids.
    check(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: as above.
    check(unsafe { libc::setresuid(uid, uid, uid) }).map(drop)
}

/// As [`fork_into`], but new namespaces belong to the user `uid`, and with them the kernel's
/// counts of what is used inside. Our own capabilities stay as they are.
pub fn fork_into_as(uid: u32, namespaces: Namespaces, group: Option<BorrowedFd<'_>>) -> io::Result<Fork> {
    // SAFETY: the option takes no argument.
    let before = check(unsafe { libc::prctl(libc::PR_GET_SECUREBITS, 0, 0, 0, 0) })?;
    // Otherwise the change of ids would take the capabilities away. A new user namespace begins
    // with the default again, so nothing of this reaches the child.
    const KEEP_ON_CHANGE: libc::c_int = 1 << 2;
    let keep = libc::c_ulong::try_from(before | KEEP_ON_CHANGE).map_err(io::Error::other)?;
    // SAFETY: the option takes one integer.
    check(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, keep, 0, 0, 0) })?;
    let bond = Bond::of_this_process()?;
    set_effective_user(uid)?;
    let forked = fork_into(namespaces, group);
    if !matches!(forked, Ok(Fork::Child)) {
        set_effective_user(rustix::process::getuid().as_raw())?;
        bond.renew()?;
    }
    forked
}

/// The signal that this process gets when its parent dies. The kernel forgets it with every
/// change of ids.
struct Bond {
    signal: libc::c_int,
    parent: Option<rustix::process::Pid>,
}

impl Bond {
    fn of_this_process() -> io::Result<Self> {
        let mut signal = 0;
        // SAFETY: the kernel writes one int, which outlives the call.
        check(unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut signal) })?;
        Ok(Self { signal, parent: rustix::process::getppid() })
    }

    /// Asks for it again. A parent that died in between is made up for.
    fn renew(&self) -> io::Result<()> {
        if self.signal == 0 {
            return Ok(());
        }
        let signal = libc::c_ulong::try_from(self.signal).map_err(io::Error::other)?;
        // SAFETY: the option takes one integer.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) })?;
        if rustix::process::getppid() != self.parent {
            // SAFETY: the call takes one integer.
            check(unsafe { libc::raise(self.signal) })?;
        }
        Ok(())
    }
}

fn set_effective_user(uid: u32) -> io::Result<()> {
    const SAME: libc::uid_t = libc::uid_t::MAX;
    // SAFETY: the call takes integers; the process is single-threaded, so no other thread keeps
    // the old id.
    check(unsafe { libc::setresuid(SAME, uid, SAME) }).map(drop)
}

/// Sets the host name of the current UTS namespace.
pub fn set_host_name(name: &str) -> io::Result<()> {
    rustix::system::sethostname(name.as_bytes()).map_err(Into::into)
}

/// Lowers both values of a resource limit. See getrlimit(2).
pub fn limit(resource: rustix::process::Resource, value: u64) -> io::Result<()> {
    let limit = rustix::process::Rlimit { current: Some(value), maximum: Some(value) };
    rustix::process::setrlimit(resource, limit).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_refuses_to_fork() {
        // The test harness itself runs this in a second thread.
        let error = fork_into(Namespaces::NONE, None).expect_err("there are at least two threads");
        assert!(error.to_string().contains("several threads"));
    }
}
