//! Descriptors across an exec: those that a process finds when it starts, and those that it
//! gives to the program it becomes.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit};

use crate::check;
use crate::spawn::{self, Executable, Words};

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

/// A program to become, and the descriptors that it will find at the numbers 0, 1, 2, …
///
/// All of them lie above those numbers from the beginning. They go to their places in the last
/// moment, in [`Departure::go`], which does not return: whatever else in this process owns one
/// of the numbers never comes to use or close what lies there now.
#[derive(Debug)]
pub struct Departure {
    program: OwnedFd,
    descriptors: Vec<OwnedFd>,
    /// Where the reason is told if the exec fails.
    report: OwnedFd,
}

impl Departure {
    pub fn prepare(program: OwnedFd, descriptors: Vec<OwnedFd>, report: OwnedFd) -> io::Result<Self> {
        let above = RawFd::try_from(descriptors.len()).map_err(io::Error::other)?;
        let raise = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, above);
        Ok(Self {
            program: raise(program)?,
            descriptors: descriptors.into_iter().map(raise).collect::<Result<_, _>>()?,
            report: raise(report)?,
        })
    }

    /// Becomes the program, which inherits the descriptors and no other. If that fails, what
    /// `explain` makes of the reason is written to the report, and this process ends.
    pub fn go(self, arguments: &Words, environment: &Words, explain: fn(io::Error) -> Vec<u8>) -> ! {
        let Err(error) = self.place().and_then(|()| self.exec(arguments, environment));
        let told = rustix::io::write(&self.report, &explain(error)).is_ok();
        spawn::exit_now(if told { 1 } else { 2 })
    }

    fn place(&self) -> io::Result<()> {
        // The originals go with the exec, and so does all that is not ours to give.
        close_on_exec_from(0)?;
        for (number, descriptor) in (0..).zip(&self.descriptors) {
            // SAFETY: the call takes integers only. It may replace a descriptor that some value
            // in this process owns, but no code that could use it runs any more: the caller
            // executes a program or ends the process, and touches only descriptors that were
            // raised above all numbers used here.
            check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })?;
        }
        Ok(())
    }

    fn exec(&self, arguments: &Words, environment: &Words) -> io::Result<Infallible> {
        Err(spawn::exec(Executable::File(self.program.as_fd()), arguments, environment))
    }
}

/// Lets this process open as many files as it may at all, and says what the limit was before,
/// which is what programs are to get that expect the usual one.
pub fn raise_limit() -> io::Result<Rlimit> {
    let before = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before })?;
    Ok(before)
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

/// For a forked child that is about to exec: puts copies at `first`, `first + 1`, …, which the
/// program will find there, whatever lay at these numbers. They must lie above all of them.
pub fn place_from(first: RawFd, descriptors: &[OwnedFd]) -> io::Result<()> {
    let last = first + RawFd::try_from(descriptors.len()).map_err(io::Error::other)?;
    if descriptors.iter().any(|descriptor| descriptor.as_raw_fd() < last) {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    for (number, descriptor) in (first..).zip(descriptors) {
        // SAFETY: the call takes integers only. It may replace a descriptor that some value in
        // this process owns; the caller executes a program or ends the process, as it promises,
        // and until then uses only descriptors with higher numbers.
        check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })?;
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

/// As [`keep_only`], for several that stay with their owners.
pub fn keep_only_these<'fd>(kept: impl Iterator<Item = BorrowedFd<'fd>>) -> io::Result<()> {
    let numbers: BTreeSet<u32> = kept.map(|fd| fd.as_raw_fd().unsigned_abs()).collect();
    let mut first = 3;
    for number in numbers {
        if number > first {
            close_between(first, number - 1)?;
        }
        first = first.max(number + 1);
    }
    close_between(first, u32::MAX)
}

fn close_between(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the call takes integers only. The descriptors belong to values of the parent that
    // this child does not use, as `keep_only` demands.
    check(unsafe { libc::close_range(first, last, 0) }).map(drop)
}
