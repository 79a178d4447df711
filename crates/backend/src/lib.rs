//! A place where sandboxes live, as a trait: this host's namespaces today; Docker, gVisor and a
//! cluster later.

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod images;

use std::sync::Arc;

use domain::{Bytes, Cause, Files, Mount, Network, Resources, SandboxId, SnapshotId, Spec, Volume, VolumeId};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

/// A place where sandboxes live.
///
/// A backend makes a sandbox, freezes it, removes it, and opens a byte stream to the agent
/// inside. Commands and files travel over that stream, so no backend knows of them. The
/// contract, which `backend::conformance` runs on each one:
/// - `create` leaves a reachable agent, or nothing at all;
/// - `destroy` of something already gone succeeds;
/// - `stop` and a `restart` that fails leave the files, where `Capabilities::restart` says so;
/// - `list` names all that this backend owns, so a restarted server can adopt it.
#[async_trait::async_trait]
pub trait Backend: Send + Sync {
    fn name(&self) -> &'static str;
    /// What this host really offers. Asked once at start-up, never guessed.
    async fn probe(&self) -> Result<Capabilities, BackendError>;
    /// Answers when the agent inside can be dialled.
    async fn create(&self, id: &SandboxId, spec: &Spec) -> Result<InForce, BackendError>;
    /// Stops every command; the agent still answers.
    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError>;
    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError>;
    /// Ends every process of a sandbox and gives back all that it has, except its disk. Answers
    /// with what it had used, and whether its files are still there: a backend whose disks end with
    /// the processes has lost them. Stopping what is stopped or gone already is no error.
    async fn stop(&self, id: &SandboxId) -> Result<Stopped, BackendError>;
    /// Makes a sandbox again on the disk that `stop` left, with the image it was made of. If that
    /// fails, the disk is as it was. Without such a disk it answers `Gone`.
    async fn restart(&self, id: &SandboxId, spec: &Spec) -> Result<InForce, BackendError>;
    /// Answers when nothing is left of it, with what it had used, as far as anybody knows.
    async fn destroy(&self, id: &SandboxId) -> Result<Usage, BackendError>;
    async fn list(&self) -> Result<Vec<Found>, BackendError>;
    async fn dial(&self, id: &SandboxId) -> Result<AgentStream, BackendError>;
    async fn usage(&self, id: &SandboxId) -> Result<Usage, BackendError>;
    /// Makes mounts visible inside a living sandbox: all of them, or none.
    async fn attach(&self, id: &SandboxId, mounts: &[Mount]) -> Result<Measures, BackendError>;
    /// Makes a volume that outlives sandboxes. One that exists already stays as it is.
    async fn make_volume(&self, volume: &Volume) -> Result<(), BackendError>;
    /// Removes a volume that no sandbox uses, with all it holds. One that is gone already is no error.
    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError>;
    /// Every volume that is whole and can be read, so that a restarted server knows them again. What
    /// a backend has half made it removes by itself.
    async fn volumes(&self) -> Result<Vec<FoundVolume>, BackendError>;
    /// What these volumes hold now. One of which nobody knows it is missing in the answer.
    async fn volumes_hold(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError>;
    /// Gives a living sandbox other limits, those that are left open as at its creation, and says
    /// what holds now. What cannot be enforced fails, and then nobody knows which limits hold.
    async fn resize(&self, id: &SandboxId, resources: &Resources) -> Result<Measures, BackendError>;
    /// The image that a sandbox would get by this name, as `InForce` would tell it.
    async fn resolve(&self, image: &str) -> Result<ResolvedImage, BackendError>;
    /// Gives a living sandbox that was made without one its network. Asking again changes nothing.
    async fn connect(&self, id: &SandboxId, network: Network) -> Result<Measures, BackendError>;
    /// Keeps the files of a sandbox as they are at one moment. The commands of one that lives stand
    /// still meanwhile and go on afterwards, whatever becomes of the snapshot; one that is stopped
    /// stays so. Asked a second time for the same snapshot it answers with the first.
    async fn snapshot(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<KeptFiles, BackendError>;
    /// Drops a snapshot; sandboxes made from it keep their files. One that is gone is no error.
    async fn forget_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError>;
    /// All snapshots that this backend has or is making.
    async fn snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError>;
    /// The images it keeps, if it keeps any.
    fn images(&self) -> Option<&dyn Images> {
        None
    }
    /// Sandboxes that end without `destroy`, as they end. There is one listener: the service.
    fn deaths(&self) -> mpsc::UnboundedReceiver<Death>;
}

pub use images::{ArchiveStream, Credentials, Freed, Here, ImageInfo, Images, Progress, Pull, Registry};

pub type SharedBackend = Arc<dyn Backend>;

/// A connection to an agent.
pub type AgentStream = Box<dyn Duplex>;

/// Both directions of a byte stream.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// What a backend can do on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    pub pause: bool,
    pub attach: bool,
    /// Whether there are volumes that outlive sandboxes.
    pub volumes: bool,
    /// Whether the files of a sandbox can be kept and given to others.
    pub snapshot: bool,
    /// Whether the files of a sandbox outlive its processes, so that it can be restarted.
    pub restart: bool,
    /// Whether a sandbox can reach other machines.
    pub network: bool,
    /// The limits that are enforced, by name: `memory`, `cpus`, `pids`, `disk`.
    pub limits: Vec<String>,
    /// What holds less than it should here, each as a sentence.
    pub weaker: Vec<String>,
    /// Names and versions of what the image `host` has: its system, and programs that images are named after.
    pub host_versions: Vec<(String, String)>,
}

/// The image that a name leads to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedImage {
    pub name: String,
    /// Set if another image was named, which is not here: a sentence that names both and says what
    /// the used one has.
    pub stand_in: Option<String>,
}

/// How to get an image that is not here.
pub const WAYS_TO_AN_IMAGE: &str = "`coracle image pull NAME` or `coracle image import NAME FILE` provides it; an entry in \
     `images.aliases` lets another image stand in; `coracle image ls` lists what is here";

/// Entries that replace those of the same name in what is in force, or are new there.
pub type Measures = Vec<(String, String)>;

/// What really holds for one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// The image that was used, after aliases.
    pub image: String,
    /// As in [`ResolvedImage`].
    pub stand_in: Option<String>,
    /// Name and value of each measure, such as `memory` → `cgroup v1, 512Mi`.
    pub measures: Measures,
    /// Defaults that could not be enforced, each as a sentence.
    pub weaker: Vec<String>,
}

/// A sandbox as a backend finds it at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub id: SandboxId,
    pub condition: Condition,
    /// Whether there is a disk with its files.
    pub files: Files,
}

/// What is left of a sandbox that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    pub usage: Usage,
    pub files: Files,
}

/// A volume as a backend finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundVolume {
    pub volume: Volume,
    /// What it holds now.
    pub used: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Alive,
    Frozen,
    /// Its processes are gone. It can be stopped, to be restarted later, or destroyed.
    Dead,
    /// Made or removed in part.
    Half,
}

/// What a snapshot holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptFiles {
    /// The image below the files, after aliases.
    pub image: String,
    /// How many bytes lie above the image.
    pub size: Bytes,
    /// The limit on the disk of the sandbox.
    pub disk: Bytes,
}

/// A snapshot as a backend finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSnapshot {
    pub id: SnapshotId,
    pub stage: Stage,
}

/// How far a snapshot is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    Complete(KeptFiles),
    /// It is being made; so many bytes of so many, where they are copied.
    Making(Option<(Bytes, Bytes)>),
}

/// A sandbox ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death {
    pub id: SandboxId,
    pub cause: Cause,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub memory: Option<Bytes>,
    pub memory_limit: Option<Bytes>,
    /// Processor time used so far.
    pub cpu_micros: Option<u64>,
    /// Thousandths of a core it may use.
    pub cpu_limit: Option<u32>,
    pub pids: Option<u64>,
    pub pids_limit: Option<u32>,
    pub disk: Option<Bytes>,
    pub disk_limit: Option<Bytes>,
    pub oom_kills: Option<u64>,
}

/// What is wrong with a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountFault {
    /// The operator does not allow its source.
    NotAllowed,
    NotFound,
    /// A missing directory could not be made.
    NotMade,
    SubPath,
    Target,
    NoVolume,
    Failed,
}

/// A backend could not do something.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A step of making a sandbox failed; nothing of it is left.
    #[error("step `{step}` failed: {message}")]
    Step { step: String, message: String, hint: Option<String> },
    /// The spec asks for what this backend or host does not offer.
    #[error("{message}")]
    Unsupported { message: String, hint: Option<String> },
    /// The spec asks for more or less than one sandbox may have here.
    #[error("{message}")]
    TooMuch { message: String, hint: Option<String> },
    /// Something cannot be mounted.
    #[error("{message}")]
    Mount { fault: MountFault, message: String, hint: Option<String> },
    /// The image or snapshot that was named is not here.
    #[error("{message}")]
    NoImage { message: String, hint: Option<String> },
    /// An image could not be fetched or unpacked.
    #[error("image `{image}` could not be pulled: {message}")]
    Pull { image: String, message: String, hint: Option<String> },
    /// What a client sends could not be read to its end.
    #[error("could not read the upload: {0}")]
    Upload(std::io::Error),
    #[error("there is no such sandbox")]
    Gone,
    /// No room for another sandbox now; later there may be.
    #[error("{0}")]
    Exhausted(String),
    #[error("could not {action}")]
    Io { action: &'static str, source: std::io::Error },
}

impl InForce {
    /// Takes in what has changed.
    pub fn replace(&mut self, changed: Measures) {
        for (name, value) in changed {
            match self.measures.iter_mut().find(|(known, _)| *known == name) {
                Some(known) => known.1 = value,
                None => self.measures.push((name, value)),
            }
        }
    }
}

impl BackendError {
    /// What somebody could do about it.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Step { hint, .. }
            | Self::Unsupported { hint, .. }
            | Self::TooMuch { hint, .. }
            | Self::Mount { hint, .. }
            | Self::NoImage { hint, .. }
            | Self::Pull { hint, .. } => hint.as_deref(),
            // Why exactly stands in the log: it names paths of the host.
            Self::Exhausted(_) => {
                Some("the disk or the ids of this host are used up; remove sandboxes or free some")
            }
            Self::Gone | Self::Upload(_) | Self::Io { .. } => None,
        }
    }
}
