//! `pause`, `resume`, `restart`, `extend` and `url`.

use std::process::ExitCode;

use anyhow::Result;
use http::StatusCode;
use serde_json::json;

use crate::args::{ExtendArgs, SandboxArgs, UrlArgs};
use crate::client::{ServerClient, failed_with_status};
use crate::output::{Printer, WithHint, find_hint};

/// Freezes every process of a sandbox until it is resumed.
pub(crate) async fn pause_sandbox(
    server: &ServerClient,
    args: &SandboxArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    match server.pause_sandbox(&id).await {
        Err(error) if failed_with_status(&error, StatusCode::CONFLICT) => {
            return Err(error).with_hint(format!(
                "`coracle inspect {id}` shows its phase; a running sandbox can be paused"
            ));
        }
        paused => paused?,
    }
    if printer.is_json() {
        printer.print_json(&json!({ "id": id.as_str(), "state": "Paused" }))?
    } else {
        printer.print_line(&id)?
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn resume_sandbox(
    server: &ServerClient,
    args: &SandboxArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    let revival = match server.resume_sandbox(&id).await {
        // If the server sent a hint, it knows the reason, for example that nothing is left to resume.
        Err(error)
            if failed_with_status(&error, StatusCode::CONFLICT)
                && error.chain().all(|cause| find_hint(cause).is_none()) =>
        {
            return Err(error).with_hint(format!(
                "`coracle inspect {id}` shows its phase; a paused or dead sandbox can be resumed"
            ));
        }
        resumed => resumed?,
    };
    if let Some(revival) = revival {
        printer.remark(&revival);
    }
    if printer.is_json() {
        printer.print_json(&json!({ "id": id.as_str(), "state": "Running" }))?
    } else {
        printer.print_line(&id)?
    }
    Ok(ExitCode::SUCCESS)
}

/// Restarts a dead sandbox and says what happened to its files.
pub(crate) async fn restart_sandbox(
    server: &ServerClient,
    args: &SandboxArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    let restarted = server.restart_sandbox(&id).await?;
    match &restarted.revival_message() {
        Some(revival) => printer.remark(revival),
        None => printer.remark("the sandbox runs already"),
    }
    if printer.is_json() {
        printer.print_json(&restarted)?
    } else {
        printer.print_line(&id)?
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn extend_timeout(
    server: &ServerClient,
    args: &ExtendArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    let expires = server.extend_timeout(&id, args.time).await?;
    if printer.is_json() {
        printer.print_json(&json!({ "id": id.as_str(), "expiresAt": expires }))?
    } else {
        printer.print_line(format!("{id} expires at {expires}"))?
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the address of a port. Tokens are shown to programs only, so that none stays in the scrollback
/// of a terminal.
pub(crate) async fn print_port_url(
    server: &ServerClient,
    args: &UrlArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    let Some(port) = args.port else {
        let found = server.sandbox_url(&id).await?;
        match printer.is_json() {
            true => printer.print_json(&found)?,
            false => printer.print_line(&found.url)?,
        }
        return Ok(ExitCode::SUCCESS);
    };
    let endpoint = server.port_endpoint(&id, port, args.signed).await?;
    let url = format!("http://{}", with_trailing_slash(&endpoint.endpoint));
    if printer.is_json() {
        printer.print_json(&json!({ "url": url, "headers": endpoint.headers }))?;
        return Ok(ExitCode::SUCCESS);
    }
    printer.print_line(&url)?;
    if !endpoint.headers.is_empty() {
        let names: Vec<&str> = endpoint.headers.keys().map(String::as_str).collect();
        let names = names.join("`, `");
        printer.note_on_terminal(format!(
            "requests need the API key or the headers `{names}`, which --json shows"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Relative links of a page work only if its address ends in a slash.
fn with_trailing_slash(endpoint: &str) -> String {
    if endpoint.ends_with('/') { endpoint.to_owned() } else { format!("{endpoint}/") }
}
