//! The one core that every front calls: [`Service`], whose methods are the use cases.
//!
//! All sandboxes are held in memory, in the registry; the store is the durable copy. Each sandbox has a driver, which
//! alone changes its phase. Commands and file operations go straight to the agent inside the sandbox, each over its own
//! connection.

mod acquire;
mod activity;
mod agent_client;
mod api_keys;
mod clock;
mod commands;
mod contexts;
mod core;
mod diagnosis;
mod driver;
mod entrypoint;
mod error;
mod events;
mod faults;
mod files;
mod following;
mod history;
mod hold;
mod hooks;
mod images;
mod kernels;
mod listing;
mod measure;
mod names;
mod operator;
mod owner_metrics;
mod pools;
mod processes;
mod quota;
mod reaper;
mod reconcile;
mod registry;
mod sessions;
mod snapshots;
mod store;
mod telling;
#[cfg(test)]
mod tests;
mod tokens;
mod transfer;
mod translate;
mod trouble;
mod volumes;
mod waiting;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use backend::SharedBackend;
use domain::{
    Bytes, Cause, Files, Key, Labels, OnDeath, Owner, Phase, Pool, Request, Resources, Retention, SandboxId,
    SandboxSettings, Spec, Verdict,
};
use futures_util::StreamExt;

use crate::clock::Clock;
use crate::core::Core;
use crate::driver::Command;
use crate::registry::Handle;

pub use agent_client::AgentError;
pub use api_keys::ApiKey;
pub use backend::{
    AgentStream, ArchiveStream, Capabilities, Credentials, Freed, ImageInfo, InForce, MountFault,
    ResolvedImage, Usage,
};
pub use contexts::{Context, MOST_CONTEXTS, OpenContext, RunCode, Unread, default_context};
pub use diagnosis::Tail;
pub use domain::NestStatus;
pub use error::{ErrorKind, FileError, FileFault, ServiceError, SnapshotProblem};
pub use events::{Act, Events, LifeEvent, OperatorEvent, Told};
pub use files::{Actor, Attributes, Change, Edit, FileInfo, FileKind, WatchEvent, WriteMode};
pub use following::{Event, Following, Input};
pub use history::{Hour, Sample, Used};
pub use hooks::{HookReport, HookRun};
pub use images::PullState;
pub use operator::{ActKind, RevokedKey, ThingKind};
pub use owner_metrics::{OwnerLabel, OwnerMetrics};
pub use pools::{PoolReport, PoolSource};
pub use processes::{Ended, ProcessStatus, ProcessTree, Reach, TreeFilter, TreeKind, TreeUsage};
pub use quota::{Excess, Quota, Quotas};
pub use sessions::{Busy, OpenSession, Run, RunPlace, SessionStatus};
pub use snapshots::{CommitSource, SnapshotFilter, SnapshotPage};
pub use store::{StoreError, copy_database};
pub use telling::{CodeError, CodeEvent, Forms, Running};
pub use tokens::Secret;
pub use transfer::{Reading, Watching, Writing};
pub use trouble::Trouble;
pub use volumes::VolumeStatus;
pub use waiting::{Patience, Waited};

/// The key space of the names that people and programs give to sandboxes.
pub const NAMES: &str = "name";

/// The key space of the keys that clients send so that a retry finds the sandbox its first attempt made. Such a key
/// never restarts a sandbox that died: it leads to a new one.
pub const RETRIES: &str = "opensandbox idempotency";

/// The core. A clone is a handle to the same core.
#[derive(Clone)]
pub struct Service(Arc<Core>);

#[derive(Clone, Debug)]
pub struct Config {
    /// Holds the database `coracle.db` and the server's secret.
    pub state_dir: PathBuf,
    /// How many sandboxes may exist at once.
    pub sandboxes: usize,
    /// From this number of sandboxes on, a new sandbox evicts a parked one.
    pub soft_sandboxes: Option<usize>,
    /// How long a sandbox with a key may be unused before it is parked.
    pub park_after: Duration,
    pub commands_per_sandbox: u32,
    /// How many snapshots one owner may have.
    pub snapshots_per_owner: usize,
    /// How many volumes one owner may have.
    pub volumes_per_owner: usize,
    /// The quota of each owner.
    pub quotas: Quotas,
    /// The limits that quotas count for a sandbox whose creator set none.
    pub usual: Resources,
    /// Whether a sandbox is refused if one of its default limits cannot be enforced.
    pub require_limits: bool,
    /// Pools from the configuration, which no client can change.
    pub pools: Vec<Pool>,
    /// The size of a volume created without a size.
    pub volume_size: Bytes,
    /// The longest time to live that a client may ask for.
    pub longest_timeout: Option<Duration>,
    pub output: OutputSettings,
    /// How many owners have their own metrics; `None` turns metrics per owner off. This is read once, at the start.
    pub metric_owners: Option<usize>,
}

/// How much output of commands is kept, and how long a command waits for its reader.
#[derive(Clone, Copy, Debug)]
pub struct OutputSettings {
    /// The retention of a command whose caller does not set one.
    pub retention: Retention,
    /// The most output that a caller may ask to be kept.
    pub max_kept: Bytes,
    /// A reader that takes no byte for this long no longer holds back its command.
    pub stall_limit: Duration,
}

impl Default for OutputSettings {
    fn default() -> Self {
        Self {
            retention: Retention::default(),
            max_kept: Bytes::mib(256),
            stall_limit: Duration::from_secs(10),
        }
    }
}

/// The result of a request that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The sandbox was in the requested state already, and nothing changed.
    AlreadySo,
}

/// The result of a request to make a sandbox run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    pub outcome: Outcome,
    /// Set if the sandbox had died.
    pub revival: Option<Revival>,
}

impl From<Outcome> for Resumed {
    fn from(outcome: Outcome) -> Self {
        Self { outcome, revival: None }
    }
}

/// A request to create a sandbox.
#[derive(Clone, Debug)]
pub struct Create {
    /// The name of the front that sends the request.
    pub origin: &'static str,
    pub spec: Spec,
    pub labels: Labels,
    /// Opaque bytes that the front stores with the sandbox; only the front reads them.
    pub notes: Vec<u8>,
    /// The time after which the sandbox expires. Zero means never. `None` takes the snapshot's value, or never without
    /// a snapshot.
    pub timeout: Option<Duration>,
    /// The time without use after which the sandbox ends. Zero means never. `None` takes the snapshot's value, or never
    /// without a snapshot.
    pub idle_timeout: Option<Duration>,
    /// The pool to take the sandbox from. `None` takes it from any pool that fits.
    pub pool: Option<String>,
    /// The parts of the spec that hold a default of the front because the caller did not set them.
    pub defaulted: Vec<Defaulted>,
    /// Completes `notes` with those of the sandbox that this one inherits from.
    pub merge_notes: MergeNotes,
}

/// A front's rule for the notes that it stores with a sandbox: combines the notes of the request with the settings of
/// the sandbox to inherit from.
pub type MergeNotes = fn(&[u8], &SandboxSettings) -> Vec<u8>;

/// A part of a spec that the front filled in because the caller did not set it. In a sandbox that is made from a
/// snapshot, or that replaces a dead one, the inherited value replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defaulted {
    /// The image. A snapshot has its own, so this matters only in the place of one that died.
    Image,
    Network,
    Guest,
    /// The env file, with the variable that holds its path.
    EnvironmentFile(&'static str),
}

/// The sandbox that a key leads to.
#[derive(Clone, Debug)]
pub struct Acquired {
    pub sandbox: Sandbox,
    /// Whether the sandbox was created by this call.
    pub fresh: bool,
    /// How the sandbox that had died under this key was revived.
    pub revival: Option<Revival>,
}

/// How a sandbox that had died was made available again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revival {
    pub how: Revived,
    /// Why the sandbox had died.
    pub cause: Cause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revived {
    /// The sandbox runs again with its files.
    Restarted,
    /// The sandbox, or its replacement, runs with an empty disk, as its creator requested.
    Replaced,
    /// A replacement with an empty disk runs, because the files were lost.
    FilesLost,
}

impl Revived {
    /// The cause in the first event of a sandbox that replaces a dead one.
    pub(crate) fn cause_of_successor(self) -> Option<Cause> {
        match self {
            Self::Restarted => None,
            Self::Replaced => Some(Cause::Replaced),
            Self::FilesLost => Some(Cause::FilesLost),
        }
    }

    /// The name used in responses and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Restarted => "restart",
            Self::Replaced => "replace",
            Self::FilesLost => "files-lost",
        }
    }
}

/// The state of a sandbox at one moment.
#[derive(Clone, Debug)]
pub struct Sandbox {
    pub id: SandboxId,
    pub owner: Owner,
    pub origin: String,
    pub spec: Spec,
    pub labels: Labels,
    pub notes: Vec<u8>,
    pub phase: Phase,
    pub phase_since: SystemTime,
    pub created: SystemTime,
    pub expires: Option<SystemTime>,
    pub in_force: InForce,
    /// The time without use after which the sandbox ends.
    pub idle_timeout: Option<Duration>,
    /// The pool that the sandbox was taken from.
    pub pool: Option<String>,
    /// The name that the owner gave the sandbox, in the key space [`NAMES`].
    pub name: Option<String>,
    /// Whether the files still exist; they can be lost only when the sandbox has died.
    pub files: Files,
}

impl Sandbox {
    /// Refuses a sandbox that accepts no requests in its phase.
    pub fn check_usable(&self) -> Result<(), ServiceError> {
        let (id, request, phase) = (self.id.clone(), Request::Use, self.phase);
        match phase.judge(request) {
            Verdict::Accept | Verdict::AlreadySo => Ok(()),
            // A sandbox that would be replaced does not need its files.
            Verdict::Deny
                if matches!(phase, Phase::Failed(_))
                    && self.files == Files::Lost
                    && self.spec.on_death() == OnDeath::Restart =>
            {
                Err(ServiceError::DeadWithoutFiles { id, request, phase })
            }
            Verdict::Deny => Err(ServiceError::Denied { id, request, phase }),
        }
    }
}

/// Selects the sandboxes that have all of `labels` and whose phase passes `phase`.
pub struct Filter<'a> {
    pub labels: Labels,
    pub phase: &'a (dyn Fn(&Phase) -> bool + Sync),
    pub offset: usize,
    pub limit: usize,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct Page {
    pub items: Vec<Sandbox>,
    /// The number of sandboxes that pass the filter, on all pages.
    pub total: usize,
}

impl Service {
    /// Opens the store, adopts living sandboxes, finishes interrupted work and starts the reaper.
    pub async fn start(config: Config, backend: SharedBackend) -> Result<Self, ServiceError> {
        Self::start_at(config, backend, Clock::host()).await
    }

    async fn start_at(config: Config, backend: SharedBackend, clock: Clock) -> Result<Self, ServiceError> {
        measure::describe();
        let deaths = backend.deaths();
        let (core, records, kept, volumes) = Core::open(config, backend, clock).await?;
        core.tasks.spawn(events::keep(Arc::clone(&core)));
        volumes::settle(&core, volumes, &records).await?;
        reconcile::reconcile(&core, records).await?;
        snapshots::settle(&core, kept).await?;
        core.tasks.spawn(Arc::clone(&core).hear_of_deaths(deaths));
        core.tasks.spawn(reaper::reap(Arc::clone(&core)));
        core.tasks.spawn(history::keep(Arc::clone(&core)));
        core.keep_pools();
        Ok(Self(core))
    }

    /// Stops the drivers and the store. Sandboxes keep running; returns how many do.
    pub async fn stop(&self) -> usize {
        self.0.stop.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
        self.0.store.close().await;
        let alive = |handle: &Arc<Handle>| !matches!(handle.phase(), Phase::Failed(_) | Phase::Stopped);
        self.0.registry.all().iter().filter(|handle| alive(handle)).count()
    }

    /// Removes every sandbox of all owners. A failure to remove one does not affect the others; the next start retries
    /// it. Returns how many could not be removed.
    pub async fn remove_all(&self) -> usize {
        let orders = futures_util::stream::iter(self.0.registry.all());
        let orders = orders.map(|handle| async move {
            let outcome = self.0.order(&handle, Command::Destroy).await;
            match outcome {
                Ok(_) | Err(ServiceError::NoSandbox(_)) => 0,
                Err(error) => {
                    tracing::error!(sandbox = %handle.id, error = %error::chain(&error), "failed to remove sandbox at shutdown; the next start retries");
                    1
                }
            }
        });
        orders.buffer_unordered(history::AT_ONCE).fold(0, |left, one| async move { left + one }).await
    }

    /// Returns when a command can run in the sandbox. Dropping the future undoes the creation.
    pub async fn create(&self, owner: &Owner, request: Create) -> Result<Sandbox, ServiceError> {
        let began = Instant::now();
        let created =
            self.0.create(owner, None, request).await.inspect_err(self.0.failed("create", owner, None))?;
        measure::created(began.elapsed());
        tracing::info!(sandbox = %created.id, origin = created.origin, "sandbox created");
        Ok(created)
    }

    /// Returns the sandbox that the key leads to, and creates it if there is none. A sandbox that died is restarted or
    /// replaced, as its [`domain::OnDeath`] says. The sandbox is held until [`Service::release`], or until it is unused
    /// for `park_after`.
    pub async fn acquire(&self, key: &Key, request: Create) -> Result<Acquired, ServiceError> {
        let began = Instant::now();
        let acquired =
            self.0.acquire(key, request).await.inspect_err(self.0.failed("acquire", key.owner(), None))?;
        if acquired.fresh {
            measure::created(began.elapsed());
            let sandbox = &acquired.sandbox;
            tracing::info!(sandbox = %sandbox.id, origin = sandbox.origin, "sandbox created for a key");
        }
        Ok(acquired)
    }

    /// Allows the sandbox of a key to be evicted when another sandbox needs room. Until then it stays as it is.
    pub fn release(&self, key: &Key) -> Outcome {
        self.0.release(key)
    }

    /// Returns the sandbox that the key leads to now.
    pub fn find(&self, key: &Key) -> Option<Sandbox> {
        self.get(key.owner(), &self.0.names.find(key)?).ok()
    }

    /// The lifecycle events from now on, or after the event `after`, of one owner's sandboxes or of all.
    pub fn events(&self, owner: Option<Owner>, after: Option<u64>) -> Events {
        Events::new(&self.0, owner, after.unwrap_or_else(|| self.0.events.newest()))
    }

    /// Like [`Service::events`], beginning with the last `count` events that the owner may see.
    pub fn last_events(&self, owner: Option<Owner>, count: usize) -> Events {
        let after = self.0.events.before_last(owner.as_ref(), count);
        Events::new(&self.0, owner, after)
    }

    /// The most recent failed requests, newest first, of one owner or of all.
    pub fn troubles(&self, owner: Option<&Owner>) -> Vec<Trouble> {
        self.0.troubles.list(owner)
    }

    pub fn get(&self, owner: &Owner, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        Ok(self.0.find(owner, id)?.state.borrow().clone())
    }

    /// Returns a sandbox of any owner, for rules that decide who may reach it.
    pub fn look(&self, id: &SandboxId) -> Option<Sandbox> {
        self.0.registry.find(id).map(|handle| handle.state.borrow().clone())
    }

    /// Lists sandboxes, newest first.
    pub fn list(&self, owner: &Owner, filter: &Filter<'_>) -> Page {
        self.0.registry.list(owner, filter)
    }

    /// Sets the labels that have a value and removes those that have none.
    pub async fn patch_labels(
        &self,
        owner: &Owner,
        id: &SandboxId,
        patch: BTreeMap<String, Option<String>>,
    ) -> Result<Sandbox, ServiceError> {
        let handle = self.0.find(owner, id)?;
        self.0.order(&handle, |answer| Command::PatchLabels(patch, answer)).await
    }

    /// Moves the expiry to an earlier or later time. Renewing a sandbox that never expires is a conflict.
    pub async fn renew(
        &self,
        owner: &Owner,
        id: &SandboxId,
        expires: SystemTime,
    ) -> Result<Sandbox, ServiceError> {
        let handle = self.0.find(owner, id)?;
        let expires = clock::whole_micros(expires);
        self.0.order(&handle, |answer| Command::Renew(expires, answer)).await
    }

    /// Returns when the sandbox is paused.
    pub async fn pause(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        let handle = self.0.find(owner, id)?;
        self.0.order(&handle, Command::Pause).await.inspect_err(self.0.failed("pause", owner, Some(id)))
    }

    /// Returns when the sandbox runs. A sandbox that has died is restarted, and the result says so.
    pub async fn resume(&self, owner: &Owner, id: &SandboxId) -> Result<Resumed, ServiceError> {
        let handle = self.0.find(owner, id)?;
        let resumed = match self.0.order(&handle, Command::Resume).await {
            Err(_) if handle.is_dead() => self.0.restart(&handle).await,
            resumed => resumed.map(Resumed::from),
        };
        resumed.inspect_err(self.0.failed("resume", owner, Some(id)))
    }

    /// Restarts a sandbox that has died. Returns when it runs.
    pub async fn restart(&self, owner: &Owner, id: &SandboxId) -> Result<Resumed, ServiceError> {
        let handle = self.0.find(owner, id)?;
        self.0.restart(&handle).await.inspect_err(self.0.failed("restart", owner, Some(id)))
    }

    /// Returns when the sandbox is removed.
    pub async fn destroy(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        let handle = self.0.find(owner, id)?;
        if handle.phase() == Phase::Starting {
            // Its driver may be busy with the hook before the entrypoint and not read its mailbox.
            handle.abandoned.cancel();
        }
        match self.0.order(&handle, Command::Destroy).await {
            // The sandbox ended while the order was queued: another request removed it, or it expired.
            Err(ServiceError::NoSandbox(_)) => Ok(Outcome::AlreadySo),
            outcome => outcome.inspect_err(self.0.failed("destroy", owner, Some(id))),
        }
    }

    pub async fn usage(&self, owner: &Owner, id: &SandboxId) -> Result<Usage, ServiceError> {
        self.0.find(owner, id)?;
        self.0.usage_of(id).await
    }

    /// Every sandbox of one owner, or of all, newest first, with its current usage.
    pub async fn survey(&self, owner: Option<&Owner>) -> Vec<(Sandbox, Option<Usage>)> {
        let looks = futures_util::stream::iter(self.0.newest_first(owner));
        let look = |handle: Arc<Handle>| async move {
            let usage = self.0.usage_of(&handle.id).await.ok();
            (handle.current(), usage)
        };
        looks.map(look).buffered(history::AT_ONCE).collect().await
    }

    /// Every sandbox of one owner, or of all, newest first, without its usage.
    pub fn overview(&self, owner: Option<&Owner>) -> Vec<Sandbox> {
        self.0.newest_first(owner).iter().map(|handle| handle.current()).collect()
    }

    /// A sandbox of one owner, or of any owner, with its current usage.
    pub async fn inspect(
        &self,
        owner: Option<&Owner>,
        id: &SandboxId,
    ) -> Result<(Sandbox, Option<Usage>), ServiceError> {
        let handle = self.0.visible(owner, id)?;
        let usage = self.0.usage_of(id).await.ok();
        Ok((handle.current(), usage))
    }

    /// The usage of a sandbox of one owner, or of any owner, in the last hour, oldest sample first.
    pub fn samples(&self, owner: Option<&Owner>, id: &SandboxId) -> Result<Vec<Sample>, ServiceError> {
        self.0.visible(owner, id)?;
        Ok(self.0.history.samples(id))
    }

    /// The usage of sandboxes in each of the last `count` hours, newest first.
    pub fn hours(&self, owner: Option<&Owner>, count: u64) -> Vec<Hour> {
        self.0.history.hours(owner, self.0.clock.now().wall, count)
    }

    pub fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    /// Whether a sandbox may run without this limit, by its name in [`Capabilities::limits`]: the
    /// host cannot enforce it, and the operator does not require default limits.
    pub fn may_lack_limit(&self, limit: &str) -> bool {
        !self.0.config().require_limits && !self.0.capabilities.limits.iter().any(|held| held == limit)
    }

    /// The number of sandboxes in each phase, by the phase's name.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.0.registry.counts()
    }

    /// The token that opens one sandbox for one purpose. It is the same after a server restart.
    pub fn token(&self, id: &SandboxId, purpose: &'static str) -> Secret {
        let epoch = self.0.registry.find(id).map_or(0, |handle| handle.epoch);
        self.0.mint.token(id, purpose, epoch)
    }

    /// Returns the owner of the sandbox if the token is right.
    pub fn owner_by_token(&self, id: &SandboxId, purpose: &'static str, presented: &str) -> Option<Owner> {
        let handle = self.0.registry.find(id)?;
        let right = self.0.mint.is_right(id, purpose, handle.epoch, presented);
        right.then(|| handle.owner.clone())
    }

    /// Sets the single API key of the configuration; its owner is [`Owner::single`].
    pub fn set_single_key(&self, key: Option<&str>) {
        self.0.keys.write().expect("no thread panics while setting a key").set_single(key);
    }

    /// Replaces the settings while the server runs. New values apply from the next request on; existing sandboxes stay
    /// as they are, even where they exceed a new limit. `state_dir` and `pools` are ignored, because they need a
    /// restart.
    pub fn set_config(&self, config: Config) {
        self.0.set_config(config);
    }

    pub fn owner_by_key(&self, presented: &str) -> Option<Owner> {
        let keys = self.0.keys.read().expect("no thread panics while setting a key");
        keys.owner(presented, self.0.clock.now().wall)
    }

    /// Issues an API key for an owner. The secret is returned this once and cannot be shown again.
    pub async fn issue_key(
        &self,
        owner: Owner,
        expires: Option<SystemTime>,
    ) -> Result<(ApiKey, Secret), ServiceError> {
        self.0.issue_key(owner, expires).await
    }

    /// All issued API keys, expired ones included.
    pub fn keys(&self) -> Vec<ApiKey> {
        self.0.keys.read().expect("no thread panics while setting a key").list()
    }

    /// Refuses the key from now on. Returns `false` if no key has this id.
    pub async fn revoke_key(&self, id: &str) -> Result<bool, ServiceError> {
        self.0.revoke_key(id).await
    }

    /// Whether no key exists at all, so that requests need none.
    pub fn keyless(&self) -> bool {
        self.0.keys.read().expect("no thread panics while setting a key").is_empty()
    }
}
