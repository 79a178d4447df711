//! `snapshot create`, `ls`, `inspect`, `rm`, and `fork`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use domain::SnapshotId;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::sandboxes::{format_age, format_time_with_age};
use crate::args::{ForkArgs, SnapshotCommand};
use crate::client::{CreateSandboxRequest, OwnedSnapshot, OwnerScope, ServerClient, SnapshotInfo};
use crate::output::{Printer, WithHint, format_amount, format_bytes, format_exact_duration};

/// How often the server is asked whether a snapshot is ready: its API sends no notification.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The columns of the operator's list of snapshots.
const OWNED_COLUMNS: [&str; 7] = ["id", "name", "owner", "sandbox", "state", "size", "age"];

/// The exit code of a program that was interrupted, as shells use it.
const EXIT_INTERRUPTED: u8 = 130;

pub(crate) async fn run_snapshot_command(
    server: &ServerClient,
    command: SnapshotCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    match command {
        SnapshotCommand::Create { id, name } => {
            let id = server.resolve_sandbox(&id).await?;
            let ready = take_snapshot(server, id.as_str(), name.as_deref(), printer).await?;
            if printer.is_json() { printer.print_json(&ready)? } else { printer.print_line(&ready.id)? }
        }
        SnapshotCommand::Ls { sandbox, owners } if owners.scope() != OwnerScope::Own => {
            let scope = owners.scope();
            let mut found = server.list_owned_snapshots(&scope).await?;
            if let Some(sandbox) = &sandbox {
                let id = server.resolve_sandbox_in(sandbox, &scope).await?;
                found.retain(|snapshot| snapshot.sandbox_id == id.as_str());
            }
            let now = Timestamp::now();
            let rows = found.iter().map(|snapshot| owned_snapshot_row(snapshot, now)).collect();
            printer.print_json_or_table(&found, &OWNED_COLUMNS, rows)?;
        }
        SnapshotCommand::Ls { sandbox, .. } => {
            let sandbox = match &sandbox {
                Some(sandbox) => Some(server.resolve_sandbox(sandbox).await?),
                None => None,
            };
            let found = server.list_snapshots(sandbox.as_ref().map(|id| id.as_str())).await?;
            let now = Timestamp::now();
            let rows = found.iter().map(|snapshot| snapshot_row(snapshot, now)).collect();
            printer.print_json_or_table(&found, &["id", "name", "sandbox", "state", "age"], rows)?;
        }
        SnapshotCommand::Inspect { id, owners } if owners.scope() != OwnerScope::Own => {
            let id = server.resolve_snapshot_in(&id, &owners.scope()).await?;
            let found = server.owned_snapshot_info(&id).await?;
            if printer.is_json() {
                printer.print_json(&found)?
            } else {
                printer.print_table(&OWNED_COLUMNS, vec![owned_snapshot_row(&found, Timestamp::now())])?
            }
        }
        SnapshotCommand::Inspect { id, .. } => {
            let id = server.resolve_snapshot(&id).await?;
            inspect_snapshot(server, id.as_str(), printer).await?;
        }
        SnapshotCommand::Rm { ids, owners } => {
            let scope = owners.scope();
            let (found, missing) = server.resolve_snapshots(&ids, &scope).await?;
            remove_snapshots(server, &found, missing, &scope, printer).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn snapshot_row(snapshot: &SnapshotInfo, now: Timestamp) -> Vec<String> {
    vec![
        snapshot.id.clone(),
        snapshot.name.clone().unwrap_or_default(),
        snapshot.sandbox_id.clone(),
        snapshot.status.state.to_lowercase(),
        format_age(&snapshot.created_at, now),
    ]
}

fn owned_snapshot_row(snapshot: &OwnedSnapshot, now: Timestamp) -> Vec<String> {
    vec![
        snapshot.id.clone(),
        snapshot.name.clone().unwrap_or_default(),
        snapshot.owner.clone(),
        snapshot.sandbox_id.clone(),
        snapshot.state.to_lowercase(),
        format_bytes(snapshot.size_bytes),
        format_age(&snapshot.created_at, now),
    ]
}

async fn inspect_snapshot(server: &ServerClient, id: &str, printer: &Printer) -> Result<()> {
    let found = server.snapshot_info(id).await?;
    if printer.is_json() {
        return printer.print_json(&found);
    }
    printer.print_line(format!("{} of sandbox {}", found.id, found.sandbox_id))?;
    if let Some(name) = &found.name {
        printer.print_line(format!("name     {name}"))?;
    }
    printer.print_line(format!("created  {}", format_time_with_age(&found.created_at, Timestamp::now())))?;
    printer.print_line(format!("state    {}  {}", found.status.state, found.message()).trim_end())?;
    inherited_settings(&found)
        .iter()
        .try_for_each(|(name, value)| printer.print_line(format!("  {name:<14}{value}")))
}

/// The settings that sandboxes made from a snapshot inherit, as lines for people.
fn inherited_settings(snapshot: &SnapshotInfo) -> Vec<(String, String)> {
    let Some(Value::Object(settings)) = snapshot.rest.get("settings") else { return Vec::new() };
    let shown = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    };
    let mut lines = Vec::new();
    for (name, value) in settings {
        match (name.as_str(), value) {
            ("resourceLimits", Value::Object(limits)) => {
                lines.extend(limits.iter().map(|(name, limit)| (name.clone(), format_amount(&shown(limit)))))
            }
            ("metadata", Value::Object(labels)) => lines.extend(
                labels.iter().map(|(name, value)| ("label".to_owned(), format!("{name}={}", shown(value)))),
            ),
            ("timeout" | "idleTimeout", Value::Number(seconds)) => {
                let name = if name == "timeout" { "timeout" } else { "idle timeout" };
                lines.push((name.to_owned(), format_exact_duration(seconds.as_u64().unwrap_or(0))));
            }
            ("secureAccess", Value::Bool(true)) => lines.push(("secure access".to_owned(), "yes".to_owned())),
            ("secureAccess", _) => {}
            (name, value) => lines.push((name.to_owned(), format_amount(&shown(value)))),
        }
    }
    lines.retain(|(_, value)| !value.is_empty());
    if !settings.contains_key("timeout") {
        lines.push(("timeout".to_owned(), "never".to_owned()));
    }
    lines
}

/// Takes a snapshot and waits until it is ready.
pub(super) async fn take_snapshot(
    server: &ServerClient,
    sandbox: &str,
    name: Option<&str>,
    printer: &Printer,
) -> Result<SnapshotInfo> {
    let mut snapshot = server.take_snapshot(sandbox, name).await?;
    let mut progress = printer.start_progress("taking a snapshot");
    while snapshot.status.state == "Creating" {
        progress.show_detail(snapshot.message());
        tokio::time::sleep(READY_POLL_INTERVAL).await;
        snapshot = server.snapshot_info(&snapshot.id).await?;
    }
    drop(progress);
    if snapshot.status.state != "Ready" {
        bail!("snapshot `{}` is {}: {}", snapshot.id, snapshot.status.state, snapshot.message());
    }
    Ok(snapshot)
}

/// Removes all snapshots that exist; a missing one is reported as an error at the end.
async fn remove_snapshots(
    server: &ServerClient,
    ids: &[SnapshotId],
    mut missing: Vec<String>,
    scope: &OwnerScope,
    printer: &Printer,
) -> Result<()> {
    let mut removed = Vec::new();
    for id in ids {
        let gone = match scope {
            OwnerScope::Own => server.delete_snapshot(id.as_str()).await?,
            OwnerScope::Owner(_) | OwnerScope::All => server.remove_owned_snapshot(id).await?,
        };
        let list = if gone { &mut removed } else { &mut missing };
        list.push(id.to_string());
    }
    if printer.is_json() {
        printer.print_json(&json!({ "removed": removed, "missing": missing }))?;
    } else {
        removed.iter().try_for_each(|id| printer.print_line(id))?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such snapshot as `{}`", missing.join("`, `")))
        .with_hint("`coracle snapshot ls` lists the snapshots")
}

/// Makes sandboxes with the files of another. The snapshot in between is removed in any case. An
/// interrupt takes effect between two sandboxes, since one that is being made still uses the snapshot.
pub(crate) async fn fork_sandbox(
    server: &ServerClient,
    args: ForkArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    let mut interrupt = InterruptSignals::watch()?;
    let snapshot = take_snapshot(server, id.as_str(), None, printer).await?;
    // The server takes everything that is not set here from the snapshot.
    let request = CreateSandboxRequest {
        snapshot: Some(snapshot.id.clone()),
        key: args.key,
        timeout: args.timeout,
        idle_timeout: args.idle_timeout,
        on_death: args.on_death.map(Into::into),
        memory: args.limits.memory,
        cpus: args.limits.cpus,
        pids: args.limits.pids,
        disk: args.limits.disk,
        network: args.network.map(Into::into),
        env: args.env.into_iter().collect(),
        labels: args.labels.into_iter().collect(),
        volumes: args.volumes,
        entrypoint: args.entrypoint,
        ..CreateSandboxRequest::default()
    };
    let forked = create_forks(server, &request, args.count, &mut interrupt, printer).await;
    let dropped = server.delete_snapshot(&snapshot.id).await;
    let all = forked?;
    dropped?;
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INTERRUPTED) })
}

/// Whether this program received a signal to end.
struct InterruptSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl InterruptSignals {
    fn watch() -> Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn was_received(&mut self) -> bool {
        let either = async {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
            }
        };
        tokio::time::timeout(Duration::ZERO, either).await.is_ok()
    }
}

/// Makes `count` sandboxes and prints each as soon as it exists; returns `false` if it was interrupted.
async fn create_forks(
    server: &ServerClient,
    request: &CreateSandboxRequest,
    count: u32,
    interrupt: &mut InterruptSignals,
    printer: &Printer,
) -> Result<bool> {
    let mut progress = printer.start_progress("forking");
    let mut made = Vec::new();
    for number in 1..=count {
        if interrupt.was_received().await {
            break;
        }
        let sandbox = server.create_sandbox(request).await?;
        sandbox.revival.iter().for_each(|revival| printer.warn(revival));
        if !printer.is_json() {
            printer.print_line(&sandbox.id)?;
        }
        made.push(sandbox);
        progress.show_detail(&format!("{number} of {count}"));
    }
    drop(progress);
    if printer.is_json() {
        printer.print_json(&made)?;
    }
    Ok(made.len() == count as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_times_are_shown_with_units() {
        let snapshot: SnapshotInfo = serde_json::from_value(json!({
            "id": "a", "sandboxId": "b", "status": {"state": "Ready"}, "createdAt": "2026-11-15T10:00:00Z",
            "settings": {"resourceLimits": {"memory": "64Mi", "cpu": "0.5"}, "timeout": 5400},
        }))
        .expect("it reads");
        let line = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let expected = [line("cpu", "0.5"), line("memory", "64.0 MiB"), line("timeout", "1h30m")];
        assert_eq!(inherited_settings(&snapshot), expected);
        let now = "2026-11-15T10:05:00Z".parse().expect("a time");
        assert_eq!(snapshot_row(&snapshot, now), ["a", "", "b", "ready", "5m"]);
    }
}
