//! Contexts: they run code with the state that earlier code left.
//!
//! A context is a session of the agent with a kernel, so it outlives this server, and only the agent knows which
//! contexts exist. A kernel that has died is started again by the next run, with empty state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::process::WorkingDirectory;
use domain::{Backpressure, ContextId, Language, UserIdentity};
use wire::process::{OpenKernel, OpenSession, SessionSharing, SessionStatus};
use wire::{AgentRequest, FaultKind};

use crate::agent::client::with_timeout;
use crate::agent::reply::ProcessStarted;
use crate::agent::{faults, translate};
use crate::core::{draw_entropy, new_process_id};
use crate::exec::kernels;
use crate::exec::output_stream::ReadPosition;
use crate::sandboxes::registry::SandboxHandle;
use crate::{
    BusyPolicy, CodeExecution, OpenSessionRequest, OutputStream, RunShell, SandboxRef, ServiceError,
    SessionRunRequest, SignalTarget,
};

/// How many contexts a sandbox may have. Each is a process with an interpreter in it.
pub const MAX_CONTEXTS: usize = 64;

/// How long a kernel may take to become ready; the agent gives up a little earlier.
const KERNEL_READY_TIMEOUT: Duration = Duration::from_secs(70);

pub(crate) const SIGINT: i32 = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenContextRequest {
    pub language: Language,
    pub identity: UserIdentity,
    pub directory: Option<WorkingDirectory>,
    pub env: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeContext {
    pub id: ContextId,
    pub language: Language,
    pub busy: bool,
}

/// Code for a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunCodeRequest {
    pub code: String,
    pub deadline: Option<Duration>,
    pub busy: BusyPolicy,
    pub unread: DisconnectPolicy,
}

/// The treatment of code whose reader disconnects before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisconnectPolicy {
    Keep,
    Interrupt,
}

impl OpenContextRequest {
    /// Uses the default directory and the default user.
    pub fn new(language: Language) -> Self {
        Self { language, identity: UserIdentity::Default, directory: None, env: BTreeMap::new() }
    }
}

impl RunCodeRequest {
    /// Has no deadline, is refused while other code runs, and runs on if its reader disconnects.
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), deadline: None, busy: BusyPolicy::Refuse, unread: DisconnectPolicy::Keep }
    }
}

/// The context of a language that is used when the caller names none.
pub fn default_context_id(language: &Language) -> ContextId {
    let hash = blake3::hash(format!("default context {language}").as_bytes());
    let mut entropy = [0; 16];
    entropy.copy_from_slice(&hash.as_bytes()[..16]);
    ContextId::from_entropy(entropy)
}

/// The contexts of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxContexts<'a>(pub(crate) &'a SandboxRef);

impl SandboxContexts<'_> {
    /// Opens a context; it is ready when this returns.
    pub async fn open_context(self, request: OpenContextRequest) -> Result<CodeContext, ServiceError> {
        let context = ContextId::from_entropy(draw_entropy()?);
        self.open_context_as(&context, request, None).await
    }

    /// Like [`SandboxContexts::open_context`], with a given id, and with a name that the agent keeps.
    pub(super) async fn open_context_as(
        self,
        context: &ContextId,
        request: OpenContextRequest,
        sharing: Option<SessionSharing>,
    ) -> Result<CodeContext, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        if read_contexts(handle).await?.len() >= MAX_CONTEXTS {
            return Err(ServiceError::TooManyContexts { id: handle.id.clone(), limit: MAX_CONTEXTS });
        }
        let OpenContextRequest { language, identity, directory, env } = request;
        let kernel = kernels::kernel_for(&language);
        let open = OpenSessionRequest { identity, directory, env, terminal: None, isolation: None };
        let open = OpenSession { sharing, ..translate::wire_open_session(&context.to_session(), open) };
        let open = OpenKernel { open, kernel };
        let agent = &handle.agent;
        let mut connection = agent.open_request(AgentRequest::OpenKernel(open)).await?;
        let answer =
            with_timeout(KERNEL_READY_TIMEOUT, "wait for the kernel to be ready", connection.next_answer())
                .await;
        match agent.expect_reply(answer.map_err(|source| agent.agent_error("answer", source))?)? {
            Ok(()) => Ok(CodeContext { id: context.clone(), language, busy: false }),
            Err(fault) => Err(faults::kernel_error(agent, &language, fault)),
        }
    }

    /// All contexts of a sandbox, sorted by id.
    pub async fn list_contexts(self) -> Result<Vec<CodeContext>, ServiceError> {
        read_contexts(self.0.usable_now()?).await
    }

    pub async fn find_context(self, context: &ContextId) -> Result<CodeContext, ServiceError> {
        let found = self.list_contexts().await?.into_iter().find(|found| found.id == *context);
        found.ok_or_else(|| ServiceError::NoSession(context.to_session()))
    }

    /// Ends a context with everything that runs in it.
    pub async fn close_context(self, context: &ContextId) -> Result<(), ServiceError> {
        self.find_context(context).await?;
        self.0.sessions().close_session(&context.to_session()).await
    }

    /// Restarts a context: its state is lost, and everything that runs in it ends.
    pub async fn restart_context(self, context: &ContextId) -> Result<(), ServiceError> {
        self.find_context(context).await?;
        let (handle, _activity) = self.0.begin_use()?;
        let request = AgentRequest::RestartSession { session: context.as_str().to_owned() };
        let restarted = handle.agent.request::<()>(request).await?;
        restarted.map_err(|fault| faults::session_error(&handle.agent, &context.to_session(), fault))
    }

    /// Ends all contexts of a language, and returns how many there were.
    pub async fn close_contexts(self, language: &Language) -> Result<usize, ServiceError> {
        let contexts = self.list_contexts().await?;
        let mut closed = 0;
        for context in contexts.iter().filter(|context| context.language == *language) {
            match self.0.sessions().close_session(&context.id.to_session()).await {
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
        self,
        context: &ContextId,
        run: RunCodeRequest,
    ) -> Result<CodeExecution, ServiceError> {
        let running = self.start_code(context, run).await;
        running.inspect_err(self.0.record_failure("run code"))
    }

    /// Runs code in the default context of a language, which is opened if it does not exist.
    pub async fn run_in_default_context(
        self,
        language: &Language,
        run: RunCodeRequest,
    ) -> Result<CodeExecution, ServiceError> {
        let context = default_context_id(language);
        let running = match self.start_code(&context, run.clone()).await {
            Err(ServiceError::NoSession(_)) => {
                let opened = self.open_context_as(&context, OpenContextRequest::new(language.clone()), None);
                match opened.await {
                    // Another request opened it first, and this run can use it.
                    Ok(_) | Err(ServiceError::ContextExists(_)) => self.start_code(&context, run).await,
                    Err(error) => Err(error),
                }
            }
            begun => begun,
        };
        running.inspect_err(self.0.record_failure("run code"))
    }

    async fn start_code(
        self,
        context: &ContextId,
        run: RunCodeRequest,
    ) -> Result<CodeExecution, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let (session, name) = (context.to_session(), new_process_id()?);
        let slot = self.0.processes().take_command_slot(&name).await?;
        let agent = handle.agent.clone();
        let RunCodeRequest { code, deadline, busy, unread } = run;
        let retention = self.0.core.config().output.retention;
        // No output is dropped while a client reads: a missing result could not be reconstructed.
        let backpressure = Backpressure::On { stall_limit: None };
        let (env, place) = (BTreeMap::new(), RunShell::Shell);
        let run = SessionRunRequest {
            text: code,
            directory: None,
            deadline,
            retention,
            backpressure,
            busy,
            env,
            shell: place,
        };
        let mut connection =
            agent.open_request(AgentRequest::Run(translate::wire_run(&session, &name, run))).await?;
        let answer = match busy {
            BusyPolicy::Queue => agent.late_answer(&mut connection).await?,
            BusyPolicy::Refuse => agent.first_answer(&mut connection).await?,
        };
        match answer {
            Ok(ProcessStarted) => slot.mark_started(),
            Err(fault) => return Err(faults::session_error(&agent, &session, fault)),
        }
        let commands = Arc::clone(&handle.commands);
        let following = OutputStream::new(name, agent, connection, ReadPosition::At(0), commands, activity);
        let sandbox = (unread == DisconnectPolicy::Interrupt).then(|| self.0.clone());
        Ok(CodeExecution::new(following, sandbox))
    }

    /// Interrupts the code that runs in a context. It succeeds if nothing runs.
    pub async fn interrupt_context(self, context: &ContextId) -> Result<(), ServiceError> {
        self.find_context(context).await?;
        let all = self.0.processes().list_processes().await?;
        let session = context.to_session();
        let Some(run) = all.iter().find(|run| run.ended.is_none() && run.session.as_ref() == Some(&session))
        else {
            return Ok(());
        };
        match self.0.processes().signal_process(&run.process, SIGINT, SignalTarget::Group).await {
            // The run has ended meanwhile.
            Err(ServiceError::NoProcess(_)) => Ok(()),
            interrupted => interrupted,
        }
    }
}

async fn read_contexts(handle: &SandboxHandle) -> Result<Vec<CodeContext>, ServiceError> {
    let agent = &handle.agent;
    let sessions: Vec<SessionStatus> = match agent.request(AgentRequest::Sessions).await? {
        Ok(sessions) => sessions,
        Err(fault) if fault.kind == FaultKind::Unsupported => Vec::new(),
        Err(fault) => return Err(agent.fault_error(fault)),
    };
    Ok(sessions.iter().filter_map(context_of_status).collect())
}

/// Sessions without a kernel, or with an id or language that is not ours, are not contexts.
pub(super) fn context_of_status(session: &SessionStatus) -> Option<CodeContext> {
    let language = Language::parse(session.kernel.as_deref()?).ok()?;
    Some(CodeContext { id: ContextId::parse(&session.session).ok()?, language, busy: session.busy })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_language_has_its_own_default_context() {
        let context = |name: &str| default_context_id(&Language::parse(name).expect("a language"));
        assert_eq!(context("py"), context("python"));
        assert_ne!(context("javascript"), context("typescript"));
    }
}
