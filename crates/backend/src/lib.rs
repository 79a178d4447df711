//! The backend trait: an environment that runs sandboxes. The only
//! one so far is `backend-local`.

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod enforced;
pub mod host_software;
pub mod images;
pub mod network_filter;
pub mod reconfigure;
pub mod resolved_spec;
pub mod secret_vaults;
pub mod snapshots;
pub mod volumes;

use std::sync::Arc;

use domain::{Bytes, EndCause, FilesState, SandboxId};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

/// An environment that runs sandboxes.
///
/// A backend creates a sandbox, freezes it, removes it, and opens a byte stream to the agent inside. Commands
/// and files travel over that stream, so no backend has to know about them. The contract, which
/// `backend::conformance` checks for each backend:
/// - `create` leaves a reachable agent, or nothing at all;
/// - `destroy` of a sandbox that is already gone succeeds;
/// - `stop` and a failed `restart` keep the files, if `BackendCapabilities::restart` is set;
/// - `list_sandboxes` returns everything that this backend owns, so that a restarted server can adopt it.
///
/// What only some backends can do is in traits of its own, which a backend may offer: [`Images`],
/// [`Volumes`], [`Snapshots`], [`Reconfigure`], [`NetworkFilter`] and [`SecretVaults`].
#[async_trait::async_trait]
pub trait Backend: Send + Sync {
    fn name(&self) -> &'static str;
    /// Determines the features that this host really offers. Called once at start-up.
    async fn probe(&self) -> Result<BackendCapabilities, BackendError>;
    /// Returns when the agent inside can be dialled.
    async fn create(&self, id: &SandboxId, plan: &ResolvedSpec) -> Result<Enforced, BackendError>;
    /// Freezes every command; the agent still replies.
    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError>;
    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError>;
    /// Ends every process of a sandbox and releases all its resources except its disk. Returns the resources
    /// it had used, and whether its files still exist: a backend whose disks end with the processes has lost
    /// them. Stopping a stopped or removed sandbox is not an error.
    async fn stop(&self, id: &SandboxId) -> Result<StoppedSandbox, BackendError>;
    /// Starts a sandbox again on the disk that `stop` left, with its original image. If that fails, the disk
    /// is unchanged. Without such a disk it returns `Gone`.
    async fn restart(&self, id: &SandboxId, plan: &ResolvedSpec) -> Result<Enforced, BackendError>;
    /// Returns when the sandbox is completely removed, with the resources it had used, as far as known.
    async fn destroy(&self, id: &SandboxId) -> Result<SandboxUsage, BackendError>;
    async fn list_sandboxes(&self) -> Result<Vec<FoundSandbox>, BackendError>;
    async fn dial_agent(&self, id: &SandboxId) -> Result<AgentStream, BackendError>;
    async fn usage(&self, id: &SandboxId) -> Result<SandboxUsage, BackendError>;
    /// Returns the number of open files of each running sandbox. A backend whose sandboxes do not share the
    /// table of open files of the server's host returns none.
    async fn open_files(&self) -> Result<Vec<(SandboxId, u64)>, BackendError> {
        Ok(Vec::new())
    }
    /// Receives sandboxes that end without `destroy`, as they end. There is one receiver: the service.
    fn watch_deaths(&self) -> mpsc::UnboundedReceiver<SandboxDeath>;
    /// The images that it stores, if any.
    fn images(&self) -> Option<&dyn Images> {
        None
    }
    /// Its volumes that outlive sandboxes, if it has any.
    fn volumes(&self) -> Option<&dyn Volumes> {
        None
    }
    /// Its snapshots, if it can take any.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }
    /// Changes to running sandboxes, if it can make any.
    fn reconfigure(&self) -> Option<&dyn Reconfigure> {
        None
    }
    /// The filter of networks, if it has one.
    fn network_filter(&self) -> Option<&dyn NetworkFilter> {
        None
    }
    /// The vaults of secrets, if it has them.
    fn secret_vaults(&self) -> Option<&dyn SecretVaults> {
        None
    }
}

pub use enforced::{Enforced, EnforcedMeasures, LimitName, Measure, NetworkState};
pub use host_software::{HostProgram, HostSoftware, OsRelease};
pub use images::{
    ArchiveStream, FreedSpace, ImageInfo, ImagePull, ImageRegistry, Images, LocalLayers, PullProgress,
    RegistryCredentials,
};
pub use network_filter::{
    LogWait, NetworkCounters, NetworkFilter, NetworkLogPage, NetworkRecord, NetworkRecordKind, NetworkTotals,
};
pub use reconfigure::Reconfigure;
pub use resolved_spec::{LimitPlan, ResolvedSpec};
pub use secret_vaults::{ActiveVault, SecretVaults, VaultAuthority};
pub use snapshots::{FoundSnapshot, SnapshotContent, SnapshotStage, Snapshots};
pub use volumes::{FoundVolume, Volumes};

pub type SharedBackend = Arc<dyn Backend>;

impl dyn Backend {
    /// The images, or the error for a backend without any.
    pub fn required_images(&self) -> Result<&dyn Images, BackendError> {
        self.images().ok_or_else(|| BackendError::not_offered("images"))
    }

    /// The volumes, or the error for a backend without any.
    pub fn required_volumes(&self) -> Result<&dyn Volumes, BackendError> {
        self.volumes().ok_or_else(|| BackendError::not_offered("volumes"))
    }

    /// The snapshots, or the error for a backend without any.
    pub fn required_snapshots(&self) -> Result<&dyn Snapshots, BackendError> {
        self.snapshots().ok_or_else(|| BackendError::not_offered("snapshots"))
    }

    /// The changes to running sandboxes, or the error for a backend that cannot make any.
    pub fn required_reconfigure(&self) -> Result<&dyn Reconfigure, BackendError> {
        self.reconfigure().ok_or_else(|| BackendError::not_offered("changes to running sandboxes"))
    }

    /// The filter of networks, or the error for a backend without one.
    pub fn required_network_filter(&self) -> Result<&dyn NetworkFilter, BackendError> {
        self.network_filter().ok_or_else(|| BackendError::not_offered("network `filtered`"))
    }

    /// The vaults of secrets, or the error for a backend without them.
    pub fn required_secret_vaults(&self) -> Result<&dyn SecretVaults, BackendError> {
        self.secret_vaults().ok_or_else(|| BackendError::not_offered("credential vaults"))
    }
}

/// A connection to an agent.
pub type AgentStream = Box<dyn ByteStream>;

/// Both directions of a byte stream.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// The features of a backend on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendCapabilities {
    pub pause: bool,
    pub attach: bool,
    /// Whether it supports volumes that outlive sandboxes.
    pub volumes: bool,
    /// Whether the files of a sandbox can be saved and used by other sandboxes.
    pub snapshot: bool,
    /// Whether the files of a sandbox outlive its processes, so that it can be restarted.
    pub restart: bool,
    /// Whether a sandbox can reach other machines.
    pub network: bool,
    /// Whether a sandbox can reach what a policy allows, and nothing else.
    pub filtered: bool,
    /// The limits that are enforced.
    pub limits: Vec<LimitName>,
    /// The limits and protections that are weaker than they should be here, each as a sentence.
    pub degraded: Vec<String>,
    /// Names and versions of the software in the image `host`: its system, and programs that images are named
    /// after.
    pub host_versions: Vec<(String, String)>,
}

/// The target under which the durations of creates are logged, at level `trace`.
pub const STAGE_LOG_TARGET: &str = "create_stages";

/// A hint on how to get a missing image.
pub const MISSING_IMAGE_HINT: &str = "`coracle image pull NAME` or `coracle image import NAME FILE` adds it; an entry in \
     `images.aliases` substitutes another image; `coracle image ls` lists the available images";

/// A sandbox that a backend finds at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSandbox {
    pub id: SandboxId,
    pub condition: FoundCondition,
    /// Whether a disk with its files exists.
    pub files: FilesState,
}

/// The state of a sandbox after it was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedSandbox {
    pub usage: SandboxUsage,
    pub files: FilesState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundCondition {
    Alive,
    Frozen,
    /// Its processes are gone. It can be stopped, in order to restart it later, or destroyed.
    Dead,
    /// Only partly created or removed.
    Half,
}

/// A sandbox that ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxDeath {
    pub id: SandboxId,
    pub cause: EndCause,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SandboxUsage {
    pub memory: Option<Bytes>,
    pub memory_limit: Option<Bytes>,
    /// The pages of files that were read again after they had been dropped for lack of memory, so far. Known only
    /// while a sandbox is near its memory limit.
    pub refaults: Option<u64>,
    /// The part of its memory that pages of files take. Known only while a sandbox is near its memory limit.
    pub file_memory: Option<Bytes>,
    /// Processor time used so far.
    pub cpu_micros: Option<u64>,
    /// The thousandths of a core it may use.
    pub cpu_limit: Option<u32>,
    pub pids: Option<u64>,
    pub pids_limit: Option<u32>,
    pub disk: Option<Bytes>,
    pub disk_limit: Option<Bytes>,
    pub oom_kills: Option<u64>,
}

/// The reason why a mount is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountFault {
    /// The operator does not allow its source.
    NotAllowed,
    NotFound,
    /// A missing directory could not be created.
    NotMade,
    SubPath,
    Target,
    NoVolume,
    Failed,
}

/// An operation of a backend failed.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A step of creating a sandbox failed; nothing of the sandbox is left.
    #[error("step `{step}` failed: {message}")]
    Step { step: String, message: String, hint: Option<String> },
    /// The spec requires a feature that this backend or host does not offer.
    #[error("{message}")]
    Unsupported { message: String, hint: Option<String> },
    /// The spec is above the maximum or below the minimum for one sandbox on this host.
    #[error("{message}")]
    TooMuch { message: String, hint: Option<String> },
    /// A mount is not possible.
    #[error("{message}")]
    Mount { fault: MountFault, message: String, hint: Option<String> },
    /// The named image or snapshot does not exist.
    #[error("{message}")]
    NoImage { message: String, hint: Option<String> },
    /// An image could not be pulled or unpacked.
    #[error("image `{image}` could not be pulled: {message}")]
    Pull { image: String, message: String, hint: Option<String> },
    /// A client's upload could not be read completely.
    #[error("could not read the upload: {0}")]
    Upload(std::io::Error),
    #[error("there is no such sandbox")]
    Gone,
    /// There are no resources for another sandbox now; there may be later.
    #[error("{0}")]
    Exhausted(String),
    #[error("could not {action}")]
    Io { action: &'static str, source: std::io::Error },
}

impl BackendCapabilities {
    /// Withdraws the features that depend on a trait which `backend` does not offer.
    pub fn limited_to(self, backend: &dyn Backend) -> Self {
        Self {
            attach: self.attach && backend.reconfigure().is_some(),
            volumes: self.volumes && backend.volumes().is_some(),
            snapshot: self.snapshot && backend.snapshots().is_some(),
            filtered: self.filtered && backend.network_filter().is_some(),
            ..self
        }
    }
}

impl BackendError {
    fn not_offered(feature: &str) -> Self {
        Self::Unsupported { message: format!("this backend does not support {feature}"), hint: None }
    }

    /// A hint on how to fix the problem.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Step { hint, .. }
            | Self::Unsupported { hint, .. }
            | Self::TooMuch { hint, .. }
            | Self::Mount { hint, .. }
            | Self::NoImage { hint, .. }
            | Self::Pull { hint, .. } => hint.as_deref(),
            // The exact reason is only logged, because it names paths of the host.
            Self::Exhausted(_) => {
                Some("the disk or the ids of this host are used up; remove sandboxes or free some")
            }
            Self::Gone | Self::Upload(_) | Self::Io { .. } => None,
        }
    }
}
