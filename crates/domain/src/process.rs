//! A command in a sandbox: what to start, as which user, and how it ended.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::journal::{Backpressure, Retention};

/// The id of a process, created by the service before it starts: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(String);

/// The id of a shell session, in the same form.
pub type SessionId = ProcessId;

/// The error for text that is not a process id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a process id is 32 hexadecimal digits")]
pub struct NotAProcessId;

/// A description of the process to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub command: Command,
    pub identity: Identity,
    /// `None`: the guest's default directory.
    pub directory: Option<Directory>,
    pub env: BTreeMap<String, String>,
    pub io: Io,
    pub stdin: Stdin,
    /// A tag by which a front finds its processes again.
    pub tag: Option<String>,
    /// The time after which the whole tree is killed.
    pub deadline: Option<Duration>,
    pub retention: Retention,
    pub backpressure: Backpressure,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Argv(Vec<String>),
    /// Text for `bash -c`, or `sh -c` where there is no bash.
    Shell {
        text: String,
        login: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    pub path: String,
    pub missing: Missing,
    /// Whether `$VAR` in the path is replaced from the process's environment.
    pub expand: bool,
}

/// The action to take when a working directory does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    Fail,
    Create,
    Ignore,
}

/// The user that runs something inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
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
pub enum Io {
    Pipes,
    Terminal(Size),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub columns: u16,
    pub rows: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdin {
    /// `/dev/null`.
    Empty,
    /// Open until the caller closes it.
    Piped,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// The kernel killed a process in its tree because the memory limit was reached.
    Oom,
    /// Its deadline passed and its tree was killed.
    Deadline,
    /// The exit status is unknown: the agent died before it could report it.
    Lost,
}

impl ProcessId {
    pub fn from_entropy(entropy: [u8; 16]) -> Self {
        Self(entropy.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn parse(text: &str) -> Result<Self, NotAProcessId> {
        let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() == 32 && text.bytes().all(hex) { Ok(Self(text.to_owned())) } else { Err(NotAProcessId) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Process {
    /// A command with closed input, no deadline, as the default user in the default directory.
    pub fn new(command: Command) -> Self {
        Self {
            command,
            identity: Identity::Default,
            directory: None,
            env: BTreeMap::new(),
            io: Io::Pipes,
            stdin: Stdin::Empty,
            tag: None,
            deadline: None,
            retention: Retention::default(),
            backpressure: Backpressure::Off,
        }
    }

    pub fn shell(text: impl Into<String>) -> Self {
        Self::new(Command::Shell { text: text.into(), login: false })
    }
}
