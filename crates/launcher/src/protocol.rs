//! The protocol between the server and the launcher: one JSON message for each packet, with optional
//! descriptors. A message that is too large for a packet is sent in a memfd.

use backend::{BackendError, EnforcedMeasures, FoundCondition};
use domain::{SandboxId, SnapshotId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::jail::plan::{JailLimits, JailPlan, LimitName, MountPlan};
use crate::jail::stages::StageTime;
use crate::jail::step::JailError;
use crate::network::NetworkMode;
pub use crate::process::images::{ImageOp, ImageOpResult};
use crate::uid_ranges::UidRangeError;
use crate::volumes::VolumeError;

/// The protocol version, which must be equal on both sides; the same supervisor starts both.
pub const PROTOCOL_VERSION: u32 = 1;

/// The name of the launcher's socket in the run directory.
pub const SOCKET_NAME: &str = "launcher";

#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherRequest {
    pub version: u32,
    pub number: u64,
    #[serde(rename = "question")]
    pub op: LauncherOp,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LauncherOp {
    Create(Box<JailPlan>),
    Destroy {
        #[serde(with = "crate::ids")]
        id: SandboxId,
    },
    /// Like `Destroy`, but the disk is kept. The answer is `Stopped`.
    Stop {
        #[serde(with = "crate::ids")]
        id: SandboxId,
    },
    Freeze {
        #[serde(with = "crate::ids")]
        id: SandboxId,
        frozen: bool,
    },
    /// Adds mounts to a running sandbox: all of them, or none.
    Attach {
        #[serde(with = "crate::ids")]
        id: SandboxId,
        mounts: Vec<MountPlan>,
    },
    MakeVolume(VolumePlan),
    RemoveVolume {
        #[serde(with = "crate::ids")]
        id: VolumeId,
    },
    Volumes,
    /// Asks for the usage of some volumes.
    VolumesHold {
        #[serde(with = "crate::ids::list")]
        ids: Vec<VolumeId>,
    },
    /// The answer comes with a socket from which the descriptors of all running sandboxes can be received:
    /// packets with [`WatchedIds`], until the end of the stream.
    List,
    Usage {
        #[serde(with = "crate::ids")]
        id: SandboxId,
    },
    /// The answer is `Changed`.
    Resize(ResizeRequest),
    /// Asked by earlier servers for the image that a name refers to; the server decides that now.
    Resolve {
        image: String,
    },
    /// Asked for one sandbox by earlier servers; the answer to `List` brings the descriptors now.
    Watch {
        #[serde(with = "crate::ids")]
        id: SandboxId,
    },
    /// Asks whether the agent of a dead sandbox was killed for lack of memory.
    WasOutOfMemory {
        #[serde(with = "crate::ids")]
        id: SandboxId,
    },
    /// The answer is sent when the snapshot is complete and the sandbox is thawed.
    Snapshot {
        #[serde(with = "crate::ids")]
        id: SandboxId,
        #[serde(with = "crate::ids")]
        snapshot: SnapshotId,
    },
    ForgetSnapshot {
        #[serde(with = "crate::ids")]
        snapshot: SnapshotId,
    },
    Snapshots,
    /// Gives a running sandbox its network.
    Connect {
        #[serde(with = "crate::ids")]
        id: SandboxId,
        network: NetworkMode,
    },
    /// Asks for the number of open files of each running sandbox.
    OpenFiles,
    /// Asks which limits and features this host supports.
    Report,
    Image(ImageOp),
    /// Starts a process that fetches an image for the connection whose descriptor is sent along.
    StartPull,
}

impl LauncherOp {
    /// Whether the request may be sent again if the outcome of the first one is unknown.
    pub fn may_be_repeated(&self) -> bool {
        match self {
            Self::Create(_)
            | Self::Attach { .. }
            // A second process would serve the same connection.
            | Self::StartPull
            | Self::Image(ImageOp::Remove { .. } | ImageOp::ImportArchive { .. } | ImageOp::Commit { .. }) => {
                false
            }
            Self::Destroy { .. }
            | Self::Stop { .. }
            | Self::Freeze { .. }
            | Self::MakeVolume(_)
            | Self::RemoveVolume { .. }
            | Self::Volumes
            | Self::VolumesHold { .. }
            | Self::List
            | Self::Usage { .. }
            | Self::Resize(_)
            | Self::Resolve { .. }
            | Self::Watch { .. }
            | Self::WasOutOfMemory { .. }
            | Self::Snapshot { .. }
            | Self::ForgetSnapshot { .. }
            | Self::Snapshots
            | Self::Connect { .. }
            | Self::OpenFiles
            | Self::Report
            | Self::Image(_) => true,
        }
    }
}

/// New limits for a running sandbox; all of them are given.
#[derive(Debug, Serialize, Deserialize)]
pub struct ResizeRequest {
    #[serde(with = "crate::ids")]
    pub id: SandboxId,
    pub limits: JailLimits,
    /// As in a plan.
    pub named: Vec<LimitName>,
    pub require_limits: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherResponse {
    pub number: u64,
    #[serde(rename = "answer")]
    pub result: Result<OpResult, OpError>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpResult {
    Done,
    /// Sent with the sandbox's pidfd.
    Created(EnforcedPlan),
    /// The measures that were added or changed.
    Changed(#[serde(with = "crate::measure_words")] EnforcedMeasures),
    Found(Vec<FoundSandbox>),
    Used(SandboxUsage),
    /// Each volume with its usage in bytes.
    Volumes(Vec<(VolumePlan, u64)>),
    VolumesHold(#[serde(with = "crate::ids::numbered")] Vec<(VolumeId, u64)>),
    /// The sandbox was removed completely.
    Ended {
        cpu_micros: Option<u64>,
    },
    /// The answer to `Resolve`.
    Resolved {
        image: String,
        stand_in: Option<String>,
    },
    /// Everything was removed except the disk of the sandbox, if it had one.
    Stopped {
        cpu_micros: Option<u64>,
        files: bool,
    },
    Yes(bool),
    OpenFiles(#[serde(with = "crate::ids::numbered")] Vec<(SandboxId, u64)>),
    Kept(StoredSnapshot),
    Snapshots(Vec<SnapshotListing>),
    Image(ImageOpResult),
    Report {
        limits: Vec<LimitName>,
        #[serde(rename = "weaker")]
        degraded: Vec<String>,
        pause: bool,
        snapshot: bool,
        #[serde(default)]
        attach: bool,
        #[serde(default)]
        volumes: bool,
        #[serde(default)]
        restart: bool,
        network: bool,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        filtered: bool,
        #[serde(default)]
        host_versions: Vec<(String, String)>,
    },
}

/// A volume, as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VolumePlan {
    #[serde(with = "crate::ids")]
    pub id: VolumeId,
    pub owner: String,
    pub name: String,
    pub size: u64,
    pub kept: bool,
}

/// The image and the measures that are in force for a sandbox.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EnforcedPlan {
    pub image: String,
    /// Set by earlier launchers if this image replaces the requested one; the server decides that now.
    #[serde(default)]
    pub stand_in: Option<String>,
    #[serde(with = "crate::measure_words")]
    pub measures: EnforcedMeasures,
    #[serde(rename = "weaker")]
    pub degraded: Vec<String>,
    /// Where the time of the create went.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageTime>,
}

/// The content of a complete snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct StoredSnapshot {
    pub image: String,
    pub size: u64,
    pub disk: u64,
}

/// A snapshot: its content if it is complete, otherwise the number of copied bytes and the total.
#[derive(Debug, Serialize, Deserialize)]
pub struct SnapshotListing {
    #[serde(with = "crate::ids")]
    pub id: SnapshotId,
    pub kept: Option<StoredSnapshot>,
    pub copied: Option<(u64, u64)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct FoundSandbox {
    #[serde(with = "crate::ids")]
    pub id: SandboxId,
    pub condition: SandboxCondition,
    /// Whether it has a disk.
    #[serde(default)]
    pub files: bool,
}

/// The ids of running sandboxes. Each comes with a descriptor, in the same order, that becomes readable when
/// the sandbox ends.
#[derive(Debug, Serialize, Deserialize)]
pub struct WatchedIds {
    #[serde(with = "crate::ids::list")]
    pub ids: Vec<SandboxId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxCondition {
    Alive,
    Frozen,
    Dead,
    Half,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct SandboxUsage {
    pub memory: Option<u64>,
    pub memory_limit: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refaults: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_memory: Option<u64>,
    pub cpu_micros: Option<u64>,
    pub cpu_limit: Option<u32>,
    pub pids: Option<u64>,
    pub pids_limit: Option<u32>,
    pub disk: Option<u64>,
    pub disk_limit: Option<u64>,
    pub oom_kills: Option<u64>,
}

/// The reason why the launcher refused a request or failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpError {
    pub kind: OpErrorKind,
    pub message: String,
    pub hint: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpErrorKind {
    Step(String),
    Unsupported,
    /// The request is above or below the limits for one sandbox.
    TooMuch,
    Mount(MountFault),
    NoImage,
    /// Unpacking, reading or removing an image failed.
    Image,
    Exhausted,
    Gone,
}

/// The reason why a mount was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountFault {
    NotAllowed,
    NotFound,
    NotMade,
    SubPath,
    Target,
    NoVolume,
    Failed,
}

impl OpError {
    pub fn mount(fault: MountFault, message: impl Into<String>, hint: Option<&str>) -> Self {
        let kind = OpErrorKind::Mount(fault);
        Self { kind, message: message.into(), hint: hint.map(str::to_owned) }
    }

    pub fn unsupported(message: impl Into<String>, hint: Option<&str>) -> Self {
        Self { kind: OpErrorKind::Unsupported, message: message.into(), hint: hint.map(str::to_owned) }
    }

    /// Refuses an amount that is outside its bounds; the hint names the bound.
    pub fn amount(message: String, hint: String) -> Self {
        Self { kind: OpErrorKind::TooMuch, message, hint: Some(hint) }
    }

    pub fn gone() -> Self {
        Self { kind: OpErrorKind::Gone, message: "sandbox does not exist".to_owned(), hint: None }
    }
}

impl From<JailError> for OpError {
    fn from(error: JailError) -> Self {
        let inner = error.source.get_ref();
        let volume = inner.and_then(|inner| inner.downcast_ref::<VolumeError>());
        let range = inner.and_then(|inner| inner.downcast_ref::<UidRangeError>());
        let own = volume.and_then(VolumeError::hint).or(range.and_then(UidRangeError::hint));
        let full = matches!(volume, Some(VolumeError::NoRoom { .. }))
            || matches!(range, Some(UidRangeError::Exhausted));
        let mut message = error.source.to_string();
        if let Some(path) = &error.path {
            message = format!("`{}`: {message}", path.display());
        }
        let mut cause = std::error::Error::source(&error.source);
        while let Some(source) = cause {
            message = format!("{message}: {source}");
            cause = source.source();
        }
        let setting = || {
            let fix = || crate::probe::user_namespace_fix(!linux::privileges::is_host_root());
            error.is_about_user_namespaces().then(fix).flatten()
        };
        let hint = own.map(str::to_owned).or_else(setting).or_else(|| error.hint().map(str::to_owned));
        let kind = match volume {
            _ if full => OpErrorKind::Exhausted,
            Some(VolumeError::OtherSize { .. }) => OpErrorKind::TooMuch,
            _ => OpErrorKind::Step(error.step.to_string()),
        };
        Self { kind, message, hint }
    }
}

impl From<OpError> for BackendError {
    fn from(refusal: OpError) -> Self {
        let OpError { kind, message, hint } = refusal;
        match kind {
            OpErrorKind::Step(step) => Self::Step { step, message, hint },
            OpErrorKind::Unsupported => Self::Unsupported { message, hint },
            OpErrorKind::TooMuch => Self::TooMuch { message, hint },
            OpErrorKind::Mount(fault) => Self::Mount { fault: fault.into(), message, hint },
            OpErrorKind::NoImage => Self::NoImage { message, hint },
            OpErrorKind::Image => Self::Pull { image: String::new(), message, hint },
            OpErrorKind::Exhausted => Self::Exhausted(message),
            OpErrorKind::Gone => Self::Gone,
        }
    }
}

impl From<MountFault> for backend::MountFault {
    fn from(fault: MountFault) -> Self {
        match fault {
            MountFault::NotAllowed => Self::NotAllowed,
            MountFault::NotFound => Self::NotFound,
            MountFault::NotMade => Self::NotMade,
            MountFault::SubPath => Self::SubPath,
            MountFault::Target => Self::Target,
            MountFault::NoVolume => Self::NoVolume,
            MountFault::Failed => Self::Failed,
        }
    }
}

impl From<SandboxCondition> for FoundCondition {
    fn from(condition: SandboxCondition) -> Self {
        match condition {
            SandboxCondition::Alive => Self::Alive,
            SandboxCondition::Frozen => Self::Frozen,
            SandboxCondition::Dead => Self::Dead,
            SandboxCondition::Half => Self::Half,
        }
    }
}
