//! The writer thread, and the thread that checkpoints the log.
//!
//! Folding the write-ahead log into the database waits for the disk. The writer must not do that while a create waits
//! for it, so a second connection on a second thread does.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use domain::{Phase, SandboxId};
use rusqlite::{Connection, params};
use tokio::sync::mpsc;

use super::rows::{SandboxRow, wall_micros};
use super::{StoreError, StoreWrite, WriteReply};
use crate::error::error_chain;
use crate::tenancy::api_keys::StoredApiKey;

/// The number of writes after which the log is folded into the database.
const WRITES_PER_CHECKPOINT: u32 = 256;

/// Starts both threads. They end when the queue is closed.
pub(super) fn spawn_writer(
    connection: Connection,
    folding: Connection,
    writes: mpsc::Receiver<StoreWrite>,
) -> Result<(), StoreError> {
    let (checkpoints, requests) = sync_channel(1);
    let folding = spawn_thread("store-fold", move || run_checkpoints(&folding, requests))?;
    let writer = StoreWriter { connection, checkpoints, folding, writes: 0, overdue: Vec::new() };
    spawn_thread("store", move || writer.run(writes)).map(drop)
}

/// The thread that owns the connection.
struct StoreWriter {
    connection: Connection,
    checkpoints: SyncSender<()>,
    folding: JoinHandle<()>,
    writes: u32,
    /// Rows that could not be removed, for example on a full disk; retried after later writes.
    overdue: Vec<SandboxId>,
}

impl StoreWriter {
    fn run(mut self, mut writes: mpsc::Receiver<StoreWrite>) {
        while let Some(write) = writes.blocking_recv() {
            match write {
                StoreWrite::Insert(row, answer) => send_reply(answer, self.insert_sandbox(&row)),
                StoreWrite::Claim(row, answer) => send_reply(answer, self.claim_sandbox(&row)),
                StoreWrite::Update(row, Some(answer)) => send_reply(answer, self.update_sandbox(&row)),
                StoreWrite::Update(row, None) => {
                    if let Err(error) = self.update_sandbox(&row) {
                        tracing::warn!(sandbox = row.id, error = %error_chain(&error), "failed to store a change of a sandbox");
                    }
                }
                StoreWrite::Retire(id, answer) => send_reply(answer, self.retire_sandbox(&id)),
                StoreWrite::Delete(id, answer) => {
                    self.delete_or_defer(id);
                    send_reply(answer, Ok(()));
                }
                StoreWrite::InsertKey(key, answer) => send_reply(answer, self.insert_key(&key)),
                StoreWrite::DeleteKey(id, answer) => send_reply(answer, self.delete_key(&id)),
                StoreWrite::PutPool(pool, answer) => {
                    send_reply(answer, super::pools::put_pool(&self.connection, &pool))
                }
                StoreWrite::DeletePool(name, answer) => {
                    send_reply(answer, super::pools::delete_pool(&self.connection, &name))
                }
                StoreWrite::Volume(change, answer) => {
                    send_reply(answer, super::volumes::write_change(&self.connection, &change));
                }
                StoreWrite::Events(events) => {
                    if let Err(error) = super::events::write_events(&mut self.connection, &events) {
                        tracing::warn!(%error, "failed to store events");
                    }
                }
                StoreWrite::Snapshot(snapshot, answer) => {
                    send_reply(answer, super::snapshots::write_snapshot(&self.connection, &snapshot));
                }
                StoreWrite::DeleteSnapshot(id, answer) => {
                    send_reply(answer, super::snapshots::delete_snapshot(&self.connection, &id));
                }
                StoreWrite::PutVault(id, vault, answer) => {
                    send_reply(answer, super::vaults::write_vault(&self.connection, &id, &vault));
                }
                StoreWrite::Hours(hours) => {
                    if let Err(error) = super::hours::write_hours(&mut self.connection, &hours) {
                        tracing::warn!(%error, "failed to store the latest usage");
                    }
                }
                StoreWrite::Close(done) => {
                    self.close();
                    // The caller may no longer wait.
                    done.send(()).ok();
                    return;
                }
            }
            self.after_write();
        }
    }

    /// The connection that is closed last folds the log in and removes it, so the other one is closed first.
    fn close(self) {
        drop(self.checkpoints);
        if self.folding.join().is_err() {
            tracing::warn!("checkpoint thread of the store panicked");
        }
        drop(self.connection);
    }

    /// Writes the row and points its key to it, both or neither.
    fn insert_sandbox(&mut self, row: &SandboxRow) -> Result<(), StoreError> {
        let failed = |source| StoreError::Sqlite { action: "write a new row", source };
        let change = self.connection.transaction().map_err(failed)?;
        insert_row(&change, row).and_then(|()| point_key(&change, row)).map_err(failed)?;
        change.commit().map_err(failed)
    }

    /// Like [`StoreWriter::insert_sandbox`], for an existing row: nothing of the warm sandbox's row remains.
    fn claim_sandbox(&mut self, row: &SandboxRow) -> Result<(), StoreError> {
        let failed = |source| StoreError::Sqlite { action: "write the owner of a row", source };
        let change = self.connection.transaction().map_err(failed)?;
        let former = change.prepare_cached("DELETE FROM sandboxes WHERE id = ?1");
        former.and_then(|mut rows| rows.execute([&row.id])).map_err(failed)?;
        insert_row(&change, row).and_then(|()| point_key(&change, row)).map_err(failed)?;
        change.commit().map_err(failed)
    }

    /// A sandbox that is being removed stays so: its driver may still finish an earlier command.
    fn update_sandbox(&self, row: &SandboxRow) -> Result<(), StoreError> {
        const SQL: &str = "UPDATE sandboxes SET labels = ?2, phase = iif(phase = ?10, phase, ?3), \
             phase_since = ?4, expires = ?5, expires_boot = ?6, in_force = ?7, spec = ?8, boot_id = ?9 \
             WHERE id = ?1";
        let written = self.connection.prepare_cached(SQL).and_then(|mut statement| {
            statement.execute(params![
                row.id,
                row.labels,
                row.phase,
                row.phase_since,
                row.expires,
                row.expires_boot,
                row.in_force,
                row.spec,
                row.boot_id,
                super::rows::phase_json(Phase::Stopping)
            ])
        });
        written.map(drop).map_err(|source| StoreError::Sqlite { action: "change a row", source })
    }

    /// Has the next start remove the sandbox, if we die before its driver has.
    fn retire_sandbox(&self, id: &SandboxId) -> Result<(), StoreError> {
        let retired = self.connection.prepare_cached("UPDATE sandboxes SET phase = ?2 WHERE id = ?1");
        let stopping = super::rows::phase_json(Phase::Stopping);
        let written = retired.and_then(|mut rows| rows.execute(params![id.as_str(), stopping]));
        written.map(drop).map_err(|source| StoreError::Sqlite { action: "retire a row", source })
    }

    fn delete_or_defer(&mut self, id: SandboxId) {
        if let Err(error) = self.delete_row(&id) {
            tracing::warn!(sandbox = %id, error = %error_chain(&error), "failed to delete the row of a sandbox; retrying after later writes");
            self.overdue.push(id);
        }
    }

    /// Removes the row and the key that leads to it.
    fn delete_row(&mut self, id: &SandboxId) -> Result<(), StoreError> {
        let failed = |source| StoreError::Sqlite { action: "remove a row", source };
        let change = self.connection.transaction().map_err(failed)?;
        for sql in ["DELETE FROM sandboxes WHERE id = ?1", "DELETE FROM keys WHERE sandbox = ?1"] {
            let removed = change.prepare_cached(sql).and_then(|mut rows| rows.execute([id.as_str()]));
            removed.map_err(failed)?;
        }
        change.commit().map_err(failed)
    }

    fn insert_key(&self, kept: &StoredApiKey) -> Result<(), StoreError> {
        const SQL: &str =
            "INSERT INTO api_keys (id, hash, owner, created, expires) VALUES (?1, ?2, ?3, ?4, ?5)";
        let key = &kept.key;
        let times = (wall_micros(key.created), key.expires.map(wall_micros));
        let values = params![key.id, kept.hash, key.owner.as_str(), times.0, times.1];
        let written = self.connection.execute(SQL, values);
        written.map(drop).map_err(|source| StoreError::Sqlite { action: "store a key", source })
    }

    fn delete_key(&self, id: &str) -> Result<(), StoreError> {
        let written = self.connection.execute("DELETE FROM api_keys WHERE id = ?1", [id]);
        written.map(drop).map_err(|source| StoreError::Sqlite { action: "delete a key", source })
    }

    fn after_write(&mut self) {
        while let Some(id) = self.overdue.pop() {
            if self.delete_row(&id).is_err() {
                self.overdue.push(id);
                break;
            }
        }
        self.writes += 1;
        if self.writes >= WRITES_PER_CHECKPOINT {
            // A full channel means that a checkpoint is already requested.
            self.checkpoints.try_send(()).ok();
            self.writes = 0;
        }
    }
}

fn insert_row(connection: &Connection, row: &SandboxRow) -> rusqlite::Result<()> {
    const SQL: &str = "INSERT INTO sandboxes (id, owner, origin, spec, labels, notes, phase, phase_since, \
         created, expires, expires_boot, idle_timeout, in_force, entrypoint, epoch, boot_id, pool, timeout) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)";
    let values = params![
        row.id,
        row.owner,
        row.origin,
        row.spec,
        row.labels,
        row.notes,
        row.phase,
        row.phase_since,
        row.created,
        row.expires,
        row.expires_boot,
        row.idle_timeout,
        row.in_force,
        row.entrypoint,
        row.epoch,
        row.boot_id,
        row.pool,
        row.timeout
    ];
    connection.prepare_cached(SQL)?.execute(values).map(drop)
}

/// Points the key of a new row to it. The sandbox that the key led to before has a successor, so no client can ask for
/// it any more: if we die now, the next start removes it.
fn point_key(connection: &Connection, row: &SandboxRow) -> rusqlite::Result<()> {
    const RETIRE: &str = "UPDATE sandboxes SET phase = ?4 WHERE id = \
         (SELECT sandbox FROM keys WHERE owner = ?1 AND space = ?2 AND name = ?3)";
    const POINT: &str = "INSERT INTO keys (owner, space, name, sandbox) VALUES (?1, ?2, ?3, ?4) \
         ON CONFLICT DO UPDATE SET sandbox = excluded.sandbox";
    let Some((space, name)) = &row.key else { return Ok(()) };
    let stopping = super::rows::phase_json(Phase::Stopping);
    connection.prepare_cached(RETIRE)?.execute(params![row.owner, space, name, stopping])?;
    connection.prepare_cached(POINT)?.execute(params![row.owner, space, name, row.id]).map(drop)
}

fn send_reply(answer: WriteReply, outcome: Result<(), StoreError>) {
    // The caller may be gone; the write stands either way.
    answer.send(outcome).ok();
}

fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StoreError> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map_err(StoreError::Thread)
}

/// Folds the log into the database at each request, until the sender is dropped.
fn run_checkpoints(connection: &Connection, requests: Receiver<()>) {
    for () in requests {
        let folded = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_row| Ok(()));
        if let Err(error) = folded {
            tracing::warn!(%error, "failed to checkpoint the log of the store");
        }
    }
}
