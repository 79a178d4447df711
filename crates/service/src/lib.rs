//! The one core that every front calls: [`Service`], whose methods are the use cases.
//!
//! All sandboxes are held in memory, in the registry; the store is the durable copy. Each sandbox has a driver, which
//! alone changes its phase. Commands and file operations go straight to the agent inside the sandbox, each over its own
//! connection.

mod agent;
mod backend_check;
mod clock;
mod core;
mod error;
mod exec;
mod files;
mod images;
mod network;
mod pools;
mod ports;
mod reconcile;
mod sandboxes;
mod snapshots;
mod store;
mod telemetry;
mod tenancy;
#[cfg(test)]
mod tests;
mod vaults;
mod volumes;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use backend::SharedBackend;
use domain::{
    Bytes, EndCause, FilesState, KeyHandle, Labels, LifecycleRequest, NetworkAccess, NetworkPolicy, OnDeath,
    OutputRetention, Owner, Phase, PoolSpec, SandboxId, SandboxKey, SandboxLimits, SandboxSettings,
    SandboxSpec, SnapshotId, Verdict,
};
use futures_util::StreamExt;

use crate::clock::Clock;
use crate::core::Core;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::reaper;
use crate::sandboxes::registry::SandboxHandle;
use crate::sandboxes::sandbox_keys::handle_of_key;
use crate::telemetry::{events, file_table, service_metrics, usage_history};

pub use agent::client::AgentError;
pub use backend::{
    AgentStream, ArchiveStream, BackendCapabilities, Enforced, FreedSpace, ImageInfo, LimitName, MountFault,
    NetworkLogPage, NetworkRecord, NetworkRecordKind, RegistryCredentials, SandboxUsage,
};
pub use domain::IsolatedSessionStatus;
pub use error::{ErrorKind, FileError, FileFault, LaunchStep, ServiceError};
pub use exec::code_output::{CodeError, CodeEvent, CodeExecution, MimeForms};
pub use exec::contexts::{
    CodeContext, DisconnectPolicy, MAX_CONTEXTS, OpenContextRequest, RunCodeRequest, SandboxContexts,
    default_context_id,
};
pub use exec::named_contexts::{
    ContextOpening, NamedContext, NamedContextRequest, context_of_name, draw_context_name,
};
pub use exec::output_stream::{OutputEvent, OutputStream, ProcessInput};
pub use exec::processes::{
    FollowedOutput, ProcessEnd, ProcessStatus, ProcessTree, SandboxProcesses, SignalTarget, TreeFilter,
    TreeKind, TreeUsage,
};
pub use exec::sessions::{
    BusyPolicy, OpenSessionRequest, RunShell, SandboxSessions, SessionRunRequest, SessionStatus,
};
pub use exec::shared_sessions::{
    CommandSessionSpec, IdleLimitUpdate, RequestTime, SharedSessionKind, SharedSessionRequest,
    SharedSessionUpdate, SharedSessionUse, draw_session_id, session_of_name,
};
pub use exec::terminals::{
    CreateTerminalRequest, DEFAULT_TERMINAL_SIZE, MissedOutput, OpenTerminal, SandboxTerminals,
    TERMINAL_TYPE, TerminalAttachment, TerminalMode, TerminalSession, TerminalStatus,
};
pub use exec::wait::{WaitLimits, WaitOutcome};
pub use files::edit::{
    EditContents, EditedFile, LineEnds, MAX_RETURNED_CONTENT, TextEdit, TextOccurrence, UndoOutcome,
    UndoPolicy, UndoneEdit,
};
pub use files::search::{
    GlobKinds, GlobMatch, GlobMatches, GlobOrder, GlobQuery, GrepMatch, GrepMatches, GrepPattern, GrepQuery,
};
pub use files::transfer::{FileReader, FileWatch, FileWriter};
pub use files::{
    FileAttributes, FileCaller, FileChange, FileEdit, FileInfo, FileKind, SandboxFiles, WatchEvent,
    WriteFileRequest, WriteMode,
};
pub use images::PullState;
pub use images::aliases::{AliasRule, ImageAliases, NoImageError, ResolvedImage, StandIn};
pub use network::{NetworkLogReader, PolicyChange, SandboxNetwork};
pub use pools::{PoolReport, PoolSource};
pub use ports::SandboxPorts;
pub use sandboxes::hooks::{HookReport, HookRun};
pub use sandboxes::sandbox_ref::SandboxRef;
pub use snapshots::{CommitSource, SandboxSnapshots, SnapshotFilter, SnapshotPage};
pub use store::{StoreError, copy_database};
pub use telemetry::cpu_share::SandboxLoad;
pub use telemetry::diagnostics::OutputTail;
pub use telemetry::events::{FeedItem, FeedReader, LifecycleEvent, OperatorAction, OperatorEvent};
pub use telemetry::owner_metrics::{OwnerLabel, OwnerMetrics};
pub use telemetry::recent_errors::RecentError;
pub use telemetry::service_metrics::set_total_limit;
pub use telemetry::usage_history::{HourlyUsage, SAMPLE_INTERVAL, UsageSample, UsageTotals};
pub use tenancy::api_keys::ApiKey;
pub use tenancy::operator::{OperatorActionKind, OperatorObjectKind, RevokedKey};
pub use tenancy::quota::{OwnerQuota, OwnerQuotas, QuotaExcess, QuotaResource};
pub use tenancy::tokens::Secret;
pub use vaults::{SandboxVault, VaultAccessError};
pub use volumes::VolumeStatus;

/// How long a sandbox that is asked whether it is alive may take to answer.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether the sandbox of a key is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyLiveness {
    /// The key leads to no sandbox.
    Absent,
    /// The sandbox exists, and does not answer: it is starting, paused, ending or dead.
    NotAlive,
    Alive,
}

/// How far the removal of a key's sandbox has come. The key is free in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRemoval {
    /// The key led to no sandbox.
    Absent,
    Done,
    /// The sandbox takes long to end; its driver continues.
    Continues,
}

/// The key space of the names that people and programs give to sandboxes.
pub const NAME_KEY_SPACE: &str = "name";

/// The key space of the keys that clients send so that a retry finds the sandbox its first attempt made. Such a key
/// never restarts a sandbox that died: it leads to a new one.
pub const RETRY_KEY_SPACE: &str = "opensandbox idempotency";

/// How many sandboxes are removed at once when all of them are.
const MAX_CONCURRENT_REMOVALS: usize = 32;

/// The core. A clone is a handle to the same core.
#[derive(Clone)]
pub struct Service(Arc<Core>);

#[derive(Clone, Debug)]
pub struct ServiceConfig {
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
    pub quotas: OwnerQuotas,
    /// The limits of a sandbox whose creator named none.
    pub default_limits: SandboxLimits,
    /// Whether a sandbox is refused if one of its default limits cannot be enforced.
    pub require_limits: bool,
    /// The images that are used instead of missing ones.
    pub aliases: ImageAliases,
    /// Pools from the configuration, which no client can change.
    pub pools: Vec<PoolSpec>,
    /// The size of a volume created without a size.
    pub volume_size: Bytes,
    /// The longest time to live that a client may ask for.
    pub max_timeout: Option<Duration>,
    pub output: OutputSettings,
    /// The widest network that a client may ask for.
    pub most_network: NetworkAccess,
    /// The policy of a filtered sandbox whose client names none; `None` means that it reaches nothing.
    pub default_policy: Option<Arc<NetworkPolicy>>,
    /// How many owners have their own metrics; `None` turns metrics per owner off. This is read once, at the start.
    pub metric_owners: Option<usize>,
    /// The part of the host's table of open files, in percent, at which the sandbox with the most of them is ended.
    pub open_files_percent: u8,
}

/// How much output of commands is kept, and how long a command waits for its reader.
#[derive(Clone, Copy, Debug)]
pub struct OutputSettings {
    /// The retention of a command whose caller does not set one.
    pub retention: OutputRetention,
    /// The most output that a caller may ask to be kept.
    pub max_kept: Bytes,
    /// A reader that takes no byte for this long no longer holds back its command.
    pub stall_limit: Duration,
}

impl Default for OutputSettings {
    fn default() -> Self {
        Self {
            retention: OutputRetention::default(),
            max_kept: Bytes::from_mib(256),
            stall_limit: Duration::from_secs(10),
        }
    }
}

/// The result of a request that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The sandbox was in the requested state already, and nothing changed.
    Unchanged,
}

/// The result of a request to make a sandbox run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumeOutcome {
    pub outcome: Outcome,
    /// Set if the sandbox had died.
    pub revival: Option<SandboxRevival>,
}

impl From<Outcome> for ResumeOutcome {
    fn from(outcome: Outcome) -> Self {
        Self { outcome, revival: None }
    }
}

/// A request to create a sandbox.
#[derive(Clone, Debug)]
pub struct CreateSandboxRequest {
    /// The name of the front that sends the request.
    pub origin: &'static str,
    /// Where the files come from. The image and the snapshot of `spec` are set from this.
    pub source: ImageSource,
    pub spec: SandboxSpec,
    pub labels: Labels,
    /// Opaque bytes that the front stores with the sandbox; only the front reads them.
    pub notes: Vec<u8>,
    /// The time after which the sandbox expires. Zero means never. `None` takes the snapshot's value, or never without
    /// a snapshot.
    pub timeout: Option<Duration>,
    /// The time without use after which the sandbox ends. Zero means never. `None` takes the snapshot's value, or never
    /// without a snapshot.
    pub idle_timeout: Option<Duration>,
    /// The parts of the spec that hold a default of the front because the caller did not set them.
    pub defaulted: Vec<DefaultedPart>,
    /// Completes `notes` with those of the sandbox that this one inherits from.
    pub merge_notes: MergeNotes,
}

/// Where the files of a new sandbox come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// An image. If the host does not have it, it is fetched with these credentials. A warm sandbox of any pool that
    /// fits may be taken.
    Named {
        name: String,
        credentials: Option<RegistryCredentials>,
    },
    Snapshot(SnapshotId),
    /// The image of a pool. A warm sandbox of this pool is taken if there is one.
    Pool(String),
}

impl ImageSource {
    /// An image that is fetched without credentials if the host does not have it.
    pub fn from_name(name: impl Into<String>) -> Self {
        Self::Named { name: name.into(), credentials: None }
    }
}

/// A front's rule for the notes that it stores with a sandbox: combines the notes of the request with the settings of
/// the sandbox to inherit from.
pub type MergeNotes = fn(&[u8], &SandboxSettings) -> Vec<u8>;

/// A part of a spec that the front filled in because the caller did not set it. In a sandbox that is made from a
/// snapshot, or that replaces a dead one, the inherited value replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultedPart {
    /// The image. A snapshot has its own, so this matters only in the place of one that died.
    Image,
    /// The network, with its policy.
    Network,
    Guest,
    /// The env file, with the variable that holds its path.
    EnvironmentFile(&'static str),
}

/// The sandbox that a key leads to.
#[derive(Clone, Debug)]
pub struct AcquiredSandbox {
    pub sandbox: Sandbox,
    /// Whether the sandbox was created by this call.
    pub fresh: bool,
    /// How the sandbox that had died under this key was revived.
    pub revival: Option<SandboxRevival>,
}

/// How a sandbox that had died was made available again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxRevival {
    pub how: RevivalKind,
    /// Why the sandbox had died.
    pub cause: EndCause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevivalKind {
    /// The sandbox runs again with its files.
    Restarted,
    /// The sandbox, or its replacement, runs with an empty disk, as its creator requested.
    Replaced,
    /// A replacement with an empty disk runs, because the files were lost.
    FilesLost,
}

impl RevivalKind {
    /// The cause in the first event of a sandbox that replaces a dead one.
    pub(crate) fn cause_of_successor(self) -> Option<EndCause> {
        match self {
            Self::Restarted => None,
            Self::Replaced => Some(EndCause::Replaced),
            Self::FilesLost => Some(EndCause::FilesLost),
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
    pub spec: SandboxSpec,
    pub labels: Labels,
    pub notes: Vec<u8>,
    pub phase: Phase,
    pub phase_since: SystemTime,
    pub created: SystemTime,
    pub expires: Option<SystemTime>,
    pub in_force: Enforced,
    /// The time without use after which the sandbox ends.
    pub idle_timeout: Option<Duration>,
    /// The pool that the sandbox was taken from.
    pub pool: Option<String>,
    /// The name that the owner gave the sandbox, in the key space [`NAME_KEY_SPACE`].
    pub name: Option<String>,
    /// Whether the files still exist; they can be lost only when the sandbox has died.
    pub files: FilesState,
}

impl Sandbox {
    /// Refuses a sandbox that accepts no requests in its phase.
    pub(crate) fn check_usable(&self) -> Result<(), ServiceError> {
        let (id, request, phase) = (self.id.clone(), LifecycleRequest::Use, self.phase);
        match phase.judge(request) {
            Verdict::Accept | Verdict::Unchanged => Ok(()),
            // A sandbox that would be replaced does not need its files.
            Verdict::Deny
                if matches!(phase, Phase::Failed(_))
                    && self.files == FilesState::Lost
                    && self.spec.on_death() == OnDeath::Restart =>
            {
                Err(ServiceError::DeadWithoutFiles { id, request, phase })
            }
            Verdict::Deny => Err(ServiceError::Denied { id, request, phase }),
        }
    }
}

/// Selects the sandboxes that have all of `labels` and whose phase passes `phase`.
pub struct SandboxFilter<'a> {
    pub labels: Labels,
    pub phase: &'a (dyn Fn(&Phase) -> bool + Sync),
    pub offset: usize,
    pub limit: usize,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct SandboxPage {
    pub items: Vec<Sandbox>,
    /// The number of sandboxes that pass the filter, on all pages.
    pub total: usize,
}

impl Service {
    /// Opens the store, adopts living sandboxes, finishes interrupted work and starts the reaper.
    pub async fn start(config: ServiceConfig, backend: SharedBackend) -> Result<Self, ServiceError> {
        Self::start_with_clock(config, backend, Clock::from_host()).await
    }

    async fn start_with_clock(
        config: ServiceConfig,
        backend: SharedBackend,
        clock: Clock,
    ) -> Result<Self, ServiceError> {
        service_metrics::describe_metrics();
        let deaths = backend.watch_deaths();
        let (core, records, kept, volumes) = Core::open(config, backend, clock).await?;
        core.tasks.spawn(events::persist_events(Arc::clone(&core)));
        volumes::reconcile_volumes(&core, volumes, &records).await?;
        sandboxes::reconcile::reconcile_sandboxes(&core, records).await?;
        snapshots::reconcile_snapshots(&core, kept).await?;
        core.tasks.spawn(Arc::clone(&core).forward_deaths(deaths));
        core.tasks.spawn(reaper::run_reaper(Arc::clone(&core)));
        core.tasks.spawn(usage_history::record_usage(Arc::clone(&core)));
        core.tasks.spawn(file_table::guard_file_table(Arc::clone(&core)));
        core.start_pool_keepers();
        Ok(Self(core))
    }

    /// Stops the drivers and the store. Sandboxes keep running; returns how many do.
    pub async fn stop(&self) -> usize {
        self.0.tasks.stop().await;
        self.0.store.close().await;
        let alive =
            |handle: &Arc<SandboxHandle>| !matches!(handle.phase(), Phase::Failed(_) | Phase::Stopped);
        self.0.lifecycle.registry.all().iter().filter(|handle| alive(handle)).count()
    }

    /// Removes every sandbox of all owners, many at once: most of the time each waits for the kernel to end its
    /// processes. A failure to remove one does not affect the others; the next start retries
    /// it. Returns how many could not be removed.
    pub async fn remove_all_sandboxes(&self) -> usize {
        let handles = futures_util::stream::iter(self.0.lifecycle.registry.all());
        let removals = handles.map(|handle| async move {
            let outcome = self.0.send_command(&handle, DriverCommand::Destroy).await;
            match outcome {
                Ok(_) | Err(ServiceError::NoSandbox(_)) => 0,
                Err(error) => {
                    tracing::error!(sandbox = %handle.id, error = %error::error_chain(&error), "failed to remove sandbox at shutdown; the next start retries");
                    1
                }
            }
        });
        removals
            .buffer_unordered(MAX_CONCURRENT_REMOVALS)
            .fold(0, |left, one| async move { left + one })
            .await
    }

    /// Returns when a command can run in the sandbox. Dropping the future undoes the creation.
    pub async fn create_sandbox(
        &self,
        owner: &Owner,
        request: CreateSandboxRequest,
    ) -> Result<Sandbox, ServiceError> {
        let created = self.0.create_sandbox(owner, None, request).await;
        let created = created.inspect_err(self.0.record_failure("create", owner, None))?;
        tracing::info!(sandbox = %created.id, origin = created.origin, "sandbox created");
        Ok(created)
    }

    /// Returns the sandbox that the key leads to, and creates it if there is none. A sandbox that died is restarted or
    /// replaced, as its [`domain::OnDeath`] says. The sandbox is held until [`Service::release_key`], or until it is unused
    /// for `park_after`.
    pub async fn acquire(
        &self,
        key: &SandboxKey,
        request: CreateSandboxRequest,
    ) -> Result<AcquiredSandbox, ServiceError> {
        let acquired = self.0.acquire_by_key(key, request).await.inspect_err(self.0.record_failure(
            "acquire",
            key.owner(),
            None,
        ))?;
        if acquired.fresh {
            let sandbox = &acquired.sandbox;
            tracing::info!(sandbox = %sandbox.id, origin = sandbox.origin, "sandbox created for a key");
        }
        Ok(acquired)
    }

    /// Makes the successor of a crashed sandbox, as [`Service::acquire`] does; `None` if the key no longer leads to that
    /// sandbox, because it was removed or has a successor by now.
    pub async fn replace_crashed(
        &self,
        key: &SandboxKey,
        crashed: &SandboxId,
        request: CreateSandboxRequest,
    ) -> Result<Option<AcquiredSandbox>, ServiceError> {
        let replaced = self.0.replace_crashed(key, crashed, request).await;
        let replaced = replaced.inspect_err(self.0.record_failure("replace", key.owner(), Some(crashed)))?;
        if let Some(AcquiredSandbox { sandbox, .. }) = &replaced {
            tracing::warn!(sandbox = %sandbox.id, %crashed, "a request reached a crashed sandbox; its successor answers");
        }
        Ok(replaced)
    }

    /// Removes the sandbox of a key. If that takes longer than `limit`, it continues without the caller. Afterwards the
    /// key is free, even if the removal failed; the sandbox's driver then retries it.
    pub async fn remove_by_key(&self, key: &SandboxKey, limit: Duration) -> Result<KeyRemoval, ServiceError> {
        let removed = self.0.remove_by_key(key, limit).await;
        removed.inspect_err(self.0.record_failure("destroy", key.owner(), None))
    }

    /// Allows the sandbox of a key to be evicted when another sandbox needs room. Until then it stays as it is.
    pub fn release_key(&self, key: &SandboxKey) -> Outcome {
        self.0.release_key(key)
    }

    /// Returns the sandbox that the key leads to now.
    pub fn find_by_key(&self, key: &SandboxKey) -> Option<Sandbox> {
        Some(
            self.0
                .find_sandbox(key.owner(), &self.0.lifecycle.names.find_sandbox(key)?)
                .ok()?
                .current_state(),
        )
    }

    /// Finds the sandbox that the key leads to now, alive or not.
    pub fn sandbox_of_key(&self, key: &SandboxKey) -> Option<SandboxRef> {
        self.sandbox(key.owner(), &self.0.lifecycle.names.find_sandbox(key)?).ok()
    }

    /// The keys of an owner in one space that lead to a sandbox, by name.
    pub fn keys_in_space(&self, owner: &Owner, space: &str) -> Vec<SandboxKey> {
        self.0.lifecycle.names.keys_in_space(owner, space)
    }

    /// The text that stands for a key in addresses.
    pub fn key_handle(&self, key: &SandboxKey) -> KeyHandle {
        handle_of_key(key)
    }

    /// Returns the key with this handle if it is in use.
    pub fn find_key(&self, handle: &KeyHandle) -> Option<SandboxKey> {
        self.0.lifecycle.names.find_key(handle)
    }

    /// The token that opens whatever a key leads to in this epoch, for one purpose. It is the same after a restart.
    pub fn key_token(&self, key: &SandboxKey, purpose: &str, epoch: u64) -> Secret {
        self.0.tenancy.mint.derive_key_token(&handle_of_key(key), purpose, epoch)
    }

    /// Asks the sandbox of a key whether it is alive. This creates nothing, does not count as use, and waits for no other
    /// request.
    pub async fn probe_key(&self, key: &SandboxKey) -> KeyLiveness {
        let found = self.0.lifecycle.names.find_sandbox(key);
        let found = found.and_then(|id| self.sandbox(key.owner(), &id).ok());
        let Some(found) = found else { return KeyLiveness::Absent };
        let Ok(handle) = found.usable_now() else { return KeyLiveness::NotAlive };
        match tokio::time::timeout(LIVENESS_TIMEOUT, handle.agent.ping()).await {
            Ok(Ok(())) => KeyLiveness::Alive,
            Ok(Err(_)) | Err(_) => KeyLiveness::NotAlive,
        }
    }

    /// The lifecycle events from now on, or after the event `after`, of one owner's sandboxes or of all.
    pub fn follow_events(&self, owner: Option<Owner>, after: Option<u64>) -> FeedReader {
        FeedReader::new(&self.0, owner, after.unwrap_or_else(|| self.0.telemetry.events.newest_id()))
    }

    /// Like [`Service::follow_events`], beginning with the last `count` events that the owner may see.
    pub fn last_events(&self, owner: Option<Owner>, count: usize) -> FeedReader {
        let after = self.0.telemetry.events.id_before_last(owner.as_ref(), count);
        FeedReader::new(&self.0, owner, after)
    }

    /// The most recent failed requests, newest first, of one owner or of all.
    pub fn recent_errors(&self, owner: Option<&Owner>) -> Vec<RecentError> {
        self.0.telemetry.recent_errors.list(owner)
    }

    /// Lists sandboxes, newest first.
    pub fn list_sandboxes(&self, owner: &Owner, filter: &SandboxFilter<'_>) -> SandboxPage {
        self.0.lifecycle.registry.list(owner, filter)
    }

    /// Every sandbox of one owner, or of all, newest first, with its current usage.
    pub async fn list_with_usage(&self, owner: Option<&Owner>) -> Vec<(Sandbox, Option<SandboxUsage>)> {
        let looks = futures_util::stream::iter(self.0.list_newest_first(owner));
        let look = |handle: Arc<SandboxHandle>| async move {
            let usage = self.0.host.usage_of(&handle.id).await.ok();
            (handle.current_state(), usage)
        };
        looks.map(look).buffered(usage_history::MAX_CONCURRENT_CALLS).collect().await
    }

    /// Every sandbox of one owner, or of all, newest first, without its usage.
    pub fn list_without_usage(&self, owner: Option<&Owner>) -> Vec<Sandbox> {
        self.0.list_newest_first(owner).iter().map(|handle| handle.current_state()).collect()
    }

    /// The usage of sandboxes in each of the last `count` hours, newest first.
    pub fn hourly_usage(&self, owner: Option<&Owner>, count: u64) -> Vec<HourlyUsage> {
        self.0.telemetry.history.hours(owner, self.0.clock.now().wall, count)
    }

    /// Whether a client may have a filtered network here.
    pub fn offers_filter(&self) -> bool {
        self.0.host.capabilities.filtered && NetworkAccess::Filtered.is_within(self.0.config().most_network)
    }

    pub fn capabilities(&self) -> &BackendCapabilities {
        &self.0.host.capabilities
    }

    /// Whether the backend answers; if not, no sandbox can be made. The result may be a second old.
    pub async fn backend_answers(&self) -> bool {
        self.0.host.check.answers(&*self.0.host.backend).await
    }

    /// Whether a sandbox may run without this limit: the host cannot enforce it, and the operator does not require
    /// default limits.
    pub fn may_lack_limit(&self, limit: LimitName) -> bool {
        !self.0.config().require_limits && !self.0.host.capabilities.limits.contains(&limit)
    }

    /// How many commands of one sandbox may run at once.
    pub fn commands_per_sandbox(&self) -> u32 {
        self.0.config().commands_per_sandbox
    }

    /// The number of sandboxes in each phase, by the phase's name.
    pub fn count_by_phase(&self) -> BTreeMap<&'static str, usize> {
        self.0.lifecycle.registry.count_by_phase()
    }

    /// Sets the single API key of the configuration; its owner is [`Owner::operator`].
    pub fn set_operator_key(&self, key: Option<&str>) {
        self.0.tenancy.keys.write().expect("no thread panics while setting a key").set_operator_key(key);
    }

    /// Replaces the settings while the server runs. New values apply from the next request on; existing sandboxes stay
    /// as they are, even where they exceed a new limit. `state_dir` and `pools` are ignored, because they need a
    /// restart.
    pub fn set_config(&self, config: ServiceConfig) {
        self.0.set_config(config);
    }

    pub fn owner_by_key(&self, presented: &str) -> Option<Owner> {
        let keys = self.0.tenancy.keys.read().expect("no thread panics while setting a key");
        keys.find_owner(presented, self.0.clock.now().wall)
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
    pub fn list_keys(&self) -> Vec<ApiKey> {
        self.0.tenancy.keys.read().expect("no thread panics while setting a key").list()
    }

    /// Refuses the key from now on. Returns `false` if no key has this id.
    pub async fn revoke_key(&self, id: &str) -> Result<bool, ServiceError> {
        self.0.revoke_key(id).await
    }

    /// Whether no key exists at all, so that requests need none.
    pub fn has_no_keys(&self) -> bool {
        self.0.tenancy.keys.read().expect("no thread panics while setting a key").is_empty()
    }
}
