//! Sandboxes for the clients of another API, and their addresses.

use std::collections::BTreeMap;

use anyhow::Result;
use domain::SandboxId;
use serde::{Deserialize, Serialize};

use super::http as web;
use super::lifecycle::ServerClient;

/// What `coracle create --guest` asks for.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CreateGuestRequest {
    pub guest: String,
    pub name: Option<String>,
    pub image: Option<String>,
    pub network: Option<&'static str>,
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
    pub pids: Option<u32>,
    pub disk_bytes: Option<u64>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// Zero means never.
    pub timeout_seconds: Option<u64>,
    /// Zero means never.
    pub idle_timeout_seconds: Option<u64>,
}

/// The sandbox that was made or found.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GuestSandbox {
    pub id: String,
    pub name: String,
    /// The address of its API, which opens it without a key.
    pub url: String,
    #[serde(default)]
    pub existing: bool,
    #[serde(default)]
    pub lacks_network: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stand_in: Option<String>,
    /// How it was revived, if it had died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    restarted: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
}

/// The address of the API of a sandbox.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SandboxUrl {
    pub url: String,
}

impl GuestSandbox {
    /// The message about a sandbox that had died, for people.
    pub(crate) fn revival_text(&self) -> Option<String> {
        self.restarted.as_deref().map(|how| web::revival_text(how, self.cause.as_deref()))
    }
}

impl ServerClient {
    pub(crate) async fn create_guest_sandbox(&self, request: &CreateGuestRequest) -> Result<GuestSandbox> {
        let body = serde_json::to_value(request)?;
        web::read_json(self.operator_api().post_json("/sandboxes", &body).await?).await
    }

    pub(crate) async fn sandbox_url(&self, id: &SandboxId) -> Result<SandboxUrl> {
        web::read_json(self.operator_api().get(&format!("/sandboxes/{id}/url")).await?).await
    }
}
