//! What is shown inside a sandbox besides its own disk: directories of the host, and volumes that
//! outlive sandboxes.

use std::fmt;
use std::path::PathBuf;

/// Something that is visible inside at `target`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub source: Source,
    pub target: String,
    pub access: Access,
    /// A directory beneath the source that is shown instead of all of it; relative, without `..`.
    pub sub_path: Option<String>,
}

/// What a mount shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A directory of the host.
    Host(PathBuf),
    Volume(VolumeId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// The name of one volume in the backend, minted by us. Owners know volumes by names of their own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

/// The text is not the id of a volume.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the id of a volume is a letter and nineteen lower-case letters or digits")]
pub struct NotAVolumeId;

impl VolumeId {
    /// Mints an id from random bytes, in the form of a sandbox's.
    pub fn from_entropy(entropy: [u8; 20]) -> Self {
        Self(crate::SandboxId::from_entropy(entropy).as_str().to_owned())
    }

    pub fn parse(text: &str) -> Result<Self, NotAVolumeId> {
        crate::SandboxId::parse(text)
            .map(|id| Self(id.as_str().to_owned()))
            .map_err(|_not_an_id| NotAVolumeId)
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

impl Mount {
    /// A whole directory of the host.
    pub fn host(source: impl Into<PathBuf>, target: impl Into<String>, access: Access) -> Self {
        Self { source: Source::Host(source.into()), target: target.into(), access, sub_path: None }
    }

    pub fn volume(id: VolumeId, target: impl Into<String>, access: Access) -> Self {
        Self { source: Source::Volume(id), target: target.into(), access, sub_path: None }
    }
}

/// Whether `path` stays beneath the directory it is relative to, as it is written.
pub fn is_beneath(path: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    !path.is_empty() && !path.contains('\0') && path.len() < 4096 && path.split('/').all(plain)
}

/// Whether something may be mounted at `target`: an absolute path as written, and not where the
/// kernel's own filesystems are.
pub fn is_target(target: &str) -> bool {
    const TAKEN: [&str; 3] = ["proc", "sys", "dev"];
    let Some(path) = target.strip_prefix('/') else { return false };
    let path = path.strip_suffix('/').unwrap_or(path);
    is_beneath(path) && !TAKEN.contains(&path.split('/').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_relative_paths_stay_beneath() {
        for path in ["a", "a/b.c", "..a/b"] {
            assert!(is_beneath(path), "{path}");
        }
        for path in ["", "/a", "a/", "a//b", "./a", "a/../b", "..", "a\0b"] {
            assert!(!is_beneath(path), "{path:?}");
        }
    }

    #[test]
    fn nothing_is_mounted_at_the_root_or_where_the_kernel_is() {
        for target in ["/data", "/data/", "/devices", "/mnt/proc"] {
            assert!(is_target(target), "{target}");
        }
        for target in ["", "/", "//", "data", "/proc", "/proc/1", "/sys/", "/dev/shm", "/a/../proc", "/a//b"]
        {
            assert!(!is_target(target), "{target}");
        }
    }
}
