//! Who calls the API of operators, and what they may see: what its handlers start from.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use domain::Owner;

use super::Front;
use crate::answer;
use crate::auth::{self, KEY_HEADERS, Refusal};
use crate::serve::Peer;

/// The owner behind the API key.
pub(super) struct Caller(pub(super) Owner);

/// The operator calls, the owner of the configured key.
pub(super) struct Operator;

/// Whose affairs the caller may see: the operator everybody's, others their own.
pub(super) struct Scope(pub(super) Option<Owner>);

/// Whose affairs the caller asks for: with `owner=NAME` that owner's, with `mine=true` the caller's
/// own, else all that [`Scope`] shows. Another owner's are shown to the operator alone.
pub(super) struct Selected(pub(super) Option<Owner>);

impl Front {
    /// Whose request it is. Who may open the operators' socket needs no key.
    pub(super) fn owner(&self, request: &Parts) -> Result<Owner, Refusal> {
        if request.extensions.get::<Peer>() == Some(&Peer::Operator) {
            return Ok(Owner::single());
        }
        let headers = &request.headers;
        let bearer = auth::text(headers, "authorization").and_then(|value| value.strip_prefix("Bearer "));
        match bearer.and_then(|key| self.service.owner_by_key(key)) {
            Some(owner) => Ok(owner),
            None => auth::caller(&self.service, headers, &KEY_HEADERS),
        }
    }

    pub(super) fn scope(&self, request: &Parts) -> Result<Option<Owner>, Refusal> {
        self.owner(request).map(|owner| (owner != Owner::single()).then_some(owner))
    }
}

impl FromRequestParts<Front> for Caller {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Response> {
        front.owner(parts).map(Self).map_err(refuse)
    }
}

impl FromRequestParts<Front> for Scope {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Response> {
        front.scope(parts).map(Self).map_err(refuse)
    }
}

impl FromRequestParts<Front> for Selected {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Response> {
        let caller = front.owner(parts).map_err(refuse)?;
        let is_operator = caller == Owner::single();
        let mut selected = if is_operator { None } else { Some(caller.clone()) };
        for (name, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            match &*name {
                "mine" if value == "true" => selected = Some(caller.clone()),
                "owner" => {
                    let owner = Owner::parse(&value).map_err(|error| {
                        answer::error(StatusCode::BAD_REQUEST, "INVALID_OWNER", &error.to_string())
                    })?;
                    if !is_operator && owner != caller {
                        return Err(operators_only());
                    }
                    selected = Some(owner);
                }
                _ => {}
            }
        }
        Ok(Self(selected))
    }
}

impl FromRequestParts<Front> for Operator {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Response> {
        match front.scope(parts).map_err(refuse)? {
            None => Ok(Self),
            Some(_) => Err(operators_only()),
        }
    }
}

fn operators_only() -> Response {
    answer::error(StatusCode::FORBIDDEN, "FORBIDDEN", "only the operator of the server may do this")
}

fn refuse(refusal: Refusal) -> Response {
    let (status, code, message) = match refusal {
        Refusal::NoKey => (StatusCode::UNAUTHORIZED, "MISSING_API_KEY", "an API key is needed"),
        Refusal::WrongKey => (StatusCode::UNAUTHORIZED, "INVALID_API_KEY", "this API key is not known"),
        Refusal::Page => (StatusCode::FORBIDDEN, "FORBIDDEN", "without an API key no web page is answered"),
    };
    answer::error(status, code, message)
}
