//! `doctor`: the features of this host, the protections that result, and how to get what is missing.

mod image;

use std::process::ExitCode;

use anyhow::Result;
use launcher::probe::{self, CheckStatus, HostCheck, ProbeReport};

use crate::args::DoctorArgs;
use crate::config::Config;
use crate::output::Printer;

/// The exit code says whether sandboxes can run.
pub(crate) fn run_doctor(args: &DoctorArgs, printer: &Printer) -> Result<ExitCode> {
    if let Some(image) = &args.image {
        return image::describe_image(image, &args.state, printer);
    }
    let config = Config::for_host(&args.state)?;
    let report =
        probe::probe_host(&config.state_dir, config.free_space_floor, config.uid_base, &config.network);
    if printer.is_json() {
        printer.print_json(&report)?;
    } else {
        print_report(&report, printer)?;
    }
    Ok(if report.sandboxes_can_run { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_report(report: &ProbeReport, printer: &Printer) -> Result<()> {
    let row = |check: &HostCheck| {
        vec![status_word(check.status).to_owned(), check.name.clone(), check.detail.clone()]
    };
    printer.print_table(&["", "check", "found"], report.checks.iter().map(row).collect())?;
    printer.print_line("")?;
    let rows = report.enforced.iter().map(|measure| {
        vec![measure.what.clone(), measure.by.clone().unwrap_or_else(|| "not enforced".to_owned())]
    });
    printer.print_table(&["limit", "held by"], rows.collect())?;
    let mut explained: Option<&HostCheck> = None;
    for check in report.checks.iter().filter(|check| check.status != CheckStatus::Ok) {
        printer.print_line(format_args!("\n{}: {}", check.name, check.consequence))?;
        match (&check.fix, explained) {
            (Some(fix), Some(before)) if before.fix.as_ref() == Some(fix) => {
                printer.print_line(format_args!("  hint: as for `{}`", before.name))?;
            }
            (Some(fix), _) => {
                printer.print_line(format_args!("  hint: {}", fix.replace('\n', "\n    ")))?;
                explained = Some(check);
            }
            (None, _) => {}
        }
    }
    printer.print_line(format_args!("\n{}", verdict(report)))
}

fn status_word(status: CheckStatus) -> &'static str {
    match status {
        CheckStatus::Ok => "ok",
        CheckStatus::Weaker => "weaker",
        CheckStatus::Missing => "MISSING",
    }
}

fn verdict(report: &ProbeReport) -> &'static str {
    match (report.sandboxes_can_run, report.rootless) {
        (true, false) => "Sandboxes can run here.",
        (true, true) => "Sandboxes can run here as an ordinary user, with what is weaker above.",
        (false, _) => "Sandboxes cannot run here until what is missing is mended.",
    }
}
