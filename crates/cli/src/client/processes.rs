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
use super::lifecycle::{Endpoint, Server};
use super::resolve::{Candidate, PROCESSES, pick};
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
struct Processes {
    processes: Vec<ProcessInfo>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Renewed {
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
pub(crate) struct Restarted {
    pub id: String,
    /// `restart` or `replace`; absent if it had not died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarted: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

impl Restarted {
    pub(crate) fn revival(&self) -> Option<String> {
        self.restarted.as_deref().map(|how| web::revival_text(how, self.cause.as_deref()))
    }
}

impl Server {
    /// The processes of a sandbox; with `ended`, also commands that have ended.
    pub(crate) async fn processes(&self, id: &SandboxId, ended: bool) -> Result<Vec<ProcessInfo>> {
        let answer = self.operator().get(&format!("/sandboxes/{id}/processes?ended={ended}")).await?;
        Ok(web::json::<Processes>(answer).await?.processes)
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
            let candidate = |info: ProcessInfo| Candidate { id: info.id, name: Some(info.text), owner: None };
            candidates.extend(self.processes(id, true).await?.into_iter().map(candidate));
        }
        let mut found = Vec::new();
        for reference in references {
            let process = match exact(reference) {
                Some(process) => Some(process),
                None => pick(&reference.0, &candidates, &PROCESSES)?,
            };
            let missing = || anyhow!("no process in sandbox `{id}` has an id that begins with `{reference}`");
            found.push(
                process.ok_or_else(missing).hint(format!("`coracle ps --all {id}` lists the processes"))?,
            );
        }
        Ok(found)
    }

    /// Signals everything that a command, session or context has started.
    pub(crate) async fn signal(&self, id: &SandboxId, process: &ProcessId, signal: &str) -> Result<()> {
        let path = format!("/sandboxes/{id}/processes/{process}/signal");
        match self.operator().post_json(&path, &json!({ "signal": signal })).await {
            Err(error) if super::refused_with(&error, StatusCode::NOT_FOUND) => {
                Err(error).hint(format!("`coracle ps {id}` shows what runs"))
            }
            sent => sent.map(drop),
        }
    }

    pub(crate) async fn pause(&self, id: &SandboxId) -> Result<()> {
        self.api().post_json(&format!("/sandboxes/{id}/pause"), &json!({})).await.map(drop)
    }

    /// Resumes a paused sandbox. If it had died, it is restarted, and a message about that is returned.
    pub(crate) async fn resume(&self, id: &SandboxId) -> Result<Option<String>> {
        let answer = self.api().post_json(&format!("/sandboxes/{id}/resume"), &json!({})).await?;
        Ok(web::revival(&answer))
    }

    /// Restarts a dead sandbox.
    pub(crate) async fn restart(&self, id: &SandboxId) -> Result<Restarted> {
        let answer = self.operator().post_json(&format!("/sandboxes/{id}/restart"), &json!({})).await?;
        web::json(answer).await
    }

    /// Moves the expiry to this long from now; returns the new time.
    pub(crate) async fn extend(&self, id: &SandboxId, time: Duration) -> Result<String> {
        let expires = Timestamp::now().checked_add(time).context("that is too far in the future")?;
        let wish = json!({ "expiresAt": expires.to_string() });
        let answer = self.api().post_json(&format!("/sandboxes/{id}/renew-expiration"), &wish).await?;
        Ok(web::json::<Renewed>(answer).await?.expires_at)
    }

    /// The address of a port of a sandbox; with `signed`, the address alone gives access for this long.
    pub(crate) async fn endpoint(
        &self,
        id: &SandboxId,
        port: u16,
        signed: Option<Duration>,
    ) -> Result<Endpoint> {
        let expires = signed.map(|time| Timestamp::now().checked_add(time)).transpose();
        let expires = expires.context("that is too far in the future")?;
        let query = expires.map(|at| format!("?expires={}", at.as_second())).unwrap_or_default();
        web::json(self.api().get(&format!("/sandboxes/{id}/endpoints/{port}{query}")).await?).await
    }
}
