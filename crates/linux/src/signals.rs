//! Signals: blocking all of them, and receiving them through a descriptor for event loops. See
//! signalfd(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

use crate::{check_int, check_long};

pub const SIGCHLD: i32 = libc::SIGCHLD;
pub const SIGTERM: i32 = libc::SIGTERM;
pub const SIGINT: i32 = libc::SIGINT;
pub const SIGHUP: i32 = libc::SIGHUP;
pub const SIGQUIT: i32 = libc::SIGQUIT;
pub const SIGWINCH: i32 = libc::SIGWINCH;

/// Blocks every signal of this thread that can be blocked.
pub fn block_all() -> io::Result<()> {
    set_mask(&full_mask())
}

/// Unblocks every signal, as a newly started program expects.
pub fn unblock_all() -> io::Result<()> {
    set_mask(&empty_mask())
}

/// A set of signals, as the bit mask that the kernel shows: signal 1 is bit 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalSet(pub u64);

impl SignalSet {
    /// Returns the numbers of the signals, the lowest first.
    pub fn numbers(self) -> impl Iterator<Item = i32> {
        (1..=64).filter(move |signal| self.0 & (1 << (signal - 1)) != 0)
    }
}

/// Resets these signals to their default action. Ignored signals are inherited through exec, so a process
/// does this once for all programs that it starts, for the signals that its
/// [`crate::process_status::ProcessStatus`] shows. The C library hides two signals from its own
/// functions, hence the direct system call.
pub fn reset_actions(signals: SignalSet) -> io::Result<()> {
    #[repr(C)]
    struct KernelSigaction {
        handler: usize,
        flags: libc::c_ulong,
        restorer: usize,
        mask: u64,
    }
    let default = KernelSigaction { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
    for signal in signals.numbers() {
        // SAFETY: the structure has the kernel's layout and outlives the call. The default action
        // calls no code of ours, and the old one is not requested.
        let result = unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                libc::c_long::from(signal),
                &raw const default,
                std::ptr::null_mut::<KernelSigaction>(),
                size_of::<u64>(),
            )
        };
        check_long(result)?;
    }
    Ok(())
}

/// A descriptor that becomes readable when one of its signals arrives.
#[derive(Debug)]
pub struct SignalFd(OwnedFd);

impl SignalFd {
    /// Blocks the signals and collects them instead. Programs started by this process inherit the
    /// blocked mask.
    pub fn watch(numbers: &[i32]) -> io::Result<Self> {
        let mut mask = empty_mask();
        for number in numbers {
            // SAFETY: `mask` is an initialised set; a number that is not a signal is rejected.
            check_int(unsafe { libc::sigaddset(&raw mut mask, *number) })?;
        }
        // SAFETY: the set is initialised and only read; the old one is not requested.
        check_int(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const mask, std::ptr::null_mut()) })?;
        // SAFETY: the kernel reads the set and returns a new descriptor, or fails.
        let fd = check_int(unsafe {
            libc::signalfd(-1, &raw const mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        })?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns the next signal that arrived, if there is one.
    pub fn next_signal(&self) -> io::Result<Option<i32>> {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut record)) {
            // The number is the first field of the record.
            Ok(_) => Ok(Some(i32::from_ne_bytes([record[0], record[1], record[2], record[3]]))),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Discards the signals that have arrived, so that the descriptor is not readable until the
    /// next one.
    pub fn clear(&self) -> io::Result<()> {
        while self.next_signal()?.is_some() {}
        Ok(())
    }

    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn empty_mask() -> libc::sigset_t {
    // SAFETY: a signal set is plain bits, and all zeros is the empty one.
    unsafe { std::mem::zeroed() }
}

fn full_mask() -> libc::sigset_t {
    let mut mask = empty_mask();
    // SAFETY: `mask` is a set that the call may fill; it cannot fail on a valid pointer.
    unsafe { libc::sigfillset(&raw mut mask) };
    mask
}

fn set_mask(mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: the set is initialised and only read; the old one is not requested.
    check_int(unsafe { libc::sigprocmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) }).map(drop)
}
