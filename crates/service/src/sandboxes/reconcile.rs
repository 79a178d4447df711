//! After a restart: compares the sandboxes in the store with those that the backend finds.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use backend::{BackendError, FoundCondition, FoundSandbox};
use domain::{EndCause, FilesState, Phase, SandboxId};
use futures_util::StreamExt;

use crate::agent::client::AgentClient;
use crate::core::Core;
use crate::error::error_chain;
use crate::sandboxes::driver::Driver;
use crate::sandboxes::entrypoint;
use crate::sandboxes::registry::RoomRequirement;
use crate::store::SandboxRecord;
use crate::{OwnerQuota, ServiceError};

/// How many sandboxes are reconciled at the same time.
const MAX_CONCURRENT_SANDBOXES: usize = 16;

/// The pauses after failed attempts to list the backend's sandboxes.
const LIST_RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(300), Duration::from_secs(1)];

/// How long to wait before a failed removal is tried again.
const REMOVAL_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The action for a sandbox that is in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReconcilePlan {
    /// It is alive and continues in this phase.
    Adopt(Phase),
    /// It is dead, and its owner will want to know why.
    Report(EndCause),
    /// It was being removed, or was never completed.
    Destroy,
}

/// Takes over from the former server.
pub(crate) async fn reconcile_sandboxes(
    core: &Arc<Core>,
    records: Vec<SandboxRecord>,
) -> Result<(), ServiceError> {
    let found = list_found(core).await.map_err(|source| ServiceError::Host {
        backend: core.backend.name(),
        action: "list its sandboxes",
        source: Box::new(source),
    })?;
    let mut found: HashMap<_, _> =
        found.into_iter().map(|found| (found.id, (found.condition, found.files))).collect();
    let known: Vec<_> =
        records.into_iter().map(|record| (found.remove(&record.sandbox.id), record)).collect();
    futures_util::stream::iter(known)
        .for_each_concurrent(MAX_CONCURRENT_SANDBOXES, |(found, record)| reconcile_one(core, record, found))
        .await;
    futures_util::stream::iter(found.into_keys())
        .for_each_concurrent(MAX_CONCURRENT_SANDBOXES, |id| remove_unknown(core, id))
        .await;
    Ok(())
}

/// Lists the backend's sandboxes, with retries: a host that has just started may not be ready.
async fn list_found(core: &Core) -> Result<Vec<FoundSandbox>, BackendError> {
    for pause in LIST_RETRY_DELAYS {
        match core.backend.list_sandboxes().await {
            Ok(found) => return Ok(found),
            Err(error) => {
                tracing::warn!(error = %error_chain(&error), again = ?pause, "backend failed to list its sandboxes; retrying")
            }
        }
        tokio::time::sleep(pause).await;
    }
    core.backend.list_sandboxes().await
}

async fn reconcile_one(
    core: &Arc<Core>,
    mut record: SandboxRecord,
    found: Option<(FoundCondition, FilesState)>,
) {
    let same_boot = record.boot_id == core.boot_id;
    let condition = found.map(|(condition, _)| condition);
    record.sandbox.files = found.map_or(FilesState::Lost, |(_, files)| files);
    if record.is_warm() {
        return core.adopt_warm(record, condition.filter(|_| same_boot)).await;
    }
    if !same_boot {
        // The boot clock started over, so only the wall clock still says when the sandbox expires.
        record.expires_boot = record.sandbox.expires.map(|expires| core.clock.now().at_wall(expires).boot);
        record.boot_id = core.boot_id.clone();
    }
    let expired = record.expires_boot.is_some_and(|expires| expires <= core.clock.now().boot);
    let mut plan = if expired {
        ReconcilePlan::Destroy
    } else {
        decide_plan(record.sandbox.phase, condition, same_boot)
    };
    // A sandbox that was warm may lack resources that its owner asked for, and no client has heard of it.
    if record.sandbox.phase == Phase::Starting
        && matches!(plan, ReconcilePlan::Adopt(_))
        && (record.sandbox.pool.is_some() || !is_complete(core, &record).await)
    {
        plan = ReconcilePlan::Destroy;
    }
    tracing::info!(sandbox = %record.sandbox.id, phase = %record.sandbox.phase, ?found, ?plan, "reconciling sandbox");
    match plan {
        ReconcilePlan::Adopt(phase) => adopt_sandbox(core, record, phase).await,
        ReconcilePlan::Report(cause) => adopt_sandbox(core, record, Phase::Failed(cause)).await,
        ReconcilePlan::Destroy => {
            destroy_sandbox(core, record, if expired { EndCause::Expired } else { EndCause::NotCreated })
                .await
        }
    }
}

/// The decision table. A server may die after a sandbox was completed and before this was recorded, so a living sandbox
/// is adopted although its row says "starting"; the caller destroys it if it is not complete. A row says "failed" until a restart is complete, so a
/// sandbox that lives nevertheless is stopped again; its files are kept, like those of every sandbox that once ran.
fn decide_plan(phase: Phase, condition: Option<FoundCondition>, same_boot: bool) -> ReconcilePlan {
    use FoundCondition::{Alive, Dead, Frozen, Half};
    let lost = if same_boot { EndCause::AgentDied } else { EndCause::HostRebooted };
    match (phase, condition) {
        (Phase::Stopping | Phase::Stopped, _) => ReconcilePlan::Destroy,
        (Phase::Failed(cause), _) => ReconcilePlan::Report(cause),
        (Phase::Starting, None | Some(Dead | Half)) => ReconcilePlan::Destroy,
        (Phase::Exited(exit), Some(Alive)) => ReconcilePlan::Adopt(Phase::Exited(exit)),
        (_, Some(Alive)) => ReconcilePlan::Adopt(Phase::Running),
        (_, Some(Frozen)) => ReconcilePlan::Adopt(Phase::Paused),
        (_, None | Some(Dead | Half)) => ReconcilePlan::Report(lost),
    }
}

/// Whether a sandbox that was still starting had its main process started.
async fn is_complete(core: &Core, record: &SandboxRecord) -> bool {
    // Without a main process it is unknown whether the hook before it has ended.
    let Some(process) = &record.entrypoint else { return record.sandbox.spec.hooks.before.is_none() };
    let agent = AgentClient::new(Arc::clone(&core.backend), record.sandbox.id.clone());
    entrypoint::was_started(&agent, process).await.unwrap_or(false)
}

async fn adopt_sandbox(core: &Arc<Core>, mut record: SandboxRecord, phase: Phase) {
    if record.sandbox.phase != phase {
        record.sandbox.phase = phase;
        record.sandbox.phase_since = core.clock.now().wall;
        core.store.update_sandbox_later(&record).await;
    }
    if let Some(key) = &record.key {
        core.names.guard_key(key).point_to(record.sandbox.id.clone());
    }
    let (handle, driver) = Driver::new(core, record);
    // The limit applies to new sandboxes only; existing ones are kept whatever it is now.
    if core.registry.add(handle, RoomRequirement::Below(usize::MAX), &OwnerQuota::default()).is_ok() {
        core.tasks.spawn(driver.adopt());
    }
}

async fn destroy_sandbox(core: &Arc<Core>, record: SandboxRecord, why: EndCause) {
    let id = record.sandbox.id.clone();
    match core.destroy_in_backend(&id).await {
        Ok(()) => {
            let why = if record.sandbox.phase == Phase::Stopping { EndCause::Destroyed } else { why };
            core.events.publish_phase(
                core.clock.now().wall,
                &record.sandbox.owner,
                &id,
                Phase::Stopped,
                Some(why),
            );
            core.release_volumes(&id);
            if let Err(error) = core.store.delete_sandbox(&id).await {
                tracing::warn!(sandbox = %id, error = %error_chain(&error), "failed to delete the row of a removed sandbox; the next start removes it");
            }
        }
        Err(error) => {
            tracing::error!(sandbox = %id, error = %error_chain(&error), "failed to remove sandbox; its driver retries");
            adopt_sandbox(core, record, Phase::Stopping).await;
        }
    }
}

/// No row knows the sandbox, so no client can ever ask for it.
async fn remove_unknown(core: &Arc<Core>, id: SandboxId) {
    tracing::warn!(sandbox = %id, "found a sandbox that is not in the store; removing it");
    if let Err(error) = core.destroy_in_backend(&id).await {
        tracing::error!(sandbox = %id, error = %error_chain(&error), "failed to remove a sandbox that is not in the store; retrying later");
        core.tasks.spawn(remove_later(Arc::clone(core), id));
    }
}

async fn remove_later(core: Arc<Core>, id: SandboxId) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(REMOVAL_RETRY_DELAY) => {}
            () = core.stop.cancelled() => return,
        }
        if core.destroy_in_backend(&id).await.is_ok() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use domain::ExitReason;

    use super::*;

    /// `plans` are the expected plans if the backend finds nothing, and a sandbox that is alive, frozen, dead or half
    /// made.
    fn check(phase: Phase, plans: [ReconcilePlan; 5]) {
        let conditions = [
            None,
            Some(FoundCondition::Alive),
            Some(FoundCondition::Frozen),
            Some(FoundCondition::Dead),
            Some(FoundCondition::Half),
        ];
        for (condition, plan) in conditions.into_iter().zip(plans) {
            assert_eq!(decide_plan(phase, condition, true), plan, "{phase} and {condition:?}");
        }
    }

    #[test]
    fn every_stored_phase_and_found_condition_has_a_plan() {
        use ReconcilePlan::{Adopt, Destroy, Report};
        let (running, paused, died) =
            (Adopt(Phase::Running), Adopt(Phase::Paused), Report(EndCause::AgentDied));
        check(Phase::Starting, [Destroy, running, paused, Destroy, Destroy]);
        check(Phase::Running, [died, running, paused, died, died]);
        check(Phase::Pausing, [died, running, paused, died, died]);
        check(Phase::Paused, [died, running, paused, died, died]);
        check(Phase::Resuming, [died, running, paused, died, died]);
        let exited = Phase::Exited(ExitReason::Code(3));
        check(exited, [died, Adopt(exited), paused, died, died]);
        check(Phase::Stopping, [Destroy; 5]);
        check(Phase::Failed(EndCause::Oom), [Report(EndCause::Oom); 5]);
    }

    #[test]
    fn sandbox_lost_in_a_host_reboot_reports_that_cause() {
        assert_eq!(decide_plan(Phase::Running, None, false), ReconcilePlan::Report(EndCause::HostRebooted));
        assert_eq!(
            decide_plan(Phase::Running, Some(FoundCondition::Dead), false),
            ReconcilePlan::Report(EndCause::HostRebooted)
        );
    }
}
