//! Contexts: they run code with the state that earlier code left.
//!
//! A context is a session of the agent with a kernel, so it outlives this server, and only the agent knows which
//! contexts exist. A kernel that has died is started again by the next run, with empty state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::process::Directory;
use domain::{Backpressure, ContextId, Identity, Language, Owner, SandboxId, SessionId};
use wire::process::OpenKernel;
use wire::{FaultKind, Reply, Request};

use crate::agent_client::within;
use crate::core::new_process_id;
use crate::following::Place;
use crate::registry::Handle;
use crate::telling::Interrupter;
use crate::{Busy, Following, OpenSession, Reach, Run, RunPlace, Running, Service, ServiceError};
use crate::{faults, kernels, translate};

/// How many contexts a sandbox may have. Each is a process with an interpreter in it.
pub const MOST_CONTEXTS: usize = 64;

/// How long a kernel may take to become ready; the agent gives up a little earlier.
const READY: Duration = Duration::from_secs(70);

pub(crate) const SIGINT: i32 = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenContext {
    pub language: Language,
    pub identity: Identity,
    pub directory: Option<Directory>,
    pub env: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    pub id: ContextId,
    pub language: Language,
    pub busy: bool,
}

/// Code for a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunCode {
    pub code: String,
    pub deadline: Option<Duration>,
    pub busy: Busy,
    pub unread: Unread,
}

/// The treatment of code whose reader disconnects before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    Keep,
    Interrupt,
}

impl OpenContext {
    /// Uses the default directory and the default user.
    pub fn new(language: Language) -> Self {
        Self { language, identity: Identity::Default, directory: None, env: BTreeMap::new() }
    }
}

impl RunCode {
    /// Has no deadline, is refused while other code runs, and runs on if its reader disconnects.
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), deadline: None, busy: Busy::Refuse, unread: Unread::Keep }
    }
}

/// The context of a language that is used when the caller names none.
pub fn default_context(language: &Language) -> ContextId {
    let hash = blake3::hash(format!("default context {language}").as_bytes());
    let mut entropy = [0; 16];
    entropy.copy_from_slice(&hash.as_bytes()[..16]);
    ContextId::from_entropy(entropy)
}

impl Service {
    /// Opens a context; it is ready when this returns.
    pub async fn open_context(
        &self,
        owner: &Owner,
        id: &SandboxId,
        request: OpenContext,
    ) -> Result<Context, ServiceError> {
        let context = new_process_id()?;
        self.open_context_as(owner, id, &context, request).await
    }

    /// Like [`Service::open_context`], with a given id.
    async fn open_context_as(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
        request: OpenContext,
    ) -> Result<Context, ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        if contexts_of(&handle).await?.len() >= MOST_CONTEXTS {
            return Err(ServiceError::TooManyContexts { id: id.clone(), limit: MOST_CONTEXTS });
        }
        let OpenContext { language, identity, directory, env } = request;
        let kernel = kernels::of(&language);
        let open = OpenSession { identity, directory, env, terminal: None, nest: None };
        let open = OpenKernel { open: translate::open_session(context, open), kernel };
        let agent = &handle.agent;
        let mut connection = agent.call(Request::OpenKernel(open)).await?;
        let answer = within(READY, "wait for the kernel to be ready", connection.answer()).await;
        match answer.map_err(|source| agent.failed("answer", source))? {
            Ok(Reply::Ok) => Ok(Context { id: context.clone(), language, busy: false }),
            Ok(_) => Err(agent.unexpected()),
            Err(fault) => Err(faults::of_kernel(agent, &language, fault)),
        }
    }

    /// All contexts of a sandbox, sorted by id.
    pub async fn contexts(&self, owner: &Owner, id: &SandboxId) -> Result<Vec<Context>, ServiceError> {
        contexts_of(&*self.0.reach(owner, id)?).await
    }

    pub async fn context(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
    ) -> Result<Context, ServiceError> {
        let found = self.contexts(owner, id).await?.into_iter().find(|found| found.id == *context);
        found.ok_or_else(|| ServiceError::NoSession(context.clone()))
    }

    /// Ends a context with everything that runs in it.
    pub async fn close_context(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
    ) -> Result<(), ServiceError> {
        self.context(owner, id, context).await?;
        self.close_session(owner, id, context).await
    }

    /// Restarts a context: its state is lost, and everything that runs in it ends.
    pub async fn restart_context(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
    ) -> Result<(), ServiceError> {
        self.context(owner, id, context).await?;
        let (handle, _activity) = self.0.enter(owner, id)?;
        let request = Request::RestartSession { session: context.as_str().to_owned() };
        match handle.agent.ask(request).await? {
            Ok(Reply::Ok) => Ok(()),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(faults::of_session(&handle.agent, context, fault)),
        }
    }

    /// Ends all contexts of a language, and returns how many there were.
    pub async fn close_contexts(
        &self,
        owner: &Owner,
        id: &SandboxId,
        language: &Language,
    ) -> Result<usize, ServiceError> {
        let contexts = self.contexts(owner, id).await?;
        let mut closed = 0;
        for context in contexts.iter().filter(|context| context.language == *language) {
            match self.close_session(owner, id, &context.id).await {
                Ok(()) => closed += 1,
                // Another request has closed it meanwhile.
                Err(ServiceError::NoSession(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(closed)
    }

    /// Runs code in a context.
    pub async fn run_code(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
        run: RunCode,
    ) -> Result<Running, ServiceError> {
        let running = self.begin_code(owner, id, context, run).await;
        running.inspect_err(self.0.failed("run code", owner, Some(id)))
    }

    /// Runs code in the default context of a language, which is opened if it does not exist.
    pub async fn run_default(
        &self,
        owner: &Owner,
        id: &SandboxId,
        language: &Language,
        run: RunCode,
    ) -> Result<Running, ServiceError> {
        let context = default_context(language);
        let running = match self.begin_code(owner, id, &context, run.clone()).await {
            Err(ServiceError::NoSession(_)) => {
                let opened = self.open_context_as(owner, id, &context, OpenContext::new(language.clone()));
                match opened.await {
                    // Another request opened it first, and this run can use it.
                    Ok(_) | Err(ServiceError::Taken(_)) => self.begin_code(owner, id, &context, run).await,
                    Err(error) => Err(error),
                }
            }
            begun => begun,
        };
        running.inspect_err(self.0.failed("run code", owner, Some(id)))
    }

    async fn begin_code(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
        run: RunCode,
    ) -> Result<Running, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let name = new_process_id()?;
        let slot = self.slot(&handle, &name).await?;
        let agent = handle.agent.clone();
        let RunCode { code, deadline, busy, unread } = run;
        let retention = self.0.config().output.retention;
        // No output is dropped while a client reads: a missing result could not be reconstructed.
        let backpressure = Backpressure::On { stall_limit: None };
        let (env, place) = (BTreeMap::new(), RunPlace::Shell);
        let run = Run { text: code, directory: None, deadline, retention, backpressure, busy, env, place };
        let mut connection = agent.call(Request::Run(translate::run(context, &name, run))).await?;
        let answer = match busy {
            Busy::Queue => connection.answer().await.map_err(|source| agent.failed("answer", source))?,
            Busy::Refuse => agent.first_answer(&mut connection).await?,
        };
        match answer {
            Ok(Reply::Started { .. }) => slot.started(),
            Ok(_) => return Err(agent.unexpected()),
            Err(fault) => return Err(faults::of_session(&agent, context, fault)),
        }
        let commands = Arc::clone(&handle.commands);
        let following = Following::new(name, agent, connection, Place::At(0), commands, activity);
        let interrupter = (unread == Unread::Interrupt).then(|| Interrupter {
            service: self.clone(),
            owner: owner.clone(),
            id: id.clone(),
        });
        Ok(Running::new(following, interrupter))
    }

    /// Makes the agent listen on a port of the sandbox's loopback, for clients that probe this port before they use
    /// contexts.
    pub async fn occupy(&self, owner: &Owner, id: &SandboxId, port: u16) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        match handle.agent.ask(Request::Occupy { port }).await? {
            Ok(Reply::Ok) => Ok(()),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) => Err(handle.agent.refused(fault)),
        }
    }

    /// Interrupts the code that runs in a context. It succeeds if nothing runs.
    pub async fn interrupt(
        &self,
        owner: &Owner,
        id: &SandboxId,
        context: &ContextId,
    ) -> Result<(), ServiceError> {
        self.context(owner, id, context).await?;
        let all = self.processes(owner, id).await?;
        let Some(run) = all.iter().find(|run| run.ended.is_none() && run.session.as_ref() == Some(context))
        else {
            return Ok(());
        };
        match self.signal(owner, id, &run.process, SIGINT, Reach::Group).await {
            // The run has ended meanwhile.
            Err(ServiceError::NoProcess(_)) => Ok(()),
            interrupted => interrupted,
        }
    }
}

async fn contexts_of(handle: &Handle) -> Result<Vec<Context>, ServiceError> {
    let agent = &handle.agent;
    let sessions = match agent.ask(Request::Sessions).await? {
        Ok(Reply::Sessions(sessions)) => sessions,
        Ok(_) => return Err(agent.unexpected()),
        Err(fault) if fault.kind == FaultKind::Unsupported => Vec::new(),
        Err(fault) => return Err(agent.refused(fault)),
    };
    let context = |session: &wire::process::SessionStatus| {
        // Sessions without a kernel, or with an id or language that is not ours, are not contexts.
        let language = Language::parse(session.kernel.as_deref()?).ok()?;
        Some(Context { id: SessionId::parse(&session.session).ok()?, language, busy: session.busy })
    };
    Ok(sessions.iter().filter_map(context).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_language_has_its_own_default_context() {
        let context = |name: &str| default_context(&Language::parse(name).expect("a language"));
        assert_eq!(context("py"), context("python"));
        assert_ne!(context("javascript"), context("typescript"));
    }
}
