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

use crate::process::ExitReason;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Starting,
    Running,
    Pausing,
    Paused,
    Resuming,
    /// The entrypoint ended; files and logs can still be read.
    Exited(ExitReason),
    Stopping,
    /// Removed with everything it had.
    Stopped,
    /// It died by itself; its record and the cause can still be read.
    Failed(EndCause),
}

/// The reason why a sandbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndCause {
    Destroyed,
    Expired,
    Idle,
    Oom,
    /// The host was about to run out of open files, and it had the most.
    TooManyFiles,
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
pub enum FilesState {
    #[default]
    Kept,
    /// They were in memory, or the disk was removed.
    Lost,
}

/// A request that a client can make of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleRequest {
    Use,
    Pause,
    Resume,
    /// Restart a sandbox that has died.
    Restart,
    Renew,
    /// Change what it may reach.
    SetPolicy,
    Destroy,
}

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    /// The sandbox is already in the requested state: nothing changes, and each front reports it in
    /// its own form.
    Unchanged,
    /// The request is not allowed in this phase.
    Deny,
}

impl Phase {
    /// Decides about `request` in this phase. There are no wildcard arms: a new phase does not
    /// compile until every request is handled.
    pub fn judge(self, request: LifecycleRequest) -> Verdict {
        use Phase::{Exited, Failed, Paused, Pausing, Resuming, Running, Starting, Stopped, Stopping};
        match (request, self) {
            (LifecycleRequest::Use, Running | Exited(_)) => Verdict::Accept,
            (
                LifecycleRequest::Use,
                Starting | Pausing | Paused | Resuming | Stopping | Stopped | Failed(_),
            ) => Verdict::Deny,
            (LifecycleRequest::Pause, Running) | (LifecycleRequest::Resume, Paused | Failed(_)) => {
                Verdict::Accept
            }
            (LifecycleRequest::Pause, Pausing | Paused) | (LifecycleRequest::Resume, Running | Resuming) => {
                Verdict::Unchanged
            }
            (LifecycleRequest::Pause, Starting | Resuming | Exited(_) | Stopping | Stopped | Failed(_)) => {
                Verdict::Deny
            }
            (LifecycleRequest::Resume, Starting | Pausing | Exited(_) | Stopping | Stopped) => Verdict::Deny,
            (LifecycleRequest::Restart, Failed(_)) => Verdict::Accept,
            (LifecycleRequest::Restart, Starting | Running | Resuming) => Verdict::Unchanged,
            (LifecycleRequest::Restart, Pausing | Paused | Exited(_) | Stopping | Stopped) => Verdict::Deny,
            (
                LifecycleRequest::Renew,
                Starting | Running | Pausing | Paused | Resuming | Exited(_) | Failed(_),
            ) => Verdict::Accept,
            (LifecycleRequest::Renew, Stopping | Stopped) => Verdict::Deny,
            // A filter is outside the sandbox, so a frozen one can get another policy.
            (LifecycleRequest::SetPolicy, Running | Paused | Exited(_)) => Verdict::Accept,
            (LifecycleRequest::SetPolicy, Starting | Pausing | Resuming | Stopping | Stopped | Failed(_)) => {
                Verdict::Deny
            }
            (
                LifecycleRequest::Destroy,
                Starting | Running | Pausing | Paused | Resuming | Exited(_) | Failed(_),
            ) => Verdict::Accept,
            (LifecycleRequest::Destroy, Stopping | Stopped) => Verdict::Unchanged,
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

impl fmt::Display for LifecycleRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Use => "use",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Restart => "restart",
            Self::Renew => "renew",
            Self::SetPolicy => "set the network policy of",
            Self::Destroy => "destroy",
        })
    }
}

impl EndCause {
    pub fn name(self) -> &'static str {
        match self {
            Self::Destroyed => "destroyed",
            Self::Expired => "expired",
            Self::Idle => "idle",
            Self::Oom => "oom",
            Self::TooManyFiles => "too many open files",
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
        Phase::Exited(ExitReason::Code(0)),
        Phase::Stopping,
        Phase::Stopped,
        Phase::Failed(EndCause::AgentDied),
    ];

    #[test]
    fn sandbox_can_be_destroyed_unless_already_ending() {
        for phase in ALL {
            let expected = match phase {
                Phase::Stopping | Phase::Stopped => Verdict::Unchanged,
                _ => Verdict::Accept,
            };
            assert_eq!(phase.judge(LifecycleRequest::Destroy), expected, "{phase}");
        }
    }

    #[test]
    fn pause_twice_returns_unchanged() {
        assert_eq!(Phase::Running.judge(LifecycleRequest::Pause), Verdict::Accept);
        assert_eq!(Phase::Pausing.judge(LifecycleRequest::Pause), Verdict::Unchanged);
        assert_eq!(Phase::Paused.judge(LifecycleRequest::Pause), Verdict::Unchanged);
    }

    #[test]
    fn only_failed_sandboxes_restart() {
        for phase in ALL {
            let accepted = phase.judge(LifecycleRequest::Restart) == Verdict::Accept;
            assert_eq!(accepted, matches!(phase, Phase::Failed(_)), "{phase}");
        }
        assert_eq!(Phase::Running.judge(LifecycleRequest::Restart), Verdict::Unchanged);
        assert_eq!(Phase::Failed(EndCause::Oom).judge(LifecycleRequest::Resume), Verdict::Accept);
        assert_eq!(Phase::Failed(EndCause::Oom).judge(LifecycleRequest::Use), Verdict::Deny);
    }

    #[test]
    fn paused_sandbox_cannot_be_used() {
        assert_eq!(Phase::Paused.judge(LifecycleRequest::Use), Verdict::Deny);
        assert_eq!(Phase::Paused.judge(LifecycleRequest::SetPolicy), Verdict::Accept);
    }
}
