//! Shared parts of the end-to-end tests: the real binary, a private server, a client, and the state of the
//! host before and after.
//!
//! Every server has its own port and state directory, and ends with the value that represents it, together
//! with all its sandboxes.

pub mod aio;
pub mod binary;
pub mod container;
pub mod host;
pub mod http;
pub mod oci;
pub mod probe;
pub mod refused_calls;
pub mod registry;
pub mod run;
pub mod sandbox;
pub mod server;
pub mod test_network;

use std::time::{Duration, Instant};

/// How much slower than a real processor this machine is, for bounds on time.
///
/// Emulated machines set `CORACLE_TEST_SLOWNESS`.
pub fn slowness_factor() -> u32 {
    std::env::var("CORACLE_TEST_SLOWNESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// The median of the times that several calls return.
pub fn median_time(calls: usize, call: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<Duration> = std::iter::repeat_with(call).take(calls).collect();
    times.sort();
    times[times.len() / 2]
}

/// Waits until `happened` returns true, for events without a notification, and panics if it takes too long.
pub fn eventually(what: &str, happened: impl FnMut() -> bool) {
    assert!(happens(happened), "timed out waiting for: {what}");
}

/// As [`eventually`], for callers with their own message for a timeout.
pub fn happens(happened: impl FnMut() -> bool) -> bool {
    happens_within(Duration::from_secs(20), happened)
}

/// As [`happens`], for events that take long even on an ordinary machine.
pub fn happens_within(time: Duration, mut happened: impl FnMut() -> bool) -> bool {
    const POLL_INTERVAL: Duration = Duration::from_millis(5);
    let end = Instant::now() + time * slowness_factor();
    while !happened() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::park_timeout(POLL_INTERVAL);
    }
    true
}
