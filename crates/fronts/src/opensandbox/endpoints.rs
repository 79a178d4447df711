//! Where a client reaches a port of a sandbox: always on this server, below the proxy path.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use http::{HeaderMap, StatusCode, Uri};
use serde::Serialize;

use super::Front;
use super::access::{Addressed, PortText, token_of};
use super::problem::Problem;
use super::query::Query;
use crate::auth;

#[derive(Serialize)]
pub(super) struct Endpoint {
    /// `host[:port]/path`, without a scheme.
    endpoint: String,
    /// What the client adds to every request there: the sandbox's own token.
    headers: BTreeMap<&'static str, String>,
}

/// `GET /sandboxes/{id}/endpoints/{port}`
pub(super) async fn resolve(
    State(front): State<Front>,
    at: Addressed,
    PortText(port): PortText,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Json<Endpoint>, Problem> {
    let query = Query::of(&uri);
    if query.first("expires").is_some() {
        return Err(if query.is_on("use_server_proxy") {
            Problem::invalid("`expires` cannot be combined with `use_server_proxy`")
        } else {
            Problem::unsupported("signed routes are not offered by this server")
        });
    }
    let port = port.parse().ok().filter(|port| *port > 0);
    let port: u16 = port.ok_or_else(|| {
        Problem::new(StatusCode::BAD_REQUEST, "DOCKER::INVALID_PORT", "a port is a number from 1 to 65535")
    })?;
    front.service.get(&at.owner, &at.id)?;
    // The name the client used is the one name known to work for it.
    let host = front.settings.public_address.clone().or_else(|| auth::host(&uri, &headers));
    let host = host.ok_or_else(|| Problem::invalid("the header `Host` is missing"))?;
    let (header, purpose) = token_of(port);
    let token = front.service.token(&at.id, purpose);
    Ok(Json(Endpoint {
        endpoint: format!("{host}/v1/sandboxes/{}/proxy/{port}", at.id),
        headers: BTreeMap::from([(header, token.expose().to_owned())]),
    }))
}
