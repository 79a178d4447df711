//! The processes of sandboxes, and the lifetime of sandboxes.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use domain::{ProcessId, SandboxId};
use http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http::{self as web};
use super::lifecycle::{PortEndpoint, ServerClient};
use super::resolve::{PROCESS_KIND, ResolveCandidate, pick_candidate};
use crate::output::WithHint;

/// A process as it is written on the command line: an id or the beginning of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessRef(String);

/// A command, session, context or run with everything it has started.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProcessInfo {
    pub id: String,
    pub kind: String,
    pub state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_millis: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
}

#[derive(Deserialize)]
struct ProcessPage {
    processes: Vec<ProcessInfo>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RenewResponse {
    expires_at: String,
}

impl FromStr for ProcessRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let fits = (1..=32).contains(&text.len()) && text.bytes().all(hex);
        if fits { Ok(Self(text.to_owned())) } else { Err(format!("`{text}` does not begin a process id")) }
    }
}

impl fmt::Display for ProcessRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The result of restarting a sandbox.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RestartResponse {
    pub id: String,
    /// `restart` or `replace`; absent if it had not died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarted: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

impl RestartResponse {
    pub(crate) fn revival_message(&self) -> Option<String> {
        self.restarted.as_deref().map(|how| web::revival_text(how, self.cause.as_deref()))
    }
}

impl ServerClient {
    /// The processes of a sandbox; with `ended`, also commands that have ended.
    pub(crate) async fn list_processes(&self, id: &SandboxId, ended: bool) -> Result<Vec<ProcessInfo>> {
        let answer = self.operator_api().get(&format!("/sandboxes/{id}/processes?ended={ended}")).await?;
        Ok(web::read_json::<ProcessPage>(answer).await?.processes)
    }

    /// The ids of processes in a sandbox. Requests the list at most once.
    pub(crate) async fn resolve_processes(
        &self,
        id: &SandboxId,
        references: &[ProcessRef],
    ) -> Result<Vec<ProcessId>> {
        let exact = |reference: &ProcessRef| ProcessId::parse(&reference.0).ok();
        let mut candidates = Vec::new();
        if references.iter().any(|reference| exact(reference).is_none()) {
            let candidate =
                |info: ProcessInfo| ResolveCandidate { id: info.id, name: Some(info.text), owner: None };
            candidates.extend(self.list_processes(id, true).await?.into_iter().map(candidate));
        }
        let mut found = Vec::new();
        for reference in references {
            let process = match exact(reference) {
                Some(process) => Some(process),
                None => pick_candidate(&reference.0, &candidates, &PROCESS_KIND)?,
            };
            let missing = || anyhow!("no process in sandbox `{id}` has an id that begins with `{reference}`");
            found.push(
                process
                    .ok_or_else(missing)
                    .with_hint(format!("`coracle ps --all {id}` lists the processes"))?,
            );
        }
        Ok(found)
    }

    /// Signals everything that a command, session or context has started.
    pub(crate) async fn signal_process(
        &self,
        id: &SandboxId,
        process: &ProcessId,
        signal: &str,
    ) -> Result<()> {
        let path = format!("/sandboxes/{id}/processes/{process}/signal");
        match self.operator_api().post_json(&path, &json!({ "signal": signal })).await {
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => {
                Err(error).with_hint(format!("`coracle ps {id}` shows what runs"))
            }
            sent => sent.map(drop),
        }
    }

    pub(crate) async fn pause_sandbox(&self, id: &SandboxId) -> Result<()> {
        self.api().post_json(&format!("/sandboxes/{id}/pause"), &json!({})).await.map(drop)
    }

    /// Resumes a paused sandbox. If it had died, it is restarted, and a message about that is returned.
    pub(crate) async fn resume_sandbox(&self, id: &SandboxId) -> Result<Option<String>> {
        let answer = self.api().post_json(&format!("/sandboxes/{id}/resume"), &json!({})).await?;
        Ok(web::revival_message(&answer))
    }

    /// Restarts a dead sandbox.
    pub(crate) async fn restart_sandbox(&self, id: &SandboxId) -> Result<RestartResponse> {
        let answer = self.operator_api().post_json(&format!("/sandboxes/{id}/restart"), &json!({})).await?;
        web::read_json(answer).await
    }

    /// Moves the expiry to this long from now; returns the new time.
    pub(crate) async fn extend_timeout(&self, id: &SandboxId, time: Duration) -> Result<String> {
        let expires = Timestamp::now().checked_add(time).context("that is too far in the future")?;
        let request = json!({ "expiresAt": expires.to_string() });
        let answer = self.api().post_json(&format!("/sandboxes/{id}/renew-expiration"), &request).await?;
        Ok(web::read_json::<RenewResponse>(answer).await?.expires_at)
    }

    /// The address of a port of a sandbox; with `signed`, the address alone gives access for this long.
    pub(crate) async fn port_endpoint(
        &self,
        id: &SandboxId,
        port: u16,
        signed: Option<Duration>,
    ) -> Result<PortEndpoint> {
        let expires = signed.map(|time| Timestamp::now().checked_add(time)).transpose();
        let expires = expires.context("that is too far in the future")?;
        let query = expires.map(|at| format!("?expires={}", at.as_second())).unwrap_or_default();
        web::read_json(self.api().get(&format!("/sandboxes/{id}/endpoints/{port}{query}")).await?).await
    }
}
