//! Connections of sandboxes, from their acceptance to their end.
//!
//! ```text
//! accept ─► destination ─► port 53: our resolver
//!                        ├─ port 443, or 80: the client's first bytes name the host ─► decide ─► dial ─► relay
//!                        └─ other ports: a name that was given out for the address  ─► decide ─► dial ─► relay,
//!                                        and a ClientHello among the first bytes is checked before it is passed on
//! ```
//!
//! Plain HTTP on port 80 is not relayed blindly: `http` checks each request. Mode open reads no first bytes.

pub(crate) mod client_hello;
pub(crate) mod dial;
mod first_bytes;
mod http;
mod http_request;
mod metered_stream;
mod peek;
pub(crate) mod proxy;
pub(crate) mod route;
#[cfg(test)]
mod tests;
mod tls;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use egress_protocol::ServeMode;
use tokio::net::TcpStream;

use self::dial::{DialError, Dialled, dial};
use self::first_bytes::check_first_bytes;
use self::peek::{FirstBytes, examine_first_bytes};
use self::route::{Denial, Route, route_by_given_names, route_by_name, route_without_name};
use crate::dns;
use crate::limits::CountedSlot;
use crate::policy::{Judgement, PolicyView};
use crate::relay::{relay, reset};
use crate::sandbox::Sandbox;
use crate::shared::EgressState;

const DNS_PORT: u16 = 53;
const HTTP_PORT: u16 = 80;
const TLS_PORT: u16 = 443;
/// How long a client has to send the name of the host.
pub(crate) const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it has where the name is only for the log, because the address alone decides.
const NAME_FOR_LOG_TIMEOUT: Duration = Duration::from_millis(250);
/// How often a connection is decided again because the policy changes meanwhile.
const MAX_DECISIONS: u32 = 16;

/// A connection that was accepted, with its places in the limits.
pub(crate) struct AcceptedConnection {
    pub(crate) egress: Arc<EgressState>,
    pub(crate) sandbox: Arc<Sandbox>,
    pub(crate) near: Arc<TcpStream>,
    pub(crate) destination: SocketAddr,
    pub(crate) slots: Arc<ConnectionSlots>,
}

/// The places of a connection in the limits. It keeps them until its last part is gone.
#[derive(Debug)]
pub(crate) struct ConnectionSlots {
    pub(crate) of_sandbox: CountedSlot,
    pub(crate) _of_all: CountedSlot,
}

/// What is done with a connection.
enum Plan {
    /// Its bytes are relayed.
    Relay(Route),
    /// As before, but the first bytes are checked.
    RelayChecked(Route),
    /// Its ClientHello names a host.
    Tls(Route),
    /// Each of its requests is checked.
    Http,
}

/// Carries a connection until it ends.
pub(crate) async fn serve_connection(accepted: AcceptedConnection) {
    if accepted.destination.port() == DNS_PORT {
        accepted.answer_queries().await;
        return;
    }
    let gone = accepted.sandbox.gone.clone();
    let outcome = tokio::select! {
        () = gone.cancelled() => Err(None),
        outcome = accepted.decide_and_carry() => outcome.map_err(Some),
    };
    if let Err(denial) = outcome {
        if let Some(denial) = denial {
            accepted.sandbox.log_denied(denial.name.as_ref(), accepted.destination, &denial.reason);
        }
        reset(&accepted.near);
    }
}

impl AcceptedConnection {
    async fn answer_queries(self) {
        let Some(near) = Arc::into_inner(self.near) else { return };
        tokio::select! {
            () = self.sandbox.gone.cancelled() => {}
            served = dns::tcp::serve_connection(&self.egress, &self.sandbox, near) => {
                if let Err(error) = served {
                    tracing::debug!(sandbox = self.sandbox.id, %error, "queries over TCP ended");
                }
            }
        }
    }

    async fn decide_and_carry(&self) -> Result<(), Denial> {
        let mut first_bytes = None;
        for _ in 0..MAX_DECISIONS {
            let Some(view) = self.sandbox.view() else { return Err(Denial::new(None, "no settings")) };
            let (route, check) = match self.plan(&view, &mut first_bytes).await? {
                Plan::Http => {
                    http::serve_requests(self).await;
                    return Ok(());
                }
                Plan::Tls(route) => match tls::carry_tls(self, &view, &route).await {
                    Err(DialError::PolicyChanged) => continue,
                    outcome => return self.conclude(&route, outcome),
                },
                Plan::Relay(route) => (route, false),
                Plan::RelayChecked(route) => (route, true),
            };
            match dial(&self.egress, &self.sandbox, &view, &route, self.slots.of_sandbox.position).await {
                Ok(dialled) => {
                    if !check {
                        dialled.open.set_unread();
                    }
                    self.relay_until_end(dialled, check).await;
                    return Ok(());
                }
                Err(DialError::PolicyChanged) => {}
                Err(error) => return self.conclude(&route, Err(error)),
            }
        }
        Err(Denial::new(None, "policy changes too often"))
    }

    fn conclude(&self, route: &Route, outcome: Result<(), DialError>) -> Result<(), Denial> {
        match outcome {
            Err(DialError::Refused(reason)) => Err(Denial::new(route.name.as_ref(), reason)),
            // The end of the connection is in the log already.
            Err(DialError::PolicyChanged | DialError::Failed(_)) => {
                reset(&self.near);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    async fn plan(&self, view: &PolicyView, first: &mut Option<FirstBytes>) -> Result<Plan, Denial> {
        if view.lacks_policy() {
            return Err(Denial::new(None, "no policy"));
        }
        if view.mode == ServeMode::Open {
            return route_by_given_names(&self.sandbox, view, self.destination).map(Plan::Relay);
        }
        let by_address = view.judge_regardless_of_name(self.destination.ip(), self.destination.port());
        match self.destination.port() {
            HTTP_PORT if by_address.as_ref().is_some_and(Judgement::is_allowed) => {
                route_by_given_names(&self.sandbox, view, self.destination).map(Plan::Relay)
            }
            HTTP_PORT => self.plan_by_name(view, None, first).await,
            TLS_PORT => self.plan_by_name(view, by_address, first).await,
            _ => route_by_given_names(&self.sandbox, view, self.destination).map(Plan::RelayChecked),
        }
    }

    /// Plans a connection to a port where clients name the host first.
    async fn plan_by_name(
        &self,
        view: &PolicyView,
        by_address: Option<Judgement>,
        first: &mut Option<FirstBytes>,
    ) -> Result<Plan, Denial> {
        let is_allowed = by_address.as_ref().is_some_and(Judgement::is_allowed);
        if let (Some(judgement), false) = (by_address, is_allowed) {
            return Err(Denial::new(None, judgement.reason));
        }
        if first.is_none() {
            let limit = if is_allowed { NAME_FOR_LOG_TIMEOUT } else { FIRST_BYTES_TIMEOUT };
            let found = examine_first_bytes(&self.near, limit).await;
            *first =
                Some(found.map_err(|error| Denial::new(None, format!("closed by the client: {error}")))?);
        }
        match first.as_ref().unwrap_or(&FirstBytes::Closed) {
            FirstBytes::Hello { name: Some(name) } => {
                route_by_name(&self.egress, &self.sandbox, view, name, self.destination).await.map(Plan::Tls)
            }
            FirstBytes::InvalidHello | FirstBytes::Late { started: true } if !is_allowed => {
                Err(Denial::new(None, "not a valid ClientHello"))
            }
            // Also what does not look like a request: servers skip empty lines, and a slow client may send one later.
            FirstBytes::Other(_) | FirstBytes::Late { started: false }
                if self.destination.port() == HTTP_PORT =>
            {
                Ok(Plan::Http)
            }
            _ if is_allowed => route_without_name(view, self.destination).map(Plan::Relay),
            _ => route_without_name(view, self.destination).map(Plan::RelayChecked),
        }
    }

    /// Relays bytes until both sides have ended, or a new policy denies the connection.
    pub(crate) async fn relay_until_end(&self, dialled: Dialled, check: bool) {
        let Dialled { far, mut open } = dialled;
        let (cancel, traffic) = (open.cancel.clone(), Arc::clone(&open.traffic));
        let mut problem = None;
        let checked = async {
            if check {
                check_first_bytes(self, &mut open, &mut problem).await?;
            }
            Ok(())
        };
        let is_reset = tokio::select! {
            biased;
            () = cancel.cancelled() => true,
            ended = relay(&self.near, &far, &self.egress.pipes, &traffic, checked) => ended.is_err(),
        };
        if is_reset {
            reset(&self.near);
            reset(&far);
        }
        if problem.is_some() {
            open.end_reason = problem;
        }
    }
}
