//! `exec`: runs a command in a sandbox as if it ran here.
//!
//! The command is started over a WebSocket, which carries input, output and signals byte for byte. A
//! server of another implementation without that socket is asked with `POST /command`, whose events
//! carry text and no input.

mod fallback;
mod stdio;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use coracle_client::events::Ending;
use coracle_client::exec::{ExecFrame, ExecRequest, INPUT_WINDOW};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use self::stdio::{INPUT_PIECE, OutputPiece, OutputWriter};
use super::shell::{RawMode, window_size};
use super::{NOT_RUN, NotStarted};
use crate::args::ExecArgs;
use crate::client::{ExecSocket, Server};
use crate::output::{Printer, WithHint};

/// The exit code of shells for a command that was ended by Ctrl-C.
const INTERRUPTED: u8 = 130;
/// A command that has not ended after this many interrupts is left running.
const MAX_INTERRUPTS: u8 = 3;
/// How long a command may take to end after we received a signal to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the server may take to accept a signal for the command.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The default size of a terminal, used if the user has none.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

pub(crate) async fn exec(server: &Server, args: ExecArgs, printer: &Printer) -> Result<ExitCode> {
    let request = ExecRequest {
        text: args.text,
        argv: args.command,
        directory: args.workdir,
        env: args.env,
        timeout: args.timeout,
        user: args.user,
        output_kept: args.keep_output.map(|size| size.0),
    };
    if request.is_blank() {
        return Err(anyhow!("the command is blank")).hint("name a program, or shell text behind `-c`");
    }
    let sandbox = server.open(&server.resolve(&args.id).await?).await?;
    if args.detach {
        let id = sandbox.detach(&request).await?;
        if printer.json() {
            printer.value(&json!({ "process": id }))?
        } else {
            printer.line(id)?
        }
        return Ok(ExitCode::SUCCESS);
    }
    let stdin = args.interactive || stdio::is_redirected();
    let size = args.tty.then(|| window_size().map_or(DEFAULT_SIZE, |size| (size.columns, size.rows)));
    match sandbox.exec(&request, stdin, size).await? {
        Some(socket) => {
            let raw = (args.tty && stdin && io::stdin().is_terminal()).then(RawMode::enter).transpose()?;
            let outcome = Conversation::new(socket, stdin, args.tty)?.run(printer).await;
            drop(raw);
            finish(outcome?, &request, printer)
        }
        None if args.tty => Err(anyhow!("this server has no terminals for commands"))
            .hint("`coracle shell` opens a terminal with a shell"),
        None if args.interactive => bail!("this server takes no input for commands"),
        None => {
            if stdin {
                printer.warn("this server takes no input for commands; standard input is not sent");
            }
            fallback::run(&sandbox, &request, printer).await
        }
    }
}

/// How a command ended, and whether all of its output was received.
#[derive(Debug)]
struct Outcome {
    end: End,
    /// Bytes of output that are missing.
    missing: u64,
}

#[derive(Debug)]
enum End {
    Exited {
        code: i32,
        ending: Option<Ending>,
    },
    Failed {
        message: String,
        ending: Option<Ending>,
    },
    /// The user stopped waiting by sending this signal; the command continues to run.
    Left {
        signal: &'static str,
    },
}

/// One command that is connected to our own input and output.
struct Conversation {
    socket: ExecSocket,
    signals: Vec<(&'static str, Signal)>,
    resized: Option<Signal>,
    input: Option<mpsc::Receiver<Vec<u8>>>,
    /// The number of input bytes that the server accepts now.
    credit: usize,
    writer: Option<OutputWriter>,
    /// Output that the writer has not taken yet.
    pending: Option<OutputPiece>,
    patience: Patience,
    missing: u64,
}

/// The signals that were passed on to the command, and how long we wait for it because of them.
#[derive(Debug, Default)]
struct Patience {
    interrupts: u8,
    /// The signal that asked us to end, and the deadline it sets.
    ending: Option<(&'static str, Instant)>,
}

impl Patience {
    /// Counts a signal. Returns `true` if the command had its chance: then the signal is not passed on
    /// and we leave the command running.
    fn is_over(&mut self, signal: &'static str) -> bool {
        if self.ending.is_some() {
            return true;
        }
        match signal {
            // A service manager, or a terminal that was closed, expects us to end.
            "SIGTERM" | "SIGHUP" => self.ending = Some((signal, Instant::now() + END_TIMEOUT)),
            _ => self.interrupts += 1,
        }
        self.interrupts >= MAX_INTERRUPTS
    }

    /// Waits for the deadline of the command, and returns the signal that set it.
    async fn run_out(&self) -> &'static str {
        match self.ending {
            Some((signal, until)) => {
                tokio::time::sleep_until(until).await;
                signal
            }
            None => std::future::pending().await,
        }
    }
}

/// The next event of the conversation.
enum Step {
    Frame(Result<ExecFrame>),
    /// The writer accepts more, or is gone.
    Writable(bool),
    Input(Option<Vec<u8>>),
    Signal(&'static str),
    /// The command did not end before the deadline that this signal set.
    Overdue(&'static str),
    Resized,
}

impl Conversation {
    fn new(socket: ExecSocket, stdin: bool, tty: bool) -> Result<Self> {
        let kinds = [
            ("SIGINT", SignalKind::interrupt()),
            ("SIGTERM", SignalKind::terminate()),
            ("SIGHUP", SignalKind::hangup()),
            ("SIGQUIT", SignalKind::quit()),
        ];
        let signals = kinds.into_iter().map(|(name, kind)| Ok((name, signal(kind)?)));
        Ok(Self {
            socket,
            signals: signals.collect::<io::Result<_>>()?,
            resized: tty.then(|| signal(SignalKind::window_change())).transpose()?,
            input: stdin.then(stdio::read_input),
            credit: INPUT_WINDOW,
            writer: None,
            pending: None,
            patience: Patience::default(),
            missing: 0,
        })
    }

    /// Passes everything in both directions until the command has ended.
    async fn run(mut self, printer: &Printer) -> Result<Outcome> {
        let end = loop {
            let end = match self.step().await {
                Step::Frame(frame) => self.take(frame?, printer),
                Step::Writable(true) => {
                    self.write();
                    None
                }
                Step::Writable(false) => return self.output_closed().await,
                Step::Input(Some(bytes)) => {
                    self.credit -= bytes.len();
                    self.socket.send_input(&bytes).await?;
                    None
                }
                Step::Input(None) => {
                    self.input = None;
                    self.socket.end_input().await?;
                    None
                }
                Step::Signal(name) => self.pass_signal(name, printer).await?,
                Step::Overdue(signal) => Some(leave(signal, printer)),
                Step::Resized => {
                    if let Ok(size) = window_size() {
                        self.socket.resize((size.columns, size.rows)).await?;
                    }
                    None
                }
            };
            if let Some(end) = end {
                break end;
            }
        };
        let outcome = Outcome { end, missing: self.missing };
        if !matches!(outcome.end, End::Left { .. })
            && let Some(writer) = self.writer.take()
        {
            tokio::select! {
                written = writer.finish() => written?,
                // The command has ended, and its output is not being read.
                signal = any_signal(&mut self.signals) => {
                    return Ok(Outcome { end: End::Left { signal }, ..outcome });
                }
                signal = self.patience.run_out() => {
                    return Ok(Outcome { end: End::Left { signal }, ..outcome });
                }
            }
        }
        Ok(outcome)
    }

    /// Every branch is cancel-safe: data that was not delivered stays where it is.
    async fn step(&mut self) -> Step {
        let Self { socket, signals, resized, input, credit, writer, pending, patience, .. } = self;
        tokio::select! {
            frame = socket.next(), if pending.is_none() => Step::Frame(frame),
            open = OutputWriter::ready(writer.as_ref()), if pending.is_some() => Step::Writable(open),
            bytes = receive(input.as_mut()), if *credit >= INPUT_PIECE => Step::Input(bytes),
            name = any_signal(signals) => Step::Signal(name),
            signal = patience.run_out() => Step::Overdue(signal),
            () = received(resized.as_mut()) => Step::Resized,
        }
    }

    fn take(&mut self, frame: ExecFrame, printer: &Printer) -> Option<End> {
        match frame {
            ExecFrame::Stdout(bytes) => self.print(OutputPiece::Stdout(bytes)),
            ExecFrame::Stderr(bytes) => self.print(OutputPiece::Stderr(bytes)),
            ExecFrame::Credit(bytes) => self.credit += bytes,
            ExecFrame::StdinClosed => self.input = None,
            ExecFrame::Gap { from, to } => {
                self.missing += to.saturating_sub(from);
                self.print(OutputPiece::Gap);
                warn_of_gap(from, to, printer);
            }
            ExecFrame::Exited { code, ending } => return Some(End::Exited { code, ending }),
            ExecFrame::Failed { message, ending, .. } => return Some(End::Failed { message, ending }),
            ExecFrame::Connected { .. } => {}
        }
        None
    }

    fn print(&mut self, piece: OutputPiece) {
        self.writer.get_or_insert_with(OutputWriter::start);
        self.pending = Some(piece);
        self.write();
    }

    /// Hands pending output to the writer, if it accepts more right now.
    fn write(&mut self) {
        if let (Some(writer), Some(piece)) = (&self.writer, self.pending.take()) {
            self.pending = writer.offer(piece);
        }
    }

    /// The reader of our output is gone: the command gets the signal that its own pipe would cause.
    async fn output_closed(mut self) -> Result<Outcome> {
        let passed = async {
            self.socket.signal("SIGPIPE").await?;
            // A connection that is closed with unread output may be reset before the server has read the
            // signal. So the output is read, and dropped, until the command has ended.
            loop {
                if let ExecFrame::Exited { .. } | ExecFrame::Failed { .. } = self.socket.next().await? {
                    return Ok::<_, anyhow::Error>(());
                }
            }
        };
        // A command that ignores the signal runs on.
        if let Ok(passed) = timeout(SIGNAL_TIMEOUT, passed).await {
            passed?;
        }
        if let Some(writer) = self.writer.take() {
            writer.finish().await?;
        }
        bail!("the output was closed")
    }

    async fn pass_signal(&mut self, name: &'static str, printer: &Printer) -> Result<Option<End>> {
        if self.patience.is_over(name) {
            return Ok(Some(leave(name, printer)));
        }
        match timeout(SIGNAL_TIMEOUT, self.socket.signal(name)).await {
            Ok(sent) => sent.map(|()| None),
            Err(_elapsed) => Ok(Some(leave(name, printer))),
        }
    }
}

fn leave(signal: &'static str, printer: &Printer) -> End {
    printer.note("the command does not end; it is left running");
    End::Left { signal }
}

/// The number of a signal that we pass on.
fn number_of(signal: &str) -> u8 {
    match signal {
        "SIGHUP" => 1,
        "SIGQUIT" => 3,
        "SIGTERM" => 15,
        _ => 2,
    }
}

async fn receive(input: Option<&mut mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match input {
        Some(input) => input.recv().await,
        None => std::future::pending().await,
    }
}

async fn received(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

async fn any_signal(signals: &mut [(&'static str, Signal)]) -> &'static str {
    std::future::poll_fn(|context| {
        for (name, signal) in signals.iter_mut() {
            if signal.poll_recv(context).is_ready() {
                return std::task::Poll::Ready(*name);
            }
        }
        std::task::Poll::Pending
    })
    .await
}

fn warn_of_gap(from: u64, to: u64, printer: &Printer) {
    printer.warn(format_args!(
        "{} bytes of output (offsets {from} to {to}) are missing: they were not read in time",
        to.saturating_sub(from)
    ));
}

/// Our exit code for the way the command ended.
fn finish(outcome: Outcome, request: &ExecRequest, printer: &Printer) -> Result<ExitCode> {
    let code = match outcome.end {
        // The exit code of shells for a command that this signal ended.
        End::Left { signal } => 128 | number_of(signal),
        End::Failed { message, ending } => return Err(not_started(message, ending, request)),
        End::Exited { code, ending: None } => u8::try_from(code & 0xff).unwrap_or(u8::MAX),
        End::Exited { ending: Some(ending), .. } => ending_code(ending, request, printer)?,
    };
    // A script must not mistake incomplete output for all of it.
    let code = if code == 0 && outcome.missing > 0 { NOT_RUN } else { code };
    Ok(ExitCode::from(code))
}

/// The exit code for a command that was ended, as a shell or timeout(1) reports it.
fn ending_code(ending: Ending, request: &ExecRequest, printer: &Printer) -> Result<u8> {
    match ending {
        Ending::Signal { signal } => Ok(128 | (signal & 127)),
        Ending::Oom => {
            printer.remark("coracle: the memory limit was reached and the kernel killed the command");
            Ok(137)
        }
        Ending::Deadline => {
            let timeout = request.timeout.unwrap_or_default();
            printer.remark(format_args!(
                "coracle: the timeout of {timeout:?} was reached and the command was killed"
            ));
            Ok(124)
        }
        Ending::Missing | Ending::NotExecutable | Ending::Lost => {
            Err(anyhow!("it is not known how the command ended"))
        }
    }
}

fn not_started(message: String, ending: Option<Ending>, request: &ExecRequest) -> anyhow::Error {
    match ending {
        Some(Ending::Missing) if is_shell_text(request) => NotStarted::missing(message)
            .with_hint("this is one word; `-c` runs text with pipes and blanks in a shell")
            .into(),
        Some(Ending::Missing) => NotStarted::missing(message).into(),
        Some(Ending::NotExecutable) => NotStarted::not_executable(message).into(),
        _ => anyhow!(message),
    }
}

/// Whether the only word of a command looks like shell text.
fn is_shell_text(request: &ExecRequest) -> bool {
    const OF_SHELLS: &[char] = &[' ', '|', '&', ';', '<', '>', '(', ')', '$', '`', '*', '?', '\n', '\t'];
    request.text.is_none() && request.argv.len() == 1 && request.argv[0].contains(OF_SHELLS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code_of(end: End, missing: u64) -> Option<ExitCode> {
        let outcome = Outcome { end, missing };
        match finish(outcome, &ExecRequest::default(), &Printer::new(false)) {
            Ok(code) => Some(code),
            Err(error) => error.downcast_ref::<NotStarted>().map(|failed| ExitCode::from(failed.code)),
        }
    }

    #[test]
    fn endings_have_the_codes_of_a_shell() {
        let ended = |ending| End::Exited { code: -1, ending: Some(ending) };
        let failed = |ending| End::Failed { message: "why".to_owned(), ending };
        for (end, code) in [
            (End::Exited { code: 3, ending: None }, Some(3)),
            (ended(Ending::Signal { signal: 9 }), Some(137)),
            (ended(Ending::Signal { signal: 15 }), Some(143)),
            (ended(Ending::Oom), Some(137)),
            (ended(Ending::Deadline), Some(124)),
            (ended(Ending::Lost), None),
            (failed(Some(Ending::Missing)), Some(127)),
            (failed(Some(Ending::NotExecutable)), Some(126)),
            (failed(None), None),
            (End::Left { signal: "SIGINT" }, Some(130)),
            (End::Left { signal: "SIGTERM" }, Some(143)),
        ] {
            let shown = format!("{end:?}");
            assert_eq!(code_of(end, 0), code.map(ExitCode::from), "{shown}");
        }
    }

    #[test]
    fn the_third_interrupt_or_the_signal_after_a_termination_leaves_the_command() {
        let over = |signals: &[&'static str]| {
            let mut patience = Patience::default();
            signals.iter().map(|signal| patience.is_over(signal)).collect::<Vec<_>>()
        };
        assert_eq!(over(&["SIGINT", "SIGQUIT", "SIGINT"]), [false, false, true]);
        for (first, second) in [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGINT"), ("SIGTERM", "SIGQUIT")] {
            assert_eq!(over(&[first, second]), [false, true], "{first}, {second}");
        }
    }

    #[test]
    fn success_with_a_gap_is_no_success() {
        let exited = |code| End::Exited { code, ending: None };
        assert_eq!(code_of(exited(0), 5), Some(ExitCode::from(125)));
        assert_eq!(code_of(exited(3), 5), Some(ExitCode::from(3)));
    }

    #[test]
    fn one_word_with_the_characters_of_a_shell_is_shell_text() {
        let request = |words: &[&str]| ExecRequest {
            argv: words.iter().map(|word| (*word).to_owned()).collect(),
            ..Default::default()
        };
        assert!(is_shell_text(&request(&["echo a | wc"])));
        assert!(!is_shell_text(&request(&["ecko"])));
        assert!(!is_shell_text(&request(&["ecko", "a | b"])));
    }
}
