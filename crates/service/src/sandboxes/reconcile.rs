//! After a restart: compares the sandboxes in the store with those that the backend finds, and does with each what
//! [`crate::reconcile`] decides.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use backend::{BackendError, FoundCondition, FoundSandbox};
use domain::{EndCause, FilesState, Phase, SandboxId};
use futures_util::StreamExt;

use crate::agent::client::AgentClient;
use crate::core::Core;
use crate::error::error_chain;
use crate::reconcile::{SandboxFacts, SandboxPlan, plan_sandbox};
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

/// Takes over from the former server.
pub(crate) async fn reconcile_sandboxes(
    core: &Arc<Core>,
    records: Vec<SandboxRecord>,
) -> Result<(), ServiceError> {
    let found = list_found(core).await.map_err(|source| ServiceError::Host {
        backend: core.host.backend.name(),
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
        .for_each_concurrent(MAX_CONCURRENT_SANDBOXES, |id| reconcile_unknown(core, id))
        .await;
    Ok(())
}

/// Lists the backend's sandboxes, with retries: a host that has just started may not be ready.
async fn list_found(core: &Core) -> Result<Vec<FoundSandbox>, BackendError> {
    for pause in LIST_RETRY_DELAYS {
        match core.host.backend.list_sandboxes().await {
            Ok(found) => return Ok(found),
            Err(error) => {
                tracing::warn!(error = %error_chain(&error), again = ?pause, "backend failed to list its sandboxes; retrying")
            }
        }
        tokio::time::sleep(pause).await;
    }
    core.host.backend.list_sandboxes().await
}

async fn reconcile_one(
    core: &Arc<Core>,
    mut record: SandboxRecord,
    found: Option<(FoundCondition, FilesState)>,
) {
    let same_boot = record.boot_id == core.host.boot_id;
    record.sandbox.files = found.map_or(FilesState::Lost, |(_, files)| files);
    let mut facts = SandboxFacts {
        phase: record.sandbox.phase,
        found: found.map(|(condition, _)| condition),
        from_pool: record.sandbox.pool.is_some(),
        same_boot,
        expired: false,
    };
    if record.is_warm() {
        return core.adopt_warm(record, facts).await;
    }
    if !same_boot {
        // The boot clock started over, so only the wall clock still says when the sandbox expires.
        record.expires_boot = record.sandbox.expires.map(|expires| core.clock.now().at_wall(expires).boot);
        record.boot_id = core.host.boot_id.clone();
    }
    facts.expired = record.expires_boot.is_some_and(|expires| expires <= core.clock.now().boot);
    let plan = plan_sandbox(Some(facts));
    tracing::info!(sandbox = %record.sandbox.id, phase = %record.sandbox.phase, ?found, ?plan, "reconciling sandbox");
    let why = if facts.expired { EndCause::Expired } else { EndCause::NotCreated };
    match plan {
        SandboxPlan::Adopt(phase) => adopt_sandbox(core, record, phase).await,
        SandboxPlan::AdoptIfComplete(phase) if is_complete(core, &record).await => {
            adopt_sandbox(core, record, phase).await
        }
        SandboxPlan::Report(cause) => adopt_sandbox(core, record, Phase::Failed(cause)).await,
        SandboxPlan::AdoptIfComplete(_) | SandboxPlan::Destroy => destroy_sandbox(core, record, why).await,
        SandboxPlan::RemoveUnknown => remove_unknown(core, record.sandbox.id).await,
    }
}

/// Whether a sandbox that was still starting had its main process started.
async fn is_complete(core: &Core, record: &SandboxRecord) -> bool {
    // Without a main process it is unknown whether the hook before it has ended.
    let Some(process) = &record.entrypoint else { return record.sandbox.spec.hooks.before.is_none() };
    let agent = AgentClient::new(Arc::clone(&core.host.backend), record.sandbox.id.clone());
    entrypoint::was_started(&agent, process).await.unwrap_or(false)
}

async fn adopt_sandbox(core: &Arc<Core>, mut record: SandboxRecord, phase: Phase) {
    if record.sandbox.phase != phase {
        record.sandbox.phase = phase;
        record.sandbox.phase_since = core.clock.now().wall;
        core.store.update_sandbox_later(&record).await;
    }
    if let Some(key) = &record.key {
        core.lifecycle.names.guard_key(key).point_to(record.sandbox.id.clone());
    }
    let (handle, driver) = Driver::new(core, record);
    // The limit applies to new sandboxes only; existing ones are kept whatever it is now.
    if core.lifecycle.registry.add(handle, RoomRequirement::Below(usize::MAX), &OwnerQuota::default()).is_ok()
    {
        driver.restore_policy();
        driver.restore_vault();
        core.tasks.spawn(driver.adopt());
    }
}

async fn destroy_sandbox(core: &Arc<Core>, record: SandboxRecord, why: EndCause) {
    let id = record.sandbox.id.clone();
    match core.destroy_in_backend(&id).await {
        Ok(()) => {
            let why = if record.sandbox.phase == Phase::Stopping { EndCause::Destroyed } else { why };
            core.telemetry.events.publish_phase(
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

/// Handles a sandbox that only the backend knows.
async fn reconcile_unknown(core: &Arc<Core>, id: SandboxId) {
    if plan_sandbox(None) == SandboxPlan::RemoveUnknown {
        remove_unknown(core, id).await;
    }
}

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
            () = core.tasks.cancelled() => return,
        }
        if core.destroy_in_backend(&id).await.is_ok() {
            return;
        }
    }
}
