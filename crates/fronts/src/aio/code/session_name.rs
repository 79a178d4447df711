//! Names of sessions, in paths and bodies.

use axum::extract::{FromRequestParts, Path};
use domain::SessionName;
use http::request::Parts;

use crate::aio::AioState;
use crate::aio::problem::AioProblem;

/// The session that a path names. Text that no session can have as its name is unknown.
pub(super) struct PathSession(pub(super) SessionName);

impl FromRequestParts<AioState> for PathSession {
    type Rejection = AioProblem;

    async fn from_request_parts(parts: &mut Parts, state: &AioState) -> Result<Self, AioProblem> {
        let path = Path::<String>::from_request_parts(parts, state).await.ok();
        let name = path.and_then(|Path(name)| SessionName::parse(&name).ok());
        name.map(Self).ok_or_else(AioProblem::no_session)
    }
}

/// Returns the name that a body chooses; an empty one counts as none.
pub(super) fn parse_session_name(name: Option<String>) -> Result<Option<SessionName>, AioProblem> {
    let name = name.filter(|name| !name.is_empty()).map(|name| SessionName::parse(&name));
    name.transpose().map_err(|error| AioProblem::invalid_field("session_id", error.to_string()))
}
