//! `create`, `release`, `ls` and `rm`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use domain::{NetworkAccess, NetworkPolicy};
use http::StatusCode;
use jiff::Timestamp;
use serde_json::json;

use crate::args::{CreateArgs, LsArgs, NetworkChoice, ReleaseArgs, RmArgs};
use crate::client::{
    CreateGuestRequest, CreateSandboxRequest, OwnerScope, ResolveCandidate, SandboxInfo, SandboxRef,
    SandboxReport, ServerClient, failed_with_status, policy_body,
};
use crate::output::{Printer, WithHint, format_bytes, format_duration};
use crate::values::SandboxLifetime;

pub(crate) async fn create_sandbox(
    server: &ServerClient,
    args: CreateArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    if let Some(guest) = args.guest.clone() {
        return create_guest_sandbox(server, &guest, args, printer).await;
    }
    let snapshot = match &args.snapshot {
        Some(snapshot) => Some(server.resolve_snapshot(snapshot).await?.to_string()),
        None => None,
    };
    let settings = args.given_options();
    let (network, policy) = requested_network(&args)?;
    let missing = find_missing_volumes(server, args.volume_names()).await;
    let network_is_default = args.network.is_none();
    let request = CreateSandboxRequest {
        key: args.key,
        pool: args.pool,
        image: args.image.unwrap_or_else(|| "host".to_owned()),
        snapshot,
        timeout: args.timeout,
        idle_timeout: args.idle_timeout,
        memory: args.limits.memory,
        cpus: args.limits.cpus,
        pids: args.limits.pids,
        disk: args.limits.disk,
        network,
        policy,
        env: args.env.into_iter().collect(),
        labels: args.labels.into_iter().collect(),
        volumes: args.volumes,
        entrypoint: args.entrypoint,
        on_death: args.on_death.map(Into::into),
    };
    let made = server.create_sandbox(&request).await.context("could not create the sandbox")?;
    made.stand_in.iter().for_each(|stand_in| printer.warn(stand_in));
    made.revival.iter().for_each(|revival| printer.warn(revival));
    if let (true, Some(key), false) = (made.existing, &request.key, settings.is_empty()) {
        let have = if settings.len() == 1 { "has" } else { "have" };
        printer.warn(format!(
            "the sandbox of key `{key}` exists; {} {have} no effect on it",
            settings.join(", ")
        ));
    }
    report_new_volumes(server, &missing, printer).await;
    if made.lacks_network && network_is_default {
        printer.remark("this sandbox has no network: this host offers none; `coracle doctor` says why");
    }
    if printer.is_json() {
        printer.print_json(&made)?
    } else {
        printer.print_line(&made.id)?
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes a sandbox for the clients of another API.
async fn create_guest_sandbox(
    server: &ServerClient,
    guest: &str,
    args: CreateArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let settings = args.given_options();
    let network_is_default = args.network.is_none();
    let request = CreateGuestRequest {
        guest: guest.to_owned(),
        name: args.key,
        image: args.image,
        network: args.network.map(network_name),
        memory_bytes: args.limits.memory.map(|bytes| bytes.0),
        cpu_millis: args.limits.cpus.map(|cpus| cpus.0),
        pids: args.limits.pids,
        disk_bytes: args.limits.disk.map(|bytes| bytes.0),
        env: args.env.into_iter().collect(),
        labels: args.labels.into_iter().collect(),
        timeout_seconds: args.timeout.map(lifetime_seconds),
        idle_timeout_seconds: args.idle_timeout.map(lifetime_seconds),
    };
    let made = server.create_guest_sandbox(&request).await.context("could not create the sandbox")?;
    made.stand_in.iter().for_each(|stand_in| printer.warn(stand_in));
    made.revival_text().iter().for_each(|revival| printer.warn(revival));
    if made.existing && !settings.is_empty() {
        let have = if settings.len() == 1 { "has" } else { "have" };
        let (name, settings) = (&made.name, settings.join(", "));
        printer.warn(format!("the sandbox of key `{name}` exists; {settings} {have} no effect on it"));
    }
    if made.lacks_network && network_is_default {
        printer.remark("this sandbox has no network: this host offers none; `coracle doctor` says why");
    }
    match printer.is_json() {
        true => printer.print_json(&made)?,
        false => printer.print_line(&made.id)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of a network mode in requests.
fn network_name(network: NetworkChoice) -> &'static str {
    NetworkAccess::from(network).name()
}

/// The network that the options ask for, with its policy as the API writes it. `--allow` and `--deny` are a policy.
fn requested_network(args: &CreateArgs) -> Result<(Option<NetworkAccess>, Option<serde_json::Value>)> {
    let named = args.network.map(NetworkAccess::from);
    if args.allow.is_empty() && args.deny.is_empty() {
        return Ok((named, None));
    }
    if named.is_some_and(|named| named != NetworkAccess::Filtered) {
        return Err(anyhow!("`--allow` and `--deny` are for network `filtered`"))
            .with_hint("leave `--network` out, or write `--network filtered`");
    }
    let policy = NetworkPolicy::from_lists(&args.allow, &args.deny)?;
    Ok((Some(NetworkAccess::Filtered), Some(policy_body(&policy))))
}

/// A lifetime in whole seconds, of which zero means for ever.
fn lifetime_seconds(lifetime: SandboxLifetime) -> u64 {
    match lifetime {
        SandboxLifetime::Never => 0,
        SandboxLifetime::After(time) => time.as_secs() + u64::from(time.subsec_nanos() > 0),
    }
}

/// Those of the named volumes that do not exist. If the server cannot say, the result is empty.
async fn find_missing_volumes(server: &ServerClient, mut names: Vec<String>) -> Vec<String> {
    if !names.is_empty() {
        let volumes = server.list_volumes(&OwnerScope::Own).await;
        names.retain(|name| volumes.as_ref().is_ok_and(|all| all.iter().all(|one| one.name != *name)));
    }
    names
}

/// Prints which volumes a create has made, since a mistyped name makes a new one.
async fn report_new_volumes(server: &ServerClient, missing: &[String], printer: &Printer) {
    if missing.is_empty() {
        return;
    }
    for volume in server.list_volumes(&OwnerScope::Own).await.unwrap_or_default() {
        if missing.contains(&volume.name) {
            printer.remark(format!(
                "volume `{}` ({}) was created",
                volume.name,
                format_bytes(volume.size_bytes)
            ));
        }
    }
}

/// Releases a named sandbox: it stays until another needs its place, and `create --key` takes it again.
pub(crate) async fn release_sandbox(
    server: &ServerClient,
    args: &ReleaseArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let mut name = args.key.to_string();
    let mut released = server.release_sandbox(&name).await?;
    if released.is_none() {
        name = resolve_name(server, &args.key).await?;
        released = server.release_sandbox(&name).await?;
    }
    let Some(released) = released else { return no_such_name(&name) };
    if printer.is_json() {
        printer.print_json(&json!({ "name": name, "released": released }))?;
    } else if !released {
        printer.remark(format!("`{name}` was released already"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of a sandbox that was given as an id, or as the beginning of an id or name.
async fn resolve_name(server: &ServerClient, reference: &SandboxRef) -> Result<String> {
    match server.find_sandbox(&reference.to_string()).await? {
        Some(ResolveCandidate { name: Some(name), .. }) => Ok(name),
        Some(ResolveCandidate { id, .. }) => Err(anyhow!("sandbox `{id}` has no name that could be released"))
            .with_hint("it stays until it expires or `coracle rm` removes it; `coracle create --key NAME` makes one with a name"),
        None => no_such_name(&reference.to_string()),
    }
}

fn no_such_name<T>(text: &str) -> Result<T> {
    Err(anyhow!("no sandbox has the id or name `{text}`"))
        .with_hint("`coracle ls` lists the sandboxes with their names")
}

pub(crate) async fn list_sandboxes(
    server: &ServerClient,
    args: LsArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let scope = args.owners.scope();
    let for_programs = printer.is_json() || args.quiet;
    if scope == OwnerScope::Own && (for_programs || server.is_operator_socket()) {
        return list_through_opensandbox_api(server, &args, printer).await;
    }
    let mut found = match server.list_reports_without_usage(&scope).await {
        // A server that is not Coracle has only the list of the OpenSandbox API.
        Err(error) if scope == OwnerScope::Own && failed_with_status(&error, StatusCode::NOT_FOUND) => {
            return list_through_opensandbox_api(server, &args, printer).await;
        }
        found => found?,
    };
    let has_labels =
        |report: &SandboxReport| args.labels.iter().all(|(key, value)| report.labels.get(key) == Some(value));
    found.sandboxes.retain(has_labels);
    if args.quiet && !printer.is_json() {
        found.sandboxes.iter().try_for_each(|report| printer.print_line(&report.id))?;
        return Ok(ExitCode::SUCCESS);
    }
    let with_owner = found.operator || scope != OwnerScope::Own;
    let now = Timestamp::now();
    let rows = found.sandboxes.iter().map(|report| report_row(report, with_owner, now)).collect();
    printer.print_json_or_table(&found.sandboxes, &list_columns(with_owner), rows)?;
    Ok(ExitCode::SUCCESS)
}

/// The columns of `ls`. Owners are shown to the operator, who can see more than one.
fn list_columns(with_owner: bool) -> Vec<&'static str> {
    let all = ["id", "name", "owner", "image", "phase", "age", "expires", "labels"];
    all.into_iter().filter(|name| with_owner || *name != "owner").collect()
}

/// The caller's own sandboxes in the format of the OpenSandbox API, for programs.
async fn list_through_opensandbox_api(
    server: &ServerClient,
    args: &LsArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let found = server.list_sandboxes(&args.labels).await?;
    if args.quiet && !printer.is_json() {
        found.iter().try_for_each(|sandbox| printer.print_line(&sandbox.id))?;
        return Ok(ExitCode::SUCCESS);
    }
    let now = Timestamp::now();
    let rows = found.iter().map(|sandbox| sandbox_row(sandbox, now)).collect();
    printer.print_json_or_table(&found, &list_columns(false), rows)?;
    Ok(ExitCode::SUCCESS)
}

fn report_row(report: &SandboxReport, with_owner: bool, now: Timestamp) -> Vec<String> {
    let owner = with_owner.then(|| report.owner.clone());
    let head = [report.id.clone(), report.name.clone().unwrap_or_default()];
    let rest = [
        report_image_text(report),
        report.phase.clone(),
        format_age(&report.created_at, now),
        format_expiry(report.expires_at.as_deref(), now),
        format_labels(&report.labels),
    ];
    head.into_iter().chain(owner).chain(rest).collect()
}

/// As [`sandbox_image_text`], or the snapshot whose files the sandbox began with.
fn report_image_text(report: &SandboxReport) -> String {
    let image = &report.image;
    match (report.rest.get("snapshot").and_then(|snapshot| snapshot.as_str()), &image.stand_in) {
        (Some(snapshot), _) => format!("snapshot {snapshot}"),
        (None, Some(_)) => format!("{} (for {})", image.used, image.requested),
        (None, None) => image.used.clone(),
    }
}

/// How long ago a time was. A time that cannot be parsed is shown as received.
pub(crate) fn format_age(at: &str, now: Timestamp) -> String {
    at.parse().map_or_else(|_error| at.to_owned(), |at| format_duration(seconds_between(at, now)))
}

/// A time and how long ago it was.
pub(crate) fn format_time_with_age(at: &str, now: Timestamp) -> String {
    format!("{at} ({} ago)", format_age(at, now))
}

pub(crate) fn format_expiry(at: Option<&str>, now: Timestamp) -> String {
    let left = |at: &str| at.parse().map(|at| format!("in {}", format_duration(seconds_between(now, at))));
    at.map_or_else(|| "never".to_owned(), |at| left(at).unwrap_or_else(|_error| at.to_owned()))
}

fn sandbox_row(sandbox: &SandboxInfo, now: Timestamp) -> Vec<String> {
    let snapshot = || Some(format!("snapshot {}", sandbox.rest.get("snapshotId")?.as_str()?));
    vec![
        sandbox.id.clone(),
        sandbox.name().unwrap_or_default().to_owned(),
        sandbox_image_text(sandbox).or_else(snapshot).unwrap_or_default(),
        sandbox.status.state.to_lowercase(),
        format_age(&sandbox.created_at, now),
        format_expiry(sandbox.expires_at.as_deref(), now),
        format_labels(&sandbox.labels()),
    ]
}

/// Labels as they are written with `--label`.
pub(crate) fn format_labels(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// The requested image of a sandbox, after the one that stands in for it, if there is one.
fn sandbox_image_text(sandbox: &SandboxInfo) -> Option<String> {
    let asked = &sandbox.image.as_ref()?.uri;
    let used = sandbox.rest.get("extensions").and_then(|extensions| extensions["coracle.image"].as_str());
    Some(used.map_or_else(|| asked.clone(), |used| format!("{used} (for {asked})")))
}

/// The seconds from one time to a later one; 0 if it is not later.
fn seconds_between(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.as_second() - from.as_second()).unwrap_or(0)
}

/// Removes the named sandboxes. A missing one does not keep the others from being removed, but is
/// reported as an error at the end.
pub(crate) async fn remove_sandboxes(
    server: &ServerClient,
    args: RmArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let scope = args.owners.scope();
    let (ids, mut missing): (Vec<String>, Vec<String>) = if args.all && scope == OwnerScope::Own {
        let own = server.list_sandboxes(&[]).await?.into_iter().map(|sandbox| sandbox.id).collect();
        (own, Vec::new())
    } else if args.all {
        let all = server
            .list_reports_without_usage(&scope)
            .await?
            .sandboxes
            .into_iter()
            .map(|report| report.id)
            .collect();
        (all, Vec::new())
    } else {
        let (found, missing) = server.resolve_sandboxes(&args.ids, &scope).await?;
        (found.iter().map(ToString::to_string).collect(), missing)
    };
    let mut progress = printer.start_progress("removing");
    let mut removed = Vec::new();
    for id in &ids {
        let gone = match scope {
            OwnerScope::Own => server.remove_sandbox(id).await?,
            OwnerScope::Owner(_) | OwnerScope::All => server.remove_as_operator(id).await?,
        };
        if gone {
            removed.push(id)
        } else {
            missing.push(id.clone())
        }
        progress.show_detail(&format!("{} of {}", removed.len(), ids.len()));
    }
    drop(progress);
    if printer.is_json() {
        printer.print_json(&json!({ "removed": removed, "missing": missing }))?;
    } else {
        removed.iter().try_for_each(|id| printer.print_line(id))?;
    }
    if args.all && scope == OwnerScope::Own {
        let count = removed.len();
        let sandboxes = if count == 1 { "sandbox" } else { "sandboxes" };
        // A server that accepts callers without a key has no other owners.
        match server.has_key() {
            true => printer.remark(format!("{count} {sandboxes} of your own removed; other owners' stay")),
            false => printer.remark(format!("{count} {sandboxes} removed")),
        }
    }
    // With `--all`, another client may have removed one in between, which is the wanted result.
    if missing.is_empty() || args.all {
        return Ok(ExitCode::SUCCESS);
    }
    Err(anyhow!("there is no such sandbox as `{}`", missing.join("`, `")))
        .with_hint(server.sandboxes_hint(&scope))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_how_old_a_sandbox_is_and_when_it_ends() {
        let info: SandboxInfo = serde_json::from_value(json!({
            "id": "abcdefghijklmnopqrst", "status": {"state": "Running"}, "image": {"uri": "host"},
            "createdAt": "2026-11-15T10:00:00Z", "expiresAt": "2026-11-15T10:10:00Z",
            "metadata": {"team": "search", "env": "test"}, "extensions": {"coracle.key": "web"},
        }))
        .expect("it reads");
        let now = "2026-11-15T10:01:30Z".parse().expect("a time");
        assert_eq!(
            sandbox_row(&info, now),
            ["abcdefghijklmnopqrst", "web", "host", "running", "1m", "in 8m", "env=test,team=search"]
        );
    }

    #[test]
    fn image_that_stands_in_is_shown_before_the_one_asked_for() {
        let info: SandboxInfo = serde_json::from_value(json!({
            "id": "a", "status": {"state": "Running"}, "createdAt": "2026-11-15T10:00:00Z",
            "image": {"uri": "python:3.12"}, "extensions": {"coracle.image": "host"},
        }))
        .expect("it reads");
        assert_eq!(sandbox_image_text(&info).as_deref(), Some("host (for python:3.12)"));
    }

    #[test]
    fn a_sandbox_without_expiry_never_ends() {
        let info: SandboxInfo = serde_json::from_value(json!({
            "id": "a", "status": {"state": "Paused"}, "createdAt": "2026-11-15T10:00:00Z",
        }))
        .expect("it reads");
        let now = "2026-11-15T10:00:05Z".parse().expect("a time");
        assert_eq!(sandbox_row(&info, now), ["a", "", "", "paused", "5s", "never", ""]);
    }
}
