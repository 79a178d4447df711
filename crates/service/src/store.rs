//! The durable copy of the service's state: SQLite behind one thread.
//!
//! Nothing is read from it after the start; it only says what the server was about to do when it died. A write is
//! confirmed when a crash of any of our processes cannot lose it (WAL, `synchronous = NORMAL`); after a power loss no
//! sandbox is alive anyway.

mod columns;
mod events;
mod hooks;
mod hours;
mod policies;
mod pools;
mod rows;
mod settings;
mod snapshots;
mod vaults;
mod volumes;
mod writer;

use std::path::Path;
use std::time::Duration;

use domain::{Owner, SandboxId, Snapshot, SnapshotId};
use rusqlite::{Connection, ErrorCode, OpenFlags};
use tokio::sync::{mpsc, oneshot};

pub(crate) use pools::StoredPool;
pub(crate) use rows::SandboxRecord;
use rows::SandboxRow;
pub(crate) use volumes::{StoredVolume, VolumeChange};

use crate::HourlyUsage;
use crate::telemetry::events::FeedRecord;
use crate::tenancy::api_keys::{ApiKey, StoredApiKey};
use crate::vaults::StoredVault;

/// How many writes may be queued for the thread.
const MAX_QUEUED_WRITES: usize = 256;

/// How long a write waits while another program has the file locked.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Each step migrates the schema to its version from the previous one.
const MIGRATIONS: &[(u32, &str)] = &[
    (1, include_str!("store/migrations/0001_sandboxes_and_keys.sql")),
    (2, include_str!("store/migrations/0002_keys.sql")),
    (3, include_str!("store/migrations/0003_api_keys.sql")),
    (4, include_str!("store/migrations/0004_events.sql")),
    (5, include_str!("store/migrations/0005_hours.sql")),
    (6, include_str!("store/migrations/0006_snapshots.sql")),
    (7, include_str!("store/migrations/0007_volumes.sql")),
    (8, include_str!("store/migrations/0008_pools.sql")),
    (9, include_str!("store/migrations/0009_settings.sql")),
    (10, include_str!("store/migrations/0010_volumes_after_use.sql")),
    (11, include_str!("store/migrations/0011_network_usage.sql")),
    (12, include_str!("store/migrations/0012_vaults.sql")),
];

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("could not {action}")]
    Sqlite { action: &'static str, source: rusqlite::Error },
    #[error("could not start the thread of the store")]
    Thread(#[source] std::io::Error),
    #[error("the column `{column}` of sandbox `{id}` cannot be read")]
    Unreadable { id: String, column: &'static str, source: serde_json::Error },
    #[error("the row of pool `{name}` cannot be read")]
    UnreadablePool { name: String, source: serde_json::Error },
    #[error("the row `{0}` does not have a valid id")]
    NotOurs(String),
    #[error("the database has version {0}, which a newer server made")]
    Newer(u32),
    #[error("the store is closed")]
    Closed,
}

impl StoreError {
    /// Whether the disk is full.
    pub(crate) fn is_full(&self) -> bool {
        let Self::Sqlite { source, .. } = self else { return false };
        source.sqlite_error_code() == Some(ErrorCode::DiskFull)
    }
}

/// The stored state, as a start finds it.
pub(crate) struct StoredState {
    pub(crate) records: Vec<SandboxRecord>,
    pub(crate) keys: Vec<StoredApiKey>,
    pub(crate) pools: Vec<StoredPool>,
    pub(crate) snapshots: Vec<Snapshot>,
    /// Sorted oldest first.
    pub(crate) events: Vec<FeedRecord>,
    pub(crate) volumes: Vec<StoredVolume>,
    pub(crate) hours: Vec<HourlyUsage>,
    pub(crate) vaults: Vec<(SandboxId, StoredVault)>,
}

/// A handle to the writer thread.
pub(crate) struct Store {
    queue: mpsc::Sender<StoreWrite>,
}

type WriteReply = oneshot::Sender<Result<(), StoreError>>;

enum StoreWrite {
    Insert(Box<SandboxRow>, WriteReply),
    Update(Box<SandboxRow>, Option<WriteReply>),
    /// Gives a warm sandbox to its owner.
    Claim(Box<SandboxRow>, WriteReply),
    /// Marks a sandbox that is to be removed.
    Retire(SandboxId, WriteReply),
    Delete(SandboxId, WriteReply),
    InsertKey(StoredApiKey, WriteReply),
    DeleteKey(String, WriteReply),
    PutPool(Box<StoredPool>, WriteReply),
    DeletePool(String, WriteReply),
    Events(Vec<FeedRecord>),
    Volume(VolumeChange, WriteReply),
    Snapshot(Box<Snapshot>, WriteReply),
    DeleteSnapshot(SnapshotId, WriteReply),
    Hours(Vec<HourlyUsage>),
    PutVault(SandboxId, Box<StoredVault>, WriteReply),
    Close(oneshot::Sender<()>),
}

impl Store {
    /// Opens or creates the database and reads its whole content.
    pub(crate) fn open(path: &Path) -> Result<(Self, StoredState), StoreError> {
        let mut connection = open_connection(path)?;
        migrate_schema(&mut connection)?;
        let kept = StoredState {
            records: read_records(&connection)?,
            keys: read_keys(&connection)?,
            pools: pools::read_pools(&connection)?,
            snapshots: snapshots::read_snapshots(&connection)?,
            events: events::read_events(&connection)?,
            volumes: volumes::read_volumes(&connection)?,
            hours: hours::read_hours(&connection)?,
            vaults: vaults::read_vaults(&connection)?,
        };
        let (queue, writes) = mpsc::channel(MAX_QUEUED_WRITES);
        writer::spawn_writer(connection, open_connection(path)?, writes)?;
        Ok((Self { queue }, kept))
    }

    /// Writes a sandbox that does not exist yet.
    pub(crate) async fn insert_sandbox(&self, record: &SandboxRecord) -> Result<(), StoreError> {
        let row = Box::new(SandboxRow::from_record(record));
        self.send_write(|answer| StoreWrite::Insert(row, answer)).await
    }

    /// Replaces the row of a warm sandbox by that of its owner's sandbox.
    pub(crate) async fn claim_sandbox(&self, record: &SandboxRecord) -> Result<(), StoreError> {
        let row = Box::new(SandboxRow::from_record(record));
        self.send_write(|answer| StoreWrite::Claim(row, answer)).await
    }

    /// Writes the changed columns of a sandbox, and waits until they are durable.
    pub(crate) async fn update_sandbox(&self, record: &SandboxRecord) -> Result<(), StoreError> {
        let row = Box::new(SandboxRow::from_record(record));
        self.send_write(|answer| StoreWrite::Update(row, Some(answer))).await
    }

    /// Like [`Store::update_sandbox`], but returns when the write is queued. A failure is logged.
    pub(crate) async fn update_sandbox_later(&self, record: &SandboxRecord) {
        let write = StoreWrite::Update(Box::new(SandboxRow::from_record(record)), None);
        if self.queue.send(write).await.is_err() {
            tracing::warn!(sandbox = %record.sandbox.id, "the store is closed; a change of a sandbox was not stored");
        }
    }

    /// Records that a sandbox is to be removed, whatever its driver does at the moment. A later start removes it.
    pub(crate) async fn retire_sandbox(&self, id: &SandboxId) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::Retire(id.clone(), answer)).await
    }

    /// Removes a row, or has it removed later if the disk is too full for the change now.
    pub(crate) async fn delete_sandbox(&self, id: &SandboxId) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::Delete(id.clone(), answer)).await
    }

    pub(crate) async fn insert_key(&self, key: &StoredApiKey) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::InsertKey(key.clone(), answer)).await
    }

    pub(crate) async fn delete_key(&self, id: &str) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::DeleteKey(id.to_owned(), answer)).await
    }

    /// Stores a pool, new or changed.
    pub(crate) async fn put_pool(&self, pool: &StoredPool) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::PutPool(Box::new(pool.clone()), answer)).await
    }

    pub(crate) async fn delete_pool(&self, name: &str) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::DeletePool(name.to_owned(), answer)).await
    }

    /// Stores a change of a volume, and waits until it is durable.
    pub(crate) async fn change_volume(&self, change: VolumeChange) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::Volume(change, answer)).await
    }

    /// Stores the current state of a snapshot, new or changed.
    pub(crate) async fn put_snapshot(&self, snapshot: &Snapshot) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::Snapshot(Box::new(snapshot.clone()), answer)).await
    }

    pub(crate) async fn delete_snapshot(&self, id: &SnapshotId) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::DeleteSnapshot(id.clone(), answer)).await
    }

    /// Stores the credential proxy of a sandbox and its vault, new or changed.
    pub(crate) async fn put_vault(&self, id: &SandboxId, vault: &StoredVault) -> Result<(), StoreError> {
        self.send_write(|answer| StoreWrite::PutVault(id.clone(), Box::new(vault.clone()), answer)).await
    }

    /// Queues events to be stored. A failure is logged.
    pub(crate) async fn queue_events(&self, events: Vec<FeedRecord>) {
        if self.queue.send(StoreWrite::Events(events)).await.is_err() {
            tracing::warn!("the store is closed; some events were not stored");
        }
    }

    /// Like [`Store::queue_events`], for the usage of hours.
    pub(crate) async fn queue_hours(&self, hours: Vec<HourlyUsage>) {
        if self.queue.send(StoreWrite::Hours(hours)).await.is_err() {
            tracing::warn!("the store is closed; the latest usage was not stored");
        }
    }

    /// Returns when all earlier writes are done and the file is closed.
    pub(crate) async fn close(&self) {
        let (done, wait) = oneshot::channel();
        if self.queue.send(StoreWrite::Close(done)).await.is_ok() {
            // An error here means that the thread has already ended.
            wait.await.ok();
        }
    }

    async fn send_write(&self, write: impl FnOnce(WriteReply) -> StoreWrite) -> Result<(), StoreError> {
        let (answer, wait) = oneshot::channel();
        self.queue.send(write(answer)).await.map_err(|_closed| StoreError::Closed)?;
        wait.await.unwrap_or(Err(StoreError::Closed))
    }
}

/// Makes a consistent copy of a server's database, even while the server writes to it. If the server never started,
/// there is none. The directory belongs to the server, so links are not followed.
pub fn copy_database(server_dir: &Path, target: &Path) -> Result<(), StoreError> {
    let path = server_dir.join("coracle.db");
    if !path.exists() {
        return Ok(());
    }
    let copy = || {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let connection = Connection::open_with_flags(&path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.execute("VACUUM INTO ?1", [target.to_string_lossy()])
    };
    copy().map(drop).map_err(|source| StoreError::Sqlite { action: "copy the database", source })
}

fn open_connection(path: &Path) -> Result<Connection, StoreError> {
    let open = || {
        let connection = Connection::open(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
        Ok(connection)
    };
    open().map_err(|source| StoreError::Sqlite { action: "open the database", source })
}

fn migrate_schema(connection: &mut Connection) -> Result<(), StoreError> {
    let failed = |source| StoreError::Sqlite { action: "bring the schema up to date", source };
    let current: u32 =
        connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(failed)?;
    if MIGRATIONS.last().is_some_and(|(newest, _)| current > *newest) {
        return Err(StoreError::Newer(current));
    }
    for (version, step) in MIGRATIONS.iter().filter(|(version, _)| *version > current) {
        let change = connection.transaction().map_err(failed)?;
        change.execute_batch(step).map_err(failed)?;
        change.pragma_update(None, "user_version", version).map_err(failed)?;
        change.commit().map_err(failed)?;
    }
    Ok(())
}

fn read_records(connection: &Connection) -> Result<Vec<SandboxRecord>, StoreError> {
    const SQL: &str = "SELECT sandboxes.*, keys.space AS key_space, keys.name AS key_name \
         FROM sandboxes LEFT JOIN keys ON keys.sandbox = sandboxes.id";
    let failed = |source| StoreError::Sqlite { action: "read the sandboxes", source };
    let mut statement = connection.prepare(SQL).map_err(failed)?;
    let rows = statement.query_map([], |row| {
        Ok(SandboxRow {
            id: row.get("id")?,
            owner: row.get("owner")?,
            origin: row.get("origin")?,
            spec: row.get("spec")?,
            labels: row.get("labels")?,
            notes: row.get("notes")?,
            phase: row.get("phase")?,
            phase_since: row.get("phase_since")?,
            created: row.get("created")?,
            expires: row.get("expires")?,
            expires_boot: row.get("expires_boot")?,
            timeout: row.get("timeout")?,
            idle_timeout: row.get("idle_timeout")?,
            in_force: row.get("in_force")?,
            entrypoint: row.get("entrypoint")?,
            epoch: row.get("epoch")?,
            boot_id: row.get("boot_id")?,
            pool: row.get("pool")?,
            key: match (row.get("key_space")?, row.get("key_name")?) {
                (Some(space), Some(name)) => Some((space, name)),
                _ => None,
            },
        })
    });
    rows.map_err(failed)?.map(|row| row.map_err(failed)?.into_record()).collect()
}

fn read_keys(connection: &Connection) -> Result<Vec<StoredApiKey>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the keys", source };
    let mut statement = connection
        .prepare("SELECT hash, id, owner, created, expires FROM api_keys ORDER BY created")
        .map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let key = ApiKey {
            id: row.get(1)?,
            owner: Owner::from_valid_name(row.get::<_, String>(2)?),
            created: rows::wall_time(row.get(3)?),
            expires: row.get::<_, Option<i64>>(4)?.map(rows::wall_time),
        };
        Ok(StoredApiKey { hash: row.get(0)?, key })
    });
    rows.map_err(failed)?.map(|row| row.map_err(failed)).collect()
}

#[cfg(test)]
mod tests;
