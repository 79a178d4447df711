//! What every client of the execution API needs, apart from any transport: the events of a
//! running command (`events`), and the frames of a command over a WebSocket (`exec`).
//!
//! Servers of other makes send things that this client does not know. Such things are skipped;
//! only a stream that is endless in one piece is an error.

pub mod events;
pub mod exec;

pub use events::{Decoder, Ending, EndlessEvent, Event, Failure};
pub use exec::{ExecFrame, ExecRequest};
