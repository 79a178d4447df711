//! Mounts of a sandbox besides its own disk: host directories, and volumes that outlive sandboxes.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::quantity::Bytes;
use crate::sandbox::Owner;

/// A directory or volume that is visible inside at `target`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSpec {
    pub source: MountSource,
    pub target: String,
    pub access: MountAccess,
    /// A directory beneath the source that is mounted instead of all of it; relative, without `..`.
    pub sub_path: Option<String>,
}

/// The source of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountSource {
    /// A directory of the host.
    Host(PathBuf),
    /// A directory of the host below one that the operator reserved for a purpose. It cannot be mounted as
    /// [`MountSource::Host`], so only requests that a front makes for this purpose reach it.
    Reserved {
        purpose: String,
        path: PathBuf,
    },
    Volume(VolumeId),
    /// A volume named by its owner. The service resolves it to a [`VolumeId`] before it calls a
    /// backend.
    Claim(VolumeClaim),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountAccess {
    ReadOnly,
    ReadWrite,
}

/// A request for a volume by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeClaim {
    pub name: VolumeName,
    pub absent: MissingVolume,
}

/// The action to take when no volume has that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingVolume {
    Refuse,
    Make { size: Option<Bytes>, lifetime: VolumeLifetime },
}

/// How long a volume exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeLifetime {
    /// Until it is removed explicitly.
    Kept,
    /// Until the last sandbox that uses it has ended.
    WithSandboxes,
    /// Until no sandbox has used it for this long.
    AfterUse(Duration),
}

/// A separate disk that outlives sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub id: VolumeId,
    pub owner: Owner,
    pub name: VolumeName,
    /// Its capacity, a hard limit.
    pub size: Bytes,
    pub lifetime: VolumeLifetime,
}

/// An owner's name for a volume: 1 to 253 lower-case letters, digits and `-`, with no `-` at either
/// end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeName(String);

/// The error for text that is not a valid volume name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a volume name must be 1 to 253 lower-case letters, digits and `-`, with no `-` at either end")]
pub struct VolumeNameError;

impl VolumeName {
    pub fn parse(text: &str) -> Result<Self, VolumeNameError> {
        let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let ends = [text.as_bytes().first(), text.as_bytes().last()];
        let right = ends.into_iter().all(|end| end.is_some_and(plain))
            && text.bytes().all(|byte| plain(&byte) || byte == b'-')
            && text.len() <= 253;
        if right { Ok(Self(text.to_owned())) } else { Err(VolumeNameError) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The id of a volume in the backend, created by us. Owners use their own names for volumes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

/// The error for text that is not a volume id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of a volume is a letter and nineteen lower-case letters or digits")]
pub struct VolumeIdError;

impl VolumeId {
    /// Creates an id from random bytes, in the same form as a sandbox id.
    pub fn from_entropy(entropy: [u8; 20]) -> Self {
        Self(crate::SandboxId::from_entropy(entropy).as_str().to_owned())
    }

    pub fn parse(text: &str) -> Result<Self, VolumeIdError> {
        crate::SandboxId::parse(text)
            .map(|id| Self(id.as_str().to_owned()))
            .map_err(|_not_an_id| VolumeIdError)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl MountSpec {
    /// Mounts a whole host directory.
    pub fn from_host(source: impl Into<PathBuf>, target: impl Into<String>, access: MountAccess) -> Self {
        Self { source: MountSource::Host(source.into()), target: target.into(), access, sub_path: None }
    }

    pub fn from_volume(id: VolumeId, target: impl Into<String>, access: MountAccess) -> Self {
        Self { source: MountSource::Volume(id), target: target.into(), access, sub_path: None }
    }
}

/// Whether `path`, taken literally, stays beneath the directory it is relative to.
pub fn is_path_beneath(path: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    !path.is_empty() && !path.contains('\0') && path.len() < 4096 && path.split('/').all(plain)
}

/// Whether something may be mounted at `target`: a literal absolute path outside the kernel's own
/// filesystems.
pub fn is_mount_target(target: &str) -> bool {
    const KERNEL_ROOTS: [&str; 3] = ["proc", "sys", "dev"];
    let Some(path) = target.strip_prefix('/') else { return false };
    let path = path.strip_suffix('/').unwrap_or(path);
    is_path_beneath(path) && !KERNEL_ROOTS.contains(&path.split('/').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_relative_paths_stay_beneath() {
        for path in ["a", "a/b.c", "..a/b"] {
            assert!(is_path_beneath(path), "{path}");
        }
        for path in ["", "/a", "a/", "a//b", "./a", "a/../b", "..", "a\0b"] {
            assert!(!is_path_beneath(path), "{path:?}");
        }
    }

    #[test]
    fn volume_names_are_restricted() {
        for name in ["a", "data-7", "0"] {
            assert_eq!(VolumeName::parse(name).map(|name| name.to_string()), Ok(name.to_owned()));
        }
        for wrong in ["", "-a", "a-", "A", "a.b", "a/b", "..", "a_b", &"a".repeat(254)] {
            assert_eq!(VolumeName::parse(wrong), Err(VolumeNameError), "{wrong}");
        }
    }

    #[test]
    fn root_and_kernel_filesystems_are_not_mount_targets() {
        for target in ["/data", "/data/", "/devices", "/mnt/proc"] {
            assert!(is_mount_target(target), "{target}");
        }
        for target in ["", "/", "//", "data", "/proc", "/proc/1", "/sys/", "/dev/shm", "/a/../proc", "/a//b"]
        {
            assert!(!is_mount_target(target), "{target}");
        }
    }
}
