//! `policy` and `net log`: what a sandbox may reach, and what it tried.

use std::process::ExitCode;

use anyhow::{Context, Result};
use domain::{NetworkPolicy, PolicyAction};
use serde_json::Value;

use crate::args::{NetCommand, NetLogArgs, PolicyCommand, SetPolicyArgs};
use crate::client::{PolicyStatus, ServerClient};
use crate::output::{Printer, format_bytes};

pub(crate) async fn run_policy_command(
    server: &ServerClient,
    command: PolicyCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    let status = match &command {
        PolicyCommand::Get(args) => {
            let id = server.resolve_sandbox(&args.id).await?;
            server.network_policy(&id).await?
        }
        PolicyCommand::Set(args) => {
            let id = server.resolve_sandbox(&args.id).await?;
            server.replace_policy(&id, &build_policy(args)?).await?
        }
        PolicyCommand::Allow(args) => {
            let id = server.resolve_sandbox(&args.id).await?;
            server.add_policy_rules(&id, PolicyAction::Allow, &args.targets).await?
        }
        PolicyCommand::Deny(args) => {
            let id = server.resolve_sandbox(&args.id).await?;
            server.add_policy_rules(&id, PolicyAction::Deny, &args.targets).await?
        }
        PolicyCommand::Rm(args) => {
            let id = server.resolve_sandbox(&args.id).await?;
            server.remove_policy_rules(&id, &args.targets).await?
        }
    };
    if printer.is_json() {
        printer.print_json(&status)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let (PolicyCommand::Rm(_), Some(reason)) = (&command, &status.reason) {
        printer.remark(reason);
    }
    policy_lines(&status).iter().try_for_each(|line| printer.print_line(line))?;
    Ok(ExitCode::SUCCESS)
}

fn build_policy(args: &SetPolicyArgs) -> Result<NetworkPolicy> {
    let policy = NetworkPolicy::from_lists(&args.allow, &args.deny)?;
    match args.default {
        Some(default) => Ok(NetworkPolicy::new(policy.rules().to_vec(), default.into())?),
        None => Ok(policy),
    }
}

/// One line for each rule, in the order in which they decide, and one for all else.
fn policy_lines(status: &PolicyStatus) -> Vec<String> {
    let policy = &status.policy;
    let rest = if policy.egress.is_empty() { "everything" } else { "everything else" };
    let rules = policy.egress.iter().map(|rule| format!("{} {}", rule.action, rule.target));
    rules.chain([format!("{} {rest}", policy.default_action)]).collect()
}

pub(crate) async fn run_net_command(
    server: &ServerClient,
    command: NetCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    let NetCommand::Log(args) = command;
    match args.follow {
        true => follow_log(server, &args, printer).await?,
        false => print_log(server, &args, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn print_log(server: &ServerClient, args: &NetLogArgs, printer: &Printer) -> Result<()> {
    let id = server.resolve_sandbox(&args.id).await?;
    let mut after = args.after;
    loop {
        let page = server.network_log(&id, after, args.denied).await?;
        // The log is bounded, so its beginning may be gone; only a gap after a known record is worth a warning.
        if after > 0 && page.dropped > 0 {
            warn_of_gap(page.dropped, printer);
        }
        page.records.iter().try_for_each(|record| print_record(record, printer))?;
        if page.records.is_empty() || page.next == after {
            return Ok(());
        }
        after = page.next;
    }
}

async fn follow_log(server: &ServerClient, args: &NetLogArgs, printer: &Printer) -> Result<()> {
    let id = server.resolve_sandbox(&args.id).await?;
    let mut feed = server.follow_network_log(&id, args.after, args.denied).await?;
    while let Some(event) = feed.next_event().await? {
        let data: Value = serde_json::from_str(&event.data).context("the server sent an odd record")?;
        match event.kind.as_str() {
            "missed" => warn_of_gap(data["count"].as_u64().unwrap_or_default(), printer),
            _ => print_record(&data, printer)?,
        }
    }
    Ok(())
}

fn warn_of_gap(count: u64, printer: &Printer) {
    let records = if count == 1 { "1 record is".to_owned() } else { format!("{count} records are") };
    printer.warn(format!("{records} no longer kept"));
}

fn print_record(record: &Value, printer: &Printer) -> Result<()> {
    match printer.is_json() {
        true => printer.print_json_text(&record.to_string()),
        false => printer.print_line(record_line(record)),
    }
}

/// A record for people. Names come from inside the sandbox.
fn record_line(record: &Value) -> String {
    let text = |name: &str| record[name].as_str().unwrap_or_default();
    let address = match (record["address"].as_str(), record["port"].as_u64()) {
        (Some(address), Some(port)) if address.contains(':') => format!(" [{address}]:{port}"),
        (Some(address), Some(port)) => format!(" {address}:{port}"),
        _ => String::new(),
    };
    let name = record["name"].as_str().map(|name| format!(" {name}")).unwrap_or_default();
    let what = match text("kind") {
        "query" => "name",
        "end" => "ended",
        kind => kind,
    };
    let bytes = |name: &str| format_bytes(record[name].as_u64().unwrap_or_default());
    let end = match text("kind") {
        "end" => {
            let carried = format!("{} sent, {} received", bytes("bytesSent"), bytes("bytesReceived"));
            format!("{}; {carried}", text("reason"))
        }
        _ => text("reason").to_owned(),
    };
    let line =
        format!("{} {} {} {what}{name}{address} ({end})", record["number"], text("time"), text("verdict"));
    line.chars().filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn record_is_one_line_with_its_reason_or_its_bytes() {
        let record = |kind: &str, rest: Value| {
            let mut record = json!({
                "number": 7, "time": "2026-11-15T10:00:00Z", "kind": kind, "verdict": "allow",
                "reason": "allow *.example.org", "bytesSent": 10, "bytesReceived": 2048,
            });
            record
                .as_object_mut()
                .expect("an object")
                .append(&mut rest.as_object().expect("an object").clone());
            record_line(&record)
        };
        let place = json!({"name": "a.example.org", "address": "192.0.2.1", "port": 443});
        let head = "7 2026-11-15T10:00:00Z allow";
        let connection = format!("{head} connection a.example.org 192.0.2.1:443 (allow *.example.org)");
        assert_eq!(record("connection", place.clone()), connection);
        assert!(
            record("end", place)
                .ends_with("192.0.2.1:443 (allow *.example.org; 10 B sent, 2.0 KiB received)")
        );
        let query = json!({"name": "b\u{1b}[2J.org", "verdict": "deny", "reason": "default"});
        assert_eq!(record("query", query), "7 2026-11-15T10:00:00Z deny name b[2J.org (default)");
        let address = json!({"address": "2001:db8::1", "port": 22});
        assert!(record("connection", address).contains(" connection [2001:db8::1]:22 ("));
    }

    #[test]
    fn policy_is_printed_in_the_order_in_which_it_decides() {
        let status = |value: Value| policy_lines(&serde_json::from_value(value).expect("a policy"));
        let rules =
            json!([{"action": "deny", "target": "x.a.org"}, {"action": "allow", "target": "*.a.org"}]);
        let policy = json!({"mode": "enforcing", "policy": {"defaultAction": "deny", "egress": rules}});
        assert_eq!(status(policy), ["deny x.a.org", "allow *.a.org", "deny everything else"]);
        let policy = json!({"mode": "allow_all", "policy": {"defaultAction": "allow", "egress": []}});
        assert_eq!(status(policy), ["allow everything"]);
    }
}
