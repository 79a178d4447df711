//! System call filters: loading a compiled program. See seccomp(2).
//!
//! [`policy`] compiles filters from data.

use std::io;

use crate::check_long;

pub mod policy;

/// A compiled filter, ready to be loaded.
#[derive(Clone, Debug)]
pub struct SeccompProgram(Vec<libc::sock_filter>);

impl SeccompProgram {
    pub fn new(instructions: Vec<libc::sock_filter>) -> Self {
        Self(instructions)
    }

    /// Encodes each instruction as a 64-bit word in native order, to pass it to another process.
    pub fn to_words(&self) -> Vec<u64> {
        let word = |i: &libc::sock_filter| {
            u64::from(i.code) | u64::from(i.jt) << 16 | u64::from(i.jf) << 24 | u64::from(i.k) << 32
        };
        self.0.iter().map(word).collect()
    }

    pub fn from_words(words: &[u64]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "each field is cut out of the word on purpose")]
        let instruction = |word: &u64| libc::sock_filter {
            code: *word as u16,
            jt: (*word >> 16) as u8,
            jf: (*word >> 24) as u8,
            k: (*word >> 32) as u32,
        };
        Self(words.iter().map(instruction).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the filter to this thread and everything it starts. It cannot be removed again. Needs
    /// no_new_privs. Allocates nothing, so it may be called between fork and exec.
    pub fn install(&self) -> io::Result<()> {
        const UNUSED: libc::c_ulong = 0;
        let length = u16::try_from(self.0.len()).map_err(io::Error::other)?;
        let program = libc::sock_fprog { len: length, filter: self.0.as_ptr().cast_mut() };
        // SAFETY: the kernel copies `len` instructions from `filter`, which is our vector, and
        // writes nothing there.
        let result = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::c_ulong::from(libc::SECCOMP_SET_MODE_FILTER),
                UNUSED,
                &raw const program,
            )
        };
        check_long(result).map(drop)
    }
}
