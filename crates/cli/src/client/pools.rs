//! The pools of the server.

use std::collections::BTreeMap;

use anyhow::Result;
use domain::{Bytes, MilliCpus};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::http as web;
use super::lifecycle::{ImageUri, ServerClient};
use crate::args::PoolSizeArgs;

/// The settings of a new pool; the server chooses what is not given.
pub(crate) struct CreatePoolRequest {
    pub name: String,
    pub image: String,
    pub size: PoolSizeArgs,
    pub memory: Option<Bytes>,
    pub cpus: Option<MilliCpus>,
    pub disk: Option<Bytes>,
    pub refill: Option<(u32, u32)>,
}

/// A pool as the server describes it. Unknown fields are kept for `--json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolInfo {
    pub name: String,
    pub image: ImageUri,
    pub capacity_spec: CapacityInfo,
    pub status: PoolStatus,
    pub managed_by: String,
    /// The message of the server about an image that stands in for another, at a create.
    #[serde(skip)]
    pub stand_in: Option<String>,
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CapacityInfo {
    pub buffer_max: u32,
    pub pool_max: u32,
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PoolStatus {
    pub available: u64,
    pub allocated: u64,
    pub claimed: u64,
    pub cold: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct PoolPage {
    items: Vec<PoolInfo>,
}

impl ServerClient {
    pub(crate) async fn list_pools(&self) -> Result<Vec<PoolInfo>> {
        let page: PoolPage = web::read_json(self.0.get("/pools").await?).await?;
        Ok(page.items)
    }

    pub(crate) async fn pool_info(&self, name: &str) -> Result<PoolInfo> {
        web::read_json(self.0.get(&pool_path(name)).await?).await
    }

    pub(crate) async fn create_pool(&self, pool: &CreatePoolRequest) -> Result<PoolInfo> {
        let answer = self.0.post_json("/pools", &pool.to_json()).await?;
        let stand_in = web::stand_in_message(&answer);
        Ok(PoolInfo { stand_in, ..web::read_json(answer).await? })
    }

    pub(crate) async fn set_pool(&self, name: &str, size: PoolSizeArgs) -> Result<PoolInfo> {
        let body = json!({ "capacitySpec": capacity_json(size) });
        web::read_json(self.0.put_json(&pool_path(name), &body).await?).await
    }

    /// Returns whether the pool existed.
    pub(crate) async fn remove_pool(&self, name: &str) -> Result<bool> {
        match self.0.delete(&pool_path(name)).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl CreatePoolRequest {
    fn to_json(&self) -> Value {
        let mut limits = BTreeMap::new();
        limits.extend(self.memory.map(|memory| ("memory", memory.to_string())));
        limits.extend(self.cpus.map(|cpus| ("cpu", cpus.to_string())));
        limits.extend(self.disk.map(|disk| ("ephemeral-storage", disk.to_string())));
        let container = json!({ "name": "main", "image": self.image, "resources": { "limits": limits } });
        let mut body = json!({
            "name": self.name,
            "template": { "spec": { "containers": [container] } },
            "capacitySpec": capacity_json(self.size),
        });
        if let Some((per_second, at_once)) = self.refill {
            body["refill"] = json!({ "perSecond": per_second, "atOnce": at_once });
        }
        body
    }
}

fn capacity_json(size: PoolSizeArgs) -> Value {
    let most = size.max.unwrap_or(u32::MAX);
    json!({ "bufferMax": size.level, "bufferMin": 0, "poolMax": most, "poolMin": 0 })
}

fn pool_path(name: &str) -> String {
    format!("/pools/{}", percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC))
}
