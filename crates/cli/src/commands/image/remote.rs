//! Images of a server, over the operator API.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::io::ReaderStream;

use super::description::ImageDescription;
use super::{archive, pull};
use crate::args::ImageCommand;
use crate::client::{ArchiveStream, ImageProgress, ImageSource, SandboxRef, ServerClient};
use crate::output::{Printer, WithHint, format_bytes};

/// How many pieces of an archive may wait between the thread that makes it and the one that sends it.
const MAX_QUEUED_CHUNKS: usize = 4;
const CHUNK_BYTES: usize = 256 << 10;

/// Runs a command on the server's images.
pub(super) async fn run_on_server(
    server: &ServerClient,
    command: &ImageCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    match command {
        ImageCommand::Import { name, source, .. } => {
            let mut progress = printer.start_progress(format!("sending {}", source.display()));
            progress.show_detail("and waiting until it is unpacked");
            let archive = open_archive(source)?;
            let made = server.import_image(name, archive).await;
            drop(progress);
            print_image(made.with_context(|| format!("`{}` is not imported", source.display()))?, printer)?;
        }
        ImageCommand::Pull { name, username, .. } => {
            let credentials = username.as_deref().map(pull::read_credentials).transpose()?;
            let credentials = credentials.map(|one| (one.username, one.password));
            let mut progress = printer.start_progress(format!("fetching {name}"));
            let made = server.pull_image(name, credentials, |step| match step {
                ImageProgress::Fetching { bytes, of } => progress.show_bytes(bytes, Some(of)),
                ImageProgress::Unpacking => progress.show_detail("unpacking"),
            });
            let made = made.await;
            drop(progress);
            print_image(made.with_context(|| format!("image `{name}` could not be pulled"))?, printer)?;
        }
        ImageCommand::Commit { source, snapshot, name } => {
            commit_image(server, source, *snapshot, name, printer).await?;
        }
        ImageCommand::Ls { .. } => {
            let mut all = vec![ImageDescription::host()];
            for image in server.list_images().await? {
                all.push(serde_json::from_value(image).context("the server described an odd image")?);
            }
            super::print_image_table(&all, printer)?;
        }
        ImageCommand::Inspect { name, .. } => {
            let found =
                server.find_image(name).await?.ok_or_else(|| anyhow!("there is no image `{name}` here"));
            let found = found.with_hint("`coracle image ls` lists the images")?;
            if printer.is_json() {
                printer.print_json(&found)?;
            } else {
                let shown: ImageDescription =
                    serde_json::from_value(found).context("the server described an odd image")?;
                printer.print_line(shown)?;
            }
        }
        ImageCommand::Rm { names, .. } => remove_images(server, names, printer).await?,
        ImageCommand::Gc { .. } => {
            let gone = server.collect_images().await?;
            if printer.is_json() {
                let value = json!({ "images": gone.images, "layers": gone.layers, "bytes": gone.bytes });
                printer.print_json(&value)?;
            } else {
                super::print_freed(&gone.images, gone.layers, gone.bytes, printer)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn commit_image(
    server: &ServerClient,
    source: &SandboxRef,
    is_snapshot: bool,
    name: &str,
    printer: &Printer,
) -> Result<()> {
    let text = source.to_string();
    let is_snapshot = is_snapshot || domain::SnapshotId::parse(&text).is_ok();
    let of = if is_snapshot {
        let reference = text.parse().map_err(|error: String| anyhow!(error))?;
        ImageSource::Snapshot(server.resolve_snapshot(&reference).await?)
    } else {
        ImageSource::Sandbox(server.resolve_sandbox(source).await?)
    };
    let mut progress = printer.start_progress(format!("making image {name}"));
    progress.show_detail("copying the files");
    let made = server.commit_image(&of, name, |_step| {}).await;
    drop(progress);
    print_image(made.with_context(|| format!("image `{name}` could not be made of `{text}`"))?, printer)?;
    if !printer.is_json() {
        printer.remark(format_args!("every owner of this server can use image `{name}` and read its files"));
    }
    Ok(())
}

/// The archive at `source`, or one that is made from the directory as it is read.
fn open_archive(source: &Path) -> Result<ArchiveStream> {
    let opening = || format!("could not open `{}`", source.display());
    if !std::fs::metadata(source).with_context(opening)?.is_dir() {
        let file = tokio::fs::File::from_std(std::fs::File::open(source).with_context(opening)?);
        return Ok(ReaderStream::with_capacity(file, CHUNK_BYTES).boxed());
    }
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CHUNKS);
    let source = source.to_owned();
    tokio::task::spawn_blocking(move || {
        let pieces = ChunkSender { sender: sender.clone(), piece: Vec::new() };
        if let Err(error) = archive::write_archive(&source, pieces) {
            // An archive that ends early must not be mistaken for a complete one.
            sender.blocking_send(Err(error)).unwrap_or_default();
        }
    });
    let pieces = stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    });
    Ok(pieces.boxed())
}

/// Passes written bytes on in pieces of a fixed size. It fails when the receiver is gone.
struct ChunkSender {
    sender: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
}

impl io::Write for ChunkSender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= CHUNK_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = std::mem::take(&mut self.piece);
        if piece.is_empty() {
            return Ok(());
        }
        let gone = |_unsent| io::Error::from(io::ErrorKind::BrokenPipe);
        self.sender.blocking_send(Ok(piece.into())).map_err(gone)
    }
}

fn print_image(made: serde_json::Value, printer: &Printer) -> Result<()> {
    if printer.is_json() {
        return printer.print_json(&made);
    }
    let shown: ImageDescription =
        serde_json::from_value(made).context("the server described an odd image")?;
    printer.print_line(format_args!("{} ({})", shown.name, format_bytes(shown.bytes)))
}

/// Removes the images in order; stops at the first that cannot be removed.
async fn remove_images(server: &ServerClient, names: &[String], printer: &Printer) -> Result<()> {
    for name in names {
        if !server.remove_image(name).await? {
            return Err(anyhow!("there is no image `{name}` here"))
                .with_hint("`coracle image ls` lists the images");
        }
        if !printer.is_json() {
            printer.print_line(name)?;
        }
    }
    if printer.is_json() { printer.print_json(&json!({ "removed": names })) } else { Ok(()) }
}
