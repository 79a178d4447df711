//! `inspect`, `top` and `events`: observing sandboxes without changing them.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::sandboxes::{format_expiry, format_labels, format_time_with_age};
use crate::args::{EventsArgs, TopArgs, UsageArgs};
use crate::client::{
    EventsFrom, HourlyUsage, OwnerScope, SandboxRef, SandboxReport, ServerClient, UsageSample, UsedImage,
};
use crate::output::{Printer, WithHint, format_amount, format_bytes, format_exact_duration};

pub(crate) async fn inspect_sandbox(
    server: &ServerClient,
    sandbox: &SandboxRef,
    scope: &OwnerScope,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = &server.resolve_sandbox_in(sandbox, scope).await?;
    let Some(report) = server.sandbox_report(id).await? else {
        return Err(anyhow!("there is no such sandbox as `{id}`")).with_hint(server.sandboxes_hint(scope));
    };
    if printer.is_json() {
        printer.print_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    printer.print_table(&["what", "value"], inspection_rows(&report, Timestamp::now()))?;
    for sentence in &report.weaker {
        printer.warn(sentence);
    }
    Ok(ExitCode::SUCCESS)
}

/// A report for people: names and units instead of raw values.
fn inspection_rows(report: &SandboxReport, now: Timestamp) -> Vec<Vec<String>> {
    let text = |name: &str| report.rest.get(name).and_then(Value::as_str).map(str::to_owned);
    let in_force = |name: &str| report.in_force.get(name).map(|value| with_units(value));
    let image = match &report.image {
        UsedImage { stand_in: Some(stand_in), .. } => stand_in.clone(),
        image if image.requested == image.used => image.used.clone(),
        image => format!("{} (for {})", image.used, image.requested),
    };
    let idle = report.rest.get("idleTimeoutSeconds").and_then(Value::as_u64);
    let expires = match &report.expires_at {
        Some(at) => format!("{at} ({})", format_expiry(Some(at), now)),
        None => "never".to_owned(),
    };
    let phase = match text("cause").or(text("exit")) {
        Some(why) => format!("{} ({why})", report.phase),
        None => report.phase.clone(),
    };
    let head = [
        ("id", Some(report.id.clone())),
        ("name", report.name.clone()),
        ("labels", Some(format_labels(&report.labels)).filter(|labels| !labels.is_empty())),
        ("owner", Some(report.owner.clone())),
        ("phase", Some(phase)),
        ("image", Some(image)),
        ("snapshot", in_force("snapshot").or_else(|| text("snapshot"))),
        ("pool", in_force("pool").or_else(|| text("pool"))),
        ("created", Some(format_time_with_age(&report.created_at, now))),
        ("expires", Some(expires)),
        ("idle timeout", Some(idle.map_or("none".to_owned(), format_exact_duration))),
        ("on death", text("onDeath")),
    ];
    let policy = report.rest.get("policy").map(policy_text).map(|text| vec!["policy".to_owned(), text]);
    let head = head.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?]));
    // Both are listed as measures, but belong to the settings of the sandbox.
    let measures = report.in_force.iter().filter(|(name, _)| !matches!(name.as_str(), "snapshot" | "pool"));
    let measures = measures.map(|(name, value)| vec![name.clone(), with_units(value)]);
    let hooks = report.rest.get("hooks").and_then(Value::as_array).into_iter().flatten().map(hook_row);
    head.chain(measures).chain(policy).chain(usage_rows(&report.usage)).chain(hooks).collect()
}

/// The policy of a filtered network in a few words; `coracle policy get` prints its rules.
fn policy_text(policy: &Value) -> String {
    let default = policy["defaultAction"].as_str().unwrap_or("deny");
    match policy["rules"].as_array().map_or(0, Vec::len) {
        0 => format!("{default} everything"),
        1 => format!("1 rule, {default} everything else"),
        count => format!("{count} rules, {default} everything else"),
    }
}

/// A measure whose first word may be an amount in the short form of the API, such as `512Mi`.
fn with_units(measure: &str) -> String {
    let (first, rest) = measure.split_once(' ').unwrap_or((measure, ""));
    format!("{} {rest}", format_amount(first)).trim_end().to_owned()
}

/// The current usage of a sandbox, beside its limits.
fn usage_rows(usage: &BTreeMap<String, u64>) -> Vec<Vec<String>> {
    let of = |used: &str, limit: &str, show: &dyn Fn(u64) -> String| {
        let used = show(*usage.get(used)?);
        Some(usage.get(limit).map_or(used.clone(), |limit| format!("{used} of {}", show(*limit))))
    };
    let seconds = |micros: u64| format!("{}.{:02} s", micros / 1_000_000, micros % 1_000_000 / 10_000);
    let rows = [
        ("memory used", of("memoryBytes", "memoryLimitBytes", &format_bytes)),
        ("disk used", of("diskBytes", "diskLimitBytes", &format_bytes)),
        ("cpu time used", of("cpuMicros", "", &seconds)),
        ("processes", of("pids", "", &|count| count.to_string())),
        ("killed for memory", usage.get("oomKills").filter(|count| **count > 0).map(ToString::to_string)),
    ];
    rows.into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect()
}

/// A periodic hook and how its last run ended.
fn hook_row(hook: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let last = &hook["last"];
    let ended = match &last["exit"] {
        Value::Null if last.is_null() => "not run yet".to_owned(),
        Value::Null => format!("runs since {}", text(&last["began"])),
        exit => format!("{} at {}", text(exit), text(&last["began"])),
    };
    vec![format!("hook {}", text(&hook["name"])), format!("{}: {ended}", text(&hook["schedule"]))]
}

/// The processor time of each sandbox in one sample.
type CpuTimes = BTreeMap<String, (Instant, u64)>;

pub(crate) async fn show_live_usage(
    server: &ServerClient,
    args: &TopArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let mut before = CpuTimes::new();
    sample_usage(server, &mut before).await?;
    loop {
        tokio::time::sleep(args.every.max(Duration::from_millis(100))).await;
        let seen = sample_usage(server, &mut before).await?;
        let value: Vec<Value> = seen.iter().map(|(report, cpus)| live_usage_json(report, *cpus)).collect();
        if std::io::stdout().is_terminal() && !printer.is_json() && !args.once {
            printer.print_bytes(b"\x1b[H\x1b[2J")?;
        }
        let rows = seen.iter().map(|(report, cpus)| live_usage_row(report, *cpus)).collect();
        printer.print_json_or_table(
            &value,
            &["id", "name", "owner", "phase", "cpu", "memory", "pids", "disk"],
            rows,
        )?;
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Each sandbox and how many cores it has used since the previous sample.
async fn sample_usage(
    server: &ServerClient,
    before: &mut CpuTimes,
) -> Result<Vec<(SandboxReport, Option<f64>)>> {
    let mut seen = Vec::new();
    let mut now = CpuTimes::new();
    let reports = server.list_reports().await?;
    let moment = Instant::now();
    for report in reports {
        let used = report.usage.get("cpuMicros").copied();
        let cores = used.zip(before.get(&report.id)).map(|(used, (then, former))| {
            let micros = moment.duration_since(*then).as_micros().max(1);
            u32::try_from(used.saturating_sub(*former)).map_or(0.0, f64::from)
                / u32::try_from(micros).map_or(f64::MAX, f64::from)
        });
        now.extend(used.map(|used| (report.id.clone(), (moment, used))));
        seen.push((report, cores));
    }
    *before = now;
    Ok(seen)
}

fn live_usage_json(report: &SandboxReport, cores: Option<f64>) -> Value {
    json!({ "id": report.id, "name": report.name, "owner": report.owner, "phase": report.phase, "cores": cores, "usage": report.usage })
}

fn live_usage_row(report: &SandboxReport, cores: Option<f64>) -> Vec<String> {
    let used_of = |name: &str, limit: &str, show: &dyn Fn(u64) -> String| {
        let shown = |name: &str| report.usage.get(name).map(|amount| show(*amount));
        match (shown(name), shown(limit)) {
            (Some(used), Some(limit)) => format!("{used} of {limit}"),
            (Some(used), None) => used,
            _ => "?".to_owned(),
        }
    };
    vec![
        report.id.clone(),
        report.name.clone().unwrap_or_default(),
        report.owner.clone(),
        report.phase.clone(),
        cores.map_or("?".to_owned(), |cores| format!("{:.0}%", cores * 100.0)),
        used_of("memoryBytes", "memoryLimitBytes", &format_bytes),
        used_of("pids", "", &|count| count.to_string()),
        used_of("diskBytes", "diskLimitBytes", &format_bytes),
    ]
}

/// Resource usage: of every owner in the last hours, or of one sandbox, sample by sample.
pub(crate) async fn show_past_usage(
    server: &ServerClient,
    args: &UsageArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    match &args.id {
        None => show_hours(&server.hourly_usage(args.hours).await?, printer)?,
        Some(sandbox) => match server.usage_samples(&server.resolve_sandbox(sandbox).await?).await? {
            Some(samples) => show_samples(&samples, printer)?,
            None => {
                return Err(anyhow!("there is no such sandbox as `{sandbox}`"))
                    .with_hint(server.sandboxes_hint(&OwnerScope::Own));
            }
        },
    }
    Ok(ExitCode::SUCCESS)
}

fn show_hours(hours: &[HourlyUsage], printer: &Printer) -> Result<()> {
    let seconds = |millis: u64| format!("{}.{:01} s", millis / 1000, millis % 1000 / 100);
    let row = |hour: &HourlyUsage| {
        vec![
            hour.start.clone(),
            hour.owner.clone(),
            hour.created.to_string(),
            seconds(hour.alive_millis),
            seconds(hour.cpu_micros / 1000),
            // The average usage of all of them together over the hour.
            format_bytes(hour.memory_byte_seconds / 3600),
        ]
    };
    let columns = ["hour", "owner", "created", "alive", "cpu", "memory, average"];
    printer.print_json_or_table(hours, &columns, hours.iter().map(row).collect())
}

fn show_samples(samples: &[UsageSample], printer: &Printer) -> Result<()> {
    let amount = |sample: &UsageSample, name: &str| sample.usage.get(name).copied();
    let row = |sample: &UsageSample| {
        let shown = |name: &str| amount(sample, name).map_or("?".to_owned(), format_bytes);
        let cpu =
            amount(sample, "cpuMicros").map_or("?".to_owned(), |micros| format!("{} ms", micros / 1000));
        let pids = amount(sample, "pids").map_or("?".to_owned(), |count| count.to_string());
        vec![sample.time.clone(), cpu, shown("memoryBytes"), pids, shown("diskBytes")]
    };
    printer.print_json_or_table(
        samples,
        &["time", "cpu so far", "memory", "pids", "disk"],
        samples.iter().map(row).collect(),
    )
}

/// Prints one line per event; with `--json`, the data as the server sent it, one object per line.
pub(crate) async fn show_events(
    server: &ServerClient,
    args: &EventsArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let from = args.tail.map_or(EventsFrom::After(args.after.unwrap_or(0)), EventsFrom::Last);
    let mut feed = server.open_event_feed(from, args.follow).await?;
    while let Some(event) = feed.next_event().await? {
        if printer.is_json() {
            printer.print_json_text(&event.data)?;
            continue;
        }
        let data: Value = serde_json::from_str(&event.data).context("the server sent an odd event")?;
        let text = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
        if event.kind == "missed" {
            printer.warn(format!("events {} to {} are no longer remembered", data["after"], data["through"]));
            continue;
        }
        if event.kind == "operator" {
            let (owner, subject) = (text("owner"), text("subject"));
            let act = format!("{} by the operator", text("operator"));
            let (id, time, kind) = (&data["id"], text("time"), text("kind"));
            printer.print_line(format_args!("{id} {time} {owner} {kind} {subject} {act}"))?;
            continue;
        }
        let why = data["cause"].as_str().map(|cause| format!(" ({cause})")).unwrap_or_default();
        printer.print_line(format_args!(
            "{} {} {} {} {}{why}",
            data["id"],
            text("time"),
            text("owner"),
            text("sandbox"),
            text("phase")
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inspection_has_names_and_units() {
        let report: SandboxReport = serde_json::from_value(json!({
            "id": "abcdefghijklmnopqrst", "name": "web", "phase": "running", "owner": "default",
            "image": {"requested": "python:3.12", "used": "host"}, "labels": {"team": "search"},
            "createdAt": "2026-11-15T10:00:00Z", "expiresAt": "2026-11-15T11:00:00Z",
            "idleTimeoutSeconds": 5400, "onDeath": "replace", "snapshot": "s", "pool": "p",
            "inForce": {"memory": "512Mi by cgroup", "snapshot": "16Ki of s, copied", "pool": "p"},
            "usage": {
                "memoryBytes": 10 << 20, "memoryLimitBytes": 512 << 20, "cpuMicros": 1_230_000,
                "cpuLimitMillis": 500, "pids": 3, "oomKills": 0,
            },
        }))
        .expect("it reads");
        let now = "2026-11-15T10:05:00Z".parse().expect("a time");
        let shown: Vec<(String, String)> =
            inspection_rows(&report, now).into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
        let expected = [
            ("id", "abcdefghijklmnopqrst"),
            ("name", "web"),
            ("labels", "team=search"),
            ("owner", "default"),
            ("phase", "running"),
            ("image", "host (for python:3.12)"),
            ("snapshot", "16.0 KiB of s, copied"),
            ("pool", "p"),
            ("created", "2026-11-15T10:00:00Z (5m ago)"),
            ("expires", "2026-11-15T11:00:00Z (in 55m)"),
            ("idle timeout", "1h30m"),
            ("on death", "replace"),
            ("memory", "512.0 MiB by cgroup"),
            ("memory used", "10.0 MiB of 512.0 MiB"),
            ("cpu time used", "1.23 s"),
            ("processes", "3"),
        ];
        let expected: Vec<(String, String)> =
            expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        assert_eq!(shown, expected);
    }
}
