//! The event loop: the agent's state, what it waits for, and the connections it serves.
//!
//! ```text
//! poll.rs ── event ──► agent.rs ──► connection.rs ── first frame ──► requests.rs ──► the other folders
//!                         └───────► reap.rs: a child has ended
//! ```

pub(crate) mod agent;
pub(crate) mod alarms;
pub(crate) mod connection;
pub(crate) mod handles;
pub(crate) mod poll;
mod reap;
pub(crate) mod requests;
