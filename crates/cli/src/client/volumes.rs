//! Volumes that outlive sandboxes.

use anyhow::Result;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http as web;
use super::lifecycle::ServerClient;
use super::resolve::{OwnerScope, VolumeKey};

/// A volume as the server describes it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VolumeInfo {
    pub name: String,
    pub id: String,
    pub owner: String,
    pub size_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    pub deleted_with_sandboxes: bool,
    pub sandboxes: Vec<String>,
    pub created_at: String,
}

#[derive(Deserialize)]
struct VolumePage {
    items: Vec<VolumeInfo>,
}

impl ServerClient {
    pub(crate) async fn create_volume(&self, name: &str, size: Option<domain::Bytes>) -> Result<VolumeInfo> {
        let mut request = json!({ "name": name });
        if let Some(size) = size {
            request["size"] = json!(size.0.to_string());
        }
        web::read_json(self.operator_api().post_json("/volumes", &request).await?).await
    }

    pub(crate) async fn list_volumes(&self, scope: &OwnerScope) -> Result<Vec<VolumeInfo>> {
        let path = format!("/volumes{}", web::encode_query(&scope.query_parameters()));
        let page: VolumePage = web::read_json(self.operator_api().get(&path).await?).await?;
        Ok(page.items)
    }

    pub(crate) async fn volume_info(&self, volume: &VolumeKey) -> Result<VolumeInfo> {
        web::read_json(self.operator_api().get(&volume_path(volume)).await?).await
    }

    /// Returns whether the volume existed.
    pub(crate) async fn remove_volume(&self, volume: &VolumeKey) -> Result<bool> {
        match self.operator_api().delete(&volume_path(volume)).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn volume_path(volume: &VolumeKey) -> String {
    let owner = volume.owner.as_ref().map(|owner| web::encode_query(&[("owner", owner)])).unwrap_or_default();
    format!("/volumes/{}{owner}", percent_encode(&volume.name))
}

fn percent_encode(name: &str) -> impl std::fmt::Display + '_ {
    percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC)
}
