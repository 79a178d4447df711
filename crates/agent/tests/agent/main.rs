//! The real agent, outside of any jail, driven over its socket.
//!
//! Most facts hold with groups and with runners alike, so they are checked with both; groups
//! need root and are left out, loudly, without it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod adopt;
mod client;
mod exec;
mod files;
mod follow;
mod garbage;
mod harness;
mod journals;
mod kernels;
mod limits;
mod ports;
mod recorded;
mod sessions;
mod signals;
mod watch;
