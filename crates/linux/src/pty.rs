//! Terminals: we keep the master, the process gets the slave. See pty(7).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Both ends of a new terminal. Both are close-on-exec, and neither becomes our controlling
/// terminal.
#[derive(Debug)]
pub struct PtyPair {
    pub master: OwnedFd,
    pub slave: OwnedFd,
}

impl PtyPair {
    /// Opens a terminal that belongs to `owner`. The slave is opened through the master, so no name
    /// below `/dev/pts` has to be trusted.
    pub fn open(columns: u16, rows: u16, owner: rustix::fs::Uid) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags)?;
        unlockpt(&master)?;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
        rustix::fs::fchown(&slave, Some(owner), None)?;
        rustix::fs::fchmod(&slave, Mode::RUSR | Mode::WUSR | Mode::WGRP)?;
        rustix::fs::fcntl_setfl(&master, rustix::fs::fcntl_getfl(&master)? | OFlags::NONBLOCK)?;
        resize_terminal(&master, columns, rows)?;
        Ok(Self { master, slave })
    }
}

/// Changes the size; the kernel sends SIGWINCH to the foreground processes.
pub fn resize_terminal(master: impl AsFd, columns: u16, rows: u16) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(master, size)?)
}
