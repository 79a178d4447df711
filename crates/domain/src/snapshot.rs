//! Snapshots: the files of a sandbox saved at one moment, from which other sandboxes are created.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::guest::GuestSettings;
use crate::lifecycle::OnDeath;
use crate::network_policy::NetworkPolicy;
use crate::quantity::Bytes;
use crate::sandbox::{Labels, Owner, SandboxId};
use crate::spec::{NetworkAccess, ResourceLimits};

/// The id of a snapshot, created by us: a UUID of version 4 in lower case.
///
/// It becomes part of paths and of subvolume names, so no other form is accepted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(String);

/// The error for text that is not a snapshot id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a snapshot id is a UUID in lower case")]
pub struct SnapshotIdError;

/// The files of a sandbox at one moment. It outlives the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub id: SnapshotId,
    pub owner: Owner,
    /// The sandbox it was taken from, which may be gone.
    pub sandbox: SandboxId,
    pub name: Option<String>,
    pub state: SnapshotState,
    pub created: SystemTime,
    /// The image beneath its files, after aliases were resolved.
    pub image: String,
    /// The size of its files above the image. Known when it is ready.
    pub size: Bytes,
    /// The disk size of the sandbox, and the default disk size of sandboxes created from the
    /// snapshot.
    pub disk: Bytes,
    /// The settings that sandboxes created from it inherit. A snapshot taken by an earlier version
    /// has none.
    pub settings: Option<SandboxSettings>,
}

/// How a sandbox was confined and set up when a snapshot was taken of it. A sandbox that is created
/// from the snapshot inherits each of these unless its caller specifies another value.
#[derive(Clone, PartialEq, Eq)]
pub struct SandboxSettings {
    pub network: NetworkAccess,
    /// As in [`SandboxSpec`](crate::SandboxSpec).
    pub policy: Option<Arc<NetworkPolicy>>,
    /// The limits that were in force, the server's defaults included. The size of the disk is part
    /// of the snapshot itself.
    pub resources: ResourceLimits,
    /// The time to live that the sandbox was created with; `None` is no expiry.
    pub timeout: Option<Duration>,
    /// `None` means never.
    pub idle_timeout: Option<Duration>,
    /// The value given by its creator, if any.
    pub on_death: Option<OnDeath>,
    pub env: BTreeMap<String, String>,
    pub env_file: Option<String>,
    pub guest: GuestSettings,
    pub labels: Labels,
    /// The front that created the sandbox.
    pub origin: String,
    /// Bytes that this front stored with the sandbox and alone understands.
    pub notes: Vec<u8>,
}

/// Values of variables may be secrets, so only their names are printed.
impl fmt::Debug for SandboxSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxSettings")
            .field("network", &self.network)
            .field("policy", &self.policy)
            .field("resources", &self.resources)
            .field("timeout", &self.timeout)
            .field("idle_timeout", &self.idle_timeout)
            .field("on_death", &self.on_death)
            .field("env", &self.env.keys())
            .field("env_file", &self.env_file)
            .field("guest", &self.guest)
            .field("labels", &self.labels)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotState {
    /// It is being taken; the text describes the progress, if known.
    Creating(Option<String>),
    Ready,
    /// It could not be taken, for this reason.
    Failed(String),
    Deleting,
}

impl SnapshotId {
    const LENGTH: usize = 36;
    const HYPHENS: [usize; 4] = [8, 13, 18, 23];

    /// Creates an id from random bytes, of which 122 bits are kept.
    pub fn from_entropy(mut entropy: [u8; 16]) -> Self {
        entropy[6] = entropy[6] & 0x0f | 0x40;
        entropy[8] = entropy[8] & 0x3f | 0x80;
        let mut text = String::with_capacity(Self::LENGTH);
        for byte in entropy {
            if Self::HYPHENS.contains(&text.len()) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        Self(text)
    }

    pub fn parse(text: &str) -> Result<Self, SnapshotIdError> {
        let fits = |(index, byte): (usize, u8)| match Self::HYPHENS.contains(&index) {
            true => byte == b'-',
            false => byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte),
        };
        let plain = text.len() == Self::LENGTH && text.bytes().enumerate().all(fits);
        if plain { Ok(Self(text.to_owned())) } else { Err(SnapshotIdError) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl SnapshotState {
    /// The name used in logs and messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Creating(_) => "being created",
            Self::Ready => "ready",
            Self::Failed(_) => "failed",
            Self::Deleting => "being deleted",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_id_is_a_version_4_uuid_and_parses() {
        let id = SnapshotId::from_entropy([0xff; 16]);
        assert_eq!(id.as_str(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        for byte in [0, 7, 200, 255] {
            let id = SnapshotId::from_entropy([byte; 16]);
            assert_eq!(SnapshotId::parse(id.as_str()), Ok(id));
        }
    }

    #[test]
    fn paths_do_not_parse() {
        for text in [
            "",
            "../../../../../../../../../etc/passw",
            "ffffffff-ffff-4fff-bfff-ffffffffffff\n",
            "FFFFFFFF-FFFF-4FFF-BFFF-FFFFFFFFFFFF",
            "ffffffffffffff4fffffbffff-fffffffffff",
            "-fffffff-ffff-4fff-bfff-ffffffffffff",
        ] {
            assert_eq!(SnapshotId::parse(text), Err(SnapshotIdError), "{text}");
        }
    }
}
