//! Terminals over WebSocket: which there are, and who sits at each.
//!
//! A terminal is named first and its shell starts with the first client that connects. One
//! client at a time is attached; another may take over. The process carries the terminal's name
//! as its tag, so a terminal is found again after a restart of the server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::{IntoResponse, Response};
use domain::{Owner, ProcessId, SandboxId};
use http::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::fault::{Fault, Wish};
use super::interrupt::kill;
use super::{Name, Scope, socket};
use crate::opensandbox::Front;
use crate::opensandbox::query::Query;
use crate::trace::unique_hex;

/// Terminals of one sandbox that were named but not started.
const MOST_WAITING: usize = 64;
/// The longest message that a client may send.
const LARGEST_MESSAGE: usize = 1 << 20;

/// Every terminal that this server knows of.
#[derive(Default)]
pub(in crate::opensandbox) struct Terminals(Mutex<HashMap<(SandboxId, String), Arc<Terminal>>>);

pub(super) struct Terminal {
    owner: Owner,
    pub(super) name: String,
    pub(super) command: Option<String>,
    pub(super) cwd: Option<String>,
    /// Locked while the shell is being started, so that it is started once.
    pub(super) process: tokio::sync::Mutex<Option<Running>>,
    seat: watch::Sender<Seat>,
}

#[derive(Clone)]
pub(super) struct Running {
    pub(super) process: ProcessId,
    pub(super) mode: Mode,
}

/// What the shell is connected by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Terminal,
    Pipes,
}

/// Who is attached: each client that comes gets the next number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seat {
    number: u64,
    taken: bool,
}

/// A client's place at a terminal; dropping it leaves the place to others.
pub(super) struct Ticket {
    terminal: Arc<Terminal>,
    number: u64,
    seat: watch::Receiver<Seat>,
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
    fn new(owner: Owner, name: String, wish: CreateBody, process: Option<Running>) -> Arc<Self> {
        let process = tokio::sync::Mutex::new(process);
        let seat = watch::Sender::new(Seat::default());
        Arc::new(Self { owner, name, command: wish.command, cwd: wish.cwd, process, seat })
    }

    /// The tag by which its process is found again.
    pub(super) fn tag(&self, mode: Mode) -> String {
        format!("{}:{}", mode.name(), self.name)
    }

    /// Attaches a client, if nobody is there or whoever is may be displaced.
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

    /// Returns when another client has taken this one's place. It may be dropped and called
    /// again.
    pub(super) async fn displaced(&mut self) {
        let number = self.number;
        // The terminal holds the sender and this ticket the terminal, so it cannot be closed.
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

    /// Keeps a terminal; the one that is already there wins.
    fn keep(&self, id: &SandboxId, terminal: Arc<Terminal>) -> Arc<Terminal> {
        self.lock().entry((id.clone(), terminal.name.clone())).or_insert(terminal).clone()
    }

    fn remove(&self, id: &SandboxId, name: &str) {
        self.lock().remove(&(id.clone(), name.to_owned()));
    }

    fn count(&self, id: &SandboxId) -> usize {
        self.lock().keys().filter(|(sandbox, _)| sandbox == id).count()
    }

    /// Forgets terminals of sandboxes that are gone.
    fn sweep(&self, front: &Front) {
        self.lock().retain(|(id, _), terminal| front.service.get(&terminal.owner, id).is_ok());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(SandboxId, String), Arc<Terminal>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default, Deserialize)]
pub(super) struct CreateBody {
    cwd: Option<String>,
    command: Option<String>,
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
    if front.terminals.count(&scope.id) >= MOST_WAITING {
        let message = "this sandbox has as many terminals as it may";
        return Err(Fault::too_many(message));
    }
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let wish = CreateBody { cwd: given(body.cwd), command: given(body.command) };
    let terminal = Terminal::new(scope.owner.clone(), unique_hex(), wish, None);
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
    let status = match running {
        Some(running) => Some(front.service.status(&scope.owner, &scope.id, &running.process).await?),
        None => None,
    };
    Ok(Json(Look {
        session_id: name,
        running: status.as_ref().is_some_and(|status| status.ended.is_none()),
        output_offset: status.map_or(0, |status| status.written),
    }))
}

/// `DELETE /pty/{id}`: ends whatever runs there.
pub(super) async fn delete(
    State(front): State<Front>,
    scope: Scope,
    Name(name): Name,
) -> Result<StatusCode, Fault> {
    let terminal = find(&front, &scope, &name).await?;
    let running = terminal.process.lock().await.clone();
    front.terminals.remove(&scope.id, &name);
    if let Some(Running { process, .. }) = running {
        // A process that is forgotten cannot be found again by its tag.
        kill(&front, &scope, &process).await?;
        front.service.forget(&scope.owner, &scope.id, &process).await?;
    }
    Ok(StatusCode::OK)
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
    let since = query.number("since").map_err(Fault::invalid)?;
    let mode = if query.first("pty") == Some("0") { Mode::Pipes } else { Mode::Terminal };
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

/// A terminal that this server knows, or one whose process still carries its name.
async fn find(front: &Front, scope: &Scope, name: &str) -> Result<Arc<Terminal>, Fault> {
    if let Some(terminal) = front.terminals.find(&scope.id, name) {
        return Ok(terminal);
    }
    for status in front.service.processes(&scope.owner, &scope.id).await? {
        let (tag, process) = (status.tag.unwrap_or_default(), status.process);
        let mode =
            [Mode::Terminal, Mode::Pipes].into_iter().find(|mode| tag == format!("{}:{name}", mode.name()));
        if let Some(mode) = mode {
            let running = Some(Running { process, mode });
            let terminal =
                Terminal::new(scope.owner.clone(), name.to_owned(), CreateBody::default(), running);
            return Ok(front.terminals.keep(&scope.id, terminal));
        }
    }
    Err(Fault::no_session(name))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn terminal() -> Arc<Terminal> {
        Terminal::new(Owner::single(), "t".to_owned(), CreateBody::default(), None)
    }

    #[test]
    fn one_client_at_a_time_unless_it_takes_over() {
        let terminal = terminal();
        let mut first = terminal.sit(false).unwrap();
        assert!(terminal.sit(false).is_none());
        assert!(first.displaced().now_or_never().is_none());
        let mut second = terminal.sit(true).unwrap();
        assert!(first.displaced().now_or_never().is_some());
        assert!(second.displaced().now_or_never().is_none());
    }

    #[test]
    fn a_displaced_client_does_not_give_up_the_seat_of_another() {
        let terminal = terminal();
        let first = terminal.sit(false).unwrap();
        let second = terminal.sit(true).unwrap();
        drop(first);
        assert!(terminal.sit(false).is_none());
        drop(second);
        assert!(terminal.sit(false).is_some());
    }
}
