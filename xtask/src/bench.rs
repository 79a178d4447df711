//! The numbers we promise (docs/promises.md), measured once and shown.
//!
//! A missed bar is reported but is not a failure: bars depend on the other load of the machine. Only a
//! `bench` that does not complete is a failure.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::report::{TestReport, say};
use crate::sdk;

pub(crate) fn run_bench(binary: &Path, report: &mut TestReport) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        report.record_skip(
            "bench",
            "only root can enforce all default limits, which the server needs to create sandboxes",
        );
        return Ok(());
    }
    let mut command = Command::new(binary);
    command.args(["bench", "--quick", "--json"]);
    if let Some(libraries) = sdk::ipykernel_directory() {
        command.arg("--ipykernel").arg(libraries);
    }
    let output = command.output().context("could not start `bench`")?;
    // The exit code also reports a missed bar, so the report decides.
    let measured: Value = serde_json::from_slice(&output.stdout).with_context(|| {
        format!("`bench` gave no report: {}", String::from_utf8_lossy(&output.stderr).trim())
    })?;
    print_bars(&measured)?;
    match sdk::bench_sdk(binary, report)? {
        Some(measured) => print_bars(&measured),
        None => Ok(()),
    }
}

fn print_bars(measured: &Value) -> Result<()> {
    for line in format_report(measured)? {
        say(format_args!("{line}"));
    }
    Ok(())
}

/// One line per bar, then the bars that could not be measured.
fn format_report(report: &Value) -> Result<Vec<String>> {
    let bars = report["bars"].as_array().context("the report of `bench` has no bars")?;
    if bars.is_empty() {
        bail!("`bench` measured nothing");
    }
    let mut lines = bars.iter().map(format_bar).collect::<Result<Vec<_>>>()?;
    let absent = report["absent"].as_array().into_iter().flatten();
    lines.extend(absent.filter_map(Value::as_str).map(|why| format!("not measured: {why}")));
    Ok(lines)
}

fn format_bar(bar: &Value) -> Result<String> {
    let text = |key: &str| bar[key].as_str().with_context(|| format!("a bar has no `{key}`"));
    let number = |key: &str| bar[key].as_f64().with_context(|| format!("a bar has no `{key}`"));
    let kept = bar["kept"].as_bool().context("a bar has no verdict")?;
    let verdict = if kept { "kept" } else { "missed on this machine now" };
    let (value, bound) = (number("value")?, number("bound")?);
    Ok(format!("{}: {value:.2} {} (bound {bound:.2}), {verdict}", text("name")?, text("unit")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn missed_bar_is_reported_and_empty_report_is_an_error() {
        let missed =
            json!({"name": "create", "value": 3.5, "bound": 3.0, "unit": "times the floor", "kept": false});
        let report = json!({"times": [], "bars": [missed], "absent": ["nginx"]});
        assert_eq!(
            format_report(&report).expect("a report"),
            ["create: 3.50 times the floor (bound 3.00), missed on this machine now", "not measured: nginx"]
        );
        assert!(format_report(&json!({"bars": []})).is_err());
        assert!(format_report(&json!({"bars": [{"name": "create"}]})).is_err());
    }
}
