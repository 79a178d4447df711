//! The settings that the supervisor passes to the launcher and the server when it starts them.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use domain::SandboxLimits;
use launcher::identity::ServerIdentity;
use launcher::network::NetworkSettings;
use launcher::settings::{LauncherSettings, LifetimePolicy, MaxLimits, MountRule};
use linux::descriptors::InheritedDescriptors;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use service::{AliasRule, ImageAliases};

use crate::config::{Config, LimitMaxima, LimitSettings};

/// What one part gets: the configuration as it was checked, and the facts that only the supervisor
/// knows. It is passed in memory only, since it contains the API key.
#[derive(Serialize, Deserialize)]
pub(crate) struct ChildSettings {
    pub config: Config,
    pub identity: ServerIdentity,
    /// The uid that the server switches to; `None` if the supervisor is not root.
    pub server_uid: Option<u32>,
    pub announce: ReadyAnnouncement,
    /// The limit on open files with which the supervisor was started, for programs in sandboxes.
    #[serde(default)]
    pub open_files: Option<u64>,
}

/// Whether the server prints that it is ready; after a crash no one is waiting for that any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReadyAnnouncement {
    Yes,
    No,
}

impl ChildSettings {
    pub(crate) fn new(config: &Config, identity: &ServerIdentity, announce: ReadyAnnouncement) -> Self {
        let server_uid = super::state::server_uid(config, identity);
        Self { config: config.clone(), identity: identity.clone(), server_uid, announce, open_files: None }
    }

    /// The uid of egress: one of the range that is reserved for servers, beside the server's own and that of pullers.
    pub(crate) fn egress_uid(&self) -> Option<u32> {
        let base = self.config.uid_base;
        self.server_uid.map(|server| base + ((server - base) ^ 2))
    }

    /// The launcher's part of the settings.
    pub(crate) fn launcher_settings(&self) -> LauncherSettings {
        let config = &self.config;
        LauncherSettings {
            state_dir: config.state_dir.clone(),
            image_state: config.image_state_dir().to_owned(),
            instance: self.identity.instance.clone(),
            owns_unsigned_records: self.identity.owns_unsigned_records,
            uid_base: config.uid_base,
            server_uid: self.server_uid,
            image_bytes: config.images.max_bytes.map(|most| most.0),
            pool_bytes: None,
            disks: config.disks.required_kind(),
            free_space_floor: config.free_space_floor.0,
            prepared: config.prepared.volumes.max(config.prepared.namespaces),
            mounts: MountRule::Below(
                [config.volumes.host_paths.clone(), config.volumes.reserved_paths.clone()].concat(),
            ),
            lifetime: LifetimePolicy::Own,
            maxima: launcher_maxima(&config.limits.maxima),
            totals: config.limits.totals,
            network: NetworkSettings {
                auto_needs_link: config.network.auto_needs_link && !self.identity.auto_without_link,
                ..config.network.clone()
            },
            open_files: self.open_files,
            egress_uid: self.egress_uid(),
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
pub(crate) fn default_limits(config: &Config) -> SandboxLimits {
    let LimitSettings { memory, cpus, pids, disk, .. } = config.limits;
    SandboxLimits { memory, cpus, pids, disk }
}

/// The aliases of a configuration.
pub(crate) fn image_aliases(config: &Config) -> ImageAliases {
    let table = config.images.aliases.iter().map(|(name, target)| (name.clone(), target.clone()));
    let rule = if config.images.strict { AliasRule::Refuse } else { AliasRule::OperatorThenHost };
    ImageAliases { table: table.collect(), rule }
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
pub(crate) struct ReceivedStartup<S = ChildSettings> {
    pub settings: S,
    /// Takes one byte when the part is ready.
    pub ready: OwnedFd,
    /// The pipe that brings new settings, see `update`.
    pub updates: OwnedFd,
    /// What only some of them have.
    pub others: Vec<OwnedFd>,
}

/// Reads the arguments of a part: the supervisor's pid and its descriptors. From here on, the part ends
/// with its supervisor.
pub(crate) fn receive_startup<S: DeserializeOwned>(arguments: &[String]) -> Result<ReceivedStartup<S>> {
    let [parent, settings, ready, updates, others @ ..] = arguments else {
        bail!("this command is for `coracle serve` alone");
    };
    let mut inherited = InheritedDescriptors::claim().context("what was passed is taken already")?;
    let mut take = |number: &str| -> Result<OwnedFd> {
        let number = number.parse().context("a descriptor is a number")?;
        inherited.take(number).context("a descriptor was not passed")
    };
    let (memory, ready, updates) = (take(settings)?, take(ready)?, take(updates)?);
    let others = others.iter().map(|number| take(number)).collect::<Result<_>>()?;
    end_with_supervisor(parent.parse().context("a pid is a number")?)?;
    let settings = serde_json::from_reader(File::from(memory)).context("the settings are not readable")?;
    Ok(ReceivedStartup { settings, ready, updates, others })
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
