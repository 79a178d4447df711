//! The state that all parts of the service share, and how a create is admitted: warm sandbox, quota,
//! eviction, driver.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant, SystemTime};

use backend::{BackendCapabilities, BackendError, SandboxDeath, SharedBackend};
use domain::{
    Bytes, EndCause, FilesState, OnDeath, Owner, Phase, ProcessId, ResourceLimits, SandboxId, SandboxKey,
    Snapshot,
};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::agent::client::AgentClient;
use crate::agent::translate;
use crate::clock::{self, Clock};
use crate::error::error_chain;
use crate::exec::terminals::TerminalRegistry;
use crate::images::ImagePulls;
use crate::pools::{PoolRegistry, ReservedWarm, RoomWaiter};
use crate::sandboxes::driver::{CommandReply, Driver, DriverCommand};
use crate::sandboxes::hooks;
use crate::sandboxes::reaper::ExpirySchedule;
use crate::sandboxes::registry::{NoRoom, RoomRequirement, SandboxHandle, SandboxRegistry};
use crate::sandboxes::sandbox_keys::{KeyIndex, chosen_name};
use crate::snapshots::{SnapshotGuard, SnapshotIndex};
use crate::store::{SandboxRecord, Store, StoredState, StoredVolume};
use crate::telemetry::events::FeedBuffer;
use crate::telemetry::recent_errors::RecentErrors;
use crate::telemetry::service_metrics;
use crate::telemetry::usage_history::UsageHistory;
use crate::tenancy::api_keys::{ApiKey, ApiKeys, StoredApiKey};
use crate::tenancy::operator::RecentActions;
use crate::tenancy::quota::{OwnerQuota, ResourceCost};
use crate::tenancy::tokens::{TokenMint, random_bytes};
use crate::volumes::VolumeIndex;
use crate::{
    CreateSandboxRequest, Enforced, ImageSource, ProcessStatus, ResumeOutcome, Sandbox, SandboxRevival,
    SandboxUsage, Secret, ServiceConfig, ServiceError,
};

/// How long a backend may take to remove a sandbox.
const DESTROY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a backend may take to report the usage of a sandbox.
const USAGE_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Core {
    /// A reload replaces the whole value; read it with [`Core::config`].
    config: RwLock<Arc<ServiceConfig>>,
    pub(crate) backend: SharedBackend,
    pub(crate) capabilities: BackendCapabilities,
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) boot_id: String,
    pub(crate) registry: SandboxRegistry,
    pub(crate) names: KeyIndex,
    pub(crate) pools: PoolRegistry,
    pub(crate) volumes: VolumeIndex,
    pub(crate) events: FeedBuffer,
    /// The recent accesses of the operator.
    pub(crate) acts: RecentActions,
    pub(crate) recent_errors: RecentErrors,
    pub(crate) snapshots: SnapshotIndex,
    pub(crate) terminals: TerminalRegistry,
    pub(crate) pulls: ImagePulls,
    pub(crate) history: UsageHistory,
    pub(crate) schedule: ExpirySchedule,
    pub(crate) mint: TokenMint,
    pub(crate) keys: RwLock<ApiKeys>,
    /// Cancelled to end every task.
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
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
            backend,
            capabilities,
            store,
            clock,
            boot_id,
            registry: SandboxRegistry::default(),
            names: KeyIndex::default(),
            pools,
            volumes: VolumeIndex::default(),
            events: FeedBuffer::new(kept.events),
            acts: RecentActions::default(),
            recent_errors: RecentErrors::default(),
            snapshots: SnapshotIndex::default(),
            terminals: TerminalRegistry::default(),
            pulls: ImagePulls::default(),
            history: UsageHistory::new(kept.hours, metric_owners),
            schedule: ExpirySchedule::default(),
            mint,
            keys: RwLock::new(ApiKeys::new(kept.keys)),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
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

    /// Creates a sandbox, from a warm one if one fits; otherwise it is recorded first and then made.
    pub(crate) async fn create_sandbox(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&SandboxKey>,
        request: CreateSandboxRequest,
    ) -> Result<Sandbox, ServiceError> {
        self.create_successor(owner, key, request, None).await
    }

    /// Creates a sandbox like [`Core::create_sandbox`]. If it succeeds a dead one, its first event says so.
    pub(crate) async fn create_successor(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&SandboxKey>,
        mut request: CreateSandboxRequest,
        revival: Option<SandboxRevival>,
    ) -> Result<Sandbox, ServiceError> {
        let cause = revival.and_then(|revival| revival.how.cause_of_successor());
        if self.stop.is_cancelled() {
            return Err(ServiceError::Stopping);
        }
        let _files = self.prepare_request(owner, &mut request).await?;
        // How long it took to fetch the image says nothing about this server.
        let began = Instant::now();
        let created = self.create_prepared(owner, key, request, cause).await?;
        service_metrics::record_create_time(began.elapsed());
        Ok(created)
    }

    async fn create_prepared(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&SandboxKey>,
        mut request: CreateSandboxRequest,
        cause: Option<EndCause>,
    ) -> Result<Sandbox, ServiceError> {
        let nothing_to_start =
            request.spec.snapshot.is_none() && self.resolve_entrypoint(&mut request.spec).await;
        let record = |request| {
            let record = self.new_record(owner, key, request)?;
            let entrypoint = record.entrypoint.filter(|_| !nothing_to_start);
            Ok::<_, ServiceError>(SandboxRecord { entrypoint, ..record })
        };
        self.make_room(owner).await;
        if let Some(warm) = self.reserve_warm(&request).await {
            match self.start_sandbox(record(request.clone())?, Some(warm), cause).await {
                Err(error) if should_retry_without_warm(&error) => {
                    tracing::warn!(error = %error_chain(&error), "failed to use a warm sandbox; creating a new one");
                }
                brought => return brought,
            }
        }
        self.start_sandbox(record(request)?, None, cause).await
    }

    /// Completes a request and fetches its image. Refuses one that can never be fulfilled, before
    /// anything is changed. The snapshot is kept until the returned guard is dropped.
    pub(crate) async fn prepare_request(
        self: &Arc<Self>,
        owner: &Owner,
        request: &mut CreateSandboxRequest,
    ) -> Result<Option<SnapshotGuard>, ServiceError> {
        if request.spec.on_death == Some(OnDeath::Restart) && !self.capabilities.restart {
            return Err(ServiceError::NoRestarts);
        }
        let credentials = match request.source.clone() {
            ImageSource::Snapshot(id) => return self.apply_snapshot(owner, id, request).map(Some),
            ImageSource::Named { name, credentials } => {
                request.spec.image = name;
                credentials
            }
            ImageSource::Pool(name) => {
                self.complete_from_pool(&name, request)?;
                None
            }
        };
        request.spec.snapshot = None;
        self.ensure_image(owner, &request.spec, credentials).await?;
        Ok(None)
    }

    /// Has a driver make the sandbox of a new record, from a warm one if given.
    async fn start_sandbox(
        self: &Arc<Self>,
        mut record: SandboxRecord,
        warm: Option<ReservedWarm>,
        cause: Option<EndCause>,
    ) -> Result<Sandbox, ServiceError> {
        if let Some(warm) = &warm {
            warm.mark_record(&mut record);
        }
        let (owner, id) = (record.sandbox.owner.clone(), record.sandbox.id.clone());
        let uses = self.claim_volumes(&owner, &id, &mut record.sandbox.spec.mounts).await?;
        let (handle, driver) = Driver::new(self, record);
        let room = if warm.is_some() {
            RoomRequirement::OfWarm
        } else {
            RoomRequirement::Below(self.config().sandboxes)
        };
        self.admit_sandbox(&handle, room).await?;
        uses.keep_until_end();
        let (reply, claim) = oneshot::channel();
        // If the caller disconnects while the hook before the entrypoint runs, the hook is not waited for.
        let gone = handle.abandoned.clone().drop_guard();
        self.tasks.spawn(driver.create(warm.map(ReservedWarm::into_claimed), cause, reply));
        let claim = claim.await;
        gone.disarm();
        claim.unwrap_or(Err(ServiceError::Stopping)).map(|claim| claim.into_sandbox())
    }

    /// Adds a new sandbox to the registry if there is room for it on the server and in its owner's quota. To make room,
    /// a dead sandbox is evicted first, then a warm one, then a parked one. A dead sandbox that still has its files is
    /// evicted only for its own owner.
    async fn admit_sandbox(
        self: &Arc<Self>,
        handle: &Arc<SandboxHandle>,
        room: RoomRequirement,
    ) -> Result<(), ServiceError> {
        let limit = self.config().sandboxes;
        self.check_quota_alone(&handle.owner, handle.cost)?;
        let quota = self.quota_left_by_disks(&handle.owner);
        let mut waiting = None;
        loop {
            let (evicted, refusal) = match self.registry.add(Arc::clone(handle), room, &quota) {
                Ok(()) => return Ok(()),
                Err(NoRoom::Full) => {
                    waiting.get_or_insert_with(|| RoomWaiter::begin(self));
                    let owner = &handle.owner;
                    let evicted = self.evict_dead(owner).await
                        || self.evict_warm().await
                        || self.evict_parked(None).await
                        || self.evict_restartable(owner, None).await;
                    (evicted, ServiceError::TooManySandboxes { limit })
                }
                Err(NoRoom::OverQuota(excess)) => {
                    let owner = handle.owner.clone();
                    (
                        self.evict_for_quota(&owner, excess.what, None).await,
                        ServiceError::OverQuota { owner, excess },
                    )
                }
            };
            if !evicted {
                return Err(refusal);
            }
        }
    }

    /// Restarts a dead sandbox. Parked sandboxes of the same owner are evicted if it needs room.
    pub(crate) async fn restart_sandbox(
        &self,
        handle: &Arc<SandboxHandle>,
    ) -> Result<ResumeOutcome, ServiceError> {
        loop {
            match self.send_command(handle, DriverCommand::Restart).await {
                Err(ServiceError::OverQuota { owner, excess })
                    if self.evict_for_quota(&owner, excess.what, Some(&handle.id)).await => {}
                restarted => return restarted,
            }
        }
    }

    /// Refuses a request that would exceed the quota even if the owner had nothing else, since deleting would not help.
    fn check_quota_alone(&self, owner: &Owner, cost: ResourceCost) -> Result<(), ServiceError> {
        match cost.exceeds(&self.config().quotas.quota_of(owner)) {
            Some(excess) => Err(ServiceError::BeyondQuota { owner: owner.clone(), excess }),
            None => Ok(()),
        }
    }

    /// The quota of an owner, minus the disk space that its snapshots and volumes take.
    pub(crate) fn quota_left_by_disks(&self, owner: &Owner) -> OwnerQuota {
        let mut quota = self.config().quotas.quota_of(owner);
        let kept = self.snapshots.size_of(owner).saturating_add(self.volumes.total_bytes(owner));
        quota.disk = quota.disk.map(|disk| Bytes(disk.0.saturating_sub(kept)));
        quota
    }

    /// Checks whether another sandbox would find room now, before work is done for it. Nothing is reserved; dead and
    /// parked sandboxes count as room because they can be evicted.
    pub(crate) fn check_room_for(
        &self,
        owner: &Owner,
        resources: &ResourceLimits,
    ) -> Result<(), ServiceError> {
        let limit = self.config().sandboxes;
        if self.registry.count() >= limit && !self.has_evictable_at_limit(owner) {
            return Err(ServiceError::TooManySandboxes { limit });
        }
        let own = ResourceCost::from_limits(resources, &self.config().default_limits);
        self.check_quota_alone(owner, own)?;
        match self.registry.owner_cost(owner).and(own).exceeds(&self.quota_left_by_disks(owner)) {
            Some(excess) if !self.has_evictable_for_quota(owner, excess.what) => {
                Err(ServiceError::OverQuota { owner: owner.clone(), excess })
            }
            _ => Ok(()),
        }
    }

    pub(crate) async fn issue_key(
        &self,
        owner: Owner,
        expires: Option<SystemTime>,
    ) -> Result<(ApiKey, Secret), ServiceError> {
        if !self.keys.read().expect("no thread panics while setting a key").has_operator_key() {
            return Err(ServiceError::NoOperatorKey);
        }
        let made =
            StoredApiKey::generate(owner, self.clock.now().wall, expires.map(clock::truncate_to_micros));
        let (kept, secret) = made.map_err(io_error("draw a random key"))?;
        let failed = |source| ServiceError::Store { action: "store the key", source };
        self.store.insert_key(&kept).await.map_err(failed)?;
        let key = kept.key.clone();
        self.keys.write().expect("no thread panics while setting a key").add(kept);
        Ok((key, secret))
    }

    pub(crate) async fn revoke_key(&self, id: &str) -> Result<bool, ServiceError> {
        // The key is refused at once, even if deleting its row fails. Such a failure is reported, and the key opens
        // nothing until the next start.
        let known = self.keys.write().expect("no thread panics while setting a key").remove(id);
        let failed = |source| ServiceError::Store { action: "delete the key", source };
        self.store.delete_key(id).await.map_err(failed)?;
        Ok(known)
    }

    pub(crate) fn new_record(
        &self,
        owner: &Owner,
        key: Option<&SandboxKey>,
        request: CreateSandboxRequest,
    ) -> Result<SandboxRecord, ServiceError> {
        let now = self.clock.now();
        let timeout = request.timeout.filter(|timeout| !timeout.is_zero());
        let timeout = timeout.map(|timeout| self.check_timeout(timeout)).transpose()?;
        let expires = timeout.map(|timeout| now.after(timeout).ok_or_else(timeout_overflow)).transpose()?;
        let entrypoint = if request.spec.entrypoint.is_idle() { None } else { Some(new_process_id()?) };
        let sandbox = Sandbox {
            id: SandboxId::from_entropy(random_bytes().map_err(io_error("draw a random id"))?),
            owner: owner.clone(),
            origin: request.origin.to_owned(),
            in_force: Enforced { image: request.spec.image.clone(), ..Enforced::default() },
            pool: None,
            name: key.and_then(chosen_name),
            idle_timeout: request.idle_timeout.filter(|limit| !limit.is_zero()),
            spec: request.spec,
            labels: request.labels,
            notes: request.notes,
            phase: Phase::Starting,
            phase_since: now.wall,
            created: now.wall,
            expires: expires.map(|moment| moment.wall),
            files: FilesState::Kept,
        };
        Ok(SandboxRecord {
            sandbox,
            key: key.cloned(),
            timeout,
            expires_boot: expires.map(|moment| moment.boot),
            idle_timeout: request.idle_timeout.filter(|limit| !limit.is_zero()),
            entrypoint,
            epoch: 0,
            boot_id: self.boot_id.clone(),
        })
    }

    fn check_timeout(&self, timeout: Duration) -> Result<Duration, ServiceError> {
        match self.config().max_timeout {
            Some(longest) if timeout > longest => Err(ServiceError::Invalid(format!(
                "the timeout is longer than {} seconds, the longest this server allows",
                longest.as_secs()
            ))),
            _ => Ok(timeout),
        }
    }

    /// Every sandbox of one owner, or of all, newest first.
    pub(crate) fn list_newest_first(&self, owner: Option<&Owner>) -> Vec<Arc<SandboxHandle>> {
        let mut handles = self.registry.all();
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
        let handle = self.registry.find(id).filter(|handle| handle.owner == *owner);
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
            None => self.registry.find(id).ok_or_else(|| ServiceError::NoSandbox(id.clone())),
        }
    }

    /// Sends a command to a driver and waits until it is carried out.
    pub(crate) async fn send_command<T>(
        &self,
        handle: &SandboxHandle,
        command: impl FnOnce(CommandReply<T>) -> DriverCommand,
    ) -> Result<T, ServiceError> {
        let (answer, wait) = oneshot::channel();
        let gone = || match self.stop.is_cancelled() {
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
        let last = self.ask_backend("destroy", id, DESTROY_TIMEOUT, self.backend.destroy(id)).await?;
        self.history.end_metering(id, self.clock.now(), last);
        Ok(())
    }

    /// Ends the remaining processes of a dead sandbox, records its final usage, and returns whether its files still
    /// exist.
    pub(crate) async fn stop_in_backend(&self, id: &SandboxId) -> Result<FilesState, ServiceError> {
        let stopped = self.ask_backend("stop", id, DESTROY_TIMEOUT, self.backend.stop(id)).await?;
        self.history.end_metering(id, self.clock.now(), stopped.usage);
        Ok(stopped.files)
    }

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

    /// Forwards deaths from the backend to the drivers.
    pub(crate) async fn forward_deaths(self: Arc<Self>, mut deaths: mpsc::UnboundedReceiver<SandboxDeath>) {
        loop {
            let death = tokio::select! {
                death = deaths.recv() => death,
                () = self.stop.cancelled() => return,
            };
            let Some(death) = death else { return };
            match self.registry.find(&death.id) {
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

/// Whether a create that failed with a warm sandbox may succeed with a new one.
fn should_retry_without_warm(error: &ServiceError) -> bool {
    matches!(error, ServiceError::Backend { .. } | ServiceError::Agent { .. } | ServiceError::Store { .. })
}

fn timeout_overflow() -> ServiceError {
    ServiceError::Invalid("the timeout ends after the latest representable time".to_owned())
}

pub(crate) fn io_error(action: &'static str) -> impl Fn(std::io::Error) -> ServiceError {
    move |source| ServiceError::Io { action, source }
}
