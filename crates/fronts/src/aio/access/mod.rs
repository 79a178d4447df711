//! Who may use a sandbox whose address contains no code, as at the root of `coracle aio`.
//!
//! ```text
//! an address with a code ───────────────────────────► admitted; the code is proof enough
//! the root ─► nothing configured ───────────────────► admitted
//!          ─► API key, or a JWT that we can verify ─► admitted, and may ask for tickets
//!          ─► a ticket, which works once ───────────► admitted
//!          ─► GET /auth ────────────────────────────► the same, for the credentials of another request
//!          ─► anything else ────────────────────────► 401
//! ```
//! Credentials are removed from the request before a handler sees it, so the service behind a port never gets them.

mod api_key;
mod credentials;
mod json_web_token;
mod public_key;
mod routes;
mod settings;
mod tickets;

use axum::extract::Request;
use axum::response::Response;
use http::{HeaderValue, StatusCode, header};

use super::AioState;
use super::problem::AioProblem;

pub(super) use self::credentials::KEY_HEADER_NAME;
pub(super) use self::routes::routes;
pub(super) use self::settings::{AccessSettings, SETTING_NAMES};
use self::tickets::{TicketScope, TicketStore};

/// The path at which a proxy asks about the credentials of another request.
const AUTH_PATH: &str = "/auth";

/// What admitted a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessProof {
    /// The address contains a code, or this server asks for no credentials.
    NotNeeded,
    /// An API key or a JWT.
    Credential,
    /// A ticket, which cannot be exchanged for further ones.
    Ticket,
}

/// The credentials that a server accepts, and the tickets that it gave out.
#[derive(Debug, Default)]
pub(super) struct AccessControl {
    settings: AccessSettings,
    tickets: TicketStore,
}

impl AccessControl {
    pub(super) fn new(settings: AccessSettings) -> Self {
        Self { settings, tickets: TicketStore::default() }
    }

    /// Whether requests without a code in their address need credentials.
    pub(super) fn is_required(&self) -> bool {
        self.settings.api_key.is_some() || self.settings.jwt_public_key.is_some()
    }

    /// Draws a ticket for a request that was admitted by `proof`. Where none is needed, none is stored: it would open
    /// nothing that is closed without it.
    fn issue_ticket(&self, proof: AccessProof) -> Result<String, AioProblem> {
        match proof {
            AccessProof::NotNeeded => tickets::draw_ticket(),
            AccessProof::Credential => self.tickets.issue(TicketScope::Everything, self.settings.ticket_ttl),
            AccessProof::Ticket => Err(unauthorized()),
        }
    }
}

/// Decides about a request whose address contains no code, and removes its credentials.
pub(super) fn check_request(state: &AioState, request: &mut Request) -> Result<AccessProof, AioProblem> {
    if !state.access.is_required() {
        return Ok(AccessProof::NotNeeded);
    }
    // Both are checked before anything counts the request as one of the owner's.
    let proof = if request.uri().path() == AUTH_PATH {
        credentials::take_original_credentials(&state.access, request.headers_mut())
    } else {
        credentials::take_credentials(&state.access, request)
    };
    proof.ok_or_else(unauthorized)
}

/// A ticket with which the page of a terminal connects to its WebSocket, which cannot send headers. `None` if its address
/// is enough.
pub(super) fn ticket_for_page(state: &AioState, proof: AccessProof) -> Result<Option<String>, AioProblem> {
    match proof {
        AccessProof::NotNeeded => Ok(None),
        // It opens nothing but that connection, so a client that opened the page with a ticket gets no further ones.
        AccessProof::Credential | AccessProof::Ticket => state
            .access
            .tickets
            .issue(TicketScope::TerminalSocket, state.access.settings.ticket_ttl)
            .map(Some),
    }
}

/// Keeps browsers from telling other sites an address that may contain credentials.
pub(super) fn hide_address(response: &mut Response) {
    let policy = HeaderValue::from_static("no-referrer");
    response.headers_mut().entry(header::REFERRER_POLICY).or_insert(policy);
}

/// The same for every reason, so that nothing can be learned about a credential.
fn unauthorized() -> AioProblem {
    let hint = "send the key as `X-AIO-API-Key`, or the key or a token as `Authorization: Bearer`";
    AioProblem { hint: Some(hint.to_owned()), ..AioProblem::new(StatusCode::UNAUTHORIZED, "Unauthorized") }
}
