//! The state that all parts of the service share.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use backend::{BackendCapabilities, BackendError, SandboxDeath, SharedBackend};
use domain::{FilesState, Owner, ProcessId, SandboxId, Snapshot};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;

use crate::agent::client::AgentClient;
use crate::agent::translate;
use crate::backend_check::BackendCheck;
use crate::clock::{self, Clock};
use crate::exec::terminals::TerminalRegistry;
use crate::images::{ImagePulls, LoggedStandIns};
use crate::pools::PoolRegistry;
use crate::sandboxes::detached_creates::DetachedCreates;
use crate::sandboxes::driver::{CommandReply, DriverCommand};
use crate::sandboxes::hooks;
use crate::sandboxes::reaper::ExpirySchedule;
use crate::sandboxes::registry::{SandboxHandle, SandboxRegistry};
use crate::sandboxes::sandbox_keys::KeyIndex;
use crate::snapshots::SnapshotIndex;
use crate::store::{SandboxRecord, Store, StoredState, StoredVolume};
use crate::telemetry::events::FeedBuffer;
use crate::telemetry::recent_errors::RecentErrors;
use crate::telemetry::usage_history::UsageHistory;
use crate::tenancy::api_keys::ApiKeys;
use crate::tenancy::operator::RecentActions;
use crate::tenancy::tokens::{TokenMint, random_bytes};
use crate::vaults::VaultIndex;
use crate::volumes::VolumeIndex;
use crate::{ProcessStatus, SandboxUsage, ServiceConfig, ServiceError};

/// How long a backend may take to remove a sandbox.
const DESTROY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a backend may take to report the usage of a sandbox.
const USAGE_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Core {
    /// A reload replaces the whole value; read it with [`Core::config`].
    config: RwLock<Arc<ServiceConfig>>,
    pub(crate) host: HostLink,
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) catalog: Catalog,
    pub(crate) terminals: TerminalRegistry,
    pub(crate) vaults: VaultIndex,
    pub(crate) telemetry: Telemetry,
    pub(crate) tenancy: Tenancy,
    pub(crate) tasks: CoreTasks,
}

/// The backend that makes the sandboxes, and what is known of its host.
pub(crate) struct HostLink {
    pub(crate) backend: SharedBackend,
    pub(crate) capabilities: BackendCapabilities,
    pub(crate) boot_id: String,
    pub(crate) check: BackendCheck,
}

/// The tasks of the service, which end when it stops.
#[derive(Default)]
pub(crate) struct CoreTasks {
    stop: CancellationToken,
    tracker: TaskTracker,
}

/// The sandboxes of all owners, how keys lead to them, and when they end.
#[derive(Default)]
pub(crate) struct Lifecycle {
    pub(crate) registry: SandboxRegistry,
    pub(crate) names: KeyIndex,
    pub(crate) detached_creates: DetachedCreates,
    pub(crate) schedule: ExpirySchedule,
}

/// What sandboxes are made from and what they use.
pub(crate) struct Catalog {
    pub(crate) snapshots: SnapshotIndex,
    pub(crate) volumes: VolumeIndex,
    pub(crate) pools: PoolRegistry,
    /// The images that are being fetched.
    pub(crate) pulls: ImagePulls,
    pub(crate) logged_stand_ins: LoggedStandIns,
}

/// What is reported about sandboxes.
pub(crate) struct Telemetry {
    pub(crate) events: FeedBuffer,
    pub(crate) recent_errors: RecentErrors,
    pub(crate) history: UsageHistory,
}

/// Who may use the server, and what the operator did in the place of others.
pub(crate) struct Tenancy {
    pub(crate) keys: RwLock<ApiKeys>,
    pub(crate) mint: TokenMint,
    /// The recent accesses of the operator.
    pub(crate) acts: RecentActions,
}

impl HostLink {
    pub(crate) async fn usage_of(&self, id: &SandboxId) -> Result<SandboxUsage, ServiceError> {
        self.ask_backend("measure", id, USAGE_TIMEOUT, self.backend.usage(id)).await
    }

    /// Waits for the backend for a limited time.
    pub(crate) async fn ask_backend<T>(
        &self,
        action: &'static str,
        id: &SandboxId,
        limit: Duration,
        work: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, ServiceError> {
        let late = || BackendError::Io { action: "finish in time", source: ErrorKind::TimedOut.into() };
        let done = tokio::time::timeout(limit, work).await.unwrap_or_else(|_elapsed| Err(late()));
        let backend = self.backend.name();
        let failed =
            |source| ServiceError::Backend { backend, action, id: id.clone(), source: Box::new(source) };
        done.map_err(failed)
    }
}

impl CoreTasks {
    /// Runs a task, which must end when the service stops.
    pub(crate) fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.tracker.spawn(task)
    }

    /// Returns when the service stops.
    pub(crate) fn cancelled(&self) -> WaitForCancellationFuture<'_> {
        self.stop.cancelled()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Asks all tasks to end, and waits until they have.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

impl Core {
    /// Opens the state on disk and probes the backend; no task is started yet.
    pub(crate) async fn open(
        config: ServiceConfig,
        backend: SharedBackend,
        clock: Clock,
    ) -> Result<(Arc<Self>, Vec<SandboxRecord>, Vec<Snapshot>, Vec<StoredVolume>), ServiceError> {
        let boot_id = clock::read_boot_id().map_err(io_error("read the boot id"))?;
        let mint = TokenMint::open(&config.state_dir).map_err(io_error("open the server's secret"))?;
        let (store, kept) = open_store(&config.state_dir).await?;
        let name = backend.name();
        let probed = backend.probe().await;
        let capabilities = probed.map_err(|source| ServiceError::Host {
            backend: name,
            action: "probe this host",
            source: Box::new(source),
        })?;
        let capabilities = capabilities.limited_to(&*backend);
        let versions: Vec<String> =
            capabilities.host_versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        tracing::info!(versions = versions.join(", "), "probed the language versions of image `host`");
        let metric_owners = config.metric_owners;
        let pools = PoolRegistry::new(&config.pools, kept.pools, clock.now().wall);
        let core = Self {
            config: RwLock::new(Arc::new(config)),
            host: HostLink { backend, capabilities, boot_id, check: BackendCheck::default() },
            store,
            clock,
            lifecycle: Lifecycle::default(),
            catalog: Catalog {
                snapshots: SnapshotIndex::default(),
                volumes: VolumeIndex::default(),
                pools,
                pulls: ImagePulls::default(),
                logged_stand_ins: LoggedStandIns::default(),
            },
            terminals: TerminalRegistry::default(),
            vaults: VaultIndex::new(kept.vaults),
            telemetry: Telemetry {
                events: FeedBuffer::new(kept.events),
                recent_errors: RecentErrors::default(),
                history: UsageHistory::new(kept.hours, metric_owners),
            },
            tenancy: Tenancy {
                keys: RwLock::new(ApiKeys::new(kept.keys)),
                mint,
                acts: RecentActions::default(),
            },
            tasks: CoreTasks::default(),
        };
        Ok((Arc::new(core), kept.records, kept.snapshots, kept.volumes))
    }

    /// The current settings.
    pub(crate) fn config(&self) -> Arc<ServiceConfig> {
        Arc::clone(&self.config.read().expect("replacing the settings does not panic"))
    }

    /// Replaces the settings. The state directory and the pools keep their values from the start.
    pub(crate) fn set_config(&self, config: ServiceConfig) {
        let mut current = self.config.write().expect("replacing the settings does not panic");
        let (state_dir, pools) = (current.state_dir.clone(), current.pools.clone());
        *current = Arc::new(ServiceConfig { state_dir, pools, ..config });
    }

    /// Every sandbox of one owner, or of all, newest first.
    pub(crate) fn list_newest_first(&self, owner: Option<&Owner>) -> Vec<Arc<SandboxHandle>> {
        let mut handles = self.lifecycle.registry.all();
        handles.retain(|handle| owner.is_none_or(|owner| handle.owner == *owner));
        handles.sort_unstable_by(|one, other| other.created.cmp(&one.created).then(one.id.cmp(&other.id)));
        handles
    }

    /// Finds a sandbox of this owner. A sandbox of another owner is reported as not found.
    pub(crate) fn find_sandbox(
        &self,
        owner: &Owner,
        id: &SandboxId,
    ) -> Result<Arc<SandboxHandle>, ServiceError> {
        let handle = self.lifecycle.registry.find(id).filter(|handle| handle.owner == *owner);
        handle.ok_or_else(|| ServiceError::NoSandbox(id.clone()))
    }

    /// Finds a sandbox of one owner, or of any owner.
    pub(crate) fn lookup_sandbox(
        &self,
        owner: Option<&Owner>,
        id: &SandboxId,
    ) -> Result<Arc<SandboxHandle>, ServiceError> {
        match owner {
            Some(owner) => self.find_sandbox(owner, id),
            None => self.lifecycle.registry.find(id).ok_or_else(|| ServiceError::NoSandbox(id.clone())),
        }
    }

    /// Sends a command to a driver and waits until it is carried out.
    pub(crate) async fn send_command<T>(
        &self,
        handle: &SandboxHandle,
        command: impl FnOnce(CommandReply<T>) -> DriverCommand,
    ) -> Result<T, ServiceError> {
        let (answer, wait) = oneshot::channel();
        let gone = || match self.tasks.is_stopping() {
            true => ServiceError::Stopping,
            false => ServiceError::NoSandbox(handle.id.clone()),
        };
        handle.mailbox.send(command(answer)).await.map_err(|_unsent| gone())?;
        wait.await.unwrap_or_else(|_dropped| Err(gone()))
    }

    pub(crate) async fn read_processes(
        &self,
        agent: &AgentClient,
    ) -> Result<Vec<ProcessStatus>, ServiceError> {
        let statuses =
            agent.request::<Vec<wire::process::ProcessStatus>>(wire::AgentRequest::Processes).await?;
        let statuses = statuses.map_err(|fault| agent.fault_error(fault))?;
        let statuses = statuses.into_iter().map(translate::process_status).collect::<Result<_, _>>();
        statuses.map_err(|source| agent.agent_error("answer", source))
    }

    /// Whether anything but the main process runs in a sandbox. An agent that does not answer is assumed to run
    /// something; a dead agent runs nothing.
    pub(crate) async fn runs_something(&self, handle: &SandboxHandle) -> bool {
        if handle.is_dead() {
            return false;
        }
        match self.ask_what_runs(handle).await {
            Ok(running) => running,
            Err(error) if error.is_gone() => false,
            Err(error) => {
                tracing::debug!(sandbox = %handle.id, %error, "failed to ask the agent what runs; treating the sandbox as busy");
                true
            }
        }
    }

    /// Processes that commands left running count, and so do jobs of sessions.
    async fn ask_what_runs(&self, handle: &SandboxHandle) -> Result<bool, ServiceError> {
        let processes = self.read_processes(&handle.agent).await?;
        let counts = |status: &&ProcessStatus| {
            !hooks::is_hook_run(status) && Some(&status.process) != handle.entrypoint.as_ref()
        };
        if processes.iter().filter(counts).any(|status| status.ended.is_none() || status.left) {
            return Ok(true);
        }
        let sessions =
            handle.agent.request::<Vec<wire::process::SessionStatus>>(wire::AgentRequest::Sessions).await?;
        match sessions {
            Ok(sessions) => Ok(sessions.iter().any(|session| session.left)),
            Err(fault) if fault.kind == wire::FaultKind::Unsupported => Ok(false),
            Err(fault) => Err(handle.agent.fault_error(fault)),
        }
    }

    /// Removes a sandbox with everything that belongs to it, and records its final usage.
    pub(crate) async fn destroy_in_backend(&self, id: &SandboxId) -> Result<(), ServiceError> {
        let last =
            self.host.ask_backend("destroy", id, DESTROY_TIMEOUT, self.host.backend.destroy(id)).await?;
        self.telemetry.history.end_metering(id, self.clock.now(), last);
        Ok(())
    }

    /// Ends the remaining processes of a dead sandbox, records its final usage, and returns whether its files still
    /// exist.
    pub(crate) async fn stop_in_backend(&self, id: &SandboxId) -> Result<FilesState, ServiceError> {
        let stopped = self.host.ask_backend("stop", id, DESTROY_TIMEOUT, self.host.backend.stop(id)).await?;
        self.telemetry.history.end_metering(id, self.clock.now(), stopped.usage);
        Ok(stopped.files)
    }

    /// Forwards deaths from the backend to the drivers.
    pub(crate) async fn forward_deaths(self: Arc<Self>, mut deaths: mpsc::UnboundedReceiver<SandboxDeath>) {
        loop {
            let death = tokio::select! {
                death = deaths.recv() => death,
                () = self.tasks.cancelled() => return,
            };
            let Some(death) = death else { return };
            match self.lifecycle.registry.find(&death.id) {
                Some(handle) => {
                    handle.death.send_replace(Some(death.cause));
                }
                None => self.handle_warm_death(&death),
            }
        }
    }
}

/// Opening blocks on the disk, so it runs on a blocking thread.
async fn open_store(state_dir: &Path) -> Result<(Store, StoredState), ServiceError> {
    let path = state_dir.join("coracle.db");
    let opened = tokio::task::spawn_blocking(move || Store::open(&path)).await;
    let opened = opened.expect("opening the store does not panic");
    opened.map_err(|source| ServiceError::Store { action: "be opened", source })
}

pub(crate) fn new_process_id() -> Result<ProcessId, ServiceError> {
    draw_entropy().map(ProcessId::from_entropy)
}

/// Random bytes for a new id.
pub(crate) fn draw_entropy() -> Result<[u8; 16], ServiceError> {
    random_bytes().map_err(io_error("draw a random id"))
}

pub(crate) fn io_error(action: &'static str) -> impl Fn(std::io::Error) -> ServiceError {
    move |source| ServiceError::Io { action, source }
}
