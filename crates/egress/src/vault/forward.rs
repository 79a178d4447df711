//! Requests of one intercepted connection, sent on over one upstream connection of the same protocol.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use domain::RequestFacts;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::upgrade::OnUpgrade;

use super::body::{BodyError, ProxyBody, RedactedBody, ReplacedBody, pass_body};
use super::host_plan::{HostPlan, Injection};
use super::intercept::InterceptTarget;
use super::replace::Replacements;
use super::rewrite::{self, ProtocolChange, Refusal};

/// A body up to this size is read before it is sent on if placeholders are replaced in it, so that its length is known.
/// The servers that need a length are those that take small bodies.
const MAX_COLLECTED_BODY: u64 = 256 << 10;

/// Sends the requests of a connection.
pub(super) struct Forwarder {
    target: InterceptTarget,
    upstream: Upstream,
    /// Whether the last request asked for another protocol.
    upgrading: AtomicBool,
    upgrade: Mutex<Option<UpgradePair>>,
}

/// Where requests go.
pub(super) enum Upstream {
    Http1(tokio::sync::Mutex<http1::SendRequest<ProxyBody>>),
    Http2(http2::SendRequest<ProxyBody>),
    /// There is no connection; every request is answered with this message.
    Unavailable(String),
}

/// Both ends of a connection that has left HTTP.
pub(super) struct UpgradePair {
    pub(super) client: OnUpgrade,
    pub(super) upstream: OnUpgrade,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    #[error("could not read the request")]
    Request(#[source] BodyError),
    #[error("the upstream connection failed")]
    Upstream(#[source] hyper::Error),
}

impl Forwarder {
    pub(super) fn new(target: InterceptTarget, upstream: Upstream) -> Self {
        Self { target, upstream, upgrading: AtomicBool::new(false), upgrade: Mutex::default() }
    }

    /// Whether the upstream connection may have ended as HTTP because the server agreed to another protocol.
    pub(super) fn is_upgrading(&self) -> bool {
        self.upgrading.load(Ordering::Relaxed)
    }

    /// The ends of this connection, if the server has agreed to another protocol.
    pub(super) fn take_upgrade(&self) -> Option<UpgradePair> {
        self.upgrade.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Answers a request. An error ends the connection or stream without a response, as the server itself would.
    pub(super) async fn forward(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<ProxyBody>, ForwardError> {
        if let Upstream::Unavailable(message) = &self.upstream {
            return Ok(text_response(StatusCode::BAD_GATEWAY, message));
        }
        let is_head = request.method() == Method::HEAD;
        let (plan, prepared) = match self.prepare(request).await {
            Ok(prepared) => prepared,
            Err(Preparation::Refused(refusal)) => return Ok(text_response(refusal.status, refusal.message)),
            Err(Preparation::Failed(error)) => return Err(error),
        };
        let Prepared { request, upgrade } = prepared;
        let response = self.send(request).await.map_err(ForwardError::Upstream)?;
        Ok(self.finish(response, &plan, upgrade, is_head))
    }

    async fn prepare(
        &self,
        mut request: Request<Incoming>,
    ) -> Result<(Arc<HostPlan>, Prepared), Preparation> {
        let client_upgrade = hyper::upgrade::on(&mut request);
        let (mut parts, body) = request.into_parts();
        rewrite::check_host(&parts, self.target.scheme(), self.target.host())?;
        let change = rewrite::remove_hop_headers(&mut parts.headers);
        let upgrade = (change == ProtocolChange::Upgrade).then_some(client_upgrade);
        self.upgrading.store(upgrade.is_some(), Ordering::Relaxed);
        let (plan, body) = apply_vault(&self.target, &mut parts, body).await?;
        self.address_to_upstream(&mut parts);
        Ok((plan, Prepared { request: Request::from_parts(parts, body), upgrade }))
    }

    /// Writes the target of a request in the form of the upstream's protocol.
    fn address_to_upstream(&self, parts: &mut http::request::Parts) {
        let host = HeaderValue::from_str(self.target.host().as_str()).expect("a name has only ASCII letters");
        let mut uri = std::mem::take(&mut parts.uri).into_parts();
        match &self.upstream {
            Upstream::Http2(_) => {
                parts.version = Version::HTTP_2;
                uri.scheme = Some(http::uri::Scheme::HTTPS);
                uri.authority = http::uri::Authority::try_from(host.as_bytes()).ok();
                parts.headers.remove(HOST);
            }
            Upstream::Http1(_) | Upstream::Unavailable(_) => {
                parts.version = Version::HTTP_11;
                (uri.scheme, uri.authority) = (None, None);
                parts.headers.insert(HOST, host);
            }
        }
        uri.path_and_query.get_or_insert(http::uri::PathAndQuery::from_static("/"));
        parts.uri = Uri::from_parts(uri).expect("a path alone, or with a scheme and an authority");
    }

    async fn send(&self, request: Request<ProxyBody>) -> hyper::Result<Response<Incoming>> {
        match &self.upstream {
            Upstream::Http1(sender) => {
                let mut sender = sender.lock().await;
                sender.ready().await?;
                sender.send_request(request).await
            }
            Upstream::Http2(sender) => {
                let mut sender = sender.clone();
                sender.ready().await?;
                sender.send_request(request).await
            }
            Upstream::Unavailable(_) => unreachable!("requests without an upstream are answered before"),
        }
    }

    fn finish(
        &self,
        mut response: Response<Incoming>,
        plan: &HostPlan,
        upgrade: Option<OnUpgrade>,
        is_head: bool,
    ) -> Response<ProxyBody> {
        let switches = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if let Some(client) = upgrade.filter(|_| switches) {
            let upstream = hyper::upgrade::on(&mut response);
            let pair = UpgradePair { client, upstream };
            self.upgrade.lock().unwrap_or_else(PoisonError::into_inner).replace(pair);
        }
        let (mut parts, body) = response.into_parts();
        let is_http1 = matches!(self.upstream, Upstream::Http1(_));
        let closes = is_http1 && !switches && upstream_closes(&parts.headers, parts.version);
        rewrite::remove_hop_headers(&mut parts.headers);
        if switches {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        } else if closes {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        parts.version = if is_http1 { Version::HTTP_11 } else { Version::HTTP_2 };
        redact_response(Response::from_parts(parts, body), plan, is_head)
    }
}

/// Requests of plain HTTP, where another part of egress keeps the connections and has checked the host.
pub(crate) struct PlainExchange {
    plan: Arc<HostPlan>,
    is_head: bool,
}

/// A request with what its binding adds, or the answer to one that is not sent on.
pub(crate) enum PlainRequest {
    Prepared(Request<ProxyBody>, PlainExchange),
    Refused(Response<ProxyBody>),
}

impl InterceptTarget {
    /// Applies the vault to one request.
    pub(crate) async fn prepare_plain(&self, request: Request<Incoming>) -> PlainRequest {
        let is_head = request.method() == Method::HEAD;
        let (mut parts, body) = request.into_parts();
        match apply_vault(self, &mut parts, body).await {
            Ok((plan, body)) => {
                PlainRequest::Prepared(Request::from_parts(parts, body), PlainExchange { plan, is_head })
            }
            Err(Preparation::Refused(refusal)) => {
                PlainRequest::Refused(text_response(refusal.status, refusal.message))
            }
            Err(Preparation::Failed(_)) => {
                PlainRequest::Refused(text_response(StatusCode::BAD_REQUEST, "could not read the request"))
            }
        }
    }
}

impl PlainExchange {
    /// Removes secrets from the response.
    pub(crate) fn finish(self, response: Response<Incoming>) -> Response<ProxyBody> {
        redact_response(response, &self.plan, self.is_head)
    }
}

/// Applies the vault in force to a request.
async fn apply_vault(
    target: &InterceptTarget,
    parts: &mut http::request::Parts,
    body: Incoming,
) -> Result<(Arc<HostPlan>, ProxyBody), Preparation> {
    let facts = RequestFacts {
        scheme: target.scheme(),
        host: target.host(),
        method: parts.method.as_str(),
        path: parts.uri.path(),
    };
    let (plan, injection) = target.plan_for(&facts);
    let Some(injection) = injection else { return Ok((plan, pass_body(body))) };
    rewrite::inject(parts, &injection)?;
    log_injection(target, &injection);
    let body = match rewrite::body_replacements(&parts.headers, &injection.bodies) {
        Some(replacements) => replace_body(&mut parts.headers, body, replacements).await?,
        None => pass_body(body),
    };
    Ok((plan, body))
}

fn redact_response(response: Response<Incoming>, plan: &HostPlan, is_head: bool) -> Response<ProxyBody> {
    let switches = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let (mut parts, body) = response.into_parts();
    plan.redactions.redact_headers(&mut parts.headers);
    let as_is = plan.redactions.is_empty() || is_head || switches || rewrite::is_encoded(&parts.headers);
    let body = if as_is {
        pass_body(body)
    } else {
        RedactedBody::new(body, Arc::clone(&plan.redactions)).boxed_unsync()
    };
    Response::from_parts(parts, body)
}

/// A request that is ready to be sent on, and the client's side of an upgrade that it asks for.
struct Prepared {
    request: Request<ProxyBody>,
    upgrade: Option<OnUpgrade>,
}

enum Preparation {
    Refused(Refusal),
    Failed(ForwardError),
}

impl From<Refusal> for Preparation {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

fn log_injection(target: &InterceptTarget, injection: &Injection) {
    tracing::debug!(
        sandbox = target.sandbox(),
        host = target.host().as_str(),
        headers = injection.headers.len(),
        "request matched a credential binding; sending it on with the binding's secrets"
    );
}

/// Prepares a body in which placeholders are replaced: at once if its length is known and small, else as a stream
/// without a length.
async fn replace_body(
    headers: &mut HeaderMap,
    body: Incoming,
    replacements: Arc<Replacements>,
) -> Result<ProxyBody, Preparation> {
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let Some(length) = length.filter(|length| *length <= MAX_COLLECTED_BODY) else {
        headers.remove(CONTENT_LENGTH);
        return Ok(ReplacedBody::new(body, replacements).boxed_unsync());
    };
    let limit = usize::try_from(length).unwrap_or(usize::MAX);
    let collected = Limited::new(body, limit).collect().await;
    let bytes = collected.map_err(|error| Preparation::Failed(ForwardError::Request(error)))?.to_bytes();
    let bytes = match replacements.replace(&bytes) {
        Some(mut replaced) => Bytes::from(std::mem::take(&mut *replaced)),
        None => bytes,
    };
    headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
    Ok(Full::new(bytes).map_err(|never| match never {}).boxed_unsync())
}

/// Whether the server ends its connection after this response, so that the client must not send another request.
fn upstream_closes(headers: &HeaderMap, version: Version) -> bool {
    let has_option = |option: &str| {
        let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|one| one.trim().eq_ignore_ascii_case(option))
    };
    has_option("close") || (version == Version::HTTP_10 && !has_option("keep-alive"))
}

fn text_response(status: StatusCode, message: &str) -> Response<ProxyBody> {
    let body = Full::new(Bytes::from(format!("coracle: {message}\n")));
    let mut response = Response::new(body.map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}
