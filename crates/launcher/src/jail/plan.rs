//! The plan of a sandbox, as plain data. The server writes a plan, and the launcher executes it.
//!
//! A plan refers to things by name (an image, limits, users). It contains no host path except the
//! sources of mounts, which the launcher checks against its own settings. A compromised server
//! therefore cannot give a sandbox access to the host's files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use domain::{Bytes, MilliCpus, SandboxId, SandboxLimits, SnapshotId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::network::NetworkMode;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JailPlan {
    #[serde(with = "crate::ids")]
    pub id: SandboxId,
    /// The name of an image; aliases are resolved before.
    pub image: String,
    /// The snapshot whose files the sandbox starts with; `image` is then the image below them.
    #[serde(default, with = "crate::ids::optional")]
    pub snapshot: Option<SnapshotId>,
    pub limits: JailLimits,
    /// Limits that the caller specified. If one of them cannot be enforced, the create fails.
    pub named: Vec<LimitName>,
    /// Whether the create also fails if a default limit cannot be enforced.
    pub require_limits: bool,
    pub network: NetworkMode,
    pub mounts: Vec<MountPlan>,
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub env_file: Option<String>,
    /// Whether sessions inside can have namespaces of their own.
    #[serde(default, rename = "nesting")]
    pub isolated_sessions: bool,
    pub guest: GuestPlan,
    pub max_processes: u32,
    /// The uid and gid that commands start with, if they are known in advance. Host directories of
    /// ordinary users belong to them inside.
    #[serde(default)]
    pub user: Option<(u32, u32)>,
    /// Whether the files that the sandbox writes are kept when it ends. Only for sandboxes that end
    /// with the process that made them; the disk has no limit then.
    #[serde(default)]
    pub keep: bool,
    /// The disk that the sandbox starts with.
    #[serde(default)]
    pub disk: DiskPlan,
}

/// The disk that a sandbox starts with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskPlan {
    /// A new disk, empty or made from a snapshot.
    #[default]
    New,
    /// The disk that the sandbox had before its processes ended.
    Kept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JailLimits {
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
    pub source: MountSourcePlan,
    pub target: String,
    pub read_only: bool,
    /// A directory below the source that is mounted instead of the source.
    #[serde(default)]
    pub sub_path: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountSourcePlan {
    Host(PathBuf),
    /// A directory below one that the operator reserved for this purpose.
    Reserved {
        purpose: String,
        path: PathBuf,
    },
    /// A volume, by its id.
    Volume(#[serde(with = "crate::ids")] VolumeId),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPlan {
    pub users: Vec<UserPlan>,
    pub default_user: String,
    pub default_directory: String,
    /// Directories and the names of their owners.
    pub directories: Vec<(String, String)>,
    /// Whether the image's user and directory take precedence over the defaults.
    #[serde(default)]
    pub by_image: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserPlan {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
    /// Whether the image has the user, so that no account is added. The launcher sets this.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_image: bool,
}

impl JailLimits {
    /// Returns the amount of one limit as a number and as text.
    pub fn amount_of(&self, limit: LimitName) -> (u64, String) {
        match limit {
            LimitName::Memory => (self.memory, Bytes(self.memory).to_string()),
            LimitName::Cpus => (self.cpus.into(), MilliCpus(self.cpus).to_string()),
            LimitName::Pids => (self.pids.into(), self.pids.to_string()),
            LimitName::Disk => (self.disk, Bytes(self.disk).to_string()),
        }
    }
}

impl From<SandboxLimits> for JailLimits {
    fn from(limits: SandboxLimits) -> Self {
        Self { memory: limits.memory.0, cpus: limits.cpus.0, pids: limits.pids, disk: limits.disk.0 }
    }
}

impl From<backend::LimitName> for LimitName {
    fn from(limit: backend::LimitName) -> Self {
        match limit {
            backend::LimitName::Memory => Self::Memory,
            backend::LimitName::Cpus => Self::Cpus,
            backend::LimitName::Pids => Self::Pids,
            backend::LimitName::Disk => Self::Disk,
        }
    }
}

impl From<LimitName> for backend::LimitName {
    fn from(limit: LimitName) -> Self {
        match limit {
            LimitName::Memory => Self::Memory,
            LimitName::Cpus => Self::Cpus,
            LimitName::Pids => Self::Pids,
            LimitName::Disk => Self::Disk,
        }
    }
}

impl LimitName {
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cpus, Self::Pids, Self::Disk];

    /// Describes the situation if no control group enforces the limit.
    pub fn describe_unenforced(self) -> String {
        match self {
            Self::Pids => "processes are limited only by RLIMIT_NPROC".to_owned(),
            Self::Memory | Self::Cpus | Self::Disk => {
                format!("no limit on {} is enforced here", self.as_str())
            }
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Pids => "pids",
            Self::Disk => "disk",
        }
    }
}
