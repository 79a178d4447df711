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

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header, uri::PathAndQuery};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use service::{SandboxRef, Service, ServiceError};
use tokio::io::{AsyncRead, AsyncWrite};

use super::address_mask::MaskedOrigin;
use super::body::{ContinueGate, ProgressBody, SendProgress};
use super::target::PortTarget;
use super::{address_mask, headers, relay};
use crate::kit::headers::request_host;
use crate::server::connection::ClientPeer;

/// Why a request could not be forwarded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    #[error("CONNECT is not supported: a sandbox port is not a proxy")]
    Connect,
    #[error("invalid path")]
    InvalidPath,
    #[error(transparent)]
    Unreachable(#[from] ServiceError),
    #[error("the response of the service failed: {0}")]
    BadResponse(String),
    #[error("the service on port {0} did not respond in time")]
    Timeout(u16),
}

/// Passes a request to the port and returns the response of the service inside, which may take
/// `answer_timeout` to begin.
pub(crate) async fn forward_request(
    service: &Service,
    answer_timeout: Duration,
    sandbox: &SandboxRef,
    target: &PortTarget,
    mut request: Request,
) -> Result<Response, ForwardError> {
    if request.method() == Method::CONNECT {
        return Err(ForwardError::Connect);
    }
    let upgrade = headers::upgrade_of(request.headers());
    let waiting = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let own_host = request_host(request.uri(), request.headers());
    let (request, masked) = prepare_request(service, target, request, own_host.clone(), upgrade.as_ref())?;
    let stream = sandbox.ports().open_tunnel(target.port).await?;
    let mut response = send_request(stream, answer_timeout, target.port, request).await?;
    // The HTTP version used inside does not apply to the outer connection.
    *response.version_mut() = Version::HTTP_11;
    headers::rewrite_response_headers(target, own_host.as_deref(), response.headers_mut());
    if let Some(masked) = masked {
        masked.restore_allowed_origin(response.headers_mut());
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return match (waiting, upgrade) {
            (Some(waiting), Some(protocol)) => Ok(relay::relay_upgrade(waiting, response, protocol)),
            _ => {
                let why = "the service switched protocols without a request to do so";
                Err(ForwardError::BadResponse(why.to_owned()))
            }
        };
    }
    Ok(response)
}

/// Sends the request through the agent and waits for the head of the response.
async fn send_request(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    answer_timeout: Duration,
    port: u16,
    request: Request,
) -> Result<Response, ForwardError> {
    let failed = |error: hyper::Error| ForwardError::BadResponse(error.to_string());
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    // The connection ends by itself when the response was read, dropped or upgraded.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "connection into a sandbox failed");
        }
    });
    let progress = Arc::new(SendProgress::new(answer_timeout));
    let (mut request, gate) = watch_body(request, progress.clone());
    if let Some(gate) = gate {
        hyper::ext::on_informational(&mut request, move |answer| gate.handle_informational(answer.status()));
    }
    tokio::select! {
        answer = sender.send_request(request) => answer.map(|response| response.map(Body::new)).map_err(failed),
        () = progress.wait_until_stalled() => Err(ForwardError::Timeout(port)),
    }
}

/// Wraps the body so that it reports progress, and waits for the service if the client does.
fn watch_body(
    request: Request,
    progress: Arc<SendProgress>,
) -> (http::Request<ProgressBody>, Option<Arc<ContinueGate>>) {
    let expects = request.headers().get(header::EXPECT);
    let expects = expects.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    let gate = expects.then(|| Arc::new(ContinueGate::default()));
    let held = gate.clone();
    (request.map(|body| ProgressBody::new(body, progress, held)), gate)
}

/// Converts the request to what the service inside gets: without our path prefix, our secrets and the
/// headers of the outer connection.
fn prepare_request(
    service: &Service,
    target: &PortTarget,
    mut request: Request,
    host: Option<String>,
    upgrade: Option<&HeaderValue>,
) -> Result<(Request, Option<MaskedOrigin>), ForwardError> {
    let path = if target.path.is_empty() { "/" } else { &target.path };
    let inner = request.uri().query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    let inner = PathAndQuery::try_from(inner).ok().ok_or(ForwardError::InvalidPath)?;
    let peer = match request.extensions().get::<ClientPeer>() {
        Some(ClientPeer::Network(peer)) => Some(peer.ip().to_canonical().to_string()),
        Some(ClientPeer::Operator | ClientPeer::SameUser) | None => None,
    };
    *request.uri_mut() = inner.into();
    *request.version_mut() = Version::HTTP_11;
    request.extensions_mut().clear();
    let headers = request.headers_mut();
    headers::rewrite_request_headers(target, headers, |key| service.owner_by_key(key).is_some());
    let masked = address_mask::mask_request_address(target, host.as_deref(), headers);
    set_header(headers, header::HOST, Some(format!("localhost:{}", target.port)));
    set_header(headers, HeaderName::from_static("x-forwarded-proto"), Some("http".to_owned()));
    set_header(
        headers,
        HeaderName::from_static("x-forwarded-host"),
        host.filter(|_| !address_mask::hides_host(target)),
    );
    set_header(headers, HeaderName::from_static("x-forwarded-for"), peer);
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
    Ok((request, masked))
}

fn set_header(headers: &mut HeaderMap, name: HeaderName, value: Option<String>) {
    if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
        headers.insert(name, value);
    }
}
