//! The decisions after a restart: what becomes of each thing, by what the store says and what the backend has.
//!
//! ```text
//! kind           in the store                     not in the store, but found
//! sandbox        adopt, report as dead, destroy   remove: no client can ask for it
//! warm sandbox   return to its pool, remove       remove: only its row tells it from any other sandbox
//! volume         keep, finish removal, forget     adopt: the backend knows its owner
//! snapshot       keep, mark ready, take, finish the deletion, fail       remove its files
//! ```
//! The files that belong to each kind carry the decisions out: `sandboxes/reconcile.rs`, `pools/warm.rs`,
//! `volumes/reconcile.rs` and `snapshots/making.rs`.

use backend::{FoundCondition, SnapshotContent, SnapshotStage};
use domain::{EndCause, Phase, SnapshotState};

/// What is known of a sandbox that is in the store.
#[derive(Clone, Copy)]
pub(crate) struct SandboxFacts {
    pub(crate) phase: Phase,
    pub(crate) found: Option<FoundCondition>,
    /// Whether it was taken from a pool.
    pub(crate) from_pool: bool,
    /// Whether the host has not rebooted since the row was written.
    pub(crate) same_boot: bool,
    pub(crate) expired: bool,
}

/// The action for a sandbox that is in the store, in the backend, or in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SandboxPlan {
    /// It is alive and continues in this phase.
    Adopt(Phase),
    /// It is alive, but was still starting: it continues in this phase if it is complete, and is destroyed otherwise.
    AdoptIfComplete(Phase),
    /// It is dead, and its owner will want to know why.
    Report(EndCause),
    /// It was being removed, was never completed, or has expired.
    Destroy,
    /// It is not in the store, so no client can ever ask for it.
    RemoveUnknown,
}

/// The action for a warm sandbox that is in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WarmPlan {
    ReturnToPool,
    Remove,
}

/// What the store says of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredVolumeState {
    Kept,
    Removing,
    Unknown,
}

/// The action for a volume that is in the store, in the backend, or in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolumePlan {
    Keep,
    /// Its removal had begun.
    FinishRemoval,
    /// It was never made, or cannot be read now. Only its row is deleted, so that it is adopted again once it can be
    /// read.
    ForgetRow,
    /// The backend knows its owner, so a volume that is missing in the store, for example after a power loss, is not
    /// lost.
    Adopt,
}

/// The action for a snapshot that is in the store, in the backend, or in both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotPlan {
    Keep,
    /// It was completed, but the server died before it recorded that.
    MarkReady(SnapshotContent),
    /// Its sandbox still has its files, so it can still be taken.
    Take,
    FinishDeletion,
    /// Its files are gone or were never complete.
    Fail,
    /// It is not in the store, so no client can ever ask for it.
    RemoveUnknown,
}

/// `stored` is `None` for a sandbox that only the backend knows.
///
/// A server may die after a sandbox was completed and before this was recorded, so a living sandbox is adopted although
/// its row says "starting", if it is complete. One that was taken from a pool may lack resources that its owner asked
/// for, and no client has heard of it. A row says "failed" until a restart is complete, so a sandbox that lives
/// nevertheless is stopped again; its files are kept, like those of every sandbox that once ran.
pub(crate) fn plan_sandbox(stored: Option<SandboxFacts>) -> SandboxPlan {
    use FoundCondition::{Alive, Dead, Frozen, Half};
    let Some(facts) = stored else { return SandboxPlan::RemoveUnknown };
    let lost = if facts.same_boot { EndCause::AgentDied } else { EndCause::HostRebooted };
    match (facts.phase, facts.found) {
        _ if facts.expired => SandboxPlan::Destroy,
        (Phase::Stopping | Phase::Stopped, _) => SandboxPlan::Destroy,
        (Phase::Failed(cause), _) => SandboxPlan::Report(cause),
        (Phase::Starting, None | Some(Dead | Half)) => SandboxPlan::Destroy,
        (Phase::Starting, Some(Alive | Frozen)) if facts.from_pool => SandboxPlan::Destroy,
        (Phase::Starting, Some(Alive)) => SandboxPlan::AdoptIfComplete(Phase::Running),
        (Phase::Starting, Some(Frozen)) => SandboxPlan::AdoptIfComplete(Phase::Paused),
        (Phase::Exited(exit), Some(Alive)) => SandboxPlan::Adopt(Phase::Exited(exit)),
        (_, Some(Alive)) => SandboxPlan::Adopt(Phase::Running),
        (_, Some(Frozen)) => SandboxPlan::Adopt(Phase::Paused),
        (_, None | Some(Dead | Half)) => SandboxPlan::Report(lost),
    }
}

/// A warm sandbox is kept only if it is complete, and a new one would be made the same way now (`fits`).
pub(crate) fn plan_warm(facts: SandboxFacts, fits: bool) -> WarmPlan {
    match (facts.phase, facts.found) {
        (Phase::Running, Some(FoundCondition::Alive)) if facts.same_boot && fits => WarmPlan::ReturnToPool,
        _ => WarmPlan::Remove,
    }
}

pub(crate) fn plan_volume(stored: StoredVolumeState, exists: bool) -> VolumePlan {
    match (stored, exists) {
        (StoredVolumeState::Removing, _) => VolumePlan::FinishRemoval,
        (StoredVolumeState::Kept, true) => VolumePlan::Keep,
        (StoredVolumeState::Kept, false) => VolumePlan::ForgetRow,
        (StoredVolumeState::Unknown, _) => VolumePlan::Adopt,
    }
}

/// `stored` is `None` for a snapshot that only the backend knows. `can_be_taken` says whether the sandbox of the
/// snapshot still has its files.
pub(crate) fn plan_snapshot(
    stored: Option<&SnapshotState>,
    found: Option<&SnapshotStage>,
    can_be_taken: bool,
) -> SnapshotPlan {
    use SnapshotStage::{Complete, Making};
    let Some(stored) = stored else { return SnapshotPlan::RemoveUnknown };
    match (stored, found) {
        (SnapshotState::Deleting, _) => SnapshotPlan::FinishDeletion,
        (SnapshotState::Ready, Some(Complete(_))) | (SnapshotState::Failed(_), None) => SnapshotPlan::Keep,
        (SnapshotState::Creating(_), Some(Complete(content))) => SnapshotPlan::MarkReady(content.clone()),
        (SnapshotState::Creating(_), None | Some(Making(_))) if can_be_taken => SnapshotPlan::Take,
        (SnapshotState::Creating(_) | SnapshotState::Ready, None | Some(Making(_)))
        | (SnapshotState::Failed(_), Some(_)) => SnapshotPlan::Fail,
    }
}

#[cfg(test)]
mod tests {
    use domain::{Bytes, ExitReason};

    use super::*;

    const CONDITIONS: [Option<FoundCondition>; 5] = [
        None,
        Some(FoundCondition::Alive),
        Some(FoundCondition::Frozen),
        Some(FoundCondition::Dead),
        Some(FoundCondition::Half),
    ];

    /// `plans` are the expected plans if the backend finds nothing, and a sandbox that is alive, frozen, dead or half
    /// made.
    fn check_sandbox(phase: Phase, plans: [SandboxPlan; 5]) {
        for (found, plan) in CONDITIONS.into_iter().zip(plans) {
            let facts = SandboxFacts { phase, found, from_pool: false, same_boot: true, expired: false };
            assert_eq!(plan_sandbox(Some(facts)), plan, "{phase} and {found:?}");
            let expired = SandboxFacts { expired: true, ..facts };
            assert_eq!(plan_sandbox(Some(expired)), SandboxPlan::Destroy, "{phase} and {found:?}, expired");
            let of_pool = plan_sandbox(Some(SandboxFacts { from_pool: true, ..facts }));
            let expected = if phase == Phase::Starting { SandboxPlan::Destroy } else { plan };
            assert_eq!(of_pool, expected, "{phase} and {found:?}, from a pool");
        }
    }

    fn check_sandboxes() {
        use SandboxPlan::{Adopt, AdoptIfComplete, Destroy, Report};
        let (running, paused, died) =
            (Adopt(Phase::Running), Adopt(Phase::Paused), Report(EndCause::AgentDied));
        let (begun, frozen) = (AdoptIfComplete(Phase::Running), AdoptIfComplete(Phase::Paused));
        check_sandbox(Phase::Starting, [Destroy, begun, frozen, Destroy, Destroy]);
        for phase in [Phase::Running, Phase::Pausing, Phase::Paused, Phase::Resuming] {
            check_sandbox(phase, [died, running, paused, died, died]);
        }
        let exited = Phase::Exited(ExitReason::Code(3));
        check_sandbox(exited, [died, Adopt(exited), paused, died, died]);
        check_sandbox(Phase::Stopping, [Destroy; 5]);
        check_sandbox(Phase::Failed(EndCause::Oom), [Report(EndCause::Oom); 5]);
        assert_eq!(plan_sandbox(None), SandboxPlan::RemoveUnknown);
    }

    fn check_warm_sandboxes() {
        for phase in [Phase::Starting, Phase::Running, Phase::Stopping] {
            for (found, same_boot, fits) in CONDITIONS
                .iter()
                .flat_map(|found| [(*found, true, true), (*found, false, true), (*found, true, false)])
            {
                let facts = SandboxFacts { phase, found, from_pool: true, same_boot, expired: false };
                let whole = phase == Phase::Running && found == Some(FoundCondition::Alive);
                let kept = whole && same_boot && fits;
                let expected = if kept { WarmPlan::ReturnToPool } else { WarmPlan::Remove };
                assert_eq!(plan_warm(facts, fits), expected, "{phase}, {found:?}, {same_boot}, {fits}");
            }
        }
    }

    fn check_volumes() {
        use StoredVolumeState::{Kept, Removing, Unknown};
        for (stored, exists, plan) in [
            (Kept, true, VolumePlan::Keep),
            (Kept, false, VolumePlan::ForgetRow),
            (Removing, true, VolumePlan::FinishRemoval),
            (Removing, false, VolumePlan::FinishRemoval),
            (Unknown, true, VolumePlan::Adopt),
        ] {
            assert_eq!(plan_volume(stored, exists), plan, "{stored:?}, exists: {exists}");
        }
    }

    fn content() -> SnapshotContent {
        SnapshotContent { image: "host".to_owned(), size: Bytes(1), disk: Bytes(2) }
    }

    /// `plans` are the expected plans if the backend finds nothing, a snapshot that is being made and a complete one.
    fn check_snapshot(stored: SnapshotState, can_be_taken: bool, plans: [SnapshotPlan; 3]) {
        let stages = [None, Some(SnapshotStage::Making(None)), Some(SnapshotStage::Complete(content()))];
        for (found, plan) in stages.iter().zip(plans) {
            let planned = plan_snapshot(Some(&stored), found.as_ref(), can_be_taken);
            assert_eq!(planned, plan, "{stored:?} and {found:?}");
            let unknown = plan_snapshot(None, found.as_ref(), can_be_taken);
            assert_eq!(unknown, SnapshotPlan::RemoveUnknown, "{found:?}");
        }
    }

    fn check_snapshots() {
        use SnapshotPlan::{Fail, FinishDeletion, Keep, MarkReady, Take};
        for can_be_taken in [true, false] {
            let taken = || if can_be_taken { Take } else { Fail };
            let creating = [taken(), taken(), MarkReady(content())];
            check_snapshot(SnapshotState::Creating(None), can_be_taken, creating);
            check_snapshot(SnapshotState::Ready, can_be_taken, [Fail, Fail, Keep]);
            check_snapshot(SnapshotState::Failed(String::new()), can_be_taken, [Keep, Fail, Fail]);
            let deleting = [FinishDeletion, FinishDeletion, FinishDeletion];
            check_snapshot(SnapshotState::Deleting, can_be_taken, deleting);
        }
    }

    #[test]
    fn every_kind_has_a_plan_for_all_that_is_stored_and_found() {
        check_sandboxes();
        check_warm_sandboxes();
        check_volumes();
        check_snapshots();
    }

    #[test]
    fn sandbox_lost_in_a_host_reboot_reports_that_cause() {
        for found in [None, Some(FoundCondition::Dead)] {
            let (phase, from_pool, same_boot, expired) = (Phase::Running, false, false, false);
            let facts = SandboxFacts { phase, found, from_pool, same_boot, expired };
            assert_eq!(plan_sandbox(Some(facts)), SandboxPlan::Report(EndCause::HostRebooted));
        }
    }
}
