//! Which settings can change while the server runs.
//!
//! A reload reads everything anew and takes over what a running server can change. The rest keeps
//! its old value until a restart, which leaves sandboxes alone.

use super::entries::{SettingChange, changes};
use super::log::LogSettings;
use super::{Config, Limits, Volumes};

/// What becomes of a configuration that was read anew.
pub(crate) struct Reload {
    /// What holds from now on.
    pub config: Config,
    pub applied: Vec<SettingChange>,
    /// What differs and needs a restart.
    pub postponed: Vec<SettingChange>,
}

impl Config {
    /// Takes over from `read` what can change now. The result is checked as a whole: a new value may
    /// be wrong beside an old one that stays.
    pub(crate) fn reload(&self, read: &Self) -> anyhow::Result<Reload> {
        let config = self.with_reloadable(read);
        config.check_uids()?;
        config.refuse_keyless_exposure()?;
        let (applied, postponed) = (changes(self, &config), changes(&config, read));
        Ok(Reload { config, applied, postponed })
    }

    /// Every field is named, so that the next setting needs a decision.
    fn with_reloadable(&self, read: &Self) -> Self {
        let old = self.clone();
        let new = read.clone();
        Self {
            // Who may call, and how much they may have.
            api_key: new.api_key,
            owners: new.owners,
            limits: Limits {
                concurrent_requests: old.limits.concurrent_requests,
                json_body: old.limits.json_body,
                ..new.limits
            },
            require_limits: new.require_limits,
            longest_timeout: new.longest_timeout,
            park_after: new.park_after,
            volumes: Volumes { host_paths: old.volumes.host_paths, default_size: new.volumes.default_size },
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
            // What the routes of the API were built with.
            public_address: old.public_address,
            lines: old.lines,
            gateway: old.gateway,
            answer_timeout: old.answer_timeout,
            renewal_interval: old.renewal_interval,
            // Counters that run since the start.
            metrics: old.metrics,
            // What was prepared ahead.
            network: old.network,
            prepared: old.prepared,
            pools: old.pools,
        }
    }
}
