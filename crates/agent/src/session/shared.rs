//! Sessions that several callers may open under one name.
//!
//! Opening one that exists finds it. Of two requests to open and to close a session the later one decides, in
//! whatever order they arrive. A session needs no process while it is idle: only some
//! shells of sessions without a chosen name are kept, and the next run gets a new shell with the same state.

use std::collections::VecDeque;

use wire::process::{OpenSession, SessionSharing, SharedSessionStatus};
use wire::shared_session::{IdleLimit, MAX_SESSION_NOTE_BYTES, OpenAndRun, SharedSessionKind, UpdateSession};
use wire::{AgentReply, Fault, FaultKind, FaultOperation};

use super::{QueuedCaller, Session, SessionKind};
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::{ConnectionId, ProcessHandle, SessionHandle};
use crate::fault;
use crate::process::{self, ManagedProcess, running_process::RunningProcess};

/// The longest name that a client may choose.
const MAX_CHOSEN_NAME_BYTES: usize = 256;

/// How many idle shells of sessions without a chosen name are kept. Documents promise eight: one more may still be
/// ending.
const MAX_IDLE_SHELLS: usize = 7;

/// How many closed sessions are remembered.
const MAX_CLOSED_SESSIONS: usize = 1024;

/// Sessions that were closed, each with the time of the request on the server's clock. The oldest is first.
#[derive(Debug, Default)]
pub(crate) struct ClosedSessions {
    closed: VecDeque<(String, u64)>,
}

impl ClosedSessions {
    fn record(&mut self, session: &str, mut requested: u64) {
        self.closed.retain(|(name, former)| {
            let other = name != session;
            requested = if other { requested } else { requested.max(*former) };
            other
        });
        if self.closed.len() >= MAX_CLOSED_SESSIONS {
            self.closed.pop_front();
        }
        self.closed.push_back((session.to_owned(), requested));
    }

    /// Whether the session was closed by a request that is later than this time.
    fn is_closed_since(&self, session: &str, requested: u64) -> bool {
        self.closed.iter().any(|(name, closed)| name == session && *closed > requested)
    }
}

impl Agent {
    /// Opens a session, or finds the one that is open under its name.
    pub(crate) fn open_shared_session(
        &mut self,
        connection: ConnectionId,
        open: OpenSession,
        sharing: &SessionSharing,
        kind: SessionKind,
    ) -> Result<(), Fault> {
        self.check_shared(&open, sharing)?;
        if let Ok(number) = self.sessions.find(&open.session) {
            let session = self.sessions.get_mut(number).expect("it was just found");
            let exists = |why: &str| {
                let subject = format!("{}: {why}", open.session);
                Err(fault::from_kind(FaultKind::AlreadyExists, "open session", &subject))
            };
            if !session.is_shared() {
                return exists("it is not shared");
            }
            if session.open.identity != open.identity {
                return exists("it belongs to another user");
            }
            if shared_kind(&session.kind, &session.open) != shared_kind(&kind, &open) {
                return exists(match shared_kind(&session.kind, &session.open) {
                    SharedSessionKind::Terminal => "it is a shell on a terminal",
                    SharedSessionKind::Pipes => "it is a shell on pipes",
                    SharedSessionKind::Commands => "it has no shell and runs single commands",
                });
            }
            if let Some(opened) = &mut session.open.sharing {
                opened.requested_ns = opened.requested_ns.max(sharing.requested_ns);
            }
            if session.is_opening() {
                session.openers.push(connection);
            } else {
                self.report_session(number, connection);
            }
            return Ok(());
        }
        self.make_room_for_shared(&open.session, sharing, matches!(kind, SessionKind::Commands(_)))?;
        self.add_session(Some(connection), open, kind).map(drop)
    }

    /// Opens a session without a name for a run. The caller is answered when the run begins. The session is busy from the
    /// beginning, so it is not closed to make room for another.
    pub(crate) fn open_and_run(
        &mut self,
        connection: ConnectionId,
        request: OpenAndRun,
    ) -> Result<(), Fault> {
        let OpenAndRun { open, run } = request;
        let Some(sharing) = open.sharing.clone().filter(|sharing| sharing.name.is_none()) else {
            return Err(refused_open(&open, "it must be shared and have no name"));
        };
        if run.session != open.session || run.beside {
            return Err(refused_open(&open, "its first run must be executed by its own shell"));
        }
        self.check_shared(&open, &sharing)?;
        if self.sessions.find(&open.session).is_ok() {
            return Err(fault::from_kind(
                FaultKind::AlreadyExists,
                FaultOperation::OpenSession,
                &open.session,
            ));
        }
        self.check_run(&run)?;
        self.make_room_for_shared(&open.session, &sharing, false)?;
        let number = self.add_session(None, open, SessionKind::Shell)?;
        self.begin_run(number, QueuedCaller::Connection(connection), run)
    }

    /// Refuses a session that cannot be shared, or that was closed since the request was made.
    fn check_shared(&self, open: &OpenSession, sharing: &SessionSharing) -> Result<(), Fault> {
        let refused = |why| Err(refused_open(open, why));
        let chosen = sharing.name.as_deref().unwrap_or("-");
        if chosen.is_empty() || chosen.len() > MAX_CHOSEN_NAME_BYTES {
            return refused("its name must have 1 to 256 bytes");
        }
        if sharing.note.as_ref().is_some_and(|note| note.len() > MAX_SESSION_NOTE_BYTES) {
            return refused("its note may have at most 1024 bytes");
        }
        if open.isolation.is_some() {
            return refused("an isolated session cannot be shared");
        }
        if !process::is_safe_name(&open.session) {
            return refused("its id is not valid");
        }
        if self.sessions.closed.is_closed_since(&open.session, sharing.requested_ns) {
            return Err(fault::from_kind(FaultKind::NotFound, FaultOperation::FindSession, &open.session));
        }
        Ok(())
    }

    /// Changes what is stored with a shared session.
    pub(crate) fn update_session(
        &mut self,
        connection: ConnectionId,
        update: UpdateSession,
    ) -> Result<(), Fault> {
        let UpdateSession { session: name, note, idle } = update;
        if note.as_ref().is_some_and(|note| note.len() > MAX_SESSION_NOTE_BYTES) {
            let subject = format!("{name}: its note may have at most 1024 bytes");
            return Err(fault::from_kind(FaultKind::Invalid, "update session", &subject));
        }
        let number = self.sessions.find(&name)?;
        let session = self.sessions.get_mut(number).expect("it was just found");
        let Some(sharing) = &mut session.open.sharing else {
            return Err(fault::from_kind(FaultKind::NotFound, FaultOperation::FindSession, &name));
        };
        sharing.note = note.or_else(|| sharing.note.take());
        if let Some(idle) = idle {
            sharing.idle_ms = match idle {
                IdleLimit::Never => None,
                IdleLimit::Milliseconds(limit) => Some(limit),
            };
            self.sessions.set_idle_timer(number, &mut self.events.alarms);
        }
        self.report_session(number, connection);
        Ok(())
    }

    /// Tells a caller about an open session.
    pub(crate) fn report_session(&mut self, number: SessionHandle, connection: ConnectionId) {
        let Some(session) = self.sessions.get(number) else { return };
        let status = session.status(&self.children, &self.context);
        self.connections.send_final_reply(connection, &AgentReply::Session(status));
    }

    /// Closes the session that was idle longest if there are too many: first one without a chosen name, never one that
    /// is busy.
    fn make_room_for_shared(
        &mut self,
        session: &str,
        sharing: &SessionSharing,
        for_commands: bool,
    ) -> Result<(), Fault> {
        let most = sharing.max_sessions.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
        // Sessions without a shell are cheap, so each of the two sorts has a limit of its own.
        let counts = |session: &Session| session.runs_commands() == for_commands && !session.closing;
        let shared = |session: &Session| session.is_shared() && counts(session);
        if self.sessions.values().filter(|session| shared(session)).count() < most {
            return Ok(());
        }
        let idle = self.sessions.entries().filter(|(_, session)| shared(session) && session.is_idle());
        // Sessions that were used in the same millisecond are closed in the order in which they were opened.
        let oldest =
            idle.min_by_key(|(number, session)| (session.chosen_name().is_some(), session.used_ms, *number));
        let Some(name) = oldest.map(|(_, session)| session.name.clone()) else {
            let subject = format!("{session}: all sessions are busy");
            return Err(fault::from_kind(FaultKind::Busy, "open session", &subject));
        };
        let runs: Vec<ProcessHandle> = self.sessions.recent_runs(&name)?.collect();
        self.close_session(&name)?;
        self.forget_runs(&runs);
        Ok(())
    }

    /// Forgets runs of a session that was closed to make room: clients can name them only by their session. Without
    /// this, a sandbox would remember thousands of commands that ran in sessions of their own.
    fn forget_runs(&mut self, runs: &[ProcessHandle]) {
        for number in runs {
            let is_over = |process: &ManagedProcess| process.ended.is_some() && process.followers.is_empty();
            if self.processes.get(*number).is_some_and(is_over) {
                self.drop_process(*number);
            }
        }
    }

    /// Closes a session by a request that was made at this time.
    pub(crate) fn close_session_at(
        &mut self,
        name: &str,
        requested: Option<u64>,
        grace_ms: Option<u64>,
    ) -> Result<(), Fault> {
        if let Some(requested) = requested {
            self.sessions.closed.record(name, requested);
            let session = self.sessions.find(name).ok().and_then(|number| self.sessions.get(number));
            let sharing = session.and_then(|session| session.open.sharing.as_ref());
            if sharing.is_some_and(|sharing| sharing.requested_ns > requested) {
                return Err(fault::from_kind(FaultKind::NotFound, FaultOperation::FindSession, name));
            }
        }
        self.close_session_after(name, grace_ms)
    }

    /// Ends idle shells of sessions without a chosen name if there are too many. The next run starts a new one.
    pub(super) fn end_surplus_shells(&mut self) {
        let surplus = |session: &&Session| {
            session.is_shared()
                && session.chosen_name().is_none()
                && session.is_idle()
                && session.shell.as_ref().is_some_and(|shell| shell.started && !shell.ending)
        };
        let mut idle: Vec<(u64, SessionHandle)> = self
            .sessions
            .entries()
            .filter(|(_, session)| surplus(session))
            .map(|(number, session)| (session.used_ms, number))
            .collect();
        if idle.len() <= MAX_IDLE_SHELLS {
            return;
        }
        idle.sort_unstable();
        for (_, number) in idle.iter().rev().skip(MAX_IDLE_SHELLS) {
            let Some(session) = self.sessions.get_mut(*number) else { continue };
            let running = session.running_process().and_then(|running| self.children.get(running));
            let has_background_processes = |running: &RunningProcess| {
                running.tree.has_other_members(self.context.commands.as_ref(), running.pid)
            };
            if running.is_none_or(has_background_processes)
                || session.has_earlier_runs(&self.children, &self.context)
            {
                // Its background jobs know the shell as their parent.
                continue;
            }
            if let Some(shell) = &mut session.shell {
                shell.ending = true;
            }
            self.sessions.kill_shell(*number, &self.children, &self.context);
        }
    }
}

impl Session {
    /// Whether several callers may open it. A session with a kernel may have a name as well, but it is opened in another
    /// way and does not count among these.
    fn is_shared(&self) -> bool {
        self.open.sharing.is_some() && !matches!(self.kind, SessionKind::Kernel(_))
    }

    /// The name that a client chose.
    fn chosen_name(&self) -> Option<&str> {
        self.open.sharing.as_ref()?.name.as_deref()
    }

    /// Whether its first shell has not started yet.
    fn is_opening(&self) -> bool {
        !self.openers.is_empty()
    }

    fn is_idle(&self) -> bool {
        self.current.is_none() && self.queue.is_empty() && !self.is_opening()
    }

    /// What a session that several callers may open tells about its use.
    pub(super) fn shared_status(&self) -> Option<SharedSessionStatus> {
        let sharing = self.open.sharing.as_ref()?;
        let shown = self.current.as_ref().map(|run| &run.request);
        Some(SharedSessionStatus {
            name: sharing.name.clone(),
            opened_ms: self.opened_ms,
            used_ms: self.used_ms,
            directory: self.directory.clone(),
            run: shown.map(|run| run.process.clone()).or_else(|| self.last_run.clone()),
            command: shown.map(|run| process::truncate_text(run.text.clone())),
            exit: self.last_exit,
            last_run: self.last_run.clone(),
            kind: Some(shared_kind(&self.kind, &self.open)),
            runs: self.runs,
            idle_ms: sharing.idle_ms,
            note: sharing.note.clone(),
        })
    }
}

pub(super) fn refused_open(open: &OpenSession, why: &str) -> Fault {
    fault::from_kind(FaultKind::Invalid, FaultOperation::OpenSession, &format!("{}: {why}", open.session))
}

/// What executes the runs of a shared session.
fn shared_kind(kind: &SessionKind, open: &OpenSession) -> SharedSessionKind {
    match kind {
        SessionKind::Commands(_) => SharedSessionKind::Commands,
        SessionKind::Shell | SessionKind::Kernel(_) if open.terminal.is_some() => SharedSessionKind::Terminal,
        SessionKind::Shell | SessionKind::Kernel(_) => SharedSessionKind::Pipes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_later_requests_open_a_closed_session_again() {
        let mut closed = ClosedSessions::default();
        closed.record("s", 7);
        assert!(closed.is_closed_since("s", 6));
        assert!(!closed.is_closed_since("s", 8) && !closed.is_closed_since("t", 6));
        closed.record("s", 9);
        closed.record("s", 7);
        assert!(closed.is_closed_since("s", 8), "the later request decides");
        for number in 0..MAX_CLOSED_SESSIONS {
            closed.record(&number.to_string(), 1);
        }
        assert!(!closed.is_closed_since("s", 8), "the oldest is forgotten");
        assert_eq!(closed.closed.len(), MAX_CLOSED_SESSIONS);
    }
}
