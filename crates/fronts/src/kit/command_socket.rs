//! One command over a connection of messages: its input, its output byte for byte, its signals, its end.
//!
//! ```text
//! client                                            server
//!   ── text coracle.start {argv, cwd, envs, …} ──────►  starts the command
//!   ◄── text connected {session_id} ─────────────────   the id of the process
//!   ── 0x00 bytes · coracle.stdin-end ───────────────►
//!   ◄── text coracle.credit {bytes} ─────────────────   this much input was delivered
//!   ── text signal · resize · ping ──────────────────►
//!   ◄── 0x01|0x02 bytes · text coracle.gap {from,to} ─
//!   ◄── text exit {exit_code, coracle}, close 1000 ──
//! ```
//! The command is blocked while this client does not read, up to the server's stall limit. Input
//! never blocks signals: a client sends no more than `INPUT_WINDOW` bytes that were not credited. What
//! the first frame says about the command is up to the front; `frames.rs` has the others.

mod client_input;
mod frames;

use std::time::Duration;

use domain::process::ProcessSpec;
use futures_util::{FutureExt, SinkExt, StreamExt};
use service::{OutputEvent, OutputStream, SandboxRef, ServiceError, TerminalMode};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval_at, timeout};

use self::client_input::ClientFrameHandler;
use self::frames::{ServerFrame, event_message};
use super::command_ending::CommandEnding;
use super::socket::{
    CLOSE_FAILED, CLOSE_NORMAL, CloseReason, MessageSink, MessageStream, SocketError, SocketMessage,
    close_socket,
};

/// How many bytes of output are sent before a flush, if output arrives faster than it is sent.
const MAX_BATCH_BYTES: usize = 256 << 10;
/// How long a client may take to send the first frame, and to close the socket.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the frame that names the process waits for the first event of the command.
const FIRST_EVENT_DELAY: Duration = Duration::from_millis(2);
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long a client may take nothing, beyond the time for which its command is held back. It is long
/// because the user may view the output in a pager, which reads on only when a key is pressed.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// The sandbox of a command, and how the command is connected.
#[derive(Clone)]
pub(crate) struct CommandClient {
    pub(crate) sandbox: SandboxRef,
    pub(crate) mode: TerminalMode,
}

/// How a front reads the first frame.
pub(crate) struct StartFrameReader<P> {
    /// Returns the command of a first frame, or what is wrong with it.
    pub(crate) parse: P,
    /// Returns the message for a command that could not be started.
    pub(crate) describe_error: fn(ServiceError) -> String,
}

/// The connection broke.
struct ClientGone;

impl ClientGone {
    fn from_socket_error(error: SocketError) -> Self {
        tracing::debug!(%error, "client of a command disconnected");
        Self
    }
}

/// A command that was started, or why not.
pub(crate) struct StartedCommand(Result<OutputStream, ServerFrame>);

/// Serves one client until it disconnects or its command ends. The client sends the first frame.
pub(crate) async fn serve_command<P>(
    (sink, mut stream): (impl MessageSink, impl MessageStream),
    client: CommandClient,
    reader: StartFrameReader<P>,
) where
    P: Fn(&[u8]) -> Result<ProcessSpec, String>,
{
    let started = match timeout(HANDSHAKE_TIMEOUT, stream.next()).await {
        Ok(Some(Ok(SocketMessage::Text(text)))) => start_command(text.as_bytes(), &client, &reader).await,
        _ => StartedCommand(Err(invalid_frame("the first frame must be `coracle.start`".to_owned()))),
    };
    serve_started_command((sink, stream), client, started).await;
}

/// Serves the client of a command until it disconnects or the command ends.
pub(crate) async fn serve_started_command(
    (mut sink, mut stream): (impl MessageSink, impl MessageStream),
    client: CommandClient,
    StartedCommand(started): StartedCommand,
) {
    let code = match started {
        Ok(following) => {
            relay_command(&mut sink, &mut stream, following, &client).await.map(|()| CLOSE_NORMAL)
        }
        Err(refusal) => send_frame(&mut sink, &refusal).await.map(|()| CLOSE_FAILED),
    };
    let Ok(code) = code else { return };
    close_socket(&mut sink, &mut stream, CloseReason::new(code, ""), HANDSHAKE_TIMEOUT).await;
}

/// Starts the command of the first frame.
pub(crate) async fn start_command<P>(
    frame: &[u8],
    client: &CommandClient,
    reader: &StartFrameReader<P>,
) -> StartedCommand
where
    P: Fn(&[u8]) -> Result<ProcessSpec, String>,
{
    let process = match (reader.parse)(frame) {
        Ok(process) => process,
        Err(error) => return StartedCommand(Err(invalid_frame(error))),
    };
    let launched = client.sandbox.processes().launch_process(process).await;
    StartedCommand(launched.map_err(|error| {
        let coracle = CommandEnding::from_launch_error(&error);
        ServerFrame::Error { code: "START_FAILED", error: (reader.describe_error)(error), coracle }
    }))
}

fn invalid_frame(error: String) -> ServerFrame {
    ServerFrame::Error { code: "INVALID_FRAME", error, coracle: None }
}

/// Relays both directions until the command has ended or the client has disconnected.
async fn relay_command(
    sink: &mut impl MessageSink,
    stream: &mut impl MessageStream,
    following: OutputStream,
    client: &CommandClient,
) -> Result<(), ClientGone> {
    let session_id = following.process.to_string();
    let connected = ServerFrame::Connected { session_id, mode: client.mode.name() };
    sink.feed(connected.to_message()).await.map_err(ClientGone::from_socket_error)?;
    let (replies, waiting) = mpsc::channel(16);
    let mut listener = ClientFrameHandler::new(client, following.process.clone(), replies);
    let limit = client.sandbox.processes().output_settings().stall_limit.saturating_add(UNREAD_TIMEOUT);
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
    sink: &mut impl MessageSink,
    mut following: OutputStream,
    mut waiting: mpsc::Receiver<ServerFrame>,
    limit: Duration,
) -> Result<(), ClientGone> {
    let mut ping = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
    // A short command ends at once: then its first and its last frame are sent together, and wake the client once.
    let mut first = timeout(FIRST_EVENT_DELAY, following.next()).await.ok();
    if first.is_none() {
        send_within(limit, flush(sink)).await?;
    }
    loop {
        // Each branch is cancel-safe.
        let event = match first.take() {
            Some(event) => event,
            None => tokio::select! {
                event = following.next() => event,
                Some(reply) = waiting.recv() => {
                    send_within(limit, send_frame(sink, &reply)).await?;
                    continue;
                }
                _ = ping.tick() => {
                    send_within(limit, send_message(sink, SocketMessage::Ping)).await?;
                    continue;
                }
            },
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
        send_within(limit, flush(sink)).await?;
        if ended {
            return Ok(());
        }
    }
}

/// Queues one event; returns whether it was the last, and how many bytes it had.
async fn queue_event(
    sink: &mut impl MessageSink,
    event: Result<OutputEvent, ServiceError>,
) -> Result<(bool, usize), ClientGone> {
    let ended = matches!(event, Ok(OutputEvent::Ended(_)) | Err(_));
    let length = match &event {
        Ok(OutputEvent::Output { bytes, .. }) => bytes.len(),
        _ => 0,
    };
    sink.feed(event_message(event)).await.map_err(ClientGone::from_socket_error)?;
    Ok((ended, length))
}

async fn flush(sink: &mut impl MessageSink) -> Result<(), ClientGone> {
    sink.flush().await.map_err(ClientGone::from_socket_error)
}

async fn send_frame(sink: &mut impl MessageSink, frame: &ServerFrame) -> Result<(), ClientGone> {
    send_message(sink, frame.to_message()).await
}

async fn send_message(sink: &mut impl MessageSink, message: SocketMessage) -> Result<(), ClientGone> {
    sink.send(message).await.map_err(ClientGone::from_socket_error)
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
}
