//! One client attached to a terminal, over any connection that carries messages.
//!
//! ```text
//! to the client:    [replay]  connected  output…  exit  close
//! from the client:  input · signal · resize · ping
//! ```
//! How these are written is a parameter, the [`TerminalCodec`] of a front. The terminal itself outlives
//! this connection; the service keeps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use domain::process::TerminalSize;
use domain::{ExitReason, ProcessId, StreamKind};
use futures_util::{SinkExt, StreamExt};
use service::{
    MissedOutput, OpenTerminal, OutputEvent, OutputStream, ProcessInput, SandboxProcesses, SandboxRef,
    ServiceError, SignalTarget, TerminalAttachment, TerminalMode,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep_until, timeout};

use super::socket::{CloseReason, MessageSink, MessageStream, SocketMessage, close_socket};

const PING_INTERVAL: Duration = Duration::from_secs(30);
/// A client that sends nothing for this long is considered gone.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How many pieces of input may wait for a process that does not read.
const MAX_QUEUED_INPUT: usize = 64;
/// How many bytes of input may wait, unless they are one message.
const MAX_QUEUED_BYTES: usize = 1 << 20;

/// How one API writes the messages of a terminal.
pub(crate) struct TerminalCodec {
    /// Reads a text or binary message; the error says what is wrong with it.
    pub(crate) decode: fn(&SocketMessage) -> Result<TerminalAction, String>,
    pub(crate) encode: fn(&TerminalEvent<'_>) -> SocketMessage,
    pub(crate) close: fn(TerminalEnding) -> CloseReason,
    /// A message that clients expect from time to time, besides the transport's own ping.
    pub(crate) ping: Option<fn() -> SocketMessage>,
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TerminalAction {
    Input(Vec<u8>),
    Signal(i32),
    Resize {
        columns: u16,
        rows: u16,
    },
    Ping,
    /// The client answers a ping; any message shows that it is there.
    Pong,
}

/// What a client learns.
#[derive(Debug)]
pub(crate) enum TerminalEvent<'a> {
    /// Output that was printed while the client was away.
    Replay(&'a MissedOutput),
    Connected {
        name: &'a str,
        mode: TerminalMode,
    },
    Output {
        stream: StreamKind,
        bytes: &'a [u8],
    },
    Exited(ExitReason),
    Fault {
        kind: TerminalFault,
        message: &'a str,
    },
    Pong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TerminalFault {
    StartFailed,
    InvalidMessage,
    InputFailed,
    /// A signal could not be sent.
    RequestFailed,
    TerminalGone,
    TakenOver,
}

/// Why a connection to a terminal ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TerminalEnding {
    ClientGone,
    Exited,
    StartFailed,
    TerminalGone,
    TakenOver,
}

/// The sandbox of a terminal, and what a client wants from the terminal.
pub(crate) struct TerminalClient {
    pub(crate) sandbox: SandboxRef,
    /// How a shell is connected that this client starts.
    pub(crate) mode: TerminalMode,
    /// The offset of the first byte that the client has not seen.
    pub(crate) since: u64,
}

/// Serves one client until it disconnects or the process ends.
pub(crate) async fn serve_terminal(
    (mut sink, mut stream): (impl MessageSink, impl MessageStream),
    codec: &TerminalCodec,
    client: TerminalClient,
    mut attachment: TerminalAttachment,
) {
    let mut outbox = Outbox { sink: &mut sink, codec };
    let ending = match open_terminal(&mut outbox, &client, &attachment).await {
        Ok((shell, output)) => {
            let mut attached = AttachedClient { outbox, client: &client, shell, input: None };
            attached.serve(&mut stream, output, &mut attachment).await
        }
        Err(ending) => ending,
    };
    close_socket(&mut sink, &mut stream, (codec.close)(ending), SEND_TIMEOUT).await;
}

/// The shell that a client is attached to.
struct AttachedShell {
    process: ProcessId,
    mode: TerminalMode,
}

/// Starts or finds the shell, and sends the output that the client has missed.
async fn open_terminal<K: MessageSink>(
    outbox: &mut Outbox<'_, K>,
    client: &TerminalClient,
    attachment: &TerminalAttachment,
) -> Result<(AttachedShell, OutputStream), TerminalEnding> {
    let TerminalClient { sandbox, mode, since } = client;
    let terminal = attachment.terminal();
    let OpenTerminal { process, mode, missed, output } =
        match sandbox.terminals().open_terminal(terminal, *mode, *since).await {
            Ok(opened) => opened,
            Err(error) => {
                outbox.send_fault(TerminalFault::StartFailed, &error.to_string()).await?;
                return Err(TerminalEnding::StartFailed);
            }
        };
    if !missed.bytes.is_empty() {
        outbox.send_event(&TerminalEvent::Replay(&missed)).await?;
    }
    outbox.send_event(&TerminalEvent::Connected { name: &terminal.name, mode }).await?;
    Ok((AttachedShell { process, mode }, output))
}

/// The direction to the client.
struct Outbox<'a, K> {
    sink: &'a mut K,
    codec: &'a TerminalCodec,
}

impl<K: MessageSink> Outbox<'_, K> {
    async fn send_event(&mut self, event: &TerminalEvent<'_>) -> Result<(), TerminalEnding> {
        self.send_message((self.codec.encode)(event)).await
    }

    async fn send_fault(&mut self, kind: TerminalFault, message: &str) -> Result<(), TerminalEnding> {
        self.send_event(&TerminalEvent::Fault { kind, message }).await
    }

    async fn send_pings(&mut self) -> Result<(), TerminalEnding> {
        self.send_message(SocketMessage::Ping).await?;
        match self.codec.ping {
            Some(ping) => self.send_message(ping()).await,
            None => Ok(()),
        }
    }

    /// Sends a message; fails if the client does not accept it in time.
    async fn send_message(&mut self, message: SocketMessage) -> Result<(), TerminalEnding> {
        match timeout(SEND_TIMEOUT, self.sink.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(TerminalEnding::ClientGone),
        }
    }
}

struct AttachedClient<'a, K> {
    outbox: Outbox<'a, K>,
    client: &'a TerminalClient,
    shell: AttachedShell,
    /// Feeds the process; created with the first input.
    input: Option<TerminalInputQueue>,
}

impl<K: MessageSink> AttachedClient<'_, K> {
    async fn serve(
        &mut self,
        stream: &mut impl MessageStream,
        mut output: OutputStream,
        attachment: &mut TerminalAttachment,
    ) -> TerminalEnding {
        let mut ping = interval(PING_INTERVAL);
        let mut gone_at = Instant::now() + SILENCE_TIMEOUT;
        loop {
            // Each branch is cancel-safe.
            let step = tokio::select! {
                event = output.next() => self.forward_event(event).await,
                message = stream.next() => {
                    gone_at = Instant::now() + SILENCE_TIMEOUT;
                    match message {
                        Some(Ok(message)) => self.handle_message(message).await,
                        Some(Err(_)) | None => Err(TerminalEnding::ClientGone),
                    }
                }
                () = attachment.wait_until_displaced() => {
                    let message = "another client has taken this terminal over";
                    let sent = self.outbox.send_fault(TerminalFault::TakenOver, message).await;
                    sent.and(Err(TerminalEnding::TakenOver))
                }
                _ = ping.tick() => self.outbox.send_pings().await,
                () = sleep_until(gone_at) => Err(TerminalEnding::ClientGone),
            };
            if let Err(ending) = step {
                return ending;
            }
        }
    }

    /// Forwards an event of the process to the client.
    async fn forward_event(
        &mut self,
        event: Result<OutputEvent, ServiceError>,
    ) -> Result<(), TerminalEnding> {
        match event {
            Ok(OutputEvent::Output { stream, bytes, .. }) => {
                self.outbox.send_event(&TerminalEvent::Output { stream, bytes: &bytes }).await
            }
            Ok(OutputEvent::Gap { .. }) => Ok(()),
            Ok(OutputEvent::Ended(end)) => {
                self.outbox.send_event(&TerminalEvent::Exited(end.exit)).await?;
                Err(TerminalEnding::Exited)
            }
            Err(error) => {
                self.outbox.send_fault(TerminalFault::TerminalGone, &error.to_string()).await?;
                Err(TerminalEnding::TerminalGone)
            }
        }
    }

    /// Handles a message from the client. Only a broken connection ends the session.
    async fn handle_message(&mut self, message: SocketMessage) -> Result<(), TerminalEnding> {
        match message {
            SocketMessage::Text(_) | SocketMessage::Binary(_) => match (self.outbox.codec.decode)(&message) {
                Ok(action) => self.handle_action(action).await,
                Err(why) => self.outbox.send_fault(TerminalFault::InvalidMessage, &why).await,
            },
            SocketMessage::Ping | SocketMessage::Pong => Ok(()),
            SocketMessage::Close(_) => Err(TerminalEnding::ClientGone),
        }
    }

    async fn handle_action(&mut self, action: TerminalAction) -> Result<(), TerminalEnding> {
        match action {
            TerminalAction::Input(bytes) => self.feed_input(bytes).await,
            TerminalAction::Ping => self.outbox.send_event(&TerminalEvent::Pong).await,
            TerminalAction::Pong => Ok(()),
            TerminalAction::Signal(number) => self.send_signal(number).await,
            TerminalAction::Resize { columns, rows } => {
                self.resize_terminal(TerminalSize { columns, rows }).await;
                Ok(())
            }
        }
    }

    fn processes(&self) -> SandboxProcesses<'_> {
        self.client.sandbox.processes()
    }

    async fn send_signal(&mut self, number: i32) -> Result<(), TerminalEnding> {
        let process = &self.shell.process;
        match self.processes().signal_process(process, number, SignalTarget::Group).await {
            Ok(()) => Ok(()),
            Err(error) => self.outbox.send_fault(TerminalFault::RequestFailed, &error.to_string()).await,
        }
    }

    /// Clients send their size without checking whether there is a terminal, and before they know it.
    async fn resize_terminal(&self, size: TerminalSize) {
        if self.shell.mode == TerminalMode::Pipes || size.columns == 0 || size.rows == 0 {
            return;
        }
        if let Err(error) = self.processes().resize_terminal(&self.shell.process, size).await {
            // A program that has just ended has no terminal; its exit event follows.
            tracing::debug!(%error, "failed to resize terminal");
        }
    }

    /// Passes input to a separate task: a process that does not read must not block its output, or a
    /// signal that would end it.
    async fn feed_input(&mut self, bytes: Vec<u8>) -> Result<(), TerminalEnding> {
        if self.input.as_ref().is_none_or(TerminalInputQueue::is_closed) {
            match self.processes().open_input(&self.shell.process).await {
                Ok(input) => self.input = Some(TerminalInputQueue::start(input)),
                Err(error) => {
                    return self.outbox.send_fault(TerminalFault::InputFailed, &error.to_string()).await;
                }
            }
        }
        if self.input.as_ref().is_some_and(|input| input.push(bytes).is_err()) {
            let message = "the process does not read its input";
            return self.outbox.send_fault(TerminalFault::InputFailed, message).await;
        }
        Ok(())
    }
}

/// Input that waits for its process. Dropping it also drops the input that was not delivered.
struct TerminalInputQueue {
    pieces: mpsc::Sender<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    _task: JoinSet<()>,
}

/// The queue has no room, or its process takes no input any more.
#[derive(Debug)]
struct InputRefused;

impl TerminalInputQueue {
    /// Starts a task that delivers input in order, until it fails.
    fn start(mut input: ProcessInput) -> Self {
        let (pieces, mut queued) = mpsc::channel::<Vec<u8>>(MAX_QUEUED_INPUT);
        let waiting = Arc::new(AtomicUsize::new(0));
        let delivered = Arc::clone(&waiting);
        let mut task = JoinSet::new();
        task.spawn(async move {
            while let Some(piece) = queued.recv().await {
                if let Err(error) = input.send_bytes(&piece).await {
                    tracing::debug!(%error, "failed to deliver terminal input");
                    return;
                }
                delivered.fetch_sub(piece.len(), Ordering::Relaxed);
            }
        });
        Self { pieces, waiting, _task: task }
    }

    fn is_closed(&self) -> bool {
        self.pieces.is_closed()
    }

    fn push(&self, bytes: Vec<u8>) -> Result<(), InputRefused> {
        let (length, before) = (bytes.len(), self.waiting.load(Ordering::Relaxed));
        if before > 0 && before + length > MAX_QUEUED_BYTES {
            return Err(InputRefused);
        }
        self.waiting.fetch_add(length, Ordering::Relaxed);
        self.pieces.try_send(bytes).map_err(|_full_or_closed| {
            self.waiting.fetch_sub(length, Ordering::Relaxed);
            InputRefused
        })
    }
}

/// Returns the number of a signal that clients of terminals and commands may send.
pub(crate) fn signal_number(name: &str) -> Option<i32> {
    match name {
        "SIGHUP" => Some(1),
        "SIGINT" => Some(2),
        "SIGQUIT" => Some(3),
        "SIGKILL" => Some(9),
        "SIGPIPE" => Some(13),
        "SIGTERM" => Some(15),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_that_waits_is_bounded_in_bytes() {
        let (pieces, mut queued) = mpsc::channel(MAX_QUEUED_INPUT);
        let queue = TerminalInputQueue { pieces, waiting: Arc::default(), _task: JoinSet::new() };
        assert!(queue.push(vec![0; MAX_QUEUED_BYTES + 1]).is_ok(), "one message always fits");
        assert!(queue.push(vec![0]).is_err());
        let piece = queued.try_recv().expect("it was queued");
        queue.waiting.fetch_sub(piece.len(), Ordering::Relaxed);
        for _ in 0..2 {
            assert!(queue.push(vec![0; MAX_QUEUED_BYTES / 2]).is_ok());
        }
        assert!(queue.push(vec![0]).is_err());
        drop(queued);
        assert!(queue.is_closed());
    }
}
