//! Descriptors that a process finds open when it starts.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::check;

static CLAIMED: AtomicBool = AtomicBool::new(false);

/// The right to take over inherited descriptors, by number. There is one per process.
#[derive(Debug)]
pub struct Inherited {
    taken: BTreeSet<RawFd>,
}

impl Inherited {
    /// To be called before the process opens anything of its own; `None` the second time.
    pub fn claim() -> Option<Self> {
        let first = !CLAIMED.swap(true, Ordering::SeqCst);
        first.then(|| Self { taken: BTreeSet::new() })
    }

    /// Takes over one descriptor, which must be open, above the standard ones, and not yet
    /// taken, and lets no exec pass it on.
    pub fn take(&mut self, number: RawFd) -> io::Result<OwnedFd> {
        if number <= libc::STDERR_FILENO || !self.taken.insert(number) {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the call takes integers only, and fails on a number that is not open.
        check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
        // SAFETY: the descriptor is open, as was just seen. It was inherited and is handed out
        // here alone, once, since there is one `Inherited` and it remembers what it gave away.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

/// Opens `/dev/null` on each of the three standard descriptors that is closed, so that nothing
/// opened later is taken for standard input or output.
pub fn fill_standard() -> io::Result<()> {
    for number in [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: the call takes integers only.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0 {
            continue;
        }
        // SAFETY: the path is a constant C string. The lowest free number is `number` itself,
        // since all lower ones are open, and nobody else owns it.
        check(unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) })?;
    }
    Ok(())
}

/// Makes an exec close every descriptor from `first` on.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: the call takes integers only and changes a flag of descriptors, not the
    // descriptors themselves.
    check(unsafe { libc::close_range(first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed()) }).map(drop)
}

/// For a forked child that goes on without exec: closes every descriptor but the standard ones
/// and `kept`. What the copied memory of the parent still calls its descriptors is closed by
/// this, so the child must not use any of it, and must end with [`crate::spawn::exit_now`].
pub fn keep_only(kept: OwnedFd) -> io::Result<OwnedFd> {
    let number = kept.as_raw_fd().unsigned_abs();
    if number > 3 {
        close_between(3, number - 1)?;
    }
    close_between(number + 1, u32::MAX)?;
    Ok(kept)
}

fn close_between(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the call takes integers only. The descriptors belong to values of the parent that
    // this child does not use, as `keep_only` demands.
    check(unsafe { libc::close_range(first, last, 0) }).map(drop)
}
