//! `cp`: files and directories, into a sandbox and out of it.
//!
//! A destination that ends in a slash or is a directory receives the source under its own name, as with
//! cp(1). Symbolic links are copied as links and not followed, except one that is itself named as the
//! source on this host. Programs in the sandbox choose the names of copied files, so every name is
//! checked before it becomes part of a path on this host.

mod incoming;
mod outgoing;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use domain::{NetworkAccess, SandboxId};
use http::StatusCode;

use crate::args::CpArgs;
use crate::client::{
    CreateSandboxRequest, FileKind, SandboxClient, SandboxRef, ServerClient, failed_with_status,
};
use crate::output::{Printer, WithHint};
use crate::values::{CopyEndpoint, SandboxLifetime};

pub(crate) async fn copy_files(server: &ServerClient, args: CpArgs, printer: &Printer) -> Result<ExitCode> {
    match (&args.source, &args.destination) {
        (CopyEndpoint::Remote { .. }, CopyEndpoint::Remote { .. }) => {
            bail!("one of the two ends must be on this host")
        }
        (CopyEndpoint::Standard, CopyEndpoint::Remote { sandbox, path }) => {
            outgoing::copy_from_stdin(&open_sandbox(server, sandbox).await?, path, printer).await?;
        }
        (CopyEndpoint::Local(source), CopyEndpoint::Remote { sandbox, path }) => {
            outgoing::copy_from_local(&open_sandbox(server, sandbox).await?, source, path, printer).await?;
        }
        (
            CopyEndpoint::Remote { sandbox, path },
            destination @ (CopyEndpoint::Standard | CopyEndpoint::Local(_)),
        ) => {
            let (id, reader) = find_readable_sandbox(server, sandbox, printer).await?;
            let opened = server.open_sandbox(&id).await;
            let copied = match (&opened, destination) {
                (Ok(opened), CopyEndpoint::Local(destination)) => {
                    incoming::copy_to_local(opened, path, destination, printer).await
                }
                (Ok(opened), _) => incoming::copy_to_stdout(opened, path, printer).await,
                (Err(_), _) => Ok(()),
            };
            if reader {
                server.remove_sandbox(id.as_str()).await?;
            }
            opened?;
            copied?;
        }
        (
            CopyEndpoint::Standard | CopyEndpoint::Local(_),
            CopyEndpoint::Standard | CopyEndpoint::Local(_),
        ) => {
            if let Some((sandbox, path)) =
                [&args.source, &args.destination].into_iter().find_map(parse_relative_remote)
            {
                return Err(anyhow!("the path in the sandbox must be absolute, and `{path}` is not"))
                    .with_hint(format!(
                        "write `{sandbox}:/{path}`; a file of this host is written `./{sandbox}:{path}`"
                    ));
            }
            bail!("one of the two ends must be in a sandbox, as in `SANDBOX:/PATH`")
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Sandbox and path of a text such as `work:x`. By its form it is the name of a local file, but if
/// nothing else in the command is a path in a sandbox, this one was most likely meant as one.
fn parse_relative_remote(place: &CopyEndpoint) -> Option<(&str, &str)> {
    let CopyEndpoint::Local(local) = place else { return None };
    let (sandbox, path) = local.to_str()?.split_once(':')?;
    (!sandbox.is_empty() && !sandbox.contains('/') && !path.starts_with('/')).then_some((sandbox, path))
}

/// The maximum lifetime of a sandbox that is made to read the files of a dead one.
const READER_TIMEOUT: Duration = Duration::from_secs(600);

/// A sandbox in which the files of `sandbox` can be read, and whether it was made for that. A dead
/// sandbox is not restarted for it: a new one is made from a snapshot of its files, without network and
/// main process.
async fn find_readable_sandbox(
    server: &ServerClient,
    sandbox: &SandboxRef,
    printer: &Printer,
) -> Result<(SandboxId, bool)> {
    let id = server.resolve_sandbox(sandbox).await?;
    if server.sandbox_info(&id).await?.status.state != "Failed" {
        return Ok((id, false));
    }
    let taken = super::snapshot::take_snapshot(server, id.as_str(), None, printer).await;
    let snapshot = match taken {
        Ok(snapshot) => snapshot,
        // Its main process failed, but the sandbox lives and can serve its files itself.
        Err(error) if failed_with_status(&error, StatusCode::CONFLICT) => return Ok((id, false)),
        Err(error) => return Err(error),
    };
    let request = CreateSandboxRequest {
        snapshot: Some(snapshot.id.clone()),
        network: Some(NetworkAccess::Off),
        timeout: Some(SandboxLifetime::After(READER_TIMEOUT)),
        ..CreateSandboxRequest::default()
    };
    let made = server.create_sandbox(&request).await;
    server.delete_snapshot(&snapshot.id).await?;
    let made = SandboxId::parse(&made?.id).context("the server named an odd id")?;
    Ok((made, true))
}

async fn open_sandbox(server: &ServerClient, sandbox: &SandboxRef) -> Result<SandboxClient> {
    server.open_sandbox(&server.resolve_sandbox(sandbox).await?).await
}

/// The path of the copy inside: below `path` if that is, or is written as, a directory.
async fn resolve_target_path(sandbox: &SandboxClient, path: &str, name: Option<&str>) -> Result<String> {
    let is_directory = path.ends_with('/')
        || sandbox.stat(path).await?.is_some_and(|found| found.kind == FileKind::Directory);
    let bare = path.trim_end_matches('/');
    match (is_directory, name) {
        (true, Some(name)) => Ok(format!("{bare}/{name}")),
        (true, None) => bail!("`{path}` is a directory; name the file in it"),
        (false, _) => Ok(bare.to_owned()),
    }
}

/// The last component of a path, if it is a plain name.
fn base_name(path: &Path) -> Option<&str> {
    path.file_name().and_then(|name| name.to_str())
}
