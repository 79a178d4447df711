//! Capabilities: constants, and dropping them. See capabilities(7).

use std::io;

use crate::process_status::ProcessStatus;
use crate::{check_int, check_long};

/// A set of capabilities as a bit mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapSet(pub u64);

pub const CHOWN: u32 = 0;
pub const DAC_OVERRIDE: u32 = 1;
pub const DAC_READ_SEARCH: u32 = 2;
pub const FOWNER: u32 = 3;
pub const FSETID: u32 = 4;
pub const KILL: u32 = 5;
pub const SETGID: u32 = 6;
pub const SETUID: u32 = 7;
pub const SETPCAP: u32 = 8;
pub const NET_BIND_SERVICE: u32 = 10;
pub const NET_ADMIN: u32 = 12;
pub const SYS_CHROOT: u32 = 18;
pub const SYS_PTRACE: u32 = 19;
pub const SYS_ADMIN: u32 = 21;
pub const SYS_RESOURCE: u32 = 24;
pub const MKNOD: u32 = 27;
pub const SETFCAP: u32 = 31;

/// The highest number a kernel could know; dropping an unknown one is harmless.
const MAX_CAPABILITY: u32 = 63;

impl CapSet {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(u64::MAX);

    pub const fn of(numbers: &[u32]) -> Self {
        let mut mask = 0;
        let mut index = 0;
        while index < numbers.len() {
            mask |= 1 << numbers[index];
            index += 1;
        }
        Self(mask)
    }

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub const fn has(self, number: u32) -> bool {
        self.0 & (1 << number) != 0
    }
}

/// Reduces the bounding set to `keep`, so that no exec can restore the others.
pub fn limit_bounding_set(keep: CapSet) -> io::Result<()> {
    limit_bounding_set_from(CapSet::ALL, keep)
}

/// Like [`limit_bounding_set`], for a caller that knows the present set, from
/// [`crate::process_status::ProcessStatus`] for instance: only what is in it has to be dropped. A bounding
/// set never grows, except in a new user namespace.
pub fn limit_bounding_set_from(present: CapSet, keep: CapSet) -> io::Result<()> {
    for number in (0..=MAX_CAPABILITY).filter(|number| present.has(*number) && !keep.has(*number)) {
        // SAFETY: this option takes one integer and no pointer.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0) };
        match check_int(result) {
            Ok(_) => {}
            // This kernel does not know this number or any higher one.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes `keep` the effective, permitted and inheritable set of this thread and clears the
/// ambient set.
pub fn set_capabilities(keep: CapSet) -> io::Result<()> {
    #[repr(C)]
    struct CapHeader {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct CapData {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    // SAFETY: the option takes integers only.
    check_int(unsafe {
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong, 0, 0, 0)
    })?;
    let header = CapHeader { version: VERSION_3, pid: 0 };
    let half = |shift: u32| {
        #[expect(clippy::cast_possible_truncation, reason = "each half of the mask is taken in turn")]
        let bits = (keep.0 >> shift) as u32;
        CapData { effective: bits, permitted: bits, inheritable: 0 }
    };
    let data = [half(0), half(32)];
    // SAFETY: version 3 reads one header and two data structures of exactly these layouts, and
    // writes none of them.
    check_long(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) }).map(drop)
}

/// Returns the effective set of this thread.
pub fn effective_capabilities() -> io::Result<CapSet> {
    ProcessStatus::of_this_thread().map(|status| status.effective)
}
