//! `inspect`, `top` and `events`: looking at sandboxes without touching them.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};

use crate::args::{EventsArgs, TopArgs, UsageArgs};
use crate::client::{Hour, Report, Sample, SandboxRef, Server, UsedImage};
use crate::output::{Printer, WithHint, size};

pub(crate) async fn inspect(server: &Server, sandbox: &SandboxRef, printer: &Printer) -> Result<ExitCode> {
    let id = &server.resolve(sandbox).await?;
    let Some(report) = server.report(id).await? else {
        return Err(anyhow!("there is no such sandbox as `{id}`")).hint("`coracle ls` lists the sandboxes");
    };
    if printer.json() {
        printer.value(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let image = match &report.image {
        UsedImage { stand_in: Some(stand_in), .. } => stand_in.clone(),
        image if image.requested == image.used => image.used.clone(),
        image => format!("{} (for {})", image.used, image.requested),
    };
    let head = [("id", report.id), ("phase", report.phase), ("owner", report.owner), ("image", image)];
    let head = head.map(|(name, value)| vec![name.to_owned(), value]).into_iter();
    let measures = report.in_force.into_iter().map(|(name, value)| vec![name, value]);
    let usage = report.usage.into_iter().map(|(name, amount)| {
        let shown = if name.ends_with("Bytes") { size(amount) } else { amount.to_string() };
        vec![name, shown]
    });
    let hooks = report.rest.get("hooks").and_then(Value::as_array).into_iter().flatten().map(hook);
    printer.table(&["what", "value"], head.chain(measures).chain(usage).chain(hooks).collect())?;
    for sentence in &report.weaker {
        printer.warn(sentence);
    }
    Ok(ExitCode::SUCCESS)
}

/// A hook by the clock and how its last run ended.
fn hook(hook: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let last = &hook["last"];
    let ended = match &last["exit"] {
        Value::Null if last.is_null() => "not run yet".to_owned(),
        Value::Null => format!("runs since {}", text(&last["began"])),
        exit => format!("{} at {}", text(exit), text(&last["began"])),
    };
    vec![format!("hook {}", text(&hook["name"])), format!("{}: {ended}", text(&hook["schedule"]))]
}

/// What one look saw of the processor time of each sandbox.
type Times = BTreeMap<String, (Instant, u64)>;

pub(crate) async fn top(server: &Server, args: &TopArgs, printer: &Printer) -> Result<ExitCode> {
    let mut before = Times::new();
    look(server, &mut before).await?;
    loop {
        tokio::time::sleep(args.every.max(Duration::from_millis(100))).await;
        let seen = look(server, &mut before).await?;
        let value: Vec<Value> = seen.iter().map(|(report, cpus)| told(report, *cpus)).collect();
        if std::io::stdout().is_terminal() && !printer.json() && !args.once {
            printer.raw(b"\x1b[H\x1b[2J")?;
        }
        let rows = seen.iter().map(|(report, cpus)| row(report, *cpus)).collect();
        printer.list(&value, &["id", "phase", "cpu", "memory", "pids", "disk"], rows)?;
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Each sandbox and how many cores it has used since the look before.
async fn look(server: &Server, before: &mut Times) -> Result<Vec<(Report, Option<f64>)>> {
    let mut seen = Vec::new();
    let mut now = Times::new();
    let reports = server.reports().await?;
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

fn told(report: &Report, cores: Option<f64>) -> Value {
    json!({ "id": report.id, "phase": report.phase, "cores": cores, "usage": report.usage })
}

fn row(report: &Report, cores: Option<f64>) -> Vec<String> {
    let amount = |name: &str, limit: &str, show: &dyn Fn(u64) -> String| {
        let shown = |name: &str| report.usage.get(name).map(|amount| show(*amount));
        match (shown(name), shown(limit)) {
            (Some(used), Some(limit)) => format!("{used} of {limit}"),
            (Some(used), None) => used,
            _ => "?".to_owned(),
        }
    };
    vec![
        report.id.clone(),
        report.phase.clone(),
        cores.map_or("?".to_owned(), |cores| format!("{:.0}%", cores * 100.0)),
        amount("memoryBytes", "memoryLimitBytes", &size),
        amount("pids", "", &|count| count.to_string()),
        amount("diskBytes", "diskLimitBytes", &size),
    ]
}

/// What was used: by every owner in the last hours, or by one sandbox, sample by sample.
pub(crate) async fn usage(server: &Server, args: &UsageArgs, printer: &Printer) -> Result<ExitCode> {
    match &args.id {
        None => show_hours(&server.hours(args.hours).await?, printer)?,
        Some(sandbox) => match server.samples(&server.resolve(sandbox).await?).await? {
            Some(samples) => show_samples(&samples, printer)?,
            None => {
                return Err(anyhow!("there is no such sandbox as `{sandbox}`"))
                    .hint("`coracle ls` lists the sandboxes");
            }
        },
    }
    Ok(ExitCode::SUCCESS)
}

fn show_hours(hours: &[Hour], printer: &Printer) -> Result<()> {
    let seconds = |millis: u64| format!("{}.{:01} s", millis / 1000, millis % 1000 / 100);
    let row = |hour: &Hour| {
        vec![
            hour.start.clone(),
            hour.owner.clone(),
            hour.created.to_string(),
            seconds(hour.alive_millis),
            seconds(hour.cpu_micros / 1000),
            // What all of them together used on average, had it been spread over the hour.
            size(hour.memory_byte_seconds / 3600),
        ]
    };
    let columns = ["hour", "owner", "created", "alive", "cpu", "memory, average"];
    printer.list(hours, &columns, hours.iter().map(row).collect())
}

fn show_samples(samples: &[Sample], printer: &Printer) -> Result<()> {
    let amount = |sample: &Sample, name: &str| sample.usage.get(name).copied();
    let row = |sample: &Sample| {
        let shown = |name: &str| amount(sample, name).map_or("?".to_owned(), size);
        let cpu =
            amount(sample, "cpuMicros").map_or("?".to_owned(), |micros| format!("{} ms", micros / 1000));
        let pids = amount(sample, "pids").map_or("?".to_owned(), |count| count.to_string());
        vec![sample.time.clone(), cpu, shown("memoryBytes"), pids, shown("diskBytes")]
    };
    printer.list(
        samples,
        &["time", "cpu so far", "memory", "pids", "disk"],
        samples.iter().map(row).collect(),
    )
}

/// One line for each; with `--json` the data as the server sent it, an object a line.
pub(crate) async fn events(server: &Server, args: &EventsArgs, printer: &Printer) -> Result<ExitCode> {
    let mut feed = server.events(args.after.unwrap_or(0), args.follow).await?;
    while let Some(event) = feed.next().await? {
        if printer.json() {
            printer.line(&event.data)?;
            continue;
        }
        let data: Value = serde_json::from_str(&event.data).context("the server sent an odd event")?;
        let text = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
        if event.kind == "missed" {
            printer.warn(format!("events {} to {} are no longer remembered", data["after"], data["through"]));
            continue;
        }
        let why = data["cause"].as_str().map(|cause| format!(" ({cause})")).unwrap_or_default();
        printer.line(format_args!(
            "{} {} {} {}{why}",
            data["id"],
            text("time"),
            text("sandbox"),
            text("phase")
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
