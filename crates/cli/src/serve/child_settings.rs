//! The settings that the supervisor passes to the launcher and the server when it starts them.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use backend_local::identity::ServerIdentity;
use backend_local::jail::plan::JailLimits;
use backend_local::network::NetworkSettings;
use backend_local::settings::{AllowedDirectory, LauncherSettings, LifetimePolicy, MaxLimits, MountRule};
use linux::descriptors::InheritedDescriptors;
use serde::{Deserialize, Serialize};

use crate::config::{
    Config, GatewaySettings, LimitMaxima, LineMode, LogSettings, OnStop, OutputSettings, PoolSettings,
    QuotaSettings,
};

/// The settings as one part needs them. They are passed in memory only, since they contain the API key.
#[derive(Serialize, Deserialize)]
pub(crate) struct ChildSettings {
    pub listen: SocketAddr,
    pub state_dir: PathBuf,
    pub api_key: Option<String>,
    pub public_address: Option<String>,
    pub strip_line_ends: bool,
    pub on_stop: OnStop,
    pub limits: JailLimits,
    pub maxima: MaxLimits,
    pub require_limits: bool,
    pub max_sandboxes: usize,
    pub soft_sandboxes: Option<usize>,
    pub park_after: Duration,
    pub owners: BTreeMap<String, QuotaSettings>,
    pub max_commands: u32,
    pub max_snapshots: usize,
    pub max_volumes: usize,
    pub concurrent_requests: usize,
    pub json_body: usize,
    pub longest_timeout: Option<Duration>,
    pub instance: String,
    pub owns_unsigned_records: bool,
    pub uid_base: u32,
    pub server_uid: Option<u32>,
    pub aliases: BTreeMap<String, String>,
    pub strict_images: bool,
    pub image_bytes: Option<u64>,
    pub allowed_registries: Vec<String>,
    pub plain_registries: Vec<String>,
    pub free_space_floor: u64,
    pub prepared: usize,
    pub pools: Vec<PoolSettings>,
    pub host_paths: Vec<AllowedDirectory>,
    pub volume_size: u64,
    pub network: NetworkSettings,
    pub gateway: GatewaySettings,
    pub answer_timeout: Duration,
    pub renewal_interval: Duration,
    pub output: OutputSettings,
    /// How many owners have their own metrics, if any.
    pub metric_owners: Option<usize>,
    pub log: LogSettings,
    pub announce: ReadyAnnouncement,
}

/// Whether the server prints that it is ready; after a crash no one is waiting for that any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReadyAnnouncement {
    Yes,
    No,
}

impl ChildSettings {
    pub(crate) fn from_config(
        config: &Config,
        identity: &ServerIdentity,
        announce: ReadyAnnouncement,
    ) -> Self {
        Self {
            listen: config.listen,
            state_dir: config.state_dir.clone(),
            api_key: config.api_key.as_ref().map(|key| key.expose().to_owned()),
            public_address: config.public_address.clone(),
            strip_line_ends: config.lines == LineMode::Stripping,
            on_stop: config.on_stop,
            limits: default_limits(config),
            maxima: launcher_maxima(&config.limits.maxima),
            require_limits: config.require_limits,
            max_sandboxes: config.limits.max_sandboxes,
            soft_sandboxes: config.limits.soft_sandboxes,
            park_after: config.park_after,
            owners: config.owners.clone(),
            max_commands: config.limits.max_commands,
            max_snapshots: config.limits.max_snapshots,
            max_volumes: config.limits.max_volumes,
            concurrent_requests: config.limits.concurrent_requests,
            json_body: usize::try_from(config.limits.json_body.0).unwrap_or(usize::MAX),
            longest_timeout: config.longest_timeout,
            instance: identity.instance.clone(),
            owns_unsigned_records: identity.owns_unsigned_records,
            uid_base: config.uid_base,
            server_uid: super::state::server_uid(config, identity),
            aliases: config.images.aliases.clone(),
            strict_images: config.images.strict,
            image_bytes: config.images.max_bytes.map(|most| most.0),
            allowed_registries: config.images.allowed.clone(),
            plain_registries: config.images.plain.clone(),
            free_space_floor: config.free_space_floor.0,
            prepared: config.prepared.volumes.max(config.prepared.namespaces),
            pools: config.pools.clone(),
            host_paths: config.volumes.host_paths.clone(),
            volume_size: config.volumes.default_size.0,
            network: config.network.clone(),
            gateway: config.gateway.clone(),
            answer_timeout: config.answer_timeout,
            renewal_interval: config.renewal_interval,
            output: config.output,
            metric_owners: config.metrics.max_owner_series(),
            log: config.log.clone(),
            announce,
        }
    }

    /// The launcher's part of the settings.
    pub(crate) fn launcher_settings(&self) -> LauncherSettings {
        LauncherSettings {
            state_dir: self.state_dir.clone(),
            image_state: self.state_dir.clone(),
            instance: self.instance.clone(),
            owns_unsigned_records: self.owns_unsigned_records,
            uid_base: self.uid_base,
            server_uid: self.server_uid,
            aliases: self.aliases.clone(),
            strict_images: self.strict_images,
            image_bytes: self.image_bytes,
            pool_bytes: None,
            disks: None,
            free_space_floor: self.free_space_floor,
            prepared: self.prepared,
            mounts: MountRule::Below(self.host_paths.clone()),
            lifetime: LifetimePolicy::Own,
            maxima: self.maxima,
            network: self.network.clone(),
        }
    }
}

fn launcher_maxima(most: &LimitMaxima) -> MaxLimits {
    MaxLimits {
        memory: most.memory.map(|memory| memory.0),
        cpus: most.cpus.map(|cpus| cpus.0),
        pids: most.pids,
        disk: most.disk.map(|disk| disk.0),
    }
}

/// The default limits of a configuration.
pub(crate) fn default_limits(config: &Config) -> JailLimits {
    JailLimits {
        memory: config.limits.memory.0,
        cpus: config.limits.cpus.0,
        pids: config.limits.pids,
        disk: config.limits.disk.0,
    }
}

/// Keeping a descriptor open for a program that we start.
pub(crate) trait PassToChild {
    /// Lets it survive exec, and returns its number.
    fn pass_to_child(&self) -> Result<String>;
}

impl PassToChild for OwnedFd {
    fn pass_to_child(&self) -> Result<String> {
        rustix::io::fcntl_setfd(self, rustix::io::FdFlags::empty())?;
        Ok(self.as_raw_fd().to_string())
    }
}

/// The arguments and descriptors with which a part was started.
pub(crate) struct ReceivedStartup {
    pub handover: ChildSettings,
    /// Takes one byte when the part is ready.
    pub ready: OwnedFd,
    /// The pipe that brings new settings, see `update`.
    pub updates: OwnedFd,
    /// Only the server has these.
    pub others: Vec<OwnedFd>,
}

/// Reads the arguments of a part: the supervisor's pid and its descriptors. From here on, the part ends
/// with its supervisor.
pub(crate) fn receive_startup(arguments: &[String]) -> Result<ReceivedStartup> {
    let [parent, settings, ready, updates, others @ ..] = arguments else {
        bail!("this command is for `coracle serve` alone");
    };
    let mut inherited = InheritedDescriptors::claim().context("what was passed is taken already")?;
    let mut take = |number: &str| -> Result<OwnedFd> {
        let number = number.parse().context("a descriptor is a number")?;
        inherited.take(number).context("a descriptor was not passed")
    };
    let (settings, ready, updates) = (take(settings)?, take(ready)?, take(updates)?);
    let others = others.iter().map(|number| take(number)).collect::<Result<_>>()?;
    end_with_supervisor(parent.parse().context("a pid is a number")?)?;
    let handover = serde_json::from_reader(File::from(settings)).context("the settings are not readable")?;
    Ok(ReceivedStartup { handover, ready, updates, others })
}

/// Asks the kernel to kill us with the supervisor, and checks that it has not died before.
pub(crate) fn end_with_supervisor(parent: u32) -> Result<()> {
    linux::namespaces::die_with_parent()?;
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if now != Some(parent) {
        bail!("the supervisor is gone");
    }
    Ok(())
}
