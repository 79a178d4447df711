//! The resolver that sandboxes see: port 53 of every address.
//!
//! ```text
//! query ─► limit ─► parse ─► name allowed? ─► type ─► upstream, with cache ─► addresses judged ─► answer
//!                              └ no: NXDOMAIN at once, logged
//! ```
//!
//! `answer` decides, `message` reads and writes messages, `upstream` asks the host's servers, `cache` keeps their answers, `tcp` and `udp` carry.

mod answer;
mod cache;
mod message;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
pub(crate) mod udp;
pub(crate) mod upstream;

pub(crate) use answer::{LookupFailure, resolve_addresses};
