//! The usage of owners per hour, as rows.

use domain::Owner;
use rusqlite::{Connection, params};

use super::StoreError;
use crate::telemetry::usage_history::{HourlyUsage, MAX_HOURS, UsageTotals};

/// Writes or replaces hours and deletes the oldest, all or nothing.
pub(super) fn write_hours(connection: &mut Connection, hours: &[HourlyUsage]) -> rusqlite::Result<()> {
    const WRITE: &str = "INSERT OR REPLACE INTO hours \
         (number, owner, created, alive_millis, cpu_micros, memory_byte_seconds, network_sent, network_received) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    const FORGET: &str = "DELETE FROM hours WHERE number < (SELECT max(number) FROM hours) - ?1";
    let signed = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let change = connection.transaction()?;
    for hour in hours {
        let used = &hour.used;
        let values = params![
            signed(hour.number),
            hour.owner.as_str(),
            signed(used.created),
            signed(used.alive_millis),
            signed(used.cpu_micros),
            signed(used.memory_byte_seconds),
            signed(used.network_sent),
            signed(used.network_received)
        ];
        change.prepare_cached(WRITE)?.execute(values)?;
    }
    change.prepare_cached(FORGET)?.execute([signed(MAX_HOURS)])?;
    change.commit()
}

pub(super) fn read_hours(connection: &Connection) -> Result<Vec<HourlyUsage>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the usage", source };
    let sql = "SELECT number, owner, created, alive_millis, cpu_micros, memory_byte_seconds, network_sent, \
               network_received FROM hours";
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let amount = |column| Ok::<_, rusqlite::Error>(row.get::<_, i64>(column)?.cast_unsigned());
        Ok(HourlyUsage {
            number: amount(0)?,
            owner: Owner::from_valid_name(row.get::<_, String>(1)?),
            used: UsageTotals {
                created: amount(2)?,
                alive_millis: amount(3)?,
                cpu_micros: amount(4)?,
                memory_byte_seconds: amount(5)?,
                network_sent: amount(6)?,
                network_received: amount(7)?,
            },
        })
    });
    rows.map_err(failed)?.map(|row| row.map_err(failed)).collect()
}
