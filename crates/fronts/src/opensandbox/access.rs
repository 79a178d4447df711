//! Extractors of the lifecycle API (caller, sandbox, body), and the rules for access to ports.

use std::borrow::Cow;
use std::convert::Infallible;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use domain::{Owner, SandboxId};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::de::DeserializeOwned;
use service::{SandboxRef, ServiceError};

use super::problem::Problem;
use super::proxy::SignedTarget;
use super::types::SandboxNotes;
use super::{EGRESS_PORT, EXECD_PORT, OpenSandboxState};
use crate::auth::{self, AuthError};
use crate::kit::body::{self, BodyError};
use crate::kit::headers::header_text;
use crate::kit::query::path_param;
use crate::ports::target::AddressForm;
use crate::server::concurrency::{self, CallerProof};

/// The headers in which a client may present an API key. The second one is not only ours.
pub(super) const KEY_HEADERS: [&str; 2] = ["open-sandbox-api-key", "x-api-key"];
pub(super) const EXECD_TOKEN: &str = "X-EXECD-ACCESS-TOKEN";
pub(super) const EGRESS_TOKEN: &str = "OPENSANDBOX-EGRESS-AUTH";
pub(super) const PORT_TOKEN: &str = "X-Coracle-Access-Token";
/// The header that opens a sandbox created with `secureAccess`, and the purpose of its token.
pub(super) const SECURE_ACCESS: &str = "OpenSandbox-Secure-Access";
pub(super) const SECURE_PURPOSE: &str = "secure-access";
/// The headers that name a port instead of a path; the older name comes last.
pub(super) const ROUTING_HEADERS: [&str; 2] = ["OpenSandbox-Ingress-To", "OPEN-SANDBOX-INGRESS"];

/// The owner behind the API key.
pub(super) struct ApiKeyOwner(pub(super) Owner);

impl FromRequestParts<OpenSandboxState> for ApiKeyOwner {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, Problem> {
        let owner = auth::authenticate_caller(&state.service, &parts.headers, &KEY_HEADERS)?;
        let proof = CallerProof::Presented;
        concurrency::admit_request(&state.service, &parts.extensions, &owner, proof)?;
        Ok(Self(owner))
    }
}

/// The caller and the sandbox named in the path. A malformed id is reported as not found.
pub(super) struct OwnedSandbox {
    pub(super) owner: Owner,
    pub(super) id: SandboxId,
}

impl FromRequestParts<OpenSandboxState> for OwnedSandbox {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, Problem> {
        let ApiKeyOwner(owner) = ApiKeyOwner::from_request_parts(parts, state).await?;
        let id = path_param(parts, "id").await;
        let id = SandboxId::parse(&id).ok().ok_or_else(|| Problem::no_sandbox(&id))?;
        Ok(Self { owner, id })
    }
}

impl OwnedSandbox {
    /// Finds the sandbox. A handler does this after it has checked the rest of the request, so that a malformed
    /// request is refused as such even if there is no such sandbox.
    pub(super) fn find(&self, state: &OpenSandboxState) -> Result<SandboxRef, ServiceError> {
        state.service.sandbox(&self.owner, &self.id)
    }
}

/// The port in the path, as written.
pub(super) struct PortText(pub(super) String);

impl FromRequestParts<OpenSandboxState> for PortText {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &OpenSandboxState) -> Result<Self, Infallible> {
        Ok(Self(path_param(parts, "port").await))
    }
}

/// The kind of diagnostics named in the path.
pub(super) struct KindText(pub(super) String);

impl FromRequestParts<OpenSandboxState> for KindText {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &OpenSandboxState) -> Result<Self, Infallible> {
        Ok(Self(path_param(parts, "kind").await))
    }
}

/// A JSON body, regardless of its content type.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<OpenSandboxState> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &OpenSandboxState) -> Result<Self, Problem> {
        let bytes = read_body(request.into_body(), state.settings.json_body_limit).await?;
        parse_json(&bytes).map(Self)
    }
}

pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|error| Problem::invalid(format!("invalid request body: {error}")))
}

/// Reads a whole body of at most `limit` bytes.
pub(super) async fn read_body(body: Body, limit: usize) -> Result<bytes::Bytes, Problem> {
    Ok(body::read_body(body, limit).await?)
}

impl From<BodyError> for Problem {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Timeout => StatusCode::REQUEST_TIMEOUT,
            BodyError::EndedEarly => StatusCode::BAD_REQUEST,
        };
        Self::new(status, "SANDBOX::INVALID_PARAMETER", error.to_string())
    }
}

/// Returns the header and the purpose of the token that opens a port, and no other port.
pub(super) fn token_of(port: u16) -> (&'static str, Cow<'static, str>) {
    match port {
        EXECD_PORT => (EXECD_TOKEN, Cow::Borrowed("execd")),
        EGRESS_PORT => (EGRESS_TOKEN, Cow::Borrowed("egress")),
        _ => (PORT_TOKEN, Cow::Owned(format!("port {port}"))),
    }
}

/// Whether a port is that of an API of this server.
fn is_api_port(port: u16) -> bool {
    matches!(port, EXECD_PORT | EGRESS_PORT)
}

/// Headers that may carry a key: some clients send it in those meant for tokens.
const KEY_OR_TOKEN_HEADERS: [&str; 4] = [KEY_HEADERS[0], KEY_HEADERS[1], EXECD_TOKEN, EGRESS_TOKEN];

/// Decides who may access a port of a sandbox, and returns the owner on whose behalf. `found` is the
/// sandbox, regardless of its owner.
///
/// 1. An address with a signature is opened only by that signature.
/// 2. A sandbox with secure access is opened only by such a signature or by its own token.
/// 3. Any other is opened by a signature, by its token for that port, or by an API key; some
///    clients send the key in the headers meant for tokens.
/// 4. Ports that the operator made public need nothing, unless they are APIs of this server.
pub(super) fn authorize_port(
    state: &OpenSandboxState,
    headers: &HeaderMap,
    addressed: &SignedTarget,
    found: Option<&SandboxRef>,
) -> Result<(Owner, CallerProof), Problem> {
    let SignedTarget { target, signature } = addressed;
    let signed = match (signature, found) {
        (Some(_), None) => return Err(Problem::no_sandbox(target.id.as_str())),
        (Some(signed), Some(sandbox)) => {
            state.routes.verify(sandbox, target.port, signed)?;
            Some(sandbox.owner().clone())
        }
        (None, _) => None,
    };
    if let Some(sandbox) = found.filter(|sandbox| SandboxNotes::of_sandbox(sandbox).secure_access) {
        let token = header_text(headers, SECURE_ACCESS).unwrap_or_default();
        let opens = || sandbox.ports().accepts_token(SECURE_PURPOSE, token.trim());
        let by_token = || opens().then(|| sandbox.owner().clone());
        // For the holder of another owner's key, the sandbox must look like one that does not exist.
        let foreign = || {
            let caller = auth::authenticate_caller(&state.service, headers, &KEY_OR_TOKEN_HEADERS);
            !state.service.has_no_keys() && caller.is_ok_and(|caller| caller != *sandbox.owner())
        };
        let owner = signed.or_else(by_token).ok_or_else(|| match foreign() {
            true => Problem::no_sandbox(target.id.as_str()),
            false => secure_access_needed(),
        })?;
        return Ok((owner, CallerProof::Presented));
    }
    let own_service = !is_api_port(target.port);
    if state.service.has_no_keys() {
        // Pages that a sandbox serves may access its ports, but never the API.
        let owner = match own_service {
            false => auth::authenticate_caller(&state.service, headers, &[])?,
            true if auth::comes_from_another_site(headers) => return Err(AuthError::Page.into()),
            true => Owner::operator(),
        };
        return Ok((owner, CallerProof::Presented));
    }
    let public = target.form == AddressForm::Gateway && state.settings.gateway.public && own_service;
    let public = found.filter(|_| public).map(|sandbox| sandbox.owner().clone());
    let by_token = || {
        let (header, purpose) = token_of(target.port);
        let (sandbox, token) = (found?, header_text(headers, header)?);
        sandbox.ports().accepts_token(&purpose, token).then(|| sandbox.owner().clone())
    };
    if let Some(owner) = signed.or_else(by_token) {
        return Ok((owner, CallerProof::Presented));
    }
    if let Some(owner) = public {
        return Ok((owner, CallerProof::NotNeeded));
    }
    let owner = auth::authenticate_caller(&state.service, headers, &KEY_OR_TOKEN_HEADERS)?;
    Ok((owner, CallerProof::Presented))
}

fn secure_access_needed() -> Problem {
    let message = "this sandbox requires the header OpenSandbox-Secure-Access or a signed route";
    Problem::new(StatusCode::UNAUTHORIZED, "MISSING_OR_INVALID_SECURE_ACCESS", message)
}
