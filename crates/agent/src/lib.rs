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
//!      isolated_session.rs ── order ──► namespace_broker.rs ── clone ──► namespace_init.rs, child.rs, files.rs
//! ```
//! The agent trusts nothing inside the sandbox: names in its files, output, exit codes and the
//! private channels of shells may all be forged. A forged value must affect nothing but the process
//! that forged it.

mod accounts;
mod agent;
mod body;
mod child;
mod command;
mod connection;
mod envfile;
mod exec;
mod fault;
mod files;
mod follow;
mod hold;
mod identity;
mod input;
mod interrupt;
mod journal;
mod kernel;
mod limit_view;
mod line;
mod nest;
mod nester;
mod occupy;
mod path;
mod place;
mod poll;
mod ports;
mod proc;
mod process;
mod reap;
mod requests;
mod runner;
mod screen;
mod session;
mod shell;
mod table;
mod tree;
mod watch;
mod way;
mod worker;

use std::convert::Infallible;
use std::io;

/// The agent could not start, or its event loop failed.
#[derive(Debug, thiserror::Error)]
#[error("agent failed to {step}")]
pub struct AgentError {
    step: &'static str,
    source: io::Error,
}

impl AgentError {
    /// The JSON that the launcher reads.
    fn told(&self) -> Vec<u8> {
        let message = format!("{self}: {}", self.source);
        serde_json::json!({"step": "agent-ready", "errno": null, "message": message}).to_string().into_bytes()
    }
}

/// Runs the agent with the configuration on descriptor [`wire::config::CONFIG_FD`]. The process
/// must have been started for this alone: the function returns only if the agent cannot continue.
pub fn run() -> Result<Infallible, AgentError> {
    let place = place::Place::take()?;
    let broken = |source| AgentError { step: "wait for events", source };
    agent::Agent::new(place).map_err(broken)?.run().map_err(broken)
}
