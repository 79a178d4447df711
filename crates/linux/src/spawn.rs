//! Creating processes, executing programs, and reaping children: clone3(2), execve(2), wait4(2).
//! All our forks and execs go through this module.

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::namespaces::NamespaceSet;
use crate::{check_int, check_long};

/// Proof that this process has one thread, so that a forked child can run ordinary code: no other
/// thread can have held a lock at that moment.
#[derive(Debug)]
pub struct SingleThread(PhantomData<*const ()>);

/// The side of a fork that is running.
#[derive(Debug)]
pub enum ForkResult {
    Child,
    Parent { pid: Pid, pidfd: OwnedFd },
}

/// A child that ended, and the resources that it and its reaped children used.
#[derive(Clone, Copy, Debug)]
pub struct ReapedChild {
    pub pid: Pid,
    pub end: ProcessExit,
    pub usage: ProcessUsage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessExit {
    Code(i32),
    Signal(i32),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    pub user_ms: u64,
    pub system_ms: u64,
    pub max_rss_kib: u64,
}

/// The program to execute.
#[derive(Clone, Copy, Debug)]
pub enum ExecFile<'a> {
    Path(&'a CStr),
    /// The file behind a descriptor, independent of any path.
    File(BorrowedFd<'a>),
}

/// Strings for execve(2) with a prepared array of pointers, so that nothing is allocated between
/// fork and exec.
#[derive(Debug)]
pub struct ExecStrings {
    pointers: Vec<*const c_char>,
    words: Vec<CString>,
}

impl SingleThread {
    /// Counts the threads. The caller promises to start none later.
    pub fn prove() -> io::Result<Self> {
        match std::fs::read_dir("/proc/self/task")?.count() {
            1 => Ok(Self(PhantomData)),
            more => Err(io::Error::other(format!("{more} threads are running instead of one"))),
        }
    }

    /// Forks into new namespaces and, if given, into a v2 group. Signal handlers are not inherited,
    /// and the child's end is signalled with SIGCHLD.
    pub fn fork(&self, namespaces: NamespaceSet, group: Option<BorrowedFd<'_>>) -> io::Result<ForkResult> {
        self.clone_with(namespaces.flags(), u64::from(libc::SIGCHLD.unsigned_abs()), group)
    }

    /// Like [`SingleThread::fork`], but the child's parent is our parent, which gets the same
    /// signal at its end as at ours.
    pub fn fork_sibling(
        &self,
        namespaces: NamespaceSet,
        group: Option<BorrowedFd<'_>>,
    ) -> io::Result<ForkResult> {
        // The kernel accepts no exit signal together with this flag.
        self.clone_with(namespaces.flags() | libc::CLONE_PARENT as u64, 0, group)
    }

    fn clone_with(&self, flags: u64, signal: u64, group: Option<BorrowedFd<'_>>) -> io::Result<ForkResult> {
        const CLEAR_SIGNAL_HANDLERS: u64 = 0x1_0000_0000;
        const INTO_GROUP: u64 = 0x2_0000_0000;
        let mut pidfd: libc::c_int = -1;
        // SAFETY: the structure is made of integers, for which zero means absent.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = flags | CLEAR_SIGNAL_HANDLERS | libc::CLONE_PIDFD as u64;
        args.pidfd = (&raw mut pidfd) as u64;
        args.exit_signal = signal;
        if let Some(group) = group {
            args.flags |= INTO_GROUP;
            args.cgroup = u64::from(group.as_raw_fd().unsigned_abs());
        }
        // SAFETY: without CLONE_VM this is a fork: the child has its own copy of our memory and of
        // this stack. We are the only thread, so the copy is consistent and no lock in it is held
        // by a thread that does not exist in the child. The kernel reads the structure of the size
        // given and writes one int to `pidfd`, which outlives the call.
        let result =
            check_long(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) })?;
        let Some(pid) = Pid::from_raw(i32::try_from(result).map_err(io::Error::other)?) else {
            return Ok(ForkResult::Child);
        };
        // SAFETY: the kernel just opened this descriptor, and it has no other owner.
        Ok(ForkResult::Parent { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
    }
}

impl ExecStrings {
    pub fn new(words: Vec<CString>) -> Self {
        let pointers = words.iter().map(|word| word.as_ptr()).chain([ptr::null()]).collect();
        Self { pointers, words }
    }

    pub fn iter(&self) -> impl Iterator<Item = &CStr> {
        self.words.iter().map(CString::as_c_str)
    }
}

/// Executes another program. Returns only on failure, with the reason. Allocates nothing.
pub fn exec_program(program: ExecFile<'_>, arguments: &ExecStrings, environment: &ExecStrings) -> io::Error {
    let (arguments, environment) = (arguments.pointers.as_ptr(), environment.pointers.as_ptr());
    match program {
        ExecFile::Path(path) => {
            // SAFETY: each array ends in a null pointer and each pointer before it is a C string
            // that the same `ExecStrings` owns; the kernel only reads them.
            unsafe { libc::execve(path.as_ptr(), arguments, environment) };
        }
        ExecFile::File(file) => {
            let (number, itself) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
            // SAFETY: as above; the path is an empty C string, which AT_EMPTY_PATH turns into the
            // descriptor itself, borrowed for the duration of the call.
            unsafe {
                libc::syscall(libc::SYS_execveat, number, c"".as_ptr(), arguments, environment, itself)
            };
        }
    }
    io::Error::last_os_error()
}

/// Ends a forked child at once, without cleaning up anything it shares with the parent.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: the call takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

/// Makes the kernel end this process after `seconds`, even if it is blocked. Meant for a forked
/// child, which has neither a handler nor a mask for that signal.
pub fn set_exit_alarm(seconds: u32) {
    // SAFETY: the call takes an integer and cannot fail.
    unsafe { libc::alarm(seconds) };
}

/// Reaps one child that has ended. Returns `None` if none has ended, and an error (ECHILD) if there
/// are no children.
pub fn reap_child() -> io::Result<Option<ReapedChild>> {
    let mut status = 0;
    // SAFETY: the structure is made of integers, for which zero is a value.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the types the kernel writes.
    let pid = check_int(unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut used) })?;
    let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
    let end = if libc::WIFSIGNALED(status) {
        ProcessExit::Signal(libc::WTERMSIG(status))
    } else {
        ProcessExit::Code(libc::WEXITSTATUS(status))
    };
    let usage = ProcessUsage {
        user_ms: timeval_millis(used.ru_utime),
        system_ms: timeval_millis(used.ru_stime),
        max_rss_kib: used.ru_maxrss.unsigned_abs(),
    };
    Ok(Some(ReapedChild { pid, end, usage }))
}

/// Waits for one child to end and reaps it.
pub fn wait_for_child(pidfd: BorrowedFd<'_>) -> io::Result<ProcessExit> {
    let waited =
        rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED))?;
    let status = waited.ok_or_else(|| io::Error::other("the wait returned before the child ended"))?;
    let signal = status.terminating_signal().map(ProcessExit::Signal);
    Ok(signal.unwrap_or_else(|| ProcessExit::Code(status.exit_status().unwrap_or_default())))
}

/// Returns the pid of a child that has ended and was not reaped yet, without reaping it.
pub fn peek_ended_child() -> io::Result<Option<Pid>> {
    // SAFETY: an all-zero value is valid for this plain C structure.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes one `siginfo_t`, which outlives the call.
    match check_int(unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) }) {
        // SAFETY: after a successful wait the union holds the fields of a child, or stays zero.
        Ok(_) => Ok(Pid::from_raw(unsafe { info.si_pid() })),
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(None),
        Err(error) => Err(error),
    }
}

fn timeval_millis(time: libc::timeval) -> u64 {
    time.tv_sec.unsigned_abs() * 1000 + time.tv_usec.unsigned_abs() / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_with_threads_cannot_fork() {
        // The test harness runs this in a second thread.
        let error = SingleThread::prove().expect_err("there are at least two threads");
        assert!(error.to_string().contains("threads are running instead of one"));
    }
}
