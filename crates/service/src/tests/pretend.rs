//! A backend without sandboxes. It records its calls and produces, on demand, situations that a real backend rarely
//! does: half-made sandboxes, unknown sandboxes, deaths, failures, a malicious agent. It proves nothing about isolation
//! or about the real agent; other tests do that.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use backend::{
    AgentStream, ArchiveStream, Backend, BackendError, Capabilities, Condition, Death, Found, FoundSnapshot,
    FoundVolume, Freed, ImageInfo, Images, InForce, KeptFiles, Measures, Pull, ResolvedImage, Stage, Stopped,
    Usage,
};
use domain::{Bytes, Cause, Files, Mount, Network, Resources, SandboxId, SnapshotId, Spec, Volume, VolumeId};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Semaphore, mpsc, watch};
use wire::process::{Ended, Exit, ProcessStatus};
use wire::{Call, Decoder, Fault, FaultKind, Frame, Greeting, Reply, Request};

pub(super) struct Pretend {
    world: Mutex<World>,
    /// The number of sandboxes.
    population: watch::Sender<usize>,
    pub(super) deaths: (mpsc::UnboundedSender<Death>, Mutex<Option<mpsc::UnboundedReceiver<Death>>>),
    /// Creates wait for a permit.
    pub(super) gate: Semaphore,
    /// Changes of limits wait for a permit.
    pub(super) resizes: Semaphore,
    /// Snapshots wait for a permit.
    pub(super) snapshot_gate: Semaphore,
    /// Making, removing and attaching a volume waits for a permit.
    pub(super) volume_gate: Semaphore,
    /// Whether files outlive processes.
    pub(super) restarts: AtomicBool,
    /// Whether sandboxes can have a network.
    pub(super) network: AtomicBool,
    /// Whether sandboxes can be paused and resumed.
    freezer: AtomicBool,
    /// How the main processes ended; `None` while they run.
    pub(super) entrypoint_end: watch::Sender<Option<Exit>>,
}

#[derive(Default)]
struct World {
    sandboxes: HashMap<SandboxId, Condition>,
    snapshots: BTreeSet<SnapshotId>,
    /// The names of all calls, in order.
    calls: Vec<&'static str>,
    /// How many of the next calls with this name fail.
    failing: BTreeMap<&'static str, usize>,
    /// The processes that the agent reports.
    processes: Vec<ProcessStatus>,
    script: Option<Script>,
    volumes: BTreeMap<VolumeId, Volume>,
    /// The usage that every sandbox reports.
    usage: Usage,
}

/// The image that does not exist.
pub(super) const ABSENT: &str = "absent";

/// The bytes that the agent sends after its greeting, if the script answers this request; no bytes mean that the agent
/// stays silent.
pub(super) type Script = Arc<dyn Fn(&Request) -> Option<Vec<u8>> + Send + Sync>;

impl Pretend {
    pub(super) fn new() -> Arc<Self> {
        let (sender, receiver) = mpsc::unbounded_channel();
        Arc::new(Self {
            world: Mutex::default(),
            population: watch::Sender::new(0),
            deaths: (sender, Mutex::new(Some(receiver))),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            resizes: Semaphore::new(Semaphore::MAX_PERMITS),
            snapshot_gate: Semaphore::new(Semaphore::MAX_PERMITS),
            volume_gate: Semaphore::new(Semaphore::MAX_PERMITS),
            restarts: AtomicBool::new(true),
            network: AtomicBool::new(true),
            freezer: AtomicBool::new(true),
            entrypoint_end: watch::Sender::new(None),
        })
    }

    pub(super) fn put(&self, id: &SandboxId, condition: Condition) {
        let mut world = self.world.lock().unwrap();
        world.sandboxes.insert(id.clone(), condition);
        self.population.send_replace(world.sandboxes.len());
    }

    pub(super) fn take_away(&self, id: &SandboxId) {
        let mut world = self.world.lock().unwrap();
        world.sandboxes.remove(id);
        self.population.send_replace(world.sandboxes.len());
    }

    pub(super) fn condition(&self, id: &SandboxId) -> Option<Condition> {
        self.world.lock().unwrap().sandboxes.get(id).copied()
    }

    pub(super) fn keep(&self, snapshot: &SnapshotId) {
        self.world.lock().unwrap().snapshots.insert(snapshot.clone());
    }

    /// The existing snapshots.
    pub(super) fn kept(&self) -> BTreeSet<SnapshotId> {
        self.world.lock().unwrap().snapshots.clone()
    }

    pub(super) fn count(&self) -> usize {
        *self.population.borrow()
    }

    pub(super) async fn until_empty(&self) {
        self.population.subscribe().wait_for(|count| *count == 0).await.unwrap();
    }

    pub(super) fn set_usage(&self, usage: Usage) {
        self.world.lock().unwrap().usage = usage;
    }

    pub(super) fn put_volume(&self, volume: Volume) {
        self.world.lock().unwrap().volumes.insert(volume.id.clone(), volume);
    }

    pub(super) fn forget_volume(&self, id: &VolumeId) {
        self.world.lock().unwrap().volumes.remove(id);
    }

    pub(super) fn fail(&self, call: &'static str, times: usize) {
        self.world.lock().unwrap().failing.insert(call, times);
    }

    /// Behaves as a host without control groups from now on.
    pub(super) fn refuse_to_pause(&self) {
        self.freezer.store(false, Ordering::Relaxed);
    }

    fn check_freezer(&self) -> Result<(), BackendError> {
        if self.freezer.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (message, hint) = ("this host cannot pause sandboxes", "use another host");
        Err(BackendError::Unsupported { message: message.to_owned(), hint: Some(hint.to_owned()) })
    }

    pub(super) fn ids(&self) -> Vec<SandboxId> {
        self.world.lock().unwrap().sandboxes.keys().cloned().collect()
    }

    pub(super) fn was_asked_to(&self, call: &str) -> bool {
        self.times_asked_to(call) > 0
    }

    pub(super) fn times_asked_to(&self, call: &str) -> usize {
        self.world.lock().unwrap().calls.iter().filter(|made| **made == call).count()
    }

    /// Every call so far, in order.
    pub(super) fn calls(&self) -> Vec<&'static str> {
        self.world.lock().unwrap().calls.clone()
    }

    pub(super) fn kill(&self, id: &SandboxId, cause: Cause) {
        self.put(id, Condition::Dead);
        self.deaths.0.send(Death { id: id.clone(), cause }).unwrap();
    }

    pub(super) fn knows(&self, processes: Vec<ProcessStatus>) {
        self.world.lock().unwrap().processes = processes;
    }

    pub(super) fn answers(&self, script: impl Fn(&Request) -> Option<Vec<u8>> + Send + Sync + 'static) {
        self.world.lock().unwrap().script = Some(Arc::new(script));
    }

    fn files(&self, id: &SandboxId) -> Files {
        let kept = self.restarts.load(Ordering::Relaxed) && self.condition(id).is_some();
        if kept { Files::Kept } else { Files::Lost }
    }

    fn called(&self, call: &'static str) -> Result<(), BackendError> {
        let mut world = self.world.lock().unwrap();
        world.calls.push(call);
        match world.failing.get_mut(call) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(BackendError::Step {
                    step: call.to_owned(),
                    message: "the test requested this failure".to_owned(),
                    hint: None,
                })
            }
            _ => Ok(()),
        }
    }
}

#[async_trait::async_trait]
impl Backend for Pretend {
    fn name(&self) -> &'static str {
        "pretend"
    }

    async fn probe(&self) -> Result<Capabilities, BackendError> {
        let most = Capabilities { pause: true, attach: true, snapshot: true, ..Capabilities::default() };
        let restart = self.restarts.load(Ordering::Relaxed);
        Ok(Capabilities { volumes: true, restart, network: self.network.load(Ordering::Relaxed), ..most })
    }

    async fn create(&self, id: &SandboxId, spec: &Spec) -> Result<InForce, BackendError> {
        self.called("create asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.called("create")?;
        self.put(id, Condition::Alive);
        Ok(InForce { image: real(&spec.image), stand_in: stand_in(&spec.image), ..InForce::default() })
    }

    async fn stop(&self, id: &SandboxId) -> Result<Stopped, BackendError> {
        self.called("stop")?;
        let files = self.files(id);
        match files {
            Files::Kept => self.put(id, Condition::Dead),
            Files::Lost => self.take_away(id),
        }
        Ok(Stopped { usage: Usage::default(), files })
    }

    async fn restart(&self, id: &SandboxId, spec: &Spec) -> Result<InForce, BackendError> {
        self.called("restart asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.called("restart")?;
        match self.condition(id) {
            Some(Condition::Dead) => self.put(id, Condition::Alive),
            _ => return Err(BackendError::Gone),
        }
        Ok(InForce { image: real(&spec.image), ..InForce::default() })
    }

    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.called("pause")?;
        self.check_freezer()?;
        self.put(id, Condition::Frozen);
        Ok(())
    }

    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.called("resume")?;
        self.check_freezer()?;
        self.condition(id).ok_or(BackendError::Gone)?;
        self.put(id, Condition::Alive);
        Ok(())
    }

    async fn destroy(&self, id: &SandboxId) -> Result<Usage, BackendError> {
        self.called("destroy")?;
        self.take_away(id);
        Ok(Usage::default())
    }

    async fn list(&self) -> Result<Vec<Found>, BackendError> {
        self.called("list")?;
        let world = self.world.lock().unwrap();
        let files = if self.restarts.load(Ordering::Relaxed) { Files::Kept } else { Files::Lost };
        Ok(world
            .sandboxes
            .iter()
            .map(|(id, condition)| Found { id: id.clone(), condition: *condition, files })
            .collect())
    }

    async fn dial(&self, id: &SandboxId) -> Result<AgentStream, BackendError> {
        self.called("dial")?;
        if self.condition(id).is_none_or(|condition| condition == Condition::Dead) {
            return Err(BackendError::Gone);
        }
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let world = self.world.lock().unwrap();
        let agent = PretendAgent {
            stream: theirs,
            processes: world.processes.clone(),
            script: world.script.clone(),
            entrypoint_end: self.entrypoint_end.subscribe(),
        };
        tokio::spawn(agent.serve());
        Ok(Box::new(ours))
    }

    async fn usage(&self, _id: &SandboxId) -> Result<Usage, BackendError> {
        Ok(self.world.lock().unwrap().usage)
    }

    async fn attach(&self, _id: &SandboxId, mounts: &[Mount]) -> Result<Measures, BackendError> {
        self.called("attach")?;
        self.volume_gate.acquire().await.unwrap().forget();
        Ok(mounts.iter().map(|mount| (format!("mount {}", mount.target), "yes".to_owned())).collect())
    }

    async fn make_volume(&self, volume: &Volume) -> Result<(), BackendError> {
        self.called("make volume asked")?;
        self.volume_gate.acquire().await.unwrap().forget();
        self.called("make volume")?;
        self.world.lock().unwrap().volumes.insert(volume.id.clone(), volume.clone());
        Ok(())
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError> {
        self.called("remove volume asked")?;
        self.volume_gate.acquire().await.unwrap().forget();
        self.called("remove volume")?;
        self.world.lock().unwrap().volumes.remove(id);
        Ok(())
    }

    async fn volumes(&self) -> Result<Vec<FoundVolume>, BackendError> {
        let world = self.world.lock().unwrap();
        let found = |volume: &Volume| FoundVolume { volume: volume.clone(), used: domain::Bytes(0) };
        Ok(world.volumes.values().map(found).collect())
    }

    async fn volumes_hold(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError> {
        let world = self.world.lock().unwrap();
        let known = ids.iter().filter(|id| world.volumes.contains_key(*id));
        Ok(known.map(|id| (id.clone(), Bytes::mib(1))).collect())
    }

    async fn resize(&self, _id: &SandboxId, resources: &Resources) -> Result<Measures, BackendError> {
        self.called("resize")?;
        self.resizes.acquire().await.unwrap().forget();
        Ok(vec![("memory".to_owned(), format!("{:?}", resources.memory))])
    }

    async fn resolve(&self, image: &str) -> Result<ResolvedImage, BackendError> {
        self.called("resolve")?;
        Ok(ResolvedImage { name: real(image), stand_in: stand_in(image) })
    }

    async fn connect(&self, _id: &SandboxId, network: Network) -> Result<Measures, BackendError> {
        self.called("connect")?;
        Ok(vec![("network".to_owned(), format!("{network:?}"))])
    }

    async fn snapshot(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<KeptFiles, BackendError> {
        self.called("snapshot asked")?;
        self.snapshot_gate.acquire().await.unwrap().forget();
        self.called("snapshot")?;
        self.condition(id).ok_or(BackendError::Gone)?;
        self.keep(snapshot);
        Ok(kept_files())
    }

    async fn forget_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError> {
        self.called("forget")?;
        self.world.lock().unwrap().snapshots.remove(snapshot);
        Ok(())
    }

    async fn snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError> {
        let complete = |id: SnapshotId| FoundSnapshot { id, stage: Stage::Complete(kept_files()) };
        Ok(self.kept().into_iter().map(complete).collect())
    }

    fn images(&self) -> Option<&dyn Images> {
        Some(self)
    }

    fn deaths(&self) -> mpsc::UnboundedReceiver<Death> {
        // After a restart these tests report no deaths.
        let first = self.deaths.1.lock().unwrap().take();
        first.unwrap_or_else(|| mpsc::unbounded_channel().1)
    }
}

/// Every image exists except one, whose pull never ends.
#[async_trait::async_trait]
impl Images for Pretend {
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError> {
        Ok(Vec::new())
    }

    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError> {
        Ok((name != ABSENT).then(ImageInfo::default))
    }

    fn may_fetch(&self, _name: &str) -> bool {
        true
    }

    async fn pull(&self, _pull: Pull<'_>) -> Result<ImageInfo, BackendError> {
        self.called("pull")?;
        std::future::pending().await
    }

    async fn remove(&self, _name: &str) -> Result<Freed, BackendError> {
        Ok(Freed::default())
    }

    async fn import(&self, name: &str, mut archive: ArchiveStream<'_>) -> Result<ImageInfo, BackendError> {
        self.called("import")?;
        let mut content = Vec::new();
        let read = archive.read_to_end(&mut content).await;
        read.map_err(|source| BackendError::Io { action: "read an archive", source })?;
        Ok(ImageInfo { name: name.to_owned(), bytes: content.len() as u64, ..ImageInfo::default() })
    }

    async fn commit(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError> {
        self.called("commit")?;
        let known = self.world.lock().unwrap().snapshots.contains(snapshot);
        assert!(known, "the snapshot to make an image from does not exist");
        Ok(ImageInfo { name: name.to_owned(), ..ImageInfo::default() })
    }

    async fn collect(&self) -> Result<Freed, BackendError> {
        Ok(Freed::default())
    }
}

fn kept_files() -> KeptFiles {
    KeptFiles { image: "real host".to_owned(), size: Bytes::mib(10), disk: Bytes::mib(100) }
}

/// The image that a name resolves to: `alias of host` is another name of `host`.
fn real(image: &str) -> String {
    format!("real {}", image.trim_start_matches("alias of "))
}

/// The stand-in notice for a name that is an alias.
fn stand_in(image: &str) -> Option<String> {
    image.starts_with("alias of ").then(|| format!("it stands in for {image}"))
}

/// One connection to an agent that pretends to start everything it is asked to.
struct PretendAgent {
    stream: DuplexStream,
    processes: Vec<ProcessStatus>,
    script: Option<Script>,
    entrypoint_end: watch::Receiver<Option<Exit>>,
}

impl PretendAgent {
    async fn serve(mut self) {
        let Some(request) = self.request().await else { return };
        self.say(&Greeting { version: wire::VERSION }).await;
        if let Some(bytes) = self.script.as_ref().and_then(|script| script(&request)) {
            // The client may hang up in the middle of the script.
            self.stream.write_all(&bytes).await.ok();
            if bytes.is_empty() {
                // Stays silent and keeps the connection open.
                self.request().await;
            }
            return;
        }
        match request {
            Request::Ping | Request::Adopt { .. } => self.say(&Reply::Ok).await,
            Request::Start(_) => self.say(&Reply::Started { pid: 7 }).await,
            Request::Processes => self.say(&Reply::Statuses(self.processes.clone())).await,
            Request::Status { process } => self.say(&Reply::Status(running(&process))).await,
            Request::Follow { process, .. } => {
                self.say(&Reply::Status(running(&process))).await;
                let end = *self.entrypoint_end.wait_for(Option::is_some).await.unwrap();
                self.say(&Reply::Ended(ended(end.unwrap()))).await;
            }
            _ => self.say(&Reply::Fault(fault(FaultKind::Unsupported))).await,
        }
    }

    async fn request(&mut self) -> Option<Request> {
        let mut decoder = Decoder::new();
        let mut bytes = [0; 4096];
        loop {
            if let Some(frame) = decoder.next_frame().unwrap() {
                return Some(frame.read::<Call>().unwrap().request);
            }
            match self.stream.read(&mut bytes).await {
                Ok(count) if count > 0 => decoder.feed(&bytes[..count]),
                _ => return None,
            }
        }
    }

    async fn say(&mut self, message: &impl serde::Serialize) {
        // The client may not wait for the answer.
        self.stream.write_all(&encoded(&[Frame::message(message)])).await.ok();
    }
}

pub(super) fn encoded(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    bytes
}

pub(super) fn fault(kind: FaultKind) -> Fault {
    Fault { kind, errno: None, operation: "test".to_owned(), subject: "subject".to_owned() }
}

pub(super) fn running(process: &str) -> ProcessStatus {
    ProcessStatus {
        process: process.to_owned(),
        pid: 7,
        tag: None,
        session: None,
        command: "test".to_owned(),
        started_ms: 1,
        written: 0,
        first: 0,
        ended: None,
        left: false,
    }
}

pub(super) fn ended(exit: Exit) -> Ended {
    Ended { exit, written: 0, ended_ms: 2, duration_ms: 1, user_ms: 0, system_ms: 0, max_rss_kib: 0 }
}
