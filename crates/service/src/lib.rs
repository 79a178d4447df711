//! The one core that every front calls: [`Service`], whose methods are the use cases.
//!
//! All that exists is held in memory, in the registry; the store is its durable copy. Each
//! sandbox has a driver, the only one that changes its phase. Commands and files go straight
//! to the agent inside, over a connection of their own.

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

/// The space of the names that people and programs give sandboxes on purpose.
pub const NAMES: &str = "name";

/// The space of the keys that clients send so that a retry finds what its first attempt made. Such a
/// key never restarts a sandbox that died: it leads to a new one.
pub const RETRIES: &str = "opensandbox idempotency";

/// The core. A clone is a handle to the same one.
#[derive(Clone)]
pub struct Service(Arc<Core>);

#[derive(Clone, Debug)]
pub struct Config {
    /// Holds the database `coracle.db` and the server's secret.
    pub state_dir: PathBuf,
    /// How many sandboxes there may be at once.
    pub sandboxes: usize,
    /// From how many on a new sandbox takes the place of a parked one.
    pub soft_sandboxes: Option<usize>,
    /// How long a sandbox with a key is kept from being parked without anybody using it.
    pub park_after: Duration,
    pub commands_per_sandbox: u32,
    /// How many snapshots one owner may have.
    pub snapshots_per_owner: usize,
    /// How many volumes one owner may have.
    pub volumes_per_owner: usize,
    /// What each owner may have at once.
    pub quotas: Quotas,
    /// The limits of a sandbox that names none, as quotas count them.
    pub usual: Resources,
    /// Whether a sandbox is refused if one of its default limits cannot be enforced.
    pub require_limits: bool,
    /// Pools that no client can change.
    pub pools: Vec<Pool>,
    /// The size of a volume that names none.
    pub volume_size: Bytes,
    /// The longest time to live that a client may ask for.
    pub longest_timeout: Option<Duration>,
    pub output: OutputSettings,
    /// How many owners have metrics of their own; `None` turns metrics per owner off. Read once, at
    /// the start.
    pub metric_owners: Option<usize>,
}

/// What is kept of the output of commands, and how long one waits for its reader.
#[derive(Clone, Copy, Debug)]
pub struct OutputSettings {
    /// What is kept of a command whose caller does not say.
    pub retention: Retention,
    /// The most that a caller may ask to be kept.
    pub max_kept: Bytes,
    /// After how long without taking a byte the reader of a command holds it back no longer.
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

/// What became of a request that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// It already held: nothing changed.
    AlreadySo,
}

/// What became of a request to have a sandbox run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    pub outcome: Outcome,
    /// If it had died.
    pub revival: Option<Revival>,
}

impl From<Outcome> for Resumed {
    fn from(outcome: Outcome) -> Self {
        Self { outcome, revival: None }
    }
}

/// A sandbox to be made.
#[derive(Clone, Debug)]
pub struct Create {
    /// The front that asks.
    pub origin: &'static str,
    pub spec: Spec,
    pub labels: Labels,
    /// Bytes that the front stores and alone understands.
    pub notes: Vec<u8>,
    /// After how long it expires. Zero is never. `None` is the snapshot's, else never.
    pub timeout: Option<Duration>,
    /// After how long without use it ends. Zero is never. `None` is the snapshot's, else never.
    pub idle_timeout: Option<Duration>,
    /// The pool to take it from. Without one it is taken from any that fits.
    pub pool: Option<String>,
    /// Which parts of the spec hold a default of the front, since the caller did not name them.
    pub defaulted: Vec<Defaulted>,
    /// Completes `notes` with those of the sandbox that this one inherits from.
    pub merge_notes: MergeNotes,
}

/// A front's rule for the bytes that it stores with a sandbox: its own of the request, and the
/// settings of the sandbox to inherit from, become those of the new sandbox.
pub type MergeNotes = fn(&[u8], &SandboxSettings) -> Vec<u8>;

/// A part of a spec that the front filled in because the caller did not name it. In a sandbox that
/// is made from a snapshot, or in the place of one that died, the value of that takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defaulted {
    /// The image. A snapshot has its own, so this matters only in the place of one that died.
    Image,
    Network,
    Guest,
    /// The file of variables, and the variable that names it.
    EnvironmentFile(&'static str),
}

/// The sandbox of a key.
#[derive(Clone, Debug)]
pub struct Acquired {
    pub sandbox: Sandbox,
    /// Whether it was made for this call.
    pub fresh: bool,
    /// What became of the one that had died under this key.
    pub revival: Option<Revival>,
}

/// What became of a sandbox that had died, when somebody wanted it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revival {
    pub how: Revived,
    /// Why it had died.
    pub cause: Cause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revived {
    /// It runs again with its files.
    Restarted,
    /// It, or another in its place, runs with an empty disk, as its creator wished.
    Replaced,
    /// Another is in its place with an empty disk, because its files were lost.
    FilesLost,
}

impl Revived {
    /// What the first event of a sandbox in the place of a dead one has as its cause.
    pub(crate) fn cause_of_successor(self) -> Option<Cause> {
        match self {
            Self::Restarted => None,
            Self::Replaced => Some(Cause::Replaced),
            Self::FilesLost => Some(Cause::FilesLost),
        }
    }

    /// The word for answers and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Restarted => "restart",
            Self::Replaced => "replace",
            Self::FilesLost => "files-lost",
        }
    }
}

/// A sandbox as it is at one moment.
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
    /// After how long without use it ends.
    pub idle_timeout: Option<Duration>,
    /// The pool it was taken from.
    pub pool: Option<String>,
    /// The name that its owner gave it on purpose, in the space [`NAMES`].
    pub name: Option<String>,
    /// Whether its files are there; they can be lost only when it has died.
    pub files: Files,
}

impl Sandbox {
    /// Refuses if nothing can be asked of it in its phase.
    pub fn check_usable(&self) -> Result<(), ServiceError> {
        let (id, request, phase) = (self.id.clone(), Request::Use, self.phase);
        match phase.judge(request) {
            Verdict::Accept | Verdict::AlreadySo => Ok(()),
            // One that comes back with an empty disk needs no files for that.
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

/// Which sandboxes to list: those with all of `labels` whose phase passes.
pub struct Filter<'a> {
    pub labels: Labels,
    pub phase: &'a (dyn Fn(&Phase) -> bool + Sync),
    pub offset: usize,
    pub limit: usize,
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct Page {
    pub items: Vec<Sandbox>,
    /// How many there are in all that pass the filter.
    pub total: usize,
}

impl Service {
    /// Opens the store, adopts what lives, finishes half-done work and starts the reaper.
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

    /// Stops the drivers and the store; sandboxes stay. Returns how many stay.
    pub async fn stop(&self) -> usize {
        self.0.stop.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
        self.0.store.close().await;
        let alive = |handle: &Arc<Handle>| !matches!(handle.phase(), Phase::Failed(_) | Phase::Stopped);
        self.0.registry.all().iter().filter(|handle| alive(handle)).count()
    }

    /// Removes every sandbox, of all owners. One that cannot be removed keeps none of the others;
    /// it is left to the next start. Returns how many are left.
    pub async fn remove_all(&self) -> usize {
        let orders = futures_util::stream::iter(self.0.registry.all());
        let orders = orders.map(|handle| async move {
            let outcome = self.0.order(&handle, Command::Destroy).await;
            match outcome {
                Ok(_) | Err(ServiceError::NoSandbox(_)) => 0,
                Err(error) => {
                    tracing::error!(sandbox = %handle.id, error = %error::chain(&error), "it is left");
                    1
                }
            }
        });
        orders.buffer_unordered(history::AT_ONCE).fold(0, |left, one| async move { left + one }).await
    }

    /// Answers when a command can run. Dropping the future undoes it.
    pub async fn create(&self, owner: &Owner, wish: Create) -> Result<Sandbox, ServiceError> {
        let began = Instant::now();
        let created =
            self.0.create(owner, None, wish).await.inspect_err(self.0.failed("create", owner, None))?;
        measure::created(began.elapsed());
        tracing::info!(sandbox = %created.id, origin = created.origin, "a sandbox was created");
        Ok(created)
    }

    /// The sandbox that the key leads to, made if there is none. One that died is started again or
    /// replaced, as its [`domain::OnDeath`] says. It is held until [`Service::release`], or until
    /// nobody has used it for a while.
    pub async fn acquire(&self, key: &Key, wish: Create) -> Result<Acquired, ServiceError> {
        let began = Instant::now();
        let acquired =
            self.0.acquire(key, wish).await.inspect_err(self.0.failed("acquire", key.owner(), None))?;
        if acquired.fresh {
            measure::created(began.elapsed());
            let sandbox = &acquired.sandbox;
            tracing::info!(sandbox = %sandbox.id, origin = sandbox.origin, "a sandbox was created for a key");
        }
        Ok(acquired)
    }

    /// Lets the sandbox of a key be taken away when another needs its place. It stays as it is
    /// until then.
    pub fn release(&self, key: &Key) -> Outcome {
        self.0.release(key)
    }

    /// The sandbox that the key leads to now.
    pub fn find(&self, key: &Key) -> Option<Sandbox> {
        self.get(key.owner(), &self.0.names.find(key)?).ok()
    }

    /// What becomes of sandboxes from now on, or after the event `after`: of one owner's, or of all.
    pub fn events(&self, owner: Option<Owner>, after: Option<u64>) -> Events {
        Events::new(&self.0, owner, after.unwrap_or_else(|| self.0.events.newest()))
    }

    /// As [`Service::events`], beginning with the last `count` events that the owner may see.
    pub fn last_events(&self, owner: Option<Owner>, count: usize) -> Events {
        let after = self.0.events.before_last(owner.as_ref(), count);
        Events::new(&self.0, owner, after)
    }

    /// The last requests that failed, the newest first: of one owner's, or of all.
    pub fn troubles(&self, owner: Option<&Owner>) -> Vec<Trouble> {
        self.0.troubles.list(owner)
    }

    pub fn get(&self, owner: &Owner, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        Ok(self.0.find(owner, id)?.state.borrow().clone())
    }

    /// A sandbox whoever's it is, for rules about who may reach it.
    pub fn look(&self, id: &SandboxId) -> Option<Sandbox> {
        self.0.registry.find(id).map(|handle| handle.state.borrow().clone())
    }

    /// Newest first.
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

    /// Moves the expiry, to earlier or later. A sandbox that never expires is a conflict.
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

    /// Returns when it is paused.
    pub async fn pause(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        let handle = self.0.find(owner, id)?;
        self.0.order(&handle, Command::Pause).await.inspect_err(self.0.failed("pause", owner, Some(id)))
    }

    /// Returns when it runs. One that has died is restarted, which the answer tells.
    pub async fn resume(&self, owner: &Owner, id: &SandboxId) -> Result<Resumed, ServiceError> {
        let handle = self.0.find(owner, id)?;
        let resumed = match self.0.order(&handle, Command::Resume).await {
            Err(_) if handle.is_dead() => self.0.restart(&handle).await,
            resumed => resumed.map(Resumed::from),
        };
        resumed.inspect_err(self.0.failed("resume", owner, Some(id)))
    }

    /// Starts a sandbox again that has died. Returns when it runs.
    pub async fn restart(&self, owner: &Owner, id: &SandboxId) -> Result<Resumed, ServiceError> {
        let handle = self.0.find(owner, id)?;
        self.0.restart(&handle).await.inspect_err(self.0.failed("restart", owner, Some(id)))
    }

    /// Returns when it is gone.
    pub async fn destroy(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        let handle = self.0.find(owner, id)?;
        if handle.phase() == Phase::Starting {
            // It may be busy with what runs before its life, and hear of nothing else.
            handle.abandoned.cancel();
        }
        match self.0.order(&handle, Command::Destroy).await {
            // It went while the order was on its way: somebody else's, or its time was over.
            Err(ServiceError::NoSandbox(_)) => Ok(Outcome::AlreadySo),
            outcome => outcome.inspect_err(self.0.failed("destroy", owner, Some(id))),
        }
    }

    pub async fn usage(&self, owner: &Owner, id: &SandboxId) -> Result<Usage, ServiceError> {
        self.0.find(owner, id)?;
        self.0.usage_of(id).await
    }

    /// Every sandbox of one owner's, or of all, the newest first, with what it uses now.
    pub async fn survey(&self, owner: Option<&Owner>) -> Vec<(Sandbox, Option<Usage>)> {
        let looks = futures_util::stream::iter(self.0.newest_first(owner));
        let look = |handle: Arc<Handle>| async move {
            let usage = self.0.usage_of(&handle.id).await.ok();
            (handle.current(), usage)
        };
        looks.map(look).buffered(history::AT_ONCE).collect().await
    }

    /// Every sandbox of one owner's, or of all, the newest first, without asking what it uses.
    pub fn overview(&self, owner: Option<&Owner>) -> Vec<Sandbox> {
        self.0.newest_first(owner).iter().map(|handle| handle.current()).collect()
    }

    /// A sandbox of one owner's, or of anybody's, with what it uses now.
    pub async fn inspect(
        &self,
        owner: Option<&Owner>,
        id: &SandboxId,
    ) -> Result<(Sandbox, Option<Usage>), ServiceError> {
        let handle = self.0.visible(owner, id)?;
        let usage = self.0.usage_of(id).await.ok();
        Ok((handle.current(), usage))
    }

    /// What a sandbox of one owner's, or of anybody's, used in the last hour, the oldest sample first.
    pub fn samples(&self, owner: Option<&Owner>, id: &SandboxId) -> Result<Vec<Sample>, ServiceError> {
        self.0.visible(owner, id)?;
        Ok(self.0.history.samples(id))
    }

    /// What sandboxes used in each of the last `count` hours, the newest first.
    pub fn hours(&self, owner: Option<&Owner>, count: u64) -> Vec<Hour> {
        self.0.history.hours(owner, self.0.clock.now().wall, count)
    }

    pub fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    /// Whether a sandbox may run without this limit, by its name in [`Capabilities::limits`]: the
    /// host cannot enforce it, and the operator does not insist on default limits.
    pub fn may_lack_limit(&self, limit: &str) -> bool {
        !self.0.config().require_limits && !self.0.capabilities.limits.iter().any(|held| held == limit)
    }

    /// How many sandboxes there are in each phase, by its name.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.0.registry.counts()
    }

    /// The token that opens one sandbox for one purpose; the same after a restart.
    pub fn token(&self, id: &SandboxId, purpose: &'static str) -> Secret {
        let epoch = self.0.registry.find(id).map_or(0, |handle| handle.epoch);
        self.0.mint.token(id, purpose, epoch)
    }

    /// Whose sandbox it is, if the token is right.
    pub fn owner_by_token(&self, id: &SandboxId, purpose: &'static str, presented: &str) -> Option<Owner> {
        let handle = self.0.registry.find(id)?;
        let right = self.0.mint.is_right(id, purpose, handle.epoch, presented);
        right.then(|| handle.owner.clone())
    }

    /// Sets the one key of the configuration; its owner is [`Owner::single`].
    pub fn set_single_key(&self, key: Option<&str>) {
        self.0.keys.write().expect("nobody panics while setting a key").set_single(key);
    }

    /// Replaces the settings while the server runs. New values count from the next request on;
    /// what exists already stays as it is, even where it exceeds a new bound. `state_dir` and
    /// `pools` are ignored: they need a restart.
    pub fn set_config(&self, config: Config) {
        self.0.set_config(config);
    }

    pub fn owner_by_key(&self, presented: &str) -> Option<Owner> {
        let keys = self.0.keys.read().expect("nobody panics while setting a key");
        keys.owner(presented, self.0.clock.now().wall)
    }

    /// Hands out a key for an owner. It is shown this once and cannot be shown again.
    pub async fn issue_key(
        &self,
        owner: Owner,
        expires: Option<SystemTime>,
    ) -> Result<(ApiKey, Secret), ServiceError> {
        self.0.issue_key(owner, expires).await
    }

    /// All keys that were handed out, expired ones included.
    pub fn keys(&self) -> Vec<ApiKey> {
        self.0.keys.read().expect("nobody panics while setting a key").list()
    }

    /// Refuses the key from now on. `false` if there is none of this id.
    pub async fn revoke_key(&self, id: &str) -> Result<bool, ServiceError> {
        self.0.revoke_key(id).await
    }

    /// Whether there is no key at all, so that nobody is asked for one.
    pub fn keyless(&self) -> bool {
        self.0.keys.read().expect("nobody panics while setting a key").is_empty()
    }
}
