//! The fronts over a real service, in this process: status codes, error formats, and everything else that
//! needs no isolation.
//!
//! The sandboxes are those of the fake backend. Where commands run and files are written, each has a real
//! agent without a jail. The tests of a front use only its own paths, so that they also pass when the other
//! fronts are removed.
#![expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]

mod server;
mod setup;
mod shared_sessions;

#[cfg(feature = "aio")]
mod aio;
#[cfg(feature = "opensandbox")]
mod opensandbox;
#[cfg(feature = "operator")]
mod operator;
