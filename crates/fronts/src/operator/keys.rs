//! API keys of owners. Only the operator, who holds the configured key, manages them.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use domain::Owner;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;
use service::{ApiKey, ErrorKind, ServiceError};

use super::OperatorState;
use super::access::OperatorOnly;
use crate::kit::error_format;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct IssueKeyRequest {
    owner: String,
    /// If absent, the key never expires.
    #[serde(default)]
    expires_in_seconds: Option<u64>,
}

/// A key as returned to the operator; `key` is present only when it was just issued.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ApiKeyBody {
    id: String,
    owner: String,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

/// `GET /coracle/v1/keys`
pub(super) async fn list_keys(State(state): State<OperatorState>, _: OperatorOnly) -> Response {
    let keys: Vec<ApiKeyBody> =
        state.service.list_keys().into_iter().map(|key| api_key_body(key, None)).collect();
    Json(json!({ "items": keys })).into_response()
}

/// `POST /coracle/v1/keys`: issues a key for an owner. Only this response contains it.
pub(super) async fn issue_key(
    State(state): State<OperatorState>,
    _: OperatorOnly,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let (owner, expires) = match body
        .ok()
        .as_deref()
        .map_or_else(|| Err("request body missing".to_owned()), parse_issue_request)
    {
        Ok(parsed) => parsed,
        Err(why) => return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_KEY_REQUEST", &why),
    };
    match state.service.issue_key(owner, expires).await {
        Ok((key, secret)) => {
            let shown = api_key_body(key, Some(secret.expose().to_owned()));
            (StatusCode::CREATED, Json(shown)).into_response()
        }
        Err(error) => key_error_response(&error),
    }
}

/// `DELETE /coracle/v1/keys/{id}`: revokes the key. With `sandboxes=true` the owner's sandboxes are removed too if the
/// owner has no other valid key and is not the operator. The response lists them, and says how many other keys the
/// owner has.
pub(super) async fn revoke_key(
    State(state): State<OperatorState>,
    _: OperatorOnly,
    id: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response {
    let id = id.map(|Path(id)| id).unwrap_or_default();
    let query = uri.query().unwrap_or_default();
    let wanted = |(name, value): (_, _)| name == "sandboxes" && value == "true";
    if form_urlencoded::parse(query.as_bytes()).any(wanted) {
        return match state.service.revoke_key_and_sandboxes(&id).await {
            Ok(Some(revoked)) => {
                let removed: Vec<&str> = revoked.removed_sandboxes.iter().map(|id| id.as_str()).collect();
                Json(json!({
                    "owner": revoked.owner.as_str(),
                    "operator": revoked.owner == Owner::operator(),
                    "otherValidKeys": revoked.other_valid_keys,
                    "removedSandboxes": removed,
                }))
                .into_response()
            }
            Ok(None) => error_format::build_error(StatusCode::NOT_FOUND, "KEY_NOT_FOUND", "key not found"),
            Err(error) => key_error_response(&error),
        };
    }
    match state.service.revoke_key(&id).await {
        Ok(true) => StatusCode::NO_CONTENT.into_response(),
        Ok(false) => error_format::build_error(StatusCode::NOT_FOUND, "KEY_NOT_FOUND", "key not found"),
        Err(error) => key_error_response(&error),
    }
}

fn parse_issue_request(body: &[u8]) -> Result<(Owner, Option<SystemTime>), String> {
    let request: IssueKeyRequest = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let owner = Owner::parse(&request.owner).map_err(|error| format!("`owner`: {error}"))?;
    let expires = request.expires_in_seconds.map(|seconds| {
        let end = SystemTime::now().checked_add(Duration::from_secs(seconds));
        end.filter(|_| seconds > 0).ok_or("`expiresInSeconds` is 0 or too large")
    });
    Ok((owner, expires.transpose()?))
}

fn api_key_body(key: ApiKey, secret: Option<String>) -> ApiKeyBody {
    let time = |time: SystemTime| Timestamp::try_from(time).unwrap_or(Timestamp::MAX).to_string();
    ApiKeyBody {
        id: key.id,
        owner: key.owner.as_str().to_owned(),
        created_at: time(key.created),
        expires_at: key.expires.map(time),
        key: secret,
    }
}

fn key_error_response(error: &ServiceError) -> Response {
    let hint = error.hint().map(|hint| format!("; hint: {hint}")).unwrap_or_default();
    let (status, code) = match error.kind() {
        ErrorKind::Invalid => (StatusCode::CONFLICT, "NO_OPERATOR_KEY"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
    };
    let mut response = error_format::build_error(status, code, &format!("{error}{hint}"));
    error_format::add_hint(&mut response, error.hint());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_needs_an_owner_and_may_expire() {
        let (owner, expires) = parse_issue_request(br#"{"owner": "team-a"}"#).unwrap();
        assert_eq!((owner.as_str(), expires), ("team-a", None));
        let (_, expires) = parse_issue_request(br#"{"owner": "a", "expiresInSeconds": 60}"#).unwrap();
        assert!(expires.unwrap() > SystemTime::now());
        for wrong in [
            "",
            "{}",
            r#"{"owner": "A b"}"#,
            r#"{"owner": "a", "expiresInSeconds": 0}"#,
            r#"{"owner": "a", "expiresInSeconds": 18446744073709551615}"#,
            r#"{"owner": "a", "expires": 1}"#,
        ] {
            assert!(parse_issue_request(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
