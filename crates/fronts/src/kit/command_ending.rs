//! How a command ended: its exit code as clients see it, and Coracle's addition for any other end.

use domain::ExitReason;
use serde::Serialize;
use service::{FileFault, LaunchStep, ServiceError};

/// How a command ended without an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "ending", rename_all = "snake_case")]
pub(crate) enum CommandEnding {
    Signal {
        signal: i32,
    },
    Oom,
    Deadline,
    /// The end was not observed.
    Lost,
    /// The program does not exist.
    Missing,
    /// The program exists but cannot be executed.
    NotExecutable,
}

impl CommandEnding {
    pub(crate) fn from_exit(exit: ExitReason) -> Option<Self> {
        match exit {
            ExitReason::Code(_) => None,
            ExitReason::Signal(signal) => Some(Self::Signal { signal }),
            ExitReason::Oom => Some(Self::Oom),
            ExitReason::Deadline => Some(Self::Deadline),
            ExitReason::Lost => Some(Self::Lost),
        }
    }

    /// The end of a command whose program could not be executed; `None` if the launch failed otherwise.
    pub(crate) fn from_launch_error(error: &ServiceError) -> Option<Self> {
        match error {
            ServiceError::File(file) if file.launch_step == Some(LaunchStep::Exec) => match file.fault {
                FileFault::NotFound => Some(Self::Missing),
                _ => Some(Self::NotExecutable),
            },
            _ => None,
        }
    }
}

/// Returns the exit code, or -1 for any other end.
pub(crate) fn exit_code(exit: ExitReason) -> i32 {
    match exit {
        ExitReason::Code(code) => code,
        ExitReason::Signal(_) | ExitReason::Oom | ExitReason::Deadline | ExitReason::Lost => -1,
    }
}
