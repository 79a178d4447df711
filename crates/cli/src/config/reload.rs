//! The settings that can change while the server runs.
//!
//! A reload reads the whole configuration again and applies the settings that a running server can
//! change. The rest keep their old values until a restart, which does not affect sandboxes.

use super::entries::{SettingChange, diff_configs};
use launcher::network::NetworkSettings;

use super::log::LogSettings;
use super::{Config, LimitSettings, VolumeSettings};

/// The result of reading the configuration again.
pub(crate) struct ConfigReload {
    /// The settings that are effective from now on.
    pub config: Config,
    pub applied: Vec<SettingChange>,
    /// The settings that differ and need a restart.
    pub postponed: Vec<SettingChange>,
}

impl Config {
    /// Takes from `read` the settings that can change now. The result is checked as a whole: a new value
    /// may be invalid together with an old one that stays.
    pub(crate) fn reload(&self, read: &Self) -> anyhow::Result<ConfigReload> {
        let config = self.with_reloadable(read);
        config.check_uids()?;
        config.refuse_keyless_exposure()?;
        let (applied, postponed) = (diff_configs(self, &config), diff_configs(&config, read));
        Ok(ConfigReload { config, applied, postponed })
    }

    /// Every field is named, so that each new setting needs a decision.
    fn with_reloadable(&self, read: &Self) -> Self {
        let old = self.clone();
        let new = read.clone();
        Self {
            // The callers that are accepted, and their quotas.
            api_key: new.api_key,
            owners: new.owners,
            limits: LimitSettings {
                concurrent_requests: old.limits.concurrent_requests,
                concurrent_streams: old.limits.concurrent_streams,
                connections_per_address: old.limits.connections_per_address,
                json_body: old.limits.json_body,
                totals: old.limits.totals,
                ..new.limits
            },
            require_limits: new.require_limits,
            longest_timeout: new.longest_timeout,
            park_after: new.park_after,
            volumes: VolumeSettings {
                host_paths: old.volumes.host_paths,
                reserved_paths: old.volumes.reserved_paths,
                default_size: new.volumes.default_size,
            },
            images: new.images,
            output: new.output,
            on_stop: new.on_stop,
            log: LogSettings { level: new.log.level, format: old.log.format },
            // Sockets, names and directories that exist since the start.
            listen: old.listen,
            state_dir: old.state_dir,
            naming: old.naming,
            uid_base: old.uid_base,
            free_space_floor: old.free_space_floor,
            disks: old.disks,
            // The routes of the API were built with these.
            public_address: old.public_address,
            trusted_proxies: old.trusted_proxies,
            gateway: old.gateway,
            answer_timeout: old.answer_timeout,
            fronts: old.fronts,
            own_server: old.own_server,
            // These counters run since the start.
            metrics: old.metrics,
            // These were prepared at the start.
            // Egress takes these while it runs; the rest was prepared at the start.
            network: NetworkSettings {
                filter: new.network.filter,
                upstream_proxy: new.network.upstream_proxy,
                ..old.network
            },
            most_network: old.most_network,
            prepared: old.prepared,
            pools: old.pools,
        }
    }
}
