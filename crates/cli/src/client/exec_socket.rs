//! A command over a WebSocket: input, output byte for byte, signals. The frames are in `coracle-client`.

use anyhow::{Context, Result, anyhow};
use coracle_client::exec::{self, ExecFrame, ExecRequest};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use http::StatusCode;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::refused_with;
use super::sandbox::Sandbox;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// A command that was requested. Dropping this leaves it running.
pub(crate) struct ExecSocket {
    sink: SplitSink<Socket, Message>,
    stream: SplitStream<Socket>,
}

/// The statuses with which a server without this socket answers.
const ABSENT: [StatusCode; 4] = [
    StatusCode::NOT_FOUND,
    StatusCode::METHOD_NOT_ALLOWED,
    StatusCode::UPGRADE_REQUIRED,
    StatusCode::NOT_IMPLEMENTED,
];

impl Sandbox {
    /// Requests a command; `None` if the server has no such socket. With a size, the command gets a
    /// terminal.
    pub(crate) async fn exec(
        &self,
        request: &ExecRequest,
        stdin: bool,
        size: Option<(u16, u16)>,
    ) -> Result<Option<ExecSocket>> {
        let path = format!("/pty/coracle.exec/ws?pty={}", u8::from(size.is_some()));
        let upgraded = match self.api.upgrade(&path).await {
            Err(error) if ABSENT.iter().any(|status| refused_with(&error, *status)) => return Ok(None),
            upgraded => upgraded?,
        };
        let socket = Socket::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await;
        let (sink, stream) = socket.split();
        let mut socket = ExecSocket { sink, stream };
        socket.send(Message::text(request.start_frame(stdin, size))).await?;
        Ok(Some(socket))
    }
}

impl ExecSocket {
    pub(crate) async fn send_input(&mut self, bytes: &[u8]) -> Result<()> {
        self.send(Message::binary(exec::input_frame(bytes))).await
    }

    pub(crate) async fn end_input(&mut self) -> Result<()> {
        self.send(Message::text(exec::input_end())).await
    }

    pub(crate) async fn signal(&mut self, name: &str) -> Result<()> {
        self.send(Message::text(exec::signal_frame(name))).await
    }

    pub(crate) async fn resize(&mut self, (columns, rows): (u16, u16)) -> Result<()> {
        self.send(Message::text(exec::resize_frame(columns, rows))).await
    }

    async fn send(&mut self, message: Message) -> Result<()> {
        self.sink.send(message).await.context("the connection to the command broke")
    }

    /// The next frame from the server. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<ExecFrame> {
        loop {
            let message = self.stream.next().await.ok_or_else(closed)?;
            let frame = match message.context("the connection to the command broke")? {
                Message::Binary(frame) => ExecFrame::from_binary(frame),
                Message::Text(text) => ExecFrame::from_text(&text),
                Message::Close(_) => return Err(closed()),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => None,
            };
            if let Some(frame) = frame {
                return Ok(frame);
            }
        }
    }
}

fn closed() -> anyhow::Error {
    anyhow!("the server closed the connection before the command ended")
}
