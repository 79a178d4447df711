//! The client of the egress process, which carries the traffic of sandboxes without a link and judges it.
//!
//! ```text
//!  set_policy ─► policies of living sandboxes ──► connection ──► egress
//!                      └─ all of them, each time the connection is new ─┘
//! ```
//! Egress keeps no policy over a restart, so this client sends all of them to its successor before anything else. One task
//! keeps the connection. The supervisor holds the listening socket, so a connection to an egress process that is being
//! started waits in the socket's queue; attempts are repeated, ever more slowly, only if there is no supervisor.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use backend::{ActiveVault, BackendError};
use domain::{NetworkPolicy, SandboxId};
use egress_protocol::{
    EGRESS_SOCKET, EgressReply, EgressReplyBody, EgressRequest, EgressRequestBody, PolicyMessage,
};
use egress_protocol::{VaultReply, VaultRequest};
use linux::packet;
use rustix::fs::AtFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::secret_vaults::vault_message;
use crate::{connect_to_socket, register_descriptor};

/// How long a request may take, including the restart of the egress process.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of requests whose replies have no waiter.
const UNAWAITED: u64 = 0;
/// The shortest and the longest time between attempts to connect.
const MIN_RECONNECT_DELAY: Duration = Duration::from_millis(10);
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(2);

type EgressSocket = Arc<AsyncFd<OwnedFd>>;

/// The client. Dropping it ends its task.
pub(crate) struct EgressClient {
    link: Arc<EgressLink>,
    /// Keeps the connection; started with the first request.
    task: Mutex<Option<JoinHandle<()>>>,
}

struct EgressLink {
    /// The directory with the socket.
    state_dir: OwnedFd,
    state: Mutex<LinkState>,
    /// The connection, once all policies were sent on it.
    connection: watch::Sender<Option<EgressSocket>>,
}

#[derive(Default)]
struct LinkState {
    policies: HashMap<SandboxId, Arc<NetworkPolicy>>,
    vaults: HashMap<SandboxId, Arc<ActiveVault>>,
    number: u64,
    waiting: HashMap<u64, oneshot::Sender<EgressReplyBody>>,
}

/// The entry of a request in the list of those that wait. It is removed when the caller has the reply, or when the
/// caller is dropped or fails before.
struct WaitingReply<'a> {
    link: &'a EgressLink,
    number: u64,
}

impl Drop for WaitingReply<'_> {
    fn drop(&mut self) {
        self.link.lock().waiting.remove(&self.number);
    }
}

/// Why a request has no reply.
enum EgressRequestFailure {
    /// The connection broke; the request can be repeated on the next one.
    ConnectionLost,
    Io(io::Error),
}

impl EgressClient {
    /// Creates a client for the socket in this directory; it connects with the first request.
    pub(crate) fn new(state_dir: OwnedFd) -> Self {
        let connection = watch::Sender::new(None);
        let link = EgressLink { state_dir, state: Mutex::default(), connection };
        Self { link: Arc::new(link), task: Mutex::default() }
    }

    /// Sets the policy of a sandbox, and remembers it until [`EgressClient::forget_policy`].
    pub(crate) async fn set_policy(
        &self,
        id: &SandboxId,
        policy: &Arc<NetworkPolicy>,
    ) -> Result<(), BackendError> {
        self.link.lock().policies.insert(id.clone(), Arc::clone(policy));
        // Of several changes of one policy, whichever is sent last sends the newest.
        let newest = |state: &LinkState| set_policy_body(id, state.policies.get(id).unwrap_or(policy));
        match self.request_current(REQUEST_TIMEOUT, newest).await? {
            EgressReplyBody::Done => Ok(()),
            _ => Err(unexpected_reply()),
        }
    }

    /// Remembers the policy of a sandbox and sends it as soon as it can, without waiting.
    pub(crate) fn restore_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>) {
        self.link.lock().policies.insert(id.clone(), Arc::clone(policy));
        self.keep_connected();
        let (link, id) = (Arc::clone(&self.link), id.clone());
        tokio::spawn(async move {
            let newest = |state: &LinkState| newest_policy_body(&id, state);
            match link.ask_until_answered(&newest).await {
                Ok(EgressReplyBody::Refused { message }) => {
                    tracing::error!(sandbox = %id, message, "egress refused the policy of an adopted sandbox");
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(sandbox = %id, %error, "failed to set the policy of an adopted sandbox; the next connection begins with it");
                }
            }
        });
    }

    /// Sets the vault of a sandbox, and remembers it until [`EgressClient::remove_vault`] or the sandbox's end.
    pub(crate) async fn set_vault(
        &self,
        id: &SandboxId,
        vault: &Arc<ActiveVault>,
    ) -> Result<(), BackendError> {
        self.remember_vault(id, vault);
        // Of several changes of one vault, whichever is sent last sends the newest.
        let newest = |state: &LinkState| set_vault_body(id, state.vaults.get(id).unwrap_or(vault));
        match self.request_current(REQUEST_TIMEOUT, newest).await? {
            EgressReplyBody::Vault(VaultReply::Done) => Ok(()),
            _ => Err(unexpected_reply()),
        }
    }

    /// Remembers the vault of a sandbox, which is sent on every new connection.
    pub(crate) fn remember_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) {
        self.link.lock().vaults.insert(id.clone(), Arc::clone(vault));
    }

    /// Removes the vault of a sandbox that lives on.
    pub(crate) async fn remove_vault(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.link.lock().vaults.remove(id);
        match self.request(REQUEST_TIMEOUT, remove_vault_body(id)).await? {
            EgressReplyBody::Vault(VaultReply::Done) => Ok(()),
            _ => Err(unexpected_reply()),
        }
    }

    /// Sends the remembered vault of an adopted sandbox as soon as it can, without waiting.
    pub(crate) fn restore_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) {
        self.remember_vault(id, vault);
        self.keep_connected();
        let (link, id) = (Arc::clone(&self.link), id.clone());
        tokio::spawn(async move {
            match link.ask_until_answered(&|state: &LinkState| newest_vault_body(&id, state)).await {
                Ok(EgressReplyBody::Refused { message }) => {
                    tracing::error!(sandbox = %id, message, "egress refused the vault of an adopted sandbox; its requests have no secrets");
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(sandbox = %id, %error, "failed to set the vault of an adopted sandbox; the next connection begins with it");
                }
            }
        });
    }

    /// Forgets the policy and vault of a sandbox that has ended. Egress forgets them together with the sandbox's sockets.
    pub(crate) fn forget_policy(&self, id: &SandboxId) {
        let mut state = self.link.lock();
        state.policies.remove(id);
        state.vaults.remove(id);
    }

    /// Forgets the policy of a sandbox that was not created, for which egress has no sockets.
    pub(crate) fn withdraw_policy(&self, id: &SandboxId) {
        self.forget_policy(id);
        let Some(socket) = self.link.connection.borrow().clone() else { return };
        // If the socket is full, egress keeps a policy that it does not need until the next connection.
        if let Err(error) = self.link.try_send(&socket, 0, &keep_policies_body) {
            tracing::debug!(sandbox = %id, %error, "failed to withdraw a policy; egress forgets it later");
        }
    }

    /// Sends a request and returns the reply. Waits for an egress process that is being restarted, and repeats the
    /// request if the connection breaks.
    pub(crate) async fn request(
        &self,
        limit: Duration,
        body: EgressRequestBody,
    ) -> Result<EgressReplyBody, BackendError> {
        self.request_current(limit, |_| body.clone()).await
    }

    /// Refuses at once where no supervisor has made the socket, so that there is nothing to wait for.
    pub(crate) fn check_exists(&self) -> Result<(), BackendError> {
        match rustix::fs::statat(&self.link.state_dir, EGRESS_SOCKET, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => Err(BackendError::Unsupported {
                message: "this server has no egress process, which filtered networks need".to_owned(),
                hint: None,
            }),
            _ => Ok(()),
        }
    }

    /// Like [`EgressClient::request`]; the body is made at each attempt from the state at that moment.
    async fn request_current(
        &self,
        limit: Duration,
        body: impl Fn(&LinkState) -> EgressRequestBody + Sync,
    ) -> Result<EgressReplyBody, BackendError> {
        self.keep_connected();
        let failed = |source| BackendError::Io { action: "ask the egress process", source };
        let late = || failed(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
        let asked = tokio::time::timeout(limit, self.link.ask_until_answered(&body)).await;
        match asked.map_err(|_elapsed| late())?.map_err(failed)? {
            EgressReplyBody::Refused { message } => {
                Err(BackendError::Step { step: "egress".to_owned(), message, hint: None })
            }
            reply => Ok(reply),
        }
    }

    fn keep_connected(&self) {
        let mut task = self.task.lock().expect("nothing panics while it holds this lock");
        task.get_or_insert_with(|| tokio::spawn(maintain_connection(Arc::clone(&self.link))));
    }
}

impl Drop for EgressClient {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().expect("nothing panics while it holds this lock").take() {
            task.abort();
        }
    }
}

impl EgressLink {
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().expect("nothing panics while it holds this lock")
    }

    async fn ask_until_answered(
        &self,
        body: &(impl Fn(&LinkState) -> EgressRequestBody + Sync),
    ) -> io::Result<EgressReplyBody> {
        let mut connections = self.connection.subscribe();
        let mut broken: Option<EgressSocket> = None;
        loop {
            let is_usable = |socket: &Option<EgressSocket>| match (socket, &broken) {
                (Some(socket), Some(broken)) => !Arc::ptr_eq(socket, broken),
                (socket, _) => socket.is_some(),
            };
            let usable = connections.wait_for(is_usable).await.map(|socket| socket.clone());
            let Ok(Some(socket)) = usable else { return Err(io::ErrorKind::ConnectionAborted.into()) };
            match self.ask(&socket, body).await {
                Ok(reply) => return Ok(reply),
                Err(EgressRequestFailure::ConnectionLost) => broken = Some(socket),
                Err(EgressRequestFailure::Io(error)) => return Err(error),
            }
        }
    }

    async fn ask(
        &self,
        socket: &EgressSocket,
        body: &(impl Fn(&LinkState) -> EgressRequestBody + Sync),
    ) -> Result<EgressReplyBody, EgressRequestFailure> {
        let (sender, receiver) = oneshot::channel();
        let number = {
            let mut state = self.lock();
            state.number += 1;
            let number = state.number;
            state.waiting.insert(number, sender);
            number
        };
        let _entry = WaitingReply { link: self, number };
        self.send(socket, number, body).await.map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected => EgressRequestFailure::ConnectionLost,
            _ => EgressRequestFailure::Io(error),
        })?;
        receiver.await.map_err(|_closed| EgressRequestFailure::ConnectionLost)
    }

    async fn send(
        &self,
        socket: &EgressSocket,
        number: u64,
        body: &(impl Fn(&LinkState) -> EgressRequestBody + Sync),
    ) -> io::Result<()> {
        loop {
            let mut guard = socket.writable().await?;
            match guard.try_io(|socket| self.try_send(socket, number, body)) {
                Ok(sent) => return sent,
                Err(_would_block) => {}
            }
        }
    }

    /// Makes and sends a request under the lock, so that requests are sent in the order of the changes that they report.
    fn try_send(
        &self,
        socket: &AsyncFd<OwnedFd>,
        number: u64,
        body: &(impl Fn(&LinkState) -> EgressRequestBody + Sync),
    ) -> io::Result<()> {
        let state = self.lock();
        let request = EgressRequest { number, body: body(&state) };
        packet::send_message(socket.as_fd(), &request, None)
    }

    /// Sends every policy, and then which sandboxes have one. Their replies have no waiter.
    async fn send_all_policies(&self, socket: &EgressSocket) -> io::Result<()> {
        let ids: Vec<SandboxId> = self.lock().policies.keys().cloned().collect();
        for id in &ids {
            self.send(socket, UNAWAITED, &|state: &LinkState| newest_policy_body(id, state)).await?;
        }
        let ids: Vec<SandboxId> = self.lock().vaults.keys().cloned().collect();
        for id in &ids {
            self.send(socket, UNAWAITED, &|state: &LinkState| newest_vault_body(id, state)).await?;
        }
        self.send(socket, UNAWAITED, &keep_policies_body).await
    }

    fn deliver_reply(&self, EgressReply { number, body }: EgressReply) {
        let waiting = self.lock().waiting.remove(&number);
        match (waiting, body) {
            // The caller may have given up.
            (Some(waiting), body) => drop(waiting.send(body)),
            (None, EgressReplyBody::Refused { message }) if number == UNAWAITED => {
                tracing::error!(
                    error = message,
                    "egress refused a policy; the sandbox keeps its former one, or reaches nothing"
                );
            }
            (None, _) => {}
        }
    }

    /// Receives replies until the connection ends. Returns whether there was any.
    async fn receive_replies(&self, socket: &EgressSocket) -> bool {
        let mut answered = false;
        loop {
            let Ok(mut guard) = socket.readable().await else { return answered };
            match guard.try_io(|socket| packet::receive_message::<EgressReply>(socket.as_fd())) {
                Ok(Ok(Some((reply, _)))) => {
                    answered = true;
                    self.deliver_reply(reply);
                }
                Ok(Ok(None)) => return answered,
                Ok(Err(error)) => {
                    tracing::debug!(%error, "connection to egress failed; connecting again");
                    return answered;
                }
                Err(_would_block) => {}
            }
        }
    }
}

/// Connects, and connects again whenever the connection ends.
async fn maintain_connection(link: Arc<EgressLink>) {
    let mut delay = MIN_RECONNECT_DELAY;
    loop {
        match open_connection(&link.state_dir) {
            Ok(socket) => {
                if serve_connection(&link, &Arc::new(socket)).await {
                    delay = MIN_RECONNECT_DELAY;
                }
                link.connection.send_replace(None);
                link.lock().waiting.clear();
            }
            Err(error) if delay == MIN_RECONNECT_DELAY => {
                tracing::warn!(%error, "failed to connect to egress; filtered sandboxes reach nothing until it answers; retrying");
            }
            Err(_again) => {}
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(MAX_RECONNECT_DELAY);
    }
}

fn open_connection(state_dir: &OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let socket = connect_to_socket(state_dir, EGRESS_SOCKET)?;
    register_descriptor(socket, Interest::READABLE | Interest::WRITABLE)
}

/// Sends all policies, then lets requests use the connection until it ends. Returns whether egress answered anything.
async fn serve_connection(link: &EgressLink, socket: &EgressSocket) -> bool {
    let prepare = async {
        match link.send_all_policies(socket).await {
            Ok(()) => drop(link.connection.send_replace(Some(Arc::clone(socket)))),
            // The receiving side then sees the end of the connection.
            Err(error) => tracing::debug!(%error, "failed to send the policies to egress"),
        }
    };
    // Replies are received meanwhile: egress may wait until they are.
    let mut prepare = std::pin::pin!(prepare);
    let mut receive = std::pin::pin!(link.receive_replies(socket));
    tokio::select! {
        () = &mut prepare => receive.await,
        answered = &mut receive => answered,
    }
}

fn set_policy_body(id: &SandboxId, policy: &Arc<NetworkPolicy>) -> EgressRequestBody {
    let policy = PolicyMessage::from(&**policy);
    EgressRequestBody::SetPolicy { sandbox: id.as_str().to_owned(), policy }
}

/// The policy that a sandbox has now. If it has ended meanwhile, the list of those with a policy does no harm.
fn newest_policy_body(id: &SandboxId, state: &LinkState) -> EgressRequestBody {
    match state.policies.get(id) {
        Some(policy) => set_policy_body(id, policy),
        None => keep_policies_body(state),
    }
}

fn keep_policies_body(state: &LinkState) -> EgressRequestBody {
    let sandboxes = state.policies.keys().map(|id| id.as_str().to_owned()).collect();
    EgressRequestBody::KeepPolicies { sandboxes }
}

/// The vault that a sandbox has now, or its removal.
fn newest_vault_body(id: &SandboxId, state: &LinkState) -> EgressRequestBody {
    state.vaults.get(id).map_or_else(|| remove_vault_body(id), |vault| set_vault_body(id, vault))
}

fn set_vault_body(id: &SandboxId, active: &Arc<ActiveVault>) -> EgressRequestBody {
    let vault = vault_message(id, active);
    EgressRequestBody::Vault(VaultRequest::SetVault { sandbox: id.as_str().to_owned(), vault })
}

fn remove_vault_body(id: &SandboxId) -> EgressRequestBody {
    EgressRequestBody::Vault(VaultRequest::RemoveVault { sandbox: id.as_str().to_owned() })
}

pub(crate) fn unexpected_reply() -> BackendError {
    BackendError::Io { action: "understand the egress process", source: io::ErrorKind::InvalidData.into() }
}

#[cfg(test)]
mod tests;
