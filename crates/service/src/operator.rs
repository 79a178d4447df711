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
use crate::events::Act;
use crate::{ApiKey, Outcome, Service, ServiceError, VolumeStatus};

/// For how long a repeated view is not recorded again.
const REPEATED_WITHIN: Duration = Duration::from_secs(60);

/// How many views are remembered; beyond that all are dropped, and some are recorded once more.
const MAX_REMEMBERED: usize = 1024;

/// The kind of action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActKind {
    Listed,
    Inspected,
    ReadLogs,
    Removed,
}

/// The kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThingKind {
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

impl ActKind {
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

impl ThingKind {
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
pub(crate) struct RecentActs(Mutex<HashMap<(Owner, Act), Duration>>);

impl RecentActs {
    /// Whether the action must be recorded. `now` is the time since the host's start.
    fn is_news(&self, owner: &Owner, act: &Act, now: Duration) -> bool {
        let mut recent = self.0.lock().expect("no thread panics while recording an act");
        let key = (owner.clone(), act.clone());
        let repeated = recent.get(&key).is_some_and(|then| now.saturating_sub(*then) < REPEATED_WITHIN);
        if repeated {
            return false;
        }
        if recent.len() >= MAX_REMEMBERED {
            recent.clear();
        }
        recent.insert(key, now);
        true
    }
}

impl Core {
    fn record_act(&self, owner: &Owner, act: Act) {
        let now = self.clock.now();
        if act.kind == ActKind::Removed || self.acts.is_news(owner, &act, now.boot) {
            self.events.record_act(now.wall, owner, act);
        }
    }
}

impl Service {
    /// Records that the operator viewed an object of another owner. Views of the operator's own objects are not
    /// recorded.
    pub fn record_look(&self, owner: &Owner, kind: ActKind, thing: ThingKind, subject: &str) {
        if *owner != Owner::single() {
            self.0.record_act(owner, Act { kind, thing, subject: subject.to_owned() });
        }
    }

    /// Records that the operator listed the objects of every owner.
    pub fn record_list_of_all(&self, thing: ThingKind) {
        let act = Act { kind: ActKind::Listed, thing, subject: "*".to_owned() };
        self.0.record_act(&Owner::single(), act);
    }

    /// Removes a sandbox of any owner, for the operator. Returns when it is removed.
    pub async fn remove_any_sandbox(&self, id: &SandboxId) -> Result<Outcome, ServiceError> {
        let owner = self.0.visible(None, id)?.owner.clone();
        self.record_removal(&owner, ThingKind::Sandbox, id.as_str());
        self.destroy(&owner, id).await
    }

    /// Removes every sandbox of an owner, for the operator; returns the removed ones.
    pub async fn remove_sandboxes_of(&self, owner: &Owner) -> Result<Vec<SandboxId>, ServiceError> {
        let mut removed = Vec::new();
        for handle in self.0.newest_first(Some(owner)) {
            self.remove_any_sandbox(&handle.id).await.or_else(gone)?;
            removed.push(handle.id.clone());
        }
        Ok(removed)
    }

    /// Refuses a key from now on, and removes the sandboxes of its owner if that was the owner's last valid key. The
    /// operator's own sandboxes stay in any case, because the configured key opens them. Returns `None` if there is no
    /// such key.
    pub async fn revoke_key_and_sandboxes(&self, id: &str) -> Result<Option<RevokedKey>, ServiceError> {
        let Some(owner) = self.keys().into_iter().find(|key| key.id == id).map(|key| key.owner) else {
            return Ok(None);
        };
        if !self.revoke_key(id).await? {
            return Ok(None);
        }
        let now = self.0.clock.now().wall;
        let valid = |key: &ApiKey| key.owner == owner && key.expires.is_none_or(|expires| expires > now);
        let other_valid_keys = self.keys().iter().filter(|key| valid(key)).count();
        let stay = owner == Owner::single() || other_valid_keys > 0;
        let removed_sandboxes = if stay { Vec::new() } else { self.remove_sandboxes_of(&owner).await? };
        Ok(Some(RevokedKey { owner, other_valid_keys, removed_sandboxes }))
    }

    /// All snapshots of one owner, or of all owners, newest first.
    pub fn any_snapshots(&self, owner: Option<&Owner>) -> Vec<Snapshot> {
        self.0.snapshots.all(owner)
    }

    /// A snapshot of one owner, or of any owner.
    pub fn any_snapshot(&self, owner: Option<&Owner>, id: &SnapshotId) -> Result<Snapshot, ServiceError> {
        let found = self.0.snapshots.all(owner).into_iter().find(|snapshot| snapshot.id == *id);
        found.ok_or_else(|| ServiceError::NoSnapshot(id.clone()))
    }

    /// Removes a snapshot of any owner, for the operator.
    pub async fn remove_any_snapshot(&self, id: &SnapshotId) -> Result<Outcome, ServiceError> {
        let owner = self.any_snapshot(None, id)?.owner;
        let removed = self.delete_snapshot(&owner, id).await?;
        self.record_removal(&owner, ThingKind::Snapshot, id.as_str());
        Ok(removed)
    }

    /// The volumes of every owner, sorted by owner and name.
    pub async fn all_volumes(&self) -> Result<Vec<VolumeStatus>, ServiceError> {
        let statuses = self.0.volumes.all();
        self.measured(statuses).await
    }

    /// Removes a volume of an owner, for the operator.
    pub async fn remove_volume_as_operator(
        &self,
        owner: &Owner,
        name: &VolumeName,
    ) -> Result<(), ServiceError> {
        self.remove_volume(owner, name).await?;
        self.record_removal(owner, ThingKind::Volume, name.as_str());
        Ok(())
    }

    fn record_removal(&self, owner: &Owner, thing: ThingKind, subject: &str) {
        self.record_look(owner, ActKind::Removed, thing, subject);
    }
}

/// Treats a sandbox that is already gone as removed.
fn gone(error: ServiceError) -> Result<Outcome, ServiceError> {
    match error {
        ServiceError::NoSandbox(_) => Ok(Outcome::AlreadySo),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_view_is_recorded_once_a_minute() {
        let acts = RecentActs::default();
        let act = |subject: &str| Act {
            kind: ActKind::Inspected,
            thing: ThingKind::Sandbox,
            subject: subject.to_owned(),
        };
        let (one, at) = (Owner::named("one"), Duration::from_secs);
        assert!(acts.is_news(&one, &act("a"), at(0)));
        assert!(!acts.is_news(&one, &act("a"), at(59)));
        assert!(acts.is_news(&one, &act("b"), at(59)));
        assert!(acts.is_news(&Owner::named("other"), &act("a"), at(59)));
        assert!(acts.is_news(&one, &act("a"), at(60)));
    }
}
