//! The sessions, by handle and by name. A session that is being closed has no name any more.

use std::collections::HashMap;

use crate::event_loop::handles::SessionHandle;
use crate::session::Session;

#[derive(Debug, Default)]
pub(crate) struct SessionTable {
    sessions: HashMap<SessionHandle, Session>,
    names: HashMap<String, SessionHandle>,
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
            && self.find(&session.name) == Some(number)
        {
            self.names.remove(&session.name);
        }
    }

    /// Frees the name of a session that is closing.
    pub(crate) fn free_name(&mut self, name: &str) {
        self.names.remove(name);
    }

    pub(crate) fn find(&self, name: &str) -> Option<SessionHandle> {
        self.names.get(name).copied()
    }

    pub(crate) fn get(&self, number: &SessionHandle) -> Option<&Session> {
        self.sessions.get(number)
    }

    pub(crate) fn get_mut(&mut self, number: &SessionHandle) -> Option<&mut Session> {
        self.sessions.get_mut(number)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Session> {
        self.sessions.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.sessions.len()
    }
}
