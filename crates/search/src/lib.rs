//! `coracle __search`: searches for text in files.
//!
//! It is a process inside the sandbox with the rights of the user for whom it searches. The agent forks a worker,
//! which executes this program and leaves the connection to the server to it:
//!
//! ```text
//! agent ── fork ──► worker ── exec ──► coracle __search ── GrepMatches …, GrepEnd ──► server
//!                                        ▲ 3: the request, 4: the connection
//! ```
//!
//! The regular expression engines and ripgrep's rules for ignored files are here and not in the agent, whose size
//! every sandbox pays for.

mod file_search;
mod grep;
mod pattern;
mod reply_sender;
mod tree_walk;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read};
use std::process::ExitCode;

use linux::descriptors::InheritedDescriptors;
use wire::search::{CONNECTION_FD, GrepRequest, REQUEST_FD};
use wire::{Fault, FaultKind};

use reply_sender::ReplySender;

/// Searches once, and returns when the reply is sent. The process must have been started for this alone.
pub fn run_subcommand() -> io::Result<ExitCode> {
    let already = || io::Error::other("the descriptors were already taken");
    let mut inherited = InheritedDescriptors::claim().ok_or_else(already)?;
    let request = File::from(inherited.take(REQUEST_FD)?);
    let sender = ReplySender::new(inherited.take(CONNECTION_FD)?);
    let done = sender
        .watch_connection()
        .map_err(|error| io_fault(&error, "start", "a thread"))
        .and_then(|()| read_request(request))
        .and_then(|request| grep::search_text(&request, &sender));
    if let Err(fault) = done {
        sender.send_fault(fault);
    }
    Ok(ExitCode::SUCCESS)
}

fn read_request(file: File) -> Result<GrepRequest, Fault> {
    let mut json = Vec::new();
    let read = file.take(wire::frame::MAX_PAYLOAD as u64).read_to_end(&mut json);
    read.map_err(|error| io_fault(&error, "read", "the request"))?;
    serde_json::from_slice(&json).map_err(|error| invalid("read", &format!("the request: {error}")))
}

fn invalid(operation: &str, subject: &str) -> Fault {
    Fault { kind: FaultKind::Invalid, errno: None, operation: operation.into(), subject: shorten(subject) }
}

fn io_fault(error: &io::Error, operation: &str, subject: &str) -> Fault {
    let kind = match error.kind() {
        io::ErrorKind::NotFound => FaultKind::NotFound,
        io::ErrorKind::PermissionDenied => FaultKind::Permission,
        io::ErrorKind::NotADirectory => FaultKind::NotADirectory,
        io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => FaultKind::Invalid,
        _ => FaultKind::Other,
    };
    Fault { kind, errno: error.raw_os_error(), operation: operation.into(), subject: shorten(subject) }
}

/// A subject may come from a request and be as long as one; a reply must fit its frame.
fn shorten(subject: &str) -> String {
    const MAX_SUBJECT_CHARS: usize = 4096;
    subject.chars().take(MAX_SUBJECT_CHARS).collect()
}
