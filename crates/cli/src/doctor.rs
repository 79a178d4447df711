//! `doctor`: the features of this host, the protections that result, and how to get what is missing.

mod image;

use std::process::ExitCode;

use anyhow::Result;
use backend_local::probe::{self, Check, Report, Status};

use crate::args::DoctorArgs;
use crate::config::Config;
use crate::output::Printer;

/// The exit code says whether sandboxes can run.
pub(crate) fn doctor(args: &DoctorArgs, printer: &Printer) -> Result<ExitCode> {
    if let Some(image) = &args.image {
        return image::describe(image, &args.state, printer);
    }
    let config = Config::for_host(&args.state)?;
    let report = probe::probe(&config.state_dir, config.free_space_floor, config.uid_base, &config.network);
    if printer.json() {
        printer.value(&report)?;
    } else {
        tell(&report, printer)?;
    }
    Ok(if report.sandboxes_can_run { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tell(report: &Report, printer: &Printer) -> Result<()> {
    let row = |check: &Check| vec![word(check.status).to_owned(), check.name.clone(), check.detail.clone()];
    printer.table(&["", "check", "found"], report.checks.iter().map(row).collect())?;
    printer.line("")?;
    let rows = report.enforced.iter().map(|measure| {
        vec![measure.what.clone(), measure.by.clone().unwrap_or_else(|| "not enforced".to_owned())]
    });
    printer.table(&["limit", "held by"], rows.collect())?;
    let mut told: Option<&Check> = None;
    for check in report.checks.iter().filter(|check| check.status != Status::Ok) {
        printer.line(format_args!("\n{}: {}", check.name, check.consequence))?;
        match (&check.fix, told) {
            (Some(fix), Some(before)) if before.fix.as_ref() == Some(fix) => {
                printer.line(format_args!("  hint: as for `{}`", before.name))?;
            }
            (Some(fix), _) => {
                printer.line(format_args!("  hint: {}", fix.replace('\n', "\n    ")))?;
                told = Some(check);
            }
            (None, _) => {}
        }
    }
    printer.line(format_args!("\n{}", verdict(report)))
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Weaker => "weaker",
        Status::Missing => "MISSING",
    }
}

fn verdict(report: &Report) -> &'static str {
    match (report.sandboxes_can_run, report.rootless) {
        (true, false) => "Sandboxes can run here.",
        (true, true) => "Sandboxes can run here as an ordinary user, with what is weaker above.",
        (false, _) => "Sandboxes cannot run here until what is missing is mended.",
    }
}
