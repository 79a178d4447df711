//! Volumes as rows.

use std::time::SystemTime;

use domain::volume::VolumeLifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};
use rusqlite::{Connection, params};

use super::StoreError;
use super::rows::{duration_from_micros, duration_to_micros, wall_micros, wall_time};

/// The durable state of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredVolume {
    pub(crate) volume: Volume,
    pub(crate) created: SystemTime,
    /// Whether its removal was begun.
    pub(crate) removing: bool,
    /// The time of its last use, if it is kept for a time after that and is not in use.
    pub(crate) unused_since: Option<SystemTime>,
}

/// A change of a volume's row.
#[derive(Clone, Debug)]
pub(crate) enum VolumeChange {
    Insert(StoredVolume),
    /// A sandbox begins to use the volume.
    Used(VolumeId),
    /// No sandbox uses the volume since this time.
    Unused(VolumeId, SystemTime),
    /// The volume is about to be removed.
    Remove(VolumeId),
    /// The volume is removed.
    Forget(VolumeId),
}

pub(super) fn write_change(connection: &Connection, change: &VolumeChange) -> Result<(), StoreError> {
    const INSERT: &str = "INSERT INTO volumes (id, owner, name, size, kept, created, removing, keep_after_use, \
         unused_since) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
    const SET_UNUSED: &str = "UPDATE volumes SET unused_since = ?2 WHERE id = ?1";
    let written = match change {
        VolumeChange::Insert(kept) => {
            let volume = &kept.volume;
            let size = i64::try_from(volume.size.0).unwrap_or(i64::MAX);
            // To an older version, a volume that is kept after its use is one that is kept for ever.
            let stays = volume.lifetime != VolumeLifetime::WithSandboxes;
            let keep_after_use = match volume.lifetime {
                VolumeLifetime::AfterUse(time) => Some(duration_to_micros(time)),
                VolumeLifetime::Kept | VolumeLifetime::WithSandboxes => None,
            };
            let unused_since = kept.unused_since.map(wall_micros);
            let (owner, name) = (volume.owner.as_str(), volume.name.as_str());
            let created = wall_micros(kept.created);
            connection.execute(
                INSERT,
                params![
                    volume.id.as_str(),
                    owner,
                    name,
                    size,
                    stays,
                    created,
                    kept.removing,
                    keep_after_use,
                    unused_since
                ],
            )
        }
        VolumeChange::Used(id) => connection.execute(SET_UNUSED, params![id.as_str(), None::<i64>]),
        VolumeChange::Unused(id, since) => {
            connection.execute(SET_UNUSED, params![id.as_str(), wall_micros(*since)])
        }
        VolumeChange::Remove(id) => {
            connection.execute("UPDATE volumes SET removing = 1 WHERE id = ?1", [id.as_str()])
        }
        VolumeChange::Forget(id) => connection.execute("DELETE FROM volumes WHERE id = ?1", [id.as_str()]),
    };
    written.map(drop).map_err(|source| StoreError::Sqlite { action: "record a volume", source })
}

/// Rows that do not name a valid volume are an error, as for sandboxes.
pub(super) fn read_volumes(connection: &Connection) -> Result<Vec<StoredVolume>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the volumes", source };
    let sql = "SELECT id, owner, name, size, kept, created, removing, keep_after_use, unused_since \
         FROM volumes ORDER BY created";
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let (id, name): (String, String) = (row.get(0)?, row.get(2)?);
        let stays: bool = row.get(4)?;
        let volume = VolumeId::parse(&id).ok().zip(VolumeName::parse(&name).ok());
        let (owner, size) = (Owner::from_valid_name(row.get::<_, String>(1)?), row.get::<_, i64>(3)?);
        let (created, removing) = (wall_time(row.get(5)?), row.get(6)?);
        let keep_after_use: Option<i64> = row.get(7)?;
        let unused_since = row.get::<_, Option<i64>>(8)?.map(wall_time);
        let kept = volume.map(|(id, name)| StoredVolume {
            volume: Volume {
                id,
                owner,
                name,
                size: Bytes(u64::try_from(size).unwrap_or(0)),
                lifetime: match keep_after_use {
                    Some(micros) => VolumeLifetime::AfterUse(duration_from_micros(micros)),
                    None if stays => VolumeLifetime::Kept,
                    None => VolumeLifetime::WithSandboxes,
                },
            },
            created,
            removing,
            unused_since,
        });
        Ok(kept.ok_or(StoreError::NotOurs(id)))
    });
    rows.map_err(failed)?.map(|row| row.map_err(failed)?).collect()
}
