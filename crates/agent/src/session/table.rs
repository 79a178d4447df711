//! The sessions, by handle and by name. A session that is being closed has no name any more.

use std::collections::HashMap;

use wire::{Fault, FaultKind, FaultOperation};

use crate::context::AgentContext;
use crate::event_loop::handles::{ProcessHandle, SessionHandle};
use crate::fault;
use crate::isolation::isolated_session::SessionNamespaces;
use crate::process::ManagedProcess;
use crate::process::child_table::ChildTable;
use crate::session::Session;
use crate::session::shared::ClosedSessions;

#[derive(Debug, Default)]
pub(crate) struct SessionTable {
    sessions: HashMap<SessionHandle, Session>,
    names: HashMap<String, SessionHandle>,
    pub(crate) closed: ClosedSessions,
}

impl SessionTable {
    pub(crate) fn insert(&mut self, number: SessionHandle, session: Session) {
        self.names.insert(session.name.clone(), number);
        self.sessions.insert(number, session);
    }

    /// Removes a session and its name, if the name is still its own: another session may have
    /// been opened under the name of one that is closing.
    pub(crate) fn remove(&mut self, number: SessionHandle) {
        if let Some(session) = self.sessions.remove(&number)
            && self.names.get(&session.name) == Some(&number)
        {
            self.names.remove(&session.name);
        }
    }

    /// Frees the name of a session that is closing.
    pub(crate) fn free_name(&mut self, name: &str) {
        self.names.remove(name);
    }

    pub(crate) fn find(&self, name: &str) -> Result<SessionHandle, Fault> {
        let number = self.names.get(name).copied();
        number.ok_or_else(|| fault::from_kind(FaultKind::NotFound, FaultOperation::FindSession, name))
    }

    pub(crate) fn get(&self, number: SessionHandle) -> Option<&Session> {
        self.sessions.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: SessionHandle) -> Option<&mut Session> {
        self.sessions.get_mut(&number)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Session> {
        self.sessions.values()
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (SessionHandle, &Session)> {
        self.sessions.iter().map(|(number, session)| (*number, session))
    }

    /// Whether the process is one of the last runs of a session that is open.
    pub(crate) fn keeps_run(&self, process: &ManagedProcess) -> bool {
        let session = process.session.as_ref().and_then(|name| self.find(name).ok());
        let session = session.and_then(|number| self.get(number));
        session.is_some_and(|session| session.recent_runs.contains(&process.number))
    }

    /// The last runs of a session that have begun, the oldest first.
    pub(crate) fn recent_runs(&self, name: &str) -> Result<impl Iterator<Item = ProcessHandle>, Fault> {
        let session = self.get(self.find(name)?);
        Ok(session.into_iter().flat_map(|session| session.recent_runs.iter().copied()))
    }

    /// Whether the session has a kernel that is not a shell.
    pub(crate) fn has_kernel(&self, name: &str) -> bool {
        let session = self.find(name).ok().and_then(|number| self.get(number));
        session.is_some_and(|session| !session.opens_with_its_shell())
    }

    /// Whether the session has such a kernel, and it has not ended.
    pub(crate) fn has_running_kernel(&self, name: &str) -> bool {
        let session = self.find(name).ok().and_then(|number| self.get(number));
        self.has_kernel(name) && session.is_some_and(|session| session.running_process().is_some())
    }

    /// The run to which the present output of the shell belongs.
    pub(crate) fn current_run(&self, number: SessionHandle) -> Option<ProcessHandle> {
        self.get(number)?.current.as_ref().map(|run| run.process)
    }

    /// Kills a session's shell or kernel with everything in it.
    pub(crate) fn kill_shell(&self, number: SessionHandle, children: &ChildTable, context: &AgentContext) {
        if let Some(running) = self.get(number).and_then(Session::running_process) {
            children.kill_tree(running, context);
        }
    }

    pub(crate) fn drop_if_closed(&mut self, number: SessionHandle) {
        let held = |session: &Session| session.namespaces.as_ref().is_some_and(SessionNamespaces::has_init);
        let runs = |session: &Session| session.runs_commands() && session.current.is_some();
        let over = |session: &Session| {
            session.closing && session.shell.is_none() && !runs(session) && !held(session)
        };
        if self.get(number).is_some_and(over) {
            self.remove(number);
        }
    }
}
