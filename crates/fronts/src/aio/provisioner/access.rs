//! Access to the provisioner: the holder of any owner's key may use it.

use axum::extract::FromRequestParts;
use domain::Owner;
use http::request::Parts;

use super::ProvisionerState;
use super::problem::ProvisionerProblem;
use crate::kit::headers::header_text;
use crate::server::concurrency::{self, CallerProof};

pub(super) const KEY_HEADER: &str = "x-api-key";

/// The owner behind the key of a request. A server without keys refuses everyone, since the client that creates a
/// sandbox here chooses its mounts.
pub(super) struct ProvisionerCaller(pub(super) Owner);

impl FromRequestParts<ProvisionerState> for ProvisionerCaller {
    type Rejection = ProvisionerProblem;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &ProvisionerState,
    ) -> Result<Self, ProvisionerProblem> {
        let key = header_text(&parts.headers, KEY_HEADER).filter(|_| !state.service.has_no_keys());
        let owner = key.and_then(|key| state.service.owner_by_key(key));
        let owner = owner.ok_or(ProvisionerProblem::Unauthorized)?;
        concurrency::admit_request(&state.service, &parts.extensions, &owner, CallerProof::Presented)?;
        Ok(Self(owner))
    }
}
