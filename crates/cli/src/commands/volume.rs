//! `volume ls`, `create`, `inspect` and `rm`: disks that outlive sandboxes.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use domain::Bytes;
use serde_json::json;

use crate::args::VolumeCommand;
use crate::client::{Server, VolumeInfo, refused_with};
use crate::output::{Printer, WithHint};

pub(crate) async fn volume(server: &Server, command: VolumeCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        VolumeCommand::Ls => {
            let volumes = server.volumes().await?;
            printer.list(&volumes, &["name", "used", "size", "sandboxes", "created"], rows(&volumes))?;
        }
        VolumeCommand::Create { name, size } => {
            let made = server.make_volume(&name, size).await?;
            if printer.json() { printer.value(&made)? } else { printer.line(&made.name)? }
        }
        VolumeCommand::Inspect { name } => match find(server, &name).await? {
            Some(volume) => inspect(&volume, printer)?,
            None => missing(&[&name])?,
        },
        VolumeCommand::Rm { names } => remove(server, &names, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A volume by its name or, where there is none of that name, by its id or the beginning of it.
async fn find(server: &Server, text: &str) -> Result<Option<VolumeInfo>> {
    match server.volume(text).await {
        Ok(volume) => Ok(Some(volume)),
        Err(error) if refused_with(&error, http::StatusCode::NOT_FOUND) => {
            match server.resolve_volume(text).await? {
                Some(name) => server.volume(&name).await.map(Some),
                None => Ok(None),
            }
        }
        Err(error) => Err(error),
    }
}

/// Removes a volume that is named as [`find`] takes it; gives its name if it was there.
async fn remove_one(server: &Server, text: &str) -> Result<Option<String>> {
    if server.remove_volume(text).await? {
        return Ok(Some(text.to_owned()));
    }
    match server.resolve_volume(text).await? {
        Some(name) if server.remove_volume(&name).await? => Ok(Some(name)),
        _ => Ok(None),
    }
}

fn rows(volumes: &[VolumeInfo]) -> Vec<Vec<String>> {
    let row = |volume: &VolumeInfo| {
        let used = volume.used_bytes.map_or_else(|| "?".to_owned(), |used| Bytes(used).to_string());
        let (size, users) = (Bytes(volume.size_bytes).to_string(), volume.sandboxes.len().to_string());
        vec![volume.name.clone(), used, size, users, volume.created_at.clone()]
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
async fn remove(server: &Server, names: &[String], printer: &Printer) -> Result<()> {
    let (mut removed, mut absent) = (Vec::new(), Vec::new());
    for name in names {
        match remove_one(server, name).await? {
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
