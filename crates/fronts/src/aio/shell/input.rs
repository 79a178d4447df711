//! Input for the program that runs in a session, and the end of a session.

use std::time::Duration;

use axum::Json;
use serde::{Deserialize, Serialize};
use service::RequestTime;

use super::super::body::{AioJson, require_field};
use super::super::commands::run::{InputOutcome, queued_run, send_input};
use super::super::envelope::{ResponseEnvelope, success_response};
use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use super::session::{ShellStatus, check_command, last_exit_code, read_session, require_session};

/// How long a program may take to accept its input.
const INPUT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
pub(super) struct WriteBody {
    id: Option<String>,
    input: Option<String>,
    press_enter: Option<bool>,
}

#[derive(Serialize)]
pub(super) struct StatusBody {
    pub(super) status: ShellStatus,
}

/// `POST /v1/shell/write`: types into the running program. In an idle session the text runs as a command.
pub(super) async fn write_input(
    target: AioTarget,
    AioJson(body): AioJson<WriteBody>,
) -> Result<Json<ResponseEnvelope<StatusBody>>, AioProblem> {
    let session = require_session(body.id)?;
    let input = check_command(require_field(body.input, "input")?, "input")?;
    let press_enter = require_field(body.press_enter, "press_enter")?;
    let status = read_session(&target, &session).await?;
    let typed = if press_enter { format!("{input}\n") } else { input.clone() };
    let written = match status.running_command() {
        Some(run) => send_input(&target.sandbox, run, typed.as_bytes(), INPUT_TIMEOUT).await?,
        None => InputOutcome::ProgramEnded,
    };
    if written == InputOutcome::ProgramEnded {
        // The session is idle, also if the program has ended in the meantime.
        let run = queued_run(&target.sandbox, input);
        target.sandbox.sessions().start_detached_run(&session, run).await?;
    }
    Ok(success_response("Input written", StatusBody { status: ShellStatus::Running }))
}

#[derive(Deserialize)]
pub(super) struct KillBody {
    id: Option<String>,
}

#[derive(Serialize)]
pub(super) struct KilledSession {
    status: ShellStatus,
    exit_code: Option<i32>,
    /// The former name of the exit code.
    returncode: Option<i32>,
}

/// `POST /v1/shell/kill`: closes the session with everything in it.
pub(super) async fn kill_session(
    target: AioTarget,
    AioJson(body): AioJson<KillBody>,
) -> Result<Json<ResponseEnvelope<KilledSession>>, AioProblem> {
    let requested = RequestTime::now();
    let session = require_session(body.id)?;
    let status = read_session(&target, &session).await?;
    target.sandbox.sessions().close_shared_session(&session, requested).await?;
    let exit_code = last_exit_code(&status).filter(|_| !status.busy);
    let killed = KilledSession { status: ShellStatus::Terminated, exit_code, returncode: exit_code };
    Ok(success_response("Process terminated", killed))
}
