//! `shell`: the terminal of this process, connected to one in a sandbox.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use domain::process::TerminalSize;
use rustix::termios::{self, OptionalActions, Termios};
use std::sync::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::ShellArgs;
use crate::client::{ServerClient, TerminalEvent, TerminalMessage, TerminalSocket};
use crate::output::{Printer, WithHint};

pub(crate) async fn open_shell(
    server: &ServerClient,
    args: ShellArgs,
    _printer: &Printer,
) -> Result<ExitCode> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(anyhow!("`coracle shell` needs a terminal for input and output"))
            .with_hint("use `coracle exec` in scripts");
    }
    let sandbox = server.open_sandbox(&server.resolve_sandbox(&args.id).await?).await?;
    let mut terminal = sandbox.open_terminal(args.workdir.as_deref(), args.text.as_deref()).await?;
    let raw = RawMode::enter()?;
    let outcome = relay_terminal(&mut terminal.socket, tokio::io::stdin(), window_size).await;
    drop(raw);
    terminal.close().await;
    let code = outcome?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}

/// Passes keys in and output out until the shell ends or a signal asks us to end.
async fn relay_terminal<S: AsyncRead + AsyncWrite + Unpin>(
    terminal: &mut TerminalSocket<S>,
    keys: impl AsyncRead + Unpin,
    window_size: impl Fn() -> Result<TerminalSize>,
) -> Result<i32> {
    let mut leave = [signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    // The signals are observed beside the whole relay, since it also waits in its writes if the server does not read.
    tokio::select! {
        code = relay_until_exit(terminal, keys, window_size) => code,
        () = wait_for_any(&mut leave) => Err(anyhow!("the shell was left because of a signal")),
    }
}

async fn relay_until_exit<S: AsyncRead + AsyncWrite + Unpin>(
    terminal: &mut TerminalSocket<S>,
    mut keys: impl AsyncRead + Unpin,
    window_size: impl Fn() -> Result<TerminalSize>,
) -> Result<i32> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut buffer = [0; 4096];
    terminal.send(TerminalMessage::Resize(window_size()?)).await?;
    loop {
        // Every branch is cancel-safe: data that was not delivered stays where it is.
        tokio::select! {
            event = terminal.next_event() => match event? {
                TerminalEvent::Output(bytes) => write_output(&bytes)?,
                TerminalEvent::Exited(code) => return Ok(code),
            },
            count = keys.read(&mut buffer) => match count? {
                0 => return Ok(0),
                count => terminal.send(TerminalMessage::Input(buffer[..count].to_vec())).await?,
            },
            _ = resized.recv() => terminal.send(TerminalMessage::Resize(window_size()?)).await?,
        }
    }
}

async fn wait_for_any(signals: &mut [Signal; 2]) {
    let [first, second] = signals;
    tokio::select! {
        _ = first.recv() => {}
        _ = second.recv() => {}
    }
}

fn write_output(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

pub(super) fn window_size() -> Result<TerminalSize> {
    let size = termios::tcgetwinsize(io::stdout()).context("could not ask for the size of the terminal")?;
    // A terminal that does not know its size says 0, as over a serial line.
    let or = |count, usual| if count == 0 { usual } else { count };
    Ok(TerminalSize { columns: or(size.ws_col, 80), rows: or(size.ws_row, 24) })
}

/// The settings of the terminal before raw mode, for the code that restores them.
static SAVED_TERMIOS: Mutex<Option<Termios>> = Mutex::new(None);

/// Raw mode: the local terminal passes every key on, until this is dropped.
///
/// A release build aborts on a panic and drops nothing then, so the panic hook restores the terminal
/// too.
pub(super) struct RawMode;

impl RawMode {
    pub(super) fn enter() -> Result<Self> {
        let before = termios::tcgetattr(io::stdin()).context("could not read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        if let Ok(mut saved) = SAVED_TERMIOS.lock() {
            *saved = Some(before);
        }
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore_terminal();
            usual(panic);
        }));
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)
            .context("could not change the terminal's settings")?;
        Ok(Self)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the terminal. A failure is ignored: then the terminal is gone.
fn restore_terminal() {
    let before = SAVED_TERMIOS.lock().ok().and_then(|mut saved| saved.take());
    if let Some(before) = before {
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &before).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::poll;
    use rustix::process::{Signal as PosixSignal, getpid, kill_process};
    use tokio::time::timeout;

    use super::super::SIGNAL_TESTS;
    use super::*;

    #[tokio::test]
    async fn termination_ends_a_shell_whose_server_does_not_read() {
        let _alone = SIGNAL_TESTS.lock().await;
        // The peer is kept open, but never reads: the first message already blocks.
        let (near, _peer) = tokio::io::duplex(1);
        let mut terminal = TerminalSocket::over_stream(near);
        let size = || Ok(TerminalSize { columns: 80, rows: 24 });
        let mut relay = std::pin::pin!(relay_terminal(&mut terminal, &b"keys"[..], size));
        assert!(poll!(&mut relay).is_pending(), "the write does not block");
        kill_process(getpid(), PosixSignal::TERM).expect("our own process");
        let outcome = timeout(Duration::from_secs(30), relay).await.expect("the signal is seen");
        outcome.expect_err("the shell has not ended");
    }
}
