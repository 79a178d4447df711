//! Sandboxes as rows.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use domain::{FilesState, Owner, Phase, ProcessId, SandboxId, SandboxKey};
use serde::Serialize;

use super::StoreError;
use super::columns::{EnforcedJson, PhaseJson, SpecJson};
use crate::Sandbox;

/// The durable state of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct SandboxRecord {
    pub(crate) sandbox: Sandbox,
    /// The key that leads to the sandbox.
    pub(crate) key: Option<SandboxKey>,
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

impl SandboxRecord {
    /// Whether the sandbox is in a pool and has no owner yet.
    pub(crate) fn is_warm(&self) -> bool {
        self.sandbox.owner == Owner::unclaimed()
    }
}

/// The columns of `sandboxes`, in their order, and the key that leads to the row.
pub(super) struct SandboxRow {
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

impl SandboxRow {
    pub(super) fn from_record(record: &SandboxRecord) -> Self {
        let sandbox = &record.sandbox;
        Self {
            id: sandbox.id.as_str().to_owned(),
            owner: sandbox.owner.as_str().to_owned(),
            origin: sandbox.origin.clone(),
            spec: to_json(&SpecJson::from_domain(&sandbox.spec)),
            labels: to_json(&sandbox.labels),
            notes: sandbox.notes.clone(),
            phase: phase_json(sandbox.phase),
            phase_since: wall_micros(sandbox.phase_since),
            created: wall_micros(sandbox.created),
            expires: sandbox.expires.map(wall_micros),
            expires_boot: record.expires_boot.map(duration_to_micros),
            timeout: record.timeout.map(duration_to_micros),
            idle_timeout: record.idle_timeout.map(duration_to_micros),
            in_force: to_json(&EnforcedJson::from_backend(&sandbox.in_force)),
            entrypoint: record.entrypoint.as_ref().map(|process| process.as_str().to_owned()),
            epoch: i64::try_from(record.epoch).unwrap_or(i64::MAX),
            boot_id: record.boot_id.clone(),
            pool: sandbox.pool.clone(),
            key: record.key.as_ref().map(|key| (key.space().to_owned(), key.name().to_owned())),
        }
    }

    pub(super) fn into_record(self) -> Result<SandboxRecord, StoreError> {
        let unreadable = |column| {
            let id = self.id.clone();
            move |source| StoreError::Unreadable { id, column, source }
        };
        let spec: SpecJson = serde_json::from_str(&self.spec).map_err(unreadable("spec"))?;
        let phase: PhaseJson = serde_json::from_str(&self.phase).map_err(unreadable("phase"))?;
        let in_force: EnforcedJson = serde_json::from_str(&self.in_force).map_err(unreadable("in_force"))?;
        let labels = serde_json::from_str(&self.labels).map_err(unreadable("labels"))?;
        let id = SandboxId::parse(&self.id).map_err(|_error| StoreError::NotOurs(self.id.clone()))?;
        let owner = Owner::from_valid_name(self.owner);
        let key = self.key.and_then(|(space, name)| SandboxKey::new(&owner, &space, &name).ok());
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
            idle_timeout: self.idle_timeout.map(duration_from_micros),
            pool: self.pool,
            name: key.as_ref().and_then(crate::sandboxes::sandbox_keys::chosen_name),
            files: FilesState::Kept,
        };
        // Rows of earlier versions do not have the time to live that a sandbox was created with.
        let until_expiry = sandbox.expires.and_then(|expires| expires.duration_since(sandbox.created).ok());
        Ok(SandboxRecord {
            sandbox,
            key,
            timeout: self.timeout.map(duration_from_micros).or(until_expiry),
            expires_boot: self.expires_boot.map(duration_from_micros),
            idle_timeout: self.idle_timeout.map(duration_from_micros),
            entrypoint: self.entrypoint.and_then(|text| ProcessId::parse(&text).ok()),
            epoch: u64::try_from(self.epoch).unwrap_or(0),
            boot_id: self.boot_id,
        })
    }
}

pub(super) fn phase_json(phase: Phase) -> String {
    to_json(&PhaseJson::from_domain(phase))
}

pub(super) fn wall_micros(time: SystemTime) -> i64 {
    duration_to_micros(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

pub(super) fn duration_to_micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

pub(super) fn duration_from_micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn wall_time(micros: i64) -> SystemTime {
    UNIX_EPOCH + duration_from_micros(micros)
}

pub(super) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our columns have string keys only")
}
