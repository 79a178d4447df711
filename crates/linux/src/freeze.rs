//! Freezing a filesystem: FIFREEZE and FITHAW, see ioctl_fs(2) and fsfreeze(8).

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{self, Updater, opcode};

const IOCTL_GROUP: u8 = b'X';

/// Flushes the filesystem of `root` and blocks all writers until [`thaw_filesystem`]. An already frozen
/// filesystem stays frozen.
pub fn freeze_filesystem(root: impl AsFd) -> io::Result<()> {
    const FREEZE: u32 = opcode::read_write::<i32>(IOCTL_GROUP, 119);
    let mut unused = 0_i32;
    // SAFETY: the kernel neither reads nor writes the argument of this request.
    match unsafe { ioctl::ioctl(root, Updater::<FREEZE, _>::new(&mut unused)) } {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Unblocks writers. It is not an error if the filesystem is not frozen.
pub fn thaw_filesystem(root: impl AsFd) -> io::Result<()> {
    const THAW: u32 = opcode::read_write::<i32>(IOCTL_GROUP, 120);
    let mut unused = 0_i32;
    // SAFETY: the kernel neither reads nor writes the argument of this request.
    match unsafe { ioctl::ioctl(root, Updater::<THAW, _>::new(&mut unused)) } {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
