//! One terminal: its last shell and the client that is attached; and the registry of all terminals.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{Owner, ProcessId, SandboxId};
use tokio::sync::watch;

use super::CreateTerminalRequest;

/// All terminals known to this server.
#[derive(Default)]
pub(crate) struct TerminalRegistry(Mutex<HashMap<(SandboxId, String), Arc<TerminalSession>>>);

pub struct TerminalSession {
    owner: Owner,
    pub name: String,
    /// The parameters of its shells; `None` if the terminal was created by an earlier server process.
    pub(super) parameters: Option<CreateTerminalRequest>,
    /// Locked while a shell is being started or the terminal deleted, so that a shell is started only once and never
    /// after the delete.
    pub(super) shell: tokio::sync::Mutex<ShellState>,
    attach_state: watch::Sender<AttachState>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ShellState {
    NotStarted,
    Started(TerminalShell),
    /// The shells were killed, and none may be started again.
    Deleted,
}

/// The last shell of a terminal, which may have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TerminalShell {
    pub(super) shell: ShellProcess,
    pub(super) mode: TerminalMode,
    /// The previous shell, kept for its output.
    pub(super) before: Option<ShellProcess>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShellProcess {
    pub(super) process: ProcessId,
    /// The output offset of the terminal when this shell started.
    pub(super) base: u64,
}

/// How the shell is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminalMode {
    Terminal,
    Pipes,
}

/// The attached client; each new client gets the next number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AttachState {
    number: u64,
    taken: bool,
}

/// A client's attachment to a terminal; dropping it detaches the client.
pub struct TerminalAttachment {
    terminal: Arc<TerminalSession>,
    number: u64,
    attach_state: watch::Receiver<AttachState>,
}

/// Returns the tag by which a shell is found again.
pub(super) fn shell_tag(mode: TerminalMode, name: &str, base: u64) -> String {
    format!("{}:{name}:{base}", mode.name())
}

/// Parses the tag of a shell of this terminal. The tag comes from inside the sandbox and is untrusted.
pub(super) fn parse_shell_tag(name: &str, tag: &str) -> Option<(TerminalMode, u64)> {
    let modes = [TerminalMode::Terminal, TerminalMode::Pipes];
    let mode = modes.into_iter().find(|mode| tag.starts_with(mode.name()))?;
    let base = tag.strip_prefix(mode.name())?.strip_prefix(':')?.strip_prefix(name)?.strip_prefix(':')?;
    Some((mode, base.parse().ok()?))
}

impl TerminalMode {
    /// The name in the tags of shells and in the frames of clients.
    pub fn name(self) -> &'static str {
        match self {
            Self::Terminal => "pty",
            Self::Pipes => "pipe",
        }
    }
}

impl TerminalSession {
    pub(super) fn new(
        owner: Owner,
        name: String,
        parameters: Option<CreateTerminalRequest>,
        shell: ShellState,
    ) -> Arc<Self> {
        let shell = tokio::sync::Mutex::new(shell);
        let attach_state = watch::Sender::new(AttachState::default());
        Arc::new(Self { owner, name, parameters, shell, attach_state })
    }

    /// Whether it waits for its first client, has one, or has a running shell.
    fn is_alive(&self, running: &HashSet<ProcessId>) -> bool {
        let Ok(state) = self.shell.try_lock() else { return true };
        let runs = match &*state {
            ShellState::NotStarted => true,
            ShellState::Started(last) => running.contains(&last.shell.process),
            ShellState::Deleted => false,
        };
        runs || self.attach_state.borrow().taken
    }

    /// Attaches a client, if none is attached or `takeover` is set.
    pub fn attach_client(self: &Arc<Self>, takeover: bool) -> Option<TerminalAttachment> {
        let mut number = None;
        self.attach_state.send_if_modified(|state| {
            if !state.taken || takeover {
                *state = AttachState { number: state.number + 1, taken: true };
                number = Some(state.number);
            }
            number.is_some()
        });
        let (number, attach_state) = (number?, self.attach_state.subscribe());
        Some(TerminalAttachment { terminal: self.clone(), number, attach_state })
    }
}

impl TerminalAttachment {
    pub fn terminal(&self) -> &Arc<TerminalSession> {
        &self.terminal
    }

    /// Returns when another client has taken over. Cancel-safe.
    pub async fn wait_until_displaced(&mut self) {
        let number = self.number;
        // The terminal owns the sender and this attachment the terminal, so the channel cannot be closed.
        if self.attach_state.wait_for(|state| state.number != number).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for TerminalAttachment {
    fn drop(&mut self) {
        self.terminal.attach_state.send_if_modified(|state| {
            let mine = state.number == self.number;
            state.taken &= !mine;
            mine
        });
    }
}

impl TerminalRegistry {
    pub(super) fn find(&self, id: &SandboxId, name: &str) -> Option<Arc<TerminalSession>> {
        self.lock().get(&(id.clone(), name.to_owned())).cloned()
    }

    /// Registers a terminal; an existing one wins.
    pub(super) fn register(&self, id: &SandboxId, terminal: Arc<TerminalSession>) -> Arc<TerminalSession> {
        self.lock().entry((id.clone(), terminal.name.clone())).or_insert(terminal).clone()
    }

    pub(super) fn remove(&self, id: &SandboxId, terminal: &TerminalSession) {
        self.lock().remove(&(id.clone(), terminal.name.clone()));
    }

    pub(super) fn count(&self, id: &SandboxId) -> usize {
        self.lock().keys().filter(|(sandbox, _)| sandbox == id).count()
    }

    /// Removes ended terminals, which can still be found by their tag.
    pub(super) fn drop_ended(&self, id: &SandboxId, running: &HashSet<ProcessId>) {
        self.lock().retain(|(sandbox, _), terminal| sandbox != id || terminal.is_alive(running));
    }

    /// Removes terminals of sandboxes that no longer exist.
    pub(super) fn remove_orphans(&self, exists: impl Fn(&Owner, &SandboxId) -> bool) {
        self.lock().retain(|(id, _), terminal| exists(&terminal.owner, id));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(SandboxId, String), Arc<TerminalSession>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn terminal() -> Arc<TerminalSession> {
        let request = Some(CreateTerminalRequest::default());
        TerminalSession::new(Owner::operator(), "t".to_owned(), request, ShellState::NotStarted)
    }

    #[test]
    fn second_client_needs_takeover() {
        let terminal = terminal();
        let mut first = terminal.attach_client(false).unwrap();
        assert!(terminal.attach_client(false).is_none());
        assert!(first.wait_until_displaced().now_or_never().is_none());
        let mut second = terminal.attach_client(true).unwrap();
        assert!(first.wait_until_displaced().now_or_never().is_some());
        assert!(second.wait_until_displaced().now_or_never().is_none());
    }

    #[test]
    fn displaced_client_does_not_detach_its_successor() {
        let terminal = terminal();
        let first = terminal.attach_client(false).unwrap();
        let second = terminal.attach_client(true).unwrap();
        drop(first);
        assert!(terminal.attach_client(false).is_none());
        drop(second);
        assert!(terminal.attach_client(false).is_some());
    }

    #[test]
    fn shell_is_found_only_by_its_own_tag() {
        for mode in [TerminalMode::Terminal, TerminalMode::Pipes] {
            assert_eq!(parse_shell_tag("t1", &shell_tag(mode, "t1", 70)), Some((mode, 70)));
        }
        for other in ["pty:t2:70", "pty:t1", "pty:t12:70", "pty:t1:-1", "pty:t1:x", "other:t1:70", ""] {
            assert_eq!(parse_shell_tag("t1", other), None, "{other}");
        }
    }

    #[test]
    fn only_running_or_waiting_terminals_count() {
        let (terminals, id) = (TerminalRegistry::default(), SandboxId::parse(&"a".repeat(20)).unwrap());
        let process = |letter: &str| ProcessId::parse(&letter.repeat(32)).unwrap();
        let with = |name: &str, letter: Option<&str>| {
            let shell = letter.map(|letter| ShellProcess { process: process(letter), base: 0 });
            let last = shell.map(|shell| TerminalShell { shell, mode: TerminalMode::Pipes, before: None });
            let state = last.map_or(ShellState::NotStarted, ShellState::Started);
            terminals.register(&id, TerminalSession::new(Owner::operator(), name.to_owned(), None, state))
        };
        with("waits", None);
        with("runs", Some("a"));
        let left = with("ended, but still has a client", Some("b"));
        let attachment = left.attach_client(false).unwrap();
        with("ended", Some("c"));
        terminals.drop_ended(&id, &HashSet::from([process("a")]));
        assert_eq!(terminals.count(&id), 3);
        assert!(terminals.find(&id, "ended").is_none());
        drop(attachment);
        terminals.drop_ended(&id, &HashSet::from([process("a")]));
        assert_eq!(terminals.count(&id), 2);
    }
}
