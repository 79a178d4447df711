//! The configuration as it was written: every key is optional, and only names and types are checked.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::pools::RawPool;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawConfig {
    pub listen: Option<String>,
    pub state_dir: Option<PathBuf>,
    pub api_key: Option<String>,
    pub public_address: Option<String>,
    pub trusted_proxies: Option<Vec<String>>,
    pub instance: Option<String>,
    pub on_stop: Option<String>,
    pub require_limits: Option<bool>,
    pub uid_base: Option<u32>,
    pub free_space_floor: Option<RawAmount>,
    pub disks: Option<String>,
    pub longest_timeout: Option<RawAmount>,
    pub park_after: Option<RawAmount>,
    pub answer_timeout: Option<RawAmount>,
    #[serde(default)]
    pub log: RawLog,
    #[serde(default)]
    pub images: RawImages,
    #[serde(default)]
    pub limits: RawLimits,
    #[serde(default)]
    pub prepared: RawPrepared,
    #[serde(default)]
    pub volumes: RawVolumes,
    #[serde(default)]
    pub owners: BTreeMap<String, RawQuota>,
    #[serde(default)]
    pub pool: Vec<RawPool>,
    #[serde(default)]
    pub network: RawNetwork,
    #[serde(default)]
    pub gateway: RawGateway,
    #[serde(default)]
    pub output: RawOutput,
    #[serde(default)]
    pub metrics: RawMetrics,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMetrics {
    pub per_owner: Option<bool>,
    pub max_owners: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawOutput {
    pub kept: Option<RawAmount>,
    pub max_kept: Option<RawAmount>,
    pub stall_timeout: Option<RawAmount>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLog {
    pub level: Option<String>,
    pub format: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawImages {
    pub strict: Option<bool>,
    pub max_bytes: Option<RawAmount>,
    pub pull: Option<String>,
    #[serde(default)]
    pub registries: Vec<String>,
    #[serde(default)]
    pub plain_http: Vec<String>,
    #[serde(default)]
    pub aliases: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLimits {
    pub memory: Option<RawAmount>,
    pub cpus: Option<RawAmount>,
    pub pids: Option<u32>,
    pub disk: Option<RawAmount>,
    pub max_memory: Option<RawAmount>,
    pub max_cpus: Option<RawAmount>,
    pub max_pids: Option<u32>,
    pub max_disk: Option<RawAmount>,
    pub total_memory: Option<RawAmount>,
    pub total_cpus: Option<RawAmount>,
    pub total_pids: Option<u32>,
    pub max_sandboxes: Option<usize>,
    pub soft_sandboxes: Option<usize>,
    pub max_commands: Option<u32>,
    pub max_snapshots: Option<usize>,
    pub max_volumes: Option<usize>,
    pub open_files_percent: Option<u8>,
    pub concurrent_requests: Option<usize>,
    pub concurrent_streams: Option<usize>,
    pub connections_per_address: Option<usize>,
    pub json_body: Option<RawAmount>,
}

/// The quota of one owner.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawQuota {
    pub sandboxes: Option<usize>,
    pub cpus: Option<RawAmount>,
    pub memory: Option<RawAmount>,
    pub disk: Option<RawAmount>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPrepared {
    pub volumes: Option<usize>,
    pub namespaces: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawVolumes {
    pub host_paths: Option<RawPaths>,
    pub default_size: Option<RawAmount>,
}

/// Paths: a list, or, in a variable, separated by `:`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum RawPaths {
    List(Vec<PathBuf>),
    Text(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNetwork {
    pub default: Option<String>,
    pub most: Option<String>,
    pub range: Option<String>,
    pub range6: Option<String>,
    pub resolvers: Option<Vec<String>>,
    pub allow: Option<Vec<String>>,
    pub deny: Option<Vec<String>>,
    pub upstream_proxy: Option<String>,
    #[serde(default)]
    pub filter: RawFilter,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFilter {
    pub always_deny: Option<Vec<String>>,
    pub always_allow: Option<Vec<String>>,
    pub rules: Option<Vec<String>>,
    pub connections: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawGateway {
    pub mode: Option<String>,
    pub domain: Option<String>,
    pub public: Option<bool>,
}

/// A quantity: text with a unit, or a bare TOML number.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum RawAmount {
    Text(String),
    Whole(u64),
    Decimal(f64),
}

impl RawAmount {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Whole(number) => number.to_string(),
            Self::Decimal(number) => number.to_string(),
        }
    }
}
