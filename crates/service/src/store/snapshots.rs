//! Snapshots as rows.

use domain::{Bytes, Owner, SandboxId, SandboxSettings, Snapshot, SnapshotId, SnapshotState};
use rusqlite::types::Type;
use rusqlite::{Connection, Row, params};

use super::StoreError;
use super::rows::{to_json, wall_micros, wall_time};
use super::settings::SettingsJson;

/// Writes the current state of a snapshot.
pub(super) fn write_snapshot(connection: &Connection, snapshot: &Snapshot) -> Result<(), StoreError> {
    const SQL: &str = "INSERT OR REPLACE INTO snapshots \
         (id, owner, sandbox, name, state, message, created, image, size, disk, settings) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)";
    let (state, message) = state_columns(&snapshot.state);
    let number = |Bytes(bytes): Bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    let values = params![
        snapshot.id.as_str(),
        snapshot.owner.as_str(),
        snapshot.sandbox.as_str(),
        snapshot.name,
        state,
        message,
        wall_micros(snapshot.created),
        snapshot.image,
        number(snapshot.size),
        number(snapshot.disk),
        snapshot.settings.as_ref().map(|settings| to_json(&SettingsJson::from_domain(settings))),
    ];
    let written = connection.prepare_cached(SQL).and_then(|mut rows| rows.execute(values));
    written.map(drop).map_err(|source| StoreError::Sqlite { action: "store a snapshot", source })
}

pub(super) fn delete_snapshot(connection: &Connection, id: &SnapshotId) -> Result<(), StoreError> {
    let written = connection.execute("DELETE FROM snapshots WHERE id = ?1", [id.as_str()]);
    written.map(drop).map_err(|source| StoreError::Sqlite { action: "delete a snapshot", source })
}

pub(super) fn read_snapshots(connection: &Connection) -> Result<Vec<Snapshot>, StoreError> {
    const SQL: &str = "SELECT id, owner, sandbox, name, state, message, created, image, size, disk, settings FROM snapshots";
    let failed = |source| StoreError::Sqlite { action: "read the snapshots", source };
    let mut statement = connection.prepare(SQL).map_err(failed)?;
    let rows =
        statement.query_map([], |row| Ok(snapshot_from_row(row)?.ok_or_else(|| row.get::<_, String>(0))));
    let mut snapshots = Vec::new();
    for row in rows.map_err(failed)? {
        match row.map_err(failed)? {
            Ok(snapshot) => snapshots.push(snapshot),
            Err(id) => return Err(StoreError::NotOurs(id.map_err(failed)?)),
        }
    }
    Ok(snapshots)
}

fn snapshot_from_row(row: &Row<'_>) -> rusqlite::Result<Option<Snapshot>> {
    let (id, sandbox, state): (String, String, String) = (row.get(0)?, row.get(2)?, row.get(4)?);
    let message: Option<String> = row.get(5)?;
    let (Ok(id), Ok(sandbox)) = (SnapshotId::parse(&id), SandboxId::parse(&sandbox)) else { return Ok(None) };
    let bytes = |number: i64| Bytes(u64::try_from(number).unwrap_or(0));
    Ok(Some(Snapshot {
        id,
        owner: Owner::from_valid_name(row.get::<_, String>(1)?),
        sandbox,
        name: row.get(3)?,
        state: match state.as_str() {
            "creating" => SnapshotState::Creating(None),
            "ready" => SnapshotState::Ready,
            "deleting" => SnapshotState::Deleting,
            _ => SnapshotState::Failed(message.unwrap_or_default()),
        },
        created: wall_time(row.get(6)?),
        image: row.get(7)?,
        size: bytes(row.get(8)?),
        disk: bytes(row.get(9)?),
        settings: settings_from_row(row)?,
    }))
}

/// Settings that cannot be read are an error: a fork without them would be less confined.
fn settings_from_row(row: &Row<'_>) -> rusqlite::Result<Option<SandboxSettings>> {
    const COLUMN: usize = 10;
    let Some(text) = row.get::<_, Option<String>>(COLUMN)? else { return Ok(None) };
    let unreadable = |error| rusqlite::Error::FromSqlConversionFailure(COLUMN, Type::Text, Box::new(error));
    let settings: SettingsJson = serde_json::from_str(&text).map_err(unreadable)?;
    Ok(Some(settings.into_domain()))
}

fn state_columns(state: &SnapshotState) -> (&'static str, Option<&str>) {
    match state {
        SnapshotState::Creating(_) => ("creating", None),
        SnapshotState::Ready => ("ready", None),
        SnapshotState::Failed(message) => ("failed", Some(message)),
        SnapshotState::Deleting => ("deleting", None),
    }
}
