//! `backup` and `restore`: a state directory as one file, and back. Both work on the state directory of
//! this host, whether a server runs on it or not.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use launcher::backup::{self, BackupError, BackupRequest};
use serde_json::json;

use crate::args::{BackupArgs, RestoreArgs};
use crate::config::Config;
use crate::output::{Printer, WithHint, format_bytes};
use crate::serve::server_dir;

pub(crate) fn create_backup(args: &BackupArgs, printer: &Printer) -> Result<ExitCode> {
    let state_dir = Config::for_host(&args.state)?.state_dir;
    let request = BackupRequest {
        state_dir: &state_dir,
        target: &args.file,
        max_size: args.max_size.map(|most| most.0),
        with_secrets: args.with_secrets,
    };
    let server = server_dir(&state_dir);
    let mut progress = printer.start_progress("saving");
    let written = backup::write_backup(
        &request,
        &mut |target: &Path| service::copy_database(&server, target).map_err(Into::into),
        &mut |done| progress.show_bytes(done, None),
    );
    drop(progress);
    let written =
        with_backup_hint(written).with_context(|| format!("`{}` is not saved", state_dir.display()))?;
    let manifest = &written.manifest;
    for sandbox in &manifest.not_saved {
        printer.warn(format_args!("the disk of sandbox {sandbox} is in memory and is not saved"));
    }
    if printer.is_json() {
        printer.print_json(&json!({
            "file": written.file,
            "bytes": written.bytes,
            "checksum": manifest.checksum,
            "withSecrets": manifest.with_secrets,
            "parts": manifest.parts,
            "notSaved": manifest.not_saved,
        }))?;
    } else {
        printer.print_line(format_args!("{} ({})", written.file.display(), format_bytes(written.bytes)))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn restore_backup(args: &RestoreArgs, printer: &Printer) -> Result<ExitCode> {
    let state_dir = Config::for_host(&args.state)?.state_dir;
    let mut progress = printer.start_progress("restoring");
    let restored =
        backup::restore_backup(&args.file, &state_dir, &mut |done| progress.show_bytes(done, None));
    drop(progress);
    let restored =
        with_backup_hint(restored).with_context(|| format!("`{}` is not restored", args.file.display()))?;
    let manifest = &restored.manifest;
    if printer.is_json() {
        printer.print_json(&json!({
            "stateDir": restored.state_dir,
            "checksum": manifest.checksum,
            "withSecrets": manifest.with_secrets,
            "parts": manifest.parts,
        }))?;
    } else {
        printer.print_line(restored.state_dir.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn with_backup_hint<T>(outcome: Result<T, BackupError>) -> Result<T> {
    match outcome.as_ref().err().and_then(BackupError::hint) {
        Some(hint) => outcome.with_hint(hint),
        None => outcome.map_err(Into::into),
    }
}
