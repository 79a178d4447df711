//! Messages about processes and shell sessions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::isolated_session::{IsolatedSessionSpec, IsolatedSessionStatus};
use crate::shared_session::SharedSessionKind;

/// Starts a process. The server chooses its name, so that it knows the name even if the reply is
/// lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartProcess {
    pub process: String,
    pub command: CommandLine,
    pub identity: UserIdentity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<WorkingDirectory>,
    /// Added to the environment of the agent's configuration.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The size of the terminal; `None` means pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// Whether input stays open for `Input`; otherwise it is `/dev/null`.
    #[serde(default)]
    pub stdin: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    pub retention: OutputRetention,
    /// Whether output and `Ended` follow on this connection.
    #[serde(default)]
    pub follow: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommandLine {
    Argv(Vec<String>),
    /// Run with `bash -c`, or `sh -c` if there is no bash; `login` adds `-l`. Long text is passed
    /// in a memfd.
    Shell {
        text: String,
        #[serde(default)]
        login: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkingDirectory {
    pub path: String,
    pub missing: MissingDirectory,
    #[serde(default)]
    pub expand: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingDirectory {
    Fail,
    Create,
    Ignore,
}

/// The user that a process runs as; supplementary groups come from the account files in the
/// sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UserIdentity {
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
pub struct OutputRetention {
    pub first: u64,
    pub last: u64,
    /// While the connection that started the process follows it, no output is dropped before it was
    /// sent there: the command blocks until that reader catches up, as with a pipe. Other followers
    /// never delay it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "hold")]
    pub lossless: bool,
    /// If that reader takes no byte for this many milliseconds, the command continues without it
    /// until the reader takes a byte again; the output dropped meanwhile is a gap. `None` means
    /// that the command waits forever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SignalProcess {
    pub process: String,
    pub signal: i32,
    /// The target: the process's group, as a terminal would signal it, or everything it ever
    /// started.
    pub reach: SignalTarget,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignalTarget {
    Group,
    Tree,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub process: String,
    pub pid: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The session, if this process is a run in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The shell text, or the words joined by blanks; cut after 4 KiB.
    pub command: String,
    pub started_ms: u64,
    /// The overall offset behind the last byte written.
    pub written: u64,
    /// How many bytes of the beginning are kept; a gap never starts before this offset.
    #[serde(default = "default_first")]
    pub first: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<ProcessEnd>,
    /// The process has ended, but something that it started still runs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// In the answer to `Follow`: how many bytes before the requested offset were errors. `None` if it is not known,
    /// because that output is not kept or not written yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_before: Option<u64>,
}

/// The value of `first` for statuses from agents that do not send it.
fn default_first() -> u64 {
    1 << 20
}

/// A command, session or context with everything it has started, and the resources they use now.
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
    /// Whether a command is running, or a run is in progress in a session or context.
    pub busy: bool,
    pub started_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<ProcessEnd>,
    /// The process has ended, but something that it started still runs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// `None` for a run in a shell or kernel, whose usage is counted with its session, and for a tree
    /// that no longer runs.
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

/// The resources that a tree of processes uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeUsage {
    pub cpu_ms: u64,
    /// Resident memory; shared pages count once for each process.
    pub memory_bytes: u64,
    pub processes: u32,
}

/// How a process ended, and what it used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessEnd {
    pub exit: ExitReason,
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
    /// The run passed its deadline and was interrupted, and its kernel continues with its state.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
    /// The last signal that the server has sent to the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signalled: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
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
    pub identity: UserIdentity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<WorkingDirectory>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// Whether the terminal is for output that is read as text, not shown on a screen: lines end with LF only, input is not
    /// echoed, and programs are told not to page.
    #[serde(default, rename = "text", skip_serializing_if = "std::ops::Not::not")]
    pub text_terminal: bool,
    /// The session's own namespaces, if it is isolated.
    #[serde(default, rename = "nest", skip_serializing_if = "Option::is_none")]
    pub isolation: Option<IsolatedSessionSpec>,
    /// How it is kept; left out for a session that only its opener uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<SessionSharing>,
}

/// How a session is kept that several callers may open. The request is then answered `Session`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSharing {
    /// The name that a client chose; `None` if it chose none. If the session exists already, it is used as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The time of the request in nanoseconds since the host's boot. If the session was closed later than this, it is
    /// not opened again.
    pub requested_ns: u64,
    /// How many such sessions there may be. If there are more, the one that was idle longest is closed: first one
    /// without a name, never a busy one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
    /// After how much time without a run it is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// A text of the server, which the agent only keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Opens a session whose runs are given to a kernel: a program that keeps the state of one language
/// between them. `docs/protocol.md` describes the protocol between agent and kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenKernel {
    pub open: OpenSession,
    pub kernel: KernelSpec,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelSpec {
    /// The server's name for the language; repeated in [`SessionStatus`].
    pub language: String,
    pub program: KernelProgram,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelProgram {
    /// A program in the sandbox, found in the session's PATH.
    Argv(Vec<String>),
    /// The agent's own executable with these arguments, confined like any command.
    Own(Vec<String>),
    /// The shell of an ordinary session.
    Shell,
}

/// Runs text in a session; each run is a process with its own journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunInSession {
    pub session: String,
    pub process: String,
    pub text: String,
    /// The directory for this run only; in a session without a shell also for the runs after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<WorkingDirectory>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    pub retention: OutputRetention,
    #[serde(default)]
    pub follow: bool,
    /// Whether the run waits while another run is in progress; otherwise it is refused with `Busy`.
    #[serde(default)]
    pub queue: bool,
    /// Whether the request is answered at once, also if the run has to wait: it then exists without a pid. A run that is
    /// not detached is dropped if its caller disconnects while it waits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detached: bool,
    /// Variables for this run only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Runs in a new process next to the isolated session's shell, with the variables that the
    /// shell has exported so far.
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
    #[serde(default, rename = "nest", skip_serializing_if = "Option::is_none")]
    pub isolation: Option<IsolatedSessionStatus>,
    /// Something runs next to its shell, such as a background job.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// What a session that several callers may open tells about its use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedSessionStatus>,
}

/// The use of a session that several callers may open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedSessionStatus {
    /// The name that a client chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub opened_ms: u64,
    /// When a run last began or ended.
    pub used_ms: u64,
    /// Where the next run starts, as far as it is known: for a shell, once a run has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The process of the present run or, if there is none, of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The beginning of the text of the run in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// How the last run ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitReason>,
    /// The process of the last run that has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_run: Option<String>,
    /// `None` from an agent whose shared sessions are all shells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<SharedSessionKind>,
    /// How many runs have begun.
    #[serde(default)]
    pub runs: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}
