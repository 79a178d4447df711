//! Actions of the operator on objects of other owners: viewing, reading output, removing.
//!
//! Each action is recorded as an event of the object's owner, so that the owner can see it. Repeated views of the same
//! object within a minute are recorded once: a list that refreshes itself must not push everything else out of the
//! feed.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use domain::{Owner, SandboxId, Snapshot, SnapshotId, VolumeName};

use crate::core::Core;
use crate::telemetry::events::OperatorAction;
use crate::{ApiKey, Outcome, Service, ServiceError, VolumeStatus};

/// For how long a repeated view is not recorded again.
const REPEATED_VIEW_INTERVAL: Duration = Duration::from_secs(60);

/// How many views are remembered; beyond that all are dropped, and some are recorded once more.
const MAX_REMEMBERED_VIEWS: usize = 1024;

/// The kind of action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperatorActionKind {
    Listed,
    Inspected,
    ReadLogs,
    Removed,
}

/// The kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperatorObjectKind {
    Sandbox,
    Snapshot,
    Volume,
}

/// What became of a key that was revoked together with the sandboxes of its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevokedKey {
    pub owner: Owner,
    /// How many other keys of the owner are still valid. The sandboxes stay if there are any.
    pub other_valid_keys: usize,
    pub removed_sandboxes: Vec<SandboxId>,
}

impl OperatorActionKind {
    pub const ALL: [Self; 4] = [Self::Listed, Self::Inspected, Self::ReadLogs, Self::Removed];

    pub fn name(self) -> &'static str {
        match self {
            Self::Listed => "listed",
            Self::Inspected => "inspected",
            Self::ReadLogs => "read logs",
            Self::Removed => "removed",
        }
    }
}

impl OperatorObjectKind {
    pub const ALL: [Self; 3] = [Self::Sandbox, Self::Snapshot, Self::Volume];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Snapshot => "snapshot",
            Self::Volume => "volume",
        }
    }
}

/// When the operator last viewed each object.
#[derive(Default)]
pub(crate) struct RecentActions(Mutex<HashMap<(Owner, OperatorAction), Duration>>);

impl RecentActions {
    /// Whether the action must be recorded. `now` is the time since the host's start.
    fn should_record(&self, owner: &Owner, act: &OperatorAction, now: Duration) -> bool {
        let mut recent = self.0.lock().expect("no thread panics while recording an act");
        let key = (owner.clone(), act.clone());
        let repeated =
            recent.get(&key).is_some_and(|then| now.saturating_sub(*then) < REPEATED_VIEW_INTERVAL);
        if repeated {
            return false;
        }
        if recent.len() >= MAX_REMEMBERED_VIEWS {
            recent.clear();
        }
        recent.insert(key, now);
        true
    }
}

impl Core {
    fn record_action(&self, owner: &Owner, act: OperatorAction) {
        let now = self.clock.now();
        if act.kind == OperatorActionKind::Removed || self.tenancy.acts.should_record(owner, &act, now.boot) {
            self.telemetry.events.record_action(now.wall, owner, act);
        }
    }
}

impl Service {
    /// Records that the operator viewed an object of another owner. Views of the operator's own objects are not
    /// recorded.
    pub fn record_view(
        &self,
        owner: &Owner,
        kind: OperatorActionKind,
        thing: OperatorObjectKind,
        subject: &str,
    ) {
        if *owner != Owner::operator() {
            self.0.record_action(owner, OperatorAction { kind, thing, subject: subject.to_owned() });
        }
    }

    /// Records that the operator listed the objects of every owner.
    pub fn record_list_of_all(&self, thing: OperatorObjectKind) {
        let act = OperatorAction { kind: OperatorActionKind::Listed, thing, subject: "*".to_owned() };
        self.0.record_action(&Owner::operator(), act);
    }

    /// Removes a sandbox of any owner, for the operator. Returns when it is removed.
    pub async fn remove_any_sandbox(&self, id: &SandboxId) -> Result<Outcome, ServiceError> {
        let sandbox = self.sandbox_of(None, id)?;
        self.record_removal(sandbox.owner(), OperatorObjectKind::Sandbox, id.as_str());
        sandbox.destroy().await
    }

    /// Removes every sandbox of an owner, for the operator; returns the removed ones.
    pub async fn remove_sandboxes_of(&self, owner: &Owner) -> Result<Vec<SandboxId>, ServiceError> {
        let mut removed = Vec::new();
        for handle in self.0.list_newest_first(Some(owner)) {
            self.remove_any_sandbox(&handle.id).await.or_else(accept_already_gone)?;
            removed.push(handle.id.clone());
        }
        Ok(removed)
    }

    /// Refuses a key from now on, and removes the sandboxes of its owner if that was the owner's last valid key. The
    /// operator's own sandboxes stay in any case, because the configured key opens them. Returns `None` if there is no
    /// such key.
    pub async fn revoke_key_and_sandboxes(&self, id: &str) -> Result<Option<RevokedKey>, ServiceError> {
        let Some(owner) = self.list_keys().into_iter().find(|key| key.id == id).map(|key| key.owner) else {
            return Ok(None);
        };
        if !self.revoke_key(id).await? {
            return Ok(None);
        }
        let now = self.0.clock.now().wall;
        let valid = |key: &ApiKey| key.owner == owner && key.expires.is_none_or(|expires| expires > now);
        let other_valid_keys = self.list_keys().iter().filter(|key| valid(key)).count();
        let stay = owner == Owner::operator() || other_valid_keys > 0;
        let removed_sandboxes = if stay { Vec::new() } else { self.remove_sandboxes_of(&owner).await? };
        Ok(Some(RevokedKey { owner, other_valid_keys, removed_sandboxes }))
    }

    /// All snapshots of one owner, or of all owners, newest first.
    pub fn list_any_snapshots(&self, owner: Option<&Owner>) -> Vec<Snapshot> {
        self.0.catalog.snapshots.all(owner)
    }

    /// A snapshot of one owner, or of any owner.
    pub fn find_any_snapshot(
        &self,
        owner: Option<&Owner>,
        id: &SnapshotId,
    ) -> Result<Snapshot, ServiceError> {
        let found = self.0.catalog.snapshots.all(owner).into_iter().find(|snapshot| snapshot.id == *id);
        found.ok_or_else(|| ServiceError::NoSnapshot(id.clone()))
    }

    /// Removes a snapshot of any owner, for the operator.
    pub async fn remove_any_snapshot(&self, id: &SnapshotId) -> Result<Outcome, ServiceError> {
        let owner = self.find_any_snapshot(None, id)?.owner;
        let removed = self.delete_snapshot(&owner, id).await?;
        self.record_removal(&owner, OperatorObjectKind::Snapshot, id.as_str());
        Ok(removed)
    }

    /// The volumes of every owner, sorted by owner and name.
    pub async fn list_all_volumes(&self) -> Result<Vec<VolumeStatus>, ServiceError> {
        let statuses = self.0.catalog.volumes.all();
        self.measure_volumes(statuses).await
    }

    /// Removes a volume of an owner, for the operator.
    pub async fn remove_volume_as_operator(
        &self,
        owner: &Owner,
        name: &VolumeName,
    ) -> Result<(), ServiceError> {
        self.remove_volume(owner, name).await?;
        self.record_removal(owner, OperatorObjectKind::Volume, name.as_str());
        Ok(())
    }

    fn record_removal(&self, owner: &Owner, thing: OperatorObjectKind, subject: &str) {
        self.record_view(owner, OperatorActionKind::Removed, thing, subject);
    }
}

/// Treats a sandbox that is already gone as removed.
fn accept_already_gone(error: ServiceError) -> Result<Outcome, ServiceError> {
    match error {
        ServiceError::NoSandbox(_) => Ok(Outcome::Unchanged),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_view_is_recorded_once_a_minute() {
        let acts = RecentActions::default();
        let act = |subject: &str| OperatorAction {
            kind: OperatorActionKind::Inspected,
            thing: OperatorObjectKind::Sandbox,
            subject: subject.to_owned(),
        };
        let (one, at) = (Owner::from_valid_name("one"), Duration::from_secs);
        assert!(acts.should_record(&one, &act("a"), at(0)));
        assert!(!acts.should_record(&one, &act("a"), at(59)));
        assert!(acts.should_record(&one, &act("b"), at(59)));
        assert!(acts.should_record(&Owner::from_valid_name("other"), &act("a"), at(59)));
        assert!(acts.should_record(&one, &act("a"), at(60)));
    }
}
