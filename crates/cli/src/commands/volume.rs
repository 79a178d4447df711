//! `volume ls`, `create`, `inspect` and `rm`: disks that outlive sandboxes.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use domain::Bytes;
use serde_json::json;

use crate::args::VolumeCommand;
use crate::client::{OwnerScope, Server, VolumeInfo, VolumeKey, refused_with};
use crate::output::{Printer, WithHint};

pub(crate) async fn volume(server: &Server, command: VolumeCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        VolumeCommand::Ls { owners } => {
            let volumes = server.volumes(&owners.scope()).await?;
            let columns = ["name", "owner", "used", "size", "sandboxes", "created"];
            printer.list(&volumes, &columns, rows(&volumes))?;
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

/// A volume by its name or, where there is none of that name, by its id or the beginning of it.
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

/// Removes a volume that is named as [`find`] takes it; gives its name if it was there.
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

/// The volume whose name is the text, if it is known whose it is.
fn exact(text: &str, scope: &OwnerScope) -> Option<VolumeKey> {
    let name = text.to_owned();
    match scope {
        OwnerScope::Own => Some(VolumeKey { name, owner: None }),
        OwnerScope::Owner(owner) => Some(VolumeKey { name, owner: Some(owner.clone()) }),
        OwnerScope::All => None,
    }
}

fn rows(volumes: &[VolumeInfo]) -> Vec<Vec<String>> {
    let row = |volume: &VolumeInfo| {
        let used = volume.used_bytes.map_or_else(|| "?".to_owned(), |used| Bytes(used).to_string());
        let (size, users) = (Bytes(volume.size_bytes).to_string(), volume.sandboxes.len().to_string());
        vec![volume.name.clone(), volume.owner.clone(), used, size, users, volume.created_at.clone()]
    };
    volumes.iter().map(row).collect()
}

fn inspect(volume: &VolumeInfo, printer: &Printer) -> Result<()> {
    if printer.json() {
        return printer.value(volume);
    }
    let used = volume.used_bytes.map_or_else(|| "?".to_owned(), |used| Bytes(used).to_string());
    let lasts = if volume.deleted_with_sandboxes { "as long as its sandboxes" } else { "until removed" };
    for (name, value) in [
        ("name", volume.name.clone()),
        ("id", volume.id.clone()),
        ("owner", volume.owner.clone()),
        ("size", Bytes(volume.size_bytes).to_string()),
        ("used", used),
        ("lasts", lasts.to_owned()),
        ("created", volume.created_at.clone()),
        ("sandboxes", volume.sandboxes.join(" ")),
    ] {
        printer.line(format!("{name:<10} {value}"))?;
    }
    Ok(())
}

/// Removes all that are there; one that is missing is an error in the end.
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
