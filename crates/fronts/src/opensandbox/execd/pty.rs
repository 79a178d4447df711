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
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use service::{ProcessStatus, ServiceError};
use tokio::sync::watch;

use super::fault::{Fault, Wish};
use super::interrupt::kill;
use super::{Name, Scope, exec_socket, socket};
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;
use crate::trace::unique_hex;

/// The maximum number of terminals of one sandbox that wait for their first client or whose shell runs.
const MOST_ALIVE: usize = 64;
/// The maximum size of a client message.
const LARGEST_MESSAGE: usize = 1 << 20;

/// All terminals known to this server.
#[derive(Default)]
pub(in crate::opensandbox) struct Terminals(Mutex<HashMap<(SandboxId, String), Arc<Terminal>>>);

pub(super) struct Terminal {
    owner: Owner,
    pub(super) name: String,
    /// The parameters of its shells; `None` if the terminal was created by an earlier server process.
    pub(super) wish: Option<CreateBody>,
    /// Locked while the shell is being started, so that it is started only once.
    pub(super) process: tokio::sync::Mutex<Option<Running>>,
    seat: watch::Sender<Seat>,
}

/// The last shell of a terminal, which may have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Running {
    pub(super) shell: Shell,
    pub(super) mode: Mode,
    /// The previous shell, kept for its output.
    pub(super) before: Option<Shell>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shell {
    pub(super) process: ProcessId,
    /// The output offset of the terminal when this shell started.
    pub(super) base: u64,
}

/// How the shell is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Terminal,
    Pipes,
}

/// The attached client; each new client gets the next number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seat {
    number: u64,
    taken: bool,
}

/// A client's attachment to a terminal; dropping it detaches the client.
pub(super) struct Ticket {
    terminal: Arc<Terminal>,
    number: u64,
    seat: watch::Receiver<Seat>,
}

/// Returns the tag by which a shell is found again.
pub(super) fn tag(mode: Mode, name: &str, base: u64) -> String {
    format!("{}:{name}:{base}", mode.name())
}

/// Parses the tag of a shell of this terminal. The tag comes from inside the sandbox and is untrusted.
fn tagged(name: &str, tag: &str) -> Option<(Mode, u64)> {
    let mode = [Mode::Terminal, Mode::Pipes].into_iter().find(|mode| tag.starts_with(mode.name()))?;
    let base = tag.strip_prefix(mode.name())?.strip_prefix(':')?.strip_prefix(name)?.strip_prefix(':')?;
    Some((mode, base.parse().ok()?))
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Terminal => "pty",
            Self::Pipes => "pipe",
        }
    }
}

impl Terminal {
    fn new(owner: Owner, name: String, wish: Option<CreateBody>, process: Option<Running>) -> Arc<Self> {
        let process = tokio::sync::Mutex::new(process);
        let seat = watch::Sender::new(Seat::default());
        Arc::new(Self { owner, name, wish, process, seat })
    }

    /// Whether it waits for its first client, has one, or has a running shell.
    fn is_alive(&self, running: &HashSet<ProcessId>) -> bool {
        let Ok(process) = self.process.try_lock() else { return true };
        let runs = process.as_ref().is_none_or(|last| running.contains(&last.shell.process));
        runs || self.seat.borrow().taken
    }

    /// Attaches a client, if none is attached or `takeover` is set.
    fn sit(self: &Arc<Self>, takeover: bool) -> Option<Ticket> {
        let mut number = None;
        self.seat.send_if_modified(|seat| {
            if !seat.taken || takeover {
                *seat = Seat { number: seat.number + 1, taken: true };
                number = Some(seat.number);
            }
            number.is_some()
        });
        let number = number?;
        Some(Ticket { terminal: self.clone(), number, seat: self.seat.subscribe() })
    }
}

impl Ticket {
    pub(super) fn terminal(&self) -> &Arc<Terminal> {
        &self.terminal
    }

    /// Returns when another client has taken over. Cancel-safe.
    pub(super) async fn displaced(&mut self) {
        let number = self.number;
        // The terminal owns the sender and this ticket the terminal, so the channel cannot be closed.
        if self.seat.wait_for(|seat| seat.number != number).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.terminal.seat.send_if_modified(|seat| {
            let mine = seat.number == self.number;
            seat.taken &= !mine;
            mine
        });
    }
}

impl Terminals {
    fn find(&self, id: &SandboxId, name: &str) -> Option<Arc<Terminal>> {
        self.lock().get(&(id.clone(), name.to_owned())).cloned()
    }

    /// Registers a terminal; an existing one wins.
    fn keep(&self, id: &SandboxId, terminal: Arc<Terminal>) -> Arc<Terminal> {
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
    fn sweep(&self, front: &Front) {
        self.lock().retain(|(id, _), terminal| front.service.get(&terminal.owner, id).is_ok());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(SandboxId, String), Arc<Terminal>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Default, Deserialize)]
pub(super) struct CreateBody {
    pub(super) cwd: Option<String>,
    pub(super) command: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Created {
    session_id: String,
}

/// `POST /pty`
pub(super) async fn create(
    State(front): State<Front>,
    scope: Scope,
    Wish(body): Wish<CreateBody>,
) -> Result<(StatusCode, Json<Created>), Fault> {
    front.terminals.sweep(&front);
    if front.terminals.count(&scope.id) >= MOST_ALIVE {
        let all = front.service.processes(&scope.owner, &scope.id).await?;
        let running = all.into_iter().filter(|status| status.ended.is_none()).map(|status| status.process);
        front.terminals.drop_ended(&scope.id, &running.collect());
    }
    if front.terminals.count(&scope.id) >= MOST_ALIVE {
        let message = format!("terminal limit of this sandbox reached ({MOST_ALIVE})");
        return Err(Fault::too_many(&message));
    }
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let parameters = CreateBody { cwd: given(body.cwd), command: given(body.command) };
    let terminal = Terminal::new(scope.owner.clone(), unique_hex(), Some(parameters), None);
    let session_id = front.terminals.keep(&scope.id, terminal).name.clone();
    Ok((StatusCode::CREATED, Json(Created { session_id })))
}

#[derive(Serialize)]
pub(super) struct Look {
    session_id: String,
    running: bool,
    output_offset: u64,
}

/// `GET /pty/{id}`
pub(super) async fn look(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
) -> Result<Json<Look>, Fault> {
    let terminal = find(&front, &scope, &name).await?;
    let running = terminal.process.lock().await.clone();
    let (running, output_offset) = match running {
        Some(Running { shell: Shell { process, base }, .. }) => {
            match front.service.status(&scope.owner, &scope.id, &process).await {
                Ok(status) => (status.ended.is_none(), base.saturating_add(status.written)),
                // It ended so long ago that its status was forgotten.
                Err(ServiceError::NoProcess(_)) => (false, base),
                Err(error) => return Err(error.into()),
            }
        }
        None => (false, 0),
    };
    Ok(Json(Look { session_id: name, running, output_offset }))
}

/// `DELETE /pty/{id}`: kills its shells.
pub(super) async fn delete(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
) -> Result<StatusCode, Fault> {
    let terminal = find(&front, &scope, &name).await?;
    let running = terminal.process.lock().await.clone();
    front.terminals.remove(&scope.id, &name);
    let shells = running.into_iter().flat_map(|last| last.before.into_iter().chain([last.shell]));
    for Shell { process, .. } in shells {
        match end(&front, &scope, &process).await {
            Ok(()) | Err(ServiceError::NoProcess(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(StatusCode::OK)
}

/// Kills and forgets a process, so that it cannot be found again by its tag.
async fn end(front: &Front, scope: &Scope, process: &ProcessId) -> Result<(), ServiceError> {
    kill(front, scope, process).await?;
    front.service.forget(&scope.owner, &scope.id, process).await
}

/// `GET /pty/{id}/ws?pty=0|1&since=…&takeover=1`
pub(super) async fn attach(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
    uri: Uri,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Fault> {
    let query = Query::of(&uri);
    let since = query.number("since").map_err(Fault::invalid)?.unwrap_or(0);
    let mode = if query.first("pty") == Some("0") { Mode::Pipes } else { Mode::Terminal };
    if name == exec_socket::NAME {
        let upgrade = upgrade.map_err(|rejection| Fault::invalid(rejection.to_string()))?;
        super::usable(&front, &scope.owner, &scope.id)?;
        return Ok(upgrade
            .max_message_size(LARGEST_MESSAGE)
            .on_upgrade(move |socket| exec_socket::serve(socket, front, scope, mode))
            .into_response());
    }
    let terminal = find(&front, &scope, &name).await?;
    let upgrade = upgrade.map_err(|rejection| Fault::invalid(rejection.to_string()))?;
    let ticket = terminal.sit(query.is_on("takeover")).ok_or_else(|| {
        Fault::new(
            StatusCode::CONFLICT,
            "ALREADY_CONNECTED",
            "another client is attached; `takeover=1` displaces it",
        )
    })?;
    let upgrade = upgrade.max_message_size(LARGEST_MESSAGE);
    Ok(upgrade
        .on_upgrade(move |socket| socket::converse(socket, front, scope, ticket, mode, since))
        .into_response())
}

/// Finds a terminal that this server knows, or one whose process still carries its name.
async fn find(front: &Front, scope: &Scope, name: &str) -> Result<Arc<Terminal>, Fault> {
    if let Some(terminal) = front.terminals.find(&scope.id, name) {
        return Ok(terminal);
    }
    let all = front.service.processes(&scope.owner, &scope.id).await?;
    let shell = |status: ProcessStatus| {
        let (mode, base) = tagged(name, status.tag.as_deref()?)?;
        Some((status.started, mode, Shell { process: status.process, base }))
    };
    let mut shells: Vec<_> = all.into_iter().filter_map(shell).collect();
    // A shell that printed nothing has the same offset as the next one.
    shells.sort_by_key(|(started, _, shell)| (shell.base, *started));
    if let Some((_, mode, shell)) = shells.pop() {
        let last = Running { shell, mode, before: shells.pop().map(|(_, _, shell)| shell) };
        let terminal = Terminal::new(scope.owner.clone(), name.to_owned(), None, Some(last));
        return Ok(front.terminals.keep(&scope.id, terminal));
    }
    Err(Fault::no_session(name))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn terminal() -> Arc<Terminal> {
        Terminal::new(Owner::single(), "t".to_owned(), Some(CreateBody::default()), None)
    }

    #[test]
    fn second_client_needs_takeover() {
        let terminal = terminal();
        let mut first = terminal.sit(false).unwrap();
        assert!(terminal.sit(false).is_none());
        assert!(first.displaced().now_or_never().is_none());
        let mut second = terminal.sit(true).unwrap();
        assert!(first.displaced().now_or_never().is_some());
        assert!(second.displaced().now_or_never().is_none());
    }

    #[test]
    fn displaced_client_does_not_detach_its_successor() {
        let terminal = terminal();
        let first = terminal.sit(false).unwrap();
        let second = terminal.sit(true).unwrap();
        drop(first);
        assert!(terminal.sit(false).is_none());
        drop(second);
        assert!(terminal.sit(false).is_some());
    }

    #[test]
    fn shell_is_found_only_by_its_own_tag() {
        for mode in [Mode::Terminal, Mode::Pipes] {
            assert_eq!(tagged("t1", &tag(mode, "t1", 70)), Some((mode, 70)));
        }
        for other in ["pty:t2:70", "pty:t1", "pty:t12:70", "pty:t1:-1", "pty:t1:x", "other:t1:70", ""] {
            assert_eq!(tagged("t1", other), None, "{other}");
        }
    }

    #[test]
    fn only_running_or_waiting_terminals_count() {
        let (terminals, id) = (Terminals::default(), SandboxId::parse(&"a".repeat(20)).unwrap());
        let process = |letter: &str| ProcessId::parse(&letter.repeat(32)).unwrap();
        let with = |name: &str, letter: Option<&str>| {
            let shell = letter.map(|letter| Shell { process: process(letter), base: 0 });
            let last = shell.map(|shell| Running { shell, mode: Mode::Pipes, before: None });
            terminals.keep(&id, Terminal::new(Owner::single(), name.to_owned(), None, last))
        };
        with("waits", None);
        with("runs", Some("a"));
        let left = with("ended, but still has a client", Some("b"));
        let ticket = left.sit(false).unwrap();
        with("ended", Some("c"));
        terminals.drop_ended(&id, &HashSet::from([process("a")]));
        assert_eq!(terminals.count(&id), 3);
        assert!(terminals.find(&id, "ended").is_none());
        drop(ticket);
        terminals.drop_ended(&id, &HashSet::from([process("a")]));
        assert_eq!(terminals.count(&id), 2);
    }
}
