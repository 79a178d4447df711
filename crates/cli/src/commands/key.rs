//! `key create`, `ls` and `rm`: who may call the server.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use serde_json::json;

use crate::args::KeyCommand;
use crate::client::{KeyInfo, Server};
use crate::output::{Printer, WithHint};

pub(crate) async fn key(server: &Server, command: KeyCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        KeyCommand::Create { owner, expires } => {
            let made = server.issue_key(&owner, expires).await?;
            if printer.json() {
                printer.value(&made)?;
            } else {
                printer.line(made.key.as_deref().unwrap_or_default())?;
                printer.remark(format!("key {} of `{owner}`; it is not shown again", made.id));
            }
        }
        KeyCommand::Ls => {
            let keys = server.keys().await?;
            let never = || "never".to_owned();
            let row = |key: &KeyInfo| {
                let expires = key.expires_at.clone().unwrap_or_else(never);
                vec![key.id.clone(), key.owner.clone(), key.created_at.clone(), expires]
            };
            let rows = keys.iter().map(row).collect();
            printer.list(&keys, &["id", "owner", "created", "expires"], rows)?;
        }
        KeyCommand::Rm { ids, and_sandboxes } => remove(server, &ids, and_sandboxes, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes all that are there; one that is missing is an error in the end.
async fn remove(server: &Server, ids: &[String], and_sandboxes: bool, printer: &Printer) -> Result<()> {
    let (mut removed, mut missing, mut sandboxes) = (Vec::new(), Vec::new(), Vec::new());
    for id in ids {
        let gone = if and_sandboxes {
            let gone = server.revoke_key_and_sandboxes(id).await?;
            gone.map(|gone| sandboxes.extend(gone)).is_some()
        } else {
            server.revoke_key(id).await?
        };
        let list = if gone { &mut removed } else { &mut missing };
        list.push(id.as_str());
    }
    if printer.json() {
        let mut value = json!({ "removed": removed, "missing": missing });
        if and_sandboxes {
            value["removedSandboxes"] = json!(sandboxes);
        }
        printer.value(&value)?;
    } else {
        removed.iter().try_for_each(|id| printer.line(id))?;
        if and_sandboxes {
            printer.remark(format!("{} sandboxes were removed", sandboxes.len()));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such key as `{}`", missing.join("`, `"))).hint("`coracle key ls` lists the keys")
}
