//! `/v1/code`: Python and JavaScript by one API.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::context_run::{self, CodeSession, SessionCode, SessionLifetime};
use super::jupyter::{self, run_response};
use super::limits::{
    DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS, parse_code, parse_directory, parse_timeout,
};
use super::node_process::{self, NodeProcess};
use super::nodejs;
use super::outputs::{CodeOutput, CodeRunStatus, RunReport, StreamName};
use super::session_name::parse_session_name;
use crate::aio::AioState;
use crate::aio::body::{AioJson, require_field};
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

#[derive(Deserialize)]
pub(in crate::aio) struct CodeExecuteBody {
    language: Option<CodeLanguage>,
    code: Option<String>,
    timeout: Option<i64>,
    cwd: Option<String>,
    stateful: Option<bool>,
    session_id: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CodeLanguage {
    Python,
    JavaScript,
}

#[derive(Serialize)]
pub(in crate::aio) struct CodeExecuteData {
    language: CodeLanguage,
    status: CodeRunStatus,
    outputs: Vec<CodeOutput>,
    code: String,
    stdout: String,
    stderr: String,
    exit_code: i32,
    traceback: Option<Vec<String>>,
    session_id: Option<String>,
}

/// `POST /v1/code/execute`: a client that names a session wants its state.
pub(in crate::aio) async fn execute_code(
    target: AioTarget,
    AioJson(body): AioJson<CodeExecuteBody>,
) -> Result<Json<ResponseEnvelope<CodeExecuteData>>, AioProblem> {
    let language = require_field(body.language, "language")?;
    let (code, timeout) = (parse_code(body.code)?, parse_timeout(body.timeout)?);
    let (name, directory) = (parse_session_name(body.session_id)?, parse_directory(body.cwd)?);
    let is_stateful = body.stateful.unwrap_or_default() || name.is_some();
    target.begin_stream()?;
    let (session, report) = if language == CodeLanguage::JavaScript && !is_stateful {
        let (stdin, files) = (None, BTreeMap::new());
        let process = NodeProcess { code: code.clone(), stdin, files, directory, timeout };
        (None, node_process::run_process(&target.sandbox, process).await?)
    } else {
        let (language, idle_limit) = match language {
            CodeLanguage::Python => (jupyter::python(), jupyter::SESSION_TIMEOUT),
            CodeLanguage::JavaScript => (nodejs::javascript(), nodejs::DEFAULT_IDLE_LIMIT),
        };
        let lifetime = if is_stateful { SessionLifetime::UntilIdle } else { SessionLifetime::OneRun };
        let session = CodeSession { language, name, directory, idle_limit };
        let call = SessionCode { session, code: code.clone(), timeout, lifetime };
        let (name, report) = context_run::run_in_session(&target.sandbox, call).await?;
        (is_stateful.then(|| name.as_str().to_owned()), report)
    };
    let (stdout, stderr) = (report.text_of(StreamName::Stdout), report.text_of(StreamName::Stderr));
    let traceback = report.traceback();
    let RunReport { status, message, outputs, exit_code, .. } = report;
    let data = CodeExecuteData {
        language,
        status,
        outputs,
        code,
        stdout,
        stderr,
        exit_code,
        traceback,
        session_id: session,
    };
    Ok(run_response(status, message, data))
}

/// `GET /v1/code/info`: the languages that the image can run.
pub(super) async fn get_info(
    State(state): State<AioState>,
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let tools = state.tools.detect_tools(&target.sandbox).await?;
    let languages = [
        (
            CodeLanguage::Python,
            "Python with state, run by the interpreter of the image",
            tools.python_version(),
        ),
        (CodeLanguage::JavaScript, "JavaScript, run by Node.js of the image", tools.node_version()),
    ];
    let described = languages.into_iter().filter_map(|(language, description, version)| {
        Some(json!({
            "language": language,
            "description": description,
            "runtime_version": version?,
            "default_timeout": DEFAULT_TIMEOUT_SECONDS,
            "max_timeout": MAX_TIMEOUT_SECONDS,
            "details": {},
        }))
    });
    Ok(data_response(json!({"languages": described.collect::<Vec<_>>()})))
}
