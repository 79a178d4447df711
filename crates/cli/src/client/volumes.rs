//! Volumes that outlive sandboxes.

use anyhow::Result;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http as web;
use super::lifecycle::Server;
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
struct Page {
    items: Vec<VolumeInfo>,
}

impl Server {
    pub(crate) async fn make_volume(&self, name: &str, size: Option<domain::Bytes>) -> Result<VolumeInfo> {
        let mut wish = json!({ "name": name });
        if let Some(size) = size {
            wish["size"] = json!(size.0.to_string());
        }
        web::json(self.operator().post_json("/volumes", &wish).await?).await
    }

    pub(crate) async fn volumes(&self, scope: &OwnerScope) -> Result<Vec<VolumeInfo>> {
        let path = format!("/volumes{}", web::query(&scope.parameters()));
        let page: Page = web::json(self.operator().get(&path).await?).await?;
        Ok(page.items)
    }

    pub(crate) async fn volume(&self, volume: &VolumeKey) -> Result<VolumeInfo> {
        web::json(self.operator().get(&path_of(volume)).await?).await
    }

    /// Returns whether the volume existed.
    pub(crate) async fn remove_volume(&self, volume: &VolumeKey) -> Result<bool> {
        match self.operator().delete(&path_of(volume)).await {
            Ok(()) => Ok(true),
            Err(error) if super::refused_with(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn path_of(volume: &VolumeKey) -> String {
    let owner = volume.owner.as_ref().map(|owner| web::query(&[("owner", owner)])).unwrap_or_default();
    format!("/volumes/{}{owner}", encoded(&volume.name))
}

fn encoded(name: &str) -> impl std::fmt::Display + '_ {
    percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC)
}
