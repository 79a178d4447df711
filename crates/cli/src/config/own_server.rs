//! The settings of a server of one's own: those of this host, except for everything that many clients share.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use fronts::{
    FrontSandboxRequest, FrontValues, RequestedNetwork, RootSandbox, SettingValues, front_sections,
};
use launcher::network::NetworkMode;
use launcher::settings::TotalLimits;
use serde::{Deserialize, Serialize};

use super::gateway::GatewaySettings;
use super::log::DEFAULT_LEVEL;
use super::{Config, OnStop, PreparedSettings, state_dir_naming};
use crate::output::WithHint;

/// The sandbox and, for the moment in which a crashed one is replaced, its successor.
const MAX_OWN_SANDBOXES: usize = 2;

/// The part of the settings that only a server of one's own has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OwnServerConfig {
    pub root: RootSandbox,
    pub sandbox: FrontSandboxRequest,
    pub listener: OwnListener,
    /// The state directory that holds the images of this host.
    pub image_state: PathBuf,
    pub announcement: AnnouncementFormat,
}

/// Where a server of one's own listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OwnListener {
    /// A socket that only its user may open.
    Socket(PathBuf),
    Network(SocketAddr),
}

/// How the server prints that it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AnnouncementFormat {
    Text,
    Json,
}

impl Config {
    /// The state directory that holds the images.
    pub(crate) fn image_state_dir(&self) -> &Path {
        self.own_server.as_ref().map_or(&self.state_dir, |own| &own.image_state)
    }

    /// The same settings with the state directory of another server of one's own.
    pub(crate) fn with_state_dir(&self, state_dir: PathBuf) -> Self {
        let naming = state_dir_naming(None, &state_dir);
        Self { naming, state_dir, ..self.clone() }
    }

    /// Turns the settings of this host into those of a server of one's own, whose state is in `state_dir`.
    pub(crate) fn into_own_server(
        mut self,
        own: OwnServerConfig,
        front_settings: SettingValues,
        state_dir: PathBuf,
    ) -> Result<Self> {
        self.fronts = own_front_values(&own.root.front, front_settings)?;
        self.naming = state_dir_naming(None, &state_dir);
        self.state_dir = state_dir;
        self.listen = match own.listener {
            OwnListener::Network(address) => address,
            OwnListener::Socket(_) => SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        };
        self.on_stop = OnStop::Remove;
        // Without a network for its one sandbox, the server prepares none.
        if let Some(network) = own.sandbox.network {
            self.network.auto_needs_link = false;
            self.network.default = match network {
                RequestedNetwork::Off => NetworkMode::Off,
                RequestedNetwork::On => NetworkMode::On,
                RequestedNetwork::Auto => NetworkMode::Auto,
                RequestedNetwork::Filtered => NetworkMode::Filtered,
            };
        }
        // Limits that were not asked for are set where they can be.
        self.require_limits = false;
        self.limits.max_sandboxes = MAX_OWN_SANDBOXES;
        self.limits.soft_sandboxes = None;
        self.limits.totals = TotalLimits::default();
        self.prepared = PreparedSettings { volumes: 0, namespaces: 0 };
        // These belong to clients of another server on this host, if there is one.
        self.api_key = None;
        self.owners = BTreeMap::new();
        self.pools = Vec::new();
        self.public_address = None;
        self.trusted_proxies = Vec::new();
        self.gateway = GatewaySettings::default();
        self.volumes.host_paths = Vec::new();
        self.volumes.reserved_paths = Vec::new();
        self.longest_timeout = None;
        let is_set = ["CORACLE_LOG", "CORACLE_LOG_LEVEL"].iter().any(|name| std::env::var_os(name).is_some());
        if self.log.level == DEFAULT_LEVEL && !is_set {
            self.log.level = "warn".to_owned();
        }
        self.own_server = Some(own);
        Ok(self)
    }
}

/// The defaults of all fronts, and the settings of the one that is served.
fn own_front_values(front: &str, mut settings: SettingValues) -> Result<FrontValues> {
    let mut values = FrontValues::new();
    for section in front_sections() {
        let written =
            if section.front == front { std::mem::take(&mut settings) } else { SettingValues::new() };
        let checked = section.check_values(written).or_else(|error| {
            let refused = Err(anyhow!("`{}.{}` is {}", section.front, error.setting, error.reason));
            match error.hint {
                Some(hint) => refused.with_hint(hint),
                None => refused,
            }
        });
        values.insert(section.front.to_owned(), checked?);
    }
    Ok(values)
}
