//! Code contexts, which keep the state of a language between runs.

use axum::Json;
use axum::response::Response;
use domain::process::{CommandLine, MissingDirectory, ProcessSpec};
use domain::{ContextId, Language};
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{CodeContext, ErrorKind, OpenContextRequest, RunCodeRequest, ServiceError, default_context_id};

use super::command::{convert_launch_error, expanded_directory};
use super::problem::{ExecdProblem, JsonOrEmpty, required_parameter};
use super::{ExecTarget, PathName, code_stream};
use crate::kit::query::QueryParams;

/// The language if none is named; clients use the same default.
const DEFAULT_LANGUAGE: &str = "python";

/// The text that identifies a client's probe for kernels, and the port that it probes.
const KERNEL_PROBE_TEXT: &str = "JUPYTER_PORT:-44771";
const KERNEL_PROBE_PORT: u16 = 44771;

#[derive(Deserialize)]
pub(super) struct CreateContextBody {
    language: Option<String>,
    cwd: Option<String>,
}

#[derive(Serialize)]
pub(super) struct ContextBody {
    id: String,
    language: String,
}

impl From<CodeContext> for ContextBody {
    fn from(context: CodeContext) -> Self {
        Self { id: context.id.to_string(), language: context.language.to_string() }
    }
}

/// `POST /code/context`: responds once the context can run code. A given directory is created if it is
/// missing.
pub(super) async fn create_context(
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<CreateContextBody>,
) -> Result<Json<ContextBody>, ExecdProblem> {
    let cwd = body.cwd.filter(|path| !path.is_empty());
    if cwd.as_ref().is_some_and(|path| path.contains('\0')) {
        return Err(ExecdProblem::invalid("`cwd` contains a NUL byte"));
    }
    let request = OpenContextRequest {
        directory: cwd.map(|path| expanded_directory(path, MissingDirectory::Create)),
        ..OpenContextRequest::new(parse_language(body.language.as_deref())?)
    };
    let opened = target.sandbox.contexts().open_context(request).await;
    Ok(Json(opened.map_err(context_problem)?.into()))
}

/// `GET /code/contexts?language=…`: all languages if none is named.
pub(super) async fn list_contexts(
    target: ExecTarget,
    uri: Uri,
) -> Result<Json<Vec<ContextBody>>, ExecdProblem> {
    let query = QueryParams::from_uri(&uri);
    let wanted = query.first("language").filter(|name| !name.is_empty());
    let wanted = wanted.map(|name| parse_language(Some(name))).transpose()?;
    let contexts = target.sandbox.contexts().list_contexts().await?;
    let fits = |context: &CodeContext| wanted.as_ref().is_none_or(|wanted| context.language == *wanted);
    Ok(Json(contexts.into_iter().filter(fits).map(ContextBody::from).collect()))
}

/// `GET /code/contexts/{id}`
pub(super) async fn get_context(
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<Json<ContextBody>, ExecdProblem> {
    let id = parse_context_id(&name)?;
    let context = target.sandbox.contexts().find_context(&id).await;
    Ok(Json(context.map_err(context_problem)?.into()))
}

/// `DELETE /code/contexts/{id}`
pub(super) async fn delete_context(
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<StatusCode, ExecdProblem> {
    let id = parse_context_id(&name)?;
    target.sandbox.contexts().close_context(&id).await.map_err(context_problem)?;
    Ok(StatusCode::OK)
}

/// `POST /code/contexts/{id}/restart`, a Coracle addition: the reference can only create another.
pub(super) async fn restart_context(
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<StatusCode, ExecdProblem> {
    let id = parse_context_id(&name)?;
    target.sandbox.contexts().restart_context(&id).await.map_err(context_problem)?;
    Ok(StatusCode::OK)
}

/// `DELETE /code/contexts?language=…`
pub(super) async fn delete_contexts(target: ExecTarget, uri: Uri) -> Result<StatusCode, ExecdProblem> {
    let language = parse_language(Some(required_parameter(&QueryParams::from_uri(&uri), "language")?))?;
    target.sandbox.contexts().close_contexts(&language).await?;
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
pub(super) struct RunCodeBody {
    code: Option<String>,
    #[serde(default)]
    context: Option<RunContextBody>,
}

#[derive(Default, Deserialize)]
struct RunContextBody {
    id: Option<String>,
    language: Option<String>,
}

/// `POST /code`: runs in the given context, or in the default one of the language.
pub(super) async fn run_code(
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<RunCodeBody>,
) -> Result<Response, ExecdProblem> {
    let code = body.code.filter(|code| !code.is_empty() && !code.contains('\0'));
    let run = RunCodeRequest::new(
        code.ok_or_else(|| ExecdProblem::invalid("`code` is empty or contains a NUL byte"))?,
    );
    target.begin_stream()?;
    let wanted = body.context.unwrap_or_default();
    let named = wanted.language.as_deref().filter(|name| !name.is_empty());
    let contexts = target.sandbox.contexts();
    let (running, context, language) = match wanted.id.filter(|id| !id.is_empty()) {
        Some(id) => {
            let found = contexts.find_context(&parse_context_id(&id)?).await.map_err(context_problem)?;
            check_language(&found, named)?;
            (contexts.run_code(&found.id, run).await, found.id, found.language)
        }
        None => {
            let language = parse_language(named)?;
            let running = contexts.run_in_default_context(&language, run).await;
            (running, default_context_id(&language), language)
        }
    };
    match running {
        Ok(running) => Ok(code_stream::stream_code_run(running, context.as_str(), &language, target.lines)),
        Err(ServiceError::SessionBusy(_)) => Ok(code_stream::busy_response(context.as_str())),
        Err(error @ ServiceError::File(_)) => convert_launch_error(error, context.as_str()),
        Err(error) => Err(context_problem(error)),
    }
}

/// `DELETE /code?id=…`: the id is the one in the first event of a run.
pub(super) async fn interrupt_code(target: ExecTarget, uri: Uri) -> Result<StatusCode, ExecdProblem> {
    let id = parse_context_id(required_parameter(&QueryParams::from_uri(&uri), "id")?)?;
    target.sandbox.contexts().interrupt_context(&id).await.map_err(context_problem)?;
    Ok(StatusCode::OK)
}

/// Prepares for a client's probe. Clients of contexts first run a command that checks whether the
/// reference's kernels listen on their port. Coracle's kernels do not, so something else must listen
/// there, but only for clients that probe: for all others the port stays free.
pub(super) async fn prepare_for_probe(target: &ExecTarget, process: &mut ProcessSpec) {
    let words = match &process.command {
        CommandLine::Shell { text, .. } => std::slice::from_ref(text),
        CommandLine::Argv(words) => words.as_slice(),
    };
    if !words.iter().any(|text| text.contains(KERNEL_PROBE_TEXT)) {
        return;
    }
    // This overrides the port that the image or the client names.
    process.env.insert("JUPYTER_PORT".to_owned(), KERNEL_PROBE_PORT.to_string());
    if let Err(error) = target.sandbox.ports().reserve_port(KERNEL_PROBE_PORT).await {
        tracing::debug!(%error, "failed to listen on the kernel port; the client's probe will fail");
    }
}

fn parse_language(name: Option<&str>) -> Result<Language, ExecdProblem> {
    let name = name.filter(|name| !name.is_empty()).unwrap_or(DEFAULT_LANGUAGE);
    Language::parse(name).map_err(|error| ExecdProblem::invalid(format!("`language`: {error}")))
}

fn check_language(context: &CodeContext, named: Option<&str>) -> Result<(), ExecdProblem> {
    match named.map(|name| parse_language(Some(name))).transpose()? {
        Some(named) if named != context.language => {
            Err(ExecdProblem::invalid(format!("the context `{}` is for {}", context.id, context.language)))
        }
        _ => Ok(()),
    }
}

/// Parses a context id. A malformed one is reported as not found.
fn parse_context_id(text: &str) -> Result<ContextId, ExecdProblem> {
    ContextId::parse(text).ok().ok_or_else(|| context_not_found(text))
}

fn context_not_found(id: &str) -> ExecdProblem {
    let id: String = id.chars().take(64).collect();
    ExecdProblem::new(StatusCode::NOT_FOUND, "CONTEXT_NOT_FOUND", format!("context `{id}` not found"))
}

fn context_problem(error: ServiceError) -> ExecdProblem {
    match &error {
        ServiceError::NoSession(id) => context_not_found(id.as_str()),
        ServiceError::NoKernel { .. } => {
            ExecdProblem::new(StatusCode::BAD_REQUEST, "NOT_SUPPORTED", ExecdProblem::from(error).0.message)
        }
        _ if matches!(error.kind(), ErrorKind::File(_)) => {
            ExecdProblem::invalid(ExecdProblem::from(error).0.message)
        }
        _ => error.into(),
    }
}
