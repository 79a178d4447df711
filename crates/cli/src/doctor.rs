//! `doctor`: the features of this host, the protections that result, and how to get what is missing.

mod image;

use std::process::ExitCode;

use anyhow::Result;
use launcher::probe::{
    self, CheckStatus, ContainerSpec, HostCheck, ProbeReport, SandboxCapacity, TotalCheck,
};
use launcher::settings::TotalOrigin;

use crate::args::DoctorArgs;
use crate::config::Config;
use crate::output::Printer;

/// The exit code says whether sandboxes can run.
pub(crate) fn run_doctor(args: &DoctorArgs, printer: &Printer) -> Result<ExitCode> {
    if let Some(image) = &args.image {
        return image::describe_image(image, &args.state, printer);
    }
    let config = Config::for_host(&args.state)?;
    let capacity = SandboxCapacity {
        sandboxes: config.limits.max_sandboxes,
        limits: crate::serve::child_settings::default_limits(&config).into(),
        commands: config.limits.max_commands,
    };
    let mut report =
        probe::probe_host(&config.state_dir, config.free_space_floor, config.uid_base, &config.network)
            .with_totals(&config.limits.totals);
    report.host_tables = probe::compare_resources(&capacity);
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
    printer.print_line("")?;
    let rows = report.host_tables.iter().map(|table| {
        let word = if table.hint.is_some() { "too large" } else { "ok" };
        vec![word.to_owned(), table.resource.clone(), table.sandboxes.to_string(), table.host.to_string()]
    });
    printer.print_table(&["", "of the whole host", "all sandboxes may use", "host has"], rows.collect())?;
    for (table, hint) in report.host_tables.iter().filter_map(|table| Some((table, table.hint.as_ref()?))) {
        printer.print_line(format_args!("\n{}: sandboxes may use more than the host has", table.resource))?;
        printer.print_line(format_args!("  hint: {hint}"))?;
    }
    print_totals(report, printer)?;
    let mut explained: Option<&HostCheck> = None;
    let explains = |check: &&HostCheck| matches!(check.status, CheckStatus::Weaker | CheckStatus::Missing);
    for check in report.checks.iter().filter(explains) {
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
    if let Some(spec) = &report.container {
        print_container_spec(spec, report.sandboxes_can_run, printer)?;
    }
    printer.print_line(format_args!("\n{}", verdict(report)))
}

/// Prints the limits of all sandboxes of a server together, if there are any.
fn print_totals(report: &ProbeReport, printer: &Printer) -> Result<()> {
    if report.totals.is_empty() {
        return Ok(());
    }
    let row = |total: &TotalCheck| {
        let origin = match total.origin {
            TotalOrigin::Operator => "the configuration",
            TotalOrigin::Container => "this container",
        };
        let by = total.by.clone().unwrap_or_else(|| "the container alone".to_owned());
        vec![total.what.clone(), total.amount.clone(), origin.to_owned(), by]
    };
    printer.print_line("")?;
    printer.print_table(
        &["all sandboxes of a server", "limit", "set by", "held by"],
        report.totals.iter().map(row).collect(),
    )
}

/// Prints the lines with which this container has to be started.
fn print_container_spec(spec: &ContainerSpec, can_run: bool, printer: &Printer) -> Result<()> {
    let purpose = if can_run { "for what is weaker" } else { "so that sandboxes can run" };
    printer.print_line(format_args!("\nthis is a container; start it like this {purpose}:"))?;
    printer.print_line(format_args!("  docker run {} ...", spec.docker_run))?;
    for (title, lines) in [("compose", &spec.compose), ("Kubernetes", &spec.pod)] {
        printer.print_line(format_args!("  {title}:"))?;
        for line in lines.lines() {
            printer.print_line(format_args!("    {line}"))?;
        }
    }
    Ok(())
}

fn status_word(status: CheckStatus) -> &'static str {
    match status {
        CheckStatus::Ok => "ok",
        CheckStatus::Weaker => "weaker",
        CheckStatus::Missing => "MISSING",
        CheckStatus::Untried => "untried",
    }
}

fn verdict(report: &ProbeReport) -> &'static str {
    match (report.sandboxes_can_run, report.rootless) {
        (true, false) => "Sandboxes can run here.",
        (true, true) => "Sandboxes can run here as an ordinary user, with what is weaker above.",
        (false, _) => "Sandboxes cannot run here until what is missing is mended.",
    }
}
