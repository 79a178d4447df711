//! The life of one sandbox, as rules without I/O.
//!
//! ```text
//! Starting ─► Running ─► Pausing ─► Paused ─► Resuming ─► Running
//!                │ entrypoint ended
//!                └─► Exited
//! any of these ─► Stopping ─► Stopped;  any but Stopped may end in Failed
//! Failed ─► Starting ─► Running   a restart, on the same files or on none
//! ```
//! A sandbox's files outlive its processes: one that has failed keeps its disk until it is
//! restarted or removed.
//! Only the sandbox's driver changes its phase; everyone else watches.

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
    /// Gone with everything it had.
    Stopped,
    /// It died by itself; what it was and why can still be read.
    Failed(Cause),
}

/// Why a sandbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Destroyed,
    Expired,
    Idle,
    Oom,
    AgentDied,
    HostRebooted,
    /// It never came up.
    NotCreated,
    /// Nobody needed it, and another needed its place.
    Evicted,
    /// It had died, and another with an empty disk took its place.
    Replaced,
    /// It takes the place of one that died and whose files were lost. No sandbox ends with this.
    FilesLost,
}

/// What becomes of a sandbox that died when it is wanted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDeath {
    /// It starts again with the files it had.
    #[default]
    Restart,
    /// It starts again, or another takes its place, with an empty disk and the same volumes.
    Replace,
}

/// Whether the files of a sandbox that died are still there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Files {
    #[default]
    Kept,
    /// They were in memory, or somebody removed the disk.
    Lost,
}

/// What somebody may ask of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Use,
    Pause,
    Resume,
    /// Start again what has died.
    Restart,
    Renew,
    Destroy,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    /// It already holds: nothing changes, and each front says so in its own words.
    AlreadySo,
    /// It cannot be done in this phase.
    Deny,
}

impl Phase {
    /// Says what becomes of `request` now. There are no wildcard arms: a new phase does not
    /// compile until it has an answer to every request.
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

    /// The word for logs, metrics and messages.
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
    /// The word for it in requests, answers and messages.
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
    fn anything_not_already_ending_can_be_destroyed() {
        for phase in ALL {
            let expected = match phase {
                Phase::Stopping | Phase::Stopped => Verdict::AlreadySo,
                _ => Verdict::Accept,
            };
            assert_eq!(phase.judge(Request::Destroy), expected, "{phase}");
        }
    }

    #[test]
    fn pausing_twice_is_already_so() {
        assert_eq!(Phase::Running.judge(Request::Pause), Verdict::Accept);
        assert_eq!(Phase::Pausing.judge(Request::Pause), Verdict::AlreadySo);
        assert_eq!(Phase::Paused.judge(Request::Pause), Verdict::AlreadySo);
    }

    #[test]
    fn only_what_has_failed_is_restarted() {
        for phase in ALL {
            let accepted = phase.judge(Request::Restart) == Verdict::Accept;
            assert_eq!(accepted, matches!(phase, Phase::Failed(_)), "{phase}");
        }
        assert_eq!(Phase::Running.judge(Request::Restart), Verdict::AlreadySo);
        assert_eq!(Phase::Failed(Cause::Oom).judge(Request::Resume), Verdict::Accept);
        assert_eq!(Phase::Failed(Cause::Oom).judge(Request::Use), Verdict::Deny);
    }

    #[test]
    fn a_paused_sandbox_runs_nothing() {
        assert_eq!(Phase::Paused.judge(Request::Use), Verdict::Deny);
    }
}
