//! Keeps the sockets of sandboxes whose connections egress carries.
//!
//! ```text
//! launcher ── Serve + 2 sockets, Forget, ListServed ──► keeper ── Configure, then Serve for each sandbox ──► egress
//! ```
//! The sockets stay open here while egress or the launcher is started again, so that connections wait instead of being
//! refused, and no program inside a sandbox can take a port. Egress gets all of them anew at each start.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use egress_protocol::{
    EgressReply, EgressReplyBody, EgressRequest, EgressRequestBody, EgressSettings, ServedSandbox,
};
use linux::packet;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// How many messages may wait for egress. One that does not read them is ended, and started again.
const MAX_WAITING_MESSAGES: usize = 4096;

/// The sockets of a sandbox: the listener for TCP, and the socket for DNS.
type SandboxSockets = Arc<[OwnedFd; 2]>;

#[derive(Clone)]
pub(crate) struct SocketKeeper {
    state: Arc<Mutex<KeeperState>>,
    /// The limit on open files with which this process was started.
    started_with_files: Option<u64>,
}

struct KeeperState {
    settings: EgressSettings,
    kept: BTreeMap<String, KeptSandbox>,
    egress: Option<EgressConnection>,
}

struct KeptSandbox {
    served: ServedSandbox,
    sockets: SandboxSockets,
}

/// The present egress process.
struct EgressConnection {
    queue: mpsc::Sender<EgressMessage>,
    task: AbortHandle,
}

/// A message to egress.
struct EgressMessage {
    body: EgressRequestBody,
    sockets: Option<SandboxSockets>,
}

impl SocketKeeper {
    /// Raises the limit on open files of this process: it holds two for each sandbox.
    pub(crate) fn new(settings: EgressSettings) -> Result<Self> {
        let before =
            linux::descriptors::raise_open_file_limit().context("could not raise the limit on open files")?;
        let state = KeeperState { settings, kept: BTreeMap::new(), egress: None };
        Ok(Self { state: Arc::new(Mutex::new(state)), started_with_files: before.current })
    }

    pub(super) fn started_with_files(&self) -> Option<u64> {
        self.started_with_files
    }

    /// Applies new settings.
    pub(super) fn configure(&self, settings: EgressSettings) {
        let mut state = self.lock();
        state.settings = settings.clone();
        state.send_to_egress(EgressRequestBody::Configure(settings), None);
    }

    /// Serves a launcher, and returns its end of the connection.
    pub(super) fn connect_launcher(&self) -> Result<OwnedFd> {
        let (own, other) = make_connection()?;
        let keeper = self.clone();
        tokio::spawn(async move {
            // A launcher that ends leaves the last replies unread.
            if let Err(error) = keeper.serve_launcher(own).await
                && error.kind() != io::ErrorKind::ConnectionReset
            {
                tracing::error!(%error, "connection to the launcher failed; sockets of new sandboxes are not kept");
            }
        });
        Ok(other)
    }

    /// Sends the settings and all sockets to a new egress process, and returns its end of the connection.
    pub(super) fn connect_egress(&self) -> Result<OwnedFd> {
        let (own, other) = make_connection()?;
        let mut state = self.lock();
        let configure = EgressRequestBody::Configure(state.settings.clone());
        let mut first = VecDeque::from([EgressMessage { body: configure, sockets: None }]);
        first.extend(state.kept.values().map(KeptSandbox::to_message));
        let (queue, waiting) = mpsc::channel(MAX_WAITING_MESSAGES);
        let task = tokio::spawn(async move {
            if let Err(error) = send_messages(own, waiting, first).await {
                tracing::warn!(%error, "connection to egress failed; the next egress process gets all sockets again");
            }
        });
        state.egress = Some(EgressConnection { queue, task: task.abort_handle() });
        Ok(other)
    }

    async fn serve_launcher(&self, socket: AsyncFd<OwnedFd>) -> io::Result<()> {
        while let Some((EgressRequest { number, body }, descriptors)) = receive(&socket).await? {
            let body = self.handle_request(body, descriptors);
            send(&socket, &EgressReply { number, body }).await?;
        }
        Ok(())
    }

    fn handle_request(&self, body: EgressRequestBody, descriptors: Vec<OwnedFd>) -> EgressReplyBody {
        let mut state = self.lock();
        match body {
            EgressRequestBody::Serve(served) => match <[OwnedFd; 2]>::try_from(descriptors) {
                Ok(sockets) => state.keep(KeptSandbox { served, sockets: Arc::new(sockets) }),
                Err(_) => EgressReplyBody::Refused { message: "two sockets are needed".to_owned() },
            },
            EgressRequestBody::Forget { sandbox } => {
                state.kept.remove(&sandbox);
                state.send_to_egress(EgressRequestBody::Forget { sandbox }, None);
                EgressReplyBody::Done
            }
            EgressRequestBody::ListServed => {
                EgressReplyBody::Served { sandboxes: state.kept.keys().cloned().collect() }
            }
            _ => EgressReplyBody::Refused { message: "this request is for egress".to_owned() },
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeeperState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeeperState {
    fn keep(&mut self, sandbox: KeptSandbox) -> EgressReplyBody {
        let EgressMessage { body, sockets } = sandbox.to_message();
        self.kept.insert(sandbox.served.sandbox.clone(), sandbox);
        self.send_to_egress(body, sockets);
        EgressReplyBody::Done
    }

    /// Sends a message to the present egress process. If there is none, the next one gets what it needs.
    fn send_to_egress(&mut self, body: EgressRequestBody, sockets: Option<SandboxSockets>) {
        let Some(egress) = &self.egress else { return };
        let sent = egress.queue.try_send(EgressMessage { body, sockets });
        if let Err(mpsc::error::TrySendError::Full(_)) = sent {
            tracing::error!("egress does not read its messages; it is started again");
            // It ends with its connection.
            egress.task.abort();
            self.egress = None;
        }
    }
}

impl KeptSandbox {
    fn to_message(&self) -> EgressMessage {
        let body = EgressRequestBody::Serve(self.served.clone());
        EgressMessage { body, sockets: Some(Arc::clone(&self.sockets)) }
    }
}

fn make_connection() -> Result<(AsyncFd<OwnedFd>, OwnedFd)> {
    let (own, other) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .context("could not make a connection for sockets")?;
    Ok((register_socket(own)?, other))
}

#[expect(
    deprecated,
    reason = "the replacement is unsafe, for types whose descriptor may change; this one owns its own"
)]
fn register_socket(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(socket)
}

/// Sends messages to egress until it ends, and logs those that it refuses. It reads replies meanwhile, because egress may
/// wait for that before it takes the next message.
async fn send_messages(
    socket: AsyncFd<OwnedFd>,
    mut queue: mpsc::Receiver<EgressMessage>,
    mut waiting: VecDeque<EgressMessage>,
) -> io::Result<()> {
    let mut number = 0;
    loop {
        tokio::select! {
            message = queue.recv(), if waiting.is_empty() => match message {
                Some(message) => waiting.push_back(message),
                None => return Ok(()),
            },
            ready = socket.readable() => {
                match ready?.try_io(|socket| packet::receive_with_descriptors(socket.as_fd())) {
                    Ok(Ok(Some((reply, _)))) => log_refusal(&reply),
                    Ok(Ok(None)) => return Ok(()),
                    Ok(Err(error)) => return Err(error),
                    Err(_would_block) => {}
                }
            }
            ready = socket.writable(), if !waiting.is_empty() => {
                let Some(EgressMessage { body, sockets }) = waiting.pop_front() else { continue };
                let request = EgressRequest { number: number + 1, body };
                let descriptors: Vec<_> =
                    sockets.iter().flat_map(|pair| pair.iter()).map(AsFd::as_fd).collect();
                match ready?.try_io(|socket| {
                    packet::send_with_descriptors(socket.as_fd(), &request, &descriptors)
                }) {
                    Ok(sent) => {
                        sent?;
                        number += 1;
                    }
                    Err(_would_block) => waiting.push_front(EgressMessage { body: request.body, sockets }),
                }
            }
        }
    }
}

fn log_refusal(reply: &EgressReply) {
    if let EgressReplyBody::Refused { message } = &reply.body {
        tracing::error!(
            number = reply.number,
            message,
            "egress refused a message; it keeps its former state"
        );
    }
}

async fn receive<T: DeserializeOwned>(socket: &AsyncFd<OwnedFd>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    loop {
        let mut ready = socket.readable().await?;
        if let Ok(received) = ready.try_io(|socket| packet::receive_with_descriptors(socket.as_fd())) {
            return received;
        }
    }
}

async fn send(socket: &AsyncFd<OwnedFd>, message: &impl Serialize) -> io::Result<()> {
    loop {
        let mut ready = socket.writable().await?;
        if let Ok(sent) = ready.try_io(|socket| packet::send_message(socket.as_fd(), message, None)) {
            return sent;
        }
    }
}

#[cfg(test)]
mod tests {
    use egress_protocol::ServeMode;

    use super::*;

    fn served(sandbox: &str) -> ServedSandbox {
        ServedSandbox { sandbox: sandbox.to_owned(), mode: ServeMode::Filtered, own: Vec::new() }
    }

    async fn ask(socket: &AsyncFd<OwnedFd>, body: EgressRequestBody, sockets: &[OwnedFd]) -> EgressReplyBody {
        let request = EgressRequest { number: 7, body };
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        packet::send_with_descriptors(socket.as_fd(), &request, &sockets).expect("the keeper reads");
        let (reply, _) = receive::<EgressReply>(socket).await.expect("it replies").expect("it is there");
        assert_eq!(reply.number, 7);
        reply.body
    }

    async fn next_message(egress: &AsyncFd<OwnedFd>) -> (EgressRequestBody, usize) {
        let (request, sockets) =
            receive::<EgressRequest>(egress).await.expect("it is sent").expect("it is there");
        let reply = EgressReply { number: request.number, body: EgressReplyBody::Done };
        send(egress, &reply).await.expect("the keeper reads");
        (request.body, sockets.len())
    }

    fn two_sockets() -> [OwnedFd; 2] {
        let (one, other) = std::io::pipe().expect("a pipe");
        [one.into(), other.into()]
    }

    #[tokio::test]
    async fn each_egress_process_gets_settings_and_all_sockets() {
        let keeper = SocketKeeper::new(EgressSettings::default()).expect("the limit can be raised");
        let launcher = register_socket(keeper.connect_launcher().expect("a pair")).expect("a socket");
        let first = register_socket(keeper.connect_egress().expect("a pair")).expect("a socket");
        assert!(matches!(next_message(&first).await, (EgressRequestBody::Configure(_), 0)));
        for sandbox in ["a", "b"] {
            let body = EgressRequestBody::Serve(served(sandbox));
            assert_eq!(ask(&launcher, body.clone(), &two_sockets()).await, EgressReplyBody::Done);
            assert_eq!(next_message(&first).await, (body, 2));
        }
        let forget = EgressRequestBody::Forget { sandbox: "a".to_owned() };
        assert_eq!(ask(&launcher, forget.clone(), &[]).await, EgressReplyBody::Done);
        assert_eq!(next_message(&first).await, (forget, 0));
        drop(first);
        let second = register_socket(keeper.connect_egress().expect("a pair")).expect("a socket");
        keeper
            .configure(EgressSettings { upstream_proxy: Some("p".to_owned()), ..EgressSettings::default() });
        assert!(matches!(next_message(&second).await, (EgressRequestBody::Configure(_), 0)));
        assert_eq!(next_message(&second).await, (EgressRequestBody::Serve(served("b")), 2));
        assert!(matches!(
            next_message(&second).await,
            (EgressRequestBody::Configure(EgressSettings { upstream_proxy: Some(_), .. }), 0)
        ));
    }

    #[tokio::test]
    async fn next_launcher_learns_which_sockets_are_kept() {
        let keeper = SocketKeeper::new(EgressSettings::default()).expect("the limit can be raised");
        let launcher = register_socket(keeper.connect_launcher().expect("a pair")).expect("a socket");
        let serve = |sandbox| EgressRequestBody::Serve(served(sandbox));
        assert_eq!(ask(&launcher, serve("a"), &two_sockets()).await, EgressReplyBody::Done);
        let refused = ask(&launcher, serve("b"), &[]).await;
        assert!(matches!(refused, EgressReplyBody::Refused { .. }), "{refused:?}");
        drop(launcher);
        let launcher = register_socket(keeper.connect_launcher().expect("a pair")).expect("a socket");
        let listed = ask(&launcher, EgressRequestBody::ListServed, &[]).await;
        assert_eq!(listed, EgressReplyBody::Served { sandboxes: vec!["a".to_owned()] });
    }
}
