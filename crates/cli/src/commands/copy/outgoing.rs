//! From this host into a sandbox.

use std::fs::Metadata;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncRead;

use super::{base_name, resolve_target_path};
use crate::client::SandboxClient;
use crate::output::{Printer, WithHint};

/// How often progress is checked.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

pub(super) async fn copy_from_stdin(sandbox: &SandboxClient, path: &str, printer: &Printer) -> Result<()> {
    let target = resolve_target_path(sandbox, path, None).await?;
    upload_with_progress(sandbox, &target, None, tokio::io::stdin(), None, printer).await
}

pub(super) async fn copy_from_local(
    sandbox: &SandboxClient,
    source: &Path,
    path: &str,
    printer: &Printer,
) -> Result<()> {
    let about = || format!("could not read `{}`", source.display());
    // The path that was typed may be a link; links found while copying are not followed.
    let metadata = tokio::fs::metadata(source)
        .await
        .with_context(about)
        .with_hint("a path without a sandbox's ID and a colon before it is one of this host")?;
    let target = resolve_target_path(sandbox, path, base_name(source)).await?;
    if metadata.is_dir() {
        send_directory(sandbox, source, &target, printer).await
    } else {
        send_file(sandbox, source, &metadata, &target, printer).await
    }
}

async fn send_directory(
    sandbox: &SandboxClient,
    source: &Path,
    target: &str,
    printer: &Printer,
) -> Result<()> {
    let mut pending: Vec<(PathBuf, String)> = vec![(source.to_owned(), target.to_owned())];
    while let Some((source, target)) = pending.pop() {
        let about = || format!("could not read `{}`", source.display());
        let metadata = tokio::fs::metadata(&source).await.with_context(about)?;
        sandbox.make_directory(&target, metadata.permissions().mode()).await?;
        let mut entries = tokio::fs::read_dir(&source).await.with_context(about)?;
        while let Some(entry) = entries.next_entry().await.with_context(about)? {
            let path = entry.path();
            let name = entry.file_name();
            let name = name.to_str().with_context(|| format!("`{}` is not UTF-8", path.display()))?;
            let inside = format!("{target}/{name}");
            let kind = entry.file_type().await.with_context(about)?;
            if kind.is_dir() {
                pending.push((path, inside));
            } else if kind.is_file() {
                send_file(sandbox, &path, &entry.metadata().await.with_context(about)?, &inside, printer)
                    .await?;
            } else if kind.is_symlink() {
                send_link(sandbox, &path, &inside).await?;
            } else {
                printer.warn(format_args!("`{}` is not a file, directory or link, left out", path.display()));
            }
        }
    }
    Ok(())
}

/// Makes a link with the same target inside; the target is not copied.
async fn send_link(sandbox: &SandboxClient, source: &Path, inside: &str) -> Result<()> {
    let about = || format!("could not read the link `{}`", source.display());
    let target = tokio::fs::read_link(source).await.with_context(about)?;
    let target = target.to_str().with_context(|| format!("the link `{}` is not UTF-8", source.display()))?;
    sandbox.make_link(inside, target).await.with_context(|| format!("could not make the link `{inside}`"))
}

async fn send_file(
    sandbox: &SandboxClient,
    source: &Path,
    metadata: &Metadata,
    target: &str,
    printer: &Printer,
) -> Result<()> {
    if !metadata.is_file() {
        bail!("`{}` is neither file nor directory", source.display());
    }
    let about = || format!("could not read `{}`", source.display());
    let opened = tokio::fs::File::open(source).await.with_context(about)?;
    let permissions = metadata.permissions().mode();
    upload_with_progress(sandbox, target, Some(permissions), opened, Some(metadata.len()), printer).await
}

/// Uploads and shows the progress.
async fn upload_with_progress(
    sandbox: &SandboxClient,
    target: &str,
    permissions: Option<u32>,
    source: impl AsyncRead + Send + 'static,
    total: Option<u64>,
    printer: &Printer,
) -> Result<()> {
    let sent = Arc::new(AtomicU64::new(0));
    let mut progress = printer.start_progress(format!("copying to {target}"));
    let upload = sandbox.upload(target, permissions, source, Arc::clone(&sent));
    tokio::pin!(upload);
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        tokio::select! {
            done = &mut upload => return done.with_context(|| format!("could not write `{target}`")),
            _ = ticks.tick() => progress.show_bytes(sent.load(Ordering::Relaxed), total),
        }
    }
}
