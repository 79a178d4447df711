//! Handles the frames of the client: input, which is credited as the command reads it, and signals and
//! sizes, which never wait for input.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use domain::ProcessId;
use domain::process::TerminalSize;
use futures_util::StreamExt;
use service::{ProcessInput, SignalTarget, TerminalMode};
use tokio::sync::mpsc;

use super::frames::{ClientFrame, STDIN, ServerFrame};
use super::{ClientGone, CommandClient};
use crate::kit::socket::{MessageStream, SocketMessage};
use crate::kit::terminal_socket::signal_number;

/// How many bytes of input a client may send before they are credited.
const INPUT_WINDOW: usize = 1 << 20;
/// Credit is sent in steps, to save frames.
const CREDIT_STEP: usize = INPUT_WINDOW / 4;
/// How many frames of input may wait; more than a client needs to fill the window.
const MAX_QUEUED_FRAMES: usize = 4096;
/// How long a command may leave input unread after its client disconnected.
const ABANDONED_INPUT_TIMEOUT: Duration = Duration::from_secs(10);
const SIGHUP: i32 = 1;

/// Handles the frames of the client.
pub(super) struct ClientFrameHandler<'a> {
    client: &'a CommandClient,
    process: ProcessId,
    replies: mpsc::Sender<ServerFrame>,
    /// Created with the first input.
    input: Option<InputQueue>,
}

/// Queued input. Dropping it closes the command's input once everything is delivered.
struct InputQueue {
    pieces: mpsc::Sender<Bytes>,
    undelivered: Arc<AtomicUsize>,
}

impl<'a> ClientFrameHandler<'a> {
    pub(super) fn new(
        client: &'a CommandClient,
        process: ProcessId,
        replies: mpsc::Sender<ServerFrame>,
    ) -> Self {
        Self { client, process, replies, input: None }
    }

    /// Handles frames until the client disconnects.
    pub(super) async fn handle_frames(&mut self, stream: &mut impl MessageStream) {
        let mut ended_input = false;
        while let Some(Ok(message)) = stream.next().await {
            match message {
                SocketMessage::Binary(bytes) if bytes.first() == Some(&STDIN) && !ended_input => {
                    // Copied, since a slice would keep the whole read buffer alive.
                    if self.feed_input(Bytes::copy_from_slice(&bytes[1..])).is_err() {
                        self.reply_error("INVALID_FRAME", "input was sent without credit".to_owned()).await;
                        return;
                    }
                }
                SocketMessage::Text(text) => match serde_json::from_str(&text) {
                    Ok(ClientFrame::StdinEnd) => {
                        // Opened even if nothing was sent: the command waits for the end of its input.
                        self.open_input();
                        self.input = None;
                        ended_input = true;
                    }
                    Ok(frame) => self.handle_frame(frame).await,
                    Err(error) => self.reply_error("INVALID_FRAME", error.to_string()).await,
                },
                SocketMessage::Binary(_) => {
                    self.reply_error("INVALID_FRAME", "unexpected data".to_owned()).await
                }
                SocketMessage::Ping | SocketMessage::Pong => {}
                SocketMessage::Close(_) => return,
            }
        }
    }

    async fn handle_frame(&self, frame: ClientFrame) {
        let CommandClient { sandbox, mode } = self.client;
        let processes = sandbox.processes();
        let done = match frame {
            ClientFrame::Signal { signal } => match signal_number(&signal) {
                Some(number) => processes.signal_process(&self.process, number, SignalTarget::Group).await,
                None => return self.reply_error("INVALID_FRAME", format!("unknown signal `{signal}`")).await,
            },
            ClientFrame::Resize { cols, rows } if *mode == TerminalMode::Terminal && cols > 0 && rows > 0 => {
                processes.resize_terminal(&self.process, TerminalSize { columns: cols, rows }).await
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
            let deliver = deliver_input(
                self.client.clone(),
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
    pub(super) async fn hang_up(&mut self) {
        self.input = None;
        let CommandClient { sandbox, mode } = self.client;
        if *mode == TerminalMode::Terminal {
            let hung = sandbox.processes().signal_process(&self.process, SIGHUP, SignalTarget::Group).await;
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
    client: CommandClient,
    process: ProcessId,
    mut queue: mpsc::Receiver<Bytes>,
    undelivered: Arc<AtomicUsize>,
    replies: mpsc::Sender<ServerFrame>,
) {
    let delivered = async {
        let mut input: ProcessInput = client.sandbox.processes().open_input(&process).await?;
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
