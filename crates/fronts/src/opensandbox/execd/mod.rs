//! The execution API of a sandbox: commands, sessions, files, terminals, metrics.
//!
//! It is served by this process, not inside the sandbox; the core passes its operations to the agent.

mod code;
mod code_stream;
mod command;
mod command_stream;
mod download;
mod event_buffer;
mod exec_socket;
mod file_mode;
mod files;
mod interrupt;
mod isolated;
mod logs;
mod port_proxy;
mod problem;
mod pty;
mod resource_usage;
mod session;
mod terminal_frames;
mod upload;

use std::convert::Infallible;

use axum::Router;
use axum::extract::FromRequestParts;
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use domain::{SessionId, UserIdentity};
use http::StatusCode;
use http::request::Parts;
use service::SandboxRef;

use self::problem::ExecdProblem;
use super::OpenSandboxState;
use crate::kit::error_format::CODE_AND_MESSAGE;
use crate::kit::lines::LineDialect;
use crate::kit::nested;
use crate::kit::query::path_param;
use crate::server::concurrency::RequestAdmission;

pub(in crate::opensandbox) use self::exec_socket::START_HEADER;

/// The sandbox a request is for. The proxy has found and authorised it, and put this into the extensions.
#[derive(Clone)]
pub(in crate::opensandbox) struct ExecTarget {
    pub(in crate::opensandbox) sandbox: SandboxRef,
    pub(in crate::opensandbox) lines: LineDialect,
    /// The slot of the request; `None` if requests are not limited.
    pub(in crate::opensandbox) admission: Option<RequestAdmission>,
}

impl ExecTarget {
    /// Counts the request as a long stream from now on. Must be called before anything is started.
    fn begin_stream(&self) -> Result<(), ExecdProblem> {
        Ok(self.admission.as_ref().map_or(Ok(()), RequestAdmission::begin_stream)?)
    }
}

impl FromRequestParts<OpenSandboxState> for ExecTarget {
    type Rejection = ExecdProblem;

    async fn from_request_parts(parts: &mut Parts, _: &OpenSandboxState) -> Result<Self, ExecdProblem> {
        let scope = parts.extensions.get::<Self>().cloned();
        scope.ok_or_else(|| ExecdProblem::runtime_error("the request names no sandbox"))
    }
}

/// A sandbox, and the user who accesses files in it: the default user, or the one in the path; within
/// a session if the path names one.
pub(super) struct FileActor {
    pub(super) sandbox: SandboxRef,
    pub(super) identity: UserIdentity,
    /// The isolated session within which files are accessed.
    pub(super) isolated_session: Option<SessionId>,
}

impl FileActor {
    pub(super) fn as_service_actor(&self) -> service::FileCaller<'_> {
        service::FileCaller { identity: &self.identity, isolated_session: self.isolated_session.as_ref() }
    }
}

impl FromRequestParts<OpenSandboxState> for FileActor {
    type Rejection = ExecdProblem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, ExecdProblem> {
        let ExecTarget { sandbox, .. } = ExecTarget::from_request_parts(parts, state).await?;
        let number = async |parts: &mut Parts, name: &str| match path_param(parts, name).await.as_str() {
            "" => Ok(None),
            text => {
                text.parse::<u32>().map(Some).or(Err(ExecdProblem::invalid("uid and gid must be numbers")))
            }
        };
        let identity = match (number(parts, "uid").await?, number(parts, "gid").await?) {
            (Some(uid), Some(gid)) => UserIdentity::Ids { uid, gid },
            (None, None) => UserIdentity::Default,
            // An incomplete identity must not fall back to the default user.
            _ => return Err(ExecdProblem::invalid("uid and gid must be given together")),
        };
        let isolated_session = isolated::session_in_path(parts, state).await?;
        Ok(Self { sandbox, identity, isolated_session })
    }
}

/// The name in the path: of a command, a session or a terminal.
pub(super) struct PathName(pub(super) String);

impl FromRequestParts<OpenSandboxState> for PathName {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &OpenSandboxState) -> Result<Self, Infallible> {
        Ok(Self(path_param(parts, "name").await))
    }
}

pub(super) fn build_router(state: OpenSandboxState) -> Router {
    let plain = execd_routes().into_iter().chain(files::file_routes()).chain(isolated::isolated_routes());
    let in_sessions = files::file_routes()
        .into_iter()
        .map(|(path, method)| (format!("/v1/isolated/session/{{session}}{path}"), method));
    let as_user = files::file_routes()
        .into_iter()
        .map(|(path, method)| (format!("/v1/filesystem/{{uid}}/{{gid}}{path}"), method));
    let plain = plain.map(|(path, method)| (path.to_owned(), method));
    let routes = plain
        .chain(as_user)
        .chain(in_sessions)
        .fold(Router::new(), |router, (path, method)| router.route(&path, method));
    routes
        .fallback(async || CODE_AND_MESSAGE.path_not_found())
        .method_not_allowed_fallback(async || CODE_AND_MESSAGE.method_not_allowed())
        .layer(from_fn(|request, next| nested::label_route("execd", request, next)))
        .with_state(state)
}

fn execd_routes() -> Vec<(&'static str, MethodRouter<OpenSandboxState>)> {
    vec![
        ("/ping", get(ping)),
        ("/command", post(command::run_command).delete(interrupt::interrupt_command)),
        ("/command/status/{name}", get(command::get_command_status)),
        ("/command/{name}/logs", get(logs::get_command_logs)),
        ("/session", post(session::open_session)),
        ("/session/{name}", axum::routing::delete(session::close_session)),
        ("/session/{name}/run", post(session::run_in_session)),
        ("/pty", post(pty::create_terminal)),
        ("/pty/{name}", get(pty::get_terminal).delete(pty::delete_terminal)),
        ("/pty/{name}/ws", get(pty::attach_terminal)),
        ("/proxy/{name}", any(port_proxy::forward_to_port)),
        ("/proxy/{name}/", any(port_proxy::forward_to_port)),
        ("/proxy/{name}/{*path}", any(port_proxy::forward_to_port)),
        ("/metrics", get(resource_usage::get_metrics)),
        ("/metrics/watch", get(resource_usage::watch_metrics)),
        ("/code", post(code::run_code).delete(code::interrupt_code)),
        ("/code/context", post(code::create_context)),
        ("/code/contexts", get(code::list_contexts).delete(code::delete_contexts)),
        ("/code/contexts/{name}", get(code::get_context).delete(code::delete_context)),
        ("/code/contexts/{name}/restart", post(code::restart_context)),
    ]
}

/// Routes that the operations table must describe.
#[cfg(test)]
pub(super) fn plain_table() -> Vec<(String, MethodRouter<OpenSandboxState>)> {
    let all = execd_routes().into_iter().chain(isolated::isolated_routes());
    all.map(|(path, route)| (path.to_owned(), route)).collect()
}

#[cfg(test)]
pub(super) fn file_table() -> Vec<(String, MethodRouter<OpenSandboxState>)> {
    files::file_routes().into_iter().map(|(path, route)| (path.to_owned(), route)).collect()
}

/// `GET /ping`: a sandbox exists only once its agent can be reached, so its phase decides whether
/// commands can run.
async fn ping(target: ExecTarget) -> Result<StatusCode, ExecdProblem> {
    target.sandbox.check_usable()?;
    Ok(StatusCode::OK)
}

/// Returns the response for a request that failed because the sandbox was removed, paused or died
/// meanwhile; `None` if it is still usable.
pub(super) fn gone_response(sandbox: &SandboxRef) -> Option<Response> {
    sandbox.check_usable().err().map(|error| ExecdProblem::from(error).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_is_defined_twice() {
        // Axum panics on a path that is already taken.
        let all = execd_routes().into_iter().chain(files::file_routes()).chain(isolated::isolated_routes());
        let router: Router<OpenSandboxState> =
            all.fold(Router::new(), |router, (path, method)| router.route(path, method));
        assert!(router.has_routes());
    }
}
