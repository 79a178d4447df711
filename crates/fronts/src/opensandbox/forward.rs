//! Forwards HTTP and upgraded connections (WebSocket) to a port inside a sandbox.
//!
//! Each request gets its own stream through the agent to `127.0.0.1:port` inside, so this works
//! with the network off. The service inside is untrusted: it sees none of our keys and tokens, and
//! its responses are passed on without being interpreted.
//!
//! ```text
//! client ─► headers.rs filters ─► body.rs streams and paces ─► the service
//!        ◄─ headers.rs filters ◄──────────────────────────────
//! after `101`: relay.rs, bytes both ways
//! ```

mod body;
mod headers;
mod relay;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use domain::Owner;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header, uri::PathAndQuery};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use super::Front;
use super::problem::Problem;
use super::proxy::{Form, Target};
use crate::auth;
use crate::serve::Peer;
use body::{Gate, Progress, Watched};

pub(super) async fn forward(front: &Front, owner: &Owner, target: &Target, mut request: Request) -> Response {
    if request.method() == Method::CONNECT {
        let message = "CONNECT is not supported: a sandbox port is not a proxy";
        return Problem::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message).into_response();
    }
    let upgrade = headers::upgrade_of(request.headers());
    let waiting = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let own_host = auth::host(request.uri(), request.headers());
    let request = match prepare(front, target, request, own_host.clone(), upgrade.as_ref()) {
        Ok(request) => request,
        Err(problem) => return problem.into_response(),
    };
    let mut response = match exchange(front, owner, target, request).await {
        Ok(response) => response,
        Err(problem) => return problem.into_response(),
    };
    // The HTTP version used inside does not apply to the outer connection.
    *response.version_mut() = Version::HTTP_11;
    headers::answer(target, own_host.as_deref(), response.headers_mut());
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return match (waiting, upgrade) {
            (Some(waiting), Some(protocol)) => relay::join(waiting, response, protocol),
            _ => broken("the service switched protocols without a request to do so").into_response(),
        };
    }
    response
}

/// Sends the request through the agent and waits for the head of the response.
async fn exchange(
    front: &Front,
    owner: &Owner,
    target: &Target,
    request: Request,
) -> Result<Response, Problem> {
    let stream = front.service.tunnel(owner, &target.id, target.port).await;
    let stream = stream.map_err(|error| unreachable_port(error.into(), target.form))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(&e.to_string()))?;
    // The connection ends by itself when the response was read, dropped or upgraded.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "connection into a sandbox failed");
        }
    });
    let progress = Arc::new(Progress::new(front.settings.answer_timeout));
    let (mut request, gate) = watched(request, progress.clone());
    if let Some(gate) = gate {
        hyper::ext::on_informational(&mut request, move |answer| gate.hear(answer.status()));
    }
    tokio::select! {
        answer = sender.send_request(request) => match answer {
            Ok(response) => Ok(response.map(Body::new)),
            Err(error) => Err(broken(&error.to_string())),
        },
        () = progress.stopped() => {
            let message = format!("the service on port {} did not respond in time", target.port);
            Err(Problem::new(StatusCode::GATEWAY_TIMEOUT, "BACKEND_TIMEOUT", message))
        }
    }
}

/// Wraps the body so that it reports progress, and waits for the service if the client does.
fn watched(request: Request, progress: Arc<Progress>) -> (http::Request<Watched>, Option<Arc<Gate>>) {
    let expects = request.headers().get(header::EXPECT);
    let expects = expects.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    let gate = expects.then(|| Arc::new(Gate::default()));
    let held = gate.clone();
    (request.map(|body| Watched::new(body, progress, held)), gate)
}

/// Through a gateway, a sandbox that does not run is reported as unavailable; the API reports why.
fn unreachable_port(problem: Problem, form: Form) -> Problem {
    match (form, problem.status) {
        (Form::Gateway, StatusCode::CONFLICT) => {
            Problem { status: StatusCode::SERVICE_UNAVAILABLE, ..problem }
        }
        _ => problem,
    }
}

fn broken(why: &str) -> Problem {
    let message = format!("the response of the service failed: {why}");
    Problem::new(StatusCode::BAD_GATEWAY, "BACKEND_RESPONSE_FAILED", message)
}

/// Converts the request to what the service inside gets: without our path prefix, our secrets and the
/// headers of the outer connection.
fn prepare(
    front: &Front,
    target: &Target,
    mut request: Request,
    host: Option<String>,
    upgrade: Option<&HeaderValue>,
) -> Result<Request, Problem> {
    let path = if target.path.is_empty() { "/" } else { &target.path };
    let inner = request.uri().query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    let inner = PathAndQuery::try_from(inner).ok().ok_or_else(|| Problem::invalid("invalid path"))?;
    let peer = match request.extensions().get::<Peer>() {
        Some(Peer::Network(peer)) => Some(peer.ip().to_canonical().to_string()),
        Some(Peer::Operator) | None => None,
    };
    *request.uri_mut() = inner.into();
    *request.version_mut() = Version::HTTP_11;
    request.extensions_mut().clear();
    let headers = request.headers_mut();
    headers::ask(target, headers, |key| front.service.owner_by_key(key).is_some());
    set(headers, header::HOST, Some(format!("localhost:{}", target.port)));
    set(headers, HeaderName::from_static("x-forwarded-proto"), Some("http".to_owned()));
    set(headers, HeaderName::from_static("x-forwarded-host"), host);
    set(headers, HeaderName::from_static("x-forwarded-for"), peer);
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
    Ok(request)
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: Option<String>) {
    if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
        headers.insert(name, value);
    }
}
