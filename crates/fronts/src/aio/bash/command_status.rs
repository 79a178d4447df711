//! How commands are reported.

use domain::ExitReason;
use serde::Serialize;
use service::{ProcessEnd, ProcessStatus};

/// The status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum BashStatus {
    /// It also waits for its turn with this status.
    Running,
    Completed,
    /// The hard timeout has passed.
    TimedOut,
    /// It died by a signal, or a client has sent it one.
    Killed,
}

/// The signal of a process that ran out of memory.
const SIGKILL: i32 = 9;

impl BashStatus {
    /// The status of a command that has ended, and its exit code: that of a signal is negative.
    pub(super) fn from_end(end: &ProcessEnd) -> (Self, i32) {
        match (end.exit, end.signalled) {
            (ExitReason::Deadline, _) => (Self::TimedOut, -1),
            (ExitReason::Signal(signal), _) => (Self::Killed, -signal),
            (ExitReason::Oom, _) => (Self::Killed, -SIGKILL),
            (ExitReason::Lost, _) => (Self::Killed, -1),
            // A shell reports in this way that a program died by the signal.
            (ExitReason::Code(code), Some(signal)) if code == 128 + signal => (Self::Killed, -signal),
            // The program has handled the signal and then ended.
            (ExitReason::Code(code), Some(_)) => (Self::Killed, code),
            (ExitReason::Code(code), None) => (Self::Completed, code),
        }
    }
}

/// A command of a session.
#[derive(Debug, Serialize)]
pub(super) struct BashCommand {
    command_id: String,
    command: String,
    status: BashStatus,
    exit_code: Option<i32>,
}

impl BashCommand {
    pub(super) fn new(status: ProcessStatus, end: Option<&ProcessEnd>) -> Self {
        let ended = end.or(status.ended.as_ref()).map(BashStatus::from_end);
        Self {
            command_id: status.process.as_str().to_owned(),
            command: status.command,
            status: ended.map_or(BashStatus::Running, |(status, _)| status),
            exit_code: ended.map(|(_, code)| code),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn killed_differs_from_completed() {
        use BashStatus::{Completed, Killed, TimedOut};
        for (exit, signalled, expected) in [
            (ExitReason::Code(0), None, (Completed, 0)),
            (ExitReason::Code(143), None, (Completed, 143)),
            (ExitReason::Code(143), Some(15), (Killed, -15)),
            (ExitReason::Code(3), Some(15), (Killed, 3)),
            (ExitReason::Signal(15), Some(15), (Killed, -15)),
            (ExitReason::Signal(11), None, (Killed, -11)),
            (ExitReason::Oom, None, (Killed, -9)),
            (ExitReason::Lost, None, (Killed, -1)),
            (ExitReason::Deadline, Some(15), (TimedOut, -1)),
        ] {
            let end = ProcessEnd {
                exit,
                written: 0,
                ended: SystemTime::UNIX_EPOCH,
                duration: Duration::ZERO,
                user: Duration::ZERO,
                system: Duration::ZERO,
                max_rss: domain::Bytes(0),
                interrupted: false,
                signalled,
            };
            assert_eq!(BashStatus::from_end(&end), expected, "{exit:?} {signalled:?}");
        }
    }
}
