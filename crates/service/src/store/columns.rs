//! The JSON columns. Their types ignore unknown fields and give missing ones a default, so that rows of other versions
//! can be read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use backend::{Enforced, Measure};
use domain::{
    Bytes, EndCause, Entrypoint, ExitReason, GuestSettings, GuestUser, ImageDefaults, IsolatedSessions,
    MilliCpus, MountAccess, MountSource, MountSpec, NetworkAccess, OnDeath, Phase, ResourceLimits,
    SandboxSpec, SnapshotId, VolumeId,
};
use serde::{Deserialize, Serialize};

use super::hooks::HooksJson;
use super::policies::PolicyJson;

#[derive(Serialize, Deserialize)]
pub(super) struct SpecJson {
    image: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    #[serde(default)]
    resources: ResourcesJson,
    network: NetworkJson,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    policy: Option<PolicyJson>,
    #[serde(default)]
    mounts: Vec<MountJson>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    env_file: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id_variable: Option<String>,
    #[serde(default)]
    entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "HooksJson::is_empty")]
    hooks: HooksJson,
    #[serde(rename = "nesting", default, skip_serializing_if = "std::ops::Not::not")]
    isolated_sessions: bool,
    guest: GuestJson,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_death: Option<String>,
}

#[derive(Default, Serialize, Deserialize)]
pub(super) struct ResourcesJson {
    memory: Option<u64>,
    cpus: Option<u32>,
    pids: Option<u32>,
    disk: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum NetworkJson {
    Off,
    On,
    Auto,
    Filtered,
}

#[derive(Serialize, Deserialize)]
struct MountJson {
    /// The path of a host directory.
    #[serde(default)]
    source: PathBuf,
    /// The purpose that the host directory is reserved for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    purpose: Option<String>,
    #[serde(default)]
    volume: Option<String>,
    target: String,
    writable: bool,
    #[serde(default)]
    sub_path: Option<String>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct GuestJson {
    #[serde(default)]
    users: Vec<UserJson>,
    default_user: String,
    default_directory: String,
    #[serde(default)]
    directories: Vec<(String, String)>,
    /// Whether the image's user and directory are preferred. Without it the rule of older versions applies, which
    /// wrote no such field: they are preferred to root in `/root` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prefer_image: Option<bool>,
}

#[derive(Serialize, Deserialize)]
struct UserJson {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PhaseJson {
    Starting,
    Running,
    Pausing,
    Paused,
    Resuming,
    Exited(ExitJson),
    Stopping,
    Stopped,
    Failed(CauseJson),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ExitJson {
    Code(i32),
    Signal(i32),
    Oom,
    Deadline,
    Lost,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CauseJson {
    Destroyed,
    Expired,
    Idle,
    Oom,
    TooManyFiles,
    AgentDied,
    HostRebooted,
    NotCreated,
    Evicted,
    Replaced,
    FilesLost,
}

#[derive(Serialize, Deserialize)]
pub(super) struct EnforcedJson {
    #[serde(default)]
    image: String,
    #[serde(default)]
    stand_in: Option<String>,
    #[serde(default)]
    measures: Vec<(String, String)>,
    #[serde(default)]
    weaker: Vec<String>,
}

impl SpecJson {
    pub(super) fn from_domain(spec: &SandboxSpec) -> Self {
        Self {
            image: spec.image.clone(),
            snapshot: spec.snapshot.as_ref().map(|id| id.as_str().to_owned()),
            resources: ResourcesJson::from_domain(&spec.resources),
            network: NetworkJson::from_domain(spec.network),
            policy: spec.policy.as_deref().map(PolicyJson::from_domain),
            mounts: spec.mounts.iter().map(MountJson::from_domain).collect(),
            env: spec.env.clone(),
            env_file: spec.env_file.clone(),
            id_variable: spec.id_variable.clone(),
            entrypoint: spec.entrypoint.to_words(),
            hooks: HooksJson::from_domain(&spec.hooks),
            isolated_sessions: spec.isolated_sessions == IsolatedSessions::On,
            guest: GuestJson::from_domain(&spec.guest),
            on_death: spec.on_death.map(|choice| choice.name().to_owned()),
        }
    }

    pub(super) fn into_domain(self) -> SandboxSpec {
        SandboxSpec {
            image: self.image,
            snapshot: self.snapshot.and_then(|id| SnapshotId::parse(&id).ok()),
            resources: self.resources.into_domain(),
            network: self.network.into_domain(),
            policy: self.policy.map(PolicyJson::into_domain),
            mounts: self.mounts.into_iter().map(MountJson::into_domain).collect(),
            env: self.env,
            env_file: self.env_file,
            id_variable: self.id_variable,
            entrypoint: Entrypoint::from_words(self.entrypoint),
            hooks: self.hooks.into_domain(),
            isolated_sessions: if self.isolated_sessions {
                IsolatedSessions::On
            } else {
                IsolatedSessions::Off
            },
            guest: self.guest.into_domain(),
            on_death: self.on_death.as_deref().and_then(OnDeath::parse),
        }
    }
}

impl ResourcesJson {
    pub(super) fn from_domain(resources: &ResourceLimits) -> Self {
        Self {
            memory: resources.memory.map(|bytes| bytes.0),
            cpus: resources.cpus.map(|cpus| cpus.0),
            pids: resources.pids,
            disk: resources.disk.map(|bytes| bytes.0),
        }
    }

    pub(super) fn into_domain(self) -> ResourceLimits {
        ResourceLimits {
            memory: self.memory.map(Bytes),
            cpus: self.cpus.map(MilliCpus),
            pids: self.pids,
            disk: self.disk.map(Bytes),
        }
    }
}

impl NetworkJson {
    pub(super) fn from_domain(network: NetworkAccess) -> Self {
        match network {
            NetworkAccess::Off => Self::Off,
            NetworkAccess::On => Self::On,
            NetworkAccess::Auto => Self::Auto,
            NetworkAccess::Filtered => Self::Filtered,
        }
    }

    pub(super) fn into_domain(self) -> NetworkAccess {
        match self {
            Self::Off => NetworkAccess::Off,
            Self::On => NetworkAccess::On,
            Self::Auto => NetworkAccess::Auto,
            Self::Filtered => NetworkAccess::Filtered,
        }
    }
}

impl MountJson {
    fn from_domain(mount: &MountSpec) -> Self {
        let (source, purpose, volume) = match &mount.source {
            MountSource::Host(path) => (path.clone(), None, None),
            MountSource::Reserved { purpose, path } => (path.clone(), Some(purpose.clone()), None),
            MountSource::Volume(id) => (PathBuf::new(), None, Some(id.to_string())),
            // Claims are resolved to volumes before a row is written.
            MountSource::Claim(_) => (PathBuf::new(), None, None),
        };
        let writable = mount.access == MountAccess::ReadWrite;
        let (target, sub_path) = (mount.target.clone(), mount.sub_path.clone());
        Self { source, purpose, volume, target, writable, sub_path }
    }

    fn into_domain(self) -> MountSpec {
        let volume = self.volume.and_then(|id| VolumeId::parse(&id).ok());
        let source = match (volume, self.purpose) {
            (Some(id), _) => MountSource::Volume(id),
            (None, Some(purpose)) => MountSource::Reserved { purpose, path: self.source },
            (None, None) => MountSource::Host(self.source),
        };
        MountSpec {
            source,
            target: self.target,
            access: if self.writable { MountAccess::ReadWrite } else { MountAccess::ReadOnly },
            sub_path: self.sub_path,
        }
    }
}

impl GuestJson {
    pub(super) fn from_domain(guest: &GuestSettings) -> Self {
        let user = |user: &GuestUser| UserJson {
            name: user.name.clone(),
            uid: user.uid,
            gid: user.gid,
            home: user.home.clone(),
        };
        let prefers = guest.image_defaults == ImageDefaults::Preferred;
        Self {
            users: guest.users.iter().map(user).collect(),
            default_user: guest.default_user.clone(),
            default_directory: guest.default_directory.clone(),
            directories: guest.directories.clone(),
            prefer_image: (prefers != is_root_only(guest)).then_some(prefers),
        }
    }

    pub(super) fn into_domain(self) -> GuestSettings {
        let user =
            |user: UserJson| GuestUser { name: user.name, uid: user.uid, gid: user.gid, home: user.home };
        let mut guest = GuestSettings {
            users: self.users.into_iter().map(user).collect(),
            default_user: self.default_user,
            default_directory: self.default_directory,
            directories: self.directories,
            image_defaults: ImageDefaults::Ignored,
        };
        if self.prefer_image.unwrap_or_else(|| is_root_only(&guest)) {
            guest.image_defaults = ImageDefaults::Preferred;
        }
        guest
    }
}

/// Whether a guest has no other user than root and no other directory than `/root`.
fn is_root_only(guest: &GuestSettings) -> bool {
    GuestSettings { image_defaults: ImageDefaults::Preferred, ..guest.clone() } == GuestSettings::root_only()
}

impl PhaseJson {
    pub(super) fn from_domain(phase: Phase) -> Self {
        match phase {
            Phase::Starting => Self::Starting,
            Phase::Running => Self::Running,
            Phase::Pausing => Self::Pausing,
            Phase::Paused => Self::Paused,
            Phase::Resuming => Self::Resuming,
            Phase::Exited(exit) => Self::Exited(ExitJson::from_domain(exit)),
            Phase::Stopping => Self::Stopping,
            Phase::Stopped => Self::Stopped,
            Phase::Failed(cause) => Self::Failed(CauseJson::from_domain(cause)),
        }
    }

    pub(super) fn into_domain(self) -> Phase {
        match self {
            Self::Starting => Phase::Starting,
            Self::Running => Phase::Running,
            Self::Pausing => Phase::Pausing,
            Self::Paused => Phase::Paused,
            Self::Resuming => Phase::Resuming,
            Self::Exited(exit) => Phase::Exited(exit.into_domain()),
            Self::Stopping => Phase::Stopping,
            Self::Stopped => Phase::Stopped,
            Self::Failed(cause) => Phase::Failed(cause.into_domain()),
        }
    }
}

impl ExitJson {
    fn from_domain(exit: ExitReason) -> Self {
        match exit {
            ExitReason::Code(code) => Self::Code(code),
            ExitReason::Signal(signal) => Self::Signal(signal),
            ExitReason::Oom => Self::Oom,
            ExitReason::Deadline => Self::Deadline,
            ExitReason::Lost => Self::Lost,
        }
    }

    fn into_domain(self) -> ExitReason {
        match self {
            Self::Code(code) => ExitReason::Code(code),
            Self::Signal(signal) => ExitReason::Signal(signal),
            Self::Oom => ExitReason::Oom,
            Self::Deadline => ExitReason::Deadline,
            Self::Lost => ExitReason::Lost,
        }
    }
}

impl CauseJson {
    pub(super) fn from_domain(cause: EndCause) -> Self {
        match cause {
            EndCause::Destroyed => Self::Destroyed,
            EndCause::Expired => Self::Expired,
            EndCause::Idle => Self::Idle,
            EndCause::Oom => Self::Oom,
            EndCause::TooManyFiles => Self::TooManyFiles,
            EndCause::AgentDied => Self::AgentDied,
            EndCause::HostRebooted => Self::HostRebooted,
            EndCause::NotCreated => Self::NotCreated,
            EndCause::Evicted => Self::Evicted,
            EndCause::Replaced => Self::Replaced,
            EndCause::FilesLost => Self::FilesLost,
        }
    }

    pub(super) fn into_domain(self) -> EndCause {
        match self {
            Self::Destroyed => EndCause::Destroyed,
            Self::Expired => EndCause::Expired,
            Self::Idle => EndCause::Idle,
            Self::Oom => EndCause::Oom,
            Self::TooManyFiles => EndCause::TooManyFiles,
            Self::AgentDied => EndCause::AgentDied,
            Self::HostRebooted => EndCause::HostRebooted,
            Self::NotCreated => EndCause::NotCreated,
            Self::Evicted => EndCause::Evicted,
            Self::Replaced => EndCause::Replaced,
            Self::FilesLost => EndCause::FilesLost,
        }
    }
}

impl EnforcedJson {
    pub(super) fn from_backend(in_force: &Enforced) -> Self {
        Self {
            image: in_force.image.clone(),
            stand_in: in_force.stand_in.clone(),
            measures: in_force.measures.iter().map(|measure| (measure.name(), measure.words())).collect(),
            weaker: in_force.degraded.clone(),
        }
    }

    pub(super) fn into_backend(self) -> Enforced {
        Enforced {
            image: self.image,
            stand_in: self.stand_in,
            measures: self.measures.iter().map(|(name, words)| Measure::from_words(name, words)).collect(),
            degraded: self.weaker,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_guest(json: &str, expected: ImageDefaults) {
        let stored: GuestJson = serde_json::from_str(json).expect("a stored guest");
        let guest = stored.into_domain();
        assert_eq!(guest.image_defaults, expected, "{json}");
        let again = serde_json::to_string(&GuestJson::from_domain(&guest)).expect("it is JSON");
        assert_eq!(again, json);
    }

    #[test]
    fn guests_of_older_versions_keep_their_meaning_and_their_text() {
        let guest = |user: &str, rest: &str| {
            format!(
                r#"{{"users":[],"default_user":"{user}","default_directory":"/root","directories":[]{rest}}}"#
            )
        };
        check_guest(&guest("root", ""), ImageDefaults::Preferred);
        check_guest(&guest("agent", ""), ImageDefaults::Ignored);
        check_guest(&guest("root", r#","prefer_image":false"#), ImageDefaults::Ignored);
        check_guest(&guest("agent", r#","prefer_image":true"#), ImageDefaults::Preferred);
    }
}
