//! `image pull`, `import`, `ls`, `inspect`, `rm` and `gc`: the images in the state directory of this host.

mod pull;
mod shown;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use backend_local::images::{self, Existing, ImageError, Import, Imported, Source, Unpacker};
use linux::spawn::SingleThread;
use serde_json::json;

use self::shown::Shown;
use crate::args::ImageCommand;
use crate::config::Config;
use crate::output::{Printer, size};

pub(crate) fn image(command: &ImageCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        ImageCommand::Import { name, source, state } => {
            import(&Config::for_host(state)?, name, source, printer)?;
        }
        ImageCommand::Pull { name, username, password_stdin: _, state } => {
            pull::pull(&Config::for_host(state)?, name, username.as_deref(), printer)?;
        }
        ImageCommand::Ls { state } => list(&Config::for_host(state)?.state_dir, printer)?,
        ImageCommand::Inspect { name, state } => {
            inspect(&Config::for_host(state)?.state_dir, name, printer)?;
        }
        ImageCommand::Rm { names, state } => remove(&Config::for_host(state)?.state_dir, names, printer)?,
        ImageCommand::Gc { state } => collect(&Config::for_host(state)?, printer)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn import(config: &Config, name: &str, source: &Path, printer: &Printer) -> Result<()> {
    let opened = Source::open(source)?;
    let most = config.images.max_bytes.map(|most| most.0);
    let wish = Import { name, source: opened, wanted: None, existing: Existing::Refuse, most };
    take_in(config, wish, printer).with_context(|| format!("`{}` is not imported", source.display()))
}

/// Has an image unpacked and kept, makes room if it is one too many, and says what it is.
fn take_in(config: &Config, wish: Import<'_>, printer: &Printer) -> Result<()> {
    let thread = SingleThread::prove().context("this process has threads")?;
    let mut progress = printer.progress(format!("unpacking {}", wish.name));
    let unpacker = Unpacker::Worker(&thread);
    let Imported { record: made, gone } =
        images::import(&config.state_dir, wish, unpacker, &mut |detail| progress.say(detail))?;
    drop(progress);
    for gone in gone.images {
        printer.warn(format_args!("`{gone}` is removed to make room: `images.max_bytes` was passed"));
    }
    if printer.json() {
        return printer.value(&Shown::of(&made, None));
    }
    printer.line(format_args!("{} ({})", made.name, size(made.bytes())))
}

fn list(state_dir: &Path, printer: &Printer) -> Result<()> {
    let found = images::records(state_dir)?;
    let mut all = vec![Shown::host()];
    all.extend(found.iter().map(|(record, used)| Shown::of(record, Some(*used))));
    let rows = all.iter().map(|image| {
        let layers = image.layers.len().to_string();
        vec![image.name.clone(), layers, size(image.bytes), image.short_digest(), image.last_used()]
    });
    printer.list(&all, &["name", "layers", "size", "digest", "last used"], rows.collect())
}

fn inspect(state_dir: &Path, name: &str, printer: &Printer) -> Result<()> {
    let found = images::find(state_dir, name)?.ok_or_else(|| ImageError::Unknown(name.to_owned()))?;
    let shown = Shown::of(&found, None);
    if printer.json() { printer.value(&shown) } else { printer.line(shown) }
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

fn collect(config: &Config, printer: &Printer) -> Result<()> {
    let most = config.images.max_bytes.map(|most| most.0);
    let gone = images::collect(&config.state_dir, most)?;
    if printer.json() {
        return printer.value(&gone);
    }
    for image in &gone.images {
        printer.line(image)?;
    }
    printer.line(format_args!("{} layers removed, {} freed", gone.layers, size(gone.bytes)))
}
