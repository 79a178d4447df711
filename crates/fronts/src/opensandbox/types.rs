//! Types of the lifecycle API. Absent fields are omitted: clients fail on `null`.

use std::collections::BTreeMap;
use std::sync::Arc;

use domain::{EndCause, ExitReason, FilesState, OnDeath, Phase, SandboxSettings};
use serde::{Deserialize, Serialize};
use service::{Sandbox, SandboxRef};

use super::policy::NetworkPolicyBody;
use crate::kit::lines::LineDialect;
use crate::kit::time::format_rfc3339;

/// `POST /sandboxes`. Every optional field may also be `null`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreateSandboxBody {
    pub(super) image: Option<ImageBody>,
    pub(super) snapshot_id: Option<String>,
    pub(super) template_id: Option<String>,
    pub(super) platform: Option<PlatformBody>,
    pub(super) timeout: Option<i64>,
    pub(super) resource_limits: Option<BTreeMap<String, Option<String>>>,
    pub(super) env: Option<BTreeMap<String, Option<String>>>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) entrypoint: Option<Vec<String>>,
    pub(super) lifecycle: Option<LifecycleBody>,
    pub(super) network_policy: Option<NetworkPolicyBody>,
    pub(super) credential_proxy: Option<FeatureSwitch>,
    pub(super) secure_access: Option<bool>,
    pub(super) volumes: Option<Vec<serde_json::Value>>,
    pub(super) extensions: Option<BTreeMap<String, Option<String>>>,
}

/// Hooks that run before the entrypoint and periodically. Unknown fields are refused, so that a client
/// does not rely on a hook that this server would not run.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct LifecycleBody {
    pub(super) pre_start: Option<HookBody>,
    pub(super) periodic: Option<Vec<PeriodicBody>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct HookBody {
    pub(super) command: Vec<String>,
    pub(super) timeout_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct PeriodicBody {
    pub(super) name: String,
    pub(super) schedule: String,
    pub(super) command: Vec<String>,
    pub(super) timeout_seconds: Option<i64>,
}

#[derive(Deserialize)]
pub(super) struct ImageBody {
    pub(super) uri: String,
    pub(super) auth: Option<ImageAuth>,
}

/// Credentials for the registry of an image. They are used once and never stored.
#[derive(Deserialize)]
pub(super) struct ImageAuth {
    pub(super) username: String,
    pub(super) password: String,
}

impl std::fmt::Debug for ImageAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

#[derive(Deserialize)]
pub(super) struct FeatureSwitch {
    pub(super) enabled: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PlatformBody {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) os: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) arch: Option<String>,
}

/// Data that this front stores with a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SandboxNotes {
    /// Extensions that are echoed in responses.
    #[serde(default)]
    pub(super) extensions: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) platform: Option<PlatformBody>,
    /// `P` or `S`; the server's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lines: Option<String>,
    /// Each proxied access moves the expiry to at least this many seconds after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) renew_on_access: Option<u64>,
    /// Its ports open only with its own token or a signed route.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) secure_access: bool,
}

impl SandboxNotes {
    /// The notes of a sandbox, which are parsed only once.
    pub(super) fn of_sandbox(sandbox: &SandboxRef) -> Arc<Self> {
        sandbox.parsed_notes(|notes| serde_json::from_slice(notes).unwrap_or_default())
    }

    /// Parses the notes of a sandbox; those of another front, or none, give the default.
    pub(super) fn from_sandbox(sandbox: &Sandbox) -> Self {
        serde_json::from_slice(&sandbox.notes).unwrap_or_default()
    }

    /// Like [`SandboxNotes::from_sandbox`], for the settings recorded in a snapshot. Notes of another front are ignored.
    pub(super) fn from_settings(settings: &SandboxSettings) -> Self {
        match settings.origin == super::create_request::ORIGIN {
            true => serde_json::from_slice(&settings.notes).unwrap_or_default(),
            false => Self::default(),
        }
    }

    pub(super) fn line_dialect(&self, default: LineDialect) -> LineDialect {
        self.lines.as_deref().and_then(|letter| LineDialect::parse(letter).ok()).unwrap_or(default)
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SandboxBody {
    id: String,
    status: SandboxStatusBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<ImageName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_id: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extensions: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<PlatformBody>,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    entrypoint: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    allocation: Option<PoolAllocation>,
}

/// The pool that a sandbox was taken from.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PoolAllocation {
    mode: &'static str,
    pool_ref: String,
    state: &'static str,
}

#[derive(Serialize)]
struct ImageName {
    uri: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SandboxStatusBody {
    state: &'static str,
    reason: &'static str,
    message: String,
    last_transition_at: String,
}

/// Whether a response names the image or snapshot: all do except that of a create.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ImageShown {
    Yes,
    No,
}

impl SandboxBody {
    pub(super) fn from_sandbox(sandbox: &Sandbox, image: ImageShown) -> Self {
        let notes = SandboxNotes::from_sandbox(sandbox);
        let mut extensions = notes.extensions;
        // A client that named an image out of habit learns which one was really used.
        if !sandbox.in_force.image.is_empty() && sandbox.in_force.image != sandbox.spec.image {
            extensions.insert("coracle.image".to_owned(), sandbox.in_force.image.clone());
        }
        extensions.extend(sandbox.name.clone().map(|name| ("coracle.key".to_owned(), name)));
        let (shown, snapshot) = (image == ImageShown::Yes, sandbox.spec.snapshot.as_ref());
        Self {
            id: sandbox.id.to_string(),
            status: SandboxStatusBody::from_sandbox(sandbox),
            image: (shown && snapshot.is_none()).then(|| ImageName { uri: sandbox.spec.image.clone() }),
            snapshot_id: snapshot.filter(|_| shown).map(ToString::to_string),
            metadata: sandbox.labels.clone(),
            extensions,
            platform: notes.platform,
            created_at: format_rfc3339(sandbox.created),
            expires_at: sandbox.expires.map(format_rfc3339),
            entrypoint: sandbox.spec.entrypoint.to_words(),
            allocation: sandbox.pool.clone().map(|pool_ref| PoolAllocation {
                mode: "pool",
                pool_ref,
                state: "allocated",
            }),
        }
    }
}

impl SandboxStatusBody {
    fn from_sandbox(sandbox: &Sandbox) -> Self {
        let (reason, message) = status_reason(sandbox);
        Self {
            state: state_name(sandbox.phase),
            reason,
            message,
            last_transition_at: format_rfc3339(sandbox.phase_since),
        }
    }
}

/// Returns the state's name in this API.
pub(super) fn state_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "Pending",
        Phase::Running => "Running",
        Phase::Pausing => "Pausing",
        Phase::Paused => "Paused",
        Phase::Resuming => "Resuming",
        Phase::Exited(ExitReason::Code(0)) | Phase::Stopped => "Terminated",
        Phase::Exited(_) | Phase::Failed(_) => "Failed",
        Phase::Stopping => "Stopping",
    }
}

fn status_reason(sandbox: &Sandbox) -> (&'static str, String) {
    let (reason, message) = match sandbox.phase {
        Phase::Starting => ("CONTAINER_STARTING", "the sandbox is starting"),
        Phase::Running => ("CONTAINER_RUNNING", "the sandbox is running"),
        Phase::Pausing => ("CONTAINER_RUNNING", "the sandbox is being paused"),
        Phase::Paused => ("CONTAINER_PAUSED", "the sandbox is paused"),
        Phase::Resuming => ("CONTAINER_PAUSED", "the sandbox is being resumed"),
        Phase::Exited(ExitReason::Code(0)) => ("CONTAINER_EXITED", "the entrypoint has exited"),
        Phase::Exited(exit) => {
            return ("CONTAINER_EXITED_ERROR", format!("the entrypoint {}", describe_exit(exit)));
        }
        Phase::Stopping | Phase::Stopped => ("CONTAINER_EXITED", "the sandbox is being removed"),
        Phase::Failed(cause) => {
            let next = match (sandbox.spec.on_death(), sandbox.files) {
                (OnDeath::Restart, FilesState::Kept) => {
                    "its files are kept, and a resume restarts it with them"
                }
                (OnDeath::Restart, FilesState::Lost) => "its files are lost",
                (OnDeath::Replace, _) => "a resume restarts it with an empty disk",
            };
            return ("CONTAINER_EXITED_ERROR", format!("the sandbox died: {}; {next}", cause_text(cause)));
        }
    };
    (reason, message.to_owned())
}

fn cause_text(cause: EndCause) -> &'static str {
    match cause {
        EndCause::Oom => "out of memory",
        other => other.name(),
    }
}

/// Describes how a process ended, to follow its subject in a sentence.
pub(super) fn describe_exit(exit: ExitReason) -> String {
    match exit {
        ExitReason::Code(code) => format!("exited with code {code}"),
        ExitReason::Signal(signal) => format!("was killed by signal {signal}"),
        ExitReason::Oom => "was killed because the memory limit was reached".to_owned(),
        ExitReason::Deadline => "was killed at its timeout".to_owned(),
        ExitReason::Lost => "ended with an unknown status".to_owned(),
    }
}

#[derive(Serialize)]
pub(super) struct SandboxListBody {
    pub(super) items: Vec<SandboxBody>,
    pub(super) pagination: Pagination,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Pagination {
    page: usize,
    page_size: usize,
    total_items: usize,
    total_pages: usize,
    has_next_page: bool,
}

impl Pagination {
    pub(super) fn of(page: usize, page_size: usize, total_items: usize) -> Self {
        let total_pages = total_items.div_ceil(page_size);
        Self { page, page_size, total_items, total_pages, has_next_page: page < total_pages }
    }
}

/// `POST /sandboxes/{id}/renew-expiration`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RenewBody {
    pub(super) expires_at: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RenewedBody {
    pub(super) expires_at: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_has_no_pages() {
        let shown = |page, size, total| serde_json::to_value(Pagination::of(page, size, total)).unwrap();
        assert_eq!(shown(1, 20, 0)["totalPages"], 0);
        assert_eq!(shown(1, 20, 0)["hasNextPage"], false);
        assert_eq!(shown(1, 2, 3)["hasNextPage"], true);
        assert_eq!(shown(2, 2, 3)["hasNextPage"], false);
        assert_eq!(shown(9, 2, 3)["totalPages"], 2);
    }
}
