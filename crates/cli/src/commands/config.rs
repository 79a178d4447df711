//! `coracle config check` and `coracle config show`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use crate::args::{ConfigCheckArgs, ConfigCommand, ConfigShowArgs, StateArgs};
use crate::config::{Config, SettingSource};
use crate::output::Printer;

pub(crate) fn run_config_command(command: &ConfigCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        ConfigCommand::Check(args) => check_config(args, printer)?,
        ConfigCommand::Show(args) => show_config(args, printer)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn check_config(args: &ConfigCheckArgs, printer: &Printer) -> Result<()> {
    let state = StateArgs { config: args.file.clone(), ..StateArgs::default() };
    let (config, layers) = Config::with_layers(&state, None)?;
    if let Some(file) = &layers.file {
        let has_secret = |entry: &crate::config::SettingEntry| {
            entry.is_secret() && layers.source(&entry.path) == SettingSource::File
        };
        if config.entries().iter().any(has_secret) && is_readable_by_others(file) {
            printer.warn(format_args!(
                "`{0}` holds a key and other users can read it; `chmod 600 {0}` closes it",
                file.display()
            ));
        }
    }
    if printer.is_json() {
        return printer.print_json(&json!({ "file": layers.file, "valid": true }));
    }
    match &layers.file {
        Some(file) => printer.print_line(format_args!("`{}` is valid", file.display())),
        None => {
            printer.print_line("there is no configuration file; the defaults and the environment are valid")
        }
    }
}

/// The file was just read, so if its metadata cannot be read it was removed meanwhile.
fn is_readable_by_others(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|facts| facts.permissions().mode() & 0o044 != 0)
}

fn show_config(args: &ConfigShowArgs, printer: &Printer) -> Result<()> {
    let (config, layers) = Config::with_layers(&args.state, None)?;
    let entries = config.entries().into_iter().map(|entry| {
        let source = layers.source(&entry.path);
        (entry, source)
    });
    let entries: Vec<_> =
        entries.filter(|(_, source)| !args.changed || *source != SettingSource::Default).collect();
    let settings: Vec<_> = entries
        .iter()
        .map(|(entry, source)| json!({ "name": entry.name(), "value": entry.visible_value(), "source": source }))
        .collect();
    let rows =
        entries.iter().map(|(entry, source)| vec![entry.name(), entry.visible_text(), source.to_string()]);
    if !printer.is_json()
        && let Some(file) = &layers.file
    {
        printer.note_on_terminal(format_args!("file: {}", file.display()));
    }
    let value = json!({ "file": layers.file, "settings": settings });
    printer.print_json_or_table(&value, &["setting", "value", "source"], rows.collect())
}
