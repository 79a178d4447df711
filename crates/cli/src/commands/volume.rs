//! `volume ls`, `create`, `inspect` and `rm`: disks that outlive sandboxes.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use jiff::Timestamp;
use serde_json::json;

use super::sandboxes::{age, moment};
use crate::args::VolumeCommand;
use crate::client::{OwnerScope, Server, VolumeInfo, VolumeKey, refused_with};
use crate::output::{Printer, WithHint, size};

pub(crate) async fn volume(server: &Server, command: VolumeCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        VolumeCommand::Ls { owners } => {
            let volumes = server.volumes(&owners.scope()).await?;
            let now = Timestamp::now();
            let columns = ["name", "id", "owner", "used", "size", "sandboxes", "age"];
            printer.list(&volumes, &columns, volumes.iter().map(|volume| row(volume, now)).collect())?;
        }
        VolumeCommand::Create { name, size } => {
            let made = server.make_volume(&name, size).await?;
            if printer.json() { printer.value(&made)? } else { printer.line(&made.name)? }
        }
        VolumeCommand::Inspect { name, owners } => match find(server, &name, &owners.scope()).await? {
            Some(volume) => inspect(&volume, printer)?,
            None => missing(&[&name])?,
        },
        VolumeCommand::Rm { names, owners } => remove(server, &names, &owners.scope(), printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds a volume by its name or, if no volume has that name, by its id or the beginning of its id.
async fn find(server: &Server, text: &str, scope: &OwnerScope) -> Result<Option<VolumeInfo>> {
    if let Some(exact) = exact(text, scope) {
        match server.volume(&exact).await {
            Err(error) if refused_with(&error, http::StatusCode::NOT_FOUND) => {}
            found => return found.map(Some),
        }
    }
    match server.resolve_volume(text, scope).await? {
        Some(volume) => server.volume(&volume).await.map(Some),
        None => Ok(None),
    }
}

/// Removes a volume that is named as for [`find`]; returns its name if it existed.
async fn remove_one(server: &Server, text: &str, scope: &OwnerScope) -> Result<Option<String>> {
    if let Some(exact) = exact(text, scope)
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
fn exact(text: &str, scope: &OwnerScope) -> Option<VolumeKey> {
    let name = text.to_owned();
    match scope {
        OwnerScope::Own => Some(VolumeKey { name, owner: None }),
        OwnerScope::Owner(owner) => Some(VolumeKey { name, owner: Some(owner.clone()) }),
        OwnerScope::All => None,
    }
}

fn row(volume: &VolumeInfo, now: Timestamp) -> Vec<String> {
    vec![
        volume.name.clone(),
        volume.id.clone(),
        volume.owner.clone(),
        volume.used_bytes.map_or_else(|| "?".to_owned(), size),
        size(volume.size_bytes),
        volume.sandboxes.len().to_string(),
        age(&volume.created_at, now),
    ]
}

fn inspect(volume: &VolumeInfo, printer: &Printer) -> Result<()> {
    if printer.json() {
        return printer.value(volume);
    }
    let used = volume.used_bytes.map_or_else(|| "?".to_owned(), size);
    let lasts = if volume.deleted_with_sandboxes { "as long as its sandboxes" } else { "until removed" };
    for (name, value) in [
        ("name", volume.name.clone()),
        ("id", volume.id.clone()),
        ("owner", volume.owner.clone()),
        ("size", size(volume.size_bytes)),
        ("used", used),
        ("lasts", lasts.to_owned()),
        ("created", moment(&volume.created_at, Timestamp::now())),
        ("sandboxes", volume.sandboxes.join(" ")),
    ] {
        printer.line(format!("{name:<10} {value}"))?;
    }
    Ok(())
}

/// Removes all volumes that exist; a missing one is reported as an error at the end.
async fn remove(server: &Server, names: &[String], scope: &OwnerScope, printer: &Printer) -> Result<()> {
    let (mut removed, mut absent) = (Vec::new(), Vec::new());
    for name in names {
        match remove_one(server, name, scope).await? {
            Some(name) => removed.push(name),
            None => absent.push(name.as_str()),
        }
    }
    if printer.json() {
        printer.value(&json!({ "removed": removed, "missing": absent }))?;
    } else {
        removed.iter().try_for_each(|name| printer.line(name))?;
    }
    if absent.is_empty() { Ok(()) } else { missing(&absent) }
}

fn missing(names: &[&str]) -> Result<()> {
    Err(anyhow!("there is no such volume as `{}`", names.join("`, `")))
        .hint("`coracle volume ls` lists the volumes")
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
        assert_eq!(row(&volume, now), ["data", "abcdefgh", "default", "16.0 KiB", "10.0 MiB", "1", "5m"]);
    }
}
