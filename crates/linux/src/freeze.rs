//! Holding a filesystem still: FIFREEZE and FITHAW, see ioctl_fs(2) and fsfreeze(8).

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{self, Updater, opcode};

const GROUP: u8 = b'X';

/// Writes out all that the filesystem of `root` has in memory and stops every writer, until
/// [`thaw`]. One that is frozen already stays so.
pub fn freeze(root: impl AsFd) -> io::Result<()> {
    const FREEZE: u32 = opcode::read_write::<i32>(GROUP, 119);
    let mut unused = 0_i32;
    // SAFETY: the kernel neither reads nor writes the argument of this request.
    match unsafe { ioctl::ioctl(root, Updater::<FREEZE, _>::new(&mut unused)) } {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Lets writers go on. A filesystem that is not frozen is no error.
pub fn thaw(root: impl AsFd) -> io::Result<()> {
    const THAW: u32 = opcode::read_write::<i32>(GROUP, 120);
    let mut unused = 0_i32;
    // SAFETY: the kernel neither reads nor writes the argument of this request.
    match unsafe { ioctl::ioctl(root, Updater::<THAW, _>::new(&mut unused)) } {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
