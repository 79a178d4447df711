//! Offsets into what a process has printed.
//!
//! A journal is one sequence of records (stream, bytes). Its overall offset counts the bytes
//! of all streams in the order in which they were read; a reader that knows the offset of the
//! last byte it saw can come back later and go on, without a byte lost or doubled. Bytes that
//! retention has dropped are reported as an exact gap.

/// Where a record came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    Stdout,
    Stderr,
    /// Both, through a terminal.
    Terminal,
    /// What a kernel tells about a run of code.
    Tell,
}

/// An overall byte offset in a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(pub u64);

/// How much of a process's output is kept: its first bytes, its last bytes, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    pub first: u64,
    pub last: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self { first: 1 << 20, last: 15 << 20 }
    }
}
