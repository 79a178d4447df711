//! Hearing of signals through a descriptor, for loops that wait on descriptors. See signalfd(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::check;

/// Becomes readable when one of its signals arrives.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Keeps the signals from their usual effect and collects them instead. Programs that this
    /// process starts inherit that they are blocked.
    pub fn watch(numbers: &[i32]) -> io::Result<Self> {
        // SAFETY: a signal set is plain bits, and all zeros is the empty one.
        let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
        for number in numbers {
            // SAFETY: `mask` is an initialised set; a number that is no signal is refused.
            check(unsafe { libc::sigaddset(&raw mut mask, *number) })?;
        }
        // SAFETY: the set is initialised and only read; the old one is not asked for.
        check(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const mask, std::ptr::null_mut()) })?;
        // SAFETY: the kernel reads the set and gives a new descriptor, or fails.
        let fd =
            check(unsafe { libc::signalfd(-1, &raw const mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
        // SAFETY: the descriptor is new and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that arrived, if there is one.
    pub fn next(&self) -> io::Result<Option<i32>> {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut record) {
            // The number is the first field of the record.
            Ok(_) => Ok(Some(i32::from_ne_bytes([record[0], record[1], record[2], record[3]]))),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub const TERMINATE: i32 = libc::SIGTERM;
pub const INTERRUPT: i32 = libc::SIGINT;
pub const HANG_UP: i32 = libc::SIGHUP;
pub const QUIT: i32 = libc::SIGQUIT;
pub const WINDOW: i32 = libc::SIGWINCH;
