//! `image pull`, `import`, `commit`, `ls`, `inspect`, `rm` and `gc`: the images of a server, or those in the state
//! directory of this host where there is no server or the directory was named.

mod archive;
mod description;
mod pull;
mod remote;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use launcher::images::{
    self, ExistingImagePolicy, ImageError, ImageImport, ImportBase, ImportSource, ImportedImage, UnpackMode,
};
use linux::spawn::SingleThread;
use serde_json::json;

use self::description::ImageDescription;
use crate::args::{ImageCommand, StateArgs};
use crate::client::ServerClient;
use crate::config::Config;
use crate::output::{Printer, WithHint, format_bytes};

/// Runs an image command, on the server or on the state directory. With the default address
/// (`is_default`) it is not an error if no server answers.
pub(crate) fn run_image_command(
    server: &ServerClient,
    is_default: bool,
    command: &ImageCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    let Some(state) = state_args(command) else {
        return super::block_on(remote::run_on_server(server, command, printer));
    };
    if state.state_dir.is_none() && state.config.is_none() {
        if !is_default || is_server_reachable(server)? {
            return super::block_on(remote::run_on_server(server, command, printer));
        }
        let directory = Config::for_host(state)?.state_dir;
        let directory = directory.display();
        printer.remark(format_args!("no server answers; working on the state directory `{directory}`"));
    }
    run_on_state_dir(command, printer)
}

/// Asks in a runtime that is gone afterwards: unpacking needs a process without threads.
fn is_server_reachable(server: &ServerClient) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("could not start the event loop")?.block_on(server.is_reachable())
}

/// The state directory arguments of a command; `None` for a command that only a server can run.
fn state_args(command: &ImageCommand) -> Option<&StateArgs> {
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

fn run_on_state_dir(command: &ImageCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        ImageCommand::Commit { .. } => anyhow::bail!("only a server makes images of sandboxes"),
        ImageCommand::Import { name, source, state } => {
            import_image(&Config::for_host(state)?, name, source, printer)?;
        }
        ImageCommand::Pull { name, username, password_stdin: _, state } => {
            pull::pull_image(&Config::for_host(state)?, name, username.as_deref(), printer)?;
        }
        ImageCommand::Ls { state } => list_images(&Config::for_host(state)?.state_dir, printer)?,
        ImageCommand::Inspect { name, state } => {
            inspect_image(&Config::for_host(state)?.state_dir, name, printer)?;
        }
        ImageCommand::Rm { names, state } => {
            remove_images(&Config::for_host(state)?.state_dir, names, printer)?
        }
        ImageCommand::Gc { state } => collect_garbage(&Config::for_host(state)?, printer)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn import_image(config: &Config, name: &str, source: &Path, printer: &Printer) -> Result<()> {
    let opened = ImportSource::open(source)?;
    let most = config.images.max_bytes.map(|most| most.0);
    let import = ImageImport {
        name,
        source: opened,
        wanted: None,
        existing: ExistingImagePolicy::Refuse,
        most,
        below: ImportBase::Nothing,
    };
    store_image(config, import, printer).with_context(|| format!("`{}` is not imported", source.display()))
}

/// Unpacks and stores an image, removes others if there are too many, and prints the result.
fn store_image(config: &Config, import: ImageImport<'_>, printer: &Printer) -> Result<()> {
    let thread = SingleThread::prove().context("this process has threads")?;
    let mut progress = printer.start_progress(format!("unpacking {}", import.name));
    let unpacker = UnpackMode::Worker(&thread);
    let ImportedImage { record: made, gone } =
        images::import_image(&config.state_dir, import, unpacker, &mut |detail| {
            progress.show_detail(detail)
        })?;
    drop(progress);
    for gone in gone.images {
        printer.warn(format_args!("`{gone}` is removed to make room: `images.max_bytes` was passed"));
    }
    if printer.is_json() {
        return printer.print_json(&ImageDescription::from_record(&made, None));
    }
    printer.print_line(format_args!("{} ({})", made.name, format_bytes(made.bytes())))
}

fn list_images(state_dir: &Path, printer: &Printer) -> Result<()> {
    let found = images::list_images(state_dir)?;
    let mut all = vec![ImageDescription::host()];
    all.extend(found.iter().map(|(record, used)| ImageDescription::from_record(record, Some(*used))));
    print_image_table(&all, printer)
}

fn print_image_table(all: &[ImageDescription], printer: &Printer) -> Result<()> {
    let rows = all.iter().map(|image| {
        let layers = image.layers.len().to_string();
        vec![image.name.clone(), layers, format_bytes(image.bytes), image.short_digest(), image.last_used()]
    });
    printer.print_json_or_table(all, &["name", "layers", "size", "digest", "last used"], rows.collect())
}

fn inspect_image(state_dir: &Path, name: &str, printer: &Printer) -> Result<()> {
    let found = images::find_image(state_dir, name)?.ok_or_else(|| ImageError::Unknown(name.to_owned()))?;
    let shown = ImageDescription::from_record(&found, None);
    if printer.is_json() { printer.print_json(&shown) } else { printer.print_line(shown) }
}

/// Removes the images in order; stops at the first that cannot be removed.
fn remove_images(state_dir: &Path, names: &[String], printer: &Printer) -> Result<()> {
    for name in names {
        match images::remove_image(state_dir, name) {
            Err(error @ ImageError::Unknown(_)) => {
                return Err(anyhow!(error.to_string())).with_hint("`coracle image ls` lists the images");
            }
            removed => drop(removed?),
        }
        if !printer.is_json() {
            printer.print_line(name)?;
        }
    }
    if printer.is_json() { printer.print_json(&json!({ "removed": names })) } else { Ok(()) }
}

fn collect_garbage(config: &Config, printer: &Printer) -> Result<()> {
    let most = config.images.max_bytes.map(|most| most.0);
    let gone = images::collect_images(&config.state_dir, most)?;
    if printer.is_json() {
        return printer.print_json(&gone);
    }
    print_freed(&gone.images, gone.layers, gone.bytes, printer)
}

fn print_freed(images: &[String], layers: usize, bytes: u64, printer: &Printer) -> Result<()> {
    for image in images {
        printer.print_line(image)?;
    }
    printer.print_line(format_args!("{layers} layers removed, {} freed", format_bytes(bytes)))
}
