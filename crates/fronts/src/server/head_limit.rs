//! Bounds the memory that request heads take while they arrive.
//!
//! Until a connection has presented a key, a head has at most [`MAX_SMALL_HEAD_BYTES`]. Afterwards it may
//! be as large as hyper accepts, but only a limited number of connections may receive a larger one at the
//! same time.

use std::sync::Arc;

use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::server::connection_state::ConnectionState;
use crate::server::malformed::InFlight;

/// The maximum size of a head on a connection that has not presented a key.
pub(crate) const MAX_SMALL_HEAD_BYTES: usize = 16 << 10;

pub(crate) struct HeadLimit {
    state: ConnectionState,
    large_heads: Arc<Semaphore>,
    /// How many requests preceded the head that is being received.
    preceding: u64,
    received: usize,
    permit: Option<OwnedSemaphorePermit>,
}

/// How much may be read from a connection now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeadRoom {
    Unlimited,
    Bytes(usize),
    Refused(HeadRefusal),
}

/// Why the rest of a head is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadRefusal {
    /// It is too large for a connection that has not presented a key.
    NoKey,
    /// Too many large heads are being received.
    Busy,
}

impl HeadRefusal {
    pub(crate) fn error(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::NoKey => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "REQUEST_HEADER_FIELDS_TOO_LARGE",
                "request head exceeds 16 KiB on a connection without an authenticated request; \
                 send fewer paths per request, or a small request first",
            ),
            Self::Busy => (
                StatusCode::SERVICE_UNAVAILABLE,
                "SERVICE_UNAVAILABLE",
                "too many requests with a head of more than 16 KiB; retry later",
            ),
        }
    }
}

impl HeadLimit {
    pub(crate) fn new(state: ConnectionState, large_heads: Arc<Semaphore>) -> Self {
        Self { state, large_heads, preceding: 0, received: 0, permit: None }
    }

    /// Returns how much may be read. Every read while no request is open is part of a head.
    pub(crate) fn room(&mut self, in_flight: &InFlight) -> HeadRoom {
        let is_keyed = self.state.may_send_large_heads();
        if in_flight.is_open() {
            // hyper's buffer grows with the size of reads.
            return if is_keyed { HeadRoom::Unlimited } else { HeadRoom::Bytes(MAX_SMALL_HEAD_BYTES) };
        }
        if self.preceding != in_flight.handed_over() {
            self.preceding = in_flight.handed_over();
            self.received = 0;
            self.permit = None;
        }
        match MAX_SMALL_HEAD_BYTES.saturating_sub(self.received) {
            0 if !is_keyed => HeadRoom::Refused(HeadRefusal::NoKey),
            0 => self.large_room(),
            room => HeadRoom::Bytes(room),
        }
    }

    fn large_room(&mut self) -> HeadRoom {
        if self.permit.is_none() {
            self.permit = self.large_heads.clone().try_acquire_owned().ok();
        }
        if self.permit.is_some() { HeadRoom::Unlimited } else { HeadRoom::Refused(HeadRefusal::Busy) }
    }

    /// Counts bytes that were read.
    pub(crate) fn record(&mut self, count: usize) {
        self.received = self.received.saturating_add(count);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn trusted_limit(large_heads: &Arc<Semaphore>) -> HeadLimit {
        HeadLimit::new(ConnectionState::new(None, Duration::MAX), large_heads.clone())
    }

    #[test]
    fn large_heads_are_limited_in_number() {
        let large_heads = Arc::new(Semaphore::new(1));
        let in_flight = InFlight::default();
        let (mut one, mut other) = (trusted_limit(&large_heads), trusted_limit(&large_heads));
        for head in [&mut one, &mut other] {
            assert_eq!(head.room(&in_flight), HeadRoom::Bytes(MAX_SMALL_HEAD_BYTES));
            head.record(MAX_SMALL_HEAD_BYTES);
        }
        assert_eq!(one.room(&in_flight), HeadRoom::Unlimited);
        assert_eq!(other.room(&in_flight), HeadRoom::Refused(HeadRefusal::Busy));
        // Once the request was handed over, the next head begins.
        drop(in_flight.begin_request());
        assert_eq!(one.room(&in_flight), HeadRoom::Bytes(MAX_SMALL_HEAD_BYTES));
        assert_eq!(large_heads.available_permits(), 1);
    }
}
