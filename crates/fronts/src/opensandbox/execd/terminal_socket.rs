//! The WebSocket of one client attached to a terminal.
//!
//! ```text
//! to the client:    [0x03 offset bytes]  connected  (0x01|0x02 bytes)…  exit  close 1000
//! from the client:  0x00 bytes · stdin · signal · resize · ping
//! ```
//! Frames that begin with a byte are binary; the named ones are JSON text.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use domain::process::{CommandLine, MissingDirectory, ProcessIo, ProcessSpec, StdinMode, TerminalSize};
use domain::{Backpressure, StreamKind};
use serde::{Deserialize, Serialize};
use service::{OutputEvent, OutputStream, ProcessInput, ServiceError, SignalTarget};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep_until, timeout};

use super::command::expanded_directory;
use super::pty::{ClientAttachment, PtyMode, ShellProcess, TerminalSession, TerminalShell, shell_tag};
use super::replay::{MissedOutput, REPLAY_RETENTION};
use super::{ExecTarget, replay};
use crate::kit::command_ending::exit_code;
use crate::opensandbox::OpenSandboxState;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const REPLAY: u8 = 3;

pub(super) const DEFAULT_TERMINAL_SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// A client that sends nothing for this long is considered gone.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How many frames of input may wait for a process that does not read.
const MAX_QUEUED_INPUT: usize = 64;

const CLOSE_NORMAL: u16 = 1000;
const CLOSE_FAILED: u16 = 1011;
const CLOSE_TAKEN_OVER: u16 = 4001;

/// Starts bash if available, otherwise sh.
const DEFAULT_SHELL_COMMAND: &str = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi";

/// Text frames from the client.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum TerminalClientFrame {
    Stdin {
        data: String,
    },
    Signal {
        signal: String,
    },
    Resize {
        #[serde(default)]
        cols: u16,
        #[serde(default)]
        rows: u16,
    },
    Ping,
}

/// Text frames to the client.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum TerminalServerFrame<'a> {
    Connected { session_id: &'a str, mode: &'a str },
    Exit { exit_code: i32 },
    Error { code: &'a str, error: &'a str },
    Pong,
}

/// The close code and reason sent to a client.
struct CloseReason {
    code: u16,
    reason: &'static str,
}

const CLIENT_GONE: CloseReason = CloseReason { code: CLOSE_NORMAL, reason: "" };

/// Serves one client until it disconnects or the process ends.
pub(super) async fn serve_terminal_socket(
    mut socket: WebSocket,
    state: OpenSandboxState,
    target: ExecTarget,
    mut ticket: ClientAttachment,
    mode: PtyMode,
    since: u64,
) {
    let goodbye = match open_terminal(&mut socket, &state, &target, ticket.terminal(), mode, since).await {
        Ok((following, running)) => {
            let mut client =
                AttachedClient { socket: &mut socket, front: &state, scope: &target, running, input: None };
            client.serve(following, &mut ticket).await
        }
        Err(goodbye) => goodbye,
    };
    close_socket(&mut socket, goodbye).await;
}

/// Closes the socket and waits for the client to close it too. Hanging up at once would reset the
/// connection of a client that has not read its last frames yet.
async fn close_socket(socket: &mut WebSocket, goodbye: CloseReason) {
    let frame = CloseFrame { code: goodbye.code, reason: goodbye.reason.into() };
    let said = send_message(socket, Message::Close(Some(frame))).await;
    let heard = async { while let Some(Ok(_)) = socket.recv().await {} };
    if said.is_err() || timeout(SEND_TIMEOUT, heard).await.is_err() {
        tracing::debug!("terminal client disconnected without a close frame");
    }
}

/// Starts or finds the shell, and sends the output that the client has missed.
async fn open_terminal(
    socket: &mut WebSocket,
    state: &OpenSandboxState,
    target: &ExecTarget,
    terminal: &TerminalSession,
    mode: PtyMode,
    since: u64,
) -> Result<(OutputStream, TerminalShell), CloseReason> {
    let opened = follow_shell(state, target, terminal, mode, since).await;
    let (following, running, missed) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            send_reply(
                socket,
                &TerminalServerFrame::Error { code: "START_FAILED", error: &error.to_string() },
            )
            .await?;
            return Err(CloseReason { code: CLOSE_FAILED, reason: "the shell could not be started" });
        }
    };
    if !missed.bytes.is_empty() {
        let frame = [&[REPLAY][..], &missed.start.to_be_bytes(), &missed.bytes].concat();
        send_message(socket, Message::Binary(frame.into())).await?;
    }
    send_reply(
        socket,
        &TerminalServerFrame::Connected { session_id: &terminal.name, mode: running.mode.name() },
    )
    .await?;
    Ok((following, running))
}

/// Follows the shell, starting it if none runs, and returns the output that the client has missed.
async fn follow_shell(
    state: &OpenSandboxState,
    target: &ExecTarget,
    terminal: &TerminalSession,
    mode: PtyMode,
    since: u64,
) -> Result<(OutputStream, TerminalShell, MissedOutput), ServiceError> {
    let mut started = terminal.process.lock().await;
    let (base, before) = match started.clone() {
        None => (0, None),
        Some(running) => match shell_end_offset(state, target, &running.shell).await? {
            Some(end) if terminal.parameters.is_some() => (end, Some(running)),
            _ => {
                drop(started);
                let (following, missed) = replay::missed_since(state, target, &running, since).await?;
                return Ok((following, running, missed));
            }
        },
    };
    let mut process = shell_process(terminal, mode, base);
    process.backpressure =
        Backpressure::On { stall_limit: Some(state.service.output_settings().stall_limit) };
    let following = state.service.launch_process(&target.owner, &target.id, process).await?;
    let shell = ShellProcess { process: following.process.clone(), base };
    let oldest = before.as_ref().and_then(|running| running.before.clone());
    let running = TerminalShell { shell, mode, before: before.map(|running| running.shell) };
    *started = Some(running.clone());
    drop(started);
    if let Some(ShellProcess { process, .. }) = oldest
        && let Err(error) = state.service.forget_process(&target.owner, &target.id, &process).await
    {
        tracing::debug!(%error, "old shell of a terminal was already forgotten");
    }
    let missed = replay::missed_of_previous_shell(state, target, &running, since).await;
    Ok((following, running, missed))
}

/// Returns the offset at which a shell has ended; `None` while it runs.
async fn shell_end_offset(
    state: &OpenSandboxState,
    target: &ExecTarget,
    shell: &ShellProcess,
) -> Result<Option<u64>, ServiceError> {
    match state.service.process_status(&target.owner, &target.id, &shell.process).await {
        Ok(status) => Ok(status.ended.map(|_| shell.base.saturating_add(status.written))),
        // It ended so long ago that its status was forgotten.
        Err(ServiceError::NoProcess(_)) => Ok(Some(shell.base)),
        Err(error) => Err(error),
    }
}

fn shell_process(terminal: &TerminalSession, mode: PtyMode, base: u64) -> ProcessSpec {
    let parameters = terminal.parameters.clone().unwrap_or_default();
    let text = parameters.command.unwrap_or_else(|| DEFAULT_SHELL_COMMAND.to_owned());
    let (io, env) = match mode {
        PtyMode::Terminal => (
            ProcessIo::Terminal(DEFAULT_TERMINAL_SIZE),
            BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]),
        ),
        PtyMode::Pipes => (ProcessIo::Pipes, BTreeMap::new()),
    };
    ProcessSpec {
        directory: parameters.cwd.map(|path| expanded_directory(path, MissingDirectory::Fail)),
        env,
        io,
        stdin: StdinMode::Piped,
        tag: Some(shell_tag(mode, &terminal.name, base)),
        retention: REPLAY_RETENTION,
        ..ProcessSpec::new(CommandLine::Shell { text, login: false })
    }
}

struct AttachedClient<'a> {
    socket: &'a mut WebSocket,
    front: &'a OpenSandboxState,
    scope: &'a ExecTarget,
    running: TerminalShell,
    /// Feeds the process; created with the first input.
    input: Option<(mpsc::Sender<Vec<u8>>, JoinSet<()>)>,
}

impl AttachedClient<'_> {
    async fn serve(&mut self, mut following: OutputStream, ticket: &mut ClientAttachment) -> CloseReason {
        let mut ping = interval(PING_INTERVAL);
        let mut gone_at = Instant::now() + SILENCE_TIMEOUT;
        loop {
            // Each branch is cancel-safe.
            let step = tokio::select! {
                event = following.next() => self.forward_event(event).await,
                message = self.socket.recv() => {
                    gone_at = Instant::now() + SILENCE_TIMEOUT;
                    match message {
                        Some(Ok(message)) => self.handle_message(message).await,
                        Some(Err(_)) | None => Err(CLIENT_GONE),
                    }
                }
                () = ticket.wait_until_displaced() => {
                    let sent = self.reply_error("TAKEN_OVER", "another client has taken this terminal over").await;
                    sent.and(Err(CloseReason { code: CLOSE_TAKEN_OVER, reason: "TAKEN_OVER" }))
                }
                _ = ping.tick() => send_message(self.socket, Message::Ping(bytes::Bytes::new())).await,
                () = sleep_until(gone_at) => Err(CLIENT_GONE),
            };
            if let Err(goodbye) = step {
                return goodbye;
            }
        }
    }

    /// Forwards an event of the process to the client.
    async fn forward_event(&mut self, event: Result<OutputEvent, ServiceError>) -> Result<(), CloseReason> {
        match event {
            Ok(OutputEvent::Output { stream, bytes, .. }) => {
                let kind = if stream == StreamKind::Stderr { STDERR } else { STDOUT };
                send_message(self.socket, Message::Binary([&[kind][..], &bytes].concat().into())).await
            }
            Ok(OutputEvent::Gap { .. }) => Ok(()),
            Ok(OutputEvent::Ended(end)) => {
                send_reply(self.socket, &TerminalServerFrame::Exit { exit_code: exit_code(end.exit) })
                    .await?;
                Err(CloseReason { code: CLOSE_NORMAL, reason: "process exited" })
            }
            Err(error) => {
                self.reply_error("SESSION_GONE", &error.to_string()).await?;
                Err(CloseReason { code: CLOSE_FAILED, reason: "the terminal is gone" })
            }
        }
    }

    /// Handles a message from the client. Only a broken connection ends the session.
    async fn handle_message(&mut self, message: Message) -> Result<(), CloseReason> {
        match message {
            Message::Binary(bytes) => match bytes.split_first() {
                Some((&STDIN, input)) => self.feed_input(input.to_vec()).await,
                _ => self.reply_error("INVALID_FRAME", "a binary frame must begin with a zero byte").await,
            },
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(word) => self.handle_frame(word).await,
                Err(error) => self.reply_error("INVALID_FRAME", &error.to_string()).await,
            },
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => Err(CLIENT_GONE),
        }
    }

    async fn handle_frame(&mut self, word: TerminalClientFrame) -> Result<(), CloseReason> {
        let (service, owner, id) = (&self.front.service, &self.scope.owner, &self.scope.id);
        let process = &self.running.shell.process;
        let done = match word {
            TerminalClientFrame::Stdin { data } => return self.feed_input(data.into_bytes()).await,
            TerminalClientFrame::Ping => return send_reply(self.socket, &TerminalServerFrame::Pong).await,
            TerminalClientFrame::Signal { signal } => match signal_number(&signal) {
                Some(number) => service.signal_process(owner, id, process, number, SignalTarget::Group).await,
                None => return self.reply_error("INVALID_FRAME", "unknown signal").await,
            },
            // Clients send their size without checking whether there is a terminal, and before they know it.
            TerminalClientFrame::Resize { .. } if self.running.mode == PtyMode::Pipes => Ok(()),
            TerminalClientFrame::Resize { cols: 0, .. } | TerminalClientFrame::Resize { rows: 0, .. } => {
                Ok(())
            }
            TerminalClientFrame::Resize { cols, rows } => {
                let resized =
                    service.resize_terminal(owner, id, process, TerminalSize { columns: cols, rows }).await;
                if let Err(error) = resized {
                    // A program that has just ended has no terminal; its exit event follows.
                    tracing::debug!(%error, "failed to resize terminal");
                }
                Ok(())
            }
        };
        match done {
            Ok(()) => Ok(()),
            Err(error) => self.reply_error("RUNTIME_ERROR", &error.to_string()).await,
        }
    }

    /// Passes input to a separate task: a process that does not read must not block its output, or a
    /// signal that would end it.
    async fn feed_input(&mut self, bytes: Vec<u8>) -> Result<(), CloseReason> {
        if self.input.as_ref().is_none_or(|(sender, _)| sender.is_closed()) {
            let opened = self
                .front
                .service
                .open_input(&self.scope.owner, &self.scope.id, &self.running.shell.process)
                .await;
            match opened {
                Ok(input) => self.input = Some(spawn_input_task(input)),
                Err(error) => return self.reply_error("STDIN_WRITE_FAILED", &error.to_string()).await,
            }
        }
        let sent = self.input.as_ref().map(|(sender, _)| sender.try_send(bytes));
        match sent {
            Some(Err(_)) => {
                self.reply_error("STDIN_WRITE_FAILED", "the process does not read its input").await
            }
            Some(Ok(())) | None => Ok(()),
        }
    }

    async fn reply_error(&mut self, code: &str, error: &str) -> Result<(), CloseReason> {
        send_reply(self.socket, &TerminalServerFrame::Error { code, error }).await
    }
}

/// Starts a task that delivers input in order, until it fails or the set is dropped.
fn spawn_input_task(mut input: ProcessInput) -> (mpsc::Sender<Vec<u8>>, JoinSet<()>) {
    let (sender, mut pieces) = mpsc::channel::<Vec<u8>>(MAX_QUEUED_INPUT);
    let mut task = JoinSet::new();
    task.spawn(async move {
        while let Some(piece) = pieces.recv().await {
            if let Err(error) = input.send_bytes(&piece).await {
                tracing::debug!(%error, "failed to deliver terminal input");
                return;
            }
        }
    });
    (sender, task)
}

pub(super) fn signal_number(name: &str) -> Option<i32> {
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

async fn send_reply(socket: &mut WebSocket, reply: &TerminalServerFrame<'_>) -> Result<(), CloseReason> {
    let text = serde_json::to_string(reply).expect("replies contain only strings and numbers");
    send_message(socket, Message::Text(text.into())).await
}

/// Sends a frame; fails if the client does not accept it in time.
async fn send_message(socket: &mut WebSocket, message: Message) -> Result<(), CloseReason> {
    match timeout(SEND_TIMEOUT, socket.send(message)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(CLIENT_GONE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_frames_are_parsed() {
        let word = |text: &str| serde_json::from_str::<TerminalClientFrame>(text);
        assert!(matches!(
            word(r#"{"type":"resize","cols":80,"rows":24}"#),
            Ok(TerminalClientFrame::Resize { cols: 80, rows: 24 })
        ));
        assert!(matches!(word(r#"{"type":"ping"}"#), Ok(TerminalClientFrame::Ping)));
        assert!(matches!(word(r#"{"type":"stdin","data":"x"}"#), Ok(TerminalClientFrame::Stdin { .. })));
        assert!(word(r#"{"type":"reboot"}"#).is_err());
        let text = serde_json::to_string(&TerminalServerFrame::Exit { exit_code: 3 }).unwrap();
        assert_eq!(text, r#"{"type":"exit","exit_code":3}"#);
    }
}
