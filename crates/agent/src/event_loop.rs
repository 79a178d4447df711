//! The event loop: the agent's state, what it waits for, and the connections it serves.
//!
//! ```text
//! poll.rs ── event ──► agent.rs ──► connection.rs ── first frame ──► requests.rs ──► the other folders
//!                         └───────► reap.rs: a child has ended
//! ```
//! Each part of the agent owns its data: `ConnectionTable`, `ProcessTable`, `ChildTable`,
//! `SessionTable`, `WorkerPool`, `TunnelTable` and `ReservedPorts`. `EventSources` gives them handles,
//! events and alarms. The methods of `Agent` connect the parts.

pub(crate) mod agent;
pub(crate) mod alarms;
pub(crate) mod connection;
pub(crate) mod connection_table;
pub(crate) mod event_sources;
pub(crate) mod handles;
pub(crate) mod poll;
mod reap;
pub(crate) mod requests;
