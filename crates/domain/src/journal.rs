//! Offsets into the output of a process.
//!
//! A journal is one sequence of records (stream, bytes). Its overall offset counts the bytes of all
//! streams in the order in which they were read; a reader that knows the offset of the last byte it
//! saw can continue from there later, without losing or repeating a byte. Bytes that retention has
//! dropped are reported as an exact gap.

use std::time::Duration;

use crate::Bytes;

/// The source of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamKind {
    Stdout,
    Stderr,
    /// Standard output and standard error together, through a terminal.
    Terminal,
    /// The events that a kernel reports about a code run.
    KernelEvent,
}

/// An overall byte offset in a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct JournalOffset(pub u64);

/// How much of a process's output is kept: its first bytes, its last bytes, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputRetention {
    pub first: u64,
    pub last: u64,
}

/// Whether a command waits for the reader that started it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backpressure {
    /// It never waits; a reader that is too slow gets a gap.
    #[default]
    Off,
    /// It waits, so that the reader that started it loses nothing. If that reader reads no byte for
    /// `stall_limit`, the command continues and the reader gets a gap.
    On { stall_limit: Option<Duration> },
}

impl Default for OutputRetention {
    fn default() -> Self {
        Self { first: 1 << 20, last: 15 << 20 }
    }
}

impl OutputRetention {
    /// Keeps `size` bytes in all: a sixteenth of them from the beginning, the rest from the end.
    pub fn with_total_size(size: Bytes) -> Self {
        let first = size.0 / 16;
        Self { first, last: size.0 - first }
    }
}
