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

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use domain::process::TerminalSize;
use futures_util::{SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use super::http as web;
use super::sandbox::SandboxClient;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

const INPUT_FRAME: u8 = 0;
const OUTPUT_FRAME: u8 = 1;
const ERROR_OUTPUT_FRAME: u8 = 2;
const REPLAY_FRAME: u8 = 3;
/// A replay begins with the offset of its first byte.
const REPLAY_OFFSET_BYTES: usize = 8;

/// A shell on a terminal of its own. Dropping this leaves it running.
#[derive(Debug)]
pub(crate) struct TerminalClient {
    socket: WebSocketStream<TcpStream>,
    sandbox: SandboxClient,
    session: String,
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
        let socket = tokio::time::timeout(CONNECT_TIMEOUT, self.attach_terminal(&opened.session_id))
            .await
            .context("the terminal did not answer in time")??;
        Ok(TerminalClient { socket, sandbox: self.clone(), session: opened.session_id })
    }

    async fn attach_terminal(&self, session: &str) -> Result<WebSocketStream<TcpStream>> {
        let address = self.api.base().strip_prefix("http://").context("the address is not http")?;
        let mut request = format!("ws://{address}/pty/{session}/ws?pty=1").into_client_request()?;
        request.headers_mut().extend(self.api.headers().clone());
        let authority = request.uri().authority().context("the address names no host")?;
        let port = authority.port_u16().unwrap_or(80);
        let stream = TcpStream::connect((authority.host().trim_matches(['[', ']']), port)).await?;
        stream.set_nodelay(true)?;
        let (socket, _) = tokio_tungstenite::client_async(request, stream)
            .await
            .context("could not attach to the terminal")?;
        Ok(socket)
    }
}

impl TerminalClient {
    pub(crate) async fn send(&mut self, what: TerminalMessage) -> Result<()> {
        let message = match what {
            TerminalMessage::Input(bytes) => {
                let mut frame = Vec::with_capacity(bytes.len() + 1);
                frame.push(INPUT_FRAME);
                frame.extend_from_slice(&bytes);
                Message::binary(frame)
            }
            TerminalMessage::Resize(size) => {
                Message::text(json!({"type": "resize", "cols": size.columns, "rows": size.rows}).to_string())
            }
        };
        self.socket.send(message).await.context("the connection to the terminal broke")
    }

    /// The next message from the terminal. Dropping the future loses nothing.
    pub(crate) async fn next_event(&mut self) -> Result<TerminalEvent> {
        loop {
            let message =
                self.socket.next().await.ok_or_else(|| anyhow!("the server closed the terminal"))?;
            let event = match message.context("the connection to the terminal broke")? {
                Message::Binary(frame) => parse_binary_frame(frame),
                Message::Text(text) => parse_control_message(&text)?,
                Message::Close(_) => bail!("the server closed the terminal"),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => None,
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    /// Ends the shell, if it still runs: a user who leaves a terminal expects it to be gone.
    pub(crate) async fn close(self) {
        drop(self.socket);
        // The shell has usually ended already, and its session with it.
        self.sandbox.api.delete(&format!("/pty/{}", self.session)).await.ok();
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
