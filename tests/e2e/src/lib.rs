//! What the end-to-end tests share: the real binary, a server of one's own, a client, and a
//! look at what the host holds before and after.
//!
//! Every server has a port of its own, a state directory of its own and is ended with the value
//! that stands for it, together with all its sandboxes.

pub mod binary;
pub mod host;
pub mod http;
pub mod oci;
pub mod registry;
pub mod run;
pub mod sandbox;
pub mod server;
pub mod world;

use std::time::{Duration, Instant};

/// How much slower than a real processor this machine is, for bounds on time.
///
/// Emulated machines set `CORACLE_TEST_SLOWNESS`.
pub fn slowness() -> u32 {
    std::env::var("CORACLE_TEST_SLOWNESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Waits until `happened` says yes, for events that nobody announces, and panics when it takes
/// too long.
pub fn eventually(what: &str, happened: impl FnMut() -> bool) {
    assert!(happens(happened), "this did not happen in time: {what}");
}

/// As [`eventually`], for those who have more to say when it takes too long.
pub fn happens(happened: impl FnMut() -> bool) -> bool {
    happens_within(Duration::from_secs(20), happened)
}

/// As [`happens`], for what takes long on an ordinary machine already.
pub fn happens_within(time: Duration, mut happened: impl FnMut() -> bool) -> bool {
    const STEP: Duration = Duration::from_millis(5);
    let end = Instant::now() + time * slowness();
    while !happened() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::park_timeout(STEP);
    }
    true
}
