//! Extractors of the operator API: the caller, and what the caller may see.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use domain::Owner;
use service::{OperatorActionKind, OperatorObjectKind, Service};

use super::{FRONT, OperatorState};
use crate::auth::{self, AuthError};
use crate::kit::error_format;
use crate::kit::headers::header_text;
use crate::server::concurrency::{self, CallerProof, ConcurrencyError};
use crate::server::connection::ClientPeer;

/// The owner behind the API key.
pub(super) struct RequestOwner(pub(super) Owner);

/// Proof that the caller is the operator, who holds the configured key.
pub(super) struct OperatorOnly;

/// The owners the caller may see: `None` (all) for the operator, otherwise only the caller.
pub(super) struct VisibleOwners(pub(super) Option<Owner>);

/// The owners the caller asks for: one owner with `owner=NAME`, all with `owner=*`, the caller with
/// `mine=true`. Only the operator may ask for other owners.
pub(super) struct SelectedOwners {
    caller: Owner,
    chosen: Option<OwnerChoice>,
}

enum OwnerChoice {
    One(Owner),
    All,
}

impl SelectedOwners {
    /// The selected owner, or `None` for all owners; the default is the same as [`VisibleOwners`].
    pub(super) fn owner(&self) -> Option<&Owner> {
        match &self.chosen {
            Some(OwnerChoice::One(owner)) => Some(owner),
            Some(OwnerChoice::All) => None,
            None if self.is_operator() => None,
            None => Some(&self.caller),
        }
    }

    /// Like [`SelectedOwners::owner`], but defaults to the caller.
    pub(super) fn owner_or_own(&self) -> Option<&Owner> {
        if self.chosen.is_none() { Some(&self.caller) } else { self.owner() }
    }

    pub(super) fn is_operator(&self) -> bool {
        self.caller == Owner::operator()
    }

    /// Records that the operator listed things of other owners.
    pub(super) fn record_list(&self, service: &Service, thing: OperatorObjectKind) {
        match &self.chosen {
            Some(OwnerChoice::All) => service.record_list_of_all(thing),
            Some(OwnerChoice::One(owner)) if self.is_operator() => {
                service.record_view(owner, OperatorActionKind::Listed, thing, "*");
            }
            // The default overview shows the operator the server as a whole, like metrics; it is not recorded.
            Some(OwnerChoice::One(_)) | None => {}
        }
    }
}

impl OperatorState {
    /// Returns the owner of a request, which takes one of the owner's slots.
    fn admit_owner(&self, request: &Parts) -> Result<Owner, CallerRefusal> {
        let owner = self.request_owner(request).map_err(CallerRefusal::Unknown)?;
        let proof = CallerProof::Presented;
        let admitted = concurrency::admit_request(&self.service, &request.extensions, &owner, proof);
        admitted.map_err(CallerRefusal::Busy)?;
        Ok(owner)
    }

    /// Returns the owner of a request. Clients of the operators' socket need no key.
    fn request_owner(&self, request: &Parts) -> Result<Owner, AuthError> {
        if request.extensions.get::<ClientPeer>() == Some(&ClientPeer::Operator) {
            return Ok(Owner::operator());
        }
        let headers = &request.headers;
        let bearer = header_text(headers, "authorization").and_then(|value| value.strip_prefix("Bearer "));
        match bearer.and_then(|key| self.service.owner_by_key(key)) {
            Some(owner) => Ok(owner),
            None => auth::authenticate_caller(&self.service, headers, FRONT.key_headers),
        }
    }

    pub(super) fn visible_owner(&self, request: &Parts) -> Result<Option<Owner>, AuthError> {
        self.request_owner(request).map(|owner| (owner != Owner::operator()).then_some(owner))
    }
}

impl FromRequestParts<OperatorState> for RequestOwner {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &OperatorState) -> Result<Self, Response> {
        state.admit_owner(parts).map(Self).map_err(refusal_response)
    }
}

impl FromRequestParts<OperatorState> for VisibleOwners {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &OperatorState) -> Result<Self, Response> {
        let owner = state.admit_owner(parts).map_err(refusal_response)?;
        Ok(Self((owner != Owner::operator()).then_some(owner)))
    }
}

impl FromRequestParts<OperatorState> for SelectedOwners {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &OperatorState) -> Result<Self, Response> {
        let mut selected = Self { caller: state.admit_owner(parts).map_err(refusal_response)?, chosen: None };
        for (name, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            let choice = match &*name {
                "mine" if value == "true" => OwnerChoice::One(selected.caller.clone()),
                "owner" if value == "*" => OwnerChoice::All,
                "owner" => OwnerChoice::One(Owner::parse(&value).map_err(|error| {
                    error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_OWNER", &error.to_string())
                })?),
                _ => continue,
            };
            let own = matches!(&choice, OwnerChoice::One(owner) if *owner == selected.caller);
            if !own && !selected.is_operator() {
                return Err(operators_only());
            }
            selected.chosen = Some(choice);
        }
        Ok(selected)
    }
}

impl FromRequestParts<OperatorState> for OperatorOnly {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &OperatorState) -> Result<Self, Response> {
        let owner = state.admit_owner(parts).map_err(refusal_response)?;
        if owner == Owner::operator() { Ok(Self) } else { Err(operators_only()) }
    }
}

fn operators_only() -> Response {
    error_format::build_error(StatusCode::FORBIDDEN, "FORBIDDEN", "only the operator may do this")
}

/// Why a request is refused before its handler runs.
enum CallerRefusal {
    Unknown(AuthError),
    Busy(ConcurrencyError),
}

fn refusal_response(refusal: CallerRefusal) -> Response {
    let unknown = match refusal {
        CallerRefusal::Unknown(unknown) => unknown,
        CallerRefusal::Busy(busy) => return busy.build_response(FRONT.error_format),
    };
    let (status, code, message) = match unknown {
        AuthError::NoKey => (StatusCode::UNAUTHORIZED, "MISSING_API_KEY", "API key missing"),
        AuthError::WrongKey => (StatusCode::UNAUTHORIZED, "INVALID_API_KEY", "unknown API key"),
        AuthError::Page => (
            StatusCode::FORBIDDEN,
            "FORBIDDEN",
            "a server without an API key refuses requests from web pages",
        ),
    };
    error_format::build_error(status, code, message)
}
