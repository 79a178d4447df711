//! What an operator decides about sandboxes on this host. The supervisor hands it to the
//! launcher; a plan cannot change it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::identity::ServerIdentity;
use crate::volumes::Kind;

use crate::network::NetworkSettings;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Everything we keep lies below it.
    pub state_dir: PathBuf,
    /// The state directory that has the images. One-shot sandboxes use those of the host's server.
    pub image_state: PathBuf,
    /// Part of the names of control groups, so that several servers share a host.
    pub instance: String,
    /// Whether records without a signature are ours: an older version made the state directory.
    #[serde(default)]
    pub owns_unsigned_records: bool,
    /// The first host id that sandboxes may use; the first range is our own.
    pub uid_base: u32,
    /// As whom the server runs, if not as ourselves.
    pub server_uid: Option<u32>,
    /// Image names that mean another image.
    pub aliases: BTreeMap<String, String>,
    /// Refuse image names that are neither imported nor `host`.
    pub strict_images: bool,
    /// What disks are made of; `None` takes the best that the kernel has.
    #[serde(default)]
    pub disks: Option<Kind>,
    /// What all layers of images together may hold.
    #[serde(default)]
    pub image_bytes: Option<u64>,
    /// How large the pool of disks may grow.
    pub pool_bytes: Option<u64>,
    /// No sandbox is made while the disk has less free space.
    pub free_space_floor: u64,
    /// How many net namespaces and volumes are kept ready.
    pub prepared: usize,
    pub mounts: MountRule,
    pub lifetime: Lifetime,
    pub maxima: Maxima,
    pub network: NetworkSettings,
}

impl Settings {
    /// The identity with which records are signed.
    pub fn identity(&self) -> ServerIdentity {
        ServerIdentity { instance: self.instance.clone(), owns_unsigned_records: self.owns_unsigned_records }
    }
}

/// The most that one sandbox may be given; `None` where everything may be asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maxima {
    pub memory: Option<u64>,
    /// Thousandths of a core.
    pub cpus: Option<u32>,
    pub pids: Option<u32>,
    pub disk: Option<u64>,
}

/// Which directories of the host a plan may mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountRule {
    /// Only those below these directories; none if there are none.
    Below(Vec<Allowed>),
    /// The caller is somebody who could read and write there anyway.
    Allow,
}

/// A directory of the host that may be mounted, with all below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allowed {
    /// As the operator names it, and clients after him.
    pub written: PathBuf,
    /// Where that led to at the start; this path holds no links.
    pub real: PathBuf,
}

/// How long sandboxes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// Until they are destroyed, whatever happens to us.
    Own,
    /// No longer than this process.
    Ours,
}
