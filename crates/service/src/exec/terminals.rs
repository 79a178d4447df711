//! Terminals that outlive the connections of their clients.
//!
//! A terminal is created first, and its shell starts with the first client that opens it; when the shell has ended, the
//! next client starts another. A client that comes back gets the output it has missed. One client at a time is
//! attached; another may take over. The process carries the terminal's name as its tag, so a terminal is found again
//! after a restart of the server, but the command it was created with is then unknown.

mod replay;
mod session;

use std::collections::BTreeMap;
use std::sync::Arc;

use domain::process::{CommandLine, ProcessIo, ProcessSpec, StdinMode, TerminalSize, WorkingDirectory};
use domain::{Backpressure, ProcessId};

use self::replay::REPLAY_RETENTION;
use self::session::{ShellProcess, ShellState, TerminalShell, parse_shell_tag, shell_tag};
use crate::core::new_process_id;
use crate::{OutputStream, ProcessStatus, SandboxRef, ServiceError};

pub use self::replay::MissedOutput;
pub(crate) use self::session::TerminalRegistry;
pub use self::session::{TerminalAttachment, TerminalMode, TerminalSession};

/// The size of a terminal whose client has not sent one.
pub const DEFAULT_TERMINAL_SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };

/// The terminal type that programs see unless the caller sets another.
pub const TERMINAL_TYPE: &str = "xterm-256color";

/// The maximum number of terminals of one sandbox that wait for their first client or whose shell runs. A sandbox has 32
/// pseudo-terminals; two are left for programs inside.
const MAX_TERMINALS: usize = 30;

/// Starts bash if available, otherwise sh.
const DEFAULT_SHELL_COMMAND: &str = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi";

/// The longest part of an unknown terminal's name that an error repeats.
const MAX_NAME_IN_ERROR: usize = 64;

/// A request to create a terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateTerminalRequest {
    /// The text that each shell of the terminal runs; `None` starts an interactive shell.
    pub command: Option<String>,
    pub directory: Option<WorkingDirectory>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalStatus {
    pub running: bool,
    /// The offset after the last byte that the terminal has printed, counted from its first shell on.
    pub output_offset: u64,
}

/// The shell of a terminal as one client sees it.
pub struct OpenTerminal {
    pub process: ProcessId,
    pub mode: TerminalMode,
    /// What the client has missed, up to where `output` continues.
    pub missed: MissedOutput,
    pub output: OutputStream,
}

/// The terminals of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxTerminals<'a>(pub(crate) &'a SandboxRef);

impl SandboxTerminals<'_> {
    /// Creates a terminal; its shell starts when it is opened.
    pub async fn create_terminal(
        self,
        request: CreateTerminalRequest,
    ) -> Result<Arc<TerminalSession>, ServiceError> {
        let (terminals, id) = (&self.0.core.terminals, self.0.id());
        terminals.remove_orphans(|owner, id| self.0.core.find_sandbox(owner, id).is_ok());
        if terminals.count(id) >= MAX_TERMINALS {
            let all = self.0.processes().list_processes().await?;
            self.make_room(&all)?;
        }
        let name = new_process_id()?.to_string();
        let terminal =
            TerminalSession::new(self.0.owner().clone(), name, Some(request), ShellState::NotStarted);
        Ok(terminals.register(id, terminal))
    }

    /// Forgets ended terminals, which can still be found by their tag.
    fn make_room(self, processes: &[ProcessStatus]) -> Result<(), ServiceError> {
        let (terminals, id) = (&self.0.core.terminals, self.0.id());
        let running = processes.iter().filter(|status| status.ended.is_none());
        terminals.drop_ended(id, &running.map(|status| status.process.clone()).collect());
        if terminals.count(id) >= MAX_TERMINALS {
            return Err(ServiceError::TooManyTerminals { id: id.clone(), limit: MAX_TERMINALS });
        }
        Ok(())
    }

    /// Finds a terminal that this server knows, or one whose process still carries its name.
    pub async fn find_terminal(self, name: &str) -> Result<Arc<TerminalSession>, ServiceError> {
        if let Some(terminal) = self.0.core.terminals.find(self.0.id(), name) {
            return Ok(terminal);
        }
        if ProcessId::parse(name).is_err() {
            return Err(no_terminal(name));
        }
        let all = self.0.processes().list_processes().await?;
        // The agent may name any number of terminals.
        if self.0.core.terminals.count(self.0.id()) >= MAX_TERMINALS {
            self.make_room(&all)?;
        }
        let last = last_shell(name, all).ok_or_else(|| no_terminal(name))?;
        let terminal =
            TerminalSession::new(self.0.owner().clone(), name.to_owned(), None, ShellState::Started(last));
        Ok(self.0.core.terminals.register(self.0.id(), terminal))
    }

    pub async fn terminal_status(self, name: &str) -> Result<TerminalStatus, ServiceError> {
        let terminal = self.find_terminal(name).await?;
        let state = terminal.shell.lock().await.clone();
        let ShellProcess { process, base } = match state {
            ShellState::NotStarted => return Ok(TerminalStatus { running: false, output_offset: 0 }),
            ShellState::Started(last) => last.shell,
            ShellState::Deleted => return Err(no_terminal(name)),
        };
        match self.0.processes().process_status(&process).await {
            Ok(status) => Ok(TerminalStatus {
                running: status.ended.is_none(),
                output_offset: base.saturating_add(status.written),
            }),
            // It ended so long ago that its status was forgotten.
            Err(ServiceError::NoProcess(_)) => Ok(TerminalStatus { running: false, output_offset: base }),
            Err(error) => Err(error),
        }
    }

    /// Kills the shells of a terminal and forgets it.
    ///
    /// The terminal stays locked and registered until its shells are gone. A client that found it before cannot start
    /// another shell, and a request that comes meanwhile does not find the terminal again by the tag of its shells.
    pub async fn delete_terminal(self, name: &str) -> Result<(), ServiceError> {
        let terminal = self.find_terminal(name).await?;
        let mut state = terminal.shell.lock().await;
        if let ShellState::Started(last) = &*state {
            for shell in last.before.iter().chain([&last.shell]) {
                self.kill_and_forget(&shell.process).await?;
            }
        }
        *state = ShellState::Deleted;
        self.0.core.terminals.remove(self.0.id(), &terminal);
        Ok(())
    }

    /// Kills and forgets a process, so that it cannot be found again by its tag.
    async fn kill_and_forget(self, process: &ProcessId) -> Result<(), ServiceError> {
        let ended = async {
            self.0.processes().kill_process(process).await?;
            self.0.processes().forget_process(process).await
        };
        match ended.await {
            Ok(()) | Err(ServiceError::NoProcess(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Follows the shell of a terminal, starting it if none runs, and collects the output since the offset `since`.
    pub async fn open_terminal(
        self,
        terminal: &TerminalSession,
        mode: TerminalMode,
        since: u64,
    ) -> Result<OpenTerminal, ServiceError> {
        let mut state = terminal.shell.lock().await;
        let (base, before) = match &*state {
            ShellState::Deleted => return Err(no_terminal(&terminal.name)),
            ShellState::NotStarted => (0, None),
            ShellState::Started(last) => match self.shell_end_offset(&last.shell).await? {
                Some(end) if terminal.parameters.is_some() => (end, Some(last.clone())),
                _ => {
                    let last = last.clone();
                    drop(state);
                    let (output, missed) = self.missed_since(&last, since).await?;
                    return Ok(OpenTerminal { process: last.shell.process, mode: last.mode, missed, output });
                }
            },
        };
        let output = self.0.processes().launch_process(self.shell_spec(terminal, mode, base)).await?;
        let shell = ShellProcess { process: output.process.clone(), base };
        let oldest = before.as_ref().and_then(|last| last.before.clone());
        let last = TerminalShell { shell, mode, before: before.map(|last| last.shell) };
        *state = ShellState::Started(last.clone());
        drop(state);
        if let Some(ShellProcess { process, .. }) = oldest
            && let Err(error) = self.0.processes().forget_process(&process).await
        {
            tracing::debug!(%error, "old shell of a terminal was already forgotten");
        }
        let missed = self.missed_of_previous_shell(&last, since).await;
        Ok(OpenTerminal { process: last.shell.process, mode, missed, output })
    }

    /// Returns the offset at which a shell has ended; `None` while it runs.
    async fn shell_end_offset(self, shell: &ShellProcess) -> Result<Option<u64>, ServiceError> {
        match self.0.processes().process_status(&shell.process).await {
            Ok(status) => Ok(status.ended.map(|_| shell.base.saturating_add(status.written))),
            // It ended so long ago that its status was forgotten.
            Err(ServiceError::NoProcess(_)) => Ok(Some(shell.base)),
            Err(error) => Err(error),
        }
    }

    fn shell_spec(self, terminal: &TerminalSession, mode: TerminalMode, base: u64) -> ProcessSpec {
        let request = terminal.parameters.clone().unwrap_or_default();
        let text = request.command.unwrap_or_else(|| DEFAULT_SHELL_COMMAND.to_owned());
        let (io, env) = match mode {
            TerminalMode::Terminal => (
                ProcessIo::Terminal(DEFAULT_TERMINAL_SIZE),
                BTreeMap::from([("TERM".to_owned(), TERMINAL_TYPE.to_owned())]),
            ),
            TerminalMode::Pipes => (ProcessIo::Pipes, BTreeMap::new()),
        };
        ProcessSpec {
            directory: request.directory,
            env,
            io,
            stdin: StdinMode::Piped,
            tag: Some(shell_tag(mode, &terminal.name, base)),
            retention: REPLAY_RETENTION,
            backpressure: Backpressure::On {
                stall_limit: Some(self.0.processes().output_settings().stall_limit),
            },
            ..ProcessSpec::new(CommandLine::Shell { text, login: false })
        }
    }
}

/// The last shell of a terminal among the processes of its sandbox, and the one before it.
fn last_shell(name: &str, processes: Vec<ProcessStatus>) -> Option<TerminalShell> {
    let shell = |status: ProcessStatus| {
        let (mode, base) = parse_shell_tag(name, status.tag.as_deref()?)?;
        Some((status.started, mode, ShellProcess { process: status.process, base }))
    };
    let mut shells: Vec<_> = processes.into_iter().filter_map(shell).collect();
    // A shell that printed nothing has the same offset as the next one.
    shells.sort_by_key(|(started, _, shell)| (shell.base, *started));
    let (_, mode, shell) = shells.pop()?;
    Some(TerminalShell { shell, mode, before: shells.pop().map(|(_, _, shell)| shell) })
}

fn no_terminal(name: &str) -> ServiceError {
    ServiceError::NoTerminal(name.chars().take(MAX_NAME_IN_ERROR).collect())
}
