//! Shutdown hooks: commands that run when the sandbox is removed. The core keeps and runs them.

use std::time::Duration;

use axum::Json;
use axum::extract::Path;
use domain::hook::SHUTDOWN_HOOKS_TIMEOUT;
use domain::{HookCommand, ShutdownHook};
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};

use super::super::body::{AioJson, require_text};
use super::super::envelope::{ResponseEnvelope, data_response, success_response};
use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use crate::kit::query::QueryParams;

const SHUTDOWN_EVENT: &str = "shutdown";
const DEFAULT_PRIORITY: i64 = 100;
const DEFAULT_TIMEOUT: f64 = 10.0;
const MAX_NAME_BYTES: usize = 64;
const MAX_COMMAND_BYTES: usize = 4096;
/// The shell that runs the command is every hook's program.
const SHELL: [&str; 2] = ["/bin/sh", "-c"];

#[derive(Debug, Deserialize)]
pub(super) struct RegisterHook {
    name: Option<String>,
    event: Option<String>,
    command: Option<String>,
    timeout: Option<f64>,
    priority: Option<i64>,
}

#[derive(Debug, Serialize)]
pub(super) struct HookItem {
    name: String,
    event: &'static str,
    command: String,
    /// In seconds.
    timeout: f64,
    priority: i64,
    source: &'static str,
}

impl HookItem {
    fn from_hook(hook: ShutdownHook) -> Self {
        let ShutdownHook { name, priority, hook } = hook;
        let command = hook.command.into_iter().nth(SHELL.len()).unwrap_or_default();
        let timeout = hook.timeout.as_secs_f64();
        Self { name, event: SHUTDOWN_EVENT, command, timeout, priority, source: "api" }
    }
}

/// `POST /v1/sandbox/hooks`
pub(super) async fn register_hook(
    target: AioTarget,
    AioJson(body): AioJson<RegisterHook>,
) -> Result<Json<ResponseEnvelope<HookItem>>, AioProblem> {
    let hook = parse_hook(body)?;
    target.sandbox.put_shutdown_hook(hook.clone()).await?;
    Ok(success_response("Hook registered", HookItem::from_hook(hook)))
}

/// `GET /v1/sandbox/hooks?event=shutdown`
pub(super) async fn list_hooks(target: AioTarget, uri: Uri) -> Json<ResponseEnvelope<Vec<HookItem>>> {
    let is_wanted = QueryParams::from_uri(&uri).first("event").is_none_or(|event| event == SHUTDOWN_EVENT);
    let hooks = if is_wanted { target.sandbox.shutdown_hooks() } else { Vec::new() };
    data_response(hooks.into_iter().map(HookItem::from_hook).collect())
}

/// `DELETE /v1/sandbox/hooks/{name}`
pub(super) async fn remove_hook(
    target: AioTarget,
    Path(name): Path<String>,
) -> Result<Json<ResponseEnvelope<()>>, AioProblem> {
    match target.sandbox.remove_shutdown_hook(&name).await? {
        true => Ok(success_response("Hook removed", ())),
        false => Err(AioProblem::new(StatusCode::NOT_FOUND, "Hook not found")),
    }
}

fn parse_hook(body: RegisterHook) -> Result<ShutdownHook, AioProblem> {
    let name = require_text(body.name, "name")?;
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.bytes().all(is_name_byte) {
        let message = "a name has 1 to 64 letters, digits, `_` and `-`";
        return Err(AioProblem::invalid_field("name", message));
    }
    if body.event.is_some_and(|event| event != SHUTDOWN_EVENT) {
        return Err(AioProblem::invalid_field("event", "the only event is `shutdown`"));
    }
    let command = require_text(body.command, "command")?;
    if command.trim().is_empty() || command.len() > MAX_COMMAND_BYTES {
        return Err(AioProblem::invalid_field("command", "a command has 1 to 4096 bytes"));
    }
    let timeout = Duration::try_from_secs_f64(body.timeout.unwrap_or(DEFAULT_TIMEOUT)).ok();
    let timeout = timeout.filter(|timeout| timeout.as_millis() > 0 && *timeout <= SHUTDOWN_HOOKS_TIMEOUT);
    let timeout = timeout.ok_or_else(|| {
        let most = SHUTDOWN_HOOKS_TIMEOUT.as_secs();
        AioProblem::invalid_field("timeout", format!("a timeout is above 0 and at most {most} seconds"))
    })?;
    let [shell, option] = SHELL.map(str::to_owned);
    let hook = HookCommand::new(vec![shell, option, command], timeout);
    let hook =
        hook.and_then(|hook| ShutdownHook::new(&name, body.priority.unwrap_or(DEFAULT_PRIORITY), hook));
    hook.map_err(|error| AioProblem::invalid_field("command", error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(body: Value) -> Result<ShutdownHook, AioProblem> {
        parse_hook(serde_json::from_value(body).unwrap())
    }

    #[test]
    fn defaults_are_those_of_the_contract() {
        let item = HookItem::from_hook(parse(json!({"name": "a_B-1", "command": "sync"})).unwrap());
        let expected = json!({"name": "a_B-1", "event": "shutdown", "command": "sync", "timeout": 10.0,
            "priority": 100, "source": "api"});
        assert_eq!(serde_json::to_value(item).unwrap(), expected);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (field, value) in [
            ("name", json!("a b")),
            ("name", json!("")),
            ("name", json!("x".repeat(65))),
            ("event", json!("start")),
            ("command", json!(" ")),
            ("command", json!("a\0")),
            ("command", json!("x".repeat(4097))),
            ("timeout", json!(0)),
            ("timeout", json!(-1)),
            ("timeout", json!(10.5)),
            ("timeout", json!(1e300)),
        ] {
            let mut body = json!({"name": "a", "command": "b"});
            body[field] = value.clone();
            let problem = parse(body).unwrap_err();
            assert_eq!(problem.validation[0].loc, ["body", field], "{value}");
        }
    }
}
