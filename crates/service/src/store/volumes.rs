//! Volumes as rows.

use std::time::SystemTime;

use domain::volume::VolumeLifetime;
use domain::{Bytes, Owner, Volume, VolumeId, VolumeName};
use rusqlite::{Connection, params};

use super::StoreError;
use super::rows::{wall_micros, wall_time};

/// The durable state of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredVolume {
    pub(crate) volume: Volume,
    pub(crate) created: SystemTime,
    /// Whether its removal was begun.
    pub(crate) removing: bool,
}

/// A change of a volume's row.
#[derive(Clone, Debug)]
pub(crate) enum VolumeChange {
    Insert(StoredVolume),
    /// The volume is about to be removed.
    Remove(VolumeId),
    /// The volume is removed.
    Forget(VolumeId),
}

pub(super) fn write_change(connection: &Connection, change: &VolumeChange) -> Result<(), StoreError> {
    const INSERT: &str = "INSERT INTO volumes (id, owner, name, size, kept, created, removing) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
    let written = match change {
        VolumeChange::Insert(kept) => {
            let volume = &kept.volume;
            let size = i64::try_from(volume.size.0).unwrap_or(i64::MAX);
            let stays = volume.lifetime == VolumeLifetime::Kept;
            let (owner, name) = (volume.owner.as_str(), volume.name.as_str());
            let created = wall_micros(kept.created);
            connection.execute(
                INSERT,
                params![volume.id.as_str(), owner, name, size, stays, created, kept.removing],
            )
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
    let sql = "SELECT id, owner, name, size, kept, created, removing FROM volumes ORDER BY created";
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let (id, name): (String, String) = (row.get(0)?, row.get(2)?);
        let stays: bool = row.get(4)?;
        let volume = VolumeId::parse(&id).ok().zip(VolumeName::parse(&name).ok());
        let (owner, size) = (Owner::from_valid_name(row.get::<_, String>(1)?), row.get::<_, i64>(3)?);
        let (created, removing) = (wall_time(row.get(5)?), row.get(6)?);
        let kept = volume.map(|(id, name)| StoredVolume {
            volume: Volume {
                id,
                owner,
                name,
                size: Bytes(u64::try_from(size).unwrap_or(0)),
                lifetime: if stays { VolumeLifetime::Kept } else { VolumeLifetime::WithSandboxes },
            },
            created,
            removing,
        });
        Ok(kept.ok_or(StoreError::NotOurs(id)))
    });
    rows.map_err(failed)?.map(|row| row.map_err(failed)?).collect()
}
