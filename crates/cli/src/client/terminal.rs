//! A terminal in a sandbox, over a WebSocket.
//!
//! ```text
//! us                                          server
//!   ── POST /pty ──────────────────────────────►
//!   ── GET /pty/{id}/ws, upgrade ──────────────►
//!   ◄── text {"type":"connected"} ──────────────
//!   ── binary 0x00 + input, text resize ───────►
//!   ◄── binary 0x01 + output, 0x03 + offset + replayed output
//!   ◄── text {"type":"exit","exit_code":0}, close
//! ```

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use domain::process::TerminalSize;
use http::HeaderMap;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::http as web;
use super::sandbox::SandboxClient;
use super::websocket::{ClientWebSocket, ServerMessage};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the server may take to end the shell when the user leaves.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const BROKEN: &str = "could not exchange data with the terminal";

const INPUT_FRAME: u8 = 0;
const OUTPUT_FRAME: u8 = 1;
const ERROR_OUTPUT_FRAME: u8 = 2;
const REPLAY_FRAME: u8 = 3;
/// A replay begins with the offset of its first byte.
const REPLAY_OFFSET_BYTES: usize = 8;

/// A shell on a terminal of its own. Dropping this leaves it running.
#[derive(Debug)]
pub(crate) struct TerminalClient {
    pub(crate) socket: TerminalSocket,
    sandbox: SandboxClient,
    session: String,
}

/// The connection to the terminal of a shell.
#[derive(Debug)]
pub(crate) struct TerminalSocket<S = TokioIo<Upgraded>> {
    socket: ClientWebSocket<S>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TerminalEvent {
    Output(Bytes),
    Exited(i32),
}

#[derive(Debug)]
pub(crate) enum TerminalMessage {
    Input(Vec<u8>),
    Resize(TerminalSize),
}

#[derive(Deserialize)]
struct OpenTerminalResponse {
    session_id: String,
}

#[derive(Deserialize)]
struct ControlMessage {
    #[serde(rename = "type")]
    kind: String,
    exit_code: Option<i32>,
    code: Option<String>,
    error: Option<String>,
}

impl SandboxClient {
    pub(crate) async fn open_terminal(
        &self,
        directory: Option<&str>,
        text: Option<&str>,
    ) -> Result<TerminalClient> {
        let mut body = json!({});
        if let Some(directory) = directory {
            body["cwd"] = json!(directory);
        }
        if let Some(text) = text {
            body["command"] = json!(text);
        }
        let opened: OpenTerminalResponse = web::read_json(self.api.post_json("/pty", &body).await?).await?;
        let path = format!("/pty/{}/ws?pty=1", opened.session_id);
        let attaching = self.api.open_websocket(&path, HeaderMap::new());
        let (socket, _) = tokio::time::timeout(CONNECT_TIMEOUT, attaching)
            .await
            .context("the terminal did not answer in time")?
            .context("could not attach to the terminal")?;
        let socket = TerminalSocket { socket };
        Ok(TerminalClient { socket, sandbox: self.clone(), session: opened.session_id })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TerminalSocket<S> {
    /// A socket over any stream, for tests with a server of their own.
    #[cfg(test)]
    pub(crate) fn over_stream(stream: S) -> Self {
        Self { socket: ClientWebSocket::new(stream) }
    }

    /// Sends a message. This blocks for as long as the server does not read.
    pub(crate) async fn send(&mut self, message: TerminalMessage) -> Result<()> {
        match message {
            TerminalMessage::Input(bytes) => {
                let mut frame = Vec::with_capacity(bytes.len() + 1);
                frame.push(INPUT_FRAME);
                frame.extend_from_slice(&bytes);
                self.socket.queue_binary(&frame)?;
            }
            TerminalMessage::Resize(size) => {
                let message = json!({"type": "resize", "cols": size.columns, "rows": size.rows});
                self.socket.queue_text(&message.to_string())?;
            }
        }
        self.socket.write_queued().await.context(BROKEN)
    }

    /// The next message from the terminal. Dropping the future loses nothing.
    pub(crate) async fn next_event(&mut self) -> Result<TerminalEvent> {
        loop {
            let event = match self.socket.next_message().await.context(BROKEN)? {
                ServerMessage::Binary(frame) => parse_binary_frame(frame),
                ServerMessage::Text(text) => parse_control_message(&text)?,
                ServerMessage::Close => bail!("the server closed the terminal"),
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }
}

impl TerminalClient {
    /// Ends the shell, if it still runs: a user who leaves a terminal expects it to be gone.
    pub(crate) async fn close(self) {
        drop(self.socket);
        let path = format!("/pty/{}", self.session);
        // A failure is ignored: the shell has usually ended already, and its session with it. A server that does not
        // answer must not keep the user.
        tokio::time::timeout(CLOSE_TIMEOUT, self.sandbox.api.delete(&path)).await.ok();
    }
}

fn parse_binary_frame(mut frame: Bytes) -> Option<TerminalEvent> {
    let kind = *frame.first()?;
    let head = match kind {
        OUTPUT_FRAME | ERROR_OUTPUT_FRAME => 1,
        REPLAY_FRAME => 1 + REPLAY_OFFSET_BYTES,
        _ => return None,
    };
    if frame.len() <= head {
        return None;
    }
    Some(TerminalEvent::Output(frame.split_off(head)))
}

fn parse_control_message(text: &str) -> Result<Option<TerminalEvent>> {
    let control: ControlMessage =
        serde_json::from_str(text).context("the terminal sent a message that is not JSON")?;
    match control.kind.as_str() {
        "exit" => Ok(Some(TerminalEvent::Exited(control.exit_code.unwrap_or(-1)))),
        "error" => {
            let why = control.error.or(control.code).unwrap_or_default();
            bail!("the terminal failed: {why}")
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_replays_are_reported_alike() {
        let output = |bytes: &'static [u8]| Some(TerminalEvent::Output(Bytes::from_static(bytes)));
        assert_eq!(parse_binary_frame(Bytes::from_static(b"\x01hi")), output(b"hi"));
        assert_eq!(parse_binary_frame(Bytes::from_static(b"\x03\0\0\0\0\0\0\0\x05hi")), output(b"hi"));
        for frame in [&b""[..], b"\x01", b"\x03\0\0", b"\x07hi"] {
            assert_eq!(parse_binary_frame(Bytes::from_static(frame)), None);
        }
    }

    #[test]
    fn control_messages_end_the_session_or_mean_nothing() {
        let exit = parse_control_message(r#"{"type":"exit","exit_code":7}"#).expect("it reads");
        assert_eq!(exit, Some(TerminalEvent::Exited(7)));
        assert_eq!(parse_control_message(r#"{"type":"connected","mode":"pty"}"#).expect("it reads"), None);
        let error =
            parse_control_message(r#"{"type":"error","code":"START_FAILED"}"#).expect_err("it failed");
        assert_eq!(error.to_string(), "the terminal failed: START_FAILED");
    }
}
