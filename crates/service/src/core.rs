//! The state that all parts of the service share.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use backend::{BackendError, Capabilities, Death, SharedBackend};
use domain::{Bytes, Cause, Files, Key, OnDeath, Owner, Phase, ProcessId, Resources, SandboxId, Snapshot};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use wire::Reply;

use crate::activity::Use;
use crate::agent_client::Agent;
use crate::api_keys::{ApiKey, KeptKey, Keys};
use crate::clock::{self, Clock};
use crate::driver::{Answer, Command, Driver};
use crate::error::chain;
use crate::events::Feed;
use crate::history::History;
use crate::images::Pulls;
use crate::names::{Names, chosen_name};
use crate::operator::RecentActs;
use crate::pools::{Pools, Taken, WaitsForRoom};
use crate::quota::{Cost, Quota};
use crate::reaper::Schedule;
use crate::registry::{Handle, NoRoom, Registry, Room};
use crate::snapshots::{Shelf, Using};
use crate::store::{Kept, KeptVolume, Record, Store};
use crate::tokens::{Mint, random};
use crate::trouble::Troubles;
use crate::volumes::Volumes;
use crate::{
    Config, Create, InForce, ProcessStatus, Resumed, Revival, Sandbox, Secret, ServiceError, Usage, hooks,
    translate,
};

/// How long a backend may take to remove a sandbox.
const DESTROY: Duration = Duration::from_secs(60);

/// How long a backend may take to report the usage of a sandbox.
const USAGE: Duration = Duration::from_secs(10);

pub(crate) struct Core {
    /// A reload replaces the whole value; read it with [`Core::config`].
    config: RwLock<Arc<Config>>,
    pub(crate) backend: SharedBackend,
    pub(crate) capabilities: Capabilities,
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) boot_id: String,
    pub(crate) registry: Registry,
    pub(crate) names: Names,
    pub(crate) pools: Pools,
    pub(crate) volumes: Volumes,
    pub(crate) events: Feed,
    /// The recent accesses of the operator.
    pub(crate) acts: RecentActs,
    pub(crate) troubles: Troubles,
    pub(crate) snapshots: Shelf,
    pub(crate) pulls: Pulls,
    pub(crate) history: History,
    pub(crate) schedule: Schedule,
    pub(crate) mint: Mint,
    pub(crate) keys: RwLock<Keys>,
    /// Cancelled to end every task.
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl Core {
    /// Opens the state on disk and probes the backend; no task is started yet.
    pub(crate) async fn open(
        config: Config,
        backend: SharedBackend,
        clock: Clock,
    ) -> Result<(Arc<Self>, Vec<Record>, Vec<Snapshot>, Vec<KeptVolume>), ServiceError> {
        let boot_id = clock::boot_id().map_err(io("read the boot id"))?;
        let mint = Mint::open(&config.state_dir).map_err(io("open the server's secret"))?;
        let (store, kept) = open_store(&config.state_dir).await?;
        let name = backend.name();
        let probed = backend.probe().await;
        let capabilities = probed.map_err(|source| ServiceError::Host {
            backend: name,
            action: "probe this host",
            source: Box::new(source),
        })?;
        let versions: Vec<String> =
            capabilities.host_versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        tracing::info!(versions = versions.join(", "), "probed the language versions of image `host`");
        let metric_owners = config.metric_owners;
        let pools = Pools::new(&config.pools, kept.pools, clock.now().wall);
        let core = Self {
            config: RwLock::new(Arc::new(config)),
            backend,
            capabilities,
            store,
            clock,
            boot_id,
            registry: Registry::default(),
            names: Names::default(),
            pools,
            volumes: Volumes::default(),
            events: Feed::new(kept.events),
            acts: RecentActs::default(),
            troubles: Troubles::default(),
            snapshots: Shelf::default(),
            pulls: Pulls::default(),
            history: History::new(kept.hours, metric_owners),
            schedule: Schedule::default(),
            mint,
            keys: RwLock::new(Keys::new(kept.keys)),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        Ok((Arc::new(core), kept.records, kept.snapshots, kept.volumes))
    }

    /// The current settings.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.read().expect("replacing the settings does not panic"))
    }

    /// Replaces the settings. The state directory and the pools keep their values from the start.
    pub(crate) fn set_config(&self, config: Config) {
        let mut current = self.config.write().expect("replacing the settings does not panic");
        let (state_dir, pools) = (current.state_dir.clone(), current.pools.clone());
        *current = Arc::new(Config { state_dir, pools, ..config });
    }

    /// Creates a sandbox, from a warm one if one fits; otherwise it is recorded first and then made.
    pub(crate) async fn create(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&Key>,
        request: Create,
    ) -> Result<Sandbox, ServiceError> {
        self.create_successor(owner, key, request, None).await
    }

    /// Creates a sandbox like [`Core::create`]. If it succeeds a dead one, its first event says so.
    pub(crate) async fn create_successor(
        self: &Arc<Self>,
        owner: &Owner,
        key: Option<&Key>,
        mut request: Create,
        revival: Option<Revival>,
    ) -> Result<Sandbox, ServiceError> {
        let cause = revival.and_then(|revival| revival.how.cause_of_successor());
        if self.stop.is_cancelled() {
            return Err(ServiceError::Stopping);
        }
        let _files = self.prepare(owner, &mut request).await?;
        let nothing_to_start =
            request.spec.snapshot.is_none() && self.settle_entrypoint(&mut request.spec).await;
        let record = |request| {
            let record = self.record(owner, key, request)?;
            let entrypoint = record.entrypoint.filter(|_| !nothing_to_start);
            Ok::<_, ServiceError>(Record { entrypoint, ..record })
        };
        self.make_room(owner).await;
        if let Some(warm) = self.take_warm(&request).await {
            match self.bring(record(request.clone())?, Some(warm), cause).await {
                Err(error) if is_worth_another(&error) => {
                    tracing::warn!(error = %chain(&error), "failed to use a warm sandbox; creating a new one");
                }
                brought => return brought,
            }
        }
        self.bring(record(request)?, None, cause).await
    }

    /// Completes a request and fetches its image. Refuses one that can never be fulfilled, before
    /// anything is changed. The snapshot is kept until the returned guard is dropped.
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        owner: &Owner,
        request: &mut Create,
    ) -> Result<Option<Using>, ServiceError> {
        if request.spec.on_death == Some(OnDeath::Restart) && !self.capabilities.restart {
            return Err(ServiceError::NoRestarts);
        }
        let files = self.stand_on_snapshot(owner, request)?;
        self.complete(request)?;
        if request.spec.snapshot.is_none() {
            // A caller with registry credentials has pulled the image before, so it is present by now.
            self.ensure_image(owner, &request.spec, None).await?;
        }
        Ok(files)
    }

    /// Has a driver make the sandbox of a new record, from a warm one if given.
    async fn bring(
        self: &Arc<Self>,
        mut record: Record,
        warm: Option<Taken>,
        cause: Option<Cause>,
    ) -> Result<Sandbox, ServiceError> {
        if let Some(warm) = &warm {
            warm.mark(&mut record);
        }
        let (owner, id) = (record.sandbox.owner.clone(), record.sandbox.id.clone());
        let uses = self.claim_volumes(&owner, &id, &mut record.sandbox.spec.mounts).await?;
        let (handle, driver) = Driver::new(self, record);
        let room = if warm.is_some() { Room::OfWarm } else { Room::Below(self.config().sandboxes) };
        self.admit(&handle, room).await?;
        uses.keep();
        let (reply, claim) = oneshot::channel();
        // If the caller disconnects while the hook before the entrypoint runs, the hook is not waited for.
        let gone = handle.abandoned.clone().drop_guard();
        self.tasks.spawn(driver.create(warm.map(Taken::keep), cause, reply));
        let claim = claim.await;
        gone.disarm();
        claim.unwrap_or(Err(ServiceError::Stopping)).map(|claim| claim.take())
    }

    /// Adds a new sandbox to the registry if there is room for it on the server and in its owner's quota. To make room,
    /// a dead sandbox is evicted first, then a warm one, then a parked one. A dead sandbox that still has its files is
    /// evicted only for its own owner.
    async fn admit(self: &Arc<Self>, handle: &Arc<Handle>, room: Room) -> Result<(), ServiceError> {
        let limit = self.config().sandboxes;
        self.check_quota_alone(&handle.owner, handle.cost)?;
        let quota = self.quota_left_by_disks(&handle.owner);
        let mut waiting = None;
        loop {
            let (evicted, refusal) = match self.registry.add(Arc::clone(handle), room, &quota) {
                Ok(()) => return Ok(()),
                Err(NoRoom::Full) => {
                    waiting.get_or_insert_with(|| WaitsForRoom::begin(self));
                    let owner = &handle.owner;
                    let evicted = self.evict_dead(owner).await
                        || self.give_up_warm().await
                        || self.evict_parked(None).await
                        || self.evict_restartable(owner, None).await;
                    (evicted, ServiceError::TooManySandboxes { limit })
                }
                Err(NoRoom::OverQuota(excess)) => {
                    let owner = handle.owner.clone();
                    (
                        self.evict_for(&owner, excess.what, None).await,
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
    pub(crate) async fn restart(&self, handle: &Arc<Handle>) -> Result<Resumed, ServiceError> {
        loop {
            match self.order(handle, Command::Restart).await {
                Err(ServiceError::OverQuota { owner, excess })
                    if self.evict_for(&owner, excess.what, Some(&handle.id)).await => {}
                restarted => return restarted,
            }
        }
    }

    /// Refuses a request that would exceed the quota even if the owner had nothing else, since deleting would not help.
    fn check_quota_alone(&self, owner: &Owner, cost: Cost) -> Result<(), ServiceError> {
        match cost.exceeds(&self.config().quotas.of(owner)) {
            Some(excess) => Err(ServiceError::BeyondQuota { owner: owner.clone(), excess }),
            None => Ok(()),
        }
    }

    /// The quota of an owner, minus the disk space that its snapshots and volumes take.
    pub(crate) fn quota_left_by_disks(&self, owner: &Owner) -> Quota {
        let mut quota = self.config().quotas.of(owner);
        let kept = self.snapshots.size_of(owner).saturating_add(self.volumes.bytes(owner));
        quota.disk = quota.disk.map(|disk| Bytes(disk.0.saturating_sub(kept)));
        quota
    }

    /// Checks whether another sandbox would find room now, before work is done for it. Nothing is reserved; dead and
    /// parked sandboxes count as room because they can be evicted.
    pub(crate) fn check_room_for(&self, owner: &Owner, resources: &Resources) -> Result<(), ServiceError> {
        let limit = self.config().sandboxes;
        if self.registry.count() >= limit && !self.has_evictable_at_limit(owner) {
            return Err(ServiceError::TooManySandboxes { limit });
        }
        let own = Cost::of(resources, &self.config().usual);
        self.check_quota_alone(owner, own)?;
        match self.registry.cost(owner).and(own).exceeds(&self.quota_left_by_disks(owner)) {
            Some(excess) if !self.has_evictable_for(owner, excess.what) => {
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
        if !self.keys.read().expect("no thread panics while setting a key").has_single() {
            return Err(ServiceError::NoOperatorKey);
        }
        let made = KeptKey::make(owner, self.clock.now().wall, expires.map(clock::whole_micros));
        let (kept, secret) = made.map_err(io("draw a random key"))?;
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

    pub(crate) fn record(
        &self,
        owner: &Owner,
        key: Option<&Key>,
        request: Create,
    ) -> Result<Record, ServiceError> {
        let now = self.clock.now();
        let timeout = request.timeout.filter(|timeout| !timeout.is_zero());
        let timeout = timeout.map(|timeout| self.checked(timeout)).transpose()?;
        let expires = timeout.map(|timeout| now.after(timeout).ok_or_else(too_long)).transpose()?;
        let entrypoint = if request.spec.only_waits() { None } else { Some(new_process_id()?) };
        let sandbox = Sandbox {
            id: SandboxId::from_entropy(random().map_err(io("draw a random id"))?),
            owner: owner.clone(),
            origin: request.origin.to_owned(),
            in_force: InForce { image: request.spec.image.clone(), ..InForce::default() },
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
            files: Files::Kept,
        };
        Ok(Record {
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

    fn checked(&self, timeout: Duration) -> Result<Duration, ServiceError> {
        match self.config().longest_timeout {
            Some(longest) if timeout > longest => Err(ServiceError::Invalid(format!(
                "the timeout is longer than {} seconds, the longest this server allows",
                longest.as_secs()
            ))),
            _ => Ok(timeout),
        }
    }

    /// Every sandbox of one owner, or of all, newest first.
    pub(crate) fn newest_first(&self, owner: Option<&Owner>) -> Vec<Arc<Handle>> {
        let mut handles = self.registry.all();
        handles.retain(|handle| owner.is_none_or(|owner| handle.owner == *owner));
        handles.sort_unstable_by(|one, other| other.created.cmp(&one.created).then(one.id.cmp(&other.id)));
        handles
    }

    /// Finds a sandbox of this owner. A sandbox of another owner is reported as not found.
    pub(crate) fn find(&self, owner: &Owner, id: &SandboxId) -> Result<Arc<Handle>, ServiceError> {
        let handle = self.registry.find(id).filter(|handle| handle.owner == *owner);
        handle.ok_or_else(|| ServiceError::NoSandbox(id.clone()))
    }

    /// Finds a sandbox of one owner, or of any owner.
    pub(crate) fn visible(&self, owner: Option<&Owner>, id: &SandboxId) -> Result<Arc<Handle>, ServiceError> {
        match owner {
            Some(owner) => self.find(owner, id),
            None => self.registry.find(id).ok_or_else(|| ServiceError::NoSandbox(id.clone())),
        }
    }

    /// Returns the sandbox if its phase allows it to be used now. This call does not count as a use.
    pub(crate) fn reach(&self, owner: &Owner, id: &SandboxId) -> Result<Arc<Handle>, ServiceError> {
        let handle = self.find(owner, id)?;
        handle.state.borrow().check_usable()?;
        Ok(handle)
    }

    /// Like [`Core::reach`], and the sandbox counts as in use until the returned [`Use`] is dropped.
    pub(crate) fn enter(&self, owner: &Owner, id: &SandboxId) -> Result<(Arc<Handle>, Use), ServiceError> {
        // The use begins before the phase is read, so a sandbox about to be ended for idleness either sees this use, or
        // is seen here in the phase "stopping".
        let activity = self.find(owner, id)?.activity.begin();
        Ok((self.reach(owner, id)?, activity))
    }

    /// Sends an order to a driver and waits until it is carried out.
    pub(crate) async fn order<T>(
        &self,
        handle: &Handle,
        order: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<T, ServiceError> {
        let (answer, wait) = oneshot::channel();
        let gone = || match self.stop.is_cancelled() {
            true => ServiceError::Stopping,
            false => ServiceError::NoSandbox(handle.id.clone()),
        };
        handle.mailbox.send(order(answer)).await.map_err(|_unsent| gone())?;
        wait.await.unwrap_or_else(|_dropped| Err(gone()))
    }

    pub(crate) async fn processes_of(&self, agent: &Agent) -> Result<Vec<ProcessStatus>, ServiceError> {
        match agent.ask(wire::Request::Processes).await? {
            Ok(Reply::Statuses(statuses)) => {
                let statuses = statuses.into_iter().map(translate::status).collect::<Result<_, _>>();
                statuses.map_err(|source| agent.failed("answer", source))
            }
            Ok(_) => Err(agent.unexpected()),
            Err(fault) => Err(agent.refused(fault)),
        }
    }

    /// Whether anything but the main process runs in a sandbox. An agent that does not answer is assumed to run
    /// something; a dead agent runs nothing.
    pub(crate) async fn runs_something(&self, handle: &Handle) -> bool {
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
    async fn ask_what_runs(&self, handle: &Handle) -> Result<bool, ServiceError> {
        let processes = self.processes_of(&handle.agent).await?;
        let counts = |status: &&ProcessStatus| {
            !hooks::is_run(status) && Some(&status.process) != handle.entrypoint.as_ref()
        };
        if processes.iter().filter(counts).any(|status| status.ended.is_none() || status.left) {
            return Ok(true);
        }
        match handle.agent.ask(wire::Request::Sessions).await? {
            Ok(Reply::Sessions(sessions)) => Ok(sessions.iter().any(|session| session.left)),
            Ok(_) => Err(handle.agent.unexpected()),
            Err(fault) if fault.kind == wire::FaultKind::Unsupported => Ok(false),
            Err(fault) => Err(handle.agent.refused(fault)),
        }
    }

    /// Removes a sandbox with everything that belongs to it, and records its final usage.
    pub(crate) async fn destroy(&self, id: &SandboxId) -> Result<(), ServiceError> {
        let last = self.ask_backend("destroy", id, DESTROY, self.backend.destroy(id)).await?;
        self.history.end(id, self.clock.now(), last);
        Ok(())
    }

    /// Ends the remaining processes of a dead sandbox, records its final usage, and returns whether its files still
    /// exist.
    pub(crate) async fn stop(&self, id: &SandboxId) -> Result<Files, ServiceError> {
        let stopped = self.ask_backend("stop", id, DESTROY, self.backend.stop(id)).await?;
        self.history.end(id, self.clock.now(), stopped.usage);
        Ok(stopped.files)
    }

    pub(crate) async fn usage_of(&self, id: &SandboxId) -> Result<Usage, ServiceError> {
        self.ask_backend("measure", id, USAGE, self.backend.usage(id)).await
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
    pub(crate) async fn hear_of_deaths(self: Arc<Self>, mut deaths: mpsc::UnboundedReceiver<Death>) {
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
                None => self.lose_warm(&death),
            }
        }
    }
}

/// Opening blocks on the disk, so it runs on a blocking thread.
async fn open_store(state_dir: &Path) -> Result<(Store, Kept), ServiceError> {
    let path = state_dir.join("coracle.db");
    let opened = tokio::task::spawn_blocking(move || Store::open(&path)).await;
    let opened = opened.expect("opening the store does not panic");
    opened.map_err(|source| ServiceError::Store { action: "be opened", source })
}

pub(crate) fn new_process_id() -> Result<ProcessId, ServiceError> {
    random().map(ProcessId::from_entropy).map_err(io("draw a random id"))
}

/// Whether a create that failed with a warm sandbox may succeed with a new one.
fn is_worth_another(error: &ServiceError) -> bool {
    matches!(error, ServiceError::Backend { .. } | ServiceError::Agent { .. } | ServiceError::Store { .. })
}

fn too_long() -> ServiceError {
    ServiceError::Invalid("the timeout ends after the latest representable time".to_owned())
}

pub(crate) fn io(action: &'static str) -> impl Fn(std::io::Error) -> ServiceError {
    move |source| ServiceError::Io { action, source }
}
