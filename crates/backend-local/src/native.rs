//! The backend that the service uses: a client of the launcher that also connects to agents.

mod images;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use backend::{
    AgentStream, Backend, BackendError, Capabilities, Death, Found, FoundSnapshot, FoundVolume, InForce,
    KeptFiles, Measures, ResolvedImage, Stopped, Usage,
};
use domain::volume::Lifetime;
use domain::{
    Access, Bytes, Cause, Files, Mount, Nesting, Network, Owner, Resources, SandboxId, SnapshotId, Source,
    Spec, Volume, VolumeId, VolumeName,
};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::jail::plan::{DiskPlan, GuestPlan, JailPlan, LimitName, Limits, MountPlan, SourcePlan, UserPlan};
use crate::launcher::packet;
use crate::launcher::protocol::{
    Answer, Ask, FoundKept, Holds, KeptBox, Question, Refusal, Resize, SOCKET, Tell, VERSION, VolumePlan,
};
use crate::network::Wish;

pub use self::images::Fetching;

/// Defaults for sandboxes whose caller did not specify something.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    pub limits: Limits,
    pub require_limits: bool,
    pub max_processes: u32,
}

/// Sandboxes on this host.
pub struct Native {
    link: Arc<Link>,
    /// The directory with the sockets of the launcher and the agents.
    run: Arc<OwnedFd>,
    /// Replaced as a whole by a reload.
    defaults: RwLock<Defaults>,
    fetching: Option<Fetching>,
    deaths: mpsc::UnboundedSender<Death>,
    listener: Mutex<Option<mpsc::UnboundedReceiver<Death>>>,
}

/// The connection to the launcher. If it breaks, the next request opens a new one.
struct Link {
    run: Arc<OwnedFd>,
    state: Mutex<LinkState>,
}

#[derive(Default)]
struct LinkState {
    socket: Option<Arc<AsyncFd<OwnedFd>>>,
    number: u64,
    waiting: HashMap<u64, oneshot::Sender<Told>>,
}

type Told = (Result<Answer, Refusal>, Option<OwnedFd>);

/// A request that got no response.
struct Unheard {
    stage: Stage,
    source: io::Error,
}

/// Whether the launcher may have acted on a request: only after it was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Before,
    After,
}

/// How long the launcher may be unreachable before a request fails. Its supervisor restarts it
/// within a fraction of this time.
const AWAY: Duration = Duration::from_secs(15);

/// The interval between connection attempts meanwhile: there is no notification for a new socket.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

impl Native {
    /// Creates a client of the launcher that serves `state_dir`.
    pub fn connect(state_dir: &std::path::Path, defaults: Defaults) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let run = Arc::new(rustix::fs::open(state_dir.join("run"), flags, Mode::empty())?);
        let (deaths, listener) = mpsc::unbounded_channel();
        let link = Arc::new(Link { run: Arc::clone(&run), state: Mutex::default() });
        let (defaults, listener) = (RwLock::new(defaults), Mutex::new(Some(listener)));
        Ok(Self { link, run, defaults, fetching: None, deaths, listener })
    }

    /// Replaces the defaults; they apply to sandboxes that are made or resized from now on.
    pub fn set_defaults(&self, defaults: Defaults) {
        *self.defaults.write().expect("replacing the defaults does not panic") = defaults;
    }

    fn defaults(&self) -> Defaults {
        *self.defaults.read().expect("replacing the defaults does not panic")
    }

    fn plan(&self, id: &SandboxId, spec: &Spec) -> Result<JailPlan, BackendError> {
        Ok(JailPlan {
            id: id.as_str().to_owned(),
            image: spec.image.clone(),
            snapshot: spec.snapshot.as_ref().map(|snapshot| snapshot.as_str().to_owned()),
            limits: self.limits(&spec.resources),
            named: named(&spec.resources),
            require_limits: self.defaults().require_limits,
            network: wish(spec.network)?,
            mounts: mount_plans(&spec.mounts)?,
            env: spec.environment(id),
            env_file: spec.env_file.clone(),
            nesting: spec.nesting == Nesting::On,
            guest: guest_plan(spec),
            max_processes: self.defaults().max_processes,
            user: None,
            keep: false,
            disk: DiskPlan::New,
        })
    }

    /// Returns all limits: those that the caller specified, and defaults for the others.
    fn limits(&self, resources: &Resources) -> Limits {
        let default = self.defaults().limits;
        Limits {
            memory: resources.memory.map_or(default.memory, |memory| memory.0),
            cpus: resources.cpus.map_or(default.cpus, |cpus| cpus.0),
            pids: resources.pids.unwrap_or(default.pids),
            disk: resources.disk.map_or(default.disk, |disk| disk.0),
        }
    }

    /// Reports the end of a sandbox when its first process ends.
    fn watch(&self, id: SandboxId, pidfd: OwnedFd) {
        let (link, deaths) = (Arc::clone(&self.link), self.deaths.clone());
        tokio::spawn(async move {
            let watched = match register(pidfd, Interest::READABLE) {
                Ok(watched) => watched,
                Err(error) => {
                    return tracing::warn!(%id, %error, "failed to watch sandbox; its end will not be reported");
                }
            };
            if watched.readable().await.is_err() {
                return;
            }
            let question = Question::WasOutOfMemory { id: id.as_str().to_owned() };
            let cause = match link.ask(question).await {
                Ok((Answer::Yes(true), _)) => Cause::Oom,
                Ok(_) | Err(_) => Cause::AgentDied,
            };
            // The receiver is gone once the service has stopped.
            deaths.send(Death { id, cause }).unwrap_or_default();
        });
    }

    /// Asks the launcher to make a sandbox, and watches it.
    async fn carry_out(&self, id: &SandboxId, plan: JailPlan) -> Result<InForce, BackendError> {
        match self.link.ask(Question::Create(Box::new(plan))).await? {
            (Answer::Created(holds), Some(pidfd)) => {
                self.watch(id.clone(), pidfd);
                let Holds { image, stand_in, measures, weaker } = holds;
                Ok(InForce { image, stand_in, measures, weaker })
            }
            _ => Err(unexpected()),
        }
    }

    async fn simple(&self, question: Question) -> Result<Answer, BackendError> {
        self.link.ask(question).await.map(|(answer, _)| answer)
    }
}

#[async_trait::async_trait]
impl Backend for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    async fn probe(&self) -> Result<Capabilities, BackendError> {
        match self.simple(Question::Report).await? {
            Answer::Report {
                limits,
                weaker,
                pause,
                snapshot,
                attach,
                volumes,
                restart,
                network,
                host_versions,
            } => Ok(Capabilities {
                pause,
                attach,
                snapshot,
                restart,
                volumes,
                network,
                limits,
                weaker,
                host_versions,
            }),
            _ => Err(unexpected()),
        }
    }

    async fn create(&self, id: &SandboxId, spec: &Spec) -> Result<InForce, BackendError> {
        self.carry_out(id, self.plan(id, spec)?).await
    }

    async fn stop(&self, id: &SandboxId) -> Result<Stopped, BackendError> {
        match self.simple(Question::Stop { id: id.as_str().to_owned() }).await? {
            Answer::Stopped { cpu_micros, files } => Ok(Stopped {
                usage: Usage { cpu_micros, ..Usage::default() },
                files: if files { Files::Kept } else { Files::Lost },
            }),
            _ => Err(unexpected()),
        }
    }

    async fn restart(&self, id: &SandboxId, spec: &Spec) -> Result<InForce, BackendError> {
        // The files of the snapshot are already on the sandbox's disk.
        let plan = JailPlan { snapshot: None, disk: DiskPlan::Kept, ..self.plan(id, spec)? };
        self.carry_out(id, plan).await
    }

    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError> {
        let question = Question::Freeze { id: id.as_str().to_owned(), frozen: true };
        self.simple(question).await.map(drop)
    }

    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError> {
        let question = Question::Freeze { id: id.as_str().to_owned(), frozen: false };
        self.simple(question).await.map(drop)
    }

    async fn destroy(&self, id: &SandboxId) -> Result<Usage, BackendError> {
        match self.simple(Question::Destroy { id: id.as_str().to_owned() }).await? {
            Answer::Ended { cpu_micros } => Ok(Usage { cpu_micros, ..Usage::default() }),
            _ => Err(unexpected()),
        }
    }

    async fn list(&self) -> Result<Vec<Found>, BackendError> {
        let Answer::Found(boxes) = self.simple(Question::List).await? else { return Err(unexpected()) };
        let mut found = Vec::new();
        for one in boxes {
            let Ok(id) = SandboxId::parse(&one.id) else { continue };
            let condition = one.condition.into();
            let files = if one.files { Files::Kept } else { Files::Lost };
            if matches!(condition, backend::Condition::Alive | backend::Condition::Frozen)
                && let Ok((_, Some(pidfd))) = self.link.ask(Question::Watch { id: one.id.clone() }).await
            {
                self.watch(id.clone(), pidfd);
            }
            found.push(Found { id, condition, files });
        }
        Ok(found)
    }

    async fn dial(&self, id: &SandboxId) -> Result<AgentStream, BackendError> {
        let path = format!("/proc/self/fd/{}/{id}", self.run.as_raw_fd());
        match tokio::net::UnixStream::connect(path).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(BackendError::Gone),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(BackendError::Gone),
            Err(source) => Err(BackendError::Io { action: "dial the agent", source }),
        }
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage, BackendError> {
        match self.simple(Question::Usage { id: id.as_str().to_owned() }).await? {
            Answer::Used(used) => Ok(Usage {
                memory: used.memory.map(Bytes),
                memory_limit: used.memory_limit.map(Bytes),
                cpu_micros: used.cpu_micros,
                cpu_limit: used.cpu_limit,
                pids: used.pids,
                pids_limit: used.pids_limit,
                disk: used.disk.map(Bytes),
                disk_limit: used.disk_limit.map(Bytes),
                oom_kills: used.oom_kills,
            }),
            _ => Err(unexpected()),
        }
    }

    async fn attach(&self, id: &SandboxId, mounts: &[Mount]) -> Result<Measures, BackendError> {
        let mounts = mount_plans(mounts)?;
        match self.simple(Question::Attach { id: id.as_str().to_owned(), mounts }).await? {
            Answer::Changed(measures) => Ok(measures),
            _ => Err(unexpected()),
        }
    }

    async fn make_volume(&self, volume: &Volume) -> Result<(), BackendError> {
        let plan = VolumePlan {
            id: volume.id.to_string(),
            owner: volume.owner.as_str().to_owned(),
            name: volume.name.to_string(),
            size: volume.size.0,
            kept: volume.lifetime == Lifetime::Kept,
        };
        self.simple(Question::MakeVolume(plan)).await.map(drop)
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError> {
        self.simple(Question::RemoveVolume { id: id.to_string() }).await.map(drop)
    }

    async fn volumes(&self) -> Result<Vec<FoundVolume>, BackendError> {
        match self.simple(Question::Volumes).await? {
            Answer::Volumes(found) => {
                Ok(found.into_iter().filter_map(|(plan, used)| found_volume(plan, used)).collect())
            }
            _ => Err(unexpected()),
        }
    }

    async fn volumes_hold(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError> {
        let ids = ids.iter().map(VolumeId::to_string).collect();
        match self.simple(Question::VolumesHold { ids }).await? {
            Answer::VolumesHold(held) => {
                let held = held.into_iter();
                Ok(held.filter_map(|(id, used)| Some((VolumeId::parse(&id).ok()?, Bytes(used)))).collect())
            }
            _ => Err(unexpected()),
        }
    }

    async fn resize(&self, id: &SandboxId, resources: &Resources) -> Result<Measures, BackendError> {
        let resize = Resize {
            id: id.as_str().to_owned(),
            limits: self.limits(resources),
            named: named(resources),
            require_limits: self.defaults().require_limits,
        };
        match self.simple(Question::Resize(resize)).await? {
            Answer::Changed(measures) => Ok(measures),
            _ => Err(unexpected()),
        }
    }

    async fn resolve(&self, image: &str) -> Result<ResolvedImage, BackendError> {
        match self.simple(Question::Resolve { image: image.to_owned() }).await? {
            Answer::Resolved { image, stand_in } => Ok(ResolvedImage { name: image, stand_in }),
            _ => Err(unexpected()),
        }
    }

    async fn connect(&self, id: &SandboxId, network: Network) -> Result<Measures, BackendError> {
        let question = Question::Connect { id: id.as_str().to_owned(), network: wish(network)? };
        match self.simple(question).await? {
            Answer::Changed(measures) => Ok(measures),
            _ => Err(unexpected()),
        }
    }

    async fn snapshot(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<KeptFiles, BackendError> {
        let (id, snapshot) = (id.as_str().to_owned(), snapshot.as_str().to_owned());
        match self.simple(Question::Snapshot { id, snapshot }).await? {
            Answer::Kept(kept) => Ok(kept.into()),
            _ => Err(unexpected()),
        }
    }

    async fn forget_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError> {
        self.simple(Question::ForgetSnapshot { snapshot: snapshot.as_str().to_owned() }).await.map(drop)
    }

    async fn snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError> {
        let Answer::Snapshots(all) = self.simple(Question::Snapshots).await? else {
            return Err(unexpected());
        };
        Ok(all.into_iter().filter_map(found_snapshot).collect())
    }

    fn images(&self) -> Option<&dyn backend::Images> {
        Some(self)
    }

    fn deaths(&self) -> mpsc::UnboundedReceiver<Death> {
        let mut listener = self.listener.lock().expect("nothing panics while it holds this lock");
        listener.take().expect("the service asks for deaths once")
    }
}

impl Link {
    /// Sends a request and returns the response. Waits for a launcher that is being restarted. A
    /// request that was sent but not answered is sent again if it may be repeated.
    async fn ask(self: &Arc<Self>, question: Question) -> Result<(Answer, Option<OwnedFd>), BackendError> {
        self.ask_with(question, None).await
    }

    /// Like [`Link::ask`], with a descriptor that is sent along.
    async fn ask_with(
        self: &Arc<Self>,
        question: Question,
        carried: Option<OwnedFd>,
    ) -> Result<(Answer, Option<OwnedFd>), BackendError> {
        let given_up = Instant::now() + AWAY;
        let mut ask = Ask { version: VERSION, number: 0, question };
        loop {
            let unheard = match self.ask_once(&mut ask, carried.as_ref()).await {
                Ok((answer, descriptor)) => return Ok((answer?, descriptor)),
                Err(unheard) => unheard,
            };
            let again = unheard.stage == Stage::Before || ask.question.may_be_repeated();
            if !again || Instant::now() >= given_up {
                return Err(BackendError::Io { action: "ask the launcher", source: unheard.source });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn ask_once(self: &Arc<Self>, ask: &mut Ask, carried: Option<&OwnedFd>) -> Result<Told, Unheard> {
        let before = |source| Unheard { stage: Stage::Before, source };
        let (sender, receiver) = oneshot::channel();
        let (socket, number) = self.enqueue(sender).map_err(before)?;
        ask.number = number;
        loop {
            let mut guard = socket.writable().await.map_err(before)?;
            match guard.try_io(|socket| packet::send(socket.as_fd(), ask, carried.map(AsFd::as_fd))) {
                Ok(sent) => break sent.map_err(before)?,
                Err(_would_block) => {}
            }
        }
        receiver.await.map_err(|_closed| Unheard {
            stage: Stage::After,
            source: io::Error::new(io::ErrorKind::ConnectionAborted, "the launcher closed the connection"),
        })
    }

    /// Assigns a number to a request, connecting first if there is no connection.
    fn enqueue(self: &Arc<Self>, sender: oneshot::Sender<Told>) -> io::Result<(Arc<AsyncFd<OwnedFd>>, u64)> {
        let mut state = self.state.lock().expect("nothing panics while it holds this lock");
        let socket = match &state.socket {
            Some(socket) => Arc::clone(socket),
            None => {
                let socket =
                    Arc::new(register(connect(&self.run)?, Interest::READABLE | Interest::WRITABLE)?);
                state.socket = Some(Arc::clone(&socket));
                tokio::spawn(listen(Arc::clone(self), Arc::clone(&socket)));
                socket
            }
        };
        state.number += 1;
        let number = state.number;
        state.waiting.insert(number, sender);
        Ok((socket, number))
    }

    fn deliver(&self, response: Tell, descriptor: Option<OwnedFd>) {
        let waiting = self
            .state
            .lock()
            .expect("nothing panics while it holds this lock")
            .waiting
            .remove(&response.number);
        if let Some(waiting) = waiting {
            // The caller may have given up; a later list of sandboxes shows the outcome.
            drop(waiting.send((response.answer, descriptor)));
        }
    }

    /// Drops a broken connection; all requests that wait on it fail.
    fn forget(&self) {
        let mut state = self.state.lock().expect("nothing panics while it holds this lock");
        state.socket = None;
        state.waiting.clear();
    }
}

/// Receives responses until the connection ends.
async fn listen(link: Arc<Link>, socket: Arc<AsyncFd<OwnedFd>>) {
    loop {
        let Ok(mut guard) = socket.readable().await else { break };
        match guard.try_io(|socket| packet::receive::<Tell>(socket.as_fd())) {
            Ok(Ok(Some((response, descriptor)))) => link.deliver(response, descriptor),
            Ok(Ok(None) | Err(_)) => break,
            Err(_would_block) => {}
        }
    }
    link.forget();
}

fn connect(run: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let path = format!("/proc/self/fd/{}/{SOCKET}", run.as_raw_fd());
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

#[expect(
    deprecated,
    reason = "the safe constructor is deprecated for types that may close their descriptor early; this one does not"
)]
fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

fn unexpected() -> BackendError {
    BackendError::Io { action: "understand the launcher", source: io::ErrorKind::InvalidData.into() }
}

fn found_volume(plan: VolumePlan, used: u64) -> Option<FoundVolume> {
    let volume = Volume {
        id: VolumeId::parse(&plan.id).ok()?,
        owner: Owner::parse(&plan.owner).ok()?,
        name: VolumeName::parse(&plan.name).ok()?,
        size: Bytes(plan.size),
        lifetime: if plan.kept { Lifetime::Kept } else { Lifetime::WithSandboxes },
    };
    Some(FoundVolume { volume, used: Bytes(used) })
}

/// Converts mounts to plain data.
pub fn mount_plans(mounts: &[Mount]) -> Result<Vec<MountPlan>, BackendError> {
    mounts.iter().map(mount_plan).collect()
}

fn mount_plan(mount: &Mount) -> Result<MountPlan, BackendError> {
    let source = match &mount.source {
        Source::Host(path) => SourcePlan::Host(path.clone()),
        Source::Volume(id) => SourcePlan::Volume(id.to_string()),
        Source::Claim(claim) => {
            let message = format!("volume `{}` was not resolved to an id before the mount", claim.name);
            return Err(BackendError::Unsupported { message, hint: None });
        }
    };
    let read_only = mount.access == Access::ReadOnly;
    let (target, sub_path) = (mount.target.clone(), mount.sub_path.clone());
    Ok(MountPlan { source, target, read_only, sub_path })
}

fn found_snapshot(found: FoundKept) -> Option<FoundSnapshot> {
    let stage = match found.kept {
        Some(kept) => backend::Stage::Complete(kept.into()),
        None => backend::Stage::Making(found.copied.map(|(done, total)| (Bytes(done), Bytes(total)))),
    };
    Some(FoundSnapshot { id: SnapshotId::parse(&found.id).ok()?, stage })
}

impl From<KeptBox> for KeptFiles {
    fn from(kept: KeptBox) -> Self {
        Self { image: kept.image, size: Bytes(kept.size), disk: Bytes(kept.disk) }
    }
}

/// Returns the limits that the caller specified.
fn named(resources: &Resources) -> Vec<LimitName> {
    let all = [
        (LimitName::Memory, resources.memory.is_some()),
        (LimitName::Cpus, resources.cpus.is_some()),
        (LimitName::Pids, resources.pids.is_some()),
        (LimitName::Disk, resources.disk.is_some()),
    ];
    all.into_iter().filter_map(|(limit, named)| named.then_some(limit)).collect()
}

/// Converts the network of a spec to the launcher's setting.
fn wish(network: Network) -> Result<Wish, BackendError> {
    match network {
        Network::Off => Ok(Wish::Off),
        Network::On => Ok(Wish::On),
        Network::Auto => Ok(Wish::Auto),
        Network::Filtered => {
            let message = "network `filtered` comes with the egress filter".to_owned();
            let hint = Some("use network `on` or `off`".to_owned());
            Err(BackendError::Unsupported { message, hint })
        }
    }
}

/// Converts the guest of a spec to plain data.
pub fn guest_plan(spec: &Spec) -> GuestPlan {
    let user = |user: &domain::User| UserPlan {
        name: user.name.clone(),
        uid: user.uid,
        gid: user.gid,
        home: user.home.clone(),
    };
    GuestPlan {
        users: spec.guest.users.iter().map(user).collect(),
        default_user: spec.guest.default_user.clone(),
        default_directory: spec.guest.default_directory.clone(),
        directories: spec.guest.directories.clone(),
        by_image: spec.guest == domain::Guest::root(),
    }
}
