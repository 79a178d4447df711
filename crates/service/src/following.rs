//! A process being followed, and one being fed.

use bytes::Bytes;
use domain::{Position, ProcessId, Stream};

use crate::{Ended, ServiceError};

/// A process being followed. Dropping it does not end the process.
pub struct Following {
    pub process: ProcessId,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `at` is the overall offset of the first byte.
    Output { stream: Stream, at: Position, bytes: Bytes },
    /// The bytes from `from` up to, not including, `to` are no longer kept.
    Gap { from: Position, to: Position },
    /// The last event.
    Ended(Ended),
}

/// The open input of a process. Dropping it leaves the input open.
pub struct Input {}

impl Following {
    /// Waits for the next event. It may be dropped and called again without losing one;
    /// calling it after [`Event::Ended`] is an error.
    pub async fn next(&mut self) -> Result<Event, ServiceError> {
        todo!()
    }
}

impl Input {
    pub async fn send(&mut self, bytes: &[u8]) -> Result<(), ServiceError> {
        todo!()
    }

    /// Closes the input: the process reads end of file.
    pub async fn close(self) -> Result<(), ServiceError> {
        todo!()
    }
}
