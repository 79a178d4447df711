//! Contexts that clients open under names of their choice.
//!
//! The id of such a context follows from its language and its name, so it is found without a table. The agent keeps the
//! name with what the client stored, so that all of them can be listed after a restart of the server.

use std::time::{Duration, SystemTime};

use domain::{ContextId, Language, SessionName};
use wire::AgentRequest;
use wire::process::{SessionSharing, SessionStatus};
use wire::shared_session::{IdleLimit, UpdateSession};

use crate::agent::client::AgentError;
use crate::agent::{faults, translate};
use crate::clock::time_since_boot;
use crate::core::draw_entropy;
use crate::exec::contexts::context_of_status;
use crate::exec::shared_sessions::{check_note, duration_millis};
use crate::{
    CodeContext, IdleLimitUpdate, OpenContextRequest, SandboxContexts, ServiceError, SharedSessionUpdate,
};

/// Separates these digests from all others.
const NAME_CONTEXT: &str = "coracle 2026 id of a named context";

/// A request to open a context under a name, or to find it if it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedContextRequest {
    pub name: SessionName,
    pub open: OpenContextRequest,
    /// After how much time without a run it is closed.
    pub idle_limit: Option<Duration>,
    /// A text of the caller that is stored with a new context, at most as long as that of a shared session. Code in the
    /// sandbox may read and change it.
    pub note: Option<String>,
}

/// Whether a request has opened a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextOpening {
    Opened,
    /// It was open, and its settings are those of its first request.
    Found,
}

/// A context with the name under which a client opened it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedContext {
    pub context: CodeContext,
    pub name: SessionName,
    pub opened: SystemTime,
    /// When code last began or ended to run in it.
    pub used: SystemTime,
    pub idle_limit: Option<Duration>,
    /// The text that a caller has stored with it. It comes from inside the sandbox, so no part of it can be trusted.
    pub note: Option<String>,
}

/// The context of a language with this name.
pub fn context_of_name(language: &Language, name: &SessionName) -> ContextId {
    // A language contains no zero byte.
    let digest = blake3::derive_key(NAME_CONTEXT, format!("{language}\0{}", name.as_str()).as_bytes());
    let (entropy, _) = digest.split_first_chunk::<16>().expect("a digest has 32 bytes");
    ContextId::from_entropy(*entropy)
}

/// A name for a context whose client chose none.
pub fn draw_context_name() -> Result<SessionName, ServiceError> {
    let drawn = ContextId::from_entropy(draw_entropy()?);
    Ok(SessionName::parse(drawn.as_str()).expect("an id has 32 digits"))
}

impl SandboxContexts<'_> {
    /// Opens a context under a name, or finds it. Concurrent calls open it once.
    pub async fn open_named_context(
        self,
        request: NamedContextRequest,
    ) -> Result<ContextOpening, ServiceError> {
        let NamedContextRequest { name, open, idle_limit, note } = request;
        check_note(note.as_deref())?;
        let context = context_of_name(&open.language, &name);
        let sharing = SessionSharing {
            name: Some(name.as_str().to_owned()),
            requested_ns: u64::try_from(time_since_boot().as_nanos()).unwrap_or(u64::MAX),
            max_sessions: None,
            idle_ms: idle_limit.map(duration_millis),
            note,
        };
        match self.open_context_as(&context, open, Some(sharing)).await {
            Ok(_) => Ok(ContextOpening::Opened),
            Err(ServiceError::ContextExists(_)) => Ok(ContextOpening::Found),
            Err(error) => Err(error),
        }
    }

    /// The contexts that have a name, in the order of their ids.
    pub async fn list_named_contexts(self) -> Result<Vec<NamedContext>, ServiceError> {
        let agent = &self.0.usable_now()?.agent;
        let sessions = agent.request::<Vec<SessionStatus>>(AgentRequest::Sessions).await?;
        let sessions = sessions.map_err(|fault| agent.fault_error(fault))?;
        Ok(sessions.iter().filter_map(named_context).collect())
    }

    /// Changes what is stored with a context that has a name.
    pub async fn update_named_context(
        self,
        context: &ContextId,
        update: SharedSessionUpdate,
    ) -> Result<NamedContext, ServiceError> {
        check_note(update.note.as_deref())?;
        let (handle, _activity) = self.0.begin_use()?;
        let (agent, session) = (&handle.agent, context.to_session());
        let request = AgentRequest::UpdateSession(UpdateSession {
            session: session.as_str().to_owned(),
            note: update.note,
            idle: match update.idle_limit {
                IdleLimitUpdate::Keep => None,
                IdleLimitUpdate::Never => Some(IdleLimit::Never),
                IdleLimitUpdate::After(limit) => Some(IdleLimit::Milliseconds(duration_millis(limit))),
            },
        });
        let status = agent.request::<SessionStatus>(request).await?;
        let status = status.map_err(|fault| faults::session_error(agent, &session, fault))?;
        let found = named_context(&status).filter(|found| found.context.id == *context);
        let other = || agent.agent_error("answer", AgentError::Impossible("another session"));
        found.ok_or_else(other)
    }
}

/// The agent may be hostile, so a name counts only if the id follows from it.
fn named_context(status: &SessionStatus) -> Option<NamedContext> {
    let context = context_of_status(status)?;
    let shared = translate::shared_session_use(status.shared.as_ref()?, status.terminal).ok()?;
    let name = shared.name.filter(|name| context_of_name(&context.language, name) == context.id)?;
    let (opened, used) = (shared.opened, shared.used);
    Some(NamedContext { context, name, opened, used, idle_limit: shared.idle_limit, note: shared.note })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_follows_from_language_and_name() {
        let id = |language: &str, name: &str| {
            context_of_name(
                &Language::parse(language).expect("a language"),
                &SessionName::parse(name).expect("a name"),
            )
        };
        assert_eq!(id("py", "a"), id("python", "a"));
        assert_ne!(id("python", "a"), id("python", "b"));
        assert_ne!(id("python", "a"), id("javascript", "a"));
        let drawn = draw_context_name().expect("the host has entropy");
        assert_ne!(id("python", drawn.as_str()).as_str(), drawn.as_str());
    }
}
