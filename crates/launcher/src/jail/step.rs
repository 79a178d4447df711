//! The steps of making a sandbox, and the error that names the failed step.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A failed step and its cause.
#[derive(Debug, thiserror::Error)]
#[error("step `{step}` failed")]
pub struct JailError {
    pub step: JailStep,
    /// The path that the step worked on, if it worked on one of several.
    pub path: Option<PathBuf>,
    #[source]
    pub source: io::Error,
}

/// A failed step in the form in which the child reports it.
#[derive(Debug, Serialize, Deserialize)]
pub struct FailureReport {
    step: JailStep,
    path: Option<PathBuf>,
    errno: Option<i32>,
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JailStep {
    Record,
    UidRange,
    Groups,
    Volume,
    Image,
    Mounts,
    Socket,
    Configuration,
    NetNamespace,
    Clone,
    IdMaps,
    CloneLowers,
    CloneVolume,
    CloneMounts,
    OpenPrograms,
    Handover,
    JoinGroups,
    BecomeRoot,
    ForbidUserNamespaces,
    PrivateMounts,
    Scratch,
    AttachLayers,
    Overlay,
    Devices,
    Proc,
    LimitView,
    Guest,
    AttachMounts,
    Pivot,
    ProbeWrite,
    ResourceLimits,
    Capabilities,
    NoNewPrivileges,
    Landlock,
    Seccomp,
    ExecuteAgent,
    AgentReady,
}

/// Adds the failed step to an error.
pub(crate) trait StepContext<T> {
    fn at_step(self, step: JailStep) -> Result<T, JailError>;

    /// Like [`StepContext::at_step`], and also adds the path.
    fn at_path(self, step: JailStep, path: impl AsRef<Path>) -> Result<T, JailError>;
}

impl<T, E: Into<io::Error>> StepContext<T> for Result<T, E> {
    fn at_step(self, step: JailStep) -> Result<T, JailError> {
        self.map_err(|error| JailError::new(step, error.into()))
    }

    fn at_path(self, step: JailStep, path: impl AsRef<Path>) -> Result<T, JailError> {
        self.map_err(|error| JailError {
            path: Some(path.as_ref().to_owned()),
            ..JailError::new(step, error.into())
        })
    }
}

impl JailError {
    pub fn new(step: JailStep, source: io::Error) -> Self {
        Self { step, path: None, source }
    }

    /// Whether the host may forbid user namespaces: they cannot be created, or give no rights to their root.
    pub(crate) fn is_about_user_namespaces(&self) -> bool {
        let denied = self.source.kind() == io::ErrorKind::PermissionDenied;
        // The maximum number of user namespaces, which may be 0.
        let none_left = self.source.kind() == io::ErrorKind::StorageFull;
        match self.step {
            JailStep::Clone | JailStep::IdMaps => denied || none_left,
            JailStep::NetNamespace | JailStep::BecomeRoot | JailStep::PrivateMounts => denied,
            _ => false,
        }
    }

    /// Returns advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        let of_host_image = self.path.as_deref() == Some(Path::new("/usr"));
        if self.step == JailStep::CloneLowers && of_host_image {
            return Some(
                "the image `host` needs /usr on ext4, xfs or btrfs, and in a container it is on overlayfs; use \
                 another image, such as `coracle image pull docker.io/library/debian:12`",
            );
        }
        if self.is_about_user_namespaces() {
            return Some(
                "user namespaces may be switched off here; `coracle doctor` names the setting and the fix",
            );
        }
        self.step.hint(&self.source)
    }
}

impl FailureReport {
    /// Returns the message for the report pipe.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

impl From<JailError> for FailureReport {
    fn from(error: JailError) -> Self {
        let errno = error.source.raw_os_error();
        Self { step: error.step, path: error.path, errno, message: error.source.to_string() }
    }
}

impl From<FailureReport> for JailError {
    fn from(failure: FailureReport) -> Self {
        let source =
            failure.errno.map_or_else(|| io::Error::other(failure.message), io::Error::from_raw_os_error);
        Self { step: failure.step, path: failure.path, source }
    }
}

impl fmt::Display for JailStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The serialised form is also the display form.
        let json = serde_json::to_string(self).unwrap_or_default();
        f.write_str(json.trim_matches('"'))
    }
}

impl JailStep {
    fn hint(self, error: &io::Error) -> Option<&'static str> {
        let denied = error.kind() == io::ErrorKind::PermissionDenied;
        let read_only = error.kind() == io::ErrorKind::ReadOnlyFilesystem;
        let missing = error.kind() == io::ErrorKind::NotFound;
        match self {
            Self::Groups | Self::JoinGroups if denied || read_only || missing => {
                Some("no writable control groups; `coracle doctor` shows which are missing")
            }
            Self::Mounts | Self::CloneMounts if missing => {
                Some("the source of a mount must exist on this host")
            }
            Self::Mounts => Some("mount a directory that belongs to root or an ordinary user"),
            Self::AttachMounts => Some("choose another target inside the sandbox for the mount"),
            Self::Guest => Some("the image may contain a file where a directory is needed"),
            Self::CloneLowers | Self::CloneVolume | Self::CloneMounts if denied => {
                Some("idmapped mounts need root and Linux 5.19; `coracle doctor` shows what is missing")
            }
            Self::CloneLowers | Self::CloneVolume | Self::CloneMounts => {
                Some("the filesystem of a layer or mount cannot be idmapped; move it to ext4, xfs or btrfs")
            }
            Self::Overlay => {
                Some("overlayfs inside user namespaces needs Linux 5.11; `coracle doctor` checks it")
            }
            Self::Landlock => Some("Landlock is not enabled; add `landlock` to the kernel's `lsm=` list"),
            Self::Volume => {
                Some("the disk behind the state directory may be full; `coracle doctor` shows the free space")
            }
            Self::Proc => Some(
                "parts of /proc may be hidden in this container; `coracle doctor` prints how to start it",
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_keeps_its_step_its_path_and_its_reason() {
        let missing: io::Result<()> = Err(io::Error::from_raw_os_error(2));
        let error = missing.at_path(JailStep::CloneMounts, "/none").expect_err("an error");
        let message = FailureReport::from(error).to_json();
        let failure: FailureReport = serde_json::from_slice(&message).expect("a failure");
        let error = JailError::from(failure);
        assert_eq!((error.step, error.path.as_deref()), (JailStep::CloneMounts, Some(Path::new("/none"))));
        assert_eq!(error.hint(), Some("the source of a mount must exist on this host"));
    }

    #[test]
    fn refused_namespaces_have_a_hint() {
        const EPERM: i32 = 1;
        const EIO: i32 = 5;
        let hint = |step, errno| JailError::new(step, io::Error::from_raw_os_error(errno)).hint();
        for step in [JailStep::Clone, JailStep::IdMaps, JailStep::NetNamespace, JailStep::PrivateMounts] {
            assert!(hint(step, EPERM).is_some_and(|hint| hint.contains("user namespaces")), "{step}");
        }
        assert_eq!(hint(JailStep::NetNamespace, EIO), None);
    }

    #[test]
    fn missing_control_groups_are_no_hint_for_a_refused_value() {
        const EINVAL: i32 = 22;
        let hint = |errno: i32| JailError::new(JailStep::Groups, io::Error::from_raw_os_error(errno)).hint();
        for errno in [1, 2, 13, 30] {
            assert!(hint(errno).is_some_and(|hint| hint.contains("control groups")), "{errno}");
        }
        assert_eq!(hint(EINVAL), None);
    }
}
