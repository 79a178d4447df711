//! The JSON columns. Their types ignore unknown fields and give missing ones a default, so that rows of other versions
//! can be read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use backend::InForce;
use domain::{
    Access, Bytes, Cause, Cpus, Exit, Guest, Mount, Nesting, Network, OnDeath, Phase, Resources, SnapshotId,
    Source, Spec, User, VolumeId,
};
use serde::{Deserialize, Serialize};

use super::hooks::HooksJson;

#[derive(Serialize, Deserialize)]
pub(super) struct SpecJson {
    image: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    #[serde(default)]
    resources: ResourcesJson,
    network: NetworkJson,
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    nesting: bool,
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
    AgentDied,
    HostRebooted,
    NotCreated,
    Evicted,
    Replaced,
    FilesLost,
}

#[derive(Serialize, Deserialize)]
pub(super) struct InForceJson {
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
    pub(super) fn of(spec: &Spec) -> Self {
        Self {
            image: spec.image.clone(),
            snapshot: spec.snapshot.as_ref().map(|id| id.as_str().to_owned()),
            resources: ResourcesJson::of(&spec.resources),
            network: NetworkJson::of(spec.network),
            mounts: spec.mounts.iter().map(MountJson::of).collect(),
            env: spec.env.clone(),
            env_file: spec.env_file.clone(),
            id_variable: spec.id_variable.clone(),
            entrypoint: spec.entrypoint.clone(),
            hooks: HooksJson::of(&spec.hooks),
            nesting: spec.nesting == Nesting::On,
            guest: GuestJson::of(&spec.guest),
            on_death: spec.on_death.map(|choice| choice.name().to_owned()),
        }
    }

    pub(super) fn into_domain(self) -> Spec {
        Spec {
            image: self.image,
            snapshot: self.snapshot.and_then(|id| SnapshotId::parse(&id).ok()),
            resources: self.resources.into_domain(),
            network: self.network.into_domain(),
            mounts: self.mounts.into_iter().map(MountJson::into_domain).collect(),
            env: self.env,
            env_file: self.env_file,
            id_variable: self.id_variable,
            entrypoint: self.entrypoint,
            hooks: self.hooks.into_domain(),
            nesting: if self.nesting { Nesting::On } else { Nesting::Off },
            guest: self.guest.into_domain(),
            on_death: self.on_death.as_deref().and_then(OnDeath::parse),
        }
    }
}

impl ResourcesJson {
    pub(super) fn of(resources: &Resources) -> Self {
        Self {
            memory: resources.memory.map(|bytes| bytes.0),
            cpus: resources.cpus.map(|cpus| cpus.0),
            pids: resources.pids,
            disk: resources.disk.map(|bytes| bytes.0),
        }
    }

    pub(super) fn into_domain(self) -> Resources {
        Resources {
            memory: self.memory.map(Bytes),
            cpus: self.cpus.map(Cpus),
            pids: self.pids,
            disk: self.disk.map(Bytes),
        }
    }
}

impl NetworkJson {
    pub(super) fn of(network: Network) -> Self {
        match network {
            Network::Off => Self::Off,
            Network::On => Self::On,
            Network::Auto => Self::Auto,
            Network::Filtered => Self::Filtered,
        }
    }

    pub(super) fn into_domain(self) -> Network {
        match self {
            Self::Off => Network::Off,
            Self::On => Network::On,
            Self::Auto => Network::Auto,
            Self::Filtered => Network::Filtered,
        }
    }
}

impl MountJson {
    fn of(mount: &Mount) -> Self {
        let (source, volume) = match &mount.source {
            Source::Host(path) => (path.clone(), None),
            Source::Volume(id) => (PathBuf::new(), Some(id.to_string())),
            // Claims are resolved to volumes before a row is written.
            Source::Claim(_) => (PathBuf::new(), None),
        };
        let writable = mount.access == Access::ReadWrite;
        Self { source, volume, target: mount.target.clone(), writable, sub_path: mount.sub_path.clone() }
    }

    fn into_domain(self) -> Mount {
        let volume = self.volume.and_then(|id| VolumeId::parse(&id).ok());
        Mount {
            source: volume.map_or(Source::Host(self.source), Source::Volume),
            target: self.target,
            access: if self.writable { Access::ReadWrite } else { Access::ReadOnly },
            sub_path: self.sub_path,
        }
    }
}

impl GuestJson {
    pub(super) fn of(guest: &Guest) -> Self {
        let user = |user: &User| UserJson {
            name: user.name.clone(),
            uid: user.uid,
            gid: user.gid,
            home: user.home.clone(),
        };
        Self {
            users: guest.users.iter().map(user).collect(),
            default_user: guest.default_user.clone(),
            default_directory: guest.default_directory.clone(),
            directories: guest.directories.clone(),
        }
    }

    pub(super) fn into_domain(self) -> Guest {
        let user = |user: UserJson| User { name: user.name, uid: user.uid, gid: user.gid, home: user.home };
        Guest {
            users: self.users.into_iter().map(user).collect(),
            default_user: self.default_user,
            default_directory: self.default_directory,
            directories: self.directories,
        }
    }
}

impl PhaseJson {
    pub(super) fn of(phase: Phase) -> Self {
        match phase {
            Phase::Starting => Self::Starting,
            Phase::Running => Self::Running,
            Phase::Pausing => Self::Pausing,
            Phase::Paused => Self::Paused,
            Phase::Resuming => Self::Resuming,
            Phase::Exited(exit) => Self::Exited(ExitJson::of(exit)),
            Phase::Stopping => Self::Stopping,
            Phase::Stopped => Self::Stopped,
            Phase::Failed(cause) => Self::Failed(CauseJson::of(cause)),
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
    fn of(exit: Exit) -> Self {
        match exit {
            Exit::Code(code) => Self::Code(code),
            Exit::Signal(signal) => Self::Signal(signal),
            Exit::Oom => Self::Oom,
            Exit::Deadline => Self::Deadline,
            Exit::Lost => Self::Lost,
        }
    }

    fn into_domain(self) -> Exit {
        match self {
            Self::Code(code) => Exit::Code(code),
            Self::Signal(signal) => Exit::Signal(signal),
            Self::Oom => Exit::Oom,
            Self::Deadline => Exit::Deadline,
            Self::Lost => Exit::Lost,
        }
    }
}

impl CauseJson {
    pub(super) fn of(cause: Cause) -> Self {
        match cause {
            Cause::Destroyed => Self::Destroyed,
            Cause::Expired => Self::Expired,
            Cause::Idle => Self::Idle,
            Cause::Oom => Self::Oom,
            Cause::AgentDied => Self::AgentDied,
            Cause::HostRebooted => Self::HostRebooted,
            Cause::NotCreated => Self::NotCreated,
            Cause::Evicted => Self::Evicted,
            Cause::Replaced => Self::Replaced,
            Cause::FilesLost => Self::FilesLost,
        }
    }

    pub(super) fn into_domain(self) -> Cause {
        match self {
            Self::Destroyed => Cause::Destroyed,
            Self::Expired => Cause::Expired,
            Self::Idle => Cause::Idle,
            Self::Oom => Cause::Oom,
            Self::AgentDied => Cause::AgentDied,
            Self::HostRebooted => Cause::HostRebooted,
            Self::NotCreated => Cause::NotCreated,
            Self::Evicted => Cause::Evicted,
            Self::Replaced => Cause::Replaced,
            Self::FilesLost => Cause::FilesLost,
        }
    }
}

impl InForceJson {
    pub(super) fn of(in_force: &InForce) -> Self {
        Self {
            image: in_force.image.clone(),
            stand_in: in_force.stand_in.clone(),
            measures: in_force.measures.clone(),
            weaker: in_force.weaker.clone(),
        }
    }

    pub(super) fn into_backend(self) -> InForce {
        InForce { image: self.image, stand_in: self.stand_in, measures: self.measures, weaker: self.weaker }
    }
}
