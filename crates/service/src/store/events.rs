//! Events as rows.

use domain::{Owner, SandboxId};
use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::columns::{CauseJson, PhaseJson};
use super::rows::{to_json, wall_micros, wall_time};
use crate::telemetry::events::{FeedRecord, MAX_EVENTS, OperatorAction, OperatorEvent};
use crate::{LifecycleEvent, OperatorActionKind, OperatorObjectKind};

/// An action of the operator, in the phase column; the sandbox column of such a row has the subject of the action. A
/// server that does not know this form skips the row.
#[derive(Serialize, Deserialize)]
struct OperatorActionJson {
    operator: String,
    thing: String,
}

/// Writes events and deletes the oldest, all or nothing.
pub(super) fn write_events(connection: &mut Connection, events: &[FeedRecord]) -> rusqlite::Result<()> {
    const INSERT: &str = "INSERT OR IGNORE INTO events (id, time, owner, sandbox, phase, cause) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    const FORGET: &str =
        "DELETE FROM events WHERE id <= (SELECT id FROM events ORDER BY id DESC LIMIT 1 OFFSET ?1)";
    let change = connection.transaction()?;
    for event in events {
        let id = i64::try_from(event.id()).unwrap_or(i64::MAX);
        let (time, owner, subject, phase, cause) = match event {
            FeedRecord::Life(event) => {
                let cause = event.cause.map(|cause| to_json(&CauseJson::from_domain(cause)));
                (
                    event.time,
                    &event.owner,
                    event.sandbox.as_str(),
                    to_json(&PhaseJson::from_domain(event.phase)),
                    cause,
                )
            }
            FeedRecord::Operator(event) => {
                let OperatorAction { kind, thing, subject } = &event.act;
                let act =
                    OperatorActionJson { operator: kind.name().to_owned(), thing: thing.name().to_owned() };
                (event.time, &event.owner, subject.as_str(), to_json(&act), None)
            }
        };
        let values = params![id, wall_micros(time), owner.as_str(), subject, phase, cause];
        change.prepare_cached(INSERT)?.execute(values)?;
    }
    change.prepare_cached(FORGET)?.execute([i64::try_from(MAX_EVENTS).unwrap_or(i64::MAX)])?;
    change.commit()
}

/// Returns events oldest first. A row that cannot be read is skipped: events are only informational.
pub(super) fn read_events(connection: &Connection) -> Result<Vec<FeedRecord>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the events", source };
    let sql = "SELECT id, time, owner, sandbox, phase, cause FROM events ORDER BY id";
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let (sandbox, phase): (String, String) = (row.get(3)?, row.get(4)?);
        let cause: Option<String> = row.get(5)?;
        let event = || {
            let id = u64::try_from(row.get::<_, i64>(0).ok()?).ok()?;
            let time = wall_time(row.get(1).ok()?);
            let owner = Owner::from_valid_name(row.get::<_, String>(2).ok()?);
            if let Some(act) = parse_action(&phase, &sandbox) {
                return Some(FeedRecord::Operator(OperatorEvent { id, time, owner, act }));
            }
            Some(FeedRecord::Life(LifecycleEvent {
                id,
                time,
                owner,
                sandbox: SandboxId::parse(&sandbox).ok()?,
                phase: serde_json::from_str::<PhaseJson>(&phase).ok()?.into_domain(),
                cause: match &cause {
                    Some(cause) => Some(serde_json::from_str::<CauseJson>(cause).ok()?.into_domain()),
                    None => None,
                },
            }))
        };
        Ok(event())
    });
    let rows = rows.map_err(failed)?;
    rows.filter_map(|row| row.map_err(failed).transpose()).collect()
}

fn parse_action(phase: &str, subject: &str) -> Option<OperatorAction> {
    let act: OperatorActionJson = serde_json::from_str(phase).ok()?;
    Some(OperatorAction {
        kind: OperatorActionKind::ALL.into_iter().find(|kind| kind.name() == act.operator)?,
        thing: OperatorObjectKind::ALL.into_iter().find(|thing| thing.name() == act.thing)?,
        subject: subject.to_owned(),
    })
}
