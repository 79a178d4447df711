//! Forwards HTTP and upgraded connections (WebSocket) to a port inside a sandbox.
//!
//! Each request gets its own stream through the agent to `127.0.0.1:port` inside, so this works
//! with the network off. What is inside is an attacker: it sees none of our keys and tokens,
//! and what it answers is passed on without being interpreted.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use domain::Owner;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, uri::PathAndQuery};
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::Front;
use super::access::{EGRESS_TOKEN, EXECD_TOKEN, PORT_TOKEN};
use super::problem::Problem;
use super::proxy::Target;
use crate::auth::{self, KEY_HEADERS};
use crate::serve::Peer;

/// How long a service inside may take to begin its answer.
const HEAD_TIME: Duration = Duration::from_secs(180);

/// Headers that belong to one connection, not to the message.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Headers that are for this server, or would let a sandbox act as its caller.
const NOT_FORWARDED: [&str; 11] = [
    "authorization",
    "cookie",
    "open-sandbox-api-key",
    "opensandbox-secure-access",
    "opensandbox-access-renew",
    "proxy-connection",
    EXECD_TOKEN,
    EGRESS_TOKEN,
    PORT_TOKEN,
    "forwarded",
    "host",
];

/// Headers by which a page of one sandbox would act on everything at this address: put itself in
/// front of it, or empty what the browser stored for it.
const NOT_ANSWERED: [&str; 2] = ["service-worker-allowed", "clear-site-data"];

pub(super) async fn forward(front: &Front, owner: &Owner, target: &Target, mut request: Request) -> Response {
    let upgrade = upgrade_of(request.headers());
    let waiting = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let request = match prepare(front, target, request, upgrade.as_ref()) {
        Ok(request) => request,
        Err(problem) => return problem.into_response(),
    };
    let mut response = match exchange(front, owner, target, request).await {
        Ok(response) => response,
        Err(problem) => return problem.into_response(),
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return match (waiting, upgrade) {
            (Some(waiting), Some(protocol)) => join(waiting, response, protocol),
            _ => broken("the service switched protocols without being asked").into_response(),
        };
    }
    strip(response.headers_mut());
    for name in NOT_ANSWERED {
        response.headers_mut().remove(name);
    }
    stay_below(&target.mount, target.port, response.headers_mut());
    response
}

/// Sends the request through the agent and waits for the head of the answer.
async fn exchange(
    front: &Front,
    owner: &Owner,
    target: &Target,
    request: Request,
) -> Result<Response, Problem> {
    let stream = front.service.tunnel(owner, &target.id, target.port).await?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(&e.to_string()))?;
    // The connection ends by itself when the answer was read, or dropped, or upgraded away.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection into a sandbox broke");
        }
    });
    match tokio::time::timeout(HEAD_TIME, sender.send_request(request)).await {
        Ok(Ok(response)) => Ok(response.map(Body::new)),
        Ok(Err(error)) => Err(broken(&error.to_string())),
        Err(_elapsed) => {
            let message = format!("the service on port {} did not answer in time", target.port);
            Err(Problem::new(StatusCode::GATEWAY_TIMEOUT, "BACKEND_TIMEOUT", message))
        }
    }
}

fn broken(why: &str) -> Problem {
    let message = format!("the service broke off: {why}");
    Problem::new(StatusCode::BAD_GATEWAY, "BACKEND_RESPONSE_FAILED", message)
}

/// The request as the service inside gets it: our path prefix, our secrets and the headers of
/// the outer connection are gone.
fn prepare(
    front: &Front,
    target: &Target,
    mut request: Request,
    upgrade: Option<&HeaderValue>,
) -> Result<Request, Problem> {
    let path = if target.path.is_empty() { "/" } else { &target.path };
    let inner = request.uri().query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    let inner =
        PathAndQuery::try_from(inner).ok().ok_or_else(|| Problem::invalid("this path cannot be used"))?;
    let host = auth::host(request.uri(), request.headers());
    let peer = match request.extensions().get::<Peer>() {
        Some(Peer::Network(peer)) => Some(peer.ip().to_canonical().to_string()),
        Some(Peer::Operator) | None => None,
    };
    *request.uri_mut() = inner.into();
    request.extensions_mut().clear();
    let headers = request.headers_mut();
    strip(headers);
    for name in NOT_FORWARDED {
        headers.remove(name);
    }
    drop_our_keys(headers, |key| front.service.owner_by_key(key).is_some());
    let forwarded: Vec<_> =
        headers.keys().filter(|name| name.as_str().starts_with("x-forwarded-")).cloned().collect();
    for name in forwarded {
        headers.remove(name);
    }
    let local = format!("localhost:{}", target.port);
    set(headers, header::HOST, Some(local));
    set(headers, HeaderName::from_static("x-forwarded-proto"), Some("http".to_owned()));
    set(headers, HeaderName::from_static("x-forwarded-host"), host);
    set(headers, HeaderName::from_static("x-forwarded-for"), peer);
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
    Ok(request)
}

/// `X-API-Key` may be the service's own header; only keys of ours are kept from it, wherever they
/// stand among its values.
fn drop_our_keys(headers: &mut HeaderMap, is_ours: impl Fn(&str) -> bool) {
    let header::Entry::Occupied(entry) = headers.entry(KEY_HEADERS[1]) else { return };
    let (name, values) = entry.remove_entry_mult();
    let theirs: Vec<_> = values.filter(|value| !value.to_str().is_ok_and(&is_ours)).collect();
    for value in theirs {
        headers.append(name.clone(), value);
    }
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: Option<String>) {
    if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
        headers.insert(name, value);
    }
}

/// The protocol that a request asks to change to.
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = named_by_connection(headers).any(|name| name == header::UPGRADE);
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

/// Removes what belongs to one connection, the headers that `Connection` names included.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = named_by_connection(headers).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn named_by_connection(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).filter_map(|name| HeaderName::try_from(name.trim()).ok())
}

/// Keeps a redirect to the service's own root below the path by which it is reached.
fn stay_below(mount: &str, port: u16, headers: &mut HeaderMap) {
    let Some(location) = auth::text(headers, "location") else { return };
    let own = [format!("http://localhost:{port}"), format!("http://127.0.0.1:{port}")];
    let path = own.iter().find_map(|root| location.strip_prefix(root.as_str())).unwrap_or(location);
    let below_root = path.is_empty() && path != location || path.starts_with('/') && !path.starts_with("//");
    if below_root && let Ok(value) = HeaderValue::try_from(format!("{mount}{path}")) {
        headers.insert(header::LOCATION, value);
    }
}

/// Answers the upgrade and from then on copies bytes both ways until one side ends.
fn join(client: OnUpgrade, mut response: Response, protocol: HeaderValue) -> Response {
    let service = hyper::upgrade::on(&mut response);
    tokio::spawn(async move {
        let joined = async {
            let (client, service) = tokio::try_join!(client, service)?;
            let (mut client, mut service) = (TokioIo::new(client), TokioIo::new(service));
            tokio::io::copy_bidirectional(&mut client, &mut service).await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        };
        if let Err(error) = joined.await {
            tracing::debug!(%error, "an upgraded connection broke");
        }
    });
    strip(response.headers_mut());
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, protocol);
    response.map(|_| Body::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn headers_of_the_connection_are_removed_with_those_it_names() {
        let mut headers = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("x-public", "2"),
        ]);
        strip(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["x-public"]);
    }

    #[test]
    fn a_key_of_ours_is_dropped_wherever_it_stands() {
        let name = KEY_HEADERS[1];
        let mut headers = headers(&[(name, "theirs"), (name, "ours"), (name, "other"), (name, "ours")]);
        drop_our_keys(&mut headers, |key| key == "ours");
        assert_eq!(headers.get_all(name).iter().collect::<Vec<_>>(), ["theirs", "other"]);
        drop_our_keys(&mut headers, |_| true);
        assert!(!headers.contains_key(name));
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        let asked = |pairs: &[_]| upgrade_of(&headers(pairs)).is_some();
        assert!(asked(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]));
        assert!(!asked(&[("upgrade", "websocket")]));
        assert!(!asked(&[("connection", "upgrade")]));
    }

    #[test]
    fn redirects_stay_below_the_port() {
        for (location, expected) in [
            ("/login?x=1", "/m/login?x=1"),
            ("http://localhost:3000/login", "/m/login"),
            ("http://127.0.0.1:3000", "/m"),
            ("//evil.example/x", "//evil.example/x"),
            ("http://localhost:30001/x", "http://localhost:30001/x"),
            ("https://example.com/x", "https://example.com/x"),
            ("relative", "relative"),
        ] {
            let mut headers = headers(&[("location", location)]);
            stay_below("/m", 3000, &mut headers);
            assert_eq!(headers[header::LOCATION], expected, "{location}");
        }
    }
}
