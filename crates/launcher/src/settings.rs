//! The operator's settings for sandboxes on this host. The supervisor passes them to the
//! launcher; a plan cannot change them.

use std::path::PathBuf;

use domain::{Bytes, MilliCpus};
use serde::{Deserialize, Serialize};

use crate::identity::ServerIdentity;
use crate::jail::plan::LimitName;
use crate::volumes::VolumeKind;

use crate::network::NetworkSettings;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LauncherSettings {
    /// The directory that holds all state of this server.
    pub state_dir: PathBuf,
    /// The state directory that holds the images. One-shot sandboxes use the images of the host's server.
    pub image_state: PathBuf,
    /// Part of the names of control groups, so that several servers can share a host.
    pub instance: String,
    /// Whether records without a signature belong to this server, because an older version made the
    /// state directory.
    #[serde(default)]
    pub owns_unsigned_records: bool,
    /// The first host id of the uid ranges. The first range is reserved for the server.
    pub uid_base: u32,
    /// The uid that the server runs as, if it differs from the launcher's.
    pub server_uid: Option<u32>,
    /// The kind of storage for disks; `None` selects the best kind that the kernel supports.
    #[serde(default)]
    pub disks: Option<VolumeKind>,
    /// The largest total size of all image layers.
    #[serde(default)]
    pub image_bytes: Option<u64>,
    /// The size that the pool of disks may grow to.
    pub pool_bytes: Option<u64>,
    /// New sandboxes are refused while the disk has less free space than this.
    pub free_space_floor: u64,
    /// How many net namespaces and volumes are kept ready.
    pub prepared: usize,
    pub mounts: MountRule,
    pub lifetime: LifetimePolicy,
    pub maxima: MaxLimits,
    /// The limits of all sandboxes together.
    #[serde(default)]
    pub totals: TotalLimits,
    pub network: NetworkSettings,
    /// The limit on open files that programs in sandboxes start with, if it is not this process's own.
    #[serde(default)]
    pub open_files: Option<u64>,
    /// The uid of egress, if it differs from the launcher's.
    #[serde(default)]
    pub egress_uid: Option<u32>,
}

impl LauncherSettings {
    /// The identity with which records are signed.
    pub fn identity(&self) -> ServerIdentity {
        ServerIdentity {
            instance: self.instance.clone(),
            owns_unsigned_records: self.owns_unsigned_records,
            auto_without_link: !self.network.auto_needs_link,
        }
    }
}

/// The largest limits that one sandbox may have; `None` means that there is no maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxLimits {
    pub memory: Option<u64>,
    /// Thousandths of a core.
    pub cpus: Option<u32>,
    pub pids: Option<u32>,
    pub disk: Option<u64>,
}

/// The limits of all sandboxes of a server together; `None` means that there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotalLimits {
    /// Bytes.
    pub memory: Option<TotalLimit>,
    /// Thousandths of a core.
    pub cpus: Option<TotalLimit>,
    pub pids: Option<TotalLimit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotalLimit {
    pub amount: u64,
    pub origin: TotalOrigin,
}

impl TotalLimit {
    /// Returns the amount as text.
    pub fn shown(self, limit: LimitName) -> String {
        match limit {
            LimitName::Memory | LimitName::Disk => Bytes(self.amount).to_string(),
            LimitName::Cpus => MilliCpus(u32::try_from(self.amount).unwrap_or(u32::MAX)).to_string(),
            LimitName::Pids => self.amount.to_string(),
        }
    }
}

/// Who set a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TotalOrigin {
    /// The operator; the server does not start if it cannot be enforced.
    Operator,
    /// The container in which the server runs, which enforces it in any case.
    Container,
}

impl TotalLimits {
    pub fn get(&self, limit: LimitName) -> Option<TotalLimit> {
        match limit {
            LimitName::Memory => self.memory,
            LimitName::Cpus => self.cpus,
            LimitName::Pids => self.pids,
            LimitName::Disk => None,
        }
    }

    /// Returns a limit that the operator asked for, if there is one.
    pub fn first_of_operator(&self) -> Option<LimitName> {
        let asked =
            |limit: &LimitName| self.get(*limit).is_some_and(|total| total.origin == TotalOrigin::Operator);
        LimitName::ALL.into_iter().find(asked)
    }
}

/// The directories of the host that a plan may mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountRule {
    /// Only directories below these; no directory at all if the list is empty.
    Below(Vec<AllowedDirectory>),
    /// Any directory: the caller could read and write there anyway.
    Allow,
}

/// A directory of the host that may be mounted, with everything below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowedDirectory {
    /// The path as the operator wrote it; clients use the same spelling.
    pub written: PathBuf,
    /// The path that it resolved to at startup; it contains no symbolic links.
    pub real: PathBuf,
    /// If set, only mounts that are requested for this purpose may come from here.
    #[serde(default)]
    pub purpose: Option<String>,
}

/// How long sandboxes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LifetimePolicy {
    /// Until they are destroyed, even if the launcher dies.
    Own,
    /// At most as long as this process.
    Ours,
}
