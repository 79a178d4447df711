//! What to build, as plain data. The server writes a plan, the launcher carries it out.
//!
//! A plan names things (an image, limits, users); it holds no host path but the sources of
//! mounts, which the launcher checks against its own settings. A server that was taken over
//! can therefore not point a sandbox at the host's files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use domain::{Bytes, Cpus};
use serde::{Deserialize, Serialize};

use crate::network::Wish;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JailPlan {
    pub id: String,
    pub image: String,
    /// The snapshot whose files it begins with; the image is then the one below them.
    #[serde(default)]
    pub snapshot: Option<String>,
    pub limits: Limits,
    /// Limits that the caller named. One that cannot be enforced fails the create.
    pub named: Vec<LimitName>,
    /// Whether a default limit that cannot be enforced fails the create as well.
    pub require_limits: bool,
    pub network: Wish,
    pub mounts: Vec<MountPlan>,
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub env_file: Option<String>,
    /// Whether sessions inside can have namespaces of their own.
    #[serde(default)]
    pub nesting: bool,
    pub guest: GuestPlan,
    pub max_processes: u32,
    /// As whom the commands start, where that is decided beforehand and by number: host
    /// directories of ordinary users belong to it inside.
    #[serde(default)]
    pub user: Option<(u32, u32)>,
    /// Whether what is written stays behind when the sandbox ends. Only for sandboxes that end
    /// with their maker; the disk has no limit then.
    #[serde(default)]
    pub keep: bool,
    /// Whose disk it begins with.
    #[serde(default)]
    pub disk: DiskPlan,
}

/// The disk that a sandbox begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskPlan {
    /// One of its own, empty or made from a snapshot.
    #[default]
    New,
    /// The one that it had before its processes ended.
    Kept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub memory: u64,
    /// Thousandths of a core.
    pub cpus: u32,
    pub pids: u32,
    pub disk: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitName {
    Memory,
    Cpus,
    Pids,
    Disk,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountPlan {
    pub source: SourcePlan,
    pub target: String,
    pub read_only: bool,
    /// A directory beneath the source that is shown instead of all of it.
    #[serde(default)]
    pub sub_path: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourcePlan {
    Host(PathBuf),
    /// A volume, by its id.
    Volume(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPlan {
    pub users: Vec<UserPlan>,
    pub default_user: String,
    pub default_directory: String,
    /// Directories and their users.
    pub directories: Vec<(String, String)>,
    /// Whether the user and the directory that the image names come before the defaults.
    #[serde(default)]
    pub by_image: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserPlan {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
}

impl Limits {
    /// The amount of one limit, and as people read it.
    pub fn amount(&self, limit: LimitName) -> (u64, String) {
        match limit {
            LimitName::Memory => (self.memory, Bytes(self.memory).to_string()),
            LimitName::Cpus => (self.cpus.into(), Cpus(self.cpus).to_string()),
            LimitName::Pids => (self.pids.into(), self.pids.to_string()),
            LimitName::Disk => (self.disk, Bytes(self.disk).to_string()),
        }
    }
}

impl LimitName {
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cpus, Self::Pids, Self::Disk];

    /// What holds where no group enforces it.
    pub fn without_groups(self) -> String {
        match self {
            Self::Pids => "processes are bounded by RLIMIT_NPROC alone".to_owned(),
            Self::Memory | Self::Cpus | Self::Disk => format!("no limit on {} holds here", self.word()),
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Pids => "pids",
            Self::Disk => "disk",
        }
    }
}
