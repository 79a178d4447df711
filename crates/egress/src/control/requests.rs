//! What each request does.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use domain::NetworkPolicy;
use egress_protocol::{
    ConnectionRole, EgressReplyBody, EgressRequestBody, EgressSettings, PolicyMessage, ServedSandbox,
    VaultRequest,
};

use crate::sandbox::{ClosingConnections, Sandbox};
use crate::serve::{SandboxSockets, start_serving};
use crate::settings::OperatorSettings;
use crate::shared::EgressState;

/// How long a reader of a log waits for a record.
const LOG_WAIT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long cancelled connections may take to close, which they do at once.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_ID_BYTES: usize = 128;

/// What follows from a request.
pub(super) enum RequestOutcome {
    Reply(EgressReplyBody),
    /// It was applied; the reply comes soon, when connections are closed.
    Wait(LaterReply),
    /// The reply comes when there is a record, perhaps much later.
    WaitForRecord(LaterReply),
}

type LaterReply = Pin<Box<dyn Future<Output = EgressReplyBody> + Send>>;

type RequestResult = Result<RequestOutcome, String>;

const DONE: RequestResult = Ok(RequestOutcome::Reply(EgressReplyBody::Done));

/// Applies a request. Only its reply may wait, so requests take effect in the order of their arrival.
pub(super) fn apply_request(
    egress: &Arc<EgressState>,
    role: ConnectionRole,
    body: serde_json::Value,
    descriptors: Vec<OwnedFd>,
) -> RequestOutcome {
    let applied = match serde_json::from_value(body) {
        Ok(body) => apply_body(egress, role, body, descriptors),
        // The error could repeat what was sent.
        Err(error) => Err(format!("the request is not known or malformed ({:?})", error.classify())),
    };
    applied.unwrap_or_else(|message| RequestOutcome::Reply(EgressReplyBody::Refused { message }))
}

fn apply_body(
    egress: &Arc<EgressState>,
    role: ConnectionRole,
    body: EgressRequestBody,
    descriptors: Vec<OwnedFd>,
) -> RequestResult {
    use EgressRequestBody as Body;
    match body {
        Body::Configure(_) | Body::Serve(_) | Body::Forget { .. } if role != ConnectionRole::Keeper => {
            Err("only the keeper of the sockets may ask for this".to_owned())
        }
        Body::Configure(settings) => configure(egress, &settings),
        Body::Serve(served) => serve(egress, served, descriptors),
        Body::Forget { sandbox } => {
            egress.forget(&sandbox);
            DONE
        }
        Body::ListServed => Ok(RequestOutcome::Reply(EgressReplyBody::Served { sandboxes: egress.served() })),
        Body::SetPolicy { sandbox, policy } => set_policy(egress, &sandbox, &policy),
        Body::KeepPolicies { sandboxes } => {
            egress.keep(&sandboxes);
            DONE
        }
        Body::ReadLog { sandbox, after, limit, wait } => {
            let found = egress.find(&sandbox).ok_or_else(|| unknown_sandbox(&sandbox))?;
            Ok(read_log(found, after, limit, wait))
        }
        Body::Vault(request) => change_vault(egress, request),
        Body::ReadCounters => Ok(RequestOutcome::Reply(EgressReplyBody::Counters(egress.read_counters()))),
    }
}

/// Seals a secret, or changes the vault of a sandbox. No message contains a secret.
fn change_vault(egress: &EgressState, request: VaultRequest) -> RequestResult {
    if let VaultRequest::SetVault { sandbox, .. } = &request {
        add_sandbox(egress, sandbox)?;
    }
    let reply = egress.vaults.handle(request).map_err(|error| {
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        format!("{error}{}", source.unwrap_or_default())
    })?;
    Ok(RequestOutcome::Reply(EgressReplyBody::Vault(reply)))
}

fn unknown_sandbox(id: &str) -> String {
    let id: String = id.chars().take(MAX_ID_BYTES).collect();
    format!("sandbox `{id}` is not known here")
}

fn configure(egress: &EgressState, settings: &EgressSettings) -> RequestResult {
    let settings = OperatorSettings::try_from(settings).map_err(|error| {
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        format!("{error}{}", source.unwrap_or_default())
    })?;
    let changed = egress.configure(settings);
    Ok(RequestOutcome::Wait(Box::pin(async move {
        for (sandbox, closing) in changed {
            wait_closed(&sandbox, &closing).await;
        }
        EgressReplyBody::Done
    })))
}

fn serve(egress: &Arc<EgressState>, served: ServedSandbox, descriptors: Vec<OwnedFd>) -> RequestResult {
    let Ok([listener, queries]) = <[OwnedFd; 2]>::try_from(descriptors) else {
        return Err("a sandbox is served with two descriptors".to_owned());
    };
    let sandbox = add_sandbox(egress, &served.sandbox)?;
    let (stop, closing) = sandbox.set_served(served.mode, &served.own);
    start_serving(egress, &sandbox, SandboxSockets { listener, queries }, &stop)
        .map_err(|error| format!("the sockets of the sandbox cannot be used: {error}"))?;
    Ok(reply_when_closed(sandbox, closing))
}

fn set_policy(egress: &EgressState, id: &str, policy: &PolicyMessage) -> RequestResult {
    let policy =
        NetworkPolicy::try_from(policy).map_err(|error| format!("the policy is not valid: {error}"))?;
    let sandbox = add_sandbox(egress, id)?;
    let closing = sandbox.set_policy(policy);
    Ok(reply_when_closed(sandbox, closing))
}

fn add_sandbox(egress: &EgressState, id: &str) -> Result<Arc<Sandbox>, String> {
    if id.is_empty() || id.len() > MAX_ID_BYTES {
        return Err(format!("the id of a sandbox has 1 to {MAX_ID_BYTES} bytes"));
    }
    egress.find_or_add(id).ok_or_else(|| "too many sandboxes".to_owned())
}

fn reply_when_closed(sandbox: Arc<Sandbox>, closing: ClosingConnections) -> RequestOutcome {
    if closing.is_empty() {
        return RequestOutcome::Reply(EgressReplyBody::Done);
    }
    RequestOutcome::Wait(Box::pin(async move {
        wait_closed(&sandbox, &closing).await;
        EgressReplyBody::Done
    }))
}

async fn wait_closed(sandbox: &Sandbox, closing: &ClosingConnections) {
    if tokio::time::timeout(CLOSE_TIMEOUT, sandbox.wait_closed(closing)).await.is_err() {
        tracing::error!(sandbox = sandbox.id, "denied connections did not close in time; they carry nothing");
    }
}

fn read_log(sandbox: Arc<Sandbox>, after: u64, limit: u32, wait: bool) -> RequestOutcome {
    let page = sandbox.log.read(after, limit);
    if !wait || !page.records.is_empty() {
        return RequestOutcome::Reply(EgressReplyBody::Log(page));
    }
    RequestOutcome::WaitForRecord(Box::pin(async move {
        tokio::select! {
            () = sandbox.log.wait_beyond(after) => {}
            () = sandbox.gone.cancelled() => {}
            () = tokio::time::sleep(LOG_WAIT_TIMEOUT) => {}
        }
        EgressReplyBody::Log(sandbox.log.read(after, limit))
    }))
}
