//! `key create`, `ls` and `rm`: the keys with which the server can be called.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use jiff::Timestamp;
use serde_json::json;

use super::sandboxes::{age, expiry};
use crate::args::KeyCommand;
use crate::client::{KeyInfo, RevokedKey, Server};
use crate::output::{Printer, WithHint, counted};

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
            let now = Timestamp::now();
            let row = |key: &KeyInfo| {
                let (age, expires) = (age(&key.created_at, now), expiry(key.expires_at.as_deref(), now));
                vec![key.id.clone(), key.owner.clone(), age, expires]
            };
            let rows = keys.iter().map(row).collect();
            printer.list(&keys, &["id", "owner", "age", "expires"], rows)?;
        }
        KeyCommand::Rm { ids, and_sandboxes } => remove(server, &ids, and_sandboxes, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes all keys that exist; a missing one is reported as an error at the end.
async fn remove(server: &Server, texts: &[String], and_sandboxes: bool, printer: &Printer) -> Result<()> {
    let (ids, mut missing) = server.resolve_keys(texts).await?;
    let (mut removed, mut revoked) = (Vec::new(), Vec::new());
    for id in ids {
        let gone = if and_sandboxes {
            let gone = server.revoke_key_and_sandboxes(&id).await?;
            gone.map(|gone| revoked.push(gone)).is_some()
        } else {
            server.revoke_key(&id).await?
        };
        let list = if gone { &mut removed } else { &mut missing };
        list.push(id);
    }
    if printer.json() {
        let mut value = json!({ "removed": removed, "missing": missing });
        if and_sandboxes {
            let sandboxes = revoked.iter().flat_map(|key| &key.removed_sandboxes);
            value["removedSandboxes"] = sandboxes.cloned().collect();
        }
        printer.value(&value)?;
    } else {
        removed.iter().try_for_each(|id| printer.line(id))?;
        about_sandboxes(&revoked).iter().for_each(|text| printer.remark(text));
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such key as `{}`", missing.join("`, `"))).hint("`coracle key ls` lists the keys")
}

/// Returns a message for each owner whose keys were revoked about its sandboxes. If several keys of one
/// owner were revoked, only the last revocation counts: until then there was another key.
fn about_sandboxes(revoked: &[RevokedKey]) -> Vec<String> {
    let newest = |(index, key): &(usize, &RevokedKey)| {
        revoked[index + 1..].iter().all(|later| later.owner != key.owner)
    };
    let about = |(_, key): (usize, &RevokedKey)| {
        let (owner, others) = (&key.owner, key.other_valid_keys);
        if key.operator {
            format!("owner `{owner}` is the operator of the server: its sandboxes stay")
        } else if others > 0 {
            format!("owner `{owner}` still has {}: its sandboxes stay", counted(others, "other valid key"))
        } else {
            let count = counted(key.removed_sandboxes.len(), "sandbox");
            format!("owner `{owner}` has no valid key left: {count} removed")
        }
    };
    revoked.iter().enumerate().filter(newest).map(about).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revoked(owner: &str, others: usize, sandboxes: &[&str]) -> RevokedKey {
        RevokedKey {
            owner: owner.to_owned(),
            operator: owner == "default",
            other_valid_keys: others,
            removed_sandboxes: sandboxes.iter().map(|id| (*id).to_owned()).collect(),
        }
    }

    #[test]
    fn output_says_for_each_owner_why_sandboxes_stay_or_how_many_were_removed() {
        let all = [
            revoked("a", 1, &[]),
            revoked("b", 2, &[]),
            revoked("default", 0, &[]),
            revoked("a", 0, &["x"]),
            revoked("c", 0, &["y", "z"]),
        ];
        assert_eq!(
            about_sandboxes(&all),
            [
                "owner `b` still has 2 other valid keys: its sandboxes stay",
                "owner `default` is the operator of the server: its sandboxes stay",
                "owner `a` has no valid key left: 1 sandbox removed",
                "owner `c` has no valid key left: 2 sandboxes removed",
            ]
        );
        assert!(about_sandboxes(&[]).is_empty());
    }
}
