//! From a sandbox to this host.

use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::base_name;
use crate::client::{FileInfo, Kind, Sandbox};
use crate::output::{Printer, WithHint};

pub(super) async fn to_standard_output(sandbox: &Sandbox, path: &str, printer: &Printer) -> Result<()> {
    let found = existing(sandbox, path).await?;
    receive(sandbox, &found.path, &mut tokio::io::stdout(), printer).await
}

pub(super) async fn to_local(
    sandbox: &Sandbox,
    path: &str,
    destination: &Path,
    printer: &Printer,
) -> Result<()> {
    let found = existing(sandbox, path).await?;
    let into = destination.is_dir() || destination.as_os_str().as_encoded_bytes().ends_with(b"/");
    let target = match (into, base_name(Path::new(path))) {
        (true, Some(name)) => destination.join(name),
        (true, None) => bail!("`{path}` has no name that a copy could have"),
        (false, _) => destination.to_owned(),
    };
    match found.kind {
        Kind::File => file(sandbox, &found, &target, printer).await,
        Kind::Directory => directory(sandbox, path, &target, printer).await,
        Kind::Symlink | Kind::Other => bail!("`{path}` is neither file nor directory"),
    }
}

async fn existing(sandbox: &Sandbox, path: &str) -> Result<FileInfo> {
    sandbox
        .stat(path)
        .await?
        .ok_or_else(|| anyhow!("there is no `{path}` in the sandbox"))
        .hint("`coracle exec ID -- ls DIRECTORY` lists what is there")
}

async fn directory(sandbox: &Sandbox, source: &str, target: &Path, printer: &Printer) -> Result<()> {
    make(target).await?;
    for entry in sandbox.walk(source).await? {
        let local = target.join(relative(source, &entry.path)?);
        match entry.kind {
            Kind::Directory => make(&local).await?,
            Kind::File => file(sandbox, &entry, &local, printer).await?,
            Kind::Symlink | Kind::Other => {
                printer.warn(format_args!("`{}` is neither file nor directory, left out", entry.path));
            }
        }
    }
    Ok(())
}

async fn make(directory: &Path) -> Result<()> {
    let about = || format!("could not make `{}`", directory.display());
    tokio::fs::create_dir_all(directory).await.with_context(about)
}

/// The part of `path` below `source`. Whoever lives in the sandbox chose the names, so anything
/// but plain ones is refused.
fn relative(source: &str, path: &str) -> Result<PathBuf> {
    let below = Path::new(path).strip_prefix(source);
    let below = below.with_context(|| format!("the sandbox listed `{path}`, which is not in `{source}`"))?;
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if !plain || below.as_os_str().is_empty() || path.contains('\0') {
        bail!("the sandbox listed `{path}`, which is not a plain name");
    }
    Ok(below.to_owned())
}

/// Fetches one file under a temporary name, so that a broken copy never looks whole.
async fn file(sandbox: &Sandbox, source: &FileInfo, target: &Path, printer: &Printer) -> Result<()> {
    let about = || format!("could not write `{}`", target.display());
    let name = target.file_name().with_context(|| format!("`{}` is not a file name", target.display()))?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".coracle-{}", std::process::id()));
    let partial = target.with_file_name(hidden);
    let mut out = tokio::fs::File::create_new(&partial).await.with_context(about)?;
    let received = async {
        receive(sandbox, &source.path, &mut out, printer).await?;
        let permissions = std::fs::Permissions::from_mode(source.permissions());
        out.set_permissions(permissions).await.with_context(about)?;
        tokio::fs::rename(&partial, target).await.with_context(about)
    };
    let outcome = received.await;
    if outcome.is_err() {
        tokio::fs::remove_file(&partial).await.ok();
    }
    outcome
}

async fn receive(
    sandbox: &Sandbox,
    path: &str,
    out: &mut (impl AsyncWrite + Unpin),
    printer: &Printer,
) -> Result<()> {
    let mut download = sandbox.download(path).await.with_context(|| format!("could not read `{path}`"))?;
    let mut progress = printer.progress(format!("copying {path}"));
    let mut received = 0;
    while let Some(chunk) = download.next().await? {
        out.write_all(&chunk).await.context("could not write what was received")?;
        received += chunk.len() as u64;
        progress.bytes(received, download.size);
    }
    out.flush().await.context("could not write what was received")?;
    match download.size {
        Some(size) if size != received => bail!("`{path}` broke off after {received} of {size} bytes"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_the_source_keep_their_path() {
        assert_eq!(relative("/data", "/data/a/b c").expect("it is plain"), Path::new("a/b c"));
        assert_eq!(relative("/data/", "/data/a").expect("it is plain"), Path::new("a"));
    }

    #[test]
    fn a_name_that_leaves_the_destination_is_refused() {
        for path in
            ["/etc/passwd", "/data/../etc", "/data/a/../../b", "/data", "/database/a", "a", "/data/a\0b"]
        {
            assert!(relative("/data", path).is_err(), "{path}");
        }
    }
}
