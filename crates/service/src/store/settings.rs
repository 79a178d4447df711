//! The settings that a snapshot records, as a JSON column. As in `columns`, unknown fields are ignored and missing ones
//! have a default, so that rows of other versions can be read.

use std::collections::BTreeMap;

use domain::{OnDeath, SandboxSettings};
use serde::{Deserialize, Serialize};

use super::columns::{GuestJson, NetworkJson, ResourcesJson};
use super::policies::PolicyJson;
use super::rows::{duration_from_micros, duration_to_micros};

#[derive(Serialize, Deserialize)]
pub(super) struct SettingsJson {
    network: NetworkJson,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    policy: Option<PolicyJson>,
    #[serde(default)]
    resources: ResourcesJson,
    /// In microseconds, as is the idle timeout.
    #[serde(default)]
    timeout: Option<i64>,
    #[serde(default)]
    idle_timeout: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_death: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    env_file: Option<String>,
    guest: GuestJson,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    origin: String,
    #[serde(default)]
    notes: Vec<u8>,
}

impl SettingsJson {
    pub(super) fn from_domain(settings: &SandboxSettings) -> Self {
        Self {
            network: NetworkJson::from_domain(settings.network),
            policy: settings.policy.as_deref().map(PolicyJson::from_domain),
            resources: ResourcesJson::from_domain(&settings.resources),
            timeout: settings.timeout.map(duration_to_micros),
            idle_timeout: settings.idle_timeout.map(duration_to_micros),
            on_death: settings.on_death.map(|choice| choice.name().to_owned()),
            env: settings.env.clone(),
            env_file: settings.env_file.clone(),
            guest: GuestJson::from_domain(&settings.guest),
            labels: settings.labels.clone(),
            origin: settings.origin.clone(),
            notes: settings.notes.clone(),
        }
    }

    pub(super) fn into_domain(self) -> SandboxSettings {
        SandboxSettings {
            network: self.network.into_domain(),
            policy: self.policy.map(PolicyJson::into_domain),
            resources: self.resources.into_domain(),
            timeout: self.timeout.map(duration_from_micros),
            idle_timeout: self.idle_timeout.map(duration_from_micros),
            on_death: self.on_death.as_deref().and_then(OnDeath::parse),
            env: self.env,
            env_file: self.env_file,
            guest: self.guest.into_domain(),
            labels: self.labels,
            origin: self.origin,
            notes: self.notes,
        }
    }
}
