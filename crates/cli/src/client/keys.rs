//! The API keys of the server.

use std::time::Duration;

use anyhow::Result;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http as web;
use super::lifecycle::ServerClient;

/// A key as the server describes it; the key itself is included only when it was just made.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeyInfo {
    pub id: String,
    pub owner: String,
    pub created_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

#[derive(Deserialize)]
struct KeyPage {
    items: Vec<KeyInfo>,
}

/// A key that was revoked together with the sandboxes of its owner, unless those are kept.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RevokedKey {
    pub owner: String,
    /// Whether the owner is the operator, whose sandboxes are always kept.
    pub operator: bool,
    pub other_valid_keys: usize,
    pub removed_sandboxes: Vec<String>,
}

impl ServerClient {
    pub(crate) async fn issue_key(&self, owner: &str, expires: Option<Duration>) -> Result<KeyInfo> {
        let mut request = json!({ "owner": owner });
        if let Some(expires) = expires {
            request["expiresInSeconds"] = json!(web::whole_seconds(expires));
        }
        web::read_json(self.operator_api().post_json("/keys", &request).await?).await
    }

    pub(crate) async fn list_keys(&self) -> Result<Vec<KeyInfo>> {
        let page: KeyPage = web::read_json(self.operator_api().get("/keys").await?).await?;
        Ok(page.items)
    }

    /// Returns whether the key existed.
    pub(crate) async fn revoke_key(&self, id: &str) -> Result<bool> {
        let id = percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC);
        match self.operator_api().delete(&format!("/keys/{id}")).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// As [`ServerClient::revoke_key`], and removes the owner's sandboxes with the owner's last valid key.
    /// `None` if the key does not exist.
    pub(crate) async fn revoke_key_and_sandboxes(&self, id: &str) -> Result<Option<RevokedKey>> {
        let id = percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC);
        match self.operator_api().delete_for_response(&format!("/keys/{id}?sandboxes=true")).await {
            Ok(answer) => web::read_json(answer).await.map(Some),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
