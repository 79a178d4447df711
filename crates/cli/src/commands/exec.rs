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
use coracle_client::events::CommandEnding;
use coracle_client::exec::{ExecFrame, ExecRequest, INPUT_WINDOW};
use domain::SandboxId;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use self::stdio::{MAX_INPUT_PIECE, OutputPiece, OutputWriter};
use super::shell::{RawMode, window_size};
use super::{EXIT_NOT_RUN, ProgramStartError};
use crate::args::ExecArgs;
use crate::client::{ExecSocket, SandboxClient, ServerClient, StartCarrier, is_refusal};
use crate::output::{Printer, WithHint};

/// A command that has not ended after this many interrupts is left running.
const MAX_INTERRUPTS: u8 = 3;
/// How long a command may take to end after we received a signal to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the server may take to accept a signal for the command.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The default size of a terminal, used if the user has none.
const DEFAULT_TERMINAL_SIZE: (u16, u16) = (80, 24);

pub(crate) async fn exec_command(
    server: &ServerClient,
    args: ExecArgs,
    printer: &Printer,
) -> Result<ExitCode> {
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
        return Err(anyhow!("the command is blank")).with_hint("name a program, or shell text behind `-c`");
    }
    let id = server.resolve_sandbox(&args.id).await?;
    if args.detach {
        let id = server.open_sandbox(&id).await?.start_detached(&request).await?;
        if printer.is_json() {
            printer.print_json(&json!({ "process": id }))?
        } else {
            printer.print_line(id)?
        }
        return Ok(ExitCode::SUCCESS);
    }
    let stdin = args.interactive || stdio::is_redirected();
    let size =
        args.tty.then(|| window_size().map_or(DEFAULT_TERMINAL_SIZE, |size| (size.columns, size.rows)));
    // From here on the command may run, so it must get the signals that we get.
    let mut signals = ExecSignals::new(args.tty)?;
    let (socket, sandbox) = match connect(server, &id, &request, stdin, size, &mut signals).await? {
        Opened::Done(connected) => connected,
        Opened::GivenUp(signal) => return Ok(ended_by(signal)),
    };
    match socket {
        Some(socket) => relay_command(socket, signals, stdin, args.tty, &request, printer).await,
        None if args.tty => Err(anyhow!("this server has no terminals for commands"))
            .with_hint("`coracle shell` opens a terminal with a shell"),
        None if args.interactive => bail!("this server takes no input for commands"),
        None => {
            if stdin {
                printer.warn("this server takes no input for commands; standard input is not sent");
            }
            fallback::run_over_http(&sandbox, &request, signals, printer).await
        }
    }
}

/// Requests the command over a socket; there is none if the server has no such socket.
async fn connect(
    server: &ServerClient,
    id: &SandboxId,
    request: &ExecRequest,
    stdin: bool,
    size: Option<(u16, u16)>,
    signals: &mut ExecSignals,
) -> Result<Opened<(Option<ExecSocket>, SandboxClient)>> {
    let direct = server.sandbox_by_path(id);
    let opening = direct.open_exec_socket(request, stdin, size, StartCarrier::Header);
    match signals.wait_for(opening).await {
        Opened::GivenUp(signal) => return Ok(Opened::GivenUp(signal)),
        Opened::Done(Ok(Some(socket))) => return Ok(Opened::Done((Some(socket), direct))),
        // The server refused: the sandbox has an address of its own, needs its own token, or does not exist.
        Opened::Done(Ok(None)) => {}
        Opened::Done(Err(error)) if is_refusal(&error) => {}
        // The command may have been started, so it is not requested again.
        Opened::Done(Err(error)) => return Err(error),
    }
    // Nothing was started, so a signal ends us as it ends other programs.
    if let Some(signal) = signals.early {
        return Ok(Opened::GivenUp(signal));
    }
    let opening = async {
        let sandbox = server.open_sandbox(id).await?;
        let socket = sandbox.open_exec_socket(request, stdin, size, StartCarrier::Frame).await?;
        Ok((socket, sandbox))
    };
    match signals.wait_for(opening).await {
        Opened::GivenUp(signal) => Ok(Opened::GivenUp(signal)),
        Opened::Done(connected) => connected.map(Opened::Done),
    }
}

/// The exit code of shells for a command that this signal ended.
fn ended_by(signal: &str) -> ExitCode {
    ExitCode::from(128 | signal_number(signal))
}

/// Connects the command to our own input and output until it has ended.
async fn relay_command(
    socket: ExecSocket,
    signals: ExecSignals,
    stdin: bool,
    tty: bool,
    request: &ExecRequest,
    printer: &Printer,
) -> Result<ExitCode> {
    let raw = (tty && stdin && io::stdin().is_terminal()).then(RawMode::enter).transpose()?;
    let outcome = ExecSession::new(socket, signals, stdin).relay_until_end(printer).await;
    drop(raw);
    exec_exit_code(outcome?, request, printer)
}

/// How a command ended, and whether all of its output was received.
#[derive(Debug)]
struct ExecOutcome {
    end: ExecEnd,
    /// Bytes of output that are missing.
    missing: u64,
}

#[derive(Debug)]
enum ExecEnd {
    Exited {
        code: i32,
        ending: Option<CommandEnding>,
    },
    Failed {
        message: String,
        ending: Option<CommandEnding>,
    },
    /// The user stopped waiting by sending this signal; the command continues to run.
    Left {
        signal: &'static str,
    },
}

/// One command that is connected to our own input and output.
struct ExecSession<S> {
    socket: ExecSocket<S>,
    signals: Vec<(&'static str, Signal)>,
    /// The signal that was received before the socket was open.
    early_signal: Option<&'static str>,
    resized: Option<Signal>,
    input: Option<mpsc::Receiver<Vec<u8>>>,
    /// The number of input bytes that the server accepts now.
    credit: usize,
    writer: Option<OutputWriter>,
    /// Output that the writer has not taken yet.
    pending: Option<OutputPiece>,
    forwarded_signals: ForwardedSignals,
    missing: u64,
}

/// The signals that were passed on to the command, and how long we wait for it because of them.
#[derive(Debug, Default)]
struct ForwardedSignals {
    interrupts: u8,
    /// The signal that asked us to end, and the deadline it sets.
    ending: Option<(&'static str, Instant)>,
    /// The signal that is not yet written to the server, and the deadline for that.
    unsent: Option<(&'static str, Instant)>,
}

impl ForwardedSignals {
    /// Counts a signal. Returns `true` if the command had its chance: then the signal is not passed on
    /// and we leave the command running.
    fn count_signal(&mut self, signal: &'static str) -> bool {
        if self.ending.is_some() || self.unsent.is_some() {
            return true;
        }
        match signal {
            // A service manager, or a terminal that was closed, expects us to end.
            "SIGTERM" | "SIGHUP" => self.ending = Some((signal, Instant::now() + END_TIMEOUT)),
            _ => self.interrupts += 1,
        }
        self.interrupts >= MAX_INTERRUPTS
    }

    /// Waits for the next deadline, and returns the signal that set it.
    async fn wait_for_deadline(&self) -> &'static str {
        match self.ending.into_iter().chain(self.unsent).min_by_key(|(_, until)| *until) {
            Some((signal, until)) => {
                tokio::time::sleep_until(until).await;
                signal
            }
            None => std::future::pending().await,
        }
    }
}

/// The next event of the conversation.
enum ExecEvent {
    Frame(Result<ExecFrame>),
    /// The writer accepts more, or is gone.
    Writable(bool),
    Input(Option<Vec<u8>>),
    Signal(&'static str),
    /// The command did not end before the deadline that this signal set.
    Overdue(&'static str),
    Resized,
}

/// The signals that we pass on to the command.
struct ExecSignals {
    receivers: Vec<(&'static str, Signal)>,
    resized: Option<Signal>,
    /// The first signal, if it was received before the command could get it.
    early: Option<&'static str>,
}

/// The outcome of a request that a signal may cut short.
enum Opened<T> {
    Done(T),
    /// The server did not answer in time after this signal.
    GivenUp(&'static str),
}

impl ExecSignals {
    fn new(tty: bool) -> Result<Self> {
        let kinds = [
            ("SIGINT", SignalKind::interrupt()),
            ("SIGTERM", SignalKind::terminate()),
            ("SIGHUP", SignalKind::hangup()),
            ("SIGQUIT", SignalKind::quit()),
        ];
        let receivers = kinds.into_iter().map(|(name, kind)| Ok((name, signal(kind)?)));
        Ok(Self {
            receivers: receivers.collect::<io::Result<_>>()?,
            resized: tty.then(|| signal(SignalKind::window_change())).transpose()?,
            early: None,
        })
    }

    /// Waits for the socket of the command. A signal is kept for the command, which may already run; the
    /// server then has a short time to answer, and a second signal ends the wait.
    async fn wait_for<T>(&mut self, opening: impl Future<Output = T>) -> Opened<T> {
        let mut opening = std::pin::pin!(opening);
        let early = tokio::select! {
            opened = &mut opening => return Opened::Done(opened),
            name = next_signal(&mut self.receivers) => name,
        };
        self.early = Some(early);
        tokio::select! {
            opened = opening => Opened::Done(opened),
            name = next_signal(&mut self.receivers) => Opened::GivenUp(name),
            () = tokio::time::sleep(SIGNAL_TIMEOUT) => Opened::GivenUp(early),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ExecSession<S> {
    fn new(socket: ExecSocket<S>, signals: ExecSignals, stdin: bool) -> Self {
        Self {
            socket,
            signals: signals.receivers,
            early_signal: signals.early,
            resized: signals.resized,
            input: stdin.then(stdio::read_input),
            credit: INPUT_WINDOW,
            writer: None,
            pending: None,
            forwarded_signals: ForwardedSignals::default(),
            missing: 0,
        }
    }

    /// Passes everything in both directions until the command has ended.
    async fn relay_until_end(mut self, printer: &Printer) -> Result<ExecOutcome> {
        if let Some(name) = self.early_signal.take() {
            // The first signal is always passed on.
            self.forward_signal(name, printer)?;
        }
        let end = loop {
            if let Some(end) = self.write_queued(printer).await? {
                break end;
            }
            let end = match self.next_event().await {
                ExecEvent::Frame(frame) => self.handle_frame(frame?, printer),
                ExecEvent::Writable(true) => {
                    self.flush_pending();
                    None
                }
                ExecEvent::Writable(false) => return self.handle_output_closed().await,
                ExecEvent::Input(Some(bytes)) => {
                    self.credit -= bytes.len();
                    self.socket.queue_input(&bytes)?;
                    None
                }
                ExecEvent::Input(None) => {
                    self.input = None;
                    self.socket.queue_input_end()?;
                    None
                }
                ExecEvent::Signal(name) => self.forward_signal(name, printer)?,
                ExecEvent::Overdue(signal) => Some(leave_running(signal, printer)),
                ExecEvent::Resized => {
                    if let Ok(size) = window_size() {
                        self.socket.queue_resize((size.columns, size.rows))?;
                    }
                    None
                }
            };
            if let Some(end) = end {
                break end;
            }
        };
        let outcome = ExecOutcome { end, missing: self.missing };
        if !matches!(outcome.end, ExecEnd::Left { .. })
            && let Some(writer) = self.writer.take()
        {
            tokio::select! {
                written = writer.finish() => written?,
                // The command has ended, and its output is not being read.
                signal = next_signal(&mut self.signals) => {
                    return Ok(ExecOutcome { end: ExecEnd::Left { signal }, ..outcome });
                }
                signal = self.forwarded_signals.wait_for_deadline() => {
                    return Ok(ExecOutcome { end: ExecEnd::Left { signal }, ..outcome });
                }
            }
        }
        Ok(outcome)
    }

    /// Every branch is cancel-safe: data that was not delivered stays where it is.
    async fn next_event(&mut self) -> ExecEvent {
        let Self { socket, signals, resized, input, credit, writer, pending, forwarded_signals, .. } = self;
        tokio::select! {
            frame = socket.next_frame(), if pending.is_none() => ExecEvent::Frame(frame),
            open = OutputWriter::wait_for_room(writer.as_ref()), if pending.is_some() => ExecEvent::Writable(open),
            bytes = receive_input(input.as_mut()), if *credit >= MAX_INPUT_PIECE => ExecEvent::Input(bytes),
            name = next_signal(signals) => ExecEvent::Signal(name),
            signal = forwarded_signals.wait_for_deadline() => ExecEvent::Overdue(signal),
            () = wait_for_signal(resized.as_mut()) => ExecEvent::Resized,
        }
    }

    fn handle_frame(&mut self, frame: ExecFrame, printer: &Printer) -> Option<ExecEnd> {
        match frame {
            ExecFrame::Stdout(bytes) => self.queue_output(OutputPiece::Stdout(bytes)),
            ExecFrame::Stderr(bytes) => self.queue_output(OutputPiece::Stderr(bytes)),
            ExecFrame::Credit(bytes) => self.credit = self.credit.saturating_add(bytes),
            ExecFrame::StdinClosed => self.input = None,
            ExecFrame::Gap { from, to } => {
                self.missing += to.saturating_sub(from);
                self.queue_output(OutputPiece::Gap);
                warn_of_gap(from, to, printer);
            }
            ExecFrame::Exited { code, ending } => return Some(ExecEnd::Exited { code, ending }),
            ExecFrame::Failed { message, ending, .. } => return Some(ExecEnd::Failed { message, ending }),
            ExecFrame::Connected { .. } => {}
        }
        None
    }

    fn queue_output(&mut self, piece: OutputPiece) {
        self.writer.get_or_insert_with(OutputWriter::start);
        self.pending = Some(piece);
        self.flush_pending();
    }

    /// Hands pending output to the writer, if it accepts more right now.
    fn flush_pending(&mut self) {
        if let (Some(writer), Some(piece)) = (&mut self.writer, self.pending.take()) {
            self.pending = writer.try_write(piece);
        }
    }

    /// The reader of our output is gone: the command gets the signal that its own pipe would cause.
    async fn handle_output_closed(mut self) -> Result<ExecOutcome> {
        let passed = async {
            self.socket.queue_signal("SIGPIPE")?;
            self.socket.write_queued().await?;
            // A connection that is closed with unread output may be reset before the server has read the
            // signal. So the output is read, and dropped, until the command has ended.
            loop {
                if let ExecFrame::Exited { .. } | ExecFrame::Failed { .. } = self.socket.next_frame().await? {
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

    /// Sends what is queued for the server. A server that stopped reading blocks this for any time, so signals count
    /// meanwhile: the first is queued behind the rest, and the second, or a deadline, ends the wait.
    async fn write_queued(&mut self, printer: &Printer) -> Result<Option<ExecEnd>> {
        loop {
            let Self { socket, signals, forwarded_signals, .. } = self;
            // Every branch is cancel-safe. The write comes first: a server that reads takes it at once.
            let end = tokio::select! {
                biased;
                written = socket.write_queued() => {
                    written?;
                    forwarded_signals.unsent = None;
                    return Ok(None);
                }
                name = next_signal(signals) => self.forward_signal(name, printer)?,
                signal = forwarded_signals.wait_for_deadline() => Some(leave_running(signal, printer)),
            };
            if end.is_some() {
                return Ok(end);
            }
        }
    }

    /// Queues a signal for the command, or leaves the command running if it had its chance.
    fn forward_signal(&mut self, name: &'static str, printer: &Printer) -> Result<Option<ExecEnd>> {
        if self.forwarded_signals.count_signal(name) {
            return Ok(Some(leave_running(name, printer)));
        }
        self.socket.queue_signal(name)?;
        self.forwarded_signals.unsent = Some((name, Instant::now() + SIGNAL_TIMEOUT));
        Ok(None)
    }
}

fn leave_running(signal: &'static str, printer: &Printer) -> ExecEnd {
    printer.note_on_terminal("the command does not end; it is left running");
    ExecEnd::Left { signal }
}

/// The number of a signal that we pass on.
fn signal_number(signal: &str) -> u8 {
    match signal {
        "SIGHUP" => 1,
        "SIGQUIT" => 3,
        "SIGTERM" => 15,
        _ => 2,
    }
}

async fn receive_input(input: Option<&mut mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match input {
        Some(input) => input.recv().await,
        None => std::future::pending().await,
    }
}

async fn wait_for_signal(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

async fn next_signal(signals: &mut [(&'static str, Signal)]) -> &'static str {
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
fn exec_exit_code(outcome: ExecOutcome, request: &ExecRequest, printer: &Printer) -> Result<ExitCode> {
    let code = match outcome.end {
        // The exit code of shells for a command that this signal ended.
        ExecEnd::Left { signal } => 128 | signal_number(signal),
        ExecEnd::Failed { message, ending } => return Err(start_error(message, ending, request)),
        ExecEnd::Exited { code, ending: None } => u8::try_from(code & 0xff).unwrap_or(u8::MAX),
        ExecEnd::Exited { ending: Some(ending), .. } => exit_code_of_ending(ending, request, printer)?,
    };
    // A script must not mistake incomplete output for all of it.
    let code = if code == 0 && outcome.missing > 0 { EXIT_NOT_RUN } else { code };
    Ok(ExitCode::from(code))
}

/// The exit code for a command that was ended, as a shell or timeout(1) reports it.
fn exit_code_of_ending(ending: CommandEnding, request: &ExecRequest, printer: &Printer) -> Result<u8> {
    match ending {
        CommandEnding::Signal { signal } => Ok(128 | (signal & 127)),
        CommandEnding::Oom => {
            printer.remark("coracle: the memory limit was reached and the kernel killed the command");
            Ok(137)
        }
        CommandEnding::Deadline => {
            let timeout = request.timeout.unwrap_or_default();
            printer.remark(format_args!(
                "coracle: the timeout of {timeout:?} was reached and the command was killed"
            ));
            Ok(124)
        }
        CommandEnding::Missing | CommandEnding::NotExecutable | CommandEnding::Lost => {
            Err(anyhow!("it is not known how the command ended"))
        }
    }
}

fn start_error(message: String, ending: Option<CommandEnding>, request: &ExecRequest) -> anyhow::Error {
    match ending {
        Some(CommandEnding::Missing) if is_shell_text(request) => ProgramStartError::missing(message)
            .with_hint("this is one word; `-c` runs text with pipes and blanks in a shell")
            .into(),
        Some(CommandEnding::Missing) => ProgramStartError::missing(message).into(),
        Some(CommandEnding::NotExecutable) => ProgramStartError::not_executable(message).into(),
        _ => anyhow!(message),
    }
}

/// Whether the only word of a command looks like shell text.
fn is_shell_text(request: &ExecRequest) -> bool {
    const SHELL_CHARACTERS: &[char] =
        &[' ', '|', '&', ';', '<', '>', '(', ')', '$', '`', '*', '?', '\n', '\t'];
    request.text.is_none() && request.argv.len() == 1 && request.argv[0].contains(SHELL_CHARACTERS)
}

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use rustix::process::{Signal as PosixSignal, getpid, kill_process};

    use super::super::SIGNAL_TESTS;
    use super::*;

    fn code_of(end: ExecEnd, missing: u64) -> Option<ExitCode> {
        let outcome = ExecOutcome { end, missing };
        match exec_exit_code(outcome, &ExecRequest::default(), &Printer::new(false)) {
            Ok(code) => Some(code),
            Err(error) => error.downcast_ref::<ProgramStartError>().map(|failed| ExitCode::from(failed.code)),
        }
    }

    #[test]
    fn endings_have_the_codes_of_a_shell() {
        let ended = |ending| ExecEnd::Exited { code: -1, ending: Some(ending) };
        let failed = |ending| ExecEnd::Failed { message: "why".to_owned(), ending };
        for (end, code) in [
            (ExecEnd::Exited { code: 3, ending: None }, Some(3)),
            (ended(CommandEnding::Signal { signal: 9 }), Some(137)),
            (ended(CommandEnding::Signal { signal: 15 }), Some(143)),
            (ended(CommandEnding::Oom), Some(137)),
            (ended(CommandEnding::Deadline), Some(124)),
            (ended(CommandEnding::Lost), None),
            (failed(Some(CommandEnding::Missing)), Some(127)),
            (failed(Some(CommandEnding::NotExecutable)), Some(126)),
            (failed(None), None),
            (ExecEnd::Left { signal: "SIGINT" }, Some(130)),
            (ExecEnd::Left { signal: "SIGTERM" }, Some(143)),
        ] {
            let shown = format!("{end:?}");
            assert_eq!(code_of(end, 0), code.map(ExitCode::from), "{shown}");
        }
    }

    #[test]
    fn the_third_interrupt_or_the_signal_after_a_termination_leaves_the_command() {
        let over = |signals: &[&'static str]| {
            let mut patience = ForwardedSignals::default();
            signals.iter().map(|signal| patience.count_signal(signal)).collect::<Vec<_>>()
        };
        assert_eq!(over(&["SIGINT", "SIGQUIT", "SIGINT"]), [false, false, true]);
        for (first, second) in [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGINT"), ("SIGTERM", "SIGQUIT")] {
            assert_eq!(over(&[first, second]), [false, true], "{first}, {second}");
        }
    }

    /// The end of a command whose server stopped reading before these signals are received.
    async fn end_with_blocked_server(message: ExecEvent, signals: &[PosixSignal]) -> ExecEnd {
        // The peer is kept open, but never reads: every message blocks.
        let (near, _peer) = tokio::io::duplex(1);
        let receivers = ExecSignals::new(true).expect("signals can be received");
        let mut session = ExecSession::new(ExecSocket::over_stream(near), receivers, false);
        let (sender, receiver) = mpsc::channel(1);
        match message {
            ExecEvent::Input(Some(bytes)) => {
                sender.try_send(bytes).expect("the channel has room");
                session.input = Some(receiver);
            }
            ExecEvent::Input(None) => {
                drop(sender);
                session.input = Some(receiver);
            }
            _ => session.socket.queue_resize(DEFAULT_TERMINAL_SIZE).expect("the message is short"),
        }
        let printer = Printer::new(false);
        let mut relay = std::pin::pin!(session.relay_until_end(&printer));
        assert!(poll!(&mut relay).is_pending(), "the command cannot have ended");
        for signal in signals {
            kill_process(getpid(), *signal).expect("our own process");
        }
        relay.await.expect("the connection is open").end
    }

    /// The messages that a server which does not read blocks.
    fn blocked_messages() -> [ExecEvent; 3] {
        [ExecEvent::Input(Some(vec![0; MAX_INPUT_PIECE])), ExecEvent::Input(None), ExecEvent::Resized]
    }

    #[tokio::test]
    async fn second_signal_ends_the_wait_for_a_server_that_does_not_read() {
        let _alone = SIGNAL_TESTS.lock().await;
        for message in blocked_messages() {
            let before = Instant::now();
            let end = end_with_blocked_server(message, &[PosixSignal::INT, PosixSignal::TERM]).await;
            assert!(matches!(end, ExecEnd::Left { .. }), "{end:?}");
            assert!(before.elapsed() < SIGNAL_TIMEOUT, "{:?}", before.elapsed());
        }
    }

    /// The clock is stopped, so the deadline takes no time.
    #[tokio::test(start_paused = true)]
    async fn signal_ends_the_wait_after_a_timeout_if_the_server_does_not_read() {
        let _alone = SIGNAL_TESTS.lock().await;
        for (posix, name) in [(PosixSignal::INT, "SIGINT"), (PosixSignal::TERM, "SIGTERM")] {
            for message in blocked_messages() {
                let before = Instant::now();
                let end = end_with_blocked_server(message, &[posix]).await;
                assert!(matches!(end, ExecEnd::Left { signal } if signal == name), "{name}: {end:?}");
                assert!(before.elapsed() >= SIGNAL_TIMEOUT, "{name}: {:?}", before.elapsed());
            }
        }
    }

    #[test]
    fn success_with_a_gap_is_an_error() {
        let exited = |code| ExecEnd::Exited { code, ending: None };
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
