//! The agent: the first process in every sandbox.
//!
//! It starts commands, stores their output, keeps shells open, transfers files and forwards ports,
//! all for a server that connects to its socket and speaks [`wire`]. It has one thread and one
//! event loop that never blocks; any operation that could take long runs in a forked process.
//!
//! ```text
//!            connection.rs ───── request ─────► requests.rs
//!                  ▲                               │ start, signal, input …      │ files
//!   follow.rs ─────┘ output                        ▼                             ▼
//!        ▲                       exec.rs ── fork ──► child.rs          worker.rs ── fork ──► files.rs
//!   journal.rs ◄── process.rs ◄── running_process.rs (pipes, end) ◄── reap.rs
//!      isolated_session.rs ── request ──► namespace_broker.rs ── clone ──► namespace_init.rs, child.rs, files.rs
//! ```
//! | folder | subject |
//! |---|---|
//! | `event_loop/` | the agent's state, its event loop, connections and the dispatch of requests |
//! | `process/` | commands: how they are started, signalled and followed, and their journals |
//! | `session/` | shells and kernels that stay open between runs |
//! | `isolation/` | isolated sessions, the namespace broker, the sandbox's view of its limits |
//! | `files/` | file operations and the workers that perform them |
//! | `net/` | tunnels to ports of the sandbox, and reserved ports |
//!
//! The agent trusts nothing inside the sandbox: names in its files, output, exit codes and the
//! private channels of shells may all be forged. A forged value must affect nothing but the process
//! that forged it.

mod accounts;
mod context;
mod event_loop;
mod fault;
mod files;
mod identity;
mod isolation;
mod net;
mod path;
mod process;
mod session;

use std::convert::Infallible;
use std::io;

/// The agent could not start, or its event loop failed.
#[derive(Debug, thiserror::Error)]
#[error("agent failed to {step}")]
pub struct AgentFatalError {
    step: &'static str,
    source: io::Error,
}

impl AgentFatalError {
    /// The JSON that the launcher reads.
    fn to_launcher_json(&self) -> Vec<u8> {
        let message = format!("{self}: {}", self.source);
        serde_json::json!({"step": "agent-ready", "errno": null, "message": message}).to_string().into_bytes()
    }
}

/// Runs the agent with the configuration on descriptor [`wire::config::CONFIG_FD`]. The process
/// must have been started for this alone: the function returns only if the agent cannot continue.
pub fn run() -> Result<Infallible, AgentFatalError> {
    let context = context::AgentContext::initialize()?;
    let broken = |source| AgentFatalError { step: "wait for events", source };
    event_loop::agent::Agent::new(context).map_err(broken)?.run().map_err(broken)
}
