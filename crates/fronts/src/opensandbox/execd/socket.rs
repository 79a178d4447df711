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
use domain::process::{Command, Io, Missing, Process, Size, Stdin};
use domain::{Backpressure, Stream};
use serde::{Deserialize, Serialize};
use service::{Event, Following, Input, Reach, ServiceError};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep_until, timeout};

use super::command::{directory, exit_code};
use super::pty::{Mode, Running, Shell, Terminal, Ticket, tag};
use super::replay::{KEPT, Missed};
use super::{Scope, replay};
use crate::opensandbox::Front;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const REPLAY: u8 = 3;

pub(super) const FIRST_SIZE: Size = Size { columns: 80, rows: 24 };
const PING: Duration = Duration::from_secs(30);
/// A client that sends nothing for this long is considered gone.
const SILENCE: Duration = Duration::from_secs(60);
const SEND_TIME: Duration = Duration::from_secs(10);
/// How many frames of input may wait for a process that does not read.
const MOST_INPUT: usize = 64;

const NORMAL: u16 = 1000;
const FAILED: u16 = 1011;
const TAKEN_OVER: u16 = 4001;

/// Starts bash if available, otherwise sh.
const SHELL: &str = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi";

/// Text frames from the client.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Word {
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
enum Reply<'a> {
    Connected { session_id: &'a str, mode: &'a str },
    Exit { exit_code: i32 },
    Error { code: &'a str, error: &'a str },
    Pong,
}

/// The close code and reason sent to a client.
struct Goodbye {
    code: u16,
    reason: &'static str,
}

const GONE: Goodbye = Goodbye { code: NORMAL, reason: "" };

/// Serves one client until it disconnects or the process ends.
pub(super) async fn converse(
    mut socket: WebSocket,
    front: Front,
    scope: Scope,
    mut ticket: Ticket,
    mode: Mode,
    since: u64,
) {
    let goodbye = match open(&mut socket, &front, &scope, ticket.terminal(), mode, since).await {
        Ok((following, running)) => {
            let mut client =
                Client { socket: &mut socket, front: &front, scope: &scope, running, input: None };
            client.serve(following, &mut ticket).await
        }
        Err(goodbye) => goodbye,
    };
    part(&mut socket, goodbye).await;
}

/// Closes the socket and waits for the client to close it too. Hanging up at once would reset the
/// connection of a client that has not read its last frames yet.
async fn part(socket: &mut WebSocket, goodbye: Goodbye) {
    let frame = CloseFrame { code: goodbye.code, reason: goodbye.reason.into() };
    let said = send(socket, Message::Close(Some(frame))).await;
    let heard = async { while let Some(Ok(_)) = socket.recv().await {} };
    if said.is_err() || timeout(SEND_TIME, heard).await.is_err() {
        tracing::debug!("terminal client disconnected without a close frame");
    }
}

/// Starts or finds the shell, and sends the output that the client has missed.
async fn open(
    socket: &mut WebSocket,
    front: &Front,
    scope: &Scope,
    terminal: &Terminal,
    mode: Mode,
    since: u64,
) -> Result<(Following, Running), Goodbye> {
    let opened = follow(front, scope, terminal, mode, since).await;
    let (following, running, missed) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            reply(socket, &Reply::Error { code: "START_FAILED", error: &error.to_string() }).await?;
            return Err(Goodbye { code: FAILED, reason: "the shell could not be started" });
        }
    };
    if !missed.bytes.is_empty() {
        let frame = [&[REPLAY][..], &missed.start.to_be_bytes(), &missed.bytes].concat();
        send(socket, Message::Binary(frame.into())).await?;
    }
    reply(socket, &Reply::Connected { session_id: &terminal.name, mode: running.mode.name() }).await?;
    Ok((following, running))
}

/// Follows the shell, starting it if none runs, and returns the output that the client has missed.
async fn follow(
    front: &Front,
    scope: &Scope,
    terminal: &Terminal,
    mode: Mode,
    since: u64,
) -> Result<(Following, Running, Missed), ServiceError> {
    let mut started = terminal.process.lock().await;
    let (base, before) = match started.clone() {
        None => (0, None),
        Some(running) => match ended_at(front, scope, &running.shell).await? {
            Some(end) if terminal.wish.is_some() => (end, Some(running)),
            _ => {
                drop(started);
                let (following, missed) = replay::since(front, scope, &running, since).await?;
                return Ok((following, running, missed));
            }
        },
    };
    let mut process = shell(terminal, mode, base);
    process.backpressure =
        Backpressure::On { stall_limit: Some(front.service.output_settings().stall_limit) };
    let following = front.service.launch(&scope.owner, &scope.id, process).await?;
    let shell = Shell { process: following.process.clone(), base };
    let oldest = before.as_ref().and_then(|running| running.before.clone());
    let running = Running { shell, mode, before: before.map(|running| running.shell) };
    *started = Some(running.clone());
    drop(started);
    if let Some(Shell { process, .. }) = oldest
        && let Err(error) = front.service.forget(&scope.owner, &scope.id, &process).await
    {
        tracing::debug!(%error, "old shell of a terminal was already forgotten");
    }
    let missed = replay::before(front, scope, &running, since).await;
    Ok((following, running, missed))
}

/// Returns the offset at which a shell has ended; `None` while it runs.
async fn ended_at(front: &Front, scope: &Scope, shell: &Shell) -> Result<Option<u64>, ServiceError> {
    match front.service.status(&scope.owner, &scope.id, &shell.process).await {
        Ok(status) => Ok(status.ended.map(|_| shell.base.saturating_add(status.written))),
        // It ended so long ago that its status was forgotten.
        Err(ServiceError::NoProcess(_)) => Ok(Some(shell.base)),
        Err(error) => Err(error),
    }
}

fn shell(terminal: &Terminal, mode: Mode, base: u64) -> Process {
    let parameters = terminal.wish.clone().unwrap_or_default();
    let text = parameters.command.unwrap_or_else(|| SHELL.to_owned());
    let (io, env) = match mode {
        Mode::Terminal => {
            (Io::Terminal(FIRST_SIZE), BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]))
        }
        Mode::Pipes => (Io::Pipes, BTreeMap::new()),
    };
    Process {
        directory: parameters.cwd.map(|path| directory(path, Missing::Fail)),
        env,
        io,
        stdin: Stdin::Piped,
        tag: Some(tag(mode, &terminal.name, base)),
        retention: KEPT,
        ..Process::new(Command::Shell { text, login: false })
    }
}

struct Client<'a> {
    socket: &'a mut WebSocket,
    front: &'a Front,
    scope: &'a Scope,
    running: Running,
    /// Feeds the process; created with the first input.
    input: Option<(mpsc::Sender<Vec<u8>>, JoinSet<()>)>,
}

impl Client<'_> {
    async fn serve(&mut self, mut following: Following, ticket: &mut Ticket) -> Goodbye {
        let mut ping = interval(PING);
        let mut gone_at = Instant::now() + SILENCE;
        loop {
            // Each branch is cancel-safe.
            let step = tokio::select! {
                event = following.next() => self.show(event).await,
                message = self.socket.recv() => {
                    gone_at = Instant::now() + SILENCE;
                    match message {
                        Some(Ok(message)) => self.hear(message).await,
                        Some(Err(_)) | None => Err(GONE),
                    }
                }
                () = ticket.displaced() => {
                    let sent = self.complain("TAKEN_OVER", "another client has taken this terminal over").await;
                    sent.and(Err(Goodbye { code: TAKEN_OVER, reason: "TAKEN_OVER" }))
                }
                _ = ping.tick() => send(self.socket, Message::Ping(bytes::Bytes::new())).await,
                () = sleep_until(gone_at) => Err(GONE),
            };
            if let Err(goodbye) = step {
                return goodbye;
            }
        }
    }

    /// Forwards an event of the process to the client.
    async fn show(&mut self, event: Result<Event, ServiceError>) -> Result<(), Goodbye> {
        match event {
            Ok(Event::Output { stream, bytes, .. }) => {
                let kind = if stream == Stream::Stderr { STDERR } else { STDOUT };
                send(self.socket, Message::Binary([&[kind][..], &bytes].concat().into())).await
            }
            Ok(Event::Gap { .. }) => Ok(()),
            Ok(Event::Ended(end)) => {
                reply(self.socket, &Reply::Exit { exit_code: exit_code(end.exit) }).await?;
                Err(Goodbye { code: NORMAL, reason: "process exited" })
            }
            Err(error) => {
                self.complain("SESSION_GONE", &error.to_string()).await?;
                Err(Goodbye { code: FAILED, reason: "the terminal is gone" })
            }
        }
    }

    /// Handles a message from the client. Only a broken connection ends the session.
    async fn hear(&mut self, message: Message) -> Result<(), Goodbye> {
        match message {
            Message::Binary(bytes) => match bytes.split_first() {
                Some((&STDIN, input)) => self.feed(input.to_vec()).await,
                _ => self.complain("INVALID_FRAME", "a binary frame must begin with a zero byte").await,
            },
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(word) => self.obey(word).await,
                Err(error) => self.complain("INVALID_FRAME", &error.to_string()).await,
            },
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => Err(GONE),
        }
    }

    async fn obey(&mut self, word: Word) -> Result<(), Goodbye> {
        let (service, owner, id) = (&self.front.service, &self.scope.owner, &self.scope.id);
        let process = &self.running.shell.process;
        let done = match word {
            Word::Stdin { data } => return self.feed(data.into_bytes()).await,
            Word::Ping => return reply(self.socket, &Reply::Pong).await,
            Word::Signal { signal } => match signal_number(&signal) {
                Some(number) => service.signal(owner, id, process, number, Reach::Group).await,
                None => return self.complain("INVALID_FRAME", "unknown signal").await,
            },
            // Clients send their size without checking whether there is a terminal, and before they know it.
            Word::Resize { .. } if self.running.mode == Mode::Pipes => Ok(()),
            Word::Resize { cols: 0, .. } | Word::Resize { rows: 0, .. } => Ok(()),
            Word::Resize { cols, rows } => {
                let resized = service.resize(owner, id, process, Size { columns: cols, rows }).await;
                if let Err(error) = resized {
                    // A program that has just ended has no terminal; its exit event follows.
                    tracing::debug!(%error, "failed to resize terminal");
                }
                Ok(())
            }
        };
        match done {
            Ok(()) => Ok(()),
            Err(error) => self.complain("RUNTIME_ERROR", &error.to_string()).await,
        }
    }

    /// Passes input to a separate task: a process that does not read must not block its output, or a
    /// signal that would end it.
    async fn feed(&mut self, bytes: Vec<u8>) -> Result<(), Goodbye> {
        if self.input.as_ref().is_none_or(|(sender, _)| sender.is_closed()) {
            let opened = self
                .front
                .service
                .input(&self.scope.owner, &self.scope.id, &self.running.shell.process)
                .await;
            match opened {
                Ok(input) => self.input = Some(feeder(input)),
                Err(error) => return self.complain("STDIN_WRITE_FAILED", &error.to_string()).await,
            }
        }
        let sent = self.input.as_ref().map(|(sender, _)| sender.try_send(bytes));
        match sent {
            Some(Err(_)) => self.complain("STDIN_WRITE_FAILED", "the process does not read its input").await,
            Some(Ok(())) | None => Ok(()),
        }
    }

    async fn complain(&mut self, code: &str, error: &str) -> Result<(), Goodbye> {
        reply(self.socket, &Reply::Error { code, error }).await
    }
}

/// Starts a task that delivers input in order, until it fails or the set is dropped.
fn feeder(mut input: Input) -> (mpsc::Sender<Vec<u8>>, JoinSet<()>) {
    let (sender, mut pieces) = mpsc::channel::<Vec<u8>>(MOST_INPUT);
    let mut task = JoinSet::new();
    task.spawn(async move {
        while let Some(piece) = pieces.recv().await {
            if let Err(error) = input.send(&piece).await {
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

async fn reply(socket: &mut WebSocket, reply: &Reply<'_>) -> Result<(), Goodbye> {
    let text = serde_json::to_string(reply).expect("replies contain only strings and numbers");
    send(socket, Message::Text(text.into())).await
}

/// Sends a frame; fails if the client does not accept it in time.
async fn send(socket: &mut WebSocket, message: Message) -> Result<(), Goodbye> {
    match timeout(SEND_TIME, socket.send(message)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(GONE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_frames_are_parsed() {
        let word = |text: &str| serde_json::from_str::<Word>(text);
        assert!(matches!(
            word(r#"{"type":"resize","cols":80,"rows":24}"#),
            Ok(Word::Resize { cols: 80, rows: 24 })
        ));
        assert!(matches!(word(r#"{"type":"ping"}"#), Ok(Word::Ping)));
        assert!(matches!(word(r#"{"type":"stdin","data":"x"}"#), Ok(Word::Stdin { .. })));
        assert!(word(r#"{"type":"reboot"}"#).is_err());
        let text = serde_json::to_string(&Reply::Exit { exit_code: 3 }).unwrap();
        assert_eq!(text, r#"{"type":"exit","exit_code":3}"#);
    }
}
