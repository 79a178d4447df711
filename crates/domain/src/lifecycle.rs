//! The lifecycle of one sandbox, as rules without I/O.
//!
//! ```text
//! Starting ─► Running ─► Pausing ─► Paused ─► Resuming ─► Running
//!                │ entrypoint ended
//!                └─► Exited
//! any of these ─► Stopping ─► Stopped;  any but Stopped may end in Failed
//! Failed ─► Starting ─► Running   a restart, on the same files or on none
//! ```
//! A sandbox's files outlive its processes: a failed sandbox keeps its disk until it is restarted
//! or removed. Only the sandbox's driver changes its phase; all other code only observes it.

use std::fmt;

use crate::process::Exit;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Starting,
    Running,
    Pausing,
    Paused,
    Resuming,
    /// The entrypoint ended; files and logs can still be read.
    Exited(Exit),
    Stopping,
    /// Removed with everything it had.
    Stopped,
    /// It died by itself; its record and the cause can still be read.
    Failed(Cause),
}

/// The reason why a sandbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Destroyed,
    Expired,
    Idle,
    Oom,
    AgentDied,
    HostRebooted,
    /// It never started.
    NotCreated,
    /// It was idle, and its slot was needed for another sandbox.
    Evicted,
    /// It had died and was replaced by another sandbox with an empty disk.
    Replaced,
    /// It takes the place of one that died and whose files were lost. No sandbox ends with this.
    FilesLost,
}

/// The action to take when a sandbox that died is used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDeath {
    /// It restarts with the files it had.
    #[default]
    Restart,
    /// It restarts, or is replaced by another sandbox, with an empty disk and the same volumes.
    Replace,
}

/// Whether the files of a sandbox that died still exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Files {
    #[default]
    Kept,
    /// They were in memory, or the disk was removed.
    Lost,
}

/// A request that a client can make of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Use,
    Pause,
    Resume,
    /// Restart a sandbox that has died.
    Restart,
    Renew,
    Destroy,
}

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    /// The sandbox is already in the requested state: nothing changes, and each front reports it in
    /// its own form.
    AlreadySo,
    /// The request is not allowed in this phase.
    Deny,
}

impl Phase {
    /// Decides about `request` in this phase. There are no wildcard arms: a new phase does not
    /// compile until every request is handled.
    pub fn judge(self, request: Request) -> Verdict {
        use Phase::{Exited, Failed, Paused, Pausing, Resuming, Running, Starting, Stopped, Stopping};
        match (request, self) {
            (Request::Use, Running | Exited(_)) => Verdict::Accept,
            (Request::Use, Starting | Pausing | Paused | Resuming | Stopping | Stopped | Failed(_)) => {
                Verdict::Deny
            }
            (Request::Pause, Running) | (Request::Resume, Paused | Failed(_)) => Verdict::Accept,
            (Request::Pause, Pausing | Paused) | (Request::Resume, Running | Resuming) => Verdict::AlreadySo,
            (Request::Pause, Starting | Resuming | Exited(_) | Stopping | Stopped | Failed(_)) => {
                Verdict::Deny
            }
            (Request::Resume, Starting | Pausing | Exited(_) | Stopping | Stopped) => Verdict::Deny,
            (Request::Restart, Failed(_)) => Verdict::Accept,
            (Request::Restart, Starting | Running | Resuming) => Verdict::AlreadySo,
            (Request::Restart, Pausing | Paused | Exited(_) | Stopping | Stopped) => Verdict::Deny,
            (Request::Renew, Starting | Running | Pausing | Paused | Resuming | Exited(_) | Failed(_)) => {
                Verdict::Accept
            }
            (Request::Renew, Stopping | Stopped) => Verdict::Deny,
            (Request::Destroy, Starting | Running | Pausing | Paused | Resuming | Exited(_) | Failed(_)) => {
                Verdict::Accept
            }
            (Request::Destroy, Stopping | Stopped) => Verdict::AlreadySo,
        }
    }

    /// The name used in logs, metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Exited(_) => "exited",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Use => "use",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Restart => "restart",
            Self::Renew => "renew",
            Self::Destroy => "destroy",
        })
    }
}

impl Cause {
    pub fn name(self) -> &'static str {
        match self {
            Self::Destroyed => "destroyed",
            Self::Expired => "expired",
            Self::Idle => "idle",
            Self::Oom => "oom",
            Self::AgentDied => "agent died",
            Self::HostRebooted => "host rebooted",
            Self::NotCreated => "not created",
            Self::Evicted => "evicted",
            Self::Replaced => "replaced",
            Self::FilesLost => "files lost",
        }
    }
}

impl OnDeath {
    /// The name used in requests, responses and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::Replace => "replace",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Self::Restart, Self::Replace].into_iter().find(|choice| choice.name() == text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Phase; 9] = [
        Phase::Starting,
        Phase::Running,
        Phase::Pausing,
        Phase::Paused,
        Phase::Resuming,
        Phase::Exited(Exit::Code(0)),
        Phase::Stopping,
        Phase::Stopped,
        Phase::Failed(Cause::AgentDied),
    ];

    #[test]
    fn sandbox_can_be_destroyed_unless_already_ending() {
        for phase in ALL {
            let expected = match phase {
                Phase::Stopping | Phase::Stopped => Verdict::AlreadySo,
                _ => Verdict::Accept,
            };
            assert_eq!(phase.judge(Request::Destroy), expected, "{phase}");
        }
    }

    #[test]
    fn pause_twice_is_already_so() {
        assert_eq!(Phase::Running.judge(Request::Pause), Verdict::Accept);
        assert_eq!(Phase::Pausing.judge(Request::Pause), Verdict::AlreadySo);
        assert_eq!(Phase::Paused.judge(Request::Pause), Verdict::AlreadySo);
    }

    #[test]
    fn only_failed_sandboxes_restart() {
        for phase in ALL {
            let accepted = phase.judge(Request::Restart) == Verdict::Accept;
            assert_eq!(accepted, matches!(phase, Phase::Failed(_)), "{phase}");
        }
        assert_eq!(Phase::Running.judge(Request::Restart), Verdict::AlreadySo);
        assert_eq!(Phase::Failed(Cause::Oom).judge(Request::Resume), Verdict::Accept);
        assert_eq!(Phase::Failed(Cause::Oom).judge(Request::Use), Verdict::Deny);
    }

    #[test]
    fn paused_sandbox_cannot_be_used() {
        assert_eq!(Phase::Paused.judge(Request::Use), Verdict::Deny);
    }
}
