//! Pools as rows.

use std::time::SystemTime;

use domain::{PoolCapacity, PoolSpec, RefillRate};
use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::columns::SpecJson;
use super::rows::{to_json, wall_micros, wall_time};

/// A pool that a client made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredPool {
    pub(crate) pool: PoolSpec,
    pub(crate) created: SystemTime,
}

#[derive(Serialize, Deserialize)]
struct PoolJson {
    template: SpecJson,
    level: usize,
    #[serde(default)]
    least_level: usize,
    most: Option<usize>,
    #[serde(default)]
    least: usize,
    per_second: u32,
    at_once: u32,
}

impl PoolJson {
    fn from_domain(pool: &PoolSpec) -> Self {
        let PoolCapacity { level, least_level, most, least } = pool.capacity;
        let RefillRate { per_second, at_once } = pool.refill;
        let most = (most != usize::MAX).then_some(most);
        Self {
            template: SpecJson::from_domain(&pool.template),
            level,
            least_level,
            most,
            least,
            per_second,
            at_once,
        }
    }

    fn into_domain(self, name: String) -> PoolSpec {
        PoolSpec {
            name,
            template: self.template.into_domain(),
            capacity: PoolCapacity {
                level: self.level,
                least_level: self.least_level,
                most: self.most.unwrap_or(usize::MAX),
                least: self.least,
            },
            refill: RefillRate { per_second: self.per_second, at_once: self.at_once },
        }
    }
}

pub(super) fn read_pools(connection: &Connection) -> Result<Vec<StoredPool>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the pools", source };
    let mut statement = connection.prepare("SELECT name, pool, created FROM pools").map_err(failed)?;
    let rows = statement
        .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, i64>(2)?)));
    let kept = |(name, text, created): (String, String, i64)| match serde_json::from_str::<PoolJson>(&text) {
        Ok(pool) => Ok(StoredPool { pool: pool.into_domain(name), created: wall_time(created) }),
        Err(source) => Err(StoreError::UnreadablePool { name, source }),
    };
    rows.map_err(failed)?.map(|row| row.map_err(failed).and_then(kept)).collect()
}

pub(super) fn put_pool(connection: &Connection, kept: &StoredPool) -> Result<(), StoreError> {
    const SQL: &str = "INSERT OR REPLACE INTO pools (name, pool, created) VALUES (?1, ?2, ?3)";
    let text = to_json(&PoolJson::from_domain(&kept.pool));
    let written = connection.execute(SQL, params![kept.pool.name, text, wall_micros(kept.created)]);
    written.map(drop).map_err(|source| StoreError::Sqlite { action: "store a pool", source })
}

pub(super) fn delete_pool(connection: &Connection, name: &str) -> Result<(), StoreError> {
    let written = connection.execute("DELETE FROM pools WHERE name = ?1", [name]);
    written.map(drop).map_err(|source| StoreError::Sqlite { action: "delete a pool", source })
}
