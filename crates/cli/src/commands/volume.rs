//! `volume ls`, `create`, `inspect` and `rm`: disks that outlive sandboxes.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use jiff::Timestamp;
use serde_json::json;

use super::sandboxes::{format_age, format_time_with_age};
use crate::args::VolumeCommand;
use crate::client::{OwnerScope, ServerClient, VolumeInfo, VolumeKey, failed_with_status};
use crate::output::{Printer, WithHint, format_bytes};

pub(crate) async fn run_volume_command(
    server: &ServerClient,
    command: VolumeCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    match command {
        VolumeCommand::Ls { owners } => {
            let volumes = server.list_volumes(&owners.scope()).await?;
            let now = Timestamp::now();
            let columns = ["name", "id", "owner", "used", "size", "sandboxes", "age"];
            printer.print_json_or_table(
                &volumes,
                &columns,
                volumes.iter().map(|volume| volume_row(volume, now)).collect(),
            )?;
        }
        VolumeCommand::Create { name, size } => {
            let made = server.create_volume(&name, size).await?;
            if printer.is_json() { printer.print_json(&made)? } else { printer.print_line(&made.name)? }
        }
        VolumeCommand::Inspect { name, owners } => match find_volume(server, &name, &owners.scope()).await? {
            Some(volume) => inspect_volume(&volume, printer)?,
            None => missing_volumes_error(&[&name])?,
        },
        VolumeCommand::Rm { names, owners } => {
            remove_volumes(server, &names, &owners.scope(), printer).await?
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds a volume by its name or, if no volume has that name, by its id or the beginning of its id.
async fn find_volume(server: &ServerClient, text: &str, scope: &OwnerScope) -> Result<Option<VolumeInfo>> {
    if let Some(exact) = exact_key(text, scope) {
        match server.volume_info(&exact).await {
            Err(error) if failed_with_status(&error, http::StatusCode::NOT_FOUND) => {}
            found => return found.map(Some),
        }
    }
    match server.resolve_volume(text, scope).await? {
        Some(volume) => server.volume_info(&volume).await.map(Some),
        None => Ok(None),
    }
}

/// Removes a volume that is named as for [`find_volume`]; returns its name if it existed.
async fn remove_volume(server: &ServerClient, text: &str, scope: &OwnerScope) -> Result<Option<String>> {
    if let Some(exact) = exact_key(text, scope)
        && server.remove_volume(&exact).await?
    {
        return Ok(Some(exact.name));
    }
    match server.resolve_volume(text, scope).await? {
        Some(volume) if server.remove_volume(&volume).await? => Ok(Some(volume.name)),
        _ => Ok(None),
    }
}

/// The volume whose name is the text, if its owner is known.
fn exact_key(text: &str, scope: &OwnerScope) -> Option<VolumeKey> {
    let name = text.to_owned();
    match scope {
        OwnerScope::Own => Some(VolumeKey { name, owner: None }),
        OwnerScope::Owner(owner) => Some(VolumeKey { name, owner: Some(owner.clone()) }),
        OwnerScope::All => None,
    }
}

fn volume_row(volume: &VolumeInfo, now: Timestamp) -> Vec<String> {
    vec![
        volume.name.clone(),
        volume.id.clone(),
        volume.owner.clone(),
        volume.used_bytes.map_or_else(|| "?".to_owned(), format_bytes),
        format_bytes(volume.size_bytes),
        volume.sandboxes.len().to_string(),
        format_age(&volume.created_at, now),
    ]
}

fn inspect_volume(volume: &VolumeInfo, printer: &Printer) -> Result<()> {
    if printer.is_json() {
        return printer.print_json(volume);
    }
    let used = volume.used_bytes.map_or_else(|| "?".to_owned(), format_bytes);
    let lasts = if volume.deleted_with_sandboxes { "as long as its sandboxes" } else { "until removed" };
    for (name, value) in [
        ("name", volume.name.clone()),
        ("id", volume.id.clone()),
        ("owner", volume.owner.clone()),
        ("size", format_bytes(volume.size_bytes)),
        ("used", used),
        ("lasts", lasts.to_owned()),
        ("created", format_time_with_age(&volume.created_at, Timestamp::now())),
        ("sandboxes", volume.sandboxes.join(" ")),
    ] {
        printer.print_line(format!("{name:<10} {value}"))?;
    }
    Ok(())
}

/// Removes all volumes that exist; a missing one is reported as an error at the end.
async fn remove_volumes(
    server: &ServerClient,
    names: &[String],
    scope: &OwnerScope,
    printer: &Printer,
) -> Result<()> {
    let (mut removed, mut absent) = (Vec::new(), Vec::new());
    for name in names {
        match remove_volume(server, name, scope).await? {
            Some(name) => removed.push(name),
            None => absent.push(name.as_str()),
        }
    }
    if printer.is_json() {
        printer.print_json(&json!({ "removed": removed, "missing": absent }))?;
    } else {
        removed.iter().try_for_each(|name| printer.print_line(name))?;
    }
    if absent.is_empty() { Ok(()) } else { missing_volumes_error(&absent) }
}

fn missing_volumes_error(names: &[&str]) -> Result<()> {
    Err(anyhow!("there is no such volume as `{}`", names.join("`, `")))
        .with_hint("`coracle volume ls` lists the volumes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_has_the_id_and_units() {
        let volume: VolumeInfo = serde_json::from_value(json!({
            "name": "data", "id": "abcdefgh", "owner": "default", "sizeBytes": 10 << 20, "usedBytes": 16 << 10,
            "deletedWithSandboxes": false, "sandboxes": ["x"], "createdAt": "2026-11-15T10:00:00Z",
        }))
        .expect("it reads");
        let now = "2026-11-15T10:05:00Z".parse().expect("a time");
        assert_eq!(
            volume_row(&volume, now),
            ["data", "abcdefgh", "default", "16.0 KiB", "10.0 MiB", "1", "5m"]
        );
    }
}
