//! A command over a WebSocket: input, output byte for byte, signals. The frames are in `coracle-client`.

use anyhow::{Context, Result, anyhow};
use coracle_client::exec::{self, ExecFrame, ExecRequest};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::failed_with_status;
use super::sandbox::SandboxClient;
use super::websocket::{ClientWebSocket, ServerMessage};

/// A command that was requested. Dropping this leaves it running.
pub(crate) struct ExecSocket<S = TokioIo<Upgraded>> {
    socket: ClientWebSocket<S>,
}

/// The statuses with which a server without this socket answers.
const UNSUPPORTED_STATUSES: [StatusCode; 4] = [
    StatusCode::NOT_FOUND,
    StatusCode::METHOD_NOT_ALLOWED,
    StatusCode::UPGRADE_REQUIRED,
    StatusCode::NOT_IMPLEMENTED,
];

/// The header that may carry the first frame, and in which the server accepts it.
const START_HEADER: HeaderName = HeaderName::from_static("coracle-exec-start");
/// Servers accept only small heads of requests. A longer start is sent as a frame.
const MAX_START_HEADER_BYTES: usize = 4 << 10;

const BROKEN: &str = "could not exchange data with the command";

/// How the first frame reaches the server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartCarrier {
    /// With the upgrade, if it fits: this saves a round trip with a server that knows it.
    Header,
    Frame,
}

impl SandboxClient {
    /// Requests a command; `None` if the server has no such socket. With a size, the command gets a
    /// terminal.
    pub(crate) async fn open_exec_socket(
        &self,
        request: &ExecRequest,
        stdin: bool,
        size: Option<(u16, u16)>,
        carrier: StartCarrier,
    ) -> Result<Option<ExecSocket>> {
        let path = format!("/pty/coracle.exec/ws?pty={}", u8::from(size.is_some()));
        let start = request.start_frame(stdin, size);
        let extra = if carrier == StartCarrier::Header { start_header(&start) } else { HeaderMap::new() };
        let (socket, headers) = match self.api.open_websocket(&path, extra).await {
            Err(error) if UNSUPPORTED_STATUSES.iter().any(|status| failed_with_status(&error, *status)) => {
                return Ok(None);
            }
            opened => opened?,
        };
        let mut socket = ExecSocket { socket };
        if !headers.contains_key(START_HEADER) {
            socket.queue_text(&start)?;
            socket.write_queued().await?;
        }
        Ok(Some(socket))
    }
}

/// The first frame as a header. Proxies may recode bytes that are not ASCII, so such a command is sent as a
/// frame.
fn start_header(start: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if start.is_ascii()
        && start.len() <= MAX_START_HEADER_BYTES
        && let Ok(mut value) = HeaderValue::from_str(start)
    {
        // It may have secrets in the variables of the command.
        value.set_sensitive(true);
        headers.insert(START_HEADER, value);
    }
    headers
}

impl<S: AsyncRead + AsyncWrite + Unpin> ExecSocket<S> {
    /// A socket over any stream, for tests with a server of their own.
    #[cfg(test)]
    pub(crate) fn over_stream(stream: S) -> Self {
        Self { socket: ClientWebSocket::new(stream) }
    }

    pub(crate) fn queue_input(&mut self, bytes: &[u8]) -> Result<()> {
        self.socket.queue_binary(&exec::input_frame(bytes)).context(BROKEN)
    }

    pub(crate) fn queue_input_end(&mut self) -> Result<()> {
        self.queue_text(&exec::input_end_frame())
    }

    pub(crate) fn queue_signal(&mut self, name: &str) -> Result<()> {
        self.queue_text(&exec::signal_frame(name))
    }

    pub(crate) fn queue_resize(&mut self, (columns, rows): (u16, u16)) -> Result<()> {
        self.queue_text(&exec::resize_frame(columns, rows))
    }

    fn queue_text(&mut self, text: &str) -> Result<()> {
        self.socket.queue_text(text).context(BROKEN)
    }

    /// Sends the frames that are queued. This blocks for as long as the server does not read. Dropping the future
    /// loses nothing.
    pub(crate) async fn write_queued(&mut self) -> Result<()> {
        self.socket.write_queued().await.context(BROKEN)
    }

    /// The next frame from the server. Dropping the future loses nothing.
    pub(crate) async fn next_frame(&mut self) -> Result<ExecFrame> {
        loop {
            let frame = match self.socket.next_message().await.context(BROKEN)? {
                ServerMessage::Binary(frame) => ExecFrame::from_binary(frame),
                ServerMessage::Text(text) => ExecFrame::from_text(&text),
                ServerMessage::Close => {
                    return Err(anyhow!("the server closed the connection before the command ended"));
                }
            };
            if let Some(frame) = frame {
                return Ok(frame);
            }
        }
    }
}
