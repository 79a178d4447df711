//! One command of a session, from the queue to its end or to a limit of the wait.
//!
//! ```text
//! waiting ─► started ─► Output… ─► Ended
//!    │           ├─► TooLong, TooQuiet: the command goes on
//!    │           ├─► Overdue: the sandbox has not enforced the hard timeout
//!    └─► TooLong: it stays in the queue
//! ```
//! Dropping it ends the wait. A command that has started goes on; one that waits for its turn is dropped.

use std::pin::Pin;
use std::time::Duration;

use domain::SessionId;
use service::{OutputEvent, OutputStream, ProcessEnd, SandboxRef, ServiceError, SessionRunRequest};
use tokio::time::{Instant, sleep_until};

use super::super::commands::run::{OVERDUE_TIMEOUT, start_queued_run};
use super::super::commands::session::{GroupSession, SessionGroup};
use super::session::SessionNote;

/// After this time without output the limit of the session is read. Most commands have ended by then, so most calls do
/// not read it. No limit of a session is shorter.
const READ_LIMIT_DELAY: Duration = Duration::from_secs(1);

type StartingRun = Pin<Box<dyn Future<Output = Result<OutputStream, ServiceError>> + Send>>;

/// The limits of a wait; none of them ends the command.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunLimits {
    /// The total time, with the time in the queue.
    pub(super) soft: Option<Duration>,
    /// The time without output; `None` for that of the session.
    pub(super) quiet: Option<Duration>,
}

/// The next event of a command.
#[derive(Debug)]
pub(super) enum RunStep {
    Event(OutputEvent),
    Over(RunEnd),
}

/// Why a wait is over.
#[derive(Clone, Copy, Debug)]
pub(super) enum RunEnd {
    Ended(ProcessEnd),
    TooLong,
    TooQuiet,
    Overdue,
}

/// A command that is being waited for.
pub(super) struct CommandRun {
    sandbox: SandboxRef,
    session: SessionId,
    stage: RunStage,
    soft_at: Option<Instant>,
    /// The hard timeout, which the sandbox enforces.
    hard: Option<Duration>,
    /// When the sandbox should have enforced it.
    overdue_at: Option<Instant>,
    quiet: Option<Duration>,
    last_change: Instant,
}

enum RunStage {
    Starting(StartingRun),
    Started(Box<OutputStream>),
    /// The run was left to itself.
    Left,
}

impl CommandRun {
    /// Starts a command when the wait is polled.
    pub(super) fn new(
        sandbox: SandboxRef,
        session: SessionId,
        run: SessionRunRequest,
        limits: RunLimits,
    ) -> Self {
        let hard = run.deadline;
        let starting = {
            let (sandbox, session) = (sandbox.clone(), session.clone());
            async move { start_queued_run(&sandbox, &session, run).await }
        };
        Self::in_stage(sandbox, session, RunStage::Starting(Box::pin(starting)), hard, limits)
    }

    /// Waits for a command that has just started.
    pub(super) fn started(
        sandbox: SandboxRef,
        session: SessionId,
        output: OutputStream,
        hard: Option<Duration>,
        limits: RunLimits,
    ) -> Self {
        let stage = RunStage::Started(Box::new(output));
        let run = Self::in_stage(sandbox, session, stage, hard, limits);
        Self { overdue_at: hard.map(|limit| run.last_change + limit + OVERDUE_TIMEOUT), ..run }
    }

    fn in_stage(
        sandbox: SandboxRef,
        session: SessionId,
        stage: RunStage,
        hard: Option<Duration>,
        limits: RunLimits,
    ) -> Self {
        let now = Instant::now();
        let soft_at = limits.soft.map(|limit| now + limit);
        Self {
            sandbox,
            session,
            stage,
            soft_at,
            hard,
            overdue_at: None,
            quiet: limits.quiet,
            last_change: now,
        }
    }

    /// Waits until the command has started. Returns `false` if the time was up before.
    pub(super) async fn wait_for_start(&mut self) -> Result<bool, ServiceError> {
        let RunStage::Starting(starting) = &mut self.stage else { return Ok(true) };
        let started = tokio::select! {
            biased;
            started = starting => Some(started?),
            () = sleep_until_limit(self.soft_at) => None,
        };
        match started {
            Some(output) => {
                self.stage = RunStage::Started(Box::new(output));
                self.last_change = Instant::now();
                self.overdue_at = self.hard.map(|limit| self.last_change + limit + OVERDUE_TIMEOUT);
                Ok(true)
            }
            None => {
                self.leave_in_queue();
                Ok(false)
            }
        }
    }

    /// Waits for the next event. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<RunStep, ServiceError> {
        if !self.wait_for_start().await? {
            return Ok(RunStep::Over(RunEnd::TooLong));
        }
        loop {
            let RunStage::Started(output) = &mut self.stage else {
                return Ok(RunStep::Over(RunEnd::TooLong));
            };
            if has_passed(self.soft_at) {
                return Ok(RunStep::Over(RunEnd::TooLong));
            }
            if has_passed(self.overdue_at) {
                return Ok(RunStep::Over(RunEnd::Overdue));
            }
            let quiet_at = self.last_change + self.quiet.unwrap_or(READ_LIMIT_DELAY);
            tokio::select! {
                // An event that has arrived counts, even if a limit is reached at the same moment.
                biased;
                event = output.next() => {
                    self.last_change = Instant::now();
                    return Ok(match event? {
                        OutputEvent::Ended(end) => RunStep::Over(RunEnd::Ended(end)),
                        event => RunStep::Event(event),
                    });
                }
                () = sleep_until_limit(self.soft_at) => return Ok(RunStep::Over(RunEnd::TooLong)),
                () = sleep_until_limit(self.overdue_at) => return Ok(RunStep::Over(RunEnd::Overdue)),
                () = sleep_until(quiet_at) => if self.quiet.is_some() {
                    return Ok(RunStep::Over(RunEnd::TooQuiet));
                },
            }
            tokio::select! {
                biased;
                limit = read_quiet_limit(&self.sandbox, &self.session) => self.quiet = Some(limit),
                // A sandbox that does not answer extends no limit; the next pass reports which one it was.
                () = sleep_until_limit(self.soft_at) => {}
                () = sleep_until_limit(self.overdue_at) => {}
            }
        }
    }

    /// Lets the command wait for its turn without a caller. The agent bounds how many wait.
    fn leave_in_queue(&mut self) {
        let RunStage::Starting(starting) = std::mem::replace(&mut self.stage, RunStage::Left) else { return };
        tokio::spawn(async move {
            if let Err(error) = starting.await {
                tracing::debug!(%error, "command that waited in a session was not started");
            }
        });
    }
}

/// The limit that is stored with a session.
async fn read_quiet_limit(sandbox: &SandboxRef, session: &SessionId) -> Duration {
    let note = match sandbox.sessions().shared_session(session).await {
        Ok(status) => GroupSession::from_status(SessionGroup::Shell, status)
            .map(|session| SessionNote::of_session(&session.shared)),
        Err(error) => {
            tracing::debug!(%error, "failed to read the limit of a session; the default is used");
            None
        }
    };
    Duration::from_secs(note.unwrap_or_default().quiet_seconds())
}

/// How long after a limit events that have arrived are still taken.
const EVENT_GRACE: Duration = Duration::from_secs(1);

/// Whether a limit was reached so long ago that further events do not count. An agent that always has another one must
/// not extend it.
fn has_passed(limit: Option<Instant>) -> bool {
    limit.is_some_and(|limit| Instant::now() > limit + EVENT_GRACE)
}

async fn sleep_until_limit(limit: Option<Instant>) {
    match limit {
        Some(limit) => sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
