//! The messages in control frames.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::files::{DirectoryEntry, FileInfo, FileRequest, WatchEvent};
use crate::process::{
    Ended, OpenKernel, OpenSession, ProcessStatus, RunInSession, SessionStatus, SignalProcess, Start,
    TreeStatus,
};

/// The first frame of a connection, from the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub version: u32,
    pub request: Request,
}

/// The agent's first frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Greeting {
    pub version: u32,
}

/// What a server may ask of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Answered `Ok` by an agent whose loop turns.
    Ping,
    /// Answered `Ok` by an agent that has done nothing yet, and only once: from now on these
    /// variables are in the environment of every process, before the request's own.
    Adopt {
        env: BTreeMap<String, String>,
        /// Where its commands keep variables from now on, if not where they did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        env_file: Option<String>,
    },
    /// Answered `Started`; with `follow` the output and `Ended` come after it.
    Start(Start),
    /// Answered `Status`, then output from the overall offset `from`, then `Ended`.
    Follow {
        process: String,
        from: u64,
    },
    /// Answered `Status`.
    Status {
        process: String,
    },
    /// Answered `Statuses`.
    Processes,
    /// Answered `Trees`: what runs and what it uses; with `ended` also commands that have ended.
    Trees {
        #[serde(default)]
        ended: bool,
    },
    /// To a process or, by its name, to what runs in a session.
    Signal(SignalProcess),
    /// Answered `Ok`, then the server sends `Data` until `End`, which closes the input. A
    /// connection that just ends leaves the input open.
    Input {
        process: String,
    },
    Resize {
        process: String,
        columns: u16,
        rows: u16,
    },
    /// Drops a finished process and its journal.
    Forget {
        process: String,
    },

    OpenSession(OpenSession),
    /// Answered `Ok` when the kernel is ready, or with what it said before it ended.
    OpenKernel(OpenKernel),
    /// As `Start` with `follow`.
    Run(RunInSession),
    Sessions,
    CloseSession {
        session: String,
    },
    /// Answered `Ok` when the session's shell or kernel has ended, with everything in it. The next
    /// run has a new one, which knows nothing of it.
    RestartSession {
        session: String,
    },
    /// Answered `Ok` if sessions can have nests here, else a fault says why not.
    Nesting,
    /// Answered `Note`: what the session's nest was made with.
    Note {
        session: String,
    },

    /// Handled by a forked worker with the identity named in the request.
    File(FileRequest),
    /// Answered `Ok`, then the connection is the byte stream of `127.0.0.1:port` (or `::1`).
    Tunnel {
        port: u16,
    },
    /// Answered `Ok`: from now on somebody listens on `127.0.0.1:port`, who hangs up on whoever
    /// connects, unless somebody did before.
    Occupy {
        port: u16,
    },
}

/// What an agent answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Ok,
    Fault(Fault),
    Started {
        pid: i32,
    },
    Status(ProcessStatus),
    Statuses(Vec<ProcessStatus>),
    Sessions(Vec<SessionStatus>),
    Trees(Vec<TreeStatus>),
    Note(String),
    /// The bytes from `from` up to, not including, `to` are no longer kept.
    Gap {
        from: u64,
        to: u64,
    },
    Ended(Ended),
    Info(Vec<FileInfo>),
    /// One page of a listing; more pages follow until `End`.
    Entries(Vec<DirectoryEntry>),
    /// A read begins: the whole size of the file, then `Data` and `End`.
    Reading {
        size: u64,
    },
    /// How often each file's text was replaced.
    Replaced(Vec<u64>),
    Watched(WatchEvent),
}

/// An operation that did not succeed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    pub kind: FaultKind,
    /// The kernel's error number, where one is behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
    /// What was attempted, as a lower-case verb such as `open`.
    pub operation: String,
    /// On what: a path, a process, a port.
    pub subject: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    NotFound,
    AlreadyExists,
    NotADirectory,
    IsADirectory,
    Permission,
    NoSpace,
    Invalid,
    /// A session or process is occupied, or a limit on their number is reached.
    Busy,
    /// Nothing listens on the port.
    Refused,
    /// This agent does not know the request.
    Unsupported,
    Other,
}
