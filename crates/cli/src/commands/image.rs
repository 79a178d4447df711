//! `image pull`, `import`, `commit`, `ls`, `inspect`, `rm` and `gc`: the images of a server, or those in the state
//! directory of this host where there is no server or the directory was named.

mod archive;
mod pull;
mod remote;
mod shown;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use backend_local::images::{self, Below, Existing, ImageError, Import, Imported, Source, Unpacker};
use linux::spawn::SingleThread;
use serde_json::json;

use self::shown::Shown;
use crate::args::{ImageCommand, StateArgs};
use crate::client::Server;
use crate::config::Config;
use crate::output::{Printer, WithHint, size};

/// Runs an image command, on the server or on the state directory. With the default address
/// (`is_default`) it is not an error if no server answers.
pub(crate) fn image(
    server: &Server,
    is_default: bool,
    command: &ImageCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    let Some(state) = state_of(command) else {
        return super::block_on(remote::run(server, command, printer));
    };
    if state.state_dir.is_none() && state.config.is_none() {
        if !is_default || is_there(server)? {
            return super::block_on(remote::run(server, command, printer));
        }
        let directory = Config::for_host(state)?.state_dir;
        let directory = directory.display();
        printer.remark(format_args!("no server answers; working on the state directory `{directory}`"));
    }
    local(command, printer)
}

/// Asks in a runtime that is gone afterwards: unpacking needs a process without threads.
fn is_there(server: &Server) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("could not start the event loop")?.block_on(server.is_there())
}

/// The state directory arguments of a command; `None` for a command that only a server can run.
fn state_of(command: &ImageCommand) -> Option<&StateArgs> {
    match command {
        ImageCommand::Import { state, .. }
        | ImageCommand::Pull { state, .. }
        | ImageCommand::Ls { state }
        | ImageCommand::Inspect { state, .. }
        | ImageCommand::Rm { state, .. }
        | ImageCommand::Gc { state } => Some(state),
        ImageCommand::Commit { .. } => None,
    }
}

fn local(command: &ImageCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        ImageCommand::Commit { .. } => anyhow::bail!("only a server makes images of sandboxes"),
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
    let wish = Import {
        name,
        source: opened,
        wanted: None,
        existing: Existing::Refuse,
        most,
        below: Below::Nothing,
    };
    take_in(config, wish, printer).with_context(|| format!("`{}` is not imported", source.display()))
}

/// Unpacks and stores an image, removes others if there are too many, and prints the result.
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
    table(&all, printer)
}

fn table(all: &[Shown], printer: &Printer) -> Result<()> {
    let rows = all.iter().map(|image| {
        let layers = image.layers.len().to_string();
        vec![image.name.clone(), layers, size(image.bytes), image.short_digest(), image.last_used()]
    });
    printer.list(all, &["name", "layers", "size", "digest", "last used"], rows.collect())
}

fn inspect(state_dir: &Path, name: &str, printer: &Printer) -> Result<()> {
    let found = images::find(state_dir, name)?.ok_or_else(|| ImageError::Unknown(name.to_owned()))?;
    let shown = Shown::of(&found, None);
    if printer.json() { printer.value(&shown) } else { printer.line(shown) }
}

/// Removes the images in order; stops at the first that cannot be removed.
fn remove(state_dir: &Path, names: &[String], printer: &Printer) -> Result<()> {
    for name in names {
        match images::remove(state_dir, name) {
            Err(error @ ImageError::Unknown(_)) => {
                return Err(anyhow!(error.to_string())).hint("`coracle image ls` lists the images");
            }
            removed => drop(removed?),
        }
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
    freed(&gone.images, gone.layers, gone.bytes, printer)
}

fn freed(images: &[String], layers: usize, bytes: u64, printer: &Printer) -> Result<()> {
    for image in images {
        printer.line(image)?;
    }
    printer.line(format_args!("{layers} layers removed, {} freed", size(bytes)))
}
