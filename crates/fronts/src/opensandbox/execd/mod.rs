//! The execution API of a sandbox: commands, sessions, files, terminals, metrics.
//!
//! It is served by this process, not inside the sandbox; the core passes its operations to the agent.

mod code;
mod code_run;
mod command;
mod download;
mod exec_socket;
mod fault;
mod files;
mod interrupt;
mod isolated;
mod logs;
mod measure;
mod mode;
mod multipart;
mod port;
mod pty;
mod replay;
mod run;
mod session;
mod socket;
mod transcript;
mod upload;

use std::convert::Infallible;

use axum::Router;
use axum::extract::{FromRequestParts, MatchedPath, Request};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{MethodRouter, any, get, post};
use domain::{Identity, Owner, SandboxId, SessionId};
use http::StatusCode;
use http::request::Parts;

use self::fault::Fault;
use super::Front;
use super::access::param;
use crate::answer;
use crate::settings::Lines;
use crate::trace::Route;

pub(in crate::opensandbox) use self::measure::Samples;
pub(in crate::opensandbox) use self::pty::Terminals;

/// The sandbox a request is for. The proxy has authorised it and put this into the extensions.
#[derive(Clone)]
pub(in crate::opensandbox) struct Scope {
    pub(in crate::opensandbox) owner: Owner,
    pub(in crate::opensandbox) id: SandboxId,
    pub(in crate::opensandbox) lines: Lines,
}

impl FromRequestParts<Front> for Scope {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &Front) -> Result<Self, Fault> {
        let scope = parts.extensions.get::<Self>().cloned();
        scope.ok_or_else(|| Fault::runtime("the request names no sandbox"))
    }
}

/// A sandbox, and the user who accesses files in it: the default user, or the one in the path; within
/// a session if the path names one.
pub(super) struct Actor {
    pub(super) owner: Owner,
    pub(super) id: SandboxId,
    pub(super) identity: Identity,
    /// The isolated session within which files are accessed.
    pub(super) nest: Option<SessionId>,
}

impl Actor {
    pub(super) fn by(&self) -> service::Actor<'_> {
        service::Actor { identity: &self.identity, nest: self.nest.as_ref() }
    }
}

impl FromRequestParts<Front> for Actor {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Fault> {
        let Scope { owner, id, .. } = Scope::from_request_parts(parts, front).await?;
        let number = async |parts: &mut Parts, name: &str| match param(parts, name).await.as_str() {
            "" => Ok(None),
            text => text.parse::<u32>().map(Some).or(Err(Fault::invalid("uid and gid must be numbers"))),
        };
        let identity = match (number(parts, "uid").await?, number(parts, "gid").await?) {
            (Some(uid), Some(gid)) => Identity::Ids { uid, gid },
            (None, None) => Identity::Default,
            // An incomplete identity must not fall back to the default user.
            _ => return Err(Fault::invalid("uid and gid must be given together")),
        };
        let nest = isolated::session_of(parts, front).await?;
        Ok(Self { owner, id, identity, nest })
    }
}

/// The name in the path: of a command, a session or a terminal.
pub(super) struct Name(pub(super) String);

impl FromRequestParts<Front> for Name {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Front) -> Result<Self, Infallible> {
        Ok(Self(param(parts, "name").await))
    }
}

pub(super) fn router(front: Front) -> Router {
    let plain = table().into_iter().chain(files::table()).chain(isolated::table());
    let in_sessions = files::table()
        .into_iter()
        .map(|(path, method)| (format!("/v1/isolated/session/{{session}}{path}"), method));
    let as_user = files::table()
        .into_iter()
        .map(|(path, method)| (format!("/v1/filesystem/{{uid}}/{{gid}}{path}"), method));
    let plain = plain.map(|(path, method)| (path.to_owned(), method));
    let routes = plain
        .chain(as_user)
        .chain(in_sessions)
        .fold(Router::new(), |router, (path, method)| router.route(&path, method));
    routes
        .fallback(answer::not_found)
        .method_not_allowed_fallback(answer::wrong_method)
        .layer(from_fn(name_route))
        .with_state(front)
}

fn table() -> Vec<(&'static str, MethodRouter<Front>)> {
    vec![
        ("/ping", get(ping)),
        ("/command", post(command::run).delete(interrupt::interrupt)),
        ("/command/status/{name}", get(command::status)),
        ("/command/{name}/logs", get(logs::read)),
        ("/session", post(session::open)),
        ("/session/{name}", axum::routing::delete(session::close)),
        ("/session/{name}/run", post(session::run)),
        ("/pty", post(pty::create)),
        ("/pty/{name}", get(pty::look).delete(pty::delete)),
        ("/pty/{name}/ws", get(pty::attach)),
        ("/proxy/{name}", any(port::forward)),
        ("/proxy/{name}/", any(port::forward)),
        ("/proxy/{name}/{*path}", any(port::forward)),
        ("/metrics", get(measure::once)),
        ("/metrics/watch", get(measure::watch)),
        ("/code", post(code::run).delete(code::interrupt)),
        ("/code/context", post(code::open)),
        ("/code/contexts", get(code::list).delete(code::close_all)),
        ("/code/contexts/{name}", get(code::look).delete(code::close)),
        ("/code/contexts/{name}/restart", post(code::restart)),
    ]
}

/// Routes that the operations table must describe.
#[cfg(test)]
pub(super) fn plain_table() -> Vec<(String, MethodRouter<Front>)> {
    let all = table().into_iter().chain(isolated::table());
    all.map(|(path, route)| (path.to_owned(), route)).collect()
}

#[cfg(test)]
pub(super) fn file_table() -> Vec<(String, MethodRouter<Front>)> {
    files::table().into_iter().map(|(path, route)| (path.to_owned(), route)).collect()
}

/// Records the matched route for the access log.
async fn name_route(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("unmatched", |path| path.as_str());
    let route = Route(format!("execd {route}"));
    let mut response = next.run(request).await;
    response.extensions_mut().insert(route);
    response
}

/// `GET /ping`: a sandbox exists only once its agent can be reached, so its phase decides whether
/// commands can run.
async fn ping(
    axum::extract::State(front): axum::extract::State<Front>,
    scope: Scope,
) -> Result<StatusCode, Fault> {
    usable(&front, &scope.owner, &scope.id).map(|()| StatusCode::OK)
}

fn usable(front: &Front, owner: &Owner, id: &SandboxId) -> Result<(), Fault> {
    Ok(front.service.get(owner, id)?.check_usable()?)
}

/// Returns the response for a request that failed because the sandbox was removed, paused or died
/// meanwhile; `None` if it is still usable.
pub(super) fn gone(front: &Front, owner: &Owner, id: &SandboxId) -> Option<Response> {
    usable(front, owner, id).err().map(axum::response::IntoResponse::into_response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_is_defined_twice() {
        // Axum panics on a path that is already taken.
        let all = table().into_iter().chain(files::table()).chain(isolated::table());
        let router: Router<Front> =
            all.fold(Router::new(), |router, (path, method)| router.route(path, method));
        assert!(router.has_routes());
    }
}
