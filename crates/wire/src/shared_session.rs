//! Messages about sessions that several callers may open: those without a shell, and what a server stores with one.

use serde::{Deserialize, Serialize};

use crate::process::{OpenSession, RunInSession};

/// The longest note of a shared session.
pub const MAX_SESSION_NOTE_BYTES: usize = 1 << 10;

/// The longest path of a script that is read before each command.
pub const MAX_SESSION_SCRIPT_BYTES: usize = 4 << 10;

/// How many runs of one session are listed, and are forgotten only after all other processes.
pub const MAX_SESSION_RUNS: usize = 100;

/// Opens a shared session without a shell: each of its runs is a process of its own, with pipes and an open input. An
/// agent that does not know this request must not open a shell instead, so it is not a field of [`OpenSession`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenCommands {
    /// With `sharing`, and without a terminal or namespaces.
    pub open: OpenSession,
    /// A file that the shell of each command reads first, if it is readable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
}

/// Opens a new shared session with a shell and without a name, and gives it its first run. It is one request because
/// most callers without a session want exactly that, and because no other caller can take the place of the session
/// before its run begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenAndRun {
    /// With `sharing`, and without a name or namespaces.
    pub open: OpenSession,
    /// A run in that session.
    pub run: RunInSession,
}

/// The kind of a shared session, by the program that executes its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SharedSessionKind {
    /// A shell on a terminal.
    Terminal,
    /// A shell on pipes.
    Pipes,
    /// A new process for each run.
    Commands,
}

/// Changes what is stored with a shared session. A field that is left out stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateSession {
    pub session: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The time counts from this request on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdleLimit>,
}

/// After how much time without a run a session is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdleLimit {
    Never,
    Milliseconds(u64),
}
