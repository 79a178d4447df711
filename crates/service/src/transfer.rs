//! Bulk bytes to and from a sandbox, at the pace of the slower side.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;

use crate::{ServiceError, WatchEvent};

/// The content of a file, as a stream of pieces.
pub struct Reading {
    /// The whole size of the file, whatever part of it is read.
    pub size: u64,
}

/// A file being written. Dropping it before `finish` leaves the old file.
pub struct Writing {}

/// File events as they happen.
pub struct Watching {}

impl Stream for Reading {
    type Item = Result<Bytes, ServiceError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        todo!()
    }
}

impl Reading {
    /// The next piece; `None` when all was read.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ServiceError> {
        todo!()
    }
}

impl Writing {
    /// Returns when the sandbox has taken the bytes off our hands.
    pub async fn send(&mut self, bytes: Bytes) -> Result<(), ServiceError> {
        todo!()
    }

    /// Returns when the file is in place under its name.
    pub async fn finish(self) -> Result<(), ServiceError> {
        todo!()
    }
}

impl Watching {
    /// The next event; `None` when the sandbox ended the watch.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, ServiceError> {
        todo!()
    }
}
