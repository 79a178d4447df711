//! Passes a request on to a router of its own, such as an API that is served below a path.

use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{Extensions, Uri, uri::PathAndQuery};
use hyper::upgrade::OnUpgrade;
use tower::ServiceExt;

use crate::server::concurrency::RequestAdmission;
use crate::server::connection::ClientPeer;
use crate::server::request_log::RouteLabel;

/// The path is not one that a request can have.
#[derive(Debug)]
pub(crate) struct InvalidPath;

/// Passes a request to `router` under the path it has there; `extend` adds what its handlers need.
pub(crate) async fn call_router(
    router: Router,
    path: &str,
    mut request: Request,
    extend: impl FnOnce(&mut Extensions),
) -> Result<Response, InvalidPath> {
    let path = if path.is_empty() { "/" } else { path };
    let inner = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(inner).ok();
    *request.uri_mut() = Uri::from_parts(parts).ok().ok_or(InvalidPath)?;
    // The outer router has stored the parameters of its own path here.
    let extensions = request.extensions_mut();
    let (upgrade, peer) = (extensions.remove::<OnUpgrade>(), extensions.remove::<ClientPeer>());
    let admission = extensions.remove::<RequestAdmission>();
    extensions.clear();
    if let Some(upgrade) = upgrade {
        extensions.insert(upgrade);
    }
    if let Some(peer) = peer {
        extensions.insert(peer);
    }
    if let Some(admission) = admission {
        extensions.insert(admission);
    }
    extend(extensions);
    Ok(router.oneshot(request).await.into_response())
}

/// Records the matched route of a nested router for the access log, after the name of its API.
pub(crate) async fn label_route(api: &'static str, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("unmatched", |path| path.as_str());
    let route = RouteLabel(format!("{api} {route}"));
    let mut response = next.run(request).await;
    response.extensions_mut().insert(route);
    response
}
