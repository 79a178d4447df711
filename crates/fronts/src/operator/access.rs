//! Extractors of the operator API: the caller, and what the caller may see.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use domain::Owner;
use service::{ActKind, Service, ThingKind};

use super::Front;
use crate::answer;
use crate::auth::{self, KEY_HEADERS, Refusal};
use crate::serve::Peer;

/// The owner behind the API key.
pub(super) struct Caller(pub(super) Owner);

/// Proof that the caller is the operator, who holds the configured key.
pub(super) struct Operator;

/// The owners the caller may see: `None` (all) for the operator, otherwise only the caller.
pub(super) struct Scope(pub(super) Option<Owner>);

/// The owners the caller asks for: one owner with `owner=NAME`, all with `owner=*`, the caller with
/// `mine=true`. Only the operator may ask for other owners.
pub(super) struct Selected {
    caller: Owner,
    chosen: Option<Choice>,
}

enum Choice {
    One(Owner),
    All,
}

impl Selected {
    /// The selected owner, or `None` for all owners; the default is the same as [`Scope`].
    pub(super) fn owner(&self) -> Option<&Owner> {
        match &self.chosen {
            Some(Choice::One(owner)) => Some(owner),
            Some(Choice::All) => None,
            None if self.is_operator() => None,
            None => Some(&self.caller),
        }
    }

    /// Like [`Selected::owner`], but defaults to the caller.
    pub(super) fn owner_or_own(&self) -> Option<&Owner> {
        if self.chosen.is_none() { Some(&self.caller) } else { self.owner() }
    }

    pub(super) fn is_operator(&self) -> bool {
        self.caller == Owner::single()
    }

    /// Records that the operator listed things of other owners.
    pub(super) fn record_list(&self, service: &Service, thing: ThingKind) {
        match &self.chosen {
            Some(Choice::All) => service.record_list_of_all(thing),
            Some(Choice::One(owner)) if self.is_operator() => {
                service.record_look(owner, ActKind::Listed, thing, "*");
            }
            // The default overview shows the operator the server as a whole, like metrics; it is not recorded.
            Some(Choice::One(_)) | None => {}
        }
    }
}

impl Front {
    /// Returns the owner of a request. Clients of the operators' socket need no key.
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
        let mut selected = Self { caller: front.owner(parts).map_err(refuse)?, chosen: None };
        for (name, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            let choice = match &*name {
                "mine" if value == "true" => Choice::One(selected.caller.clone()),
                "owner" if value == "*" => Choice::All,
                "owner" => Choice::One(Owner::parse(&value).map_err(|error| {
                    answer::error(StatusCode::BAD_REQUEST, "INVALID_OWNER", &error.to_string())
                })?),
                _ => continue,
            };
            let own = matches!(&choice, Choice::One(owner) if *owner == selected.caller);
            if !own && !selected.is_operator() {
                return Err(operators_only());
            }
            selected.chosen = Some(choice);
        }
        Ok(selected)
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
    answer::error(StatusCode::FORBIDDEN, "FORBIDDEN", "only the operator may do this")
}

fn refuse(refusal: Refusal) -> Response {
    let (status, code, message) = match refusal {
        Refusal::NoKey => (StatusCode::UNAUTHORIZED, "MISSING_API_KEY", "API key missing"),
        Refusal::WrongKey => (StatusCode::UNAUTHORIZED, "INVALID_API_KEY", "unknown API key"),
        Refusal::Page => (
            StatusCode::FORBIDDEN,
            "FORBIDDEN",
            "a server without an API key refuses requests from web pages",
        ),
    };
    answer::error(status, code, message)
}
