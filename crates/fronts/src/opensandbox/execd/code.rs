//! Code contexts, which keep the state of a language between runs.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use domain::process::{Command, Missing, Process};
use domain::{ContextId, Language};
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{Context, ErrorKind, OpenContext, RunCode, ServiceError, default_context};

use super::command::{directory, refuse};
use super::fault::{Fault, Wish, named};
use super::{Name, Scope, code_run};
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;

/// The language if none is named; clients use the same default.
const USUAL: &str = "python";

/// The text that identifies a client's probe for kernels, and the port that it probes.
const PROBE: &str = "JUPYTER_PORT:-44771";
const PROBED_PORT: u16 = 44771;

#[derive(Deserialize)]
pub(super) struct OpenBody {
    language: Option<String>,
    cwd: Option<String>,
}

#[derive(Serialize)]
pub(super) struct ContextBody {
    id: String,
    language: String,
}

impl From<Context> for ContextBody {
    fn from(context: Context) -> Self {
        Self { id: context.id.to_string(), language: context.language.to_string() }
    }
}

/// `POST /code/context`: responds once the context can run code. A given directory is created if it is
/// missing.
pub(super) async fn open(
    State(front): State<Front>,
    scope: Scope,
    Wish(body): Wish<OpenBody>,
) -> Result<Json<ContextBody>, Fault> {
    let cwd = body.cwd.filter(|path| !path.is_empty());
    if cwd.as_ref().is_some_and(|path| path.contains('\0')) {
        return Err(Fault::invalid("`cwd` contains a NUL byte"));
    }
    let request = OpenContext {
        directory: cwd.map(|path| directory(path, Missing::Create)),
        ..OpenContext::new(language(body.language.as_deref())?)
    };
    let opened = front.service.open_context(&scope.owner, &scope.id, request).await;
    Ok(Json(opened.map_err(refused)?.into()))
}

/// `GET /code/contexts?language=…`: all languages if none is named.
pub(super) async fn list(
    State(front): State<Front>,
    scope: Scope,
    uri: Uri,
) -> Result<Json<Vec<ContextBody>>, Fault> {
    let query = Query::of(&uri);
    let wanted = query.first("language").filter(|name| !name.is_empty());
    let wanted = wanted.map(|name| language(Some(name))).transpose()?;
    let contexts = front.service.contexts(&scope.owner, &scope.id).await?;
    let fits = |context: &Context| wanted.as_ref().is_none_or(|wanted| context.language == *wanted);
    Ok(Json(contexts.into_iter().filter(fits).map(ContextBody::from).collect()))
}

/// `GET /code/contexts/{id}`
pub(super) async fn look(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
) -> Result<Json<ContextBody>, Fault> {
    let id = context_id(&name)?;
    let context = front.service.context(&scope.owner, &scope.id, &id).await;
    Ok(Json(context.map_err(refused)?.into()))
}

/// `DELETE /code/contexts/{id}`
pub(super) async fn close(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
) -> Result<StatusCode, Fault> {
    let id = context_id(&name)?;
    front.service.close_context(&scope.owner, &scope.id, &id).await.map_err(refused)?;
    Ok(StatusCode::OK)
}

/// `POST /code/contexts/{id}/restart`, a Coracle addition: the reference can only create another.
pub(super) async fn restart(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
) -> Result<StatusCode, Fault> {
    let id = context_id(&name)?;
    front.service.restart_context(&scope.owner, &scope.id, &id).await.map_err(refused)?;
    Ok(StatusCode::OK)
}

/// `DELETE /code/contexts?language=…`
pub(super) async fn close_all(
    State(front): State<Front>,
    scope: Scope,
    uri: Uri,
) -> Result<StatusCode, Fault> {
    let language = language(Some(named(&Query::of(&uri), "language")?))?;
    front.service.close_contexts(&scope.owner, &scope.id, &language).await?;
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
pub(super) struct RunBody {
    code: Option<String>,
    #[serde(default)]
    context: Option<Wanted>,
}

#[derive(Default, Deserialize)]
struct Wanted {
    id: Option<String>,
    language: Option<String>,
}

/// `POST /code`: runs in the given context, or in the default one of the language.
pub(super) async fn run(
    State(front): State<Front>,
    scope: Scope,
    Wish(body): Wish<RunBody>,
) -> Result<Response, Fault> {
    let code = body.code.filter(|code| !code.is_empty() && !code.contains('\0'));
    let run = RunCode::new(code.ok_or_else(|| Fault::invalid("`code` is empty or contains a NUL byte"))?);
    let wanted = body.context.unwrap_or_default();
    let named = wanted.language.as_deref().filter(|name| !name.is_empty());
    let (owner, sandbox) = (&scope.owner, &scope.id);
    let (running, context, language) = match wanted.id.filter(|id| !id.is_empty()) {
        Some(id) => {
            let found = front.service.context(owner, sandbox, &context_id(&id)?).await.map_err(refused)?;
            check_language(&found, named)?;
            (front.service.run_code(owner, sandbox, &found.id, run).await, found.id, found.language)
        }
        None => {
            let language = language(named)?;
            let running = front.service.run_default(owner, sandbox, &language, run).await;
            (running, default_context(&language), language)
        }
    };
    match running {
        Ok(running) => Ok(code_run::stream(running, context.as_str(), &language, scope.lines)),
        Err(ServiceError::Busy(_)) => Ok(code_run::busy(context.as_str())),
        Err(error @ ServiceError::File(_)) => refuse(error, context.as_str()),
        Err(error) => Err(refused(error)),
    }
}

/// `DELETE /code?id=…`: the id is the one in the first event of a run.
pub(super) async fn interrupt(
    State(front): State<Front>,
    scope: Scope,
    uri: Uri,
) -> Result<StatusCode, Fault> {
    let id = context_id(named(&Query::of(&uri), "id")?)?;
    front.service.interrupt(&scope.owner, &scope.id, &id).await.map_err(refused)?;
    Ok(StatusCode::OK)
}

/// Prepares for a client's probe. Clients of contexts first run a command that checks whether the
/// reference's kernels listen on their port. Coracle's kernels do not, so something else must listen
/// there, but only for clients that probe: for all others the port stays free.
pub(super) async fn prepare_for_probe(front: &Front, scope: &Scope, process: &mut Process) {
    let words = match &process.command {
        Command::Shell { text, .. } => std::slice::from_ref(text),
        Command::Argv(words) => words.as_slice(),
    };
    if !words.iter().any(|text| text.contains(PROBE)) {
        return;
    }
    // This overrides the port that the image or the client names.
    process.env.insert("JUPYTER_PORT".to_owned(), PROBED_PORT.to_string());
    if let Err(error) = front.service.occupy(&scope.owner, &scope.id, PROBED_PORT).await {
        tracing::debug!(%error, "failed to listen on the kernel port; the client's probe will fail");
    }
}

fn language(name: Option<&str>) -> Result<Language, Fault> {
    let name = name.filter(|name| !name.is_empty()).unwrap_or(USUAL);
    Language::parse(name).map_err(|error| Fault::invalid(format!("`language`: {error}")))
}

fn check_language(context: &Context, named: Option<&str>) -> Result<(), Fault> {
    match named.map(|name| language(Some(name))).transpose()? {
        Some(named) if named != context.language => {
            Err(Fault::invalid(format!("the context `{}` is for {}", context.id, context.language)))
        }
        _ => Ok(()),
    }
}

/// Parses a context id. A malformed one is reported as not found.
fn context_id(text: &str) -> Result<ContextId, Fault> {
    ContextId::parse(text).ok().ok_or_else(|| no_context(text))
}

fn no_context(id: &str) -> Fault {
    let id: String = id.chars().take(64).collect();
    Fault::new(StatusCode::NOT_FOUND, "CONTEXT_NOT_FOUND", format!("context `{id}` not found"))
}

fn refused(error: ServiceError) -> Fault {
    match &error {
        ServiceError::NoSession(id) => no_context(id.as_str()),
        ServiceError::NoKernel { .. } => {
            Fault::new(StatusCode::BAD_REQUEST, "NOT_SUPPORTED", Fault::from(error).0.message)
        }
        _ if matches!(error.kind(), ErrorKind::File(_)) => Fault::invalid(Fault::from(error).0.message),
        _ => error.into(),
    }
}
