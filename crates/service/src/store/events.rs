//! Events as rows.

use domain::{Owner, SandboxId};
use rusqlite::{Connection, params};

use super::StoreError;
use super::columns::{CauseJson, PhaseJson};
use super::rows::{json, wall_micros, wall_time};
use crate::LifeEvent;
use crate::events::REMEMBERED;

/// Writes events and forgets the oldest, all or nothing.
pub(super) fn write(connection: &mut Connection, events: &[LifeEvent]) -> rusqlite::Result<()> {
    const INSERT: &str = "INSERT OR IGNORE INTO events (id, time, owner, sandbox, phase, cause) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    const FORGET: &str =
        "DELETE FROM events WHERE id <= (SELECT id FROM events ORDER BY id DESC LIMIT 1 OFFSET ?1)";
    let change = connection.transaction()?;
    for event in events {
        let cause = event.cause.map(|cause| json(&CauseJson::of(cause)));
        let phase = json(&PhaseJson::of(event.phase));
        let (owner, sandbox) = (event.owner.as_str(), event.sandbox.as_str());
        let id = i64::try_from(event.id).unwrap_or(i64::MAX);
        let values = params![id, wall_micros(event.time), owner, sandbox, phase, cause];
        change.prepare_cached(INSERT)?.execute(values)?;
    }
    change.prepare_cached(FORGET)?.execute([i64::try_from(REMEMBERED).unwrap_or(i64::MAX)])?;
    change.commit()
}

/// The oldest first. A row that cannot be read is left out: it is only a memory.
pub(super) fn read(connection: &Connection) -> Result<Vec<LifeEvent>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the events", source };
    let sql = "SELECT id, time, owner, sandbox, phase, cause FROM events ORDER BY id";
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let (sandbox, phase): (String, String) = (row.get(3)?, row.get(4)?);
        let cause: Option<String> = row.get(5)?;
        let event = || {
            Some(LifeEvent {
                id: u64::try_from(row.get::<_, i64>(0).ok()?).ok()?,
                time: wall_time(row.get(1).ok()?),
                owner: Owner::named(row.get::<_, String>(2).ok()?),
                sandbox: SandboxId::parse(&sandbox).ok()?,
                phase: serde_json::from_str::<PhaseJson>(&phase).ok()?.into_domain(),
                cause: match &cause {
                    Some(cause) => Some(serde_json::from_str::<CauseJson>(cause).ok()?.into_domain()),
                    None => None,
                },
            })
        };
        Ok(event())
    });
    let rows = rows.map_err(failed)?;
    rows.filter_map(|row| row.map_err(failed).transpose()).collect()
}
