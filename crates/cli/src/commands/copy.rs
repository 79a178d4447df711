//! `cp`: files and directories, into a sandbox and out of it.
//!
//! A destination that ends in a slash or is a directory receives the source under its own name,
//! as with cp(1). Symbolic links are not followed and not copied; each is reported. What comes
//! out of a sandbox is named by whoever lives there, so every name is checked before a path of
//! this host is made of it.

mod incoming;
mod outgoing;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::args::CpArgs;
use crate::client::{Kind, Sandbox, SandboxRef, Server};
use crate::output::Printer;
use crate::values::Place;

pub(crate) async fn copy(server: &Server, args: CpArgs, printer: &Printer) -> Result<ExitCode> {
    match (&args.source, &args.destination) {
        (Place::Remote { .. }, Place::Remote { .. }) => {
            bail!("one of the two ends must be on this host")
        }
        (Place::Standard, Place::Remote { sandbox, path }) => {
            outgoing::standard_input(&open(server, sandbox).await?, path, printer).await?;
        }
        (Place::Local(source), Place::Remote { sandbox, path }) => {
            outgoing::local(&open(server, sandbox).await?, source, path, printer).await?;
        }
        (Place::Remote { sandbox, path }, Place::Standard) => {
            incoming::to_standard_output(&open(server, sandbox).await?, path, printer).await?;
        }
        (Place::Remote { sandbox, path }, Place::Local(destination)) => {
            incoming::to_local(&open(server, sandbox).await?, path, destination, printer).await?;
        }
        (Place::Standard | Place::Local(_), Place::Standard | Place::Local(_)) => {
            bail!("one of the two ends must be in a sandbox, as in `SANDBOX:/PATH`")
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn open(server: &Server, sandbox: &SandboxRef) -> Result<Sandbox> {
    server.open(&server.resolve(sandbox).await?).await
}

/// Where inside the source will be: below `path` if that is, or is written as, a directory.
async fn resolve_inside(sandbox: &Sandbox, path: &str, name: Option<&str>) -> Result<String> {
    let is_directory =
        path.ends_with('/') || sandbox.stat(path).await?.is_some_and(|found| found.kind == Kind::Directory);
    let bare = path.trim_end_matches('/');
    match (is_directory, name) {
        (true, Some(name)) => Ok(format!("{bare}/{name}")),
        (true, None) => bail!("`{path}` is a directory; name the file in it"),
        (false, _) => Ok(bare.to_owned()),
    }
}

/// The last part of a path, if it has one that is a plain name.
fn base_name(path: &Path) -> Option<&str> {
    path.file_name().and_then(|name| name.to_str())
}
