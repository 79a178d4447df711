//! Signals: keeping all of them away, and hearing of ended children. See signalfd(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

use crate::{check, check_long};

/// Keeps every signal that can be kept away from this thread.
pub fn block_all() -> io::Result<()> {
    set_mask(&full())
}

/// Lets every signal through again, as a program that is started expects.
pub fn unblock_all() -> io::Result<()> {
    set_mask(&empty())
}

/// Gives every signal its default action, whatever was ignored before. Ignoring is inherited
/// through exec, so this is done once for all that will be started. The C library hides two
/// signals from its own functions, hence the kernel is asked directly.
pub fn reset_actions() -> io::Result<()> {
    #[repr(C)]
    struct Action {
        handler: usize,
        flags: libc::c_ulong,
        restorer: usize,
        mask: u64,
    }
    let default = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
    for signal in (1..=64).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal)) {
        // SAFETY: the structure has the kernel's layout and outlives the call. The default
        // action calls no code of ours, and the old one is not asked for.
        let result = unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                libc::c_long::from(signal),
                &raw const default,
                std::ptr::null_mut::<Action>(),
                size_of::<u64>(),
            )
        };
        check_long(result)?;
    }
    Ok(())
}

/// Becomes readable when a child has ended. The signal must be blocked.
#[derive(Debug)]
pub struct ChildSignals(OwnedFd);

impl ChildSignals {
    pub fn open() -> io::Result<Self> {
        let mut mask = empty();
        // SAFETY: `mask` is an initialised set and the signal exists.
        check(unsafe { libc::sigaddset(&raw mut mask, libc::SIGCHLD) })?;
        // SAFETY: the kernel reads the set and gives a new descriptor, or fails.
        let fd =
            check(unsafe { libc::signalfd(-1, &raw const mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
        // SAFETY: the descriptor is new and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Forgets what was signalled, so that the descriptor is quiet until the next child ends.
    pub fn clear(&self) -> io::Result<()> {
        // One signal is pending at most, however many children ended.
        match rustix::io::read(&self.0, &mut [0; size_of::<libc::signalfd_siginfo>()]) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for ChildSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn empty() -> libc::sigset_t {
    // SAFETY: a signal set is plain bits, and all zeros is the empty one.
    unsafe { std::mem::zeroed() }
}

fn full() -> libc::sigset_t {
    let mut mask = empty();
    // SAFETY: `mask` is a set that the call may fill; it cannot fail on a valid pointer.
    unsafe { libc::sigfillset(&raw mut mask) };
    mask
}

fn set_mask(mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: the set is initialised and only read; the old one is not asked for.
    check(unsafe { libc::sigprocmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) }).map(drop)
}
