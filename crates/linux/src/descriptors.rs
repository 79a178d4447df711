//! Descriptors across an exec: those that a process inherits, and those that it passes to the next
//! program.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit};

use crate::spawn::{self, ExecFile, ExecStrings};
use crate::{check_int, check_long};

static CLAIMED: AtomicBool = AtomicBool::new(false);

/// The right to take over inherited descriptors, by number. There is one per process.
#[derive(Debug)]
pub struct InheritedDescriptors {
    taken: BTreeSet<RawFd>,
}

impl InheritedDescriptors {
    /// Must be called before the process opens anything; returns `None` the second time.
    pub fn claim() -> Option<Self> {
        let first = !CLAIMED.swap(true, Ordering::SeqCst);
        first.then(|| Self { taken: BTreeSet::new() })
    }

    /// Takes over one descriptor, which must be open, above the standard ones, and not yet taken,
    /// and makes it close-on-exec.
    pub fn take(&mut self, number: RawFd) -> io::Result<OwnedFd> {
        if number <= libc::STDERR_FILENO || !self.taken.insert(number) {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the call takes integers only, and fails on a number that is not open.
        check_int(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
        // SAFETY: the descriptor is open, as was just checked. It was inherited and is handed out
        // only here, once, since there is one `InheritedDescriptors` and it remembers the numbers it handed
        // out.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

/// A program to execute, and the descriptors that it will have as numbers 0, 1, 2, …
///
/// All of them initially have higher numbers. They are moved to their final numbers at the last
/// moment, in [`PreparedExec::exec_or_exit`], which does not return: other code in this process that owns one of
/// these numbers never gets to use or close the new descriptor.
#[derive(Debug)]
pub struct PreparedExec {
    program: OwnedFd,
    descriptors: Vec<OwnedFd>,
    /// The failure of the exec is reported here.
    report: OwnedFd,
}

impl PreparedExec {
    pub fn prepare(program: OwnedFd, descriptors: Vec<OwnedFd>, report: OwnedFd) -> io::Result<Self> {
        let above = RawFd::try_from(descriptors.len()).map_err(io::Error::other)?;
        let raise = |fd: OwnedFd| match fd.as_raw_fd() >= above {
            true => Ok(fd),
            false => rustix::io::fcntl_dupfd_cloexec(fd, above),
        };
        Ok(Self {
            program: raise(program)?,
            descriptors: descriptors.into_iter().map(raise).collect::<Result<_, _>>()?,
            report: raise(report)?,
        })
    }

    /// Executes the program, which inherits only these descriptors. If that fails, writes the
    /// output of `explain` to the report descriptor and ends this process.
    pub fn exec_or_exit(
        self,
        arguments: &ExecStrings,
        environment: &ExecStrings,
        explain: fn(io::Error) -> Vec<u8>,
    ) -> ! {
        let Err(error) = self.place_descriptors().and_then(|()| self.exec_program(arguments, environment));
        let reported = rustix::io::write(&self.report, &explain(error)).is_ok();
        spawn::exit_now(if reported { 1 } else { 2 })
    }

    fn place_descriptors(&self) -> io::Result<()> {
        // Closes the originals at the exec, and all other descriptors.
        close_on_exec_from(0)?;
        for (number, descriptor) in (0..).zip(&self.descriptors) {
            // SAFETY: the call takes integers only. It may replace a descriptor that some value in
            // this process owns, but no code that could use it runs any more: the caller executes a
            // program or ends the process, and uses only descriptors that were raised above all
            // numbers used here.
            check_int(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })?;
        }
        Ok(())
    }

    fn exec_program(&self, arguments: &ExecStrings, environment: &ExecStrings) -> io::Result<Infallible> {
        Err(spawn::exec_program(ExecFile::File(self.program.as_fd()), arguments, environment))
    }
}

/// Raises this process's limit on open files to the maximum and returns the previous limit, for
/// programs that expect the usual one.
pub fn raise_open_file_limit() -> io::Result<Rlimit> {
    let before = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before })?;
    Ok(before)
}

/// Opens `/dev/null` on each standard descriptor that is closed, so that no file opened later is
/// mistaken for standard input or output.
pub fn fill_standard_descriptors() -> io::Result<()> {
    for number in [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: the call takes integers only.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0 {
            continue;
        }
        // SAFETY: the path is a constant C string. The lowest free number is `number` itself, since
        // all lower ones are open, and it has no other owner.
        check_int(unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) })?;
    }
    Ok(())
}

/// For a forked child that is about to exec: duplicates the descriptors to `first`, `first + 1`, …,
/// replacing any at these numbers. The originals must all have higher numbers.
pub fn duplicate_from(first: RawFd, descriptors: &[OwnedFd]) -> io::Result<()> {
    let last = first + RawFd::try_from(descriptors.len()).map_err(io::Error::other)?;
    if descriptors.iter().any(|descriptor| descriptor.as_raw_fd() < last) {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    for (number, descriptor) in (first..).zip(descriptors) {
        // SAFETY: the call takes integers only. It may replace a descriptor that some value in this
        // process owns; the caller executes a program or ends the process, as it promises, and
        // until then uses only descriptors with higher numbers.
        check_int(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })?;
    }
    Ok(())
}

/// Makes an exec close every descriptor from `first` on.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: the call takes integers only and changes a flag of descriptors, not the
    // descriptors themselves. Not every C library has a function for it.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) })
        .map(drop)
}

/// For a forked child that continues without exec: closes every descriptor except the standard ones
/// and `kept`. This also closes the descriptors that the copied memory of the parent still refers
/// to, so the child must not use any of them, and must end with [`crate::spawn::exit_now`].
pub fn close_all_except(kept: OwnedFd) -> io::Result<OwnedFd> {
    let number = kept.as_raw_fd().unsigned_abs();
    if number > 3 {
        close_between(3, number - 1)?;
    }
    close_between(number + 1, u32::MAX)?;
    Ok(kept)
}

/// Like [`close_all_except`], for several descriptors that stay with their owners.
pub fn close_all_except_these<'fd>(kept: impl Iterator<Item = BorrowedFd<'fd>>) -> io::Result<()> {
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
    // this child does not use, as `close_all_except` requires.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0_u32) }).map(drop)
}
