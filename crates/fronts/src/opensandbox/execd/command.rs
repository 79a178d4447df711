//! Runs commands and reports their status.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::response::Response;
use domain::process::{CommandLine, MissingDirectory, ProcessSpec, WorkingDirectory};
use domain::{Backpressure, Bytes, ExitReason, OutputRetention, UserIdentity};
use serde::{Deserialize, Serialize};
use service::{OutputSettings, ProcessStatus, ServiceError};

use super::problem::{ExecdProblem, JsonOrEmpty, parse_process_id};
use super::{ExecTarget, PathName, code, command_stream as stream};
use crate::kit::command_ending::{CommandEnding, exit_code};
use crate::kit::time::format_rfc3339;
use crate::opensandbox::create_request::check_environment;
use crate::opensandbox::types::describe_exit;
use crate::server::request_log::unique_hex;

#[derive(Deserialize)]
pub(super) struct RunCommandBody {
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
pub(super) async fn run_command(
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<RunCommandBody>,
) -> Result<Response, ExecdProblem> {
    let background = body.background == Some(true);
    let output = target.sandbox.processes().output_settings();
    let mut process =
        if background { parse_command(body, output)? } else { parse_foreground_command(body, output)? };
    target.begin_stream()?;
    code::prepare_for_probe(&target, &mut process).await;
    match target.sandbox.processes().launch_process(process).await {
        Ok(following) if background => Ok(stream::background_response(following.process.as_str())),
        Ok(following) => {
            let name = following.process.to_string();
            Ok(stream::stream_command(following, &name, target.lines))
        }
        Err(error) => convert_launch_error(error, &unique_hex()),
    }
}

/// Converts a launch error. A program that cannot be started is reported as the end of the command; a
/// missing directory or user is an error of the request.
pub(super) fn convert_launch_error(error: ServiceError, name: &str) -> Result<Response, ExecdProblem> {
    if let Some(ending) = CommandEnding::from_launch_error(&error) {
        return Ok(stream::not_started_response(name, ending, &ExecdProblem::from(error).0.message));
    }
    match &error {
        ServiceError::File(_) => Err(ExecdProblem::invalid(ExecdProblem::from(error).0.message)),
        _ => Err(error.into()),
    }
}

/// Parses a command that is slowed down if its client does not read.
pub(super) fn parse_foreground_command(
    body: RunCommandBody,
    output: OutputSettings,
) -> Result<ProcessSpec, ExecdProblem> {
    let backpressure = Backpressure::On { stall_limit: Some(output.stall_limit) };
    Ok(ProcessSpec { backpressure, ..parse_command(body, output)? })
}

fn parse_command(body: RunCommandBody, output: OutputSettings) -> Result<ProcessSpec, ExecdProblem> {
    let command = match (body.command, body.argv) {
        (Some(text), None) if !text.trim().is_empty() => CommandLine::Shell { text, login: false },
        (None, Some(words)) if words.first().is_some_and(|word| !word.is_empty()) => CommandLine::Argv(words),
        (Some(_), Some(_)) => return Err(ExecdProblem::invalid("give `command` or `argv`, not both")),
        _ => return Err(ExecdProblem::invalid("`command` is empty")),
    };
    let nul = match &command {
        CommandLine::Shell { text, .. } => text.contains('\0'),
        CommandLine::Argv(words) => words.iter().any(|word| word.contains('\0')),
    };
    if nul {
        return Err(ExecdProblem::invalid("the command contains a NUL byte"));
    }
    Ok(ProcessSpec {
        identity: parse_identity(body.uid, body.gid)?,
        directory: body
            .cwd
            .filter(|path| !path.is_empty())
            .map(|path| expanded_directory(path, MissingDirectory::Fail)),
        env: parse_environment(body.envs)?,
        deadline: parse_timeout(body.timeout, 1)?,
        retention: parse_retention(body.output_kept, output)?,
        ..ProcessSpec::new(command)
    })
}

fn parse_retention(kept: Option<u64>, output: OutputSettings) -> Result<OutputRetention, ExecdProblem> {
    match kept.map(Bytes) {
        None => Ok(output.retention),
        Some(kept) if kept <= output.max_kept => Ok(OutputRetention::with_total_size(kept)),
        Some(kept) => Err(ExecdProblem::invalid(format!(
            "`coracle.output-kept` is {kept}, more than this server allows ({})",
            output.max_kept
        ))),
    }
}

fn parse_identity(uid: Option<u32>, gid: Option<u32>) -> Result<UserIdentity, ExecdProblem> {
    match (uid, gid) {
        (None, None) => Ok(UserIdentity::Default),
        (Some(uid), Some(gid)) => Ok(UserIdentity::Ids { uid, gid }),
        // The group is that of the account with this uid.
        (Some(uid), None) => Ok(UserIdentity::User(uid.to_string())),
        (None, Some(_)) => Err(ExecdProblem::invalid("`gid` requires `uid`")),
    }
}

/// Builds a directory in which `~` and `$VAR` are expanded as in the command.
pub(super) fn expanded_directory(path: String, missing: MissingDirectory) -> WorkingDirectory {
    WorkingDirectory { path, missing, expand: true }
}

pub(super) fn parse_environment(
    given: Option<BTreeMap<String, Option<String>>>,
) -> Result<BTreeMap<String, String>, ExecdProblem> {
    let given = given.unwrap_or_default().into_iter();
    let env = given.filter_map(|(name, value)| Some((name, value?))).collect();
    check_environment(&env).map_err(ExecdProblem::invalid)?;
    Ok(env)
}

/// Parses a time of at least `least` milliseconds; absent and zero mean no limit.
pub(super) fn parse_timeout(millis: Option<i64>, least: i64) -> Result<Option<Duration>, ExecdProblem> {
    match millis {
        Some(millis) if millis < least => {
            Err(ExecdProblem::invalid("`timeout` must be a positive number of milliseconds"))
        }
        Some(millis) if millis > 0 => Ok(Some(Duration::from_millis(millis.unsigned_abs()))),
        _ => Ok(None),
    }
}

#[derive(Serialize)]
pub(super) struct CommandStatusBody {
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
pub(super) async fn get_command_status(
    target: ExecTarget,
    PathName(process): PathName,
) -> Result<Json<CommandStatusBody>, ExecdProblem> {
    let process = parse_process_id(&process)?;
    let status = target.sandbox.processes().process_status(&process).await?;
    Ok(Json(CommandStatusBody::from_status(status)))
}

impl CommandStatusBody {
    fn from_status(status: ProcessStatus) -> Self {
        let exit = status.ended.map(|end| end.exit);
        Self {
            id: status.process.to_string(),
            content: status.command,
            running: exit.is_none(),
            exit_code: exit.map(exit_code),
            error: match exit {
                None | Some(ExitReason::Code(0)) => String::new(),
                Some(exit) => format!("the command {}", describe_exit(exit)),
            },
            started_at: format_rfc3339(status.started),
            finished_at: status.ended.map(|end| format_rfc3339(end.ended)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(body: Value) -> Result<ProcessSpec, ExecdProblem> {
        parse_command(serde_json::from_value(body).unwrap(), OutputSettings::default())
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
        assert_eq!(process.identity, UserIdentity::User("7".to_owned()));
        assert_eq!(process.env["A"], "b");
        assert_eq!(process.directory, None);
        assert_eq!(process.retention, OutputRetention { first: 64 << 10, last: 960 << 10 });
    }
}
