//! Devices and terminals.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use crate::call::{call, constant, pointer, pointer_mut, signed, text};
use crate::verdict::{Attempt, decide, decide_permitted};

/// The two ways to write the number of an `ioctl`. The kernel looks at its low 32 bits only, so a filter
/// that compares all 64 misses the second form.
#[derive(Clone, Copy)]
pub(crate) enum Width {
    Plain,
    HighBitSet,
}

/// Makes a device node and opens it.
pub(crate) fn make_device(kind: &str) -> Attempt {
    let (mode, device) = match kind {
        // The memory device of `null`, which is harmless when it works outside.
        "character" => (libc::S_IFCHR, libc::makedev(1, 3)),
        "block" => (libc::S_IFBLK, first_disk().unwrap_or(libc::makedev(7, 0))),
        _ => return Err(format!("no such device: {kind}")),
    };
    let path = std::env::temp_dir().join(format!("device-{}", std::process::id()));
    let name = text(&path.to_string_lossy());
    let made = call(libc::SYS_mknod, &[pointer(name.as_c_str()), u64::from(mode | 0o600), device]);
    let opened = made.and_then(|_| {
        let opened = OpenOptions::new().read(true).open(&path);
        fs::remove_file(&path)?;
        opened
    });
    decide_permitted("mknod", opened, &[libc::ENXIO])
}

/// Puts a character into the input of a terminal, as if its user had typed it.
pub(crate) fn type_into_terminal(width: Width) -> Attempt {
    let terminal = own_terminal().map_err(|error| format!("terminal: {error}"))?;
    let letter = b'x';
    let request = libc::TIOCSTI | high_bit(width);
    decide("ioctl TIOCSTI", ioctl(&terminal, request, pointer(&letter)))
}

/// Tries to paste into a virtual console. On any other terminal, a kernel that would allow it reports that
/// this is not a console.
pub(crate) fn console_selection() -> Attempt {
    let terminal = own_terminal().map_err(|error| format!("terminal: {error}"))?;
    let subcode = 2_u8;
    let asked = ioctl(&terminal, libc::TIOCLINUX, pointer(&subcode));
    decide_permitted("ioctl TIOCLINUX", asked, &[libc::ENOTTY, libc::EINVAL])
}

/// Gives a terminal its ordinary line discipline again. Other numbers would load modules.
pub(crate) fn line_discipline() -> Attempt {
    let terminal = own_terminal().map_err(|error| format!("terminal: {error}"))?;
    let ordinary = 0_i32;
    decide("ioctl TIOCSETD", ioctl(&terminal, libc::TIOCSETD, pointer(&ordinary)))
}

fn ioctl(file: &fs::File, request: u64, argument: u64) -> io::Result<u64> {
    call(libc::SYS_ioctl, &[signed(i64::from(file.as_raw_fd())), request, argument])
}

fn high_bit(width: Width) -> u64 {
    match width {
        Width::Plain => 0,
        Width::HighBitSet => 1 << 32,
    }
}

/// Opens a terminal whose session leader is this process.
fn own_terminal() -> io::Result<fs::File> {
    // The leader of a process group cannot begin a session, but its child can. The child continues here.
    if call(libc::SYS_setsid, &[]).is_err() && call(libc::SYS_fork, &[])? != 0 {
        let mut status = 0_i32;
        call(libc::SYS_wait4, &[signed(-1), pointer_mut(&mut status), 0, 0])?;
        std::process::exit(libc::WEXITSTATUS(status));
    }
    call(libc::SYS_setsid, &[]).or_else(|error| {
        // An earlier attempt already made it a session leader.
        if error.raw_os_error() == Some(libc::EPERM) { Ok(0) } else { Err(error) }
    })?;
    let leader = OpenOptions::new().read(true).write(true).open("/dev/ptmx")?;
    let mut number = 0_u32;
    let unlocked = 0_i32;
    ioctl(&leader, libc::TIOCSPTLCK, pointer(&unlocked))?;
    ioctl(&leader, libc::TIOCGPTN, pointer_mut(&mut number))?;
    let follower = OpenOptions::new().read(true).write(true).open(format!("/dev/pts/{number}"))?;
    ioctl(&follower, libc::TIOCSCTTY, constant(0))?;
    // The leader must stay open, or the terminal hangs up.
    std::mem::forget(leader);
    Ok(follower)
}

/// Returns the device number of the host's first disk.
fn first_disk() -> Option<u64> {
    let disk = fs::read_dir("/sys/block").ok()?.flatten().find(|entry| {
        let name = entry.file_name();
        !name.to_string_lossy().starts_with("loop") && !name.to_string_lossy().starts_with("ram")
    })?;
    let numbers = fs::read_to_string(disk.path().join("dev")).ok()?;
    let (major, minor) = numbers.trim().split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}
