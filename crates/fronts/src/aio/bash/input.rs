//! Input and signals for the command that runs in a session.

use std::time::Duration;

use axum::Json;
use domain::ProcessId;
use serde::Deserialize;
use service::{ErrorKind, SandboxRef, SignalTarget};

use super::fields::check_long_text;
use super::session::{find_session, require_session_id};
use super::sessions::BashSessionName;
use crate::aio::body::{AioJson, require_field};
use crate::aio::commands::run::{InputOutcome, send_input};
use crate::aio::envelope::{ResponseEnvelope, success_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;

/// How long a command may take to accept its input.
const INPUT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
pub(super) struct BashWriteBody {
    session_id: Option<String>,
    command_id: Option<String>,
    input: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct BashKillBody {
    session_id: Option<String>,
    signal: Option<String>,
}

/// `POST /v1/bash/write`
pub(super) async fn write_input(
    target: AioTarget,
    AioJson(body): AioJson<BashWriteBody>,
) -> Result<Json<ResponseEnvelope<BashSessionName>>, AioProblem> {
    let id = require_session_id(body.session_id)?;
    let input = check_long_text(require_field(body.input, "input")?, "input")?;
    let session = find_session(&target, &id).await?;
    let running = session.running_command().ok_or_else(nothing_runs)?;
    if body.command_id.as_ref().is_some_and(|chosen| !chosen.is_empty() && chosen != running.as_str()) {
        return Err(nothing_runs());
    }
    write_to_command(&target.sandbox, running, input.as_bytes()).await?;
    Ok(success_response("Input written", BashSessionName { session_id: id }))
}

/// Writes to the input of a command.
pub(super) async fn write_to_command(
    sandbox: &SandboxRef,
    process: &ProcessId,
    bytes: &[u8],
) -> Result<(), AioProblem> {
    match send_input(sandbox, process, bytes, INPUT_TIMEOUT).await? {
        InputOutcome::Written => Ok(()),
        InputOutcome::ProgramEnded => Err(nothing_runs()),
    }
}

fn nothing_runs() -> AioProblem {
    AioProblem::bad_request("No running process to write to")
}

/// `POST /v1/bash/kill`: a session without a command is left as it is.
pub(super) async fn kill_command(
    target: AioTarget,
    AioJson(body): AioJson<BashKillBody>,
) -> Result<Json<ResponseEnvelope<BashSessionName>>, AioProblem> {
    let id = require_session_id(body.session_id)?;
    let signal = match body.signal.as_deref() {
        None | Some("SIGTERM") => 15,
        Some("SIGKILL") => 9,
        Some("SIGINT") => 2,
        Some(_) => {
            return Err(AioProblem::invalid_field("signal", "the signal is not SIGTERM, SIGKILL or SIGINT"));
        }
    };
    let session = find_session(&target, &id).await?;
    let message = match session.running_command() {
        Some(running) => {
            let sent = target.sandbox.processes().signal_process(running, signal, SignalTarget::Group).await;
            match sent {
                Ok(()) => "Signal sent",
                // It has ended meanwhile.
                Err(error) if matches!(error.kind(), ErrorKind::NoProcess | ErrorKind::File(_)) => {
                    "No running process"
                }
                Err(error) => return Err(error.into()),
            }
        }
        None => "No running process",
    };
    Ok(success_response(message, BashSessionName { session_id: id }))
}
