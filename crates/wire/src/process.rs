//! Messages about processes and shell sessions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::nest::{Nest, NestStatus};

/// Starts a process. The server chooses its name, so that it knows it even if the answer is lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    pub process: String,
    pub command: Command,
    pub identity: Identity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<Directory>,
    /// Added to the environment of the agent's configuration.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// A terminal of this size, or pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// Keep input open for `Input`; otherwise it is `/dev/null`.
    #[serde(default)]
    pub stdin: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    pub retention: Retention,
    /// Go on with output and `Ended` on this connection.
    #[serde(default)]
    pub follow: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    Argv(Vec<String>),
    /// For `bash -c`, or `sh -c` without bash; `login` adds `-l`. Long text goes by memfd.
    Shell {
        text: String,
        #[serde(default)]
        login: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Directory {
    pub path: String,
    pub missing: Missing,
    #[serde(default)]
    pub expand: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    Fail,
    Create,
    Ignore,
}

/// As whom; supplementary groups come from the account inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    /// The default user of the agent's configuration.
    Default,
    User(String),
    Ids {
        uid: u32,
        gid: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    pub columns: u16,
    pub rows: u16,
}

/// How many bytes of output are kept: the first, the last, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    pub first: u64,
    pub last: u64,
    /// While the connection that started the process follows it, nothing is dropped that was not
    /// sent there: the command waits for that reader, as it would with a pipe. Other followers
    /// never hold it back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
    /// After so many milliseconds in which that reader took no byte, the command runs on until
    /// the reader takes one again; what was dropped meanwhile is a gap. `None`: it waits forever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SignalProcess {
    pub process: String,
    pub signal: i32,
    /// To whom: the process's group as a terminal would, or everything it ever started.
    pub reach: Reach,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    Group,
    Tree,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub process: String,
    pub pid: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The session it is a run of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The shell text, or the words joined by blanks; cut after 4 KiB.
    pub command: String,
    pub started_ms: u64,
    /// The overall offset of the first byte still kept after `Retention::first`, and of the end.
    pub written: u64,
    /// How many bytes are kept of the beginning; a gap can begin no earlier.
    #[serde(default = "default_first")]
    pub first: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// It has ended, and something that it started has not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
}

/// What every command kept of its beginning before the status said so.
fn default_first() -> u64 {
    1 << 20
}

/// A command, session or context with everything it has started, and what that uses now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TreeStatus {
    pub id: String,
    pub kind: TreeKind,
    /// The session that a run belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The beginning of the command's text, the language of a context, or the kind of session.
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Whether a command runs, or a run is on in a session or context.
    pub busy: bool,
    pub started_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// It has ended, and something that it started has not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// `None` for a run, which is counted with its session, and for what no longer runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<TreeUsage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TreeKind {
    Command,
    /// A command that was given to a session or context.
    Run,
    Session,
    Context,
}

/// What a tree of processes uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeUsage {
    pub cpu_ms: u64,
    /// Resident; pages that processes share count for each of them.
    pub memory_bytes: u64,
    pub processes: u32,
}

/// How a process ended, and what it used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    pub exit: Exit,
    /// The overall offset behind the last byte.
    pub written: u64,
    pub ended_ms: u64,
    pub duration_ms: u64,
    #[serde(default)]
    pub user_ms: u64,
    #[serde(default)]
    pub system_ms: u64,
    #[serde(default)]
    pub max_rss_kib: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
    Oom,
    Deadline,
    Lost,
}

/// Opens a shell that is kept between runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenSession {
    pub session: String,
    pub identity: Identity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<Directory>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// Namespaces of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nest: Option<Nest>,
}

/// Opens a session whose runs are given to a kernel: a program that keeps the state of one
/// language between them. `docs/protocol.md` has what the two say to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenKernel {
    pub open: OpenSession,
    pub kernel: Kernel,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// As the server calls it; told again in [`SessionStatus`].
    pub language: String,
    pub program: Program,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// A program inside, found in the PATH of the session.
    Argv(Vec<String>),
    /// The agent's own program with these words behind its name, confined as any command.
    Own(Vec<String>),
    /// The shell of an ordinary session.
    Shell,
}

/// Runs text in a session; the run is a process of its own with its own journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunInSession {
    pub session: String,
    pub process: String,
    pub text: String,
    /// Only for this run to start in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<Directory>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    pub retention: Retention,
    #[serde(default)]
    pub follow: bool,
    /// What happens while another run is on: refuse with `Busy`, or wait for its end.
    #[serde(default)]
    pub queue: bool,
    /// For this run alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Beside the session's shell, in its nest, with what the shell has exported by now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beside: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    pub session: String,
    pub busy: bool,
    pub terminal: bool,
    /// The shell's process; `None` if it died and will be started again by the next run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The language of its kernel, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nest: Option<NestStatus>,
    /// Something runs beside its shell, as a job in the background.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
}
