//! Code in contexts of the core, under the names that clients choose for sessions.

use std::time::Duration;

use domain::process::{MissingDirectory, WorkingDirectory};
use domain::{ContextId, Language, LanguageRuntime, SessionName};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use service::{
    BusyPolicy, ContextOpening, NamedContext, NamedContextRequest, OpenContextRequest, RunCodeRequest,
    SandboxRef, ServiceError, SharedSessionRequest, context_of_name, draw_context_name,
};

use super::outputs::{self, CodeRunStatus, RunReport, unresponsive_sandbox};
use crate::aio::problem::AioProblem;

/// How many sessions without a chosen name are kept for each language. Each is a process with an interpreter in it.
const MAX_ANONYMOUS_SESSIONS: usize = 8;
/// How long a run waits at most for earlier runs of its session, and for the end of its own.
const MAX_QUEUE_TIME: Duration = Duration::from_secs(600);

/// Code for a session.
pub(super) struct SessionCode {
    pub(super) session: CodeSession,
    pub(super) code: String,
    pub(super) timeout: Duration,
    pub(super) lifetime: SessionLifetime,
}

/// A session, as it is opened if it does not exist.
#[derive(Clone)]
pub(super) struct CodeSession {
    pub(super) language: Language,
    /// `None` opens a new session.
    pub(super) name: Option<SessionName>,
    pub(super) directory: Option<String>,
    /// After how much time without a run it is closed.
    pub(super) idle_limit: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionLifetime {
    /// The session ends with its code.
    OneRun,
    UntilIdle,
}

/// The note that this front stores with a context.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ContextNote {
    /// Whether the client chose no name.
    pub(super) anonymous: bool,
    /// The directory in which it was opened, unless it is the default one.
    pub(super) directory: Option<String>,
}

impl ContextNote {
    pub(super) fn of_context(context: &NamedContext) -> Self {
        let note = context.note.as_deref().map(serde_json::from_str);
        note.and_then(Result::ok).unwrap_or_default()
    }

    /// The note as text; the directory is left out if it is too long.
    pub(super) fn to_text(&self) -> Option<String> {
        let is_short = |text: &String| text.len() <= SharedSessionRequest::MAX_NOTE_BYTES;
        let text = serde_json::to_string(self).ok();
        text.filter(is_short)
            .or_else(|| serde_json::to_string(&Self { directory: None, ..self.clone() }).ok())
    }
}

/// The contexts of a language that clients of this front have opened.
pub(super) async fn list_sessions(
    sandbox: &SandboxRef,
    language: &Language,
) -> Result<Vec<NamedContext>, ServiceError> {
    let mut contexts = sandbox.contexts().list_named_contexts().await?;
    contexts.retain(|context| context.context.language == *language);
    Ok(contexts)
}

/// Closes a session.
pub(super) async fn close_session(
    sandbox: &SandboxRef,
    language: &Language,
    name: &SessionName,
) -> Result<(), ServiceError> {
    sandbox.contexts().close_context(&context_of_name(language, name)).await
}

/// Why a session could not be opened.
#[derive(Debug)]
pub(super) enum OpenSessionError {
    Directory(String),
    Problem(AioProblem),
}

impl From<OpenSessionError> for AioProblem {
    fn from(error: OpenSessionError) -> Self {
        match error {
            OpenSessionError::Directory(reason) => Self::bad_request(reason),
            OpenSessionError::Problem(problem) => problem,
        }
    }
}

/// Opens a session or finds it, and returns its name.
pub(super) async fn open_session(
    sandbox: &SandboxRef,
    session: CodeSession,
) -> Result<(SessionName, ContextOpening), OpenSessionError> {
    let problem = |error: ServiceError| OpenSessionError::Problem(error.into());
    let CodeSession { language, name, directory, idle_limit } = session;
    let note = ContextNote { anonymous: name.is_none(), directory: directory.clone() };
    let name = match name {
        Some(name) => name,
        None => {
            close_oldest_anonymous(sandbox, &language, MAX_ANONYMOUS_SESSIONS).await.map_err(problem)?;
            draw_context_name().map_err(problem)?
        }
    };
    let has_directory = directory.is_some();
    let start =
        directory.map(|path| WorkingDirectory { path, missing: MissingDirectory::Fail, expand: false });
    let open = OpenContextRequest { directory: start, ..OpenContextRequest::new(language.clone()) };
    let request =
        NamedContextRequest { name: name.clone(), open, idle_limit: Some(idle_limit), note: note.to_text() };
    let mut opened = sandbox.contexts().open_named_context(request.clone()).await;
    if matches!(opened, Err(ServiceError::TooManyContexts { .. })) {
        close_oldest_anonymous(sandbox, &language, 1).await.map_err(problem)?;
        opened = sandbox.contexts().open_named_context(request).await;
    }
    match opened {
        Ok(opening) => Ok((name, opening)),
        Err(error @ ServiceError::File(_)) if has_directory => {
            Err(OpenSessionError::Directory(error.to_string()))
        }
        Err(error @ ServiceError::NoKernel { .. }) => Err(OpenSessionError::Problem(AioProblem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            error.to_string(),
        ))),
        Err(error) => Err(problem(error)),
    }
}

/// Runs code in a session, which is opened if it does not exist. The run continues if the client disconnects, until its
/// timeout, so that a session for one run is always closed.
pub(super) async fn run_in_session(
    sandbox: &SandboxRef,
    call: SessionCode,
) -> Result<(SessionName, RunReport), AioProblem> {
    let sandbox = sandbox.clone();
    let running = tokio::spawn(async move {
        // Earlier runs of the session come first, and a change of directory has a run of its own. A sandbox that does not
        // report the end of a run must not keep this task.
        let limit = call.timeout * 2 + MAX_QUEUE_TIME;
        let ended = tokio::time::timeout(limit, run_to_end(&sandbox, call)).await;
        ended.unwrap_or_else(|_elapsed| Err(unresponsive_sandbox()))
    });
    running
        .await
        .unwrap_or_else(|_panic| Err(AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error")))
}

async fn run_to_end(sandbox: &SandboxRef, call: SessionCode) -> Result<(SessionName, RunReport), AioProblem> {
    let SessionCode { session, code, timeout, lifetime } = call;
    let language = session.language.clone();
    // A session that is open needs no request but the run itself.
    if let Some(name) = session.name.clone() {
        let context = context_of_name(&language, &name);
        match run_in_context(sandbox, &context, &session, &code, timeout).await {
            Err(ServiceError::NoSession(_)) => {}
            ended => return Ok((name, ended?)),
        }
    }
    let unnamed = session.name.clone();
    let (name, opening) = match open_session(sandbox, session.clone()).await {
        Ok(opened) => opened,
        Err(OpenSessionError::Directory(reason)) => {
            let name = unnamed.map_or_else(draw_context_name, Ok)?;
            return Ok((name, RunReport::directory_error(&reason)));
        }
        Err(OpenSessionError::Problem(problem)) => return Err(problem),
    };
    let context = context_of_name(&language, &name);
    // A new session is in its directory already.
    let directory = session.directory.clone().filter(|_| opening == ContextOpening::Found);
    let opened = CodeSession { directory, ..session };
    let ended = run_in_context(sandbox, &context, &opened, &code, timeout).await;
    if lifetime == SessionLifetime::OneRun
        && let Err(error) = sandbox.contexts().close_context(&context).await
    {
        tracing::debug!(sandbox = %sandbox.id(), %error, "failed to close a context; it ends when it has been idle");
    }
    Ok((name, ended?))
}

/// Runs code in an open context, after it has changed to the directory.
async fn run_in_context(
    sandbox: &SandboxRef,
    context: &ContextId,
    session: &CodeSession,
    code: &str,
    timeout: Duration,
) -> Result<RunReport, ServiceError> {
    if let Some(path) = &session.directory {
        let changed = change_directory(sandbox, context, &session.language, path, timeout).await?;
        if changed.status != CodeRunStatus::Ok {
            let reason = changed.error_value().unwrap_or(&changed.message);
            return Ok(RunReport::directory_error(reason));
        }
    }
    start_code(sandbox, context, code.to_owned(), timeout).await
}

/// Lets a context change its directory by code of its language.
pub(super) async fn change_directory(
    sandbox: &SandboxRef,
    context: &ContextId,
    language: &Language,
    path: &str,
    timeout: Duration,
) -> Result<RunReport, ServiceError> {
    // A JSON text is a text of both languages.
    let path = json!(path);
    let code = match language.runtime() {
        LanguageRuntime::JavaScript | LanguageRuntime::TypeScript => format!("process.chdir({path});"),
        LanguageRuntime::Python | LanguageRuntime::Bash | LanguageRuntime::Jupyter(_) => {
            format!("__import__('os').chdir({path})")
        }
    };
    start_code(sandbox, context, code, timeout).await
}

async fn start_code(
    sandbox: &SandboxRef,
    context: &ContextId,
    code: String,
    timeout: Duration,
) -> Result<RunReport, ServiceError> {
    let run =
        RunCodeRequest { deadline: Some(timeout), busy: BusyPolicy::Queue, ..RunCodeRequest::new(code) };
    outputs::collect_code_run(sandbox.contexts().run_code(context, run).await?).await
}

/// Closes idle sessions without a chosen name, those first that were not used for the longest time, until there are
/// fewer than `most`.
async fn close_oldest_anonymous(
    sandbox: &SandboxRef,
    language: &Language,
    most: usize,
) -> Result<(), ServiceError> {
    let mut sessions = list_sessions(sandbox, language).await?;
    sessions.retain(|session| ContextNote::of_context(session).anonymous);
    let surplus = (sessions.len() + 1).saturating_sub(most);
    sessions.retain(|session| !session.context.busy);
    sessions.sort_by_key(|session| session.used);
    for session in sessions.iter().take(surplus) {
        match sandbox.contexts().close_context(&session.context.id).await {
            Ok(()) | Err(ServiceError::NoSession(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_directory_is_left_out_of_the_note() {
        let note = ContextNote { anonymous: true, directory: Some("/x".to_owned()) };
        let text = note.to_text().unwrap();
        assert_eq!(serde_json::from_str::<ContextNote>(&text).unwrap(), note);
        let long = ContextNote { directory: Some("/x".repeat(2000)), ..note };
        let text = long.to_text().unwrap();
        assert_eq!(
            serde_json::from_str::<ContextNote>(&text).unwrap(),
            ContextNote { directory: None, ..long }
        );
    }
}
