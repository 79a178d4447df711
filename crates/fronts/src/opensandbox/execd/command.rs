//! Runs commands and reports their status.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use domain::process::{Command, Directory, Missing, Process};
use domain::{Backpressure, Bytes, Exit, Identity, Retention};
use serde::{Deserialize, Serialize};
use service::{FileFault, OutputSettings, ProcessStatus, ServiceError};

use super::fault::{Fault, Wish, process_id};
use super::{Name, Scope, code, run as stream};
use crate::opensandbox::Front;
use crate::opensandbox::sse::Ending;
use crate::opensandbox::types::{ended, rfc3339};
use crate::opensandbox::wish::check_environment;
use crate::trace::unique_hex;

#[derive(Deserialize)]
pub(super) struct RunBody {
    command: Option<String>,
    argv: Option<Vec<String>>,
    cwd: Option<String>,
    background: Option<bool>,
    /// Milliseconds.
    timeout: Option<i64>,
    uid: Option<u32>,
    gid: Option<u32>,
    envs: Option<BTreeMap<String, Option<String>>>,
    /// How many bytes of output are retained.
    #[serde(rename = "coracle.output-kept")]
    output_kept: Option<u64>,
}

/// `POST /command`
pub(super) async fn run(
    State(front): State<Front>,
    scope: Scope,
    Wish(body): Wish<RunBody>,
) -> Result<Response, Fault> {
    let background = body.background == Some(true);
    let output = front.service.output_settings();
    let mut process = if background { parse(body, output)? } else { foreground(body, output)? };
    code::prepare_for_probe(&front, &scope, &mut process).await;
    match front.service.launch(&scope.owner, &scope.id, process).await {
        Ok(following) if background => Ok(stream::background(following.process.as_str())),
        Ok(following) => {
            let name = following.process.to_string();
            Ok(stream::foreground(following, &name, scope.lines))
        }
        Err(error) => refuse(error, &unique_hex()),
    }
}

/// Converts a launch error. A program that cannot be started is reported as the end of the command; a
/// missing directory or user is an error of the request.
pub(super) fn refuse(error: ServiceError, name: &str) -> Result<Response, Fault> {
    match &error {
        ServiceError::File(file) if file.operation == "exec" => {
            let missing = file.fault == FileFault::NotFound;
            let ending = if missing { Ending::Missing } else { Ending::NotExecutable };
            Ok(stream::not_started(name, ending, &Fault::from(error).0.message))
        }
        ServiceError::File(_) => Err(Fault::invalid(Fault::from(error).0.message)),
        _ => Err(error.into()),
    }
}

/// Parses a command that is slowed down if its client does not read.
pub(super) fn foreground(body: RunBody, output: OutputSettings) -> Result<Process, Fault> {
    let backpressure = Backpressure::On { stall_limit: Some(output.stall_limit) };
    Ok(Process { backpressure, ..parse(body, output)? })
}

fn parse(body: RunBody, output: OutputSettings) -> Result<Process, Fault> {
    let command = match (body.command, body.argv) {
        (Some(text), None) if !text.trim().is_empty() => Command::Shell { text, login: false },
        (None, Some(words)) if words.first().is_some_and(|word| !word.is_empty()) => Command::Argv(words),
        (Some(_), Some(_)) => return Err(Fault::invalid("give `command` or `argv`, not both")),
        _ => return Err(Fault::invalid("`command` is empty")),
    };
    let nul = match &command {
        Command::Shell { text, .. } => text.contains('\0'),
        Command::Argv(words) => words.iter().any(|word| word.contains('\0')),
    };
    if nul {
        return Err(Fault::invalid("the command contains a NUL byte"));
    }
    Ok(Process {
        identity: identity(body.uid, body.gid)?,
        directory: body.cwd.filter(|path| !path.is_empty()).map(|path| directory(path, Missing::Fail)),
        env: environment(body.envs)?,
        deadline: timeout(body.timeout, 1)?,
        retention: retention(body.output_kept, output)?,
        ..Process::new(command)
    })
}

fn retention(kept: Option<u64>, output: OutputSettings) -> Result<Retention, Fault> {
    match kept.map(Bytes) {
        None => Ok(output.retention),
        Some(kept) if kept <= output.max_kept => Ok(Retention::of_size(kept)),
        Some(kept) => Err(Fault::invalid(format!(
            "`coracle.output-kept` is {kept}, more than this server allows ({})",
            output.max_kept
        ))),
    }
}

fn identity(uid: Option<u32>, gid: Option<u32>) -> Result<Identity, Fault> {
    match (uid, gid) {
        (None, None) => Ok(Identity::Default),
        (Some(uid), Some(gid)) => Ok(Identity::Ids { uid, gid }),
        // The group is that of the account with this uid.
        (Some(uid), None) => Ok(Identity::User(uid.to_string())),
        (None, Some(_)) => Err(Fault::invalid("`gid` requires `uid`")),
    }
}

/// Builds a directory in which `~` and `$VAR` are expanded as in the command.
pub(super) fn directory(path: String, missing: Missing) -> Directory {
    Directory { path, missing, expand: true }
}

pub(super) fn environment(
    given: Option<BTreeMap<String, Option<String>>>,
) -> Result<BTreeMap<String, String>, Fault> {
    let given = given.unwrap_or_default().into_iter();
    let env = given.filter_map(|(name, value)| Some((name, value?))).collect();
    check_environment(&env).map_err(Fault::invalid)?;
    Ok(env)
}

/// Parses a time of at least `least` milliseconds; absent and zero mean no limit.
pub(super) fn timeout(millis: Option<i64>, least: i64) -> Result<Option<Duration>, Fault> {
    match millis {
        Some(millis) if millis < least => {
            Err(Fault::invalid("`timeout` must be a positive number of milliseconds"))
        }
        Some(millis) if millis > 0 => Ok(Some(Duration::from_millis(millis.unsigned_abs()))),
        _ => Ok(None),
    }
}

#[derive(Serialize)]
pub(super) struct StatusBody {
    id: String,
    content: String,
    running: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    error: String,
    started_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at: Option<String>,
}

/// `GET /command/status/{id}`
pub(super) async fn status(
    State(front): State<Front>,
    scope: Scope,
    Name(process): Name,
) -> Result<Json<StatusBody>, Fault> {
    let process = process_id(&process)?;
    let status = front.service.status(&scope.owner, &scope.id, &process).await?;
    Ok(Json(StatusBody::of(status)))
}

impl StatusBody {
    fn of(status: ProcessStatus) -> Self {
        let exit = status.ended.map(|end| end.exit);
        Self {
            id: status.process.to_string(),
            content: status.command,
            running: exit.is_none(),
            exit_code: exit.map(exit_code),
            error: match exit {
                None | Some(Exit::Code(0)) => String::new(),
                Some(exit) => format!("the command {}", ended(exit)),
            },
            started_at: rfc3339(status.started),
            finished_at: status.ended.map(|end| rfc3339(end.ended)),
        }
    }
}

/// Returns the exit code, or -1 for any other end.
pub(super) fn exit_code(exit: Exit) -> i32 {
    match exit {
        Exit::Code(code) => code,
        Exit::Signal(_) | Exit::Oom | Exit::Deadline | Exit::Lost => -1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(body: Value) -> Result<Process, Fault> {
        parse(serde_json::from_value(body).unwrap(), OutputSettings::default())
    }

    #[test]
    fn invalid_requests_are_refused() {
        for body in [
            json!({}),
            json!({"command": " \n"}),
            json!({"argv": []}),
            json!({"argv": [""]}),
            json!({"command": "a", "argv": ["a"]}),
            json!({"command": "a\u{0}"}),
            json!({"command": "a", "gid": 5}),
            json!({"command": "a", "timeout": 0}),
            json!({"command": "a", "envs": {"": "x"}}),
            json!({"command": "a", "coracle.output-kept": 1_u64 << 40}),
        ] {
            assert_eq!(check(body.clone()).unwrap_err().0.code, "INVALID_REQUEST_BODY", "{body}");
        }
    }

    #[test]
    fn nulls_and_milliseconds_are_parsed() {
        let process = check(json!({
            "command": "a", "argv": null, "cwd": null, "timeout": 1500, "uid": 7, "gid": null, "envs": {"A": "b"},
            "coracle.output-kept": 1 << 20,
        }));
        let process = process.unwrap();
        assert_eq!(process.deadline, Some(Duration::from_millis(1500)));
        assert_eq!(process.identity, Identity::User("7".to_owned()));
        assert_eq!(process.env["A"], "b");
        assert_eq!(process.directory, None);
        assert_eq!(process.retention, Retention { first: 64 << 10, last: 960 << 10 });
    }
}
