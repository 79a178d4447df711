//! One command over a WebSocket: its input, its output byte for byte, its signals, its end.
//!
//! ```text
//! client                                            server
//!   ── GET /pty/coracle.exec/ws?pty=0|1, upgrade ────►
//!   ── text coracle.start {argv, cwd, envs, …} ──────►  starts the command; a client that sends this
//!                                                       frame as a header of the upgrade instead, and
//!                                                       finds that header in the response, saves a
//!                                                       round trip
//!   ◄── text connected {session_id} ─────────────────   the id of the process
//!   ── 0x00 bytes · coracle.stdin-end ───────────────►
//!   ◄── text coracle.credit {bytes} ─────────────────   this much input was delivered
//!   ── text signal · resize · ping ──────────────────►
//!   ◄── 0x01|0x02 bytes · text coracle.gap {from,to} ─
//!   ◄── text exit {exit_code, coracle}, close 1000 ──
//! ```
//! The command is blocked while this client does not read, up to the server's stall limit. Input
//! never blocks signals: a client sends no more than [`INPUT_WINDOW`] bytes that were not credited. Terminals
//! of the reference protocol are in `terminal_frames.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use bytes::Bytes;
use domain::process::{ProcessIo, ProcessSpec, StdinMode, TerminalSize};
use domain::{ProcessId, StreamKind};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{FutureExt, SinkExt, StreamExt};
use http::HeaderValue;
use serde::{Deserialize, Serialize};
use service::{
    DEFAULT_TERMINAL_SIZE, OutputEvent, OutputStream, ProcessInput, ServiceError, SignalTarget,
    TERMINAL_TYPE, TerminalMode,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval_at, timeout};

use super::ExecTarget;
use super::command::{RunCommandBody, parse_foreground_command};
use super::problem::ExecdProblem;
use crate::kit::command_ending::{CommandEnding, exit_code};
use crate::kit::terminal_socket::signal_number;
use crate::opensandbox::OpenSandboxState;

/// The name used in place of a terminal's name.
pub(super) const EXEC_TERMINAL_NAME: &str = "coracle.exec";

/// The header of the upgrade that may carry the first frame, and of the response that accepts it.
pub(in crate::opensandbox) const START_HEADER: &str = "coracle-exec-start";

/// How many bytes of input a client may send before they are credited.
const INPUT_WINDOW: usize = 1 << 20;
/// Credit is sent in steps, to save frames.
const CREDIT_STEP: usize = INPUT_WINDOW / 4;
/// How many frames of input may wait; more than a client needs to fill the window.
const MAX_QUEUED_FRAMES: usize = 4096;
/// How many bytes of output are sent before a flush, if output arrives faster than it is sent.
const MAX_BATCH_BYTES: usize = 256 << 10;
/// How long a client may take to send the first frame, and to close the socket.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a command may leave input unread after its client disconnected.
const ABANDONED_INPUT_TIMEOUT: Duration = Duration::from_secs(10);
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long a client may take nothing, beyond the time for which its command is held back. It is long
/// because the user may view the output in a pager, which reads on only when a key is pressed.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(15 * 60);
const SIGHUP: i32 = 1;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;

const CLOSE_NORMAL: u16 = 1000;
const CLOSE_FAILED: u16 = 1011;

type SocketSink = SplitSink<WebSocket, Message>;

/// The first frame of the client.
#[derive(Deserialize)]
struct StartFrame {
    #[serde(rename = "type")]
    kind: String,
    #[serde(flatten)]
    run: RunCommandBody,
    /// Whether input will be sent; otherwise the command reads from `/dev/null`.
    stdin: Option<bool>,
    /// The size of the terminal, with `pty=1`.
    cols: Option<u16>,
    rows: Option<u16>,
}

/// Text frames of the client after the first.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum ClientFrame {
    /// The first frame again: a proxy removed the header of the response that accepted it.
    #[serde(rename = "coracle.start")]
    Start,
    #[serde(rename = "coracle.stdin-end")]
    StdinEnd,
    #[serde(rename = "signal")]
    Signal { signal: String },
    #[serde(rename = "resize")]
    Resize {
        #[serde(default)]
        cols: u16,
        #[serde(default)]
        rows: u16,
    },
    #[serde(rename = "ping")]
    Ping,
}

/// Text frames to the client.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
enum ServerFrame {
    #[serde(rename = "connected")]
    Connected { session_id: String, mode: &'static str },
    #[serde(rename = "coracle.credit")]
    Credit { bytes: usize },
    /// The command no longer reads its input.
    #[serde(rename = "coracle.stdin-closed")]
    StdinClosed,
    /// The output from `from` up to, not including, `to` is no longer retained.
    #[serde(rename = "coracle.gap")]
    Gap { from: u64, to: u64 },
    #[serde(rename = "exit")]
    Exit {
        exit_code: i32,
        #[serde(skip_serializing_if = "Option::is_none")]
        coracle: Option<CommandEnding>,
    },
    #[serde(rename = "error")]
    Error {
        code: &'static str,
        error: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        coracle: Option<CommandEnding>,
    },
    #[serde(rename = "pong")]
    Pong,
}

/// The connection broke.
struct ClientGone;

impl ClientGone {
    fn from_socket_error(error: axum::Error) -> Self {
        tracing::debug!(%error, "client of a command disconnected");
        Self
    }
}

/// Serves one client until it disconnects or its command ends.
pub(super) async fn serve_exec_socket(
    socket: WebSocket,
    state: OpenSandboxState,
    target: ExecTarget,
    mode: TerminalMode,
    start: Option<HeaderValue>,
) {
    let (mut sink, mut stream) = socket.split();
    let code = match start_command(&mut stream, start, &state, &target, mode).await {
        Ok(following) => relay_command(&mut sink, &mut stream, following, &state, &target, mode)
            .await
            .map(|()| CLOSE_NORMAL),
        Err(refusal) => send_frame(&mut sink, &refusal).await.map(|()| CLOSE_FAILED),
    };
    let Ok(code) = code else { return };
    let close = CloseFrame { code, reason: "".into() };
    let said = timeout(HANDSHAKE_TIMEOUT, sink.send(Message::Close(Some(close)))).await;
    // Hanging up at once would reset the connection of a client that has not read everything.
    let heard = async { while let Some(Ok(_)) = stream.next().await {} };
    if !matches!(said, Ok(Ok(()))) || timeout(HANDSHAKE_TIMEOUT, heard).await.is_err() {
        tracing::debug!("client of a command did not close its socket");
    }
}

/// Starts the command of the first frame, which came with the upgrade or is still to come.
async fn start_command(
    stream: &mut SplitStream<WebSocket>,
    start: Option<HeaderValue>,
    state: &OpenSandboxState,
    target: &ExecTarget,
    mode: TerminalMode,
) -> Result<OutputStream, ServerFrame> {
    let invalid = |error: String| ServerFrame::Error { code: "INVALID_FRAME", error, coracle: None };
    let process = match start {
        Some(start) => parse_start_frame(start.as_bytes(), mode, state),
        None => {
            let Ok(Some(Ok(Message::Text(text)))) = timeout(HANDSHAKE_TIMEOUT, stream.next()).await else {
                return Err(invalid("the first frame must be `coracle.start`".to_owned()));
            };
            parse_start_frame(text.as_bytes(), mode, state)
        }
    };
    let process = process.map_err(invalid)?;
    state.service.launch_process(&target.owner, &target.id, process).await.map_err(start_error_frame)
}

fn parse_start_frame(
    text: &[u8],
    mode: TerminalMode,
    state: &OpenSandboxState,
) -> Result<ProcessSpec, String> {
    let start: StartFrame = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if start.kind != "coracle.start" {
        return Err(format!("the first frame is `{}`, not `coracle.start`", start.kind));
    }
    let process = parse_foreground_command(start.run, state.service.output_settings());
    let mut process = process.map_err(|fault| fault.0.message)?;
    process.stdin = if start.stdin == Some(true) { StdinMode::Piped } else { StdinMode::Empty };
    if mode == TerminalMode::Terminal {
        let given = |count: Option<u16>, default| count.filter(|count| *count > 0).unwrap_or(default);
        let columns = given(start.cols, DEFAULT_TERMINAL_SIZE.columns);
        process.io = ProcessIo::Terminal(TerminalSize {
            columns,
            rows: given(start.rows, DEFAULT_TERMINAL_SIZE.rows),
        });
        process.env.entry("TERM".to_owned()).or_insert_with(|| TERMINAL_TYPE.to_owned());
    }
    Ok(process)
}

fn start_error_frame(error: ServiceError) -> ServerFrame {
    let coracle = CommandEnding::from_launch_error(&error);
    ServerFrame::Error { code: "START_FAILED", error: ExecdProblem::from(error).0.message, coracle }
}

/// Relays both directions until the command has ended or the client has disconnected.
async fn relay_command(
    sink: &mut SocketSink,
    stream: &mut SplitStream<WebSocket>,
    following: OutputStream,
    state: &OpenSandboxState,
    target: &ExecTarget,
    mode: TerminalMode,
) -> Result<(), ClientGone> {
    let session_id = following.process.to_string();
    send_frame(sink, &ServerFrame::Connected { session_id, mode: mode.name() }).await?;
    let (replies, waiting) = mpsc::channel(16);
    let process = following.process.clone();
    let mut listener =
        ClientFrameHandler { front: state, scope: target, process, mode, replies, input: None };
    let limit = state.service.output_settings().stall_limit.saturating_add(UNREAD_TIMEOUT);
    // A client that does not read output must still be able to send signals.
    let ended = {
        let mut listening = std::pin::pin!(listener.handle_frames(stream));
        let (ended, heard_all) = tokio::select! {
            ended = forward_output(sink, following, waiting, limit) => (ended, false),
            () = &mut listening => (Err(ClientGone), true),
        };
        // The last frame of a client that has gone may be a signal for the command.
        if ended.is_err() && !heard_all && timeout(HANDSHAKE_TIMEOUT, listening).await.is_err() {
            tracing::debug!(
                "client of a command takes no output and sends more frames; its connection is closed"
            );
        }
        ended
    };
    if ended.is_err() {
        listener.hang_up().await;
    }
    ended
}

/// Gives up a client that takes nothing for so long. It may be gone without a word, and its
/// connection would be held for ever.
async fn send_within<T>(
    limit: Duration,
    sending: impl Future<Output = Result<T, ClientGone>>,
) -> Result<T, ClientGone> {
    timeout(limit, sending).await.unwrap_or_else(|_elapsed| {
        tracing::debug!("the client of a command takes nothing; its connection is closed");
        Err(ClientGone)
    })
}

/// Sends output and replies until the command has ended.
async fn forward_output(
    sink: &mut SocketSink,
    mut following: OutputStream,
    mut waiting: mpsc::Receiver<ServerFrame>,
    limit: Duration,
) -> Result<(), ClientGone> {
    let mut ping = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
    loop {
        // Each branch is cancel-safe.
        let event = tokio::select! {
            event = following.next() => event,
            Some(reply) = waiting.recv() => {
                send_within(limit, send_frame(sink, &reply)).await?;
                continue;
            }
            _ = ping.tick() => {
                let sent = sink.send(Message::Ping(Bytes::new()));
                send_within(limit, async { sent.await.map_err(ClientGone::from_socket_error) }).await?;
                continue;
            }
        };
        let (mut ended, mut fed) = send_within(limit, queue_event(sink, event)).await?;
        while !ended
            && fed < MAX_BATCH_BYTES
            && let Some(event) = following.next().now_or_never()
        {
            let (over, more) = send_within(limit, queue_event(sink, event)).await?;
            ended = over;
            fed += more;
        }
        send_within(limit, async { sink.flush().await.map_err(ClientGone::from_socket_error) }).await?;
        if ended {
            return Ok(());
        }
    }
}

/// Queues one event; returns whether it was the last, and how many bytes it had.
async fn queue_event(
    sink: &mut SocketSink,
    event: Result<OutputEvent, ServiceError>,
) -> Result<(bool, usize), ClientGone> {
    let (message, ended, length) = match event {
        Ok(OutputEvent::Output { stream, bytes, .. }) => {
            let mut frame = Vec::with_capacity(bytes.len() + 1);
            frame.push(if stream == StreamKind::Stderr { STDERR } else { STDOUT });
            frame.extend_from_slice(&bytes);
            (Message::Binary(frame.into()), false, bytes.len())
        }
        Ok(OutputEvent::Gap { from, to }) => {
            (text_message(&ServerFrame::Gap { from: from.0, to: to.0 }), false, 0)
        }
        Ok(OutputEvent::Ended(end)) => {
            let frame = ServerFrame::Exit {
                exit_code: exit_code(end.exit),
                coracle: CommandEnding::from_exit(end.exit),
            };
            (text_message(&frame), true, 0)
        }
        Err(error) => {
            let coracle = Some(CommandEnding::Lost);
            (
                text_message(&ServerFrame::Error { code: "SESSION_GONE", error: error.to_string(), coracle }),
                true,
                0,
            )
        }
    };
    sink.feed(message).await.map_err(ClientGone::from_socket_error)?;
    Ok((ended, length))
}

fn text_message(frame: &ServerFrame) -> Message {
    let json = serde_json::to_string(frame).expect("frames contain only strings and numbers");
    Message::Text(json.into())
}

async fn send_frame(sink: &mut SocketSink, frame: &ServerFrame) -> Result<(), ClientGone> {
    sink.send(text_message(frame)).await.map_err(ClientGone::from_socket_error)
}

/// Handles the frames of the client.
struct ClientFrameHandler<'a> {
    front: &'a OpenSandboxState,
    scope: &'a ExecTarget,
    process: ProcessId,
    mode: TerminalMode,
    replies: mpsc::Sender<ServerFrame>,
    /// Created with the first input.
    input: Option<InputQueue>,
}

/// Queued input. Dropping it closes the command's input once everything is delivered.
struct InputQueue {
    pieces: mpsc::Sender<Bytes>,
    undelivered: Arc<AtomicUsize>,
}

impl ClientFrameHandler<'_> {
    /// Handles frames until the client disconnects.
    async fn handle_frames(&mut self, stream: &mut SplitStream<WebSocket>) {
        let mut ended_input = false;
        while let Some(Ok(message)) = stream.next().await {
            match message {
                Message::Binary(bytes) if bytes.first() == Some(&STDIN) && !ended_input => {
                    // Copied, since a slice would keep the whole read buffer alive.
                    if self.feed_input(Bytes::copy_from_slice(&bytes[1..])).is_err() {
                        self.reply_error("INVALID_FRAME", "input was sent without credit".to_owned()).await;
                        return;
                    }
                }
                Message::Text(text) => match serde_json::from_str(&text) {
                    Ok(ClientFrame::StdinEnd) => {
                        // Opened even if nothing was sent: the command waits for the end of its input.
                        self.open_input();
                        self.input = None;
                        ended_input = true;
                    }
                    Ok(frame) => self.handle_frame(frame).await,
                    Err(error) => self.reply_error("INVALID_FRAME", error.to_string()).await,
                },
                Message::Binary(_) => self.reply_error("INVALID_FRAME", "unexpected data".to_owned()).await,
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return,
            }
        }
    }

    async fn handle_frame(&self, frame: ClientFrame) {
        let (service, owner, id) = (&self.front.service, &self.scope.owner, &self.scope.id);
        let done = match frame {
            ClientFrame::Signal { signal } => match signal_number(&signal) {
                Some(number) => {
                    service.signal_process(owner, id, &self.process, number, SignalTarget::Group).await
                }
                None => return self.reply_error("INVALID_FRAME", format!("unknown signal `{signal}`")).await,
            },
            ClientFrame::Resize { cols, rows }
                if self.mode == TerminalMode::Terminal && cols > 0 && rows > 0 =>
            {
                service.resize_terminal(owner, id, &self.process, TerminalSize { columns: cols, rows }).await
            }
            ClientFrame::Ping => return self.send_reply(ServerFrame::Pong).await,
            ClientFrame::Resize { .. } | ClientFrame::StdinEnd | ClientFrame::Start => Ok(()),
        };
        if let Err(error) = done {
            // A command that has just ended cannot be signalled; its exit event follows.
            tracing::debug!(%error, "failed to forward a signal or terminal size");
        }
    }

    fn open_input(&mut self) -> &InputQueue {
        self.input.get_or_insert_with(|| {
            let (pieces, queue) = mpsc::channel(MAX_QUEUED_FRAMES);
            let undelivered = Arc::new(AtomicUsize::new(0));
            let (front, scope) = (self.front.clone(), self.scope.clone());
            let deliver = deliver_input(
                front,
                scope,
                self.process.clone(),
                queue,
                Arc::clone(&undelivered),
                self.replies.clone(),
            );
            // The task outlives this client: input that was sent is delivered if the command reads it, and
            // then the input is closed.
            tokio::spawn(deliver);
            InputQueue { pieces, undelivered }
        })
    }

    fn feed_input(&mut self, bytes: Bytes) -> Result<(), ClientGone> {
        if bytes.is_empty() {
            return Ok(());
        }
        let input = self.open_input();
        let before = input.undelivered.fetch_add(bytes.len(), Ordering::Relaxed);
        if before + bytes.len() > INPUT_WINDOW {
            return Err(ClientGone);
        }
        match input.pieces.try_send(bytes) {
            // The command has closed its input; the client was informed.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(ClientGone),
        }
    }

    /// Sends SIGHUP if the user of a terminal disconnected, as a modem line would.
    async fn hang_up(&mut self) {
        self.input = None;
        if self.mode == TerminalMode::Terminal {
            let ExecTarget { owner, id, .. } = self.scope;
            let hung = self
                .front
                .service
                .signal_process(owner, id, &self.process, SIGHUP, SignalTarget::Group)
                .await;
            if let Err(error) = hung {
                tracing::debug!(%error, "failed to send SIGHUP: command already ended");
            }
        }
    }

    async fn reply_error(&self, code: &'static str, error: String) {
        self.send_reply(ServerFrame::Error { code, error, coracle: None }).await;
    }

    async fn send_reply(&self, frame: ServerFrame) {
        // This fails only if the connection is broken, which is detected elsewhere.
        self.replies.send(frame).await.ok();
    }
}

/// Delivers input in order, credits it, and then closes the command's input.
async fn deliver_input(
    state: OpenSandboxState,
    target: ExecTarget,
    process: ProcessId,
    mut queue: mpsc::Receiver<Bytes>,
    undelivered: Arc<AtomicUsize>,
    replies: mpsc::Sender<ServerFrame>,
) {
    let delivered = async {
        let mut input: ProcessInput = state.service.open_input(&target.owner, &target.id, &process).await?;
        let mut credit = 0;
        while let Some(piece) = queue.recv().await {
            tokio::select! {
                sent = input.send_bytes(&piece) => sent?,
                // The rest is dropped: input without a waiting client must not stay forever.
                () = wait_until_abandoned(&replies) => return Ok(()),
            }
            undelivered.fetch_sub(piece.len(), Ordering::Relaxed);
            credit += piece.len();
            if credit >= CREDIT_STEP {
                replies.send(ServerFrame::Credit { bytes: credit }).await.ok();
                credit = 0;
            }
        }
        input.close().await
    };
    if let Err(error) = delivered.await {
        tracing::debug!(%error, "command stopped reading its input");
        replies.send(ServerFrame::StdinClosed).await.ok();
    }
}

/// Waits until the client has been gone for longer than a command may take to read its input.
async fn wait_until_abandoned(replies: &mpsc::Sender<ServerFrame>) {
    replies.closed().await;
    tokio::time::sleep(ABANDONED_INPUT_TIMEOUT).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_given_up() {
        let begun = Instant::now();
        let given_up = send_within(UNREAD_TIMEOUT, std::future::pending::<Result<(), ClientGone>>()).await;
        assert!(given_up.is_err());
        assert_eq!(begun.elapsed().as_secs(), UNREAD_TIMEOUT.as_secs());
        assert!(send_within(UNREAD_TIMEOUT, async { Ok(()) }).await.is_ok());
    }

    #[test]
    fn frames_have_the_documented_names() {
        let frame = |text: &str| serde_json::from_str::<ClientFrame>(text);
        assert!(matches!(frame(r#"{"type":"coracle.stdin-end"}"#), Ok(ClientFrame::StdinEnd)));
        assert!(matches!(frame(r#"{"type":"resize","cols":80,"rows":24}"#), Ok(ClientFrame::Resize { .. })));
        assert!(matches!(frame(r#"{"type":"coracle.start","argv":["true"]}"#), Ok(ClientFrame::Start)));
        assert!(frame(r#"{"type":"coracle.other"}"#).is_err());
        let json = |frame: &ServerFrame| serde_json::to_string(frame).unwrap();
        assert_eq!(json(&ServerFrame::Gap { from: 1, to: 5 }), r#"{"type":"coracle.gap","from":1,"to":5}"#);
        assert_eq!(
            json(&ServerFrame::Exit { exit_code: 3, coracle: None }),
            r#"{"type":"exit","exit_code":3}"#
        );
        let oom = ServerFrame::Exit { exit_code: -1, coracle: Some(CommandEnding::Oom) };
        assert_eq!(json(&oom), r#"{"type":"exit","exit_code":-1,"coracle":{"ending":"oom"}}"#);
    }
}
