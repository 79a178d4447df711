//! `image import`, `ls` and `rm`: the images in the state directory of this host.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use backend_local::images;
use serde_json::json;

use crate::args::ImageCommand;
use crate::config::Config;
use crate::output::{Printer, size};

pub(crate) fn image(command: &ImageCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        ImageCommand::Import { name, source, state } => {
            import(&Config::for_host(state)?.state_dir, name, source, printer)?;
        }
        ImageCommand::Ls { state } => list(&Config::for_host(state)?.state_dir, printer)?,
        ImageCommand::Rm { names, state } => remove(&Config::for_host(state)?.state_dir, names, printer)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn import(state_dir: &Path, name: &str, source: &Path, printer: &Printer) -> Result<()> {
    let mut progress = printer.progress(format!("importing {name}"));
    let made = images::import(state_dir, name, source, &mut |detail| progress.say(detail))?;
    drop(progress);
    if printer.json() {
        return printer.value(&made);
    }
    printer.line(format_args!("{} ({})", made.name, size(made.bytes)))
}

fn list(state_dir: &Path, printer: &Printer) -> Result<()> {
    let found = images::list(state_dir)?;
    let rows = found.iter().map(|image| vec![image.name.clone(), image.trees.join(" "), size(image.bytes)]);
    printer.list(&found, &["name", "trees", "size"], rows.collect())
}

/// Removes one after the other; the first that cannot be removed ends it.
fn remove(state_dir: &Path, names: &[String], printer: &Printer) -> Result<()> {
    for name in names {
        images::remove(state_dir, name)?;
        if !printer.json() {
            printer.line(name)?;
        }
    }
    if printer.json() { printer.value(&json!({ "removed": names })) } else { Ok(()) }
}
