//! System call filters: loading a compiled program. See seccomp(2).
//!
//! [`policy`] compiles filters from data.

use std::io;

use crate::check_long;

pub mod blocked_calls;
pub mod policy;

/// A compiled filter, ready to be loaded.
#[derive(Clone, Debug)]
pub struct SeccompProgram(Vec<libc::sock_filter>);

/// Where calls that a filter refuses are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalLog {
    /// In the audit log if a program collects it, otherwise in the kernel's log, with a bounded rate.
    Kernel,
    None,
}

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
        self.install_with_flags(0).map(drop)
    }

    /// Like [`SeccompProgram::install`], for all threads of this process.
    pub fn install_for_process(&self, log: RefusalLog) -> io::Result<()> {
        let log = match log {
            RefusalLog::Kernel => libc::SECCOMP_FILTER_FLAG_LOG,
            RefusalLog::None => 0,
        };
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | log;
        match self.install_with_flags(flags)? {
            0 => Ok(()),
            thread => Err(io::Error::other(format!("thread {thread} has a filter of its own"))),
        }
    }

    /// Returns 0, or with TSYNC the id of a thread that cannot take over the filter.
    fn install_with_flags(&self, flags: libc::c_ulong) -> io::Result<libc::c_long> {
        let length = u16::try_from(self.0.len()).map_err(io::Error::other)?;
        let program = libc::sock_fprog { len: length, filter: self.0.as_ptr().cast_mut() };
        // SAFETY: the kernel copies `len` instructions from `filter`, which is our vector, and
        // writes nothing there.
        let result = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::c_ulong::from(libc::SECCOMP_SET_MODE_FILTER),
                flags,
                &raw const program,
            )
        };
        check_long(result)
    }
}
