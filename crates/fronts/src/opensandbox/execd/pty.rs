//! Terminals over WebSocket: the registry of terminals, and which client is attached to each.
//!
//! A terminal is created first, and its shell starts with the first client that connects; when the
//! shell has ended, the next client starts another. One client at a time is attached; another may
//! take over. The process carries the terminal's name as its tag, so a terminal is found again after
//! a restart of the server, but the command it was created with is then unknown.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::{IntoResponse, Response};
use domain::{Owner, ProcessId, SandboxId};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{ProcessStatus, ServiceError};
use tokio::sync::watch;

use super::problem::{ExecdProblem, JsonOrEmpty};
use super::{ExecTarget, PathName, exec_socket, terminal_socket};
use crate::kit::query::QueryParams;
use crate::opensandbox::OpenSandboxState;
use crate::server::request_log::unique_hex;

/// The maximum number of terminals of one sandbox that wait for their first client or whose shell runs.
const MAX_TERMINALS: usize = 64;
/// The maximum size of a client message.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// All terminals known to this server.
#[derive(Default)]
pub(in crate::opensandbox) struct TerminalRegistry(Mutex<HashMap<(SandboxId, String), Arc<TerminalSession>>>);

pub(super) struct TerminalSession {
    owner: Owner,
    pub(super) name: String,
    /// The parameters of its shells; `None` if the terminal was created by an earlier server process.
    pub(super) parameters: Option<CreateTerminalBody>,
    /// Locked while the shell is being started, so that it is started only once.
    pub(super) process: tokio::sync::Mutex<Option<TerminalShell>>,
    attach_state: watch::Sender<AttachState>,
}

/// The last shell of a terminal, which may have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TerminalShell {
    pub(super) shell: ShellProcess,
    pub(super) mode: PtyMode,
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
pub(super) enum PtyMode {
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
pub(super) struct ClientAttachment {
    terminal: Arc<TerminalSession>,
    number: u64,
    attach_state: watch::Receiver<AttachState>,
}

/// Returns the tag by which a shell is found again.
pub(super) fn shell_tag(mode: PtyMode, name: &str, base: u64) -> String {
    format!("{}:{name}:{base}", mode.name())
}

/// Parses the tag of a shell of this terminal. The tag comes from inside the sandbox and is untrusted.
fn parse_shell_tag(name: &str, tag: &str) -> Option<(PtyMode, u64)> {
    let mode = [PtyMode::Terminal, PtyMode::Pipes].into_iter().find(|mode| tag.starts_with(mode.name()))?;
    let base = tag.strip_prefix(mode.name())?.strip_prefix(':')?.strip_prefix(name)?.strip_prefix(':')?;
    Some((mode, base.parse().ok()?))
}

impl PtyMode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Terminal => "pty",
            Self::Pipes => "pipe",
        }
    }
}

impl TerminalSession {
    fn new(
        owner: Owner,
        name: String,
        parameters: Option<CreateTerminalBody>,
        process: Option<TerminalShell>,
    ) -> Arc<Self> {
        let process = tokio::sync::Mutex::new(process);
        let seat = watch::Sender::new(AttachState::default());
        Arc::new(Self { owner, name, parameters, process, attach_state: seat })
    }

    /// Whether it waits for its first client, has one, or has a running shell.
    fn is_alive(&self, running: &HashSet<ProcessId>) -> bool {
        let Ok(process) = self.process.try_lock() else { return true };
        let runs = process.as_ref().is_none_or(|last| running.contains(&last.shell.process));
        runs || self.attach_state.borrow().taken
    }

    /// Attaches a client, if none is attached or `takeover` is set.
    fn attach_client(self: &Arc<Self>, takeover: bool) -> Option<ClientAttachment> {
        let mut number = None;
        self.attach_state.send_if_modified(|seat| {
            if !seat.taken || takeover {
                *seat = AttachState { number: seat.number + 1, taken: true };
                number = Some(seat.number);
            }
            number.is_some()
        });
        let number = number?;
        Some(ClientAttachment { terminal: self.clone(), number, attach_state: self.attach_state.subscribe() })
    }
}

impl ClientAttachment {
    pub(super) fn terminal(&self) -> &Arc<TerminalSession> {
        &self.terminal
    }

    /// Returns when another client has taken over. Cancel-safe.
    pub(super) async fn wait_until_displaced(&mut self) {
        let number = self.number;
        // The terminal owns the sender and this ticket the terminal, so the channel cannot be closed.
        if self.attach_state.wait_for(|seat| seat.number != number).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for ClientAttachment {
    fn drop(&mut self) {
        self.terminal.attach_state.send_if_modified(|seat| {
            let mine = seat.number == self.number;
            seat.taken &= !mine;
            mine
        });
    }
}

impl TerminalRegistry {
    fn find(&self, id: &SandboxId, name: &str) -> Option<Arc<TerminalSession>> {
        self.lock().get(&(id.clone(), name.to_owned())).cloned()
    }

    /// Registers a terminal; an existing one wins.
    fn register(&self, id: &SandboxId, terminal: Arc<TerminalSession>) -> Arc<TerminalSession> {
        self.lock().entry((id.clone(), terminal.name.clone())).or_insert(terminal).clone()
    }

    fn remove(&self, id: &SandboxId, name: &str) {
        self.lock().remove(&(id.clone(), name.to_owned()));
    }

    fn count(&self, id: &SandboxId) -> usize {
        self.lock().keys().filter(|(sandbox, _)| sandbox == id).count()
    }

    /// Removes ended terminals, which can still be found by their tag.
    fn drop_ended(&self, id: &SandboxId, running: &HashSet<ProcessId>) {
        self.lock().retain(|(sandbox, _), terminal| sandbox != id || terminal.is_alive(running));
    }

    /// Removes terminals of sandboxes that no longer exist.
    fn remove_orphans(&self, state: &OpenSandboxState) {
        self.lock().retain(|(id, _), terminal| state.service.find_sandbox(&terminal.owner, id).is_ok());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(SandboxId, String), Arc<TerminalSession>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Default, Deserialize)]
pub(super) struct CreateTerminalBody {
    pub(super) cwd: Option<String>,
    pub(super) command: Option<String>,
}

#[derive(Serialize)]
pub(super) struct CreatedTerminalBody {
    session_id: String,
}

/// `POST /pty`
pub(super) async fn create_terminal(
    State(state): State<OpenSandboxState>,
    target: ExecTarget,
    JsonOrEmpty(body): JsonOrEmpty<CreateTerminalBody>,
) -> Result<(StatusCode, Json<CreatedTerminalBody>), ExecdProblem> {
    state.terminals.remove_orphans(&state);
    if state.terminals.count(&target.id) >= MAX_TERMINALS {
        let all = state.service.list_processes(&target.owner, &target.id).await?;
        let running = all.into_iter().filter(|status| status.ended.is_none()).map(|status| status.process);
        state.terminals.drop_ended(&target.id, &running.collect());
    }
    if state.terminals.count(&target.id) >= MAX_TERMINALS {
        let message = format!("terminal limit of this sandbox reached ({MAX_TERMINALS})");
        return Err(ExecdProblem::too_many(&message));
    }
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let parameters = CreateTerminalBody { cwd: given(body.cwd), command: given(body.command) };
    let terminal = TerminalSession::new(target.owner.clone(), unique_hex(), Some(parameters), None);
    let session_id = state.terminals.register(&target.id, terminal).name.clone();
    Ok((StatusCode::CREATED, Json(CreatedTerminalBody { session_id })))
}

#[derive(Serialize)]
pub(super) struct TerminalStatusBody {
    session_id: String,
    running: bool,
    output_offset: u64,
}

/// `GET /pty/{id}`
pub(super) async fn get_terminal(
    State(state): State<OpenSandboxState>,
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<Json<TerminalStatusBody>, ExecdProblem> {
    let terminal = find_terminal(&state, &target, &name).await?;
    let running = terminal.process.lock().await.clone();
    let (running, output_offset) = match running {
        Some(TerminalShell { shell: ShellProcess { process, base }, .. }) => {
            match state.service.process_status(&target.owner, &target.id, &process).await {
                Ok(status) => (status.ended.is_none(), base.saturating_add(status.written)),
                // It ended so long ago that its status was forgotten.
                Err(ServiceError::NoProcess(_)) => (false, base),
                Err(error) => return Err(error.into()),
            }
        }
        None => (false, 0),
    };
    Ok(Json(TerminalStatusBody { session_id: name, running, output_offset }))
}

/// `DELETE /pty/{id}`: kills its shells.
pub(super) async fn delete_terminal(
    State(state): State<OpenSandboxState>,
    target: ExecTarget,
    PathName(name): PathName,
) -> Result<StatusCode, ExecdProblem> {
    let terminal = find_terminal(&state, &target, &name).await?;
    let running = terminal.process.lock().await.clone();
    state.terminals.remove(&target.id, &name);
    let shells = running.into_iter().flat_map(|last| last.before.into_iter().chain([last.shell]));
    for ShellProcess { process, .. } in shells {
        match kill_and_forget(&state, &target, &process).await {
            Ok(()) | Err(ServiceError::NoProcess(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(StatusCode::OK)
}

/// Kills and forgets a process, so that it cannot be found again by its tag.
async fn kill_and_forget(
    state: &OpenSandboxState,
    target: &ExecTarget,
    process: &ProcessId,
) -> Result<(), ServiceError> {
    state.service.kill_process(&target.owner, &target.id, process).await?;
    state.service.forget_process(&target.owner, &target.id, process).await
}

/// `GET /pty/{id}/ws?pty=0|1&since=…&takeover=1`
pub(super) async fn attach_terminal(
    State(state): State<OpenSandboxState>,
    target: ExecTarget,
    PathName(name): PathName,
    uri: Uri,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ExecdProblem> {
    let query = QueryParams::from_uri(&uri);
    let since = query.parse_number("since").map_err(ExecdProblem::invalid)?.unwrap_or(0);
    let mode = if query.first("pty") == Some("0") { PtyMode::Pipes } else { PtyMode::Terminal };
    if name == exec_socket::EXEC_TERMINAL_NAME {
        let upgrade = upgrade.map_err(|rejection| ExecdProblem::invalid(rejection.to_string()))?;
        super::check_usable(&state, &target.owner, &target.id)?;
        let start = headers.get(exec_socket::START_HEADER).cloned();
        let accepted =
            start.as_ref().map(|_| [(exec_socket::START_HEADER, HeaderValue::from_static("accepted"))]);
        let upgraded = upgrade
            .max_message_size(MAX_MESSAGE_BYTES)
            .on_upgrade(move |socket| exec_socket::serve_exec_socket(socket, state, target, mode, start));
        return Ok((accepted, upgraded).into_response());
    }
    let terminal = find_terminal(&state, &target, &name).await?;
    let upgrade = upgrade.map_err(|rejection| ExecdProblem::invalid(rejection.to_string()))?;
    let ticket = terminal.attach_client(query.is_on("takeover")).ok_or_else(|| {
        ExecdProblem::new(
            StatusCode::CONFLICT,
            "ALREADY_CONNECTED",
            "another client is attached; `takeover=1` displaces it",
        )
    })?;
    let upgrade = upgrade.max_message_size(MAX_MESSAGE_BYTES);
    Ok(upgrade
        .on_upgrade(move |socket| {
            terminal_socket::serve_terminal_socket(socket, state, target, ticket, mode, since)
        })
        .into_response())
}

/// Finds a terminal that this server knows, or one whose process still carries its name.
async fn find_terminal(
    state: &OpenSandboxState,
    target: &ExecTarget,
    name: &str,
) -> Result<Arc<TerminalSession>, ExecdProblem> {
    if let Some(terminal) = state.terminals.find(&target.id, name) {
        return Ok(terminal);
    }
    let all = state.service.list_processes(&target.owner, &target.id).await?;
    let shell = |status: ProcessStatus| {
        let (mode, base) = parse_shell_tag(name, status.tag.as_deref()?)?;
        Some((status.started, mode, ShellProcess { process: status.process, base }))
    };
    let mut shells: Vec<_> = all.into_iter().filter_map(shell).collect();
    // A shell that printed nothing has the same offset as the next one.
    shells.sort_by_key(|(started, _, shell)| (shell.base, *started));
    if let Some((_, mode, shell)) = shells.pop() {
        let last = TerminalShell { shell, mode, before: shells.pop().map(|(_, _, shell)| shell) };
        let terminal = TerminalSession::new(target.owner.clone(), name.to_owned(), None, Some(last));
        return Ok(state.terminals.register(&target.id, terminal));
    }
    Err(ExecdProblem::no_session(name))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn terminal() -> Arc<TerminalSession> {
        TerminalSession::new(Owner::operator(), "t".to_owned(), Some(CreateTerminalBody::default()), None)
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
        for mode in [PtyMode::Terminal, PtyMode::Pipes] {
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
            let last = shell.map(|shell| TerminalShell { shell, mode: PtyMode::Pipes, before: None });
            terminals.register(&id, TerminalSession::new(Owner::operator(), name.to_owned(), None, last))
        };
        with("waits", None);
        with("runs", Some("a"));
        let left = with("ended, but still has a client", Some("b"));
        let ticket = left.attach_client(false).unwrap();
        with("ended", Some("c"));
        terminals.drop_ended(&id, &HashSet::from([process("a")]));
        assert_eq!(terminals.count(&id), 3);
        assert!(terminals.find(&id, "ended").is_none());
        drop(ticket);
        terminals.drop_ended(&id, &HashSet::from([process("a")]));
        assert_eq!(terminals.count(&id), 2);
    }
}
