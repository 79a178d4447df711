//! `snapshot create`, `ls`, `inspect`, `rm`, and `fork`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use domain::SnapshotId;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::sandboxes::{age, moment};
use crate::args::{ForkArgs, SnapshotCommand};
use crate::client::{NewSandbox, OwnedSnapshot, OwnerScope, Server, SnapshotInfo};
use crate::output::{Printer, WithHint, amount, exact_span, size};

/// How often the server is asked whether a snapshot is ready: its API sends no notification.
const LOOK: Duration = Duration::from_millis(20);

/// The columns of the operator's list of snapshots.
const OWNED_COLUMNS: [&str; 7] = ["id", "name", "owner", "sandbox", "state", "size", "age"];

/// The exit code of a program that was interrupted, as shells use it.
const INTERRUPTED: u8 = 130;

pub(crate) async fn snapshot(
    server: &Server,
    command: SnapshotCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    match command {
        SnapshotCommand::Create { id, name } => {
            let id = server.resolve(&id).await?;
            let ready = take(server, id.as_str(), name.as_deref(), printer).await?;
            if printer.json() { printer.value(&ready)? } else { printer.line(&ready.id)? }
        }
        SnapshotCommand::Ls { sandbox, owners } if owners.scope() != OwnerScope::Own => {
            let scope = owners.scope();
            let mut found = server.owned_snapshots(&scope).await?;
            if let Some(sandbox) = &sandbox {
                let id = server.resolve_in(sandbox, &scope).await?;
                found.retain(|snapshot| snapshot.sandbox_id == id.as_str());
            }
            let now = Timestamp::now();
            let rows = found.iter().map(|snapshot| owned_row(snapshot, now)).collect();
            printer.list(&found, &OWNED_COLUMNS, rows)?;
        }
        SnapshotCommand::Ls { sandbox, .. } => {
            let sandbox = match &sandbox {
                Some(sandbox) => Some(server.resolve(sandbox).await?),
                None => None,
            };
            let found = server.snapshots(sandbox.as_ref().map(|id| id.as_str())).await?;
            let now = Timestamp::now();
            let rows = found.iter().map(|snapshot| row(snapshot, now)).collect();
            printer.list(&found, &["id", "name", "sandbox", "state", "age"], rows)?;
        }
        SnapshotCommand::Inspect { id, owners } if owners.scope() != OwnerScope::Own => {
            let id = server.resolve_snapshot_in(&id, &owners.scope()).await?;
            let found = server.owned_snapshot(&id).await?;
            if printer.json() {
                printer.value(&found)?
            } else {
                printer.table(&OWNED_COLUMNS, vec![owned_row(&found, Timestamp::now())])?
            }
        }
        SnapshotCommand::Inspect { id, .. } => {
            let id = server.resolve_snapshot(&id).await?;
            inspect(server, id.as_str(), printer).await?;
        }
        SnapshotCommand::Rm { ids, owners } => {
            let scope = owners.scope();
            let (found, missing) = server.resolve_snapshots(&ids, &scope).await?;
            remove(server, &found, missing, &scope, printer).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn row(snapshot: &SnapshotInfo, now: Timestamp) -> Vec<String> {
    vec![
        snapshot.id.clone(),
        snapshot.name.clone().unwrap_or_default(),
        snapshot.sandbox_id.clone(),
        snapshot.status.state.to_lowercase(),
        age(&snapshot.created_at, now),
    ]
}

fn owned_row(snapshot: &OwnedSnapshot, now: Timestamp) -> Vec<String> {
    vec![
        snapshot.id.clone(),
        snapshot.name.clone().unwrap_or_default(),
        snapshot.owner.clone(),
        snapshot.sandbox_id.clone(),
        snapshot.state.to_lowercase(),
        size(snapshot.size_bytes),
        age(&snapshot.created_at, now),
    ]
}

async fn inspect(server: &Server, id: &str, printer: &Printer) -> Result<()> {
    let found = server.snapshot(id).await?;
    if printer.json() {
        return printer.value(&found);
    }
    printer.line(format!("{} of sandbox {}", found.id, found.sandbox_id))?;
    if let Some(name) = &found.name {
        printer.line(format!("name     {name}"))?;
    }
    printer.line(format!("created  {}", moment(&found.created_at, Timestamp::now())))?;
    printer.line(format!("state    {}  {}", found.status.state, found.message()).trim_end())?;
    inherited(&found).iter().try_for_each(|(name, value)| printer.line(format!("  {name:<14}{value}")))
}

/// The settings that sandboxes made from a snapshot inherit, as lines for people.
fn inherited(snapshot: &SnapshotInfo) -> Vec<(String, String)> {
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
                lines.extend(limits.iter().map(|(name, limit)| (name.clone(), amount(&shown(limit)))))
            }
            ("metadata", Value::Object(labels)) => lines.extend(
                labels.iter().map(|(name, value)| ("label".to_owned(), format!("{name}={}", shown(value)))),
            ),
            ("timeout" | "idleTimeout", Value::Number(seconds)) => {
                let name = if name == "timeout" { "timeout" } else { "idle timeout" };
                lines.push((name.to_owned(), exact_span(seconds.as_u64().unwrap_or(0))));
            }
            ("secureAccess", Value::Bool(true)) => lines.push(("secure access".to_owned(), "yes".to_owned())),
            ("secureAccess", _) => {}
            (name, value) => lines.push((name.to_owned(), amount(&shown(value)))),
        }
    }
    lines.retain(|(_, value)| !value.is_empty());
    if !settings.contains_key("timeout") {
        lines.push(("timeout".to_owned(), "never".to_owned()));
    }
    lines
}

/// Takes a snapshot and waits until it is ready.
pub(super) async fn take(
    server: &Server,
    sandbox: &str,
    name: Option<&str>,
    printer: &Printer,
) -> Result<SnapshotInfo> {
    let mut snapshot = server.take_snapshot(sandbox, name).await?;
    let mut progress = printer.progress("taking a snapshot");
    while snapshot.status.state == "Creating" {
        progress.say(snapshot.message());
        tokio::time::sleep(LOOK).await;
        snapshot = server.snapshot(&snapshot.id).await?;
    }
    drop(progress);
    if snapshot.status.state != "Ready" {
        bail!("snapshot `{}` is {}: {}", snapshot.id, snapshot.status.state, snapshot.message());
    }
    Ok(snapshot)
}

/// Removes all snapshots that exist; a missing one is reported as an error at the end.
async fn remove(
    server: &Server,
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
    if printer.json() {
        printer.value(&json!({ "removed": removed, "missing": missing }))?;
    } else {
        removed.iter().try_for_each(|id| printer.line(id))?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such snapshot as `{}`", missing.join("`, `")))
        .hint("`coracle snapshot ls` lists the snapshots")
}

/// Makes sandboxes with the files of another. The snapshot in between is removed in any case. An
/// interrupt takes effect between two sandboxes, since one that is being made still uses the snapshot.
pub(crate) async fn fork(server: &Server, args: ForkArgs, printer: &Printer) -> Result<ExitCode> {
    let id = server.resolve(&args.id).await?;
    let mut interrupt = Interrupt::watch()?;
    let snapshot = take(server, id.as_str(), None, printer).await?;
    // The server takes everything that is not set here from the snapshot.
    let wish = NewSandbox {
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
        ..NewSandbox::default()
    };
    let forked = make(server, &wish, args.count, &mut interrupt, printer).await;
    let dropped = server.delete_snapshot(&snapshot.id).await;
    let all = forked?;
    dropped?;
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) })
}

/// Whether this program received a signal to end.
struct Interrupt {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupt {
    fn watch() -> Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn came(&mut self) -> bool {
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
async fn make(
    server: &Server,
    wish: &NewSandbox,
    count: u32,
    interrupt: &mut Interrupt,
    printer: &Printer,
) -> Result<bool> {
    let mut progress = printer.progress("forking");
    let mut made = Vec::new();
    for number in 1..=count {
        if interrupt.came().await {
            break;
        }
        let sandbox = server.create(wish).await?;
        sandbox.revival.iter().for_each(|revival| printer.warn(revival));
        if !printer.json() {
            printer.line(&sandbox.id)?;
        }
        made.push(sandbox);
        progress.say(&format!("{number} of {count}"));
    }
    drop(progress);
    if printer.json() {
        printer.value(&made)?;
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
        assert_eq!(inherited(&snapshot), expected);
        let now = "2026-11-15T10:05:00Z".parse().expect("a time");
        assert_eq!(row(&snapshot, now), ["a", "", "b", "ready", "5m"]);
    }
}
