//! `[[pool]]`: sandboxes of the operator that are kept warm.

use anyhow::{Context, Result, bail};
use domain::{
    Bytes, MilliCpus, NetworkAccess, PoolCapacity, PoolSpec, RefillRate, ResourceLimits, SandboxSpec,
};
use fronts::FrontValues;
use launcher::network::NetworkMode;
use serde::{Deserialize, Serialize};

use super::parse_amount;
use super::raw::RawAmount;
use crate::values;

/// A pool as it was written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPool {
    name: String,
    image: Option<String>,
    guest: Option<String>,
    level: usize,
    max: Option<usize>,
    refill_per_second: Option<u32>,
    refill_at_once: Option<u32>,
    memory: Option<RawAmount>,
    cpus: Option<RawAmount>,
    pids: Option<u32>,
    disk: Option<RawAmount>,
    network: Option<String>,
}

/// An effective pool, as plain data for the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolSettings {
    name: String,
    /// The front whose guest the sandboxes have; `None` for the default guest.
    guest: Option<String>,
    image: String,
    level: usize,
    max: Option<usize>,
    per_second: u32,
    at_once: u32,
    memory: Option<u64>,
    millicpus: Option<u32>,
    pids: Option<u32>,
    disk: Option<u64>,
    network: NetworkMode,
}

/// Checks all pools; `default` is the network of a pool that names none, and `fronts` are the settings of the fronts,
/// whose guests pools may have.
pub(super) fn check_pools(
    raw: &[RawPool],
    default: NetworkMode,
    fronts: &FrontValues,
) -> Result<Vec<PoolSettings>> {
    let mut pools: Vec<PoolSettings> = Vec::new();
    for raw in raw {
        let pool = raw.check(default, fronts)?;
        pool.to_pool(fronts).check().with_context(|| format!("the pool `{}`", pool.name))?;
        if pools.iter().any(|other| other.name == pool.name) {
            bail!("there are two pools `{}`", pool.name);
        }
        pools.push(pool);
    }
    Ok(pools)
}

impl PoolSettings {
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl RawPool {
    fn check(&self, default: NetworkMode, fronts: &FrontValues) -> Result<PoolSettings> {
        let setting = |what: &str| format!("pool.{what}` of pool `{}", self.name);
        let bytes = |what: &str, amount: &Option<RawAmount>| {
            amount
                .as_ref()
                .map(|amount| parse_amount(&setting(what), amount, values::parse_bytes))
                .transpose()
        };
        let is_unknown = |guest: &&str| fronts::guest_of_front(guest, fronts).is_none();
        if let Some(guest) = self.guest.as_deref().filter(is_unknown) {
            let known: Vec<String> = fronts::fronts_with_guest().map(|name| format!("`{name}`")).collect();
            bail!("`{}` is `{guest}`, but must be one of: {}", setting("guest"), known.join(", "));
        }
        let network = match self.network.as_deref() {
            None => default,
            Some("auto") => NetworkMode::Auto,
            Some("on") => NetworkMode::On,
            Some("off") => NetworkMode::Off,
            Some("filtered") => NetworkMode::Filtered,
            Some(other) => {
                bail!("`{}` is `{other}`, none of `auto`, `on`, `filtered` and `off`", setting("network"))
            }
        };
        let cpus =
            self.cpus.as_ref().map(|amount| parse_amount(&setting("cpus"), amount, values::parse_cpus));
        let usual = RefillRate::default();
        Ok(PoolSettings {
            name: self.name.clone(),
            guest: self.guest.clone(),
            image: self.image.clone().unwrap_or_else(|| SandboxSpec::with_defaults().image),
            level: self.level,
            max: self.max,
            per_second: self.refill_per_second.unwrap_or(usual.per_second),
            at_once: self.refill_at_once.unwrap_or(usual.at_once),
            memory: bytes("memory", &self.memory)?.map(|bytes| bytes.0),
            millicpus: cpus.transpose()?.map(|cpus| cpus.0),
            pids: self.pids,
            disk: bytes("disk", &self.disk)?.map(|bytes| bytes.0),
            network,
        })
    }
}

impl PoolSettings {
    pub(crate) fn to_pool(&self, fronts: &FrontValues) -> PoolSpec {
        let resources = ResourceLimits {
            memory: self.memory.map(Bytes),
            cpus: self.millicpus.map(MilliCpus),
            pids: self.pids,
            disk: self.disk.map(Bytes),
        };
        let defaults = SandboxSpec::with_defaults();
        let guest = self.guest.as_deref().and_then(|guest| fronts::guest_of_front(guest, fronts));
        PoolSpec {
            name: self.name.clone(),
            template: SandboxSpec {
                image: self.image.clone(),
                resources,
                network: to_domain_network(self.network),
                guest: guest.unwrap_or(defaults.guest),
                ..defaults
            },
            capacity: PoolCapacity {
                most: self.max.unwrap_or(usize::MAX),
                ..PoolCapacity::with_level(self.level)
            },
            refill: RefillRate { per_second: self.per_second, at_once: self.at_once },
        }
    }
}

/// The same network mode as a type of the core.
pub(crate) fn to_domain_network(mode: NetworkMode) -> NetworkAccess {
    match mode {
        NetworkMode::Off => NetworkAccess::Off,
        NetworkMode::On => NetworkAccess::On,
        NetworkMode::Auto => NetworkAccess::Auto,
        NetworkMode::Filtered => NetworkAccess::Filtered,
    }
}
