//! Transport-independent parts that every client of the execution API needs: the events of a running
//! command (`events`), and the frames of a command over a WebSocket (`exec`).
//!
//! Other server implementations send events and frames that this client does not know. They are
//! skipped; only a single event that exceeds the size limit is an error.

pub mod events;
pub mod exec;

pub use events::{CommandEnding, CommandEvent, CommandFailure, EventDecoder, OversizedEventError};
pub use exec::{ExecFrame, ExecRequest};
