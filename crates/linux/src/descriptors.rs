//! Putting descriptors at fixed numbers for a program about to be executed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::{check, check_long};

/// Duplicates `descriptors` to the numbers `first`, `first + 1`, … where they survive exec, and
/// marks every other descriptor from there on to be closed by exec.
///
/// Whatever had those numbers is replaced, so the caller is about to execute a program and owns
/// nothing there that it still needs.
pub fn place_from(first: RawFd, descriptors: Vec<OwnedFd>) -> io::Result<()> {
    let end = first + RawFd::try_from(descriptors.len()).map_err(io::Error::other)?;
    if descriptors.iter().any(|fd| (first..end).contains(&fd.as_raw_fd())) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // From `end` on, all are closed by the exec, the originals included.
    const CLOSE_ON_EXEC: libc::c_uint = 4;
    // SAFETY: the call takes three integers and only sets a flag on descriptors.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, end, libc::c_uint::MAX, CLOSE_ON_EXEC) })?;
    for (number, descriptor) in (first..).zip(&descriptors) {
        // SAFETY: dup2 takes two integers. It may replace a descriptor that some owner of this
        // process still holds, which the contract above excludes from being used again.
        check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })?;
    }
    // The originals stay open until exec: dropping them is all that is left to happen.
    Ok(())
}

/// Takes over descriptor `number`, which the parent process passed by exec and nobody else in
/// this process owns. Each number can be taken once, before any other descriptor is opened or
/// closed; later it might mean something else, so the caller does it first thing in `main`.
pub fn take_over(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD takes integers; it fails if the number is not open.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: the descriptor is open, as just seen, and by the contract above it is owned by
    // nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
