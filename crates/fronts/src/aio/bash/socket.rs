//! `GET /v1/bash/ws?session_id=…`: commands of one session over a WebSocket.
//!
//! ```text
//! from the client:  exec text · input text
//! to the client:    session_id · output text… · command_done · error text
//! ```
//! Commands run one after the other, each to its end, also if the client disconnects. Messages are JSON objects with
//! `type` and `data`.

use std::collections::VecDeque;
use std::time::Duration;

use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::response::{IntoResponse, Response};
use domain::{JournalOffset, ProcessId, StreamKind};
use futures_util::{SinkExt, StreamExt};
use http::Uri;
use serde::Deserialize;
use serde_json::{Value, json};
use service::{OutputEvent, OutputStream, RequestTime, ServiceError};
use tokio::time::{Instant, interval, sleep_until, timeout};

use super::command_status::BashStatus;
use super::exec::start_problem;
use super::fields::check_long_text;
use super::input::write_to_command;
use super::session::{NewBashSession, open_session, optional_session_id};
use crate::aio::commands::run::queued_run;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::axum_socket::split_socket;
use crate::kit::query::QueryParams;
use crate::kit::socket::{CLOSE_NORMAL, CloseReason, MessageSink, SocketMessage, close_socket};
use crate::kit::utf8_decoder::Utf8Decoder;

/// The longest message of a client.
const MAX_MESSAGE_BYTES: usize = 2 << 20;
/// How many commands of one client may wait.
const MAX_WAITING_COMMANDS: usize = 64;
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// A client that sends nothing for this long, also no pong, is considered gone.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(75);
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// A message of a client.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", content = "data", rename_all = "snake_case")]
enum BashMessage {
    Exec(String),
    Input(String),
    Ping,
    Pong,
}

/// The connection is over.
#[derive(Debug)]
struct SocketClosed;

/// `GET /v1/bash/ws`: a session that does not exist is created.
pub(super) async fn attach_session(
    target: AioTarget,
    uri: Uri,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, AioProblem> {
    let requested = RequestTime::now();
    let upgrade = upgrade.map_err(|rejection| AioProblem::bad_request(rejection.to_string()))?;
    let id = QueryParams::from_uri(&uri).first("session_id").map(str::to_owned);
    let new = NewBashSession { id: optional_session_id(id)?, ..NewBashSession::default() };
    target.begin_stream()?;
    let id = open_session(&target, new, requested).await?.id().to_owned();
    let upgrade = upgrade.max_message_size(MAX_MESSAGE_BYTES);
    Ok(upgrade.on_upgrade(|socket| serve_socket(socket, target, id)).into_response())
}

async fn serve_socket(socket: WebSocket, target: AioTarget, id: String) {
    let (mut sink, mut stream) = split_socket(socket);
    let mut client = BashClient {
        sink: &mut sink,
        target: &target,
        id,
        waiting: VecDeque::new(),
        current: None,
        stdout: Utf8Decoder::default(),
        stderr: Utf8Decoder::default(),
    };
    let first = json!({"type": "session_id", "data": client.id});
    if client.send(&first).await.is_err() {
        return;
    }
    let mut ping = interval(PING_INTERVAL);
    let mut gone_at = Instant::now() + SILENCE_TIMEOUT;
    loop {
        // Each branch is cancel-safe.
        let step = tokio::select! {
            event = next_event(client.current.as_mut()) => client.forward_event(event).await,
            message = stream.next() => {
                gone_at = Instant::now() + SILENCE_TIMEOUT;
                match message {
                    Some(Ok(message)) => client.handle_message(&message).await,
                    Some(Err(_)) | None => Err(SocketClosed),
                }
            }
            _ = ping.tick() => client.send_message(SocketMessage::Ping).await,
            () = sleep_until(gone_at) => Err(SocketClosed),
        };
        if let Err(SocketClosed) = step {
            break;
        }
    }
    close_socket(&mut sink, &mut stream, CloseReason::new(CLOSE_NORMAL, ""), SEND_TIMEOUT).await;
}

async fn next_event(output: Option<&mut OutputStream>) -> Result<OutputEvent, ServiceError> {
    match output {
        Some(output) => output.next().await,
        None => std::future::pending().await,
    }
}

/// A client with the commands that it has sent.
struct BashClient<'a, K> {
    sink: &'a mut K,
    target: &'a AioTarget,
    id: String,
    /// Commands after the current one.
    waiting: VecDeque<ProcessId>,
    current: Option<OutputStream>,
    stdout: Utf8Decoder,
    stderr: Utf8Decoder,
}

impl<K: MessageSink> BashClient<'_, K> {
    async fn send_message(&mut self, message: SocketMessage) -> Result<(), SocketClosed> {
        match timeout(SEND_TIMEOUT, self.sink.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(SocketClosed),
        }
    }

    async fn send(&mut self, message: &Value) -> Result<(), SocketClosed> {
        self.send_message(SocketMessage::Text(message.to_string())).await
    }

    async fn send_error(&mut self, reason: &str) -> Result<(), SocketClosed> {
        self.send(&json!({"type": "error", "data": reason})).await
    }

    async fn handle_message(&mut self, message: &SocketMessage) -> Result<(), SocketClosed> {
        let text = match message {
            SocketMessage::Text(text) => text.as_bytes(),
            SocketMessage::Binary(bytes) => bytes,
            SocketMessage::Ping | SocketMessage::Pong => return Ok(()),
            SocketMessage::Close(_) => return Err(SocketClosed),
        };
        let done = match serde_json::from_slice(text) {
            Ok(BashMessage::Exec(command)) => self.start_command(command).await,
            Ok(BashMessage::Input(input)) => self.write_input(&input).await,
            Ok(BashMessage::Ping) => return self.send(&json!({"type": "pong"})).await,
            Ok(BashMessage::Pong) => Ok(()),
            Err(error) => Err(AioProblem::bad_request(error.to_string())),
        };
        match done {
            Ok(()) => Ok(()),
            Err(problem) => self.send_error(problem_text(&problem)).await,
        }
    }

    async fn start_command(&mut self, command: String) -> Result<(), AioProblem> {
        if self.waiting.len() >= MAX_WAITING_COMMANDS {
            return Err(AioProblem::bad_request("too many commands wait in this session"));
        }
        let run = queued_run(&self.target.sandbox, check_long_text(command, "data")?);
        // The session may have been closed, for example after a long time without a command.
        let new = NewBashSession { id: Some(self.id.clone()), ..NewBashSession::default() };
        let session = open_session(self.target, new, RequestTime::now()).await?.session;
        let started = self.target.sandbox.sessions().start_detached_run(&session, run).await;
        self.waiting.push_back(started.map_err(start_problem)?);
        self.follow_next().await
    }

    /// Follows the next command if there is no current one.
    async fn follow_next(&mut self) -> Result<(), AioProblem> {
        if self.current.is_some() {
            return Ok(());
        }
        let Some(process) = self.waiting.pop_front() else { return Ok(()) };
        let output = self.target.sandbox.processes().follow_output(&process, JournalOffset(0)).await?;
        self.current = Some(output);
        Ok(())
    }

    async fn write_input(&mut self, input: &str) -> Result<(), AioProblem> {
        let running = self.current.as_ref().map(|output| output.process.clone());
        let running = running.ok_or_else(|| AioProblem::bad_request("No running process to write to"))?;
        write_to_command(&self.target.sandbox, &running, input.as_bytes()).await
    }

    async fn forward_event(&mut self, event: Result<OutputEvent, ServiceError>) -> Result<(), SocketClosed> {
        match event {
            Ok(OutputEvent::Output { stream, bytes, .. }) => {
                let mut text = String::new();
                let (decoder, name) = match stream {
                    StreamKind::Stderr => (&mut self.stderr, "stderr"),
                    StreamKind::Stdout | StreamKind::Terminal | StreamKind::KernelEvent => {
                        (&mut self.stdout, "stdout")
                    }
                };
                decoder.decode(&bytes, &mut text);
                if text.is_empty() {
                    return Ok(());
                }
                self.send(&json!({"type": "output", "data": text, "stream": name})).await
            }
            Ok(OutputEvent::Gap { .. }) => self.send_error("output is missing here").await,
            Ok(OutputEvent::Ended(end)) => {
                let process = self.current.take().map(|output| output.process);
                (self.stdout, self.stderr) = (Utf8Decoder::default(), Utf8Decoder::default());
                let (status, exit_code) = BashStatus::from_end(&end);
                let command_id = process.map(|process| process.as_str().to_owned());
                let done = json!({
                    "type": "command_done",
                    "command_id": command_id,
                    "exit_code": exit_code,
                    "status": status,
                    "data": {"command_id": command_id, "exit_code": exit_code, "status": status},
                });
                self.send(&done).await?;
                self.follow_or_report().await
            }
            Err(error) => {
                self.current = None;
                self.send_error(&error.to_string()).await?;
                self.follow_or_report().await
            }
        }
    }

    async fn follow_or_report(&mut self) -> Result<(), SocketClosed> {
        match self.follow_next().await {
            Ok(()) => Ok(()),
            Err(problem) => self.send_error(problem_text(&problem)).await,
        }
    }
}

/// The text of a problem for a client.
fn problem_text(problem: &AioProblem) -> &str {
    problem.validation.first().map_or(&problem.message, |error| &error.msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_parsed() {
        let parse = |text: &str| serde_json::from_str::<BashMessage>(text).ok();
        let exec = BashMessage::Exec("ls".to_owned());
        assert_eq!(parse(r#"{"type":"exec","data":"ls"}"#), Some(exec));
        let input = BashMessage::Input("a\n".to_owned());
        assert_eq!(parse(r#"{"type":"input","data":"a\n","other":1}"#), Some(input));
        assert_eq!(parse(r#"{"type":"ping"}"#), Some(BashMessage::Ping));
        for text in
            ["", "ls", "{}", r#"{"type":"exec"}"#, r#"{"type":"exec","data":7}"#, r#"{"type":"kill"}"#]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
