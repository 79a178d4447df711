//! `key create`, `ls` and `rm`: the keys with which the server can be called.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use jiff::Timestamp;
use serde_json::json;

use super::sandboxes::{format_age, format_expiry};
use crate::args::KeyCommand;
use crate::client::{KeyInfo, RevokedKey, ServerClient};
use crate::output::{Printer, WithHint, format_count};

pub(crate) async fn run_key_command(
    server: &ServerClient,
    command: KeyCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    match command {
        KeyCommand::Create { owner, expires } => {
            let made = server.issue_key(&owner, expires).await?;
            if printer.is_json() {
                printer.print_json(&made)?;
            } else {
                printer.print_line(made.key.as_deref().unwrap_or_default())?;
                printer.remark(format!("key {} of `{owner}`; it is not shown again", made.id));
            }
        }
        KeyCommand::Ls => {
            let keys = server.list_keys().await?;
            let now = Timestamp::now();
            let row = |key: &KeyInfo| {
                let (age, expires) =
                    (format_age(&key.created_at, now), format_expiry(key.expires_at.as_deref(), now));
                vec![key.id.clone(), key.owner.clone(), age, expires]
            };
            let rows = keys.iter().map(row).collect();
            printer.print_json_or_table(&keys, &["id", "owner", "age", "expires"], rows)?;
        }
        KeyCommand::Rm { ids, and_sandboxes } => remove_keys(server, &ids, and_sandboxes, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes all keys that exist; a missing one is reported as an error at the end.
async fn remove_keys(
    server: &ServerClient,
    texts: &[String],
    and_sandboxes: bool,
    printer: &Printer,
) -> Result<()> {
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
    if printer.is_json() {
        let mut value = json!({ "removed": removed, "missing": missing });
        if and_sandboxes {
            let sandboxes = revoked.iter().flat_map(|key| &key.removed_sandboxes);
            value["removedSandboxes"] = sandboxes.cloned().collect();
        }
        printer.print_json(&value)?;
    } else {
        removed.iter().try_for_each(|id| printer.print_line(id))?;
        describe_revocations(&revoked).iter().for_each(|text| printer.remark(text));
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such key as `{}`", missing.join("`, `")))
        .with_hint("`coracle key ls` lists the keys")
}

/// Returns a message for each owner whose keys were revoked about its sandboxes. If several keys of one
/// owner were revoked, only the last revocation counts: until then there was another key.
fn describe_revocations(revoked: &[RevokedKey]) -> Vec<String> {
    let newest = |(index, key): &(usize, &RevokedKey)| {
        revoked[index + 1..].iter().all(|later| later.owner != key.owner)
    };
    let about = |(_, key): (usize, &RevokedKey)| {
        let (owner, others) = (&key.owner, key.other_valid_keys);
        if key.operator {
            format!("owner `{owner}` is the operator of the server: its sandboxes stay")
        } else if others > 0 {
            format!(
                "owner `{owner}` still has {}: its sandboxes stay",
                format_count(others, "other valid key")
            )
        } else {
            let count = format_count(key.removed_sandboxes.len(), "sandbox");
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
            describe_revocations(&all),
            [
                "owner `b` still has 2 other valid keys: its sandboxes stay",
                "owner `default` is the operator of the server: its sandboxes stay",
                "owner `a` has no valid key left: 1 sandbox removed",
                "owner `c` has no valid key left: 2 sandboxes removed",
            ]
        );
        assert!(describe_revocations(&[]).is_empty());
    }
}
