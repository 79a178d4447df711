//! A command in a sandbox: what to start, as which user, and how it ended.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::journal::{Backpressure, OutputRetention};

/// A description of the process to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSpec {
    pub command: CommandLine,
    pub identity: UserIdentity,
    /// `None`: the guest's default directory.
    pub directory: Option<WorkingDirectory>,
    pub env: BTreeMap<String, String>,
    pub io: ProcessIo,
    pub stdin: StdinMode,
    /// A tag by which a front finds its processes again.
    pub tag: Option<String>,
    /// The time after which the whole tree is killed.
    pub deadline: Option<Duration>,
    pub retention: OutputRetention,
    pub backpressure: Backpressure,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandLine {
    Argv(Vec<String>),
    /// Text for `bash -c`, or `sh -c` where there is no bash.
    Shell {
        text: String,
        login: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingDirectory {
    pub path: String,
    pub missing: MissingDirectory,
    /// Whether `$VAR` in the path is replaced from the process's environment.
    pub expand: bool,
}

/// The action to take when a working directory does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingDirectory {
    Fail,
    Create,
    Ignore,
}

/// The user that runs something inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserIdentity {
    /// The guest's default user.
    Default,
    User(String),
    /// With the supplementary groups of the account with this uid, if there is one.
    Ids {
        uid: u32,
        gid: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessIo {
    Pipes,
    Terminal(TerminalSize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub columns: u16,
    pub rows: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StdinMode {
    /// `/dev/null`.
    Empty,
    /// Open until the caller closes it.
    Piped,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    Code(i32),
    Signal(i32),
    /// The kernel killed a process in its tree because the memory limit was reached.
    Oom,
    /// Its deadline passed and its tree was killed.
    Deadline,
    /// The exit status is unknown: the agent died before it could report it.
    Lost,
}

impl ProcessSpec {
    /// A command with closed input, no deadline, as the default user in the default directory.
    pub fn new(command: CommandLine) -> Self {
        Self {
            command,
            identity: UserIdentity::Default,
            directory: None,
            env: BTreeMap::new(),
            io: ProcessIo::Pipes,
            stdin: StdinMode::Empty,
            tag: None,
            deadline: None,
            retention: OutputRetention::default(),
            backpressure: Backpressure::Off,
        }
    }

    pub fn from_shell_text(text: impl Into<String>) -> Self {
        Self::new(CommandLine::Shell { text: text.into(), login: false })
    }
}
