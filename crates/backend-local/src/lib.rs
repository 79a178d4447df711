//! Sandboxes on this host, as the service sees them: a client of the launcher and of the egress process that also
//! connects to agents. It has no privileges.

mod agent_socket;
mod egress;
mod images;
mod network_filter;
mod reconfigure;
mod secret_vaults;
mod snapshots;
mod volumes;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend::{
    AgentStream, Backend, BackendCapabilities, BackendError, Enforced, FoundSandbox, Images, LimitPlan,
    NetworkFilter, Reconfigure, ResolvedSpec, SandboxDeath, SandboxUsage, SecretVaults, Snapshots,
    StoppedSandbox, Volumes,
};
use domain::{
    Bytes, EndCause, FilesState, ImageDefaults, IsolatedSessions, MountAccess, MountSource, MountSpec,
    NetworkAccess, SandboxId, SandboxSpec,
};
use launcher::StageTime;
use launcher::network::NetworkMode;
use launcher::plan::{DiskPlan, GuestPlan, JailPlan, LimitName, MountPlan, MountSourcePlan, UserPlan};
use launcher::protocol::{
    self, EnforcedPlan, LauncherOp, LauncherRequest, LauncherResponse, OpError, OpResult, PROTOCOL_VERSION,
    SOCKET_NAME, WatchedIds,
};
use linux::packet;
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::agent_socket::AgentSocket;
use crate::egress::EgressClient;

pub use images::ImageFetcher;

/// Sandboxes on this host.
pub struct LocalBackend {
    link: Arc<LauncherConnection>,
    egress: EgressClient,
    /// The directory with the sockets of the launcher and the agents.
    run: Arc<OwnedFd>,
    fetching: Option<ImageFetcher>,
    deaths: mpsc::UnboundedSender<SandboxDeath>,
    listener: Mutex<Option<mpsc::UnboundedReceiver<SandboxDeath>>>,
}

/// The connection to the launcher. If it breaks, the next request opens a new one.
struct LauncherConnection {
    run: Arc<OwnedFd>,
    state: Mutex<ConnectionState>,
}

#[derive(Default)]
struct ConnectionState {
    socket: Option<Arc<AsyncFd<OwnedFd>>>,
    number: u64,
    waiting: HashMap<u64, oneshot::Sender<LauncherReply>>,
}

type LauncherReply = (Result<OpResult, OpError>, Option<OwnedFd>);

/// A request that got no response.
struct RequestFailure {
    stage: RequestStage,
    source: io::Error,
}

/// The entry of a request in the list of those that wait. It is removed when the caller has the response, or when the
/// caller is dropped or fails before.
struct WaitingEntry<'a> {
    link: &'a LauncherConnection,
    number: u64,
}

impl Drop for WaitingEntry<'_> {
    fn drop(&mut self) {
        let mut state = self.link.state.lock().expect("nothing panics while it holds this lock");
        state.waiting.remove(&self.number);
    }
}

/// Whether the launcher may have acted on a request: only after it was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestStage {
    Before,
    After,
}

/// How long the launcher may be unreachable before a request fails. Its supervisor restarts it
/// within a fraction of this time.
const LAUNCHER_TIMEOUT: Duration = Duration::from_secs(15);

/// The interval between connection attempts meanwhile: there is no notification for a new socket.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(10);

impl LocalBackend {
    /// Creates a client of the launcher and the egress process that serve `state_dir`.
    pub fn connect(state_dir: &std::path::Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let run = Arc::new(rustix::fs::open(state_dir.join("run"), flags, Mode::empty())?);
        let egress = EgressClient::new(rustix::fs::open(state_dir, flags, Mode::empty())?);
        let (deaths, listener) = mpsc::unbounded_channel();
        let link = Arc::new(LauncherConnection { run: Arc::clone(&run), state: Mutex::default() });
        let listener = Mutex::new(Some(listener));
        Ok(Self { link, egress, run, fetching: None, deaths, listener })
    }

    /// Reports the end of a sandbox when its first process ends.
    fn watch_sandbox(&self, id: SandboxId, pidfd: OwnedFd) {
        let (link, deaths) = (Arc::clone(&self.link), self.deaths.clone());
        tokio::spawn(async move {
            let watched = match register_descriptor(pidfd, Interest::READABLE) {
                Ok(watched) => watched,
                Err(error) => {
                    return tracing::warn!(%id, %error, "failed to watch sandbox; its end will not be reported");
                }
            };
            if watched.readable().await.is_err() {
                return;
            }
            let question = LauncherOp::WasOutOfMemory { id: id.clone() };
            let cause = match link.request(question).await {
                Ok((OpResult::Yes(true), _)) => EndCause::Oom,
                Ok(_) | Err(_) => EndCause::AgentDied,
            };
            // The receiver is gone once the service has stopped.
            deaths.send(SandboxDeath { id, cause }).unwrap_or_default();
        });
    }

    /// Watches the sandboxes whose descriptors wait in `pidfds`. The launcher has sent all of them before its
    /// response, and sends nothing after them.
    fn watch_listed(&self, pidfds: &OwnedFd) -> Result<(), BackendError> {
        let failed = |source| BackendError::Io { action: "receive the descriptors of sandboxes", source };
        while let Some((WatchedIds { ids }, descriptors)) =
            packet::receive_with_descriptors::<WatchedIds>(pidfds.as_fd()).map_err(failed)?
        {
            for (id, pidfd) in ids.into_iter().zip(descriptors) {
                self.watch_sandbox(id, pidfd);
            }
        }
        Ok(())
    }

    /// Makes a sandbox that has its policy before its first process starts.
    async fn create_with_policy(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        plan: JailPlan,
    ) -> Result<Enforced, BackendError> {
        if spec.network != NetworkAccess::Filtered {
            return self.create_from_plan(id, plan).await;
        }
        self.egress.check_exists()?;
        let made = match self.egress.set_policy(id, &spec.policy_or_deny_all()).await {
            Ok(()) => self.create_from_plan(id, plan).await,
            Err(error) => Err(error),
        };
        made.inspect_err(|_| self.egress.withdraw_policy(id))
    }

    /// Asks the launcher to make a sandbox, and watches it.
    async fn create_from_plan(&self, id: &SandboxId, plan: JailPlan) -> Result<Enforced, BackendError> {
        match self.link.request(LauncherOp::Create(Box::new(plan))).await? {
            (OpResult::Created(holds), Some(pidfd)) => {
                self.watch_sandbox(id.clone(), pidfd);
                let EnforcedPlan { image, stand_in, measures, degraded: weaker, stages } = holds;
                log_stages(id, &stages);
                Ok(Enforced { image, stand_in, measures, degraded: weaker })
            }
            _ => Err(unexpected_response()),
        }
    }

    async fn request_result(&self, op: LauncherOp) -> Result<OpResult, BackendError> {
        self.link.request(op).await.map(|(answer, _)| answer)
    }
}

#[async_trait::async_trait]
impl Backend for LocalBackend {
    fn name(&self) -> &'static str {
        "local"
    }

    async fn probe(&self) -> Result<BackendCapabilities, BackendError> {
        match self.request_result(LauncherOp::Report).await? {
            OpResult::Report {
                limits,
                degraded,
                pause,
                snapshot,
                attach,
                volumes,
                restart,
                network,
                filtered,
                host_versions,
            } => Ok(BackendCapabilities {
                pause,
                attach,
                snapshot,
                restart,
                volumes,
                network,
                filtered,
                limits: limits.into_iter().map(Into::into).collect(),
                degraded,
                host_versions,
            }),
            _ => Err(unexpected_response()),
        }
    }

    async fn create(&self, id: &SandboxId, plan: &ResolvedSpec) -> Result<Enforced, BackendError> {
        self.create_with_policy(id, &plan.spec, jail_plan(id, plan)?).await
    }

    async fn stop(&self, id: &SandboxId) -> Result<StoppedSandbox, BackendError> {
        let OpResult::Stopped { cpu_micros, files } =
            self.request_result(LauncherOp::Stop { id: id.clone() }).await?
        else {
            return Err(unexpected_response());
        };
        self.egress.forget_policy(id);
        Ok(StoppedSandbox {
            usage: SandboxUsage { cpu_micros, ..SandboxUsage::default() },
            files: if files { FilesState::Kept } else { FilesState::Lost },
        })
    }

    async fn restart(&self, id: &SandboxId, plan: &ResolvedSpec) -> Result<Enforced, BackendError> {
        // The files of the snapshot are already on the sandbox's disk.
        let jail = JailPlan { snapshot: None, disk: DiskPlan::Kept, ..jail_plan(id, plan)? };
        self.create_with_policy(id, &plan.spec, jail).await
    }

    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError> {
        let question = LauncherOp::Freeze { id: id.clone(), frozen: true };
        self.request_result(question).await.map(drop)
    }

    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError> {
        let question = LauncherOp::Freeze { id: id.clone(), frozen: false };
        self.request_result(question).await.map(drop)
    }

    async fn destroy(&self, id: &SandboxId) -> Result<SandboxUsage, BackendError> {
        let OpResult::Ended { cpu_micros } =
            self.request_result(LauncherOp::Destroy { id: id.clone() }).await?
        else {
            return Err(unexpected_response());
        };
        self.egress.forget_policy(id);
        Ok(SandboxUsage { cpu_micros, ..SandboxUsage::default() })
    }

    async fn list_sandboxes(&self) -> Result<Vec<FoundSandbox>, BackendError> {
        let (OpResult::Found(found), Some(pidfds)) = self.link.request(LauncherOp::List).await? else {
            return Err(unexpected_response());
        };
        self.watch_listed(&pidfds)?;
        let sandbox = |found: protocol::FoundSandbox| FoundSandbox {
            id: found.id,
            condition: found.condition.into(),
            files: if found.files { FilesState::Kept } else { FilesState::Lost },
        };
        Ok(found.into_iter().map(sandbox).collect())
    }

    async fn dial_agent(&self, id: &SandboxId) -> Result<AgentStream, BackendError> {
        let path = format!("/proc/self/fd/{}/{id}", self.run.as_raw_fd());
        match AgentSocket::connect(&path) {
            Ok(socket) => Ok(Box::new(socket)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(BackendError::Gone),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(BackendError::Gone),
            Err(source) => Err(BackendError::Io { action: "dial the agent", source }),
        }
    }

    async fn usage(&self, id: &SandboxId) -> Result<SandboxUsage, BackendError> {
        match self.request_result(LauncherOp::Usage { id: id.clone() }).await? {
            OpResult::Used(used) => Ok(SandboxUsage {
                memory: used.memory.map(Bytes),
                memory_limit: used.memory_limit.map(Bytes),
                refaults: used.refaults,
                file_memory: used.file_memory.map(Bytes),
                cpu_micros: used.cpu_micros,
                cpu_limit: used.cpu_limit,
                pids: used.pids,
                pids_limit: used.pids_limit,
                disk: used.disk.map(Bytes),
                disk_limit: used.disk_limit.map(Bytes),
                oom_kills: used.oom_kills,
            }),
            _ => Err(unexpected_response()),
        }
    }

    async fn open_files(&self) -> Result<Vec<(SandboxId, u64)>, BackendError> {
        match self.request_result(LauncherOp::OpenFiles).await? {
            OpResult::OpenFiles(counts) => Ok(counts),
            _ => Err(unexpected_response()),
        }
    }

    fn images(&self) -> Option<&dyn Images> {
        Some(self)
    }

    fn volumes(&self) -> Option<&dyn Volumes> {
        Some(self)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn reconfigure(&self) -> Option<&dyn Reconfigure> {
        Some(self)
    }

    fn network_filter(&self) -> Option<&dyn NetworkFilter> {
        Some(self)
    }

    fn secret_vaults(&self) -> Option<&dyn SecretVaults> {
        Some(self)
    }

    fn watch_deaths(&self) -> mpsc::UnboundedReceiver<SandboxDeath> {
        let mut listener = self.listener.lock().expect("nothing panics while it holds this lock");
        listener.take().expect("the service asks for deaths once")
    }
}

impl LauncherConnection {
    /// Sends a request and returns the response. Waits for a launcher that is being restarted. A
    /// request that was sent but not answered is sent again if it may be repeated.
    async fn request(self: &Arc<Self>, op: LauncherOp) -> Result<(OpResult, Option<OwnedFd>), BackendError> {
        self.request_with_descriptor(op, None).await
    }

    /// Like [`LauncherConnection::request`], with a descriptor that is sent along.
    async fn request_with_descriptor(
        self: &Arc<Self>,
        question: LauncherOp,
        carried: Option<OwnedFd>,
    ) -> Result<(OpResult, Option<OwnedFd>), BackendError> {
        let given_up = Instant::now() + LAUNCHER_TIMEOUT;
        let mut ask = LauncherRequest { version: PROTOCOL_VERSION, number: 0, op: question };
        loop {
            let unheard = match self.try_request(&mut ask, carried.as_ref()).await {
                Ok((answer, descriptor)) => return Ok((answer?, descriptor)),
                Err(unheard) => unheard,
            };
            let again = unheard.stage == RequestStage::Before || ask.op.may_be_repeated();
            if !again || Instant::now() >= given_up {
                return Err(BackendError::Io { action: "ask the launcher", source: unheard.source });
            }
            tokio::time::sleep(RECONNECT_INTERVAL).await;
        }
    }

    async fn try_request(
        self: &Arc<Self>,
        request: &mut LauncherRequest,
        carried: Option<&OwnedFd>,
    ) -> Result<LauncherReply, RequestFailure> {
        let before = |source| RequestFailure { stage: RequestStage::Before, source };
        let (sender, receiver) = oneshot::channel();
        let (socket, number) = self.enqueue_request(sender).map_err(before)?;
        let _entry = WaitingEntry { link: self, number };
        request.number = number;
        loop {
            let mut guard = socket.writable().await.map_err(before)?;
            match guard
                .try_io(|socket| packet::send_message(socket.as_fd(), request, carried.map(AsFd::as_fd)))
            {
                Ok(sent) => break sent.map_err(before)?,
                Err(_would_block) => {}
            }
        }
        receiver.await.map_err(|_closed| RequestFailure {
            stage: RequestStage::After,
            source: io::Error::new(io::ErrorKind::ConnectionAborted, "the launcher closed the connection"),
        })
    }

    /// Assigns a number to a request, connecting first if there is no connection.
    fn enqueue_request(
        self: &Arc<Self>,
        sender: oneshot::Sender<LauncherReply>,
    ) -> io::Result<(Arc<AsyncFd<OwnedFd>>, u64)> {
        let mut state = self.state.lock().expect("nothing panics while it holds this lock");
        let socket = match &state.socket {
            Some(socket) => Arc::clone(socket),
            None => {
                let socket = Arc::new(register_descriptor(
                    connect_to_socket(&self.run, SOCKET_NAME)?,
                    Interest::READABLE | Interest::WRITABLE,
                )?);
                state.socket = Some(Arc::clone(&socket));
                tokio::spawn(receive_responses(Arc::clone(self), Arc::clone(&socket)));
                socket
            }
        };
        state.number += 1;
        let number = state.number;
        state.waiting.insert(number, sender);
        Ok((socket, number))
    }

    fn deliver_response(&self, response: LauncherResponse, descriptor: Option<OwnedFd>) {
        let waiting = self
            .state
            .lock()
            .expect("nothing panics while it holds this lock")
            .waiting
            .remove(&response.number);
        if let Some(waiting) = waiting {
            // The caller may have given up; a later list of sandboxes shows the outcome.
            drop(waiting.send((response.result, descriptor)));
        }
    }

    /// Drops a broken connection; all requests that wait on it fail.
    fn drop_connection(&self) {
        let mut state = self.state.lock().expect("nothing panics while it holds this lock");
        state.socket = None;
        state.waiting.clear();
    }
}

/// Receives responses until the connection ends.
async fn receive_responses(link: Arc<LauncherConnection>, socket: Arc<AsyncFd<OwnedFd>>) {
    loop {
        let Ok(mut guard) = socket.readable().await else { break };
        match guard.try_io(|socket| packet::receive_message::<LauncherResponse>(socket.as_fd())) {
            Ok(Ok(Some((response, descriptor)))) => link.deliver_response(response, descriptor),
            Ok(Ok(None) | Err(_)) => break,
            Err(_would_block) => {}
        }
    }
    link.drop_connection();
}

/// Connects to the socket with this name in a directory.
fn connect_to_socket(directory: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let path = format!("/proc/self/fd/{}/{name}", directory.as_raw_fd());
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

#[expect(
    deprecated,
    reason = "the safe constructor is deprecated for types that may close their descriptor early; this one does not"
)]
fn register_descriptor(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

/// Logs where the time of a create went. `coracle bench --breakdown` reads this.
fn log_stages(id: &SandboxId, stages: &[StageTime]) {
    if tracing::enabled!(target: backend::STAGE_LOG_TARGET, tracing::Level::TRACE) {
        let words: Vec<String> =
            stages.iter().map(|time| format!("{}={}", time.stage, time.micros)).collect();
        let stages = words.join(",");
        tracing::trace!(target: backend::STAGE_LOG_TARGET, part = "launcher", sandbox = %id, stages, "sandbox was built; stages are in microseconds");
    }
}

fn unexpected_response() -> BackendError {
    BackendError::Io { action: "understand the launcher", source: io::ErrorKind::InvalidData.into() }
}

/// Converts mounts to plain data.
pub fn mount_plans(mounts: &[MountSpec]) -> Result<Vec<MountPlan>, BackendError> {
    mounts.iter().map(mount_plan).collect()
}

fn mount_plan(mount: &MountSpec) -> Result<MountPlan, BackendError> {
    let source = match &mount.source {
        MountSource::Host(path) => MountSourcePlan::Host(path.clone()),
        MountSource::Reserved { purpose, path } => {
            MountSourcePlan::Reserved { purpose: purpose.clone(), path: path.clone() }
        }
        MountSource::Volume(id) => MountSourcePlan::Volume(id.clone()),
        MountSource::Claim(claim) => {
            let message = format!("volume `{}` was not resolved to an id before the mount", claim.name);
            return Err(BackendError::Unsupported { message, hint: None });
        }
    };
    let read_only = mount.access == MountAccess::ReadOnly;
    let (target, sub_path) = (mount.target.clone(), mount.sub_path.clone());
    Ok(MountPlan { source, target, read_only, sub_path })
}

/// Converts a plan to plain data for the launcher.
fn jail_plan(id: &SandboxId, plan: &ResolvedSpec) -> Result<JailPlan, BackendError> {
    let ResolvedSpec { spec, limits, max_processes } = plan;
    Ok(JailPlan {
        id: id.clone(),
        image: spec.image.clone(),
        snapshot: spec.snapshot.clone(),
        limits: limits.limits.into(),
        named: limit_names(limits),
        require_limits: limits.require_all,
        network: network_mode(spec.network),
        mounts: mount_plans(&spec.mounts)?,
        env: spec.process_environment(id),
        env_file: spec.env_file.clone(),
        isolated_sessions: spec.isolated_sessions == IsolatedSessions::On,
        guest: guest_plan(spec),
        max_processes: *max_processes,
        user: None,
        keep: false,
        disk: DiskPlan::New,
    })
}

/// Returns the limits that must be enforced because the caller named them.
fn limit_names(plan: &LimitPlan) -> Vec<LimitName> {
    plan.named.iter().map(|limit| (*limit).into()).collect()
}

/// Converts the network of a spec to the launcher's setting.
fn network_mode(network: NetworkAccess) -> NetworkMode {
    match network {
        NetworkAccess::Off => NetworkMode::Off,
        NetworkAccess::On => NetworkMode::On,
        NetworkAccess::Auto => NetworkMode::Auto,
        NetworkAccess::Filtered => NetworkMode::Filtered,
    }
}

/// Converts the guest of a spec to plain data.
pub fn guest_plan(spec: &SandboxSpec) -> GuestPlan {
    let user = |user: &domain::GuestUser| UserPlan {
        name: user.name.clone(),
        uid: user.uid,
        gid: user.gid,
        home: user.home.clone(),
        in_image: false,
    };
    GuestPlan {
        users: spec.guest.users.iter().map(user).collect(),
        default_user: spec.guest.default_user.clone(),
        default_directory: spec.guest.default_directory.clone(),
        directories: spec.guest.directories.clone(),
        by_image: spec.guest.image_defaults == ImageDefaults::Preferred,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accepts the connection of a client.
    async fn accept(listener: &AsyncFd<OwnedFd>) -> AsyncFd<OwnedFd> {
        let mut guard = listener.readable().await.expect("the listener is registered");
        let accepted = guard.try_io(|listener| {
            Ok(rustix::net::accept_with(listener.get_ref(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
        });
        let accepted = accepted.expect("a client connects").expect("it is accepted");
        register_descriptor(accepted, Interest::READABLE).expect("the socket can be watched")
    }

    #[tokio::test]
    async fn request_of_a_dropped_caller_does_not_wait_any_more() {
        let state = tempfile::tempdir().expect("there is room for a directory");
        let run = state.path().join("run");
        std::fs::create_dir(&run).expect("the directory is new");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .expect("the kernel has such sockets");
        let address = SocketAddrUnix::new(run.join(SOCKET_NAME)).expect("the path is short");
        rustix::net::bind(&listener, &address).expect("the name is free");
        rustix::net::listen(&listener, 8).expect("it is bound");
        let listener = register_descriptor(listener, Interest::READABLE).expect("it can be watched");

        let backend = LocalBackend::connect(state.path()).expect("the directory exists");
        let link = Arc::clone(&backend.link);
        let caller = tokio::spawn(async move { link.request(LauncherOp::List).await.is_ok() });
        let launcher = accept(&listener).await;
        drop(launcher.readable().await.expect("the request arrives"));
        let waiting = || backend.link.state.lock().expect("nothing has panicked").waiting.len();
        assert_eq!(waiting(), 1);
        caller.abort();
        assert!(caller.await.expect_err("it was cancelled").is_cancelled());
        assert_eq!(waiting(), 0);
    }
}
