//! After a restart: compares the sandboxes in the store with those that the backend finds.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use backend::{BackendError, Condition, Found};
use domain::{Cause, Files, Phase, SandboxId};
use futures_util::StreamExt;

use crate::agent_client::Agent;
use crate::core::Core;
use crate::driver::Driver;
use crate::error::chain;
use crate::registry::Room;
use crate::store::Record;
use crate::{Quota, ServiceError, entrypoint};

/// How many sandboxes are reconciled at the same time.
const AT_ONCE: usize = 16;

/// The pauses after failed attempts to list the backend's sandboxes.
const LOOKS: [Duration; 3] = [Duration::from_millis(100), Duration::from_millis(300), Duration::from_secs(1)];

/// How long to wait before a failed removal is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// The action for a sandbox that is in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// It is alive and continues in this phase.
    Adopt(Phase),
    /// It is dead, and its owner will want to know why.
    Report(Cause),
    /// It was being removed, or was never completed.
    Destroy,
}

/// Takes over from the former server.
pub(crate) async fn reconcile(core: &Arc<Core>, records: Vec<Record>) -> Result<(), ServiceError> {
    let found = look(core).await.map_err(|source| ServiceError::Host {
        backend: core.backend.name(),
        action: "list its sandboxes",
        source: Box::new(source),
    })?;
    let mut found: HashMap<_, _> =
        found.into_iter().map(|found| (found.id, (found.condition, found.files))).collect();
    let known: Vec<_> =
        records.into_iter().map(|record| (found.remove(&record.sandbox.id), record)).collect();
    futures_util::stream::iter(known)
        .for_each_concurrent(AT_ONCE, |(found, record)| settle(core, record, found))
        .await;
    futures_util::stream::iter(found.into_keys())
        .for_each_concurrent(AT_ONCE, |id| remove_stranger(core, id))
        .await;
    Ok(())
}

/// Lists the backend's sandboxes, with retries: a host that has just started may not be ready.
async fn look(core: &Core) -> Result<Vec<Found>, BackendError> {
    for pause in LOOKS {
        match core.backend.list().await {
            Ok(found) => return Ok(found),
            Err(error) => {
                tracing::warn!(error = %chain(&error), again = ?pause, "backend failed to list its sandboxes; retrying")
            }
        }
        tokio::time::sleep(pause).await;
    }
    core.backend.list().await
}

async fn settle(core: &Arc<Core>, mut record: Record, found: Option<(Condition, Files)>) {
    let same_boot = record.boot_id == core.boot_id;
    let condition = found.map(|(condition, _)| condition);
    record.sandbox.files = found.map_or(Files::Lost, |(_, files)| files);
    if record.is_warm() {
        return core.adopt_warm(record, condition.filter(|_| same_boot)).await;
    }
    if !same_boot {
        // The boot clock started over, so only the wall clock still says when the sandbox expires.
        record.expires_boot = record.sandbox.expires.map(|expires| core.clock.now().at_wall(expires).boot);
        record.boot_id = core.boot_id.clone();
    }
    let expired = record.expires_boot.is_some_and(|expires| expires <= core.clock.now().boot);
    let mut plan = if expired { Plan::Destroy } else { decide(record.sandbox.phase, condition, same_boot) };
    // A sandbox that was warm may lack resources that its owner asked for, and no client has heard of it.
    if record.sandbox.phase == Phase::Starting
        && matches!(plan, Plan::Adopt(_))
        && (record.sandbox.pool.is_some() || !is_complete(core, &record).await)
    {
        plan = Plan::Destroy;
    }
    tracing::info!(sandbox = %record.sandbox.id, phase = %record.sandbox.phase, ?found, ?plan, "reconciling sandbox");
    match plan {
        Plan::Adopt(phase) => adopt(core, record, phase).await,
        Plan::Report(cause) => adopt(core, record, Phase::Failed(cause)).await,
        Plan::Destroy => {
            destroy(core, record, if expired { Cause::Expired } else { Cause::NotCreated }).await
        }
    }
}

/// The decision table. A server may die after it answered a create and before it recorded that the sandbox runs, so a
/// living sandbox is adopted although its row says "starting". A row says "failed" until a restart is complete, so a
/// sandbox that lives nevertheless is stopped again; its files are kept, like those of every sandbox that once ran.
fn decide(phase: Phase, condition: Option<Condition>, same_boot: bool) -> Plan {
    use Condition::{Alive, Dead, Frozen, Half};
    let lost = if same_boot { Cause::AgentDied } else { Cause::HostRebooted };
    match (phase, condition) {
        (Phase::Stopping | Phase::Stopped, _) => Plan::Destroy,
        (Phase::Failed(cause), _) => Plan::Report(cause),
        (Phase::Starting, None | Some(Dead | Half)) => Plan::Destroy,
        (Phase::Exited(exit), Some(Alive)) => Plan::Adopt(Phase::Exited(exit)),
        (_, Some(Alive)) => Plan::Adopt(Phase::Running),
        (_, Some(Frozen)) => Plan::Adopt(Phase::Paused),
        (_, None | Some(Dead | Half)) => Plan::Report(lost),
    }
}

/// Whether a sandbox that was still starting had its main process started.
async fn is_complete(core: &Core, record: &Record) -> bool {
    // Without a main process it is unknown whether the hook before it has ended.
    let Some(process) = &record.entrypoint else { return record.sandbox.spec.hooks.before.is_none() };
    let agent = Agent::new(Arc::clone(&core.backend), record.sandbox.id.clone());
    entrypoint::was_started(&agent, process).await.unwrap_or(false)
}

async fn adopt(core: &Arc<Core>, mut record: Record, phase: Phase) {
    if record.sandbox.phase != phase {
        record.sandbox.phase = phase;
        record.sandbox.phase_since = core.clock.now().wall;
        core.store.update_later(&record).await;
    }
    if let Some(key) = &record.key {
        core.names.place(key).lead_to(record.sandbox.id.clone());
    }
    let (handle, driver) = Driver::new(core, record);
    // The limit applies to new sandboxes only; existing ones are kept whatever it is now.
    if core.registry.add(handle, Room::Below(usize::MAX), &Quota::default()).is_ok() {
        core.tasks.spawn(driver.adopt());
    }
}

async fn destroy(core: &Arc<Core>, record: Record, why: Cause) {
    let id = record.sandbox.id.clone();
    match core.destroy(&id).await {
        Ok(()) => {
            let why = if record.sandbox.phase == Phase::Stopping { Cause::Destroyed } else { why };
            core.events.tell(core.clock.now().wall, &record.sandbox.owner, &id, Phase::Stopped, Some(why));
            core.release_volumes(&id);
            if let Err(error) = core.store.delete(&id).await {
                tracing::warn!(sandbox = %id, error = %chain(&error), "failed to delete the row of a removed sandbox; the next start removes it");
            }
        }
        Err(error) => {
            tracing::error!(sandbox = %id, error = %chain(&error), "failed to remove sandbox; its driver retries");
            adopt(core, record, Phase::Stopping).await;
        }
    }
}

/// No row knows the sandbox, so no client can ever ask for it.
async fn remove_stranger(core: &Arc<Core>, id: SandboxId) {
    tracing::warn!(sandbox = %id, "found a sandbox that is not in the store; removing it");
    if let Err(error) = core.destroy(&id).await {
        tracing::error!(sandbox = %id, error = %chain(&error), "failed to remove a sandbox that is not in the store; retrying later");
        core.tasks.spawn(remove_later(Arc::clone(core), id));
    }
}

async fn remove_later(core: Arc<Core>, id: SandboxId) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = core.stop.cancelled() => return,
        }
        if core.destroy(&id).await.is_ok() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use domain::Exit;

    use super::*;

    /// `plans` are the expected plans if the backend finds nothing, and a sandbox that is alive, frozen, dead or half
    /// made.
    fn check(phase: Phase, plans: [Plan; 5]) {
        let conditions = [
            None,
            Some(Condition::Alive),
            Some(Condition::Frozen),
            Some(Condition::Dead),
            Some(Condition::Half),
        ];
        for (condition, plan) in conditions.into_iter().zip(plans) {
            assert_eq!(decide(phase, condition, true), plan, "{phase} and {condition:?}");
        }
    }

    #[test]
    fn every_stored_phase_and_found_condition_has_a_plan() {
        use Plan::{Adopt, Destroy, Report};
        let (running, paused, died) = (Adopt(Phase::Running), Adopt(Phase::Paused), Report(Cause::AgentDied));
        check(Phase::Starting, [Destroy, running, paused, Destroy, Destroy]);
        check(Phase::Running, [died, running, paused, died, died]);
        check(Phase::Pausing, [died, running, paused, died, died]);
        check(Phase::Paused, [died, running, paused, died, died]);
        check(Phase::Resuming, [died, running, paused, died, died]);
        let exited = Phase::Exited(Exit::Code(3));
        check(exited, [died, Adopt(exited), paused, died, died]);
        check(Phase::Stopping, [Destroy; 5]);
        check(Phase::Failed(Cause::Oom), [Report(Cause::Oom); 5]);
    }

    #[test]
    fn sandbox_lost_in_a_host_reboot_reports_that_cause() {
        assert_eq!(decide(Phase::Running, None, false), Plan::Report(Cause::HostRebooted));
        assert_eq!(decide(Phase::Running, Some(Condition::Dead), false), Plan::Report(Cause::HostRebooted));
    }
}
