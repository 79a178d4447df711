//! Snapshots of the server.

use std::collections::BTreeMap;

use anyhow::Result;
use domain::SnapshotId;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http as web;
use super::lifecycle::{PageInfo, ServerClient, StatusInfo};
use super::resolve::OwnerScope;

/// A snapshot as the server describes it. Unknown fields are kept for `--json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotInfo {
    pub id: String,
    pub sandbox_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub status: StatusInfo,
    pub created_at: String,
    #[serde(flatten)]
    pub rest: BTreeMap<String, serde_json::Value>,
}

/// A snapshot of any owner, as the operator sees it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OwnedSnapshot {
    pub id: String,
    pub owner: String,
    pub sandbox_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub state: String,
    pub image: String,
    pub size_bytes: u64,
    pub created_at: String,
}

#[derive(Deserialize)]
struct OwnedSnapshotPage {
    items: Vec<OwnedSnapshot>,
}

#[derive(Deserialize)]
struct SnapshotInfoPage {
    items: Vec<SnapshotInfo>,
    pagination: PageInfo,
}

impl SnapshotInfo {
    /// The server's message about its state.
    pub(crate) fn message(&self) -> &str {
        self.status.rest.get("message").and_then(|message| message.as_str()).unwrap_or_default()
    }
}

impl ServerClient {
    /// Begins a snapshot, which becomes ready a moment later.
    pub(crate) async fn take_snapshot(&self, sandbox: &str, name: Option<&str>) -> Result<SnapshotInfo> {
        let request = name.map_or(json!({}), |name| json!({ "name": name }));
        web::read_json(self.api().post_json(&format!("/sandboxes/{sandbox}/snapshots"), &request).await?)
            .await
    }

    pub(crate) async fn snapshot_info(&self, id: &str) -> Result<SnapshotInfo> {
        web::read_json(self.api().get(&format!("/snapshots/{id}")).await?).await
    }

    /// All snapshots, or those of one sandbox, newest first.
    pub(crate) async fn list_snapshots(&self, sandbox: Option<&str>) -> Result<Vec<SnapshotInfo>> {
        let mut found = Vec::new();
        for page in 1u32.. {
            let number = page.to_string();
            let mut pairs = vec![("page", number.as_str()), ("pageSize", "200")];
            pairs.extend(sandbox.map(|id| ("sandboxId", id)));
            let answer = self.api().get(&format!("/snapshots{}", web::encode_query(&pairs))).await?;
            let page: SnapshotInfoPage = web::read_json(answer).await?;
            // An empty page ends the loop whatever the server claims, so it always ends.
            let last = !page.pagination.has_next_page || page.items.is_empty();
            found.extend(page.items);
            if last {
                break;
            }
        }
        Ok(found)
    }

    /// Returns whether the snapshot existed.
    pub(crate) async fn delete_snapshot(&self, id: &str) -> Result<bool> {
        match self.api().delete(&format!("/snapshots/{id}")).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The snapshots of one owner, or of all, newest first.
    pub(crate) async fn list_owned_snapshots(&self, scope: &OwnerScope) -> Result<Vec<OwnedSnapshot>> {
        let path = format!("/snapshots{}", web::encode_query(&scope.query_parameters()));
        let page: OwnedSnapshotPage = web::read_json(self.operator_api().get(&path).await?).await?;
        Ok(page.items)
    }

    pub(crate) async fn owned_snapshot_info(&self, id: &SnapshotId) -> Result<OwnedSnapshot> {
        web::read_json(self.operator_api().get(&format!("/snapshots/{id}")).await?).await
    }

    /// Removes a snapshot of any owner, as the operator; returns whether it existed.
    pub(crate) async fn remove_owned_snapshot(&self, id: &SnapshotId) -> Result<bool> {
        match self.operator_api().delete(&format!("/snapshots/{id}")).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
