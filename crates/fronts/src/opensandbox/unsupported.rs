//! Features that this server does not support, each with the response that clients expect then.

use http::StatusCode;

use super::access::ApiKeyOwner;
use super::problem::Problem;

/// `/templates…`
pub(super) async fn refuse_templates(ApiKeyOwner(_): ApiKeyOwner) -> Problem {
    let message = "templates are not offered by this server";
    Problem::new(StatusCode::NOT_IMPLEMENTED, "FSB::API_NOT_SUPPORTED", message)
}
