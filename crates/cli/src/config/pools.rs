//! `[[pool]]`: sandboxes of the operator that are kept warm.

use anyhow::{Context, Result, bail};
use backend_local::network::Wish;
use domain::{Bytes, Capacity, Cpus, Guest, Network, Pool, Refill, Resources, Spec};
use serde::{Deserialize, Serialize};

use super::raw::Amount;
use super::read;
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
    memory: Option<Amount>,
    cpus: Option<Amount>,
    pids: Option<u32>,
    disk: Option<Amount>,
    network: Option<String>,
}

/// An effective pool, as plain data for the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolSettings {
    name: String,
    image: String,
    level: usize,
    max: Option<usize>,
    per_second: u32,
    at_once: u32,
    memory: Option<u64>,
    millicpus: Option<u32>,
    pids: Option<u32>,
    disk: Option<u64>,
    network: Wish,
}

/// Checks all pools; `default` is the network of a pool that names none.
pub(super) fn check(raw: &[RawPool], default: Wish) -> Result<Vec<PoolSettings>> {
    let mut pools: Vec<PoolSettings> = Vec::new();
    for raw in raw {
        let pool = raw.check(default)?;
        pool.pool().check().with_context(|| format!("the pool `{}`", pool.name))?;
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
    fn check(&self, default: Wish) -> Result<PoolSettings> {
        let setting = |what: &str| format!("pool.{what}` of pool `{}", self.name);
        let bytes = |what: &str, amount: &Option<Amount>| {
            amount.as_ref().map(|amount| read(&setting(what), amount, values::bytes)).transpose()
        };
        if let Some(guest) = self.guest.as_deref().filter(|guest| *guest != "opensandbox") {
            bail!("`{}` is `{guest}`, and `opensandbox` is the only one", setting("guest"));
        }
        let network = match self.network.as_deref() {
            None => default,
            Some("auto") => Wish::Auto,
            Some("on") => Wish::On,
            Some("off") => Wish::Off,
            Some(other) => bail!("`{}` is `{other}`, none of `auto`, `on` and `off`", setting("network")),
        };
        let cpus = self.cpus.as_ref().map(|amount| read(&setting("cpus"), amount, values::cpus));
        let usual = Refill::default();
        Ok(PoolSettings {
            name: self.name.clone(),
            image: self.image.clone().unwrap_or_else(|| Spec::plain().image),
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
    pub(crate) fn pool(&self) -> Pool {
        let resources = Resources {
            memory: self.memory.map(Bytes),
            cpus: self.millicpus.map(Cpus),
            pids: self.pids,
            disk: self.disk.map(Bytes),
        };
        Pool {
            name: self.name.clone(),
            template: Spec {
                image: self.image.clone(),
                resources,
                network: network(self.network),
                guest: Guest::root(),
                ..Spec::plain()
            },
            capacity: Capacity { most: self.max.unwrap_or(usize::MAX), ..Capacity::level(self.level) },
            refill: Refill { per_second: self.per_second, at_once: self.at_once },
        }
    }
}

/// The same network mode as a type of the core.
pub(crate) fn network(wish: Wish) -> Network {
    match wish {
        Wish::Off => Network::Off,
        Wish::On => Network::On,
        Wish::Auto => Network::Auto,
    }
}
