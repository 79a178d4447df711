//! `/v1/jupyter`: Python with state. The kernel is the core's, which needs nothing but the interpreter of the image, so
//! every kernel that a client names is that one.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use axum::Json;
use domain::Language;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{ErrorKind, MAX_CONTEXTS, NamedContext, ServiceError};

use super::context_run::{self, CodeSession, OpenSessionError, SessionCode, SessionLifetime};
use super::limits::{parse_code, parse_directory, parse_timeout};
use super::outputs::{CodeOutput, CodeRunStatus, RunReport};
use super::session_name::{PathSession, parse_session_name};
use crate::aio::body::AioJson;
use crate::aio::envelope::{ResponseEnvelope, data_response, success_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// The only kernel.
const KERNEL_NAME: &str = "python3";
/// After how much time without a run a session is closed.
pub(super) const SESSION_TIMEOUT: Duration = Duration::from_secs(30 * 60);

#[derive(Deserialize)]
pub(super) struct JupyterExecuteBody {
    code: Option<String>,
    timeout: Option<i64>,
    /// Accepted with any value: there is one kernel.
    #[serde(rename = "kernel_name")]
    _kernel_name: Option<String>,
    session_id: Option<String>,
    cwd: Option<String>,
}

#[derive(Serialize)]
pub(super) struct JupyterExecuteData {
    kernel_name: &'static str,
    session_id: String,
    status: CodeRunStatus,
    execution_count: Option<u64>,
    outputs: Vec<CodeOutput>,
    code: String,
    msg_id: Option<String>,
}

pub(super) fn python() -> Language {
    Language::parse("python").expect("it is a language")
}

/// `POST /v1/jupyter/execute`: without a session, the code runs in a new one that stays open.
pub(super) async fn execute_code(
    target: AioTarget,
    AioJson(body): AioJson<JupyterExecuteBody>,
) -> Result<Json<ResponseEnvelope<JupyterExecuteData>>, AioProblem> {
    let call = SessionCode {
        code: parse_code(body.code)?,
        timeout: parse_timeout(body.timeout)?,
        lifetime: SessionLifetime::UntilIdle,
        session: CodeSession {
            language: python(),
            name: parse_session_name(body.session_id)?,
            directory: parse_directory(body.cwd)?,
            idle_limit: SESSION_TIMEOUT,
        },
    };
    target.begin_stream()?;
    let code = call.code.clone();
    let (session, report) = context_run::run_in_session(&target.sandbox, call).await?;
    let RunReport { status, message, execution_count, outputs, .. } = report;
    let data = JupyterExecuteData {
        kernel_name: KERNEL_NAME,
        session_id: session.as_str().to_owned(),
        status,
        execution_count,
        outputs,
        code,
        msg_id: None,
    };
    Ok(run_response(status, message, data))
}

/// An error of the code is no error of the request.
pub(super) fn run_response<T>(status: CodeRunStatus, message: String, data: T) -> Json<ResponseEnvelope<T>> {
    Json(match status {
        CodeRunStatus::Ok => ResponseEnvelope::success(message, data),
        CodeRunStatus::Error | CodeRunStatus::Timeout => ResponseEnvelope::failure(message, data),
    })
}

/// `GET /v1/jupyter/info`
pub(super) async fn get_info(target: AioTarget) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let active = context_run::list_sessions(&target.sandbox, &python()).await?.len();
    Ok(data_response(json!({
        "default_kernel": KERNEL_NAME,
        "available_kernels": [KERNEL_NAME],
        "active_sessions": active,
        "session_timeout_seconds": SESSION_TIMEOUT.as_secs(),
        "max_sessions": MAX_CONTEXTS,
        "description": "Python with state, run by the interpreter of the sandbox's image",
        "kernel_detection": "python3 in the PATH of the sandbox",
    })))
}

#[derive(Serialize)]
pub(super) struct SessionsData {
    sessions: BTreeMap<String, JupyterSessionData>,
}

#[derive(Serialize)]
struct JupyterSessionData {
    kernel_name: &'static str,
    last_used: f64,
    age_seconds: u64,
}

impl JupyterSessionData {
    fn of_context(context: &NamedContext) -> Self {
        Self {
            kernel_name: KERNEL_NAME,
            last_used: epoch_seconds(context.used),
            age_seconds: age_seconds(context.used),
        }
    }
}

pub(super) fn epoch_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

pub(super) fn age_seconds(since: SystemTime) -> u64 {
    since.elapsed().unwrap_or_default().as_secs()
}

/// `GET /v1/jupyter/sessions`
pub(super) async fn list_sessions(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<SessionsData>>, AioProblem> {
    let sessions = context_run::list_sessions(&target.sandbox, &python()).await?;
    let session =
        |context: &NamedContext| (context.name.as_str().to_owned(), JupyterSessionData::of_context(context));
    Ok(data_response(SessionsData { sessions: sessions.iter().map(session).collect() }))
}

#[derive(Deserialize)]
pub(super) struct CreateJupyterSessionBody {
    session_id: Option<String>,
    #[serde(rename = "kernel_name")]
    _kernel_name: Option<String>,
    cwd: Option<String>,
}

/// `POST /v1/jupyter/sessions/create`: a session that exists is left as it is.
pub(super) async fn create_session(
    target: AioTarget,
    AioJson(body): AioJson<CreateJupyterSessionBody>,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let session = CodeSession {
        language: python(),
        name: parse_session_name(body.session_id)?,
        directory: parse_directory(body.cwd)?,
        idle_limit: SESSION_TIMEOUT,
    };
    let (name, opening) = context_run::open_session(&target.sandbox, session)
        .await
        .map_err(|error: OpenSessionError| AioProblem::from(error))?;
    let message = match opening {
        service::ContextOpening::Opened => "Session created",
        service::ContextOpening::Found => "Session already exists",
    };
    let data = json!({"session_id": name.as_str(), "kernel_name": KERNEL_NAME, "message": message});
    Ok(success_response(message, data))
}

/// `DELETE /v1/jupyter/sessions/{session_id}`
pub(super) async fn delete_session(
    target: AioTarget,
    PathSession(name): PathSession,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    match context_run::close_session(&target.sandbox, &python(), &name).await {
        Ok(()) => Ok(success_response("Session deleted", json!({"session_id": name.as_str()}))),
        Err(error) if error.kind() == ErrorKind::NoSession => {
            let data = json!({"session_id": name.as_str()});
            Ok(Json(ResponseEnvelope::failure("Session not found", data)))
        }
        Err(error) => Err(error.into()),
    }
}

/// `DELETE /v1/jupyter/sessions`
pub(super) async fn delete_sessions(target: AioTarget) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let mut closed = 0;
    for session in context_run::list_sessions(&target.sandbox, &python()).await? {
        match target.sandbox.contexts().close_context(&session.context.id).await {
            Ok(()) => closed += 1,
            // Another request has closed it meanwhile.
            Err(ServiceError::NoSession(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(success_response(format!("{closed} sessions deleted"), json!({"cleaned_sessions": closed})))
}
