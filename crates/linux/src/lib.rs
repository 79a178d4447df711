//! Safe wrappers over the kernel interfaces that isolation needs. This is the only crate with
//! `unsafe`, and it is synchronous.
#![expect(unsafe_code, reason = "the kernel interfaces that no crate wraps are wrapped here, and only here")]

pub mod btrfs;
pub mod caps;
pub mod datagram;
pub mod descriptors;
pub mod freeze;
pub mod fs;
pub mod landlock;
pub mod loopdev;
pub mod mounts;
pub mod namespaces;
pub mod netlink;
pub mod packet;
pub mod privileges;
pub mod process_status;
pub mod procfs;
pub mod pty;
pub mod readonly;
pub mod seccomp;
pub mod signals;
pub mod spawn;
pub mod tcp;
pub mod transparent;

use std::io;

/// Converts the return value of a libc call into a result.
pub(crate) fn check_int(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Like [`check_int`], for `syscall(2)`.
pub(crate) fn check_long(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Forbids this thread and all programs it executes to gain privileges. See prctl(2).
pub fn set_no_new_privs() -> io::Result<()> {
    const ON: libc::c_ulong = 1;
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: this option reads its arguments as integers, each passed at the full width the kernel
    // expects; no pointer is passed.
    check_int(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, ON, UNUSED, UNUSED, UNUSED) }).map(drop)
}
