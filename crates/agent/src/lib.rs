//! The agent: the first process in every sandbox.
//!
//! It starts commands, keeps what they print, tends shells, moves files and pipes ports, all at
//! the request of a server that connects to its socket and speaks [`wire`]. It has one thread
//! and one loop that never blocks; whatever could take long is done by a forked process.
//!
//! ```text
//!            connection.rs ── a server asks ──► requests.rs
//!                  ▲                               │ start, signal, input …      │ files
//!   follow.rs ─────┘ output                        ▼                             ▼
//!        ▲                       exec.rs ── fork ──► child.rs          worker.rs ── fork ──► files.rs
//!   journal.rs ◄── process.rs ◄── body.rs (pipes, end) ◄── reap.rs
//!                       nest.rs ── order ──► nester.rs ── clone ──► holder.rs, child.rs, files.rs
//! ```
//! The agent trusts nothing inside: names in the sandbox's files, output, exit codes and the
//! private channels of shells may all be forged, and can then only mislead about themselves.

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

/// The agent could not start, or its loop broke.
#[derive(Debug, thiserror::Error)]
#[error("the agent could not {step}")]
pub struct AgentError {
    step: &'static str,
    source: io::Error,
}

impl AgentError {
    /// As the launcher reads it.
    fn told(&self) -> Vec<u8> {
        let message = format!("{self}: {}", self.source);
        serde_json::json!({"step": "agent-ready", "errno": null, "message": message}).to_string().into_bytes()
    }
}

/// Runs the agent with the configuration on descriptor [`wire::config::CONFIG_FD`]. The process
/// must have been started for this alone: it returns only when the agent cannot go on.
pub fn run() -> Result<Infallible, AgentError> {
    let place = place::Place::take()?;
    let broken = |source| AgentError { step: "wait for events", source };
    agent::Agent::new(place).map_err(broken)?.run().map_err(broken)
}
