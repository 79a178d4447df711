//! The real agent, outside of any jail, driven over its socket.
//!
//! Most tests hold with groups and with runners, so they run with both; groups need root, and the
//! tests report it if they are skipped.
#![expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]

mod adopt;
mod client;
mod command_sessions;
mod edits;
mod envfile;
mod exec;
mod files;
mod first_run;
mod follow;
mod garbage;
mod harness;
mod journals;
mod kernels;
mod limits;
mod ports;
mod recorded;
mod search;
mod sessions;
mod shared_sessions;
mod signals;
mod watch;
