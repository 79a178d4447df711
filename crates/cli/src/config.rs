//! The settings of this host: `coracle.toml`, then `CORACLE_` variables, then flags. Each overrides the
//! one before.
//!
//! `RawConfig` holds the settings as they were written; [`Config`] holds the effective ones, checked and
//! with defaults. Only `Config` is passed to other parts.

mod disks;
mod entries;
mod env_settings;
mod front_sections;
mod gateway;
mod layers;
mod log;
mod metrics;
mod network;
mod output;
mod own_server;
mod pools;
mod quantity;
mod raw;
mod reload;
mod totals;
mod volumes;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use domain::{Bytes, MIN_MEMORY, MilliCpus};
use launcher::identity::InstanceNaming;
use launcher::network::{NetworkMode, NetworkSettings};
use launcher::settings::TotalLimits;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::args::{ServeArgs, StateArgs};
use crate::output::WithHint;
use crate::values;
pub(crate) use disks::DiskStorage;
pub(crate) use entries::{SettingChange, SettingEntry};
use fronts::FrontValues;
pub(crate) use gateway::GatewaySettings;
pub(crate) use layers::{ConfigLayers, SettingSource};
pub(crate) use log::{LogFormat, LogSettings};
pub(crate) use metrics::MetricsSettings;
pub(crate) use output::OutputSettings;
pub(crate) use own_server::{AnnouncementFormat, OwnListener, OwnServerConfig};
pub(crate) use pools::{PoolSettings, to_domain_network as network_of};
use raw::{RawAmount, RawConfig, RawImages, RawLimits, RawPrepared, RawQuota};
pub(crate) use reload::ConfigReload;
pub(crate) use volumes::VolumeSettings;

/// The effective settings. The supervisor passes them to the other parts as they are, in memory only:
/// their serialised form contains the secrets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub listen: SocketAddr,
    /// Absolute.
    pub state_dir: PathBuf,
    pub api_key: Option<OperatorKey>,
    /// The `host[:port]` that responses give to clients instead of the one they used.
    pub public_address: Option<String>,
    /// Reverse proxies: addresses and networks, as written.
    pub trusted_proxies: Vec<String>,
    /// How the state directory is named if it has no identity yet.
    pub naming: InstanceNaming,
    pub on_stop: OnStop,
    pub images: ImageSettings,
    pub limits: LimitSettings,
    /// Whether a default limit that this host cannot enforce fails a create.
    pub require_limits: bool,
    /// The first host uid that sandboxes may be given.
    pub uid_base: u32,
    /// Creates are refused while the disk of the state directory has less free space than this.
    #[serde(with = "quantity")]
    pub free_space_floor: Bytes,
    /// How the disks of sandboxes and volumes are stored, as root.
    pub disks: DiskStorage,
    /// The longest expiry a client may ask for.
    pub longest_timeout: Option<Duration>,
    /// The quota of each owner, by name of the owner.
    pub owners: BTreeMap<String, QuotaSettings>,
    /// How long a sandbox with a key must be unused before it may be evicted for another.
    pub park_after: Duration,
    pub prepared: PreparedSettings,
    /// The pools of warm sandboxes.
    pub pools: Vec<PoolSettings>,
    pub volumes: VolumeSettings,
    pub network: NetworkSettings,
    /// The widest network that a client may ask for.
    pub most_network: NetworkMode,
    pub gateway: GatewaySettings,
    /// How long a service inside a sandbox may take to begin its response.
    pub answer_timeout: Duration,
    /// The settings in the sections of the fronts.
    pub fronts: FrontValues,
    pub output: OutputSettings,
    pub metrics: MetricsSettings,
    pub log: LogSettings,
    /// Set only in a server of one's own; no configuration contains it.
    pub own_server: Option<OwnServerConfig>,
}

/// An API key. It is never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OperatorKey(String);

impl OperatorKey {
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for OperatorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Whether sandboxes survive a stop of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OnStop {
    /// They keep running; the next server adopts them.
    Keep,
    Remove,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ImageSettings {
    /// Refuse names that are only an alias.
    pub strict: bool,
    pub aliases: BTreeMap<String, String>,
    /// The maximum size of all layers together; beyond it, unused images are removed.
    #[serde(with = "quantity")]
    pub max_bytes: Option<Bytes>,
    /// Registries from which an image is fetched when a sandbox needs it; nothing is fetched if this is
    /// empty.
    pub allowed: Vec<String>,
    /// Registries that are contacted without TLS.
    pub plain: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LimitSettings {
    #[serde(with = "quantity")]
    pub memory: Bytes,
    #[serde(with = "quantity")]
    pub cpus: MilliCpus,
    pub pids: u32,
    #[serde(with = "quantity")]
    pub disk: Bytes,
    /// The maximum that one sandbox of a server may be given.
    pub maxima: LimitMaxima,
    /// The limits of all sandboxes of a server together.
    pub totals: TotalLimits,
    pub max_sandboxes: usize,
    /// From this number on, parked sandboxes are evicted for new ones.
    pub soft_sandboxes: Option<usize>,
    /// Per sandbox.
    pub max_commands: u32,
    /// Per owner.
    pub max_snapshots: usize,
    /// Per owner.
    pub max_volumes: usize,
    /// The part of the host's table of open files at which the sandbox with the most of them is ended.
    pub open_files_percent: u8,
    pub concurrent_requests: usize,
    pub concurrent_streams: usize,
    /// Of connections that have not presented a key.
    pub connections_per_address: usize,
    #[serde(with = "quantity")]
    pub json_body: Bytes,
}

/// Upper bounds on the requests of clients; `None` means no bound.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LimitMaxima {
    #[serde(with = "quantity")]
    pub memory: Option<Bytes>,
    #[serde(with = "quantity")]
    pub cpus: Option<MilliCpus>,
    pub pids: Option<u32>,
    #[serde(with = "quantity")]
    pub disk: Option<Bytes>,
}

/// The quota of an owner; a missing value means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QuotaSettings {
    pub sandboxes: Option<usize>,
    pub millicpus: Option<u32>,
    pub memory: Option<u64>,
    pub disk: Option<u64>,
}

/// The name under which the quota of all other owners is written.
pub(crate) const OTHER_OWNERS: &str = "*";

/// The resources that are prepared before the first request for them.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct PreparedSettings {
    pub volumes: usize,
    pub namespaces: usize,
}

impl Default for PreparedSettings {
    fn default() -> Self {
        Self { volumes: 16, namespaces: 16 }
    }
}

/// The number of host uids that one sandbox occupies.
const UIDS_PER_SANDBOX: u64 = 1 << 16;
/// There are 4096 ranges of uids, and some may belong to users of the host.
const MAX_SANDBOXES: usize = 4000;

impl Config {
    /// The settings of `coracle serve`.
    pub(crate) fn for_server(args: &ServeArgs) -> Result<Self> {
        Self::with_layers(&args.state, args.listen).map(|(config, _)| config)
    }

    /// As [`Config::for_server`], with the source of each setting.
    pub(crate) fn with_layers(state: &StateArgs, listen: Option<SocketAddr>) -> Result<(Self, ConfigLayers)> {
        let mut flags = state_flags(state)?;
        if let Some(listen) = listen {
            env_settings::insert_setting(&mut flags, "listen", Value::String(listen.to_string()));
        }
        let layers = ConfigLayers::read(state, flags)?;
        let config = layers.effective_config()?;
        config.refuse_keyless_exposure()?;
        Ok((config, layers))
    }

    /// The settings of everything that works on this host without a server.
    pub(crate) fn for_host(args: &StateArgs) -> Result<Self> {
        ConfigLayers::read(args, state_flags(args)?)?.effective_config()
    }

    /// Turns the merged layers into effective settings.
    fn from_table(mut table: Table) -> Result<Self> {
        let fronts = front_sections::take_front_values(&mut table)?;
        Self::from_raw(RawConfig::deserialize(Value::Table(table))?, fronts)
    }

    /// Turns the written settings into effective ones.
    fn from_raw(raw: RawConfig, fronts: FrontValues) -> Result<Self> {
        let state_dir = match raw.state_dir {
            Some(directory) => std::path::absolute(directory).context("could not resolve `state_dir`")?,
            None => default_state_dir()?,
        };
        let most_network = raw.network.most.clone();
        let network = network::check_network(raw.network)?;
        let most_network = network::check_most(most_network.as_deref(), network.default)?;
        let config = Self {
            listen: match raw.listen {
                Some(text) => text.parse().map_err(|error| invalid_setting("listen", &text, error))?,
                None => SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            },
            api_key: raw.api_key.map(check_key).transpose()?,
            public_address: raw.public_address.map(check_public_address).transpose()?,
            trusted_proxies: check_trusted_proxies(raw.trusted_proxies.unwrap_or_default())?,
            naming: state_dir_naming(raw.instance.map(check_instance).transpose()?, &state_dir),
            on_stop: check_on_stop(raw.on_stop.as_deref())?,
            images: check_images(raw.images)?,
            limits: check_limits(&raw.limits, launcher::container::container_limits())?,
            require_limits: raw.require_limits.unwrap_or(true),
            uid_base: raw.uid_base.unwrap_or(launcher::DEFAULT_UID_BASE),
            disks: DiskStorage::parse(raw.disks.as_deref())?,
            free_space_floor: parse_bytes_or(
                "free_space_floor",
                raw.free_space_floor.as_ref(),
                Bytes::from_mib(512),
            )?,
            owners: check_owners(&raw.owners)?,
            park_after: parse_duration_or("park_after", raw.park_after.as_ref(), 600)?,
            longest_timeout: raw
                .longest_timeout
                .map(|amount| parse_amount("longest_timeout", &amount, values::parse_duration))
                .transpose()?,
            prepared: check_prepared(&raw.prepared)?,
            volumes: volumes::check_volumes(
                &raw.volumes,
                &state_dir,
                &front_sections::reserved_directories(&fronts),
            )?,
            pools: pools::check_pools(&raw.pool, network.default, &fronts)?,
            gateway: gateway::check_gateway(raw.gateway)?,
            answer_timeout: parse_duration_or("answer_timeout", raw.answer_timeout.as_ref(), 180)?,
            fronts,
            output: output::check_output(&raw.output)?,
            metrics: metrics::check_metrics(&raw.metrics)?,
            log: log::check_log(raw.log)?,
            own_server: None,
            network,
            most_network,
            state_dir,
        };
        config.check_uids()?;
        Ok(config)
    }

    /// Every sandbox needs its own range above `uid_base`, and one more is reserved for the server
    /// itself.
    fn check_uids(&self) -> Result<()> {
        if self.limits.max_sandboxes > MAX_SANDBOXES {
            bail!("`limits.max_sandboxes` is {}, more than {MAX_SANDBOXES}", self.limits.max_sandboxes);
        }
        let ranges = self.limits.max_sandboxes as u64 + 1;
        let end = u64::from(self.uid_base) + ranges * UIDS_PER_SANDBOX;
        if u64::from(self.uid_base) < UIDS_PER_SANDBOX {
            return Err(anyhow!("`uid_base` is {}, among the host's own users", self.uid_base))
                .with_hint("choose a number that no entry of /etc/subuid covers");
        }
        if end > u64::from(u32::MAX) {
            bail!("`uid_base` {} leaves no room for {} sandboxes", self.uid_base, self.limits.max_sandboxes);
        }
        Ok(())
    }

    /// Without a key, any local program may run code in sandboxes, so other hosts must not be able to
    /// connect.
    fn refuse_keyless_exposure(&self) -> Result<()> {
        if self.api_key.is_some() || self.listen.ip().is_loopback() {
            return Ok(());
        }
        Err(anyhow!("`{}` can be reached from other hosts, and there is no API key", self.listen))
            .with_hint("set CORACLE_API_KEY, or listen on 127.0.0.1")
    }
}

/// The flags that all commands with a state directory share, as the table of a file.
fn state_flags(args: &StateArgs) -> Result<Table> {
    let mut flags = Table::new();
    if let Some(directory) = &args.state_dir {
        let text = directory.to_str().context("the state directory's name is not UTF-8")?;
        env_settings::insert_setting(&mut flags, "state_dir", Value::String(text.to_owned()));
    }
    Ok(flags)
}

/// Variables whose names or values are not UTF-8 cannot be ours.
fn environment_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// The file that was named, which must exist, or the one at the default path, if it exists.
fn config_file(args: &StateArgs) -> Result<Option<PathBuf>> {
    let named = args.config.clone().or_else(|| std::env::var_os("CORACLE_CONFIG").map(PathBuf::from));
    if named.is_some() {
        return Ok(named);
    }
    let usual = if is_root_of_this_system() {
        Some(PathBuf::from("/etc/coracle"))
    } else {
        home_directory("XDG_CONFIG_HOME", ".config").ok()
    };
    Ok(usual.map(|directory| directory.join("coracle.toml")).filter(|file| file.is_file()))
}

fn read_file(path: &Path) -> Result<Table> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("could not read `{}`", path.display()))
        .with_hint("name a file that can be read with --config or CORACLE_CONFIG, or none")?;
    parse_config(&text)
        .with_context(|| format!("`{}` is not a configuration", path.display()))
        .with_hint("docs/configuration.md says what each setting means and how it is written")
}

/// Checks names and types while the position in the file is still known, and returns the table.
fn parse_config(text: &str) -> Result<Table> {
    let checked = check_raw_config(text).and_then(|()| toml::from_str(text));
    let table = checked.map_err(|error| {
        // Not the error's own rendering: it quotes the line, which may contain the key.
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        anyhow!("line {line}: {}", error.message())
    });
    let mut table = table?;
    front_sections::use_former_names(&mut table)?;
    Ok(table)
}

/// Checks names and types of everything but the settings of fronts, which only the fronts know.
fn check_raw_config(text: &str) -> Result<(), toml::de::Error> {
    let mut table = toml::de::DeTable::parse(text)?;
    front_sections::remove_front_settings(table.get_mut());
    RawConfig::deserialize(toml::Deserializer::from(table)).map(drop)
}

/// Whether the directories of the system are ours. A user who is root only in a user namespace sees them
/// as the files of another user; root of a container owns those of the container.
fn is_root_of_this_system() -> bool {
    let owned = |path: &str| std::fs::metadata(path).is_ok_and(|facts| facts.uid() == 0);
    rustix::process::geteuid().is_root() && owned("/etc") && owned("/var/lib")
}

fn default_state_dir() -> Result<PathBuf> {
    if is_root_of_this_system() {
        return Ok(PathBuf::from("/var/lib/coracle"));
    }
    home_directory("XDG_STATE_HOME", ".local/state")
}

/// `$variable/coracle`, or the same below the home directory.
fn home_directory(variable: &str, below_home: &str) -> Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable)
        .or_else(|| absolute("HOME").map(|home| home.join(below_home)))
        .map(|directory| directory.join("coracle"))
        .ok_or_else(|| anyhow!("neither `{variable}` nor `HOME` names a directory"))
        .with_hint("name a directory with --state-dir")
}

/// The name of a state directory without an identity. Older versions used the name that the operator
/// chose or derived one from the path.
fn state_dir_naming(chosen: Option<String>, state_dir: &Path) -> InstanceNaming {
    let derived = || {
        let digest = blake3::hash(state_dir.as_os_str().as_encoded_bytes());
        format!("c{}", &digest.to_hex()[..8])
    };
    InstanceNaming { former: chosen.clone().unwrap_or_else(derived), prefix: chosen }
}

fn invalid_setting(setting: &str, text: &str, why: impl fmt::Display) -> anyhow::Error {
    anyhow!("`{setting}` is `{text}`: {why}")
}

fn check_key(text: String) -> Result<OperatorKey> {
    let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
    if text.len() < 16 || !printable {
        return Err(anyhow!("`api_key` must be at least 16 printable characters without blanks"))
            .with_hint("`openssl rand -hex 32` makes a good one");
    }
    Ok(OperatorKey(text))
}

fn check_public_address(text: String) -> Result<String> {
    if text.is_empty() || text.contains("://") || text.ends_with('/') || text.contains(char::is_whitespace) {
        bail!("`public_address` is `{text}`, not `host[:port]` without scheme and slash");
    }
    Ok(text)
}

fn check_trusted_proxies(written: Vec<String>) -> Result<Vec<String>> {
    for text in &written {
        let parsed = text.parse::<fronts::TrustedNetwork>();
        parsed.map_err(|error| invalid_setting("trusted_proxies", text, error))?;
    }
    Ok(written)
}

/// The name becomes a directory in cgroup trees.
fn check_instance(name: String) -> Result<String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() || name.len() > 32 || !name.bytes().all(plain) {
        bail!("`instance` is `{name}`, not 1 to 32 lower-case letters, digits and hyphens");
    }
    Ok(name)
}

fn check_on_stop(text: Option<&str>) -> Result<OnStop> {
    match text {
        None | Some("keep") => Ok(OnStop::Keep),
        Some("remove") => Ok(OnStop::Remove),
        Some(other) => bail!("`on_stop` is `{other}`, neither `keep` nor `remove`"),
    }
}

fn check_images(raw: RawImages) -> Result<ImageSettings> {
    for (alias, image) in &raw.aliases {
        if alias.is_empty() || image.is_empty() {
            bail!("`images.aliases` has an empty name (`{alias}` = `{image}`)");
        }
    }
    let most =
        raw.max_bytes.as_ref().map(|amount| parse_amount("images.max_bytes", amount, values::parse_bytes));
    let listed = |setting: &str, hosts: Vec<String>| {
        for host in &hosts {
            if host.is_empty() || host.contains('/') || host.contains(char::is_whitespace) {
                return Err(anyhow!("`images.{setting}` has `{host}`, which is not `host[:port]`"));
            }
        }
        Ok(hosts)
    };
    let registries = listed("registries", raw.registries)?;
    let allowed = match raw.pull.as_deref() {
        None | Some("never") => Vec::new(),
        Some("missing") if registries.is_empty() => {
            return Err(anyhow!("`images.pull` is `missing`, and `images.registries` is empty"))
                .with_hint("list the registries that sandboxes may get images from, such as `docker.io`");
        }
        Some("missing") => registries,
        Some(other) => bail!("`images.pull` is `{other}`, neither `never` nor `missing`"),
    };
    Ok(ImageSettings {
        strict: raw.strict.unwrap_or(false),
        aliases: raw.aliases,
        max_bytes: most.transpose()?,
        allowed,
        plain: listed("plain_http", raw.plain_http)?,
    })
}

fn check_limits(raw: &RawLimits, container: TotalLimits) -> Result<LimitSettings> {
    let cpus = match &raw.cpus {
        Some(amount) => parse_amount("limits.cpus", amount, values::parse_cpus)?,
        None => MilliCpus(1000),
    };
    let memory = parse_bytes_or("limits.memory", raw.memory.as_ref(), Bytes::from_mib(1024))?;
    if memory < MIN_MEMORY {
        bail!("`limits.memory` is {memory}, less than the {MIN_MEMORY} that starting a process takes");
    }
    let pids = positive_or("limits.pids", raw.pids, 512)?;
    let disk = parse_bytes_or("limits.disk", raw.disk.as_ref(), Bytes::from_mib(1024))?;
    let most = LimitMaxima {
        memory: parse_maximum("memory", raw.max_memory.as_ref(), values::parse_bytes, memory)?,
        cpus: parse_maximum("cpus", raw.max_cpus.as_ref(), values::parse_cpus, cpus)?,
        pids: raw.max_pids.map(|most| positive_or("limits.max_pids", Some(most), most)).transpose()?,
        disk: parse_maximum("disk", raw.max_disk.as_ref(), values::parse_bytes, disk)?,
    };
    if most.pids.is_some_and(|most| pids > most) {
        return below_default_error("pids");
    }
    let limits = LimitSettings {
        memory,
        cpus,
        pids,
        disk,
        maxima: most,
        totals: totals::check_totals(raw, container)?,
        max_sandboxes: positive_or("limits.max_sandboxes", raw.max_sandboxes, 2000)?,
        soft_sandboxes: raw
            .soft_sandboxes
            .map(|count| positive_or("limits.soft_sandboxes", Some(count), 1))
            .transpose()?,
        max_commands: positive_or("limits.max_commands", raw.max_commands, 64)?,
        max_snapshots: positive_or("limits.max_snapshots", raw.max_snapshots, 100)?,
        max_volumes: positive_or("limits.max_volumes", raw.max_volumes, 100)?,
        open_files_percent: check_percent("limits.open_files_percent", raw.open_files_percent, 80)?,
        concurrent_requests: positive_or("limits.concurrent_requests", raw.concurrent_requests, 1024)?,
        concurrent_streams: positive_or("limits.concurrent_streams", raw.concurrent_streams, 2048)?,
        connections_per_address: positive_or(
            "limits.connections_per_address",
            raw.connections_per_address,
            256,
        )?,
        json_body: parse_bytes_or("limits.json_body", raw.json_body.as_ref(), Bytes::from_mib(1))?,
    };
    limits.fit_into_totals(raw)
}

/// A maximum, which must be at least the default.
fn parse_maximum<T: Ord>(
    name: &str,
    written: Option<&RawAmount>,
    parse: fn(&str) -> Result<T, String>,
    default: T,
) -> Result<Option<T>> {
    match written.map(|amount| parse_amount(&format!("limits.max_{name}"), amount, parse)).transpose()? {
        Some(most) if most < default => below_default_error(name),
        other => Ok(other),
    }
}

fn below_default_error<T>(name: &str) -> Result<T> {
    Err(anyhow!("`limits.max_{name}` is less than `limits.{name}`"))
        .with_hint(format!("set `limits.{name}` too: it is what a sandbox gets that names none"))
}

fn check_owners(raw: &BTreeMap<String, RawQuota>) -> Result<BTreeMap<String, QuotaSettings>> {
    let check = |(name, raw): (&String, &RawQuota)| {
        if name != OTHER_OWNERS {
            domain::Owner::parse(name).with_context(|| format!("`owners.{name}`"))?;
        }
        let bytes = |what: &str, amount: &Option<RawAmount>| {
            let setting = format!("owners.{name}.{what}");
            amount.as_ref().map(|amount| parse_amount(&setting, amount, values::parse_bytes)).transpose()
        };
        let cpus = raw
            .cpus
            .as_ref()
            .map(|amount| parse_amount(&format!("owners.{name}.cpus"), amount, values::parse_cpus));
        let quota = QuotaSettings {
            sandboxes: raw.sandboxes,
            millicpus: cpus.transpose()?.map(|cpus| cpus.0),
            memory: bytes("memory", &raw.memory)?.map(|bytes| bytes.0),
            disk: bytes("disk", &raw.disk)?.map(|bytes| bytes.0),
        };
        Ok((name.clone(), quota))
    };
    raw.iter().map(check).collect()
}

/// More than these would only occupy memory.
const MAX_PREPARED: usize = 256;

fn check_prepared(raw: &RawPrepared) -> Result<PreparedSettings> {
    let usual = PreparedSettings::default();
    let prepared = PreparedSettings {
        volumes: raw.volumes.unwrap_or(usual.volumes),
        namespaces: raw.namespaces.unwrap_or(usual.namespaces),
    };
    if prepared.volumes.max(prepared.namespaces) > MAX_PREPARED {
        bail!("`prepared` asks for more than {MAX_PREPARED}");
    }
    Ok(prepared)
}

fn parse_amount<T>(setting: &str, amount: &RawAmount, parse: fn(&str) -> Result<T, String>) -> Result<T> {
    let text = amount.text();
    parse(&text).map_err(|why| anyhow!("`{setting}`: {why}"))
}

fn parse_bytes_or(setting: &str, amount: Option<&RawAmount>, default: Bytes) -> Result<Bytes> {
    amount.map_or(Ok(default), |amount| parse_amount(setting, amount, values::parse_bytes))
}

fn parse_duration_or(setting: &str, amount: Option<&RawAmount>, seconds: u64) -> Result<Duration> {
    amount.map_or(Ok(Duration::from_secs(seconds)), |amount| {
        parse_amount(setting, amount, values::parse_duration)
    })
}

fn check_percent(setting: &str, written: Option<u8>, default: u8) -> Result<u8> {
    match positive_or(setting, written, default)? {
        percent @ ..=100 => Ok(percent),
        percent => bail!("`{setting}` is {percent}, more than 100"),
    }
}

fn positive_or<T: Default + PartialEq>(setting: &str, written: Option<T>, default: T) -> Result<T> {
    match written {
        None => Ok(default),
        Some(number) if number == T::default() => bail!("`{setting}` is 0"),
        Some(number) => Ok(number),
    }
}

#[cfg(test)]
mod tests;
