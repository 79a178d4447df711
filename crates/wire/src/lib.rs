//! The protocol between the server and the agent inside a sandbox.
//!
//! One connection carries one operation:
//!
//! ```text
//! server                                        agent
//!   ── Control(Call { version, request }) ──────►
//!   ◄── Control(Greeting { version }) ───────────
//!   ◄── Control(Reply) ──────────────────────────   the answer, or Reply::Fault
//!   ◄── Output, Control(Reply::Gap), … ──────────   while a process is followed
//!   ── Data …, End ─────────────────────────────►   while a file is written or input is fed
//!   ◄── Data …, End ─────────────────────────────   while a file is read
//!   ◄── Control(Reply::Ended) ───────────────────   last, when a process is followed
//! ```
//!
//! Control frames are JSON, so that an older agent ignores fields it does not know and an
//! unknown request is answered with a fault instead of a broken stream. Bulk bytes travel as
//! raw frames. After `AgentReply::Ok` to a `Tunnel` the connection is no longer framed: it is the
//! tunnelled byte stream itself.
//!
//! The agent runs next to untrusted code, so every reader of its frames bounds every length:
//! [`frame::FrameDecoder`] rejects a frame that claims more than [`frame::MAX_PAYLOAD`].

pub mod config;
mod fault_operation;
pub mod file_edits;
pub mod files;
pub mod frame;
pub mod isolated_session;
pub mod message;
pub mod process;
pub mod search;
pub mod shared_session;
mod unknown_variant;

/// The version of the protocol. A server must be able to talk to every older agent.
pub const VERSION: u32 = 1;

pub use config::AgentConfig;
pub use fault_operation::FaultOperation;
pub use frame::{Frame, FrameDecoder, FrameError, StreamTag};
pub use message::{AgentReply, AgentRequest, Fault, FaultKind, Greeting, VersionedRequest};
