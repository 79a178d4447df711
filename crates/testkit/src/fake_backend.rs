//! A backend without sandboxes. It records its calls and produces, on demand, situations that a real backend rarely
//! does: half-made sandboxes, unknown sandboxes, deaths, failures, a malicious agent. It proves nothing about isolation
//! or about the real agent; other tests do that.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use backend::{
    AgentStream, ArchiveStream, Backend, BackendCapabilities, BackendError, Enforced, EnforcedMeasures,
    FoundCondition, FoundSandbox, FoundSnapshot, FoundVolume, FreedSpace, ImageInfo, ImagePull, Images,
    ResolvedImage, SandboxDeath, SandboxUsage, SnapshotContent, SnapshotStage, StoppedSandbox,
};
use domain::{
    Bytes, EndCause, FilesState, MountSpec, NetworkAccess, ResourceLimits, SandboxId, SandboxSpec,
    SnapshotId, Volume, VolumeId,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Semaphore, mpsc, watch};
use wire::process::{ExitReason, ProcessEnd, ProcessStatus};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame, FrameDecoder, Greeting, VersionedRequest};

pub struct FakeBackend {
    world: Mutex<FakeState>,
    /// The number of sandboxes.
    population: watch::Sender<usize>,
    pub deaths: (mpsc::UnboundedSender<SandboxDeath>, Mutex<Option<mpsc::UnboundedReceiver<SandboxDeath>>>),
    /// Creates wait for a permit.
    pub gate: Semaphore,
    /// Changes of limits wait for a permit.
    pub resizes: Semaphore,
    /// Snapshots wait for a permit.
    pub snapshot_gate: Semaphore,
    /// Making, removing and attaching a volume waits for a permit.
    pub volume_gate: Semaphore,
    /// Whether files outlive processes.
    pub restarts: AtomicBool,
    /// Whether sandboxes can have a network.
    pub network: AtomicBool,
    /// Whether sandboxes can be paused and resumed.
    freezer: AtomicBool,
    /// How the main processes ended; `None` while they run.
    pub entrypoint_end: watch::Sender<Option<ExitReason>>,
}

#[derive(Default)]
struct FakeState {
    sandboxes: HashMap<SandboxId, FoundCondition>,
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
    usage: SandboxUsage,
}

/// The image that does not exist.
pub const ABSENT_IMAGE: &str = "absent";

/// The bytes that the agent sends after its greeting, if the script answers this request; no bytes mean that the agent
/// stays silent.
pub type Script = Arc<dyn Fn(&AgentRequest) -> Option<Vec<u8>> + Send + Sync>;

impl FakeBackend {
    pub fn new() -> Arc<Self> {
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

    pub fn put_sandbox(&self, id: &SandboxId, condition: FoundCondition) {
        let mut world = self.world.lock().unwrap();
        world.sandboxes.insert(id.clone(), condition);
        self.population.send_replace(world.sandboxes.len());
    }

    pub fn remove_sandbox(&self, id: &SandboxId) {
        let mut world = self.world.lock().unwrap();
        world.sandboxes.remove(id);
        self.population.send_replace(world.sandboxes.len());
    }

    pub fn condition(&self, id: &SandboxId) -> Option<FoundCondition> {
        self.world.lock().unwrap().sandboxes.get(id).copied()
    }

    pub fn put_snapshot(&self, snapshot: &SnapshotId) {
        self.world.lock().unwrap().snapshots.insert(snapshot.clone());
    }

    /// The existing snapshots.
    pub fn snapshot_ids(&self) -> BTreeSet<SnapshotId> {
        self.world.lock().unwrap().snapshots.clone()
    }

    pub fn count(&self) -> usize {
        *self.population.borrow()
    }

    pub async fn until_empty(&self) {
        self.population.subscribe().wait_for(|count| *count == 0).await.unwrap();
    }

    pub fn set_usage(&self, usage: SandboxUsage) {
        self.world.lock().unwrap().usage = usage;
    }

    pub fn put_volume(&self, volume: Volume) {
        self.world.lock().unwrap().volumes.insert(volume.id.clone(), volume);
    }

    pub fn forget_volume(&self, id: &VolumeId) {
        self.world.lock().unwrap().volumes.remove(id);
    }

    pub fn fail(&self, call: &'static str, times: usize) {
        self.world.lock().unwrap().failing.insert(call, times);
    }

    /// Behaves as a host without control groups from now on.
    pub fn refuse_to_pause(&self) {
        self.freezer.store(false, Ordering::Relaxed);
    }

    fn check_freezer(&self) -> Result<(), BackendError> {
        if self.freezer.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (message, hint) = ("this host cannot pause sandboxes", "use another host");
        Err(BackendError::Unsupported { message: message.to_owned(), hint: Some(hint.to_owned()) })
    }

    pub fn ids(&self) -> Vec<SandboxId> {
        self.world.lock().unwrap().sandboxes.keys().cloned().collect()
    }

    pub fn was_asked_to(&self, call: &str) -> bool {
        self.times_asked_to(call) > 0
    }

    pub fn times_asked_to(&self, call: &str) -> usize {
        self.world.lock().unwrap().calls.iter().filter(|made| **made == call).count()
    }

    /// Every call so far, in order.
    pub fn calls(&self) -> Vec<&'static str> {
        self.world.lock().unwrap().calls.clone()
    }

    pub fn kill(&self, id: &SandboxId, cause: EndCause) {
        self.put_sandbox(id, FoundCondition::Dead);
        self.deaths.0.send(SandboxDeath { id: id.clone(), cause }).unwrap();
    }

    pub fn set_processes(&self, processes: Vec<ProcessStatus>) {
        self.world.lock().unwrap().processes = processes;
    }

    pub fn set_script(&self, script: impl Fn(&AgentRequest) -> Option<Vec<u8>> + Send + Sync + 'static) {
        self.world.lock().unwrap().script = Some(Arc::new(script));
    }

    fn files(&self, id: &SandboxId) -> FilesState {
        let kept = self.restarts.load(Ordering::Relaxed) && self.condition(id).is_some();
        if kept { FilesState::Kept } else { FilesState::Lost }
    }

    fn record_call(&self, call: &'static str) -> Result<(), BackendError> {
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
impl Backend for FakeBackend {
    fn name(&self) -> &'static str {
        "pretend"
    }

    async fn probe(&self) -> Result<BackendCapabilities, BackendError> {
        let most = BackendCapabilities {
            pause: true,
            attach: true,
            snapshot: true,
            ..BackendCapabilities::default()
        };
        let restart = self.restarts.load(Ordering::Relaxed);
        Ok(BackendCapabilities {
            volumes: true,
            restart,
            network: self.network.load(Ordering::Relaxed),
            ..most
        })
    }

    async fn create(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Enforced, BackendError> {
        self.record_call("create asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.record_call("create")?;
        self.put_sandbox(id, FoundCondition::Alive);
        Ok(Enforced { image: real(&spec.image), stand_in: stand_in(&spec.image), ..Enforced::default() })
    }

    async fn stop(&self, id: &SandboxId) -> Result<StoppedSandbox, BackendError> {
        self.record_call("stop")?;
        let files = self.files(id);
        match files {
            FilesState::Kept => self.put_sandbox(id, FoundCondition::Dead),
            FilesState::Lost => self.remove_sandbox(id),
        }
        Ok(StoppedSandbox { usage: SandboxUsage::default(), files })
    }

    async fn restart(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Enforced, BackendError> {
        self.record_call("restart asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.record_call("restart")?;
        match self.condition(id) {
            Some(FoundCondition::Dead) => self.put_sandbox(id, FoundCondition::Alive),
            _ => return Err(BackendError::Gone),
        }
        Ok(Enforced { image: real(&spec.image), ..Enforced::default() })
    }

    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.record_call("pause")?;
        self.check_freezer()?;
        self.put_sandbox(id, FoundCondition::Frozen);
        Ok(())
    }

    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.record_call("resume")?;
        self.check_freezer()?;
        self.condition(id).ok_or(BackendError::Gone)?;
        self.put_sandbox(id, FoundCondition::Alive);
        Ok(())
    }

    async fn destroy(&self, id: &SandboxId) -> Result<SandboxUsage, BackendError> {
        self.record_call("destroy")?;
        self.remove_sandbox(id);
        Ok(SandboxUsage::default())
    }

    async fn list_sandboxes(&self) -> Result<Vec<FoundSandbox>, BackendError> {
        self.record_call("list")?;
        let world = self.world.lock().unwrap();
        let files = if self.restarts.load(Ordering::Relaxed) { FilesState::Kept } else { FilesState::Lost };
        Ok(world
            .sandboxes
            .iter()
            .map(|(id, condition)| FoundSandbox { id: id.clone(), condition: *condition, files })
            .collect())
    }

    async fn dial_agent(&self, id: &SandboxId) -> Result<AgentStream, BackendError> {
        self.record_call("dial")?;
        if self.condition(id).is_none_or(|condition| condition == FoundCondition::Dead) {
            return Err(BackendError::Gone);
        }
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let world = self.world.lock().unwrap();
        let agent = FakeAgent {
            stream: theirs,
            processes: world.processes.clone(),
            script: world.script.clone(),
            entrypoint_end: self.entrypoint_end.subscribe(),
        };
        tokio::spawn(agent.serve());
        Ok(Box::new(ours))
    }

    async fn usage(&self, _id: &SandboxId) -> Result<SandboxUsage, BackendError> {
        Ok(self.world.lock().unwrap().usage)
    }

    async fn attach_mounts(
        &self,
        _id: &SandboxId,
        mounts: &[MountSpec],
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("attach")?;
        self.volume_gate.acquire().await.unwrap().forget();
        Ok(mounts.iter().map(|mount| (format!("mount {}", mount.target), "yes".to_owned())).collect())
    }

    async fn create_volume(&self, volume: &Volume) -> Result<(), BackendError> {
        self.record_call("make volume asked")?;
        self.volume_gate.acquire().await.unwrap().forget();
        self.record_call("make volume")?;
        self.world.lock().unwrap().volumes.insert(volume.id.clone(), volume.clone());
        Ok(())
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError> {
        self.record_call("remove volume asked")?;
        self.volume_gate.acquire().await.unwrap().forget();
        self.record_call("remove volume")?;
        self.world.lock().unwrap().volumes.remove(id);
        Ok(())
    }

    async fn list_volumes(&self) -> Result<Vec<FoundVolume>, BackendError> {
        let world = self.world.lock().unwrap();
        let found = |volume: &Volume| FoundVolume { volume: volume.clone(), used: domain::Bytes(0) };
        Ok(world.volumes.values().map(found).collect())
    }

    async fn volume_sizes(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError> {
        let world = self.world.lock().unwrap();
        let known = ids.iter().filter(|id| world.volumes.contains_key(*id));
        Ok(known.map(|id| (id.clone(), Bytes::from_mib(1))).collect())
    }

    async fn resize(
        &self,
        _id: &SandboxId,
        resources: &ResourceLimits,
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("resize")?;
        self.resizes.acquire().await.unwrap().forget();
        Ok(vec![("memory".to_owned(), format!("{:?}", resources.memory))])
    }

    async fn resolve_image(&self, image: &str) -> Result<ResolvedImage, BackendError> {
        self.record_call("resolve")?;
        Ok(ResolvedImage { name: real(image), stand_in: stand_in(image) })
    }

    async fn connect_network(
        &self,
        _id: &SandboxId,
        network: NetworkAccess,
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("connect")?;
        Ok(vec![("network".to_owned(), format!("{network:?}"))])
    }

    async fn create_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<SnapshotContent, BackendError> {
        self.record_call("snapshot asked")?;
        self.snapshot_gate.acquire().await.unwrap().forget();
        self.record_call("snapshot")?;
        self.condition(id).ok_or(BackendError::Gone)?;
        self.put_snapshot(snapshot);
        Ok(kept_files())
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError> {
        self.record_call("forget")?;
        self.world.lock().unwrap().snapshots.remove(snapshot);
        Ok(())
    }

    async fn list_snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError> {
        let complete = |id: SnapshotId| FoundSnapshot { id, stage: SnapshotStage::Complete(kept_files()) };
        Ok(self.snapshot_ids().into_iter().map(complete).collect())
    }

    fn images(&self) -> Option<&dyn Images> {
        Some(self)
    }

    fn watch_deaths(&self) -> mpsc::UnboundedReceiver<SandboxDeath> {
        // After a restart these tests report no deaths.
        let first = self.deaths.1.lock().unwrap().take();
        first.unwrap_or_else(|| mpsc::unbounded_channel().1)
    }
}

/// Every image exists except one, whose pull never ends.
#[async_trait::async_trait]
impl Images for FakeBackend {
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError> {
        Ok(Vec::new())
    }

    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError> {
        Ok((name != ABSENT_IMAGE).then(ImageInfo::default))
    }

    fn may_pull(&self, _name: &str) -> bool {
        true
    }

    async fn pull(&self, _pull: ImagePull<'_>) -> Result<ImageInfo, BackendError> {
        self.record_call("pull")?;
        std::future::pending().await
    }

    async fn remove(&self, _name: &str) -> Result<FreedSpace, BackendError> {
        Ok(FreedSpace::default())
    }

    async fn import(&self, name: &str, mut archive: ArchiveStream<'_>) -> Result<ImageInfo, BackendError> {
        self.record_call("import")?;
        let mut content = Vec::new();
        let read = archive.read_to_end(&mut content).await;
        read.map_err(|source| BackendError::Io { action: "read an archive", source })?;
        Ok(ImageInfo { name: name.to_owned(), bytes: content.len() as u64, ..ImageInfo::default() })
    }

    async fn commit_snapshot(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError> {
        self.record_call("commit")?;
        let known = self.world.lock().unwrap().snapshots.contains(snapshot);
        assert!(known, "the snapshot to make an image from does not exist");
        Ok(ImageInfo { name: name.to_owned(), ..ImageInfo::default() })
    }

    async fn collect_unused(&self) -> Result<FreedSpace, BackendError> {
        Ok(FreedSpace::default())
    }
}

fn kept_files() -> SnapshotContent {
    SnapshotContent { image: "real host".to_owned(), size: Bytes::from_mib(10), disk: Bytes::from_mib(100) }
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
struct FakeAgent {
    stream: DuplexStream,
    processes: Vec<ProcessStatus>,
    script: Option<Script>,
    entrypoint_end: watch::Receiver<Option<ExitReason>>,
}

impl FakeAgent {
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
            AgentRequest::Ping | AgentRequest::Adopt { .. } => self.say(&AgentReply::Ok).await,
            AgentRequest::Start(_) => self.say(&AgentReply::Started { pid: 7 }).await,
            AgentRequest::Processes => self.say(&AgentReply::Statuses(self.processes.clone())).await,
            AgentRequest::Status { process } => self.say(&AgentReply::Status(running(&process))).await,
            AgentRequest::Follow { process, .. } => {
                self.say(&AgentReply::Status(running(&process))).await;
                let end = *self.entrypoint_end.wait_for(Option::is_some).await.unwrap();
                self.say(&AgentReply::Ended(ended(end.unwrap()))).await;
            }
            _ => self.say(&AgentReply::Fault(fault(FaultKind::Unsupported))).await,
        }
    }

    async fn request(&mut self) -> Option<AgentRequest> {
        let mut decoder = FrameDecoder::new();
        let mut bytes = [0; 4096];
        loop {
            if let Some(frame) = decoder.next_frame().unwrap() {
                return Some(frame.parse_message::<VersionedRequest>().unwrap().request);
            }
            match self.stream.read(&mut bytes).await {
                Ok(count) if count > 0 => decoder.feed(&bytes[..count]),
                _ => return None,
            }
        }
    }

    async fn say(&mut self, message: &impl serde::Serialize) {
        // The client may not wait for the answer.
        self.stream.write_all(&encoded(&[Frame::from_message(message)])).await.ok();
    }
}

pub fn encoded(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    bytes
}

pub fn fault(kind: FaultKind) -> Fault {
    Fault { kind, errno: None, operation: "test".to_owned(), subject: "subject".to_owned() }
}

pub fn running(process: &str) -> ProcessStatus {
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

pub fn ended(exit: ExitReason) -> ProcessEnd {
    ProcessEnd { exit, written: 0, ended_ms: 2, duration_ms: 1, user_ms: 0, system_ms: 0, max_rss_kib: 0 }
}
