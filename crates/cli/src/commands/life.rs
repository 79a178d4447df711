//! `pause`, `resume`, `restart`, `extend` and `url`.

use std::process::ExitCode;

use anyhow::Result;
use http::StatusCode;
use serde_json::json;

use crate::args::{ExtendArgs, SandboxArgs, UrlArgs};
use crate::client::{Server, refused_with};
use crate::output::{Printer, WithHint, hint_of};

/// Freezes every process of a sandbox until it is resumed.
pub(crate) async fn pause(server: &Server, args: &SandboxArgs, printer: &Printer) -> Result<ExitCode> {
    let id = server.resolve(&args.id).await?;
    match server.pause(&id).await {
        Err(error) if refused_with(&error, StatusCode::CONFLICT) => {
            return Err(error)
                .hint(format!("`coracle inspect {id}` shows its phase; a running sandbox can be paused"));
        }
        paused => paused?,
    }
    if printer.json() {
        printer.value(&json!({ "id": id.as_str(), "state": "Paused" }))?
    } else {
        printer.line(&id)?
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn resume(server: &Server, args: &SandboxArgs, printer: &Printer) -> Result<ExitCode> {
    let id = server.resolve(&args.id).await?;
    let revival = match server.resume(&id).await {
        // If the server sent a hint, it knows the reason, for example that nothing is left to resume.
        Err(error)
            if refused_with(&error, StatusCode::CONFLICT)
                && error.chain().all(|cause| hint_of(cause).is_none()) =>
        {
            return Err(error).hint(format!(
                "`coracle inspect {id}` shows its phase; a paused or dead sandbox can be resumed"
            ));
        }
        resumed => resumed?,
    };
    if let Some(revival) = revival {
        printer.remark(&revival);
    }
    if printer.json() {
        printer.value(&json!({ "id": id.as_str(), "state": "Running" }))?
    } else {
        printer.line(&id)?
    }
    Ok(ExitCode::SUCCESS)
}

/// Restarts a dead sandbox and says what happened to its files.
pub(crate) async fn restart(server: &Server, args: &SandboxArgs, printer: &Printer) -> Result<ExitCode> {
    let id = server.resolve(&args.id).await?;
    let restarted = server.restart(&id).await?;
    match &restarted.revival() {
        Some(revival) => printer.remark(revival),
        None => printer.remark("the sandbox runs already"),
    }
    if printer.json() {
        printer.value(&restarted)?
    } else {
        printer.line(&id)?
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn extend(server: &Server, args: &ExtendArgs, printer: &Printer) -> Result<ExitCode> {
    let id = server.resolve(&args.id).await?;
    let expires = server.extend(&id, args.time).await?;
    if printer.json() {
        printer.value(&json!({ "id": id.as_str(), "expiresAt": expires }))?
    } else {
        printer.line(format!("{id} expires at {expires}"))?
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the address of a port. Tokens are shown to programs only, so that none stays in the scrollback
/// of a terminal.
pub(crate) async fn url(server: &Server, args: &UrlArgs, printer: &Printer) -> Result<ExitCode> {
    let id = server.resolve(&args.id).await?;
    let endpoint = server.endpoint(&id, args.port, args.signed).await?;
    let url = format!("http://{}", with_slash(&endpoint.endpoint));
    if printer.json() {
        printer.value(&json!({ "url": url, "headers": endpoint.headers }))?;
        return Ok(ExitCode::SUCCESS);
    }
    printer.line(&url)?;
    if !endpoint.headers.is_empty() {
        let names: Vec<&str> = endpoint.headers.keys().map(String::as_str).collect();
        let names = names.join("`, `");
        printer.note(format!("requests need the API key or the headers `{names}`, which --json shows"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Relative links of a page work only if its address ends in a slash.
fn with_slash(endpoint: &str) -> String {
    if endpoint.ends_with('/') { endpoint.to_owned() } else { format!("{endpoint}/") }
}
