//! Terminals over WebSocket: the routes. The service keeps the terminals, and `terminal_frames.rs` has
//! the frames.

use axum::Json;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::{IntoResponse, Response};
use domain::process::MissingDirectory;
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{CreateTerminalRequest, TerminalMode};

use super::command::expanded_directory;
use super::problem::{ExecdProblem, JsonOrEmpty};
use super::terminal_frames::TERMINAL_CODEC;
use super::{ExecTarget, PathName, exec_socket};
use crate::kit::axum_socket::split_socket;
use crate::kit::query::QueryParams;
use crate::kit::terminal_socket::{TerminalClient, serve_terminal};

/// The maximum size of a client message.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

#[derive(Default, Deserialize)]
pub(super) struct CreateTerminalBody {
    cwd: Option<String>,
    command: Option<String>,
}

#[derive(Serialize)]
pub(super) struct CreatedTerminalBody {
    session_id: String,
}

/// `POST /pty`
pub(super) async fn create_terminal(
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<CreateTerminalBody>,
) -> Result<(StatusCode, Json<CreatedTerminalBody>), ExecdProblem> {
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let request = CreateTerminalRequest {
        command: given(body.command),
        directory: given(body.cwd).map(|path| expanded_directory(path, MissingDirectory::Fail)),
    };
    let terminal = target.sandbox.terminals().create_terminal(request).await?;
    Ok((StatusCode::CREATED, Json(CreatedTerminalBody { session_id: terminal.name.clone() })))
}

#[derive(Serialize)]
pub(super) struct TerminalStatusBody {
    session_id: String,
    running: bool,
    output_offset: u64,
}

/// `GET /pty/{id}`
pub(super) async fn get_terminal(
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<Json<TerminalStatusBody>, ExecdProblem> {
    let status = target.sandbox.terminals().terminal_status(&name).await?;
    let (running, output_offset) = (status.running, status.output_offset);
    Ok(Json(TerminalStatusBody { session_id: name, running, output_offset }))
}

/// `DELETE /pty/{id}`: kills its shells.
pub(super) async fn delete_terminal(
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<StatusCode, ExecdProblem> {
    target.sandbox.terminals().delete_terminal(&name).await?;
    Ok(StatusCode::OK)
}

/// `GET /pty/{id}/ws?pty=0|1&since=…&takeover=1`
pub(super) async fn attach_terminal(
    target: ExecTarget,
    PathName(name): PathName,
    uri: Uri,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ExecdProblem> {
    let query = QueryParams::from_uri(&uri);
    let since = query.parse_number("since").map_err(ExecdProblem::invalid)?.unwrap_or(0);
    let mode = if query.first("pty") == Some("0") { TerminalMode::Pipes } else { TerminalMode::Terminal };
    let upgrade = || {
        let upgrade = upgrade.map_err(|rejection| ExecdProblem::invalid(rejection.to_string()))?;
        Ok::<_, ExecdProblem>(upgrade.max_message_size(MAX_MESSAGE_BYTES))
    };
    if name == exec_socket::EXEC_TERMINAL_NAME {
        let upgrade = upgrade()?;
        target.sandbox.check_usable()?;
        target.begin_stream()?;
        return Ok(run_over_socket(upgrade, target, mode, &headers));
    }
    let terminal = target.sandbox.terminals().find_terminal(&name).await?;
    let upgrade = upgrade()?;
    target.begin_stream()?;
    let sandbox = target.sandbox;
    let attachment = terminal.attach_client(query.is_on("takeover")).ok_or_else(|| {
        ExecdProblem::new(
            StatusCode::CONFLICT,
            "ALREADY_CONNECTED",
            "another client is attached; `takeover=1` displaces it",
        )
    })?;
    let client = TerminalClient { sandbox, mode, since };
    let serve = async move |socket| {
        serve_terminal(split_socket(socket), &TERMINAL_CODEC, client, attachment).await;
    };
    Ok(upgrade.on_upgrade(serve).into_response())
}

/// Serves one command over the WebSocket, starting it from a header if the client sent one.
fn run_over_socket(
    upgrade: WebSocketUpgrade,
    target: ExecTarget,
    mode: TerminalMode,
    headers: &HeaderMap,
) -> Response {
    // A terminal is started after the upgrade: its command gets a hangup when the client disconnects, which is noticed only
    // from then on.
    let header = headers.get(exec_socket::START_HEADER).filter(|_| mode == TerminalMode::Pipes);
    let starting = header.map(|start| exec_socket::begin_start(&target, mode, start));
    let accepted =
        starting.as_ref().map(|_| [(exec_socket::START_HEADER, HeaderValue::from_static("accepted"))]);
    let serve = async move |socket| {
        exec_socket::serve_exec_socket(split_socket(socket), target, mode, starting).await;
    };
    (accepted, upgrade.on_upgrade(serve)).into_response()
}
