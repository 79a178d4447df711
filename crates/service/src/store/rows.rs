//! Sandboxes as rows.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use domain::{Files, Key, Owner, Phase, ProcessId, SandboxId};
use serde::Serialize;

use super::StoreError;
use super::columns::{InForceJson, PhaseJson, SpecJson};
use crate::Sandbox;

/// The durable state of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) sandbox: Sandbox,
    /// The key that leads to the sandbox.
    pub(crate) key: Option<Key>,
    /// The time to live that the sandbox was created with.
    pub(crate) timeout: Option<Duration>,
    /// When the sandbox expires, on the boot clock of `boot_id`.
    pub(crate) expires_boot: Option<Duration>,
    pub(crate) idle_timeout: Option<Duration>,
    /// The id with which its main process is started.
    pub(crate) entrypoint: Option<ProcessId>,
    /// Part of every token; raising it would revoke them.
    pub(crate) epoch: u64,
    pub(crate) boot_id: String,
}

impl Record {
    /// Whether the sandbox is in a pool and has no owner yet.
    pub(crate) fn is_warm(&self) -> bool {
        self.sandbox.owner == Owner::nobody()
    }
}

/// The columns of `sandboxes`, in their order, and the key that leads to the row.
pub(super) struct Row {
    pub(super) id: String,
    pub(super) owner: String,
    pub(super) origin: String,
    pub(super) spec: String,
    pub(super) labels: String,
    pub(super) notes: Vec<u8>,
    pub(super) phase: String,
    pub(super) phase_since: i64,
    pub(super) created: i64,
    pub(super) expires: Option<i64>,
    pub(super) expires_boot: Option<i64>,
    pub(super) timeout: Option<i64>,
    pub(super) idle_timeout: Option<i64>,
    pub(super) in_force: String,
    pub(super) entrypoint: Option<String>,
    pub(super) epoch: i64,
    pub(super) boot_id: String,
    pub(super) pool: Option<String>,
    /// Space and name; the owner is that of the sandbox.
    pub(super) key: Option<(String, String)>,
}

impl Row {
    pub(super) fn of(record: &Record) -> Self {
        let sandbox = &record.sandbox;
        Self {
            id: sandbox.id.as_str().to_owned(),
            owner: sandbox.owner.as_str().to_owned(),
            origin: sandbox.origin.clone(),
            spec: json(&SpecJson::of(&sandbox.spec)),
            labels: json(&sandbox.labels),
            notes: sandbox.notes.clone(),
            phase: phase(sandbox.phase),
            phase_since: wall_micros(sandbox.phase_since),
            created: wall_micros(sandbox.created),
            expires: sandbox.expires.map(wall_micros),
            expires_boot: record.expires_boot.map(micros),
            timeout: record.timeout.map(micros),
            idle_timeout: record.idle_timeout.map(micros),
            in_force: json(&InForceJson::of(&sandbox.in_force)),
            entrypoint: record.entrypoint.as_ref().map(|process| process.as_str().to_owned()),
            epoch: i64::try_from(record.epoch).unwrap_or(i64::MAX),
            boot_id: record.boot_id.clone(),
            pool: sandbox.pool.clone(),
            key: record.key.as_ref().map(|key| (key.space().to_owned(), key.name().to_owned())),
        }
    }

    pub(super) fn read(self) -> Result<Record, StoreError> {
        let unreadable = |column| {
            let id = self.id.clone();
            move |source| StoreError::Unreadable { id, column, source }
        };
        let spec: SpecJson = serde_json::from_str(&self.spec).map_err(unreadable("spec"))?;
        let phase: PhaseJson = serde_json::from_str(&self.phase).map_err(unreadable("phase"))?;
        let in_force: InForceJson = serde_json::from_str(&self.in_force).map_err(unreadable("in_force"))?;
        let labels = serde_json::from_str(&self.labels).map_err(unreadable("labels"))?;
        let id = SandboxId::parse(&self.id).map_err(|_error| StoreError::NotOurs(self.id.clone()))?;
        let owner = Owner::named(self.owner);
        let key = self.key.and_then(|(space, name)| Key::new(&owner, &space, &name).ok());
        let sandbox = Sandbox {
            id,
            owner,
            origin: self.origin,
            spec: spec.into_domain(),
            labels,
            notes: self.notes,
            phase: phase.into_domain(),
            phase_since: wall_time(self.phase_since),
            created: wall_time(self.created),
            expires: self.expires.map(wall_time),
            in_force: in_force.into_backend(),
            idle_timeout: self.idle_timeout.map(span),
            pool: self.pool,
            name: key.as_ref().and_then(crate::names::chosen_name),
            files: Files::Kept,
        };
        // Rows of earlier versions do not have the time to live that a sandbox was created with.
        let until_expiry = sandbox.expires.and_then(|expires| expires.duration_since(sandbox.created).ok());
        Ok(Record {
            sandbox,
            key,
            timeout: self.timeout.map(span).or(until_expiry),
            expires_boot: self.expires_boot.map(span),
            idle_timeout: self.idle_timeout.map(span),
            entrypoint: self.entrypoint.and_then(|text| ProcessId::parse(&text).ok()),
            epoch: u64::try_from(self.epoch).unwrap_or(0),
            boot_id: self.boot_id,
        })
    }
}

pub(super) fn phase(phase: Phase) -> String {
    json(&PhaseJson::of(phase))
}

pub(super) fn wall_micros(time: SystemTime) -> i64 {
    micros(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

pub(super) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

pub(super) fn span(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn wall_time(micros: i64) -> SystemTime {
    UNIX_EPOCH + span(micros)
}

pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our columns have string keys only")
}
