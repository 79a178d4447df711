//! Extractors of the lifecycle API (caller, sandbox, body), and the rules for access to ports.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use domain::{Owner, SandboxId};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::de::DeserializeOwned;
use service::Sandbox;

use super::problem::Problem;
use super::proxy::{Form, Target};
use super::types::Notes;
use super::{EGRESS_PORT, EXECD_PORT, Front};
use crate::auth::{self, KEY_HEADERS, Refusal};

pub(super) const EXECD_TOKEN: &str = "X-EXECD-ACCESS-TOKEN";
pub(super) const EGRESS_TOKEN: &str = "OPENSANDBOX-EGRESS-AUTH";
pub(super) const PORT_TOKEN: &str = "X-Coracle-Access-Token";
/// The header that opens a sandbox created with `secureAccess`, and the purpose of its token.
pub(super) const SECURE_ACCESS: &str = "OpenSandbox-Secure-Access";
pub(super) const SECURE_PURPOSE: &str = "secure-access";
/// The headers that name a port instead of a path; the older name comes last.
pub(crate) const ROUTING_HEADERS: [&str; 2] = ["OpenSandbox-Ingress-To", "OPEN-SANDBOX-INGRESS"];

/// How long a client may take to send a JSON body.
const BODY_TIME: Duration = Duration::from_secs(30);

/// The owner behind the API key.
pub(super) struct Caller(pub(super) Owner);

impl FromRequestParts<Front> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Problem> {
        Ok(Self(auth::caller(&front.service, &parts.headers, &KEY_HEADERS)?))
    }
}

/// The caller and the sandbox named in the path. A malformed id is reported as not found.
pub(super) struct Addressed {
    pub(super) owner: Owner,
    pub(super) id: SandboxId,
}

impl FromRequestParts<Front> for Addressed {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Problem> {
        let Caller(owner) = Caller::from_request_parts(parts, front).await?;
        let id = param(parts, "id").await;
        let id = SandboxId::parse(&id).ok().ok_or_else(|| Problem::no_sandbox(&id))?;
        Ok(Self { owner, id })
    }
}

/// Returns a path parameter. One that is not valid text is returned as empty, which matches nothing.
pub(super) async fn param(parts: &mut Parts, name: &str) -> String {
    let params = RawPathParams::from_request_parts(parts, &()).await.ok();
    let found = params.iter().flatten().find(|(key, _)| *key == name);
    found.map(|(_, value)| value.to_owned()).unwrap_or_default()
}

/// The port in the path, as written.
pub(super) struct PortText(pub(super) String);

impl FromRequestParts<Front> for PortText {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Front) -> Result<Self, Infallible> {
        Ok(Self(param(parts, "port").await))
    }
}

/// The kind of diagnostics named in the path.
pub(super) struct KindText(pub(super) String);

impl FromRequestParts<Front> for KindText {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Front) -> Result<Self, Infallible> {
        Ok(Self(param(parts, "kind").await))
    }
}

/// A JSON body, regardless of its content type.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<Front> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, front: &Front) -> Result<Self, Problem> {
        let bytes = read_body(request.into_body(), front.settings.json_body_limit).await?;
        parse_json(&bytes).map(Self)
    }
}

pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|error| Problem::invalid(format!("invalid request body: {error}")))
}

/// Reads a whole body of at most `limit` bytes.
pub(super) async fn read_body(body: Body, limit: usize) -> Result<bytes::Bytes, Problem> {
    let too_long = || {
        let message = format!("request body exceeds {limit} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "SANDBOX::INVALID_PARAMETER", message)
    };
    let read = tokio::time::timeout(BODY_TIME, axum::body::to_bytes(body, limit)).await;
    let read = read.map_err(|_elapsed| {
        Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            "SANDBOX::INVALID_PARAMETER",
            "request body was not received in time",
        )
    })?;
    read.map_err(|error| {
        let by_limit =
            std::error::Error::source(&error).is_some_and(|e| e.is::<http_body_util::LengthLimitError>());
        if by_limit { too_long() } else { Problem::invalid("request body ended early") }
    })
}

/// Returns the header and the purpose of the token that opens a port.
pub(super) fn token_of(port: u16) -> (&'static str, &'static str) {
    match port {
        EXECD_PORT => (EXECD_TOKEN, "execd"),
        EGRESS_PORT => (EGRESS_TOKEN, "egress"),
        _ => (PORT_TOKEN, "ports"),
    }
}

/// Headers that may carry a key: some clients send it in those meant for tokens.
const KEYS_OR_TOKENS: [&str; 4] = [KEY_HEADERS[0], KEY_HEADERS[1], EXECD_TOKEN, EGRESS_TOKEN];

/// Decides who may access a port of a sandbox. `found` is the sandbox, regardless of its owner.
///
/// 1. An address with a signature is opened only by that signature.
/// 2. A sandbox with secure access is opened only by such a signature or by its own token.
/// 3. Any other is opened by a signature, by its token for that port, or by an API key; some
///    clients send the key in the headers meant for tokens.
/// 4. Ports that the operator made public need nothing, unless they are APIs of this server.
pub(super) fn admit(
    front: &Front,
    headers: &HeaderMap,
    target: &Target,
    found: Option<&Sandbox>,
) -> Result<Owner, Problem> {
    let signed = match (&target.signed, found) {
        (Some(_), None) => return Err(Problem::no_sandbox(target.id.as_str())),
        (Some(signed), Some(sandbox)) => {
            front.routes.verify(&front.service, target, signed)?;
            Some(sandbox.owner.clone())
        }
        (None, _) => None,
    };
    if let Some(sandbox) = found.filter(|sandbox| Notes::of(sandbox).secure_access) {
        let token = auth::text(headers, SECURE_ACCESS).unwrap_or_default();
        let by_token = || front.service.owner_by_token(&sandbox.id, SECURE_PURPOSE, token.trim());
        // For the holder of another owner's key, the sandbox must look like one that does not exist.
        let foreign = || {
            let caller = auth::caller(&front.service, headers, &KEYS_OR_TOKENS);
            !front.service.keyless() && caller.is_ok_and(|caller| caller != sandbox.owner)
        };
        return signed.or_else(by_token).ok_or_else(|| match foreign() {
            true => Problem::no_sandbox(target.id.as_str()),
            false => secure_access_needed(),
        });
    }
    let (header, purpose) = token_of(target.port);
    let own_service = purpose == "ports";
    if front.service.keyless() {
        // Pages that a sandbox serves may access its ports, but never the API.
        if !own_service {
            return Ok(auth::caller(&front.service, headers, &[])?);
        }
        let foreign = auth::comes_from_another_site(headers);
        return if foreign { Err(Refusal::Page.into()) } else { Ok(Owner::single()) };
    }
    let public = target.form == Form::Gateway && front.settings.gateway.public && own_service;
    let public = found.filter(|_| public).map(|sandbox| sandbox.owner.clone());
    let token = || auth::text(headers, header);
    let by_token = || token().and_then(|token| front.service.owner_by_token(&target.id, purpose, token));
    if let Some(owner) = signed.or(public).or_else(by_token) {
        return Ok(owner);
    }
    Ok(auth::caller(&front.service, headers, &KEYS_OR_TOKENS)?)
}

fn secure_access_needed() -> Problem {
    let message = "this sandbox requires the header OpenSandbox-Secure-Access or a signed route";
    Problem::new(StatusCode::UNAUTHORIZED, "MISSING_OR_INVALID_SECURE_ACCESS", message)
}
