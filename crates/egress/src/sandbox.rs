//! One sandbox: its policy, its open connections, its log and its counters.
//!
//! ```text
//! view() ─► decision ─► open_connection(view) ─► dial ─► relay ─► drop of the connection
//!                          │ the policy has changed since: decide again
//! set_policy ─► each open connection is judged again ─► those denied are cancelled ─► wait until they are closed
//! ```

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{DomainName, NetworkPolicy};
use egress_protocol::{ActionMessage, LogKind, SandboxCounters, ServeMode};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::given_addresses::GivenAddresses;
use crate::limits::{EventRate, OpenCount};
use crate::log::{ConnectionLog, LogEntry};
use crate::policy::{Judgement, PolicyView};
use crate::settings::OperatorSettings;

/// What is known of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    state: Mutex<SandboxState>,
    connection_closed: Notify,
    given: Mutex<GivenAddresses>,
    pub(crate) log: ConnectionLog,
    pub(crate) counters: TrafficCounters,
    pub(crate) open: OpenCount,
    pub(crate) new_connections: EventRate,
    pub(crate) queries: EventRate,
    /// Allows one record a second about queries beyond their limit.
    pub(crate) query_limit_records: EventRate,
    pub(crate) bytes: EventRate,
    /// Queries that wait for an answer.
    pub(crate) open_queries: OpenCount,
    /// Cancelled when the sandbox is forgotten.
    pub(crate) gone: CancellationToken,
}

#[derive(Debug, Default)]
struct SandboxState {
    served: Option<ServedState>,
    settings: Option<Arc<OperatorSettings>>,
    policy: Option<Arc<NetworkPolicy>>,
    generation: u64,
    connections: HashMap<u64, OpenEntry>,
    last_connection: u64,
}

#[derive(Debug)]
struct ServedState {
    mode: ServeMode,
    own: Arc<[IpAddr]>,
    /// Cancelled when other sockets replace those that are served.
    replaced: CancellationToken,
}

#[derive(Debug)]
struct OpenEntry {
    target: ConnectionTarget,
    cancel: CancellationToken,
    content: ContentCheck,
}

/// Whether the name of a connection is the one that its client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentCheck {
    Examined,
    /// The bytes are relayed unread, because no name could change the decision. A policy for which that is not so ends it.
    Unread,
}

/// Where a connection leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionTarget {
    pub(crate) name: Option<DomainName>,
    pub(crate) address: SocketAddr,
    /// Why it was allowed.
    pub(crate) reason: String,
}

/// Totals of a sandbox.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounters {
    pub(crate) allowed_connections: AtomicU64,
    pub(crate) denied_connections: AtomicU64,
    pub(crate) denied_queries: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
}

/// The policy has changed since the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PolicyChanged;

/// An open connection. Its end is logged when it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    sandbox: Arc<Sandbox>,
    number: u64,
    target: ConnectionTarget,
    /// Cancelled when a new policy denies the connection, or the sandbox is forgotten.
    pub(crate) cancel: CancellationToken,
    pub(crate) traffic: Arc<ConnectionTraffic>,
    /// How it ended, if not in the usual way.
    pub(crate) end_reason: Option<String>,
}

/// The bytes of one connection; they are added to the sandbox's as they pass.
#[derive(Debug)]
pub(crate) struct ConnectionTraffic {
    pub(crate) sandbox: Arc<Sandbox>,
    sent: AtomicU64,
    received: AtomicU64,
    bytes_per_second: Option<u64>,
}

/// The direction of bytes, seen from the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Sent,
    Received,
}

impl Sandbox {
    pub(crate) fn new(id: &str, settings: Option<Arc<OperatorSettings>>) -> Self {
        let state = SandboxState { settings, ..SandboxState::default() };
        Self { id: id.to_owned(), state: Mutex::new(state), ..Self::default() }
    }

    /// Returns the rules that apply now; `None` before the settings have arrived.
    pub(crate) fn view(&self) -> Option<PolicyView> {
        self.lock().view()
    }

    /// Sets how the sandbox is served, and returns a token that is cancelled when that is replaced.
    pub(crate) fn set_served(
        &self,
        mode: ServeMode,
        own: &[IpAddr],
    ) -> (CancellationToken, ClosingConnections) {
        let replaced = self.gone.child_token();
        let closing = self.change(|state| {
            let served = ServedState { mode, own: own.into(), replaced: replaced.clone() };
            if let Some(before) = state.served.replace(served) {
                before.replaced.cancel();
            }
        });
        (replaced, closing)
    }

    pub(crate) fn is_served(&self) -> bool {
        self.lock().served.is_some()
    }

    pub(crate) fn set_policy(&self, policy: NetworkPolicy) -> ClosingConnections {
        self.change(|state| state.policy = Some(Arc::new(policy)))
    }

    pub(crate) fn set_settings(&self, settings: &Arc<OperatorSettings>) -> ClosingConnections {
        self.change(|state| state.settings = Some(Arc::clone(settings)))
    }

    /// Changes what applies, and cancels the connections that it denies.
    fn change(&self, apply: impl FnOnce(&mut SandboxState)) -> ClosingConnections {
        let mut state = self.lock();
        apply(&mut state);
        state.generation += 1;
        let view = state.view();
        let denied = |entry: &OpenEntry| !view.as_ref().is_some_and(|view| entry.is_allowed_by(view));
        let closing: Vec<u64> = state
            .connections
            .iter()
            .filter(|(_, entry)| denied(entry))
            .map(|(number, entry)| {
                entry.cancel.cancel();
                *number
            })
            .collect();
        ClosingConnections(closing)
    }

    /// Waits until these connections are closed.
    pub(crate) async fn wait_closed(&self, closing: &ClosingConnections) {
        loop {
            let closed = self.connection_closed.notified();
            tokio::pin!(closed);
            closed.as_mut().enable();
            if !closing.0.iter().any(|number| self.lock().connections.contains_key(number)) {
                return;
            }
            closed.await;
        }
    }

    /// Opens a connection that was allowed by `view`, if that still applies.
    pub(crate) fn open_connection(
        self: &Arc<Self>,
        view: &PolicyView,
        target: ConnectionTarget,
    ) -> Result<OpenConnection, PolicyChanged> {
        let mut state = self.lock();
        if state.generation != view.generation || self.gone.is_cancelled() {
            return Err(PolicyChanged);
        }
        state.last_connection += 1;
        let number = state.last_connection;
        let cancel = self.gone.child_token();
        let entry =
            OpenEntry { target: target.clone(), cancel: cancel.clone(), content: ContentCheck::Examined };
        state.connections.insert(number, entry);
        drop(state);
        self.note_opened(&target);
        let traffic = ConnectionTraffic {
            sandbox: Arc::clone(self),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            bytes_per_second: view.settings.limits.bytes_per_second,
        };
        Ok(OpenConnection {
            sandbox: Arc::clone(self),
            number,
            target,
            cancel,
            traffic: Arc::new(traffic),
            end_reason: None,
        })
    }

    fn note_opened(&self, target: &ConnectionTarget) {
        if let Some(name) = &target.name {
            self.given().connection_opened(target.address.ip(), name);
        }
        self.counters.allowed_connections.fetch_add(1, Ordering::Relaxed);
        self.log.append(LogEntry {
            kind: LogKind::Connection,
            name: target.name.as_ref().map(ToString::to_string),
            address: Some(target.address),
            verdict: ActionMessage::Allow,
            reason: target.reason.clone(),
            bytes_sent: 0,
            bytes_received: 0,
        });
    }

    /// Logs a connection that was refused.
    pub(crate) fn log_denied(&self, name: Option<&DomainName>, address: SocketAddr, reason: &str) {
        self.counters.denied_connections.fetch_add(1, Ordering::Relaxed);
        self.log.append(LogEntry {
            kind: LogKind::Connection,
            name: name.map(ToString::to_string),
            address: Some(address),
            verdict: ActionMessage::Deny,
            reason: reason.to_owned(),
            bytes_sent: 0,
            bytes_received: 0,
        });
    }

    /// Logs a query that was denied.
    pub(crate) fn log_denied_query(&self, name: Option<String>, reason: &str) {
        self.counters.denied_queries.fetch_add(1, Ordering::Relaxed);
        self.log.append(LogEntry {
            kind: LogKind::Query,
            name,
            address: None,
            verdict: ActionMessage::Deny,
            reason: reason.to_owned(),
            bytes_sent: 0,
            bytes_received: 0,
        });
    }

    /// Returns the addresses that were given out for names.
    pub(crate) fn given(&self) -> MutexGuard<'_, GivenAddresses> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn read_counters(&self) -> SandboxCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        SandboxCounters {
            sandbox: self.id.clone(),
            allowed_connections: read(&counters.allowed_connections),
            denied_connections: read(&counters.denied_connections),
            denied_queries: read(&counters.denied_queries),
            bytes_sent: read(&counters.bytes_sent),
            bytes_received: read(&counters.bytes_received),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SandboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections that were cancelled and are not closed yet.
#[derive(Debug)]
#[must_use]
pub(crate) struct ClosingConnections(Vec<u64>);

impl ClosingConnections {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl SandboxState {
    fn view(&self) -> Option<PolicyView> {
        let served = self.served.as_ref()?;
        Some(PolicyView {
            mode: served.mode,
            settings: Arc::clone(self.settings.as_ref()?),
            policy: self.policy.clone(),
            own: Arc::clone(&served.own),
            generation: self.generation,
        })
    }
}

impl OpenEntry {
    fn is_allowed_by(&self, view: &PolicyView) -> bool {
        let ConnectionTarget { name, address, .. } = &self.target;
        let by_name = view.judge(name.as_ref(), address.ip(), address.port());
        by_name.is_allowed()
            && match self.content {
                ContentCheck::Examined => true,
                ContentCheck::Unread => view
                    .judge_regardless_of_name(address.ip(), address.port())
                    .is_some_and(|judgement| judgement.is_allowed()),
            }
    }
}

impl OpenConnection {
    /// Notes that the bytes of the connection are relayed unread. It is cancelled if a name could change the decision now.
    pub(crate) fn set_unread(&self) {
        let mut state = self.sandbox.lock();
        let view = state.view();
        if let Some(entry) = state.connections.get_mut(&self.number) {
            entry.content = ContentCheck::Unread;
            if !view.is_some_and(|view| entry.is_allowed_by(&view)) {
                entry.cancel.cancel();
            }
        }
    }

    pub(crate) fn target(&self) -> &ConnectionTarget {
        &self.target
    }

    /// Judges the connection by another name, which its first bytes have shown, and remembers that name if it is allowed.
    pub(crate) fn rename(
        &mut self,
        name: DomainName,
        judge: impl FnOnce(&PolicyView) -> Judgement,
    ) -> Judgement {
        let mut state = self.sandbox.lock();
        let judgement = match state.view() {
            Some(view) => judge(&view),
            None => Judgement::refused("not served"),
        };
        if judgement.is_allowed()
            && let Some(entry) = state.connections.get_mut(&self.number)
        {
            entry.target.name = Some(name);
        }
        judgement
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let target = &self.target;
        if let Some(name) = &target.name {
            self.sandbox.given().connection_closed(target.address.ip(), name);
        }
        let reason = match self.end_reason.take() {
            Some(reason) => reason,
            None if self.cancel.is_cancelled() => "policy changed".to_owned(),
            None => target.reason.clone(),
        };
        self.sandbox.log.append(LogEntry {
            kind: LogKind::ConnectionEnd,
            name: target.name.as_ref().map(ToString::to_string),
            address: Some(target.address),
            verdict: ActionMessage::Allow,
            reason,
            bytes_sent: self.traffic.sent.load(Ordering::Relaxed),
            bytes_received: self.traffic.received.load(Ordering::Relaxed),
        });
        self.sandbox.lock().connections.remove(&self.number);
        self.sandbox.connection_closed.notify_waiters();
    }
}

impl ConnectionTraffic {
    /// Counts bytes that have passed, and waits if they were more than the sandbox may carry.
    pub(crate) async fn count(&self, direction: Direction, bytes: u64) {
        let pause = self.count_now(direction, bytes);
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
    }

    /// Counts bytes that have passed, and returns how long to wait before more are carried.
    pub(crate) fn count_now(&self, direction: Direction, bytes: u64) -> std::time::Duration {
        let counters = &self.sandbox.counters;
        let (own, total) = match direction {
            Direction::Sent => (&self.sent, &counters.bytes_sent),
            Direction::Received => (&self.received, &counters.bytes_received),
        };
        own.fetch_add(bytes, Ordering::Relaxed);
        total.fetch_add(bytes, Ordering::Relaxed);
        match self.bytes_per_second {
            Some(limit) => self.sandbox.bytes.count_bytes(bytes, limit),
            None => std::time::Duration::ZERO,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::policy::tests::parse_policy;
    use crate::settings::tests::sample;

    /// A filtered sandbox with this policy.
    pub(crate) fn filtered(policy: &str) -> Arc<Sandbox> {
        let sandbox = Arc::new(Sandbox::new("one", Some(Arc::new(sample(|_| {})))));
        let _closing = sandbox.set_served(ServeMode::Filtered, &[]);
        let _closing = sandbox.set_policy(parse_policy(policy));
        sandbox
    }

    fn target(name: Option<&str>, address: &str) -> ConnectionTarget {
        ConnectionTarget {
            name: name.map(|name| name.parse().expect("a name")),
            address: address.parse().expect("an address"),
            reason: "a rule".into(),
        }
    }

    #[tokio::test]
    async fn new_policy_cancels_exactly_what_it_denies_and_waits_for_it() {
        let sandbox = filtered("allow a.org, allow b.org");
        let view = sandbox.view().expect("it is served");
        let first = sandbox.open_connection(&view, target(Some("a.org"), "192.0.2.1:443")).expect("allowed");
        let second = sandbox.open_connection(&view, target(Some("b.org"), "192.0.2.1:443")).expect("allowed");
        let closing = sandbox.set_policy(parse_policy("allow a.org"));
        assert!(!first.cancel.is_cancelled());
        assert!(second.cancel.is_cancelled());
        let waiting = tokio::spawn({
            let sandbox = sandbox.clone();
            async move { sandbox.wait_closed(&closing).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(second);
        waiting.await.expect("it does not panic");
        let records = sandbox.log.read(0, 10).records;
        assert_eq!(records.last().map(|record| record.reason.as_str()), Some("policy changed"));
    }

    #[tokio::test]
    async fn decision_by_an_old_policy_opens_nothing() {
        let sandbox = filtered("allow a.org");
        let view = sandbox.view().expect("it is served");
        let _closing = sandbox.set_policy(parse_policy(""));
        assert_eq!(
            sandbox.open_connection(&view, target(Some("a.org"), "192.0.2.1:443")).err(),
            Some(PolicyChanged)
        );
    }

    #[tokio::test]
    async fn filtering_an_open_network_closes_what_no_policy_allows() {
        let sandbox = Arc::new(Sandbox::new("one", Some(Arc::new(sample(|_| {})))));
        let (first_serve, _) = sandbox.set_served(ServeMode::Open, &[]);
        let view = sandbox.view().expect("it is served");
        let open = sandbox.open_connection(&view, target(None, "192.0.2.1:22")).expect("allowed");
        let _closing = sandbox.set_served(ServeMode::Filtered, &[]);
        assert!(open.cancel.is_cancelled());
        assert!(first_serve.is_cancelled());
    }

    #[test]
    fn bytes_are_counted_for_the_connection_and_the_sandbox() {
        let sandbox = filtered("allow a.org");
        let view = sandbox.view().expect("it is served");
        let open = sandbox.open_connection(&view, target(Some("a.org"), "192.0.2.1:443")).expect("allowed");
        open.traffic.count_now(Direction::Sent, 10);
        open.traffic.count_now(Direction::Received, 20);
        drop(open);
        let records = sandbox.log.read(0, 10).records;
        let end = records.last().expect("an end");
        assert_eq!((end.kind, end.bytes_sent, end.bytes_received), (LogKind::ConnectionEnd, 10, 20));
        let counters = sandbox.read_counters();
        assert_eq!((counters.allowed_connections, counters.bytes_sent, counters.bytes_received), (1, 10, 20));
    }
}
