//! A backend without sandboxes. It records its calls and produces, on demand, situations that a real backend rarely
//! does: half-made sandboxes, unknown sandboxes, deaths, failures, a malicious agent. It proves nothing about isolation;
//! other tests do that. Its agents are fake too, unless [`FakeBackend::with_agents`] names the program of a real one.

mod agent;
mod calls;
mod features;
mod images;
mod network;
mod vaults;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use backend::{
    ActiveVault, BackendError, FoundCondition, NetworkCounters, NetworkRecord, ResolvedSpec, SandboxDeath,
    SandboxUsage,
};
use domain::{EndCause, FilesState, NetworkPolicy, SandboxId, SnapshotId, Volume, VolumeId};
use tokio::io::DuplexStream;
use tokio::sync::{Semaphore, mpsc, watch};
use wire::AgentRequest;
use wire::process::{ExitReason, ProcessStatus};

use crate::unjailed_agent::{AgentSetup, UnjailedAgent};

pub use agent::{encoded, ended, fault, running};

pub struct FakeBackend {
    world: Mutex<FakeState>,
    /// The program of the real agent, without a jail, that each sandbox gets instead of a fake one.
    agent_program: Option<PathBuf>,
    /// The number of sandboxes.
    population: watch::Sender<usize>,
    pub deaths: (mpsc::UnboundedSender<SandboxDeath>, Mutex<Option<mpsc::UnboundedReceiver<SandboxDeath>>>),
    /// Creates wait for a permit.
    pub gate: Semaphore,
    /// Each removal takes a permit.
    pub destroy_gate: Semaphore,
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
    /// Whether networks can be filtered.
    pub filtered: AtomicBool,
    /// Setting a policy waits for a permit.
    pub policy_gate: Semaphore,
    /// How many records were added to the logs of networks.
    network_records: watch::Sender<usize>,
    /// Whether sandboxes can be paused and resumed.
    freezer: AtomicBool,
    /// Whether it offers the optional traits of a backend.
    pub optional_traits: AtomicBool,
    /// How the main processes ended; `None` while they run.
    pub entrypoint_end: watch::Sender<Option<ExitReason>>,
}

#[derive(Default)]
struct FakeState {
    sandboxes: HashMap<SandboxId, FoundCondition>,
    /// The real agents of living sandboxes. Their files end with them.
    agents: HashMap<SandboxId, UnjailedAgent>,
    snapshots: BTreeSet<SnapshotId>,
    /// The names of all calls, in order.
    calls: Vec<&'static str>,
    /// How many of the next calls with this name fail.
    failing: BTreeMap<&'static str, usize>,
    /// The processes that the agent reports.
    processes: Vec<ProcessStatus>,
    script: Option<Script>,
    /// What serves connections instead of the fake agent.
    agent: Option<AgentTask>,
    volumes: BTreeMap<VolumeId, Volume>,
    /// The usage that every sandbox reports.
    usage: SandboxUsage,
    open_files: Vec<(SandboxId, u64)>,
    policies: HashMap<SandboxId, Arc<NetworkPolicy>>,
    vaults: HashMap<SandboxId, Arc<ActiveVault>>,
    network_logs: HashMap<SandboxId, Vec<NetworkRecord>>,
    network_counters: NetworkCounters,
    /// The spec that the newest sandbox was made or restarted from.
    newest_spec: Option<ResolvedSpec>,
}

/// The image that does not exist.
pub const ABSENT_IMAGE: &str = "absent";

/// The bytes that the agent sends after its greeting, if the script answers this request; no bytes mean that the agent
/// stays silent.
pub type Script = Arc<dyn Fn(&AgentRequest) -> Option<Vec<u8>> + Send + Sync>;

/// Serves the agent's side of one connection in a task.
type AgentTask = Box<dyn Fn(DuplexStream) + Send + Sync>;

impl FakeBackend {
    pub fn new() -> Arc<Self> {
        Arc::new(Self::make(None))
    }

    /// Each sandbox has a real agent, so that commands run and files exist, though on this host.
    pub fn with_agents(program: PathBuf) -> Arc<Self> {
        Arc::new(Self::make(Some(program)))
    }

    fn make(agent_program: Option<PathBuf>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self {
            world: Mutex::default(),
            agent_program,
            population: watch::Sender::new(0),
            deaths: (sender, Mutex::new(Some(receiver))),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            destroy_gate: Semaphore::new(Semaphore::MAX_PERMITS),
            resizes: Semaphore::new(Semaphore::MAX_PERMITS),
            snapshot_gate: Semaphore::new(Semaphore::MAX_PERMITS),
            volume_gate: Semaphore::new(Semaphore::MAX_PERMITS),
            restarts: AtomicBool::new(true),
            network: AtomicBool::new(true),
            filtered: AtomicBool::new(true),
            policy_gate: Semaphore::new(Semaphore::MAX_PERMITS),
            network_records: watch::Sender::new(0),
            freezer: AtomicBool::new(true),
            optional_traits: AtomicBool::new(true),
            entrypoint_end: watch::Sender::new(None),
        }
    }

    pub fn put_sandbox(&self, id: &SandboxId, condition: FoundCondition) {
        let mut world = self.world.lock().unwrap();
        if condition == FoundCondition::Dead {
            world.agents.remove(id);
        }
        world.sandboxes.insert(id.clone(), condition);
        self.population.send_replace(world.sandboxes.len());
    }

    pub fn remove_sandbox(&self, id: &SandboxId) {
        let mut world = self.world.lock().unwrap();
        world.agents.remove(id);
        world.sandboxes.remove(id);
        world.policies.remove(id);
        world.vaults.remove(id);
        self.population.send_replace(world.sandboxes.len());
    }

    /// Puts a living sandbox, with its agent if agents are real.
    fn start_sandbox(&self, id: &SandboxId) {
        if let Some(program) = &self.agent_program {
            let agent = AgentSetup::new().start(program);
            self.world.lock().unwrap().agents.insert(id.clone(), agent);
        }
        self.put_sandbox(id, FoundCondition::Alive);
    }

    fn agent_socket(&self, id: &SandboxId) -> Option<PathBuf> {
        self.world.lock().unwrap().agents.get(id).map(UnjailedAgent::socket)
    }

    /// Ends the real agents, though their sandboxes seem to live. Nothing else ends them before the test does.
    pub fn kill_agents(&self) {
        self.world.lock().unwrap().agents.clear();
    }

    /// Freezes the real agent of a sandbox, so that it keeps its connections but does not answer.
    pub fn freeze_agent(&self, id: &SandboxId) {
        self.world.lock().unwrap().agents.get(id).expect("it has a real agent").freeze();
    }

    /// The directory in which the commands of a sandbox with a real agent start.
    pub fn home(&self, id: &SandboxId) -> PathBuf {
        self.world.lock().unwrap().agents.get(id).expect("it has a real agent").home()
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

    pub fn set_open_files(&self, counts: Vec<(SandboxId, u64)>) {
        self.world.lock().unwrap().open_files = counts;
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

    /// The spec that the newest sandbox was made or restarted from.
    pub fn newest_spec(&self) -> Option<ResolvedSpec> {
        self.world.lock().unwrap().newest_spec.clone()
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

    /// From now on, every connection to an agent is served by `serve`, from the request on.
    pub fn set_agent<F: Future<Output = ()> + Send + 'static>(
        &self,
        serve: impl Fn(DuplexStream) -> F + Send + Sync + 'static,
    ) {
        let spawn = move |stream| drop(tokio::spawn(serve(stream)));
        self.world.lock().unwrap().agent = Some(Box::new(spawn));
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
