//! Finds out which system calls a seccomp filter refuses, without making any of them take effect.
//!
//! A container engine loads such a filter before it starts us. Each call is made with arguments that the kernel
//! refuses before it does anything, with an error that is known. Any other error comes from a filter.

use std::io;

/// A system call that a filter refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockedCall {
    pub name: &'static str,
    pub errno: i32,
}

/// A call with arguments that cannot succeed.
struct HarmlessCall {
    name: &'static str,
    number: libc::c_long,
    arguments: [libc::c_long; 5],
    /// The error of the kernel itself.
    expected: i32,
}

const ALL_BITS: libc::c_long = 0xFFFF_FFFF;
const NO_DESCRIPTOR: libc::c_long = -1;

/// The calls that making a sandbox takes and that filters are known to refuse.
const HARMLESS_CALLS: [HarmlessCall; 8] = [
    // A structure of size zero.
    HarmlessCall { name: "clone3", number: libc::SYS_clone3, arguments: [0; 5], expected: libc::EINVAL },
    // No flag has this bit.
    HarmlessCall {
        name: "unshare",
        number: libc::SYS_unshare,
        arguments: [1, 0, 0, 0, 0],
        expected: libc::EINVAL,
    },
    HarmlessCall {
        name: "setns",
        number: libc::SYS_setns,
        arguments: [NO_DESCRIPTOR, 0, 0, 0, 0],
        expected: libc::EBADF,
    },
    // A target at address zero.
    HarmlessCall { name: "mount", number: libc::SYS_mount, arguments: [0; 5], expected: libc::EFAULT },
    HarmlessCall {
        name: "umount2",
        number: libc::SYS_umount2,
        arguments: [0, ALL_BITS, 0, 0, 0],
        expected: libc::EINVAL,
    },
    HarmlessCall {
        name: "open_tree",
        number: libc::SYS_open_tree,
        arguments: [NO_DESCRIPTOR, 0, ALL_BITS, 0, 0],
        expected: libc::EINVAL,
    },
    HarmlessCall {
        name: "mount_setattr",
        number: libc::SYS_mount_setattr,
        arguments: [NO_DESCRIPTOR, 0, ALL_BITS, 0, 0],
        expected: libc::EINVAL,
    },
    HarmlessCall {
        name: "seccomp",
        number: libc::SYS_seccomp,
        arguments: [ALL_BITS, 0, 0, 0, 0],
        expected: libc::EINVAL,
    },
];

/// Returns the system calls that a filter refuses; none if no filter is loaded.
pub fn find_blocked_calls() -> io::Result<Vec<BlockedCall>> {
    if !has_filter()? {
        return Ok(Vec::new());
    }
    let blocked = |call: &HarmlessCall| {
        let [a, b, c, d, e] = call.arguments;
        // SAFETY: no argument is a valid pointer, size or descriptor, and the kernel refuses each of these
        // calls when it checks them, so nothing is read, written or changed.
        let result = unsafe { libc::syscall(call.number, a, b, c, d, e) };
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or_default();
        (result < 0 && errno != call.expected).then_some(BlockedCall { name: call.name, errno })
    };
    Ok(HARMLESS_CALLS.iter().filter_map(blocked).collect())
}

/// Whether a filter is loaded in this thread.
fn has_filter() -> io::Result<bool> {
    const FILTER_MODE: &str = "2";
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    Ok(status
        .lines()
        .any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == FILTER_MODE)))
}
