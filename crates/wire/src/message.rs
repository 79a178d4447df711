//! The messages in control frames.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::fault_operation::FaultOperation;
use crate::file_edits::{EditReport, UndoReport};
use crate::files::{DirectoryEntry, FileInfo, FileRequest, WatchEvent};
use crate::process::{
    OpenKernel, OpenSession, ProcessEnd, ProcessStatus, RunInSession, SessionStatus, SignalProcess,
    StartProcess, TreeStatus,
};
use crate::search::{GlobEntry, GlobSummary, GrepMatch, GrepSummary};
use crate::shared_session::{OpenAndRun, OpenCommands, UpdateSession};

/// The first frame of a connection, from the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VersionedRequest {
    pub version: u32,
    pub request: AgentRequest,
}

/// The agent's first frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Greeting {
    pub version: u32,
}

/// A request from the server to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentRequest {
    /// Answered `Ok` by an agent whose event loop is running.
    Ping,
    /// Answered `Ok` only once, and only by an agent that has done nothing yet. From then on these
    /// variables are in the environment of every process; a request's own variables override them.
    Adopt {
        env: BTreeMap<String, String>,
        /// The env file that commands use from now on; `None` keeps the present one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        env_file: Option<String>,
    },
    /// Answered `Started`; with `follow` the output and then `Ended` come after it.
    Start(StartProcess),
    /// Answered `Status`, then output from the overall offset `from`, then `Ended`.
    Follow {
        process: String,
        from: u64,
    },
    /// Answered `OutputTimes`, for the output from the overall offset `from` on.
    OutputTimes {
        process: String,
        from: u64,
    },
    /// Answered `Status`.
    Status {
        process: String,
    },
    /// Answered `Statuses`.
    Processes,
    /// Answered `Trees`: what runs and which resources it uses. With `ended` the list includes
    /// commands that have ended.
    Trees {
        #[serde(default)]
        ended: bool,
    },
    /// Signals a process or, if the name is a session's, what runs in that session.
    Signal(SignalProcess),
    /// Answered `Ok`, then the server sends `Data` until `End`, which closes the input. If the
    /// connection ends without `End`, the input stays open.
    Input {
        process: String,
    },
    Resize {
        process: String,
        columns: u16,
        rows: u16,
    },
    /// Kills the process that uses the most memory; it is reported as killed for lack of memory.
    KillLargest,
    /// Drops a finished process and its journal.
    Forget {
        process: String,
    },

    OpenSession(OpenSession),
    /// Answered `Ok` when the kernel is ready, or with a fault that carries the output it had
    /// printed when it ended.
    OpenKernel(OpenKernel),
    /// Answered `Session`.
    OpenCommands(OpenCommands),
    /// As `Start` with `follow`.
    Run(RunInSession),
    /// As `Run`. If the directory of the run is missing, the session is open; after most other faults there is none.
    OpenAndRun(OpenAndRun),
    Sessions,
    /// Answered `Session`.
    SessionStatus {
        session: String,
    },
    /// Answered `Session`.
    UpdateSession(UpdateSession),
    /// Answered `Statuses`: the last runs of the session that have begun, the oldest first.
    SessionRuns {
        session: String,
    },
    CloseSession {
        session: String,
        /// The time of the request in nanoseconds since the host's boot. Requests to open the session that were made
        /// before have no effect any more, and a session that was opened by a later one is not closed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        requested_ns: Option<u64>,
        /// The run in progress in a session without a shell is asked to end by SIGTERM, and is killed after this many
        /// milliseconds. Otherwise it is killed at once. The name is free in either case.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grace_ms: Option<u64>,
    },
    /// Answered `Ok` when the session's shell or kernel, and everything started in it, has ended.
    /// The next run starts a new one with no state of the old one.
    RestartSession {
        session: String,
    },
    /// Answered `Ok` if this sandbox supports isolated sessions; otherwise a fault says why not.
    #[serde(rename = "nesting")]
    IsolatedSessions,
    /// Answered `Note`: the note that the isolated session was created with.
    Note {
        session: String,
    },

    /// Handled by a forked worker with the identity named in the request.
    File(FileRequest),
    /// Answered `Ok`, then the connection is the byte stream of `127.0.0.1:port` (or `::1`).
    Tunnel {
        port: u16,
    },
    /// Answered `Ok`. Unless the port is in use already, the agent from now on listens on
    /// `127.0.0.1:port` and closes every connection at once.
    Occupy {
        port: u16,
    },
}

/// A reply from the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentReply {
    Ok,
    Fault(Fault),
    Started {
        pid: i32,
    },
    Status(ProcessStatus),
    Statuses(Vec<ProcessStatus>),
    Sessions(Vec<SessionStatus>),
    /// One session, such as one that several callers may open and that is open now.
    Session(SessionStatus),
    Trees(Vec<TreeStatus>),
    Note(String),
    /// The bytes from `from` up to, not including, `to` are no longer kept.
    Gap {
        from: u64,
        to: u64,
        /// How many bytes before `to` were errors.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stderr_before: Option<u64>,
    },
    Ended(ProcessEnd),
    /// Offsets, and the milliseconds since 1970 at which the output from there on was read, in order. If
    /// there are many, only the last.
    OutputTimes(Vec<(u64, u64)>),
    Info(Vec<FileInfo>),
    /// One page of a listing; more pages follow until `End`.
    Entries(Vec<DirectoryEntry>),
    /// A read begins: `size` is the size of the whole file; `Data` and `End` follow.
    Reading {
        size: u64,
    },
    /// The number of replacements made in each file.
    Replaced(Vec<u64>),
    Watched(WatchEvent),
    /// One page of the paths that a glob matches; more pages follow until `GlobEnd`.
    GlobEntries(Vec<GlobEntry>),
    GlobEnd(GlobSummary),
    /// One page of matches; more pages follow until `GrepEnd`.
    GrepMatches(Vec<GrepMatch>),
    GrepEnd(GrepSummary),
    /// What an edit did; the announced contents and `End` follow.
    Edited(EditReport),
    Undone(UndoReport),
}

/// An operation that did not succeed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    pub kind: FaultKind,
    /// The kernel's error number, if a system call failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
    pub operation: FaultOperation,
    /// The object of the operation: a path, a process, a port.
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
    /// The file is not UTF-8.
    NotText,
    Other,
}
