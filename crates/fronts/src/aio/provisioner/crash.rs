//! Successors of crashed sandboxes, for clients that still use the address.

use domain::{MountSource, MountSpec, SandboxKey};
use service::{CreateSandboxRequest, ImageSource, Sandbox, SandboxRef};

use super::settings::ProvisionerSettings;
use crate::aio::notes::AioNotes;
use crate::aio::problem::AioProblem;
use crate::aio::{AioState, ORIGIN};

/// Returns the successor of a crashed sandbox, if there is to be one. A sandbox that was removed meanwhile has none.
pub(in crate::aio) async fn replace_crashed(
    state: &AioState,
    key: &SandboxKey,
    crashed: &SandboxRef,
) -> Result<SandboxRef, AioProblem> {
    let settings = ProvisionerSettings::of_server(&state.settings);
    if !settings.auto_restart || crashed.is_being_removed() {
        return Err(AioProblem::not_found());
    }
    // The operator may have given the directories of the host to another owner meanwhile.
    let is_reserved = |mount: &MountSpec| matches!(mount.source, MountSource::Reserved { .. });
    let uses_host = crashed.read_state(|sandbox| sandbox.spec.mounts.iter().any(is_reserved));
    if uses_host && *crashed.owner() != settings.owner {
        return Err(AioProblem::not_found());
    }
    let request = successor_request(crashed.current_state());
    state.service.replace_crashed(key, crashed.id(), request).await?;
    // Another request may have made the successor. One that was created after a removal has another epoch, so this
    // address does not open it.
    let epoch = AioNotes::of_sandbox(crashed).epoch;
    let successor = state.service.sandbox_of_key(key);
    let opens = |sandbox: &SandboxRef| {
        sandbox.read_state(|state| state.origin == ORIGIN)
            && AioNotes::of_sandbox(sandbox).epoch == epoch
            && sandbox.check_usable().is_ok()
    };
    successor.filter(opens).ok_or_else(AioProblem::not_found)
}

/// The request that makes a sandbox like the one that crashed.
fn successor_request(crashed: Sandbox) -> CreateSandboxRequest {
    let Sandbox { spec, labels, notes, .. } = crashed;
    CreateSandboxRequest {
        origin: ORIGIN,
        source: ImageSource::from_name(&spec.image),
        spec,
        labels,
        notes,
        // Both are inherited.
        timeout: None,
        idle_timeout: None,
        defaulted: Vec::new(),
        merge_notes: AioNotes::inherit_epoch,
    }
}
