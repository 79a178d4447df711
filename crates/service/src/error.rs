//! The errors of the core, in a form that a caller can act on.

use std::time::Duration;

use backend::{BackendError, MountFault};
use domain::{
    Bytes, Language, LifecycleRequest, NetworkAccess, Owner, Phase, PolicyError, ProcessId, SandboxId,
    SessionId, SnapshotId, VaultError, VolumeId, VolumeName,
};

use crate::agent::client::AgentError;
use crate::store::StoreError;
use crate::tenancy::quota::{QuotaExcess, QuotaResource};

/// After how long a caller that reached a limit may retry.
const RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    #[error("there is no sandbox `{0}`")]
    NoSandbox(SandboxId),
    #[error("there is no process `{0}`")]
    NoProcess(ProcessId),
    #[error("there is no session `{0}`")]
    NoSession(SessionId),
    #[error("there is no terminal `{0}`")]
    NoTerminal(String),
    #[error("cannot {request} sandbox `{id}` while it is {phase}")]
    Denied { id: SandboxId, request: LifecycleRequest, phase: Phase },
    /// The sandbox died, and nothing is left to restart it from.
    #[error("sandbox `{id}` cannot be restarted: {reason}")]
    FilesLost { id: SandboxId, phase: Phase, reason: &'static str },
    /// It died, nothing is left of its files, and so it cannot be restarted either.
    #[error("cannot {request} sandbox `{id}`: it died, and its files are lost")]
    DeadWithoutFiles { id: SandboxId, request: LifecycleRequest, phase: Phase },
    #[error("this server cannot restart sandboxes with their files: disks are in memory here")]
    NoRestarts,
    #[error("network `{}` is wider than this server allows: `{}` at most", wanted.name(), most.name())]
    NetworkTooWide { wanted: NetworkAccess, most: NetworkAccess },
    #[error("this host cannot filter networks")]
    NoNetworkFilter,
    #[error("the network policy is invalid")]
    Policy(#[source] PolicyError),
    #[error("the network policy does not allow what the credential vault needs")]
    VaultPolicy(#[source] VaultError),
    #[error("sandbox `{id}` never expires, so there is nothing to renew")]
    NeverExpires { id: SandboxId, phase: Phase },
    #[error("sandbox limit reached ({limit})")]
    TooManySandboxes { limit: usize },
    #[error("too many creates are still running whose callers have disconnected")]
    TooManyDetachedCreates,
    #[error(
        "owner `{}` would exceed its quota of {}: {} in total, {} allowed",
        owner.as_str(), excess.what, excess.wanted, excess.most
    )]
    OverQuota { owner: Owner, excess: QuotaExcess },
    #[error("{}", describe_beyond_quota(owner, excess))]
    BeyondQuota { owner: Owner, excess: QuotaExcess },
    #[error("there is no pool `{0}`")]
    NoPool(String),
    #[error("pool `{0}` already exists")]
    PoolExists(String),
    #[error("pool `{0}` is defined in the configuration")]
    PoolConfigured(String),
    #[error("there is no volume `{0}`")]
    NoVolume(VolumeName),
    #[error("volume `{0}` no longer exists")]
    NoVolumeId(VolumeId),
    #[error("volume `{0}` already exists with another size")]
    VolumeExists(VolumeName),
    #[error("volume `{name}` is in use by {sandboxes} of the sandboxes")]
    VolumeInUse { name: VolumeName, sandboxes: usize },
    #[error("volume `{0}` is being removed")]
    VolumeRemoving(VolumeName),
    #[error("the server has no operator key")]
    NoOperatorKey,
    #[error("command limit of sandbox `{id}` reached ({limit})")]
    TooManyCommands { id: SandboxId, limit: u32 },
    #[error("context limit of sandbox `{id}` reached ({limit})")]
    TooManyContexts { id: SandboxId, limit: usize },
    #[error("session limit of sandbox `{0}` reached, and all sessions are busy")]
    TooManySessions(SandboxId),
    #[error("terminal limit of sandbox `{id}` reached ({limit})")]
    TooManyTerminals { id: SandboxId, limit: usize },
    #[error("`{language}` cannot be run in this sandbox: {reason}")]
    NoKernel { language: Language, reason: String },
    #[error("context `{0}` already exists")]
    ContextExists(String),
    /// A session with this name is open, but it is of another kind or belongs to another user of the sandbox.
    #[error("session `{session}` already exists: {reason}")]
    SessionExists { session: SessionId, reason: String },
    #[error("limit of concurrent image pulls reached")]
    TooManyPulls,
    #[error("there is no snapshot `{0}`")]
    NoSnapshot(SnapshotId),
    /// The files of this sandbox cannot be read now; `needs` says which sandboxes they can be read of.
    #[error("sandbox `{id}` is {phase}; {needs}")]
    NotASource { id: SandboxId, phase: Phase, needs: &'static str },
    #[error("another snapshot of sandbox `{0}` is being taken")]
    SnapshotInProgress(SandboxId),
    #[error("snapshot `{id}` is {state}")]
    SnapshotNotReady { id: SnapshotId, state: &'static str },
    #[error("snapshot `{0}` is still being taken")]
    SnapshotUnfinished(SnapshotId),
    #[error("a sandbox is being made from snapshot `{0}`")]
    SnapshotInUse(SnapshotId),
    #[error("a disk of {disk} is too small for snapshot `{id}`, which holds {size}")]
    SnapshotTooLarge { id: SnapshotId, disk: Bytes, size: Bytes },
    #[error("snapshot limit of this owner reached ({limit})")]
    TooManySnapshots { limit: usize },
    #[error("volume limit of this owner reached ({limit})")]
    TooManyVolumes { limit: usize },
    #[error("sandbox `{0}` is overloaded")]
    Overloaded(SandboxId),
    #[error("{0}")]
    Invalid(String),
    #[error("`{0}` is busy")]
    Busy(ProcessId),
    /// A run of this session or context is active.
    #[error("`{0}` is busy")]
    SessionBusy(SessionId),
    #[error("nothing listens on port {port} of sandbox `{id}`")]
    Refused { id: SandboxId, port: u16 },
    #[error(transparent)]
    File(FileError),
    #[error("could not {action} sandbox `{id}`")]
    Backend { backend: &'static str, action: &'static str, id: SandboxId, source: Box<BackendError> },
    #[error("could not {action}")]
    Host { backend: &'static str, action: &'static str, source: Box<BackendError> },
    #[error("could not {action}")]
    VolumeWork { backend: &'static str, action: &'static str, source: Box<BackendError> },
    #[error("could not {action}")]
    Image { action: &'static str, source: Box<BackendError> },
    #[error("the agent of sandbox `{id}` could not {action}")]
    Agent { id: SandboxId, action: &'static str, source: AgentError },
    #[error("the entrypoint could not be started")]
    Entrypoint(#[source] Box<ServiceError>),
    #[error("the hook before the entrypoint {ended}")]
    Hook { ended: String, source: Option<Box<ServiceError>> },
    #[error("the store could not {action}")]
    Store { action: &'static str, source: StoreError },
    #[error("could not {action}")]
    Io { action: &'static str, source: std::io::Error },
    #[error("the server is stopping")]
    Stopping,
}

/// A file operation that the kernel or the agent refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("could not {operation} `{path}`")]
pub struct FileError {
    pub fault: FileFault,
    pub errno: Option<i32>,
    /// The attempted operation, as a lower-case verb. It is only shown.
    pub operation: String,
    pub path: String,
    /// Set if one of the last steps before the process runs has failed.
    pub launch_step: Option<LaunchStep>,
}

/// A step between the request to start a process and its first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchStep {
    /// Changing to the requested user, which also comes before a file operation.
    BecomeUser,
    /// Executing the program, the last step.
    Exec,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFault {
    NotFound,
    AlreadyExists,
    NotADirectory,
    IsADirectory,
    Permission,
    NoSpace,
    Invalid,
    TooLarge,
    /// The file is not UTF-8.
    NotText,
    Other,
}

/// The kinds of failure that fronts turn into their own statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The sandbox does not exist, or it belongs to another owner.
    NotFound,
    NoProcess,
    NoSession,
    NoPool,
    /// The name is already taken, or the object with this name cannot be changed.
    Taken,
    NoSnapshot,
    /// A snapshot cannot be taken, used or deleted now.
    Snapshot,
    File(FileFault),
    Invalid,
    /// The request is not allowed in this phase.
    Conflict {
        phase: Phase,
    },
    Busy,
    Exhausted {
        retry_after: Duration,
    },
    Refused,
    Unsupported,
    /// The hook before the entrypoint failed.
    Hook,
    /// An image could not be fetched.
    Pull,
    /// A volume or directory cannot be mounted.
    Mount(MountFault),
    Internal,
}

impl ServiceError {
    /// Whether the backend reports that the sandbox no longer lives.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Self::Backend { source, .. } if matches!(**source, BackendError::Gone))
    }

    /// Whether a dead sandbox cannot be restarted because nothing is left of it.
    pub(crate) fn is_beyond_restart(&self) -> bool {
        matches!(self, Self::FilesLost { .. } | Self::NoSandbox(_))
    }

    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSandbox(_) => ErrorKind::NotFound,
            Self::NoVolume(_) | Self::NoVolumeId(_) => ErrorKind::Mount(MountFault::NoVolume),
            Self::VolumeExists(_) | Self::VolumeInUse { .. } | Self::VolumeRemoving(_) => ErrorKind::Busy,
            Self::NoProcess(_) => ErrorKind::NoProcess,
            Self::NoSession(_) | Self::NoTerminal(_) => ErrorKind::NoSession,
            Self::NoPool(_) => ErrorKind::NoPool,
            Self::PoolExists(_)
            | Self::PoolConfigured(_)
            | Self::ContextExists(_)
            | Self::SessionExists { .. } => ErrorKind::Taken,
            Self::Denied { phase, .. }
            | Self::NeverExpires { phase, .. }
            | Self::FilesLost { phase, .. }
            | Self::DeadWithoutFiles { phase, .. } => ErrorKind::Conflict { phase: *phase },
            Self::TooManySandboxes { .. }
            | Self::TooManyDetachedCreates
            | Self::OverQuota { .. }
            | Self::TooManyCommands { .. }
            | Self::TooManyContexts { .. }
            | Self::TooManySessions(_)
            | Self::TooManyTerminals { .. }
            | Self::TooManySnapshots { .. }
            | Self::TooManyPulls
            | Self::TooManyVolumes { .. }
            | Self::Overloaded(_) => exhausted_kind(),
            Self::NoSnapshot(_) => ErrorKind::NoSnapshot,
            Self::NotASource { .. }
            | Self::SnapshotInProgress(_)
            | Self::SnapshotNotReady { .. }
            | Self::SnapshotUnfinished(_)
            | Self::SnapshotInUse(_)
            | Self::SnapshotTooLarge { .. } => ErrorKind::Snapshot,
            Self::Invalid(_) | Self::BeyondQuota { .. } | Self::NoOperatorKey | Self::NoKernel { .. } => {
                ErrorKind::Invalid
            }
            Self::Busy(_) | Self::SessionBusy(_) => ErrorKind::Busy,
            Self::Refused { .. } => ErrorKind::Refused,
            Self::File(error) => ErrorKind::File(error.fault),
            Self::NetworkTooWide { .. } | Self::Policy(_) | Self::VaultPolicy(_) => ErrorKind::Invalid,
            Self::NoRestarts | Self::NoNetworkFilter => ErrorKind::Unsupported,
            Self::Backend { source, .. } | Self::Image { source, .. } | Self::VolumeWork { source, .. } => {
                backend_error_kind(source)
            }
            Self::Agent { source, .. } => source.kind(),
            Self::Entrypoint(source) => match source.kind() {
                // The caller named a program or user that does not exist.
                ErrorKind::File(_) => ErrorKind::Invalid,
                kind => kind,
            },
            Self::Hook { .. } => ErrorKind::Hook,
            Self::Store { source, .. } if source.is_full() => exhausted_kind(),
            Self::Store { .. } | Self::Host { .. } | Self::Io { .. } | Self::Stopping => ErrorKind::Internal,
        }
    }

    /// The error and all its causes in one line, for logs.
    pub fn message_with_causes(&self) -> String {
        error_chain(self)
    }

    /// The error with its causes. Causes inside the server or its host name paths of the host, which only the operator
    /// may see; other owners see only which step failed.
    pub fn message_for(&self, owner: &Owner) -> String {
        let ours = matches!(self.kind(), ErrorKind::Internal | ErrorKind::Exhausted { .. });
        if !ours || *owner == Owner::operator() {
            return error_chain(self);
        }
        match self {
            Self::Backend { source, .. } => match &**source {
                BackendError::Step { step, .. } => format!("{self}: step `{step}` failed"),
                _ => self.to_string(),
            },
            _ => self.to_string(),
        }
    }

    /// Whether the named image is not on this host and was not fetched.
    pub fn lacks_image(&self) -> bool {
        matches!(self, Self::Backend { source, .. } if matches!(**source, BackendError::NoImage { .. }))
    }

    /// A suggestion for this owner. Only the operator can list and fetch images, so other owners get a
    /// different one for a missing image.
    pub fn hint_for(&self, owner: &Owner) -> Option<&str> {
        let source = match self {
            Self::Backend { source, .. } | Self::Image { source, .. } => Some(&**source),
            _ => None,
        };
        if matches!(source, Some(BackendError::NoImage { .. })) && *owner != Owner::operator() {
            return Some("image `host` is always there; the operator of this server can provide others");
        }
        self.hint()
    }

    /// A suggestion for resolving the error.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Backend { source, .. }
            | Self::Host { source, .. }
            | Self::Image { source, .. }
            | Self::VolumeWork { source, .. } => source.hint(),
            Self::FilesLost { .. } | Self::DeadWithoutFiles { .. } => Some(
                "`coracle create --key NAME` with its name makes a new one in its place; one without a name: remove \
                 it and create another",
            ),
            // Without a number it is the agent of a sandbox with one user that refused.
            Self::File(FileError {
                fault: FileFault::Permission,
                errno: None,
                launch_step: Some(LaunchStep::BecomeUser),
                ..
            }) => Some("this sandbox has no other user than root; run the server as root to have others"),
            Self::NetworkTooWide { .. } => Some("the operator sets the widest network with `network.most`"),
            Self::NoNetworkFilter => Some("`coracle doctor` says what is missing on this host"),
            Self::NoRestarts => Some(
                "leave `on_death` out or name `replace`, or run the server as root, whose disks outlive sandboxes",
            ),
            Self::Denied { request: LifecycleRequest::Use, phase: Phase::Failed(_), .. } => {
                Some("start it again with `coracle restart`, or `resume` in the APIs")
            }
            Self::Denied { request: LifecycleRequest::Use, phase: Phase::Paused, .. } => {
                Some("continue it with `coracle resume`, or `resume` in the APIs")
            }
            Self::NoVolume(_) => Some("`coracle volume ls` lists the volumes"),
            Self::VolumeInUse { .. } => Some("delete the sandboxes that use it first"),
            Self::VolumeExists(_) => Some("remove it first, or choose another name"),
            Self::TooManySandboxes { .. } => Some("delete sandboxes that ended, or raise the limit"),
            Self::NoPool(_) => Some("`coracle pool ls` lists the pools"),
            Self::PoolExists(_) => Some("choose another name, or remove it first"),
            Self::PoolConfigured(_) => Some("change it there and restart the server"),
            Self::OverQuota { excess, .. } if excess.what == QuotaResource::Disk => {
                Some("delete sandboxes, snapshots or volumes that are not needed")
            }
            Self::OverQuota { .. } => Some("delete sandboxes that are not needed"),
            Self::BeyondQuota { excess, .. }
                if excess.what == QuotaResource::Memory || excess.what == QuotaResource::Cpus =>
            {
                Some(
                    "request a smaller limit (SDKs request 1 core and 2Gi unless `resource` is given), or ask the operator \
                 to raise the quota of this owner",
                )
            }
            Self::BeyondQuota { excess, .. } if excess.what == QuotaResource::Sandboxes => {
                Some("the operator can change the quota of this owner")
            }
            Self::BeyondQuota { .. } => {
                Some("request a smaller limit, or ask the operator to raise the quota of this owner")
            }
            Self::TooManyPulls | Self::TooManyDetachedCreates => Some("retry when one of them has finished"),
            Self::TooManySnapshots { .. } => Some("delete snapshots that are not needed"),
            Self::TooManyVolumes { .. } => Some("remove volumes that are not needed"),
            Self::NoOperatorKey => Some("set `api_key` first: once a key exists, every request needs one"),
            Self::NeverExpires { .. } => Some("only a sandbox created with a timeout can be renewed"),
            Self::Store { source, .. } if source.is_full() => Some("the disk of the state directory is full"),
            _ => None,
        }
    }
}

/// A request asks for one sandbox, so a count that it alone exceeds is zero.
fn describe_beyond_quota(owner: &Owner, excess: &QuotaExcess) -> String {
    let QuotaExcess { what, wanted, most } = excess;
    match *what {
        QuotaResource::Sandboxes => {
            format!("owner `{}` may have no sandboxes: its quota is {most}", owner.as_str())
        }
        what => {
            format!("{wanted} {what} exceeds the whole quota of owner `{}`: {most} allowed", owner.as_str())
        }
    }
}

fn exhausted_kind() -> ErrorKind {
    ErrorKind::Exhausted { retry_after: RETRY_DELAY }
}

fn backend_error_kind(error: &BackendError) -> ErrorKind {
    match error {
        BackendError::Unsupported { .. } => ErrorKind::Unsupported,
        BackendError::Pull { .. } => ErrorKind::Pull,
        BackendError::NoImage { .. } | BackendError::TooMuch { .. } | BackendError::Upload(_) => {
            ErrorKind::Invalid
        }
        BackendError::Mount { fault, .. } => ErrorKind::Mount(*fault),
        BackendError::Gone => ErrorKind::NotFound,
        BackendError::Exhausted(_) => exhausted_kind(),
        BackendError::Step { .. } | BackendError::Io { .. } => ErrorKind::Internal,
    }
}

impl ErrorKind {
    /// The name used in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not found",
            Self::NoProcess => "no process",
            Self::NoSession => "no session",
            Self::NoPool => "no pool",
            Self::Taken => "taken",
            Self::NoSnapshot => "no snapshot",
            Self::Snapshot => "snapshot",
            Self::File(_) => "file",
            Self::Invalid => "invalid",
            Self::Conflict { .. } => "conflict",
            Self::Busy => "busy",
            Self::Exhausted { .. } => "exhausted",
            Self::Refused => "refused",
            Self::Unsupported => "unsupported",
            Self::Hook => "hook",
            Self::Pull => "pull",
            Self::Mount(_) => "mount",
            Self::Internal => "internal",
        }
    }
}

/// The most characters of the log that one error may take.
const MAX_LOGGED_CHARS: usize = 2048;

/// An error with all its causes, for the log. Parts of it may be chosen by an attacker, so the result is one line of
/// bounded length.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text.chars()
        .take(MAX_LOGGED_CHARS)
        .map(|letter| if letter.is_control() { '\u{fffd}' } else { letter })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logged_error_is_one_line_of_bounded_length() {
        let error = ServiceError::Invalid(format!("a\nb\u{1b}[31m{}", "x".repeat(100_000)));
        let text = error_chain(&error);
        assert!(text.chars().count() <= MAX_LOGGED_CHARS && !text.contains(char::is_control), "{text}");
    }

    #[test]
    fn resources_beyond_the_quota_have_a_hint_about_the_defaults_of_sdks() {
        let beyond = |what| ServiceError::BeyondQuota {
            owner: Owner::from_valid_name("a"),
            excess: QuotaExcess::new(what, 2, 1),
        };
        let hints_at_sdks =
            |what| beyond(what).hint().is_some_and(|hint| hint.contains("unless `resource` is given"));
        assert!(
            hints_at_sdks(QuotaResource::Memory)
                && hints_at_sdks(QuotaResource::Cpus)
                && !hints_at_sdks(QuotaResource::Disk)
        );
    }

    #[test]
    fn user_of_a_sandbox_that_has_only_root_is_named_alone() {
        let error = FileError {
            fault: FileFault::Permission,
            errno: None,
            operation: "become user".to_owned(),
            path: "1000".to_owned(),
            launch_step: Some(LaunchStep::BecomeUser),
        };
        let error = ServiceError::File(error);
        assert_eq!(error.to_string(), "could not become user `1000`");
        assert!(error.hint().is_some_and(|hint| hint.contains("no other user than root")));
    }

    #[test]
    fn only_the_operator_is_sent_to_the_list_of_images() {
        let hint = Some("`coracle image ls` lists what is here".to_owned());
        let source = Box::new(BackendError::NoImage { message: "no image `x`".to_owned(), hint });
        let id = SandboxId::from_entropy([1; 20]);
        let error = ServiceError::Backend { backend: "b", action: "create", id, source };
        assert!(error.hint_for(&Owner::operator()).is_some_and(|hint| hint.contains("image ls")));
        let hint = error.hint_for(&Owner::from_valid_name("tenant")).unwrap_or_default();
        assert!(hint.contains("the operator") && !hint.contains("image ls"), "{hint}");
        assert_eq!(
            ServiceError::TooManyPulls.hint_for(&Owner::from_valid_name("tenant")),
            ServiceError::TooManyPulls.hint()
        );
    }

    #[test]
    fn only_the_operator_sees_host_paths() {
        let message = "could not record `/var/lib/coracle/ranges/7`".to_owned();
        let step = BackendError::Step { step: "uid-range".to_owned(), message, hint: None };
        let full = BackendError::Exhausted("no room in `/var/lib/coracle/disk`".to_owned());
        for source in [step, full] {
            let id = SandboxId::from_entropy([1; 20]);
            let error =
                ServiceError::Backend { backend: "b", action: "create", id, source: Box::new(source) };
            assert!(error.message_for(&Owner::operator()).contains("/var/lib"), "{error}");
            let message = error.message_for(&Owner::from_valid_name("tenant"));
            assert!(!message.contains('/') && message.contains("could not create"), "{message}");
        }
        let named = ServiceError::Invalid("`/x` is no mount".to_owned());
        assert_eq!(named.message_for(&Owner::from_valid_name("tenant")), named.to_string());
    }

    #[test]
    fn sandbox_that_cannot_be_used_now_has_a_hint_for_its_phase() {
        let denied = |phase| ServiceError::Denied {
            id: SandboxId::from_entropy([1; 20]),
            request: LifecycleRequest::Use,
            phase,
        };
        for (phase, command) in
            [(Phase::Paused, "`coracle resume`"), (Phase::Failed(domain::EndCause::Oom), "`coracle restart`")]
        {
            let error = denied(phase);
            assert!(error.hint().is_some_and(|hint| hint.contains(command)), "{error}");
        }
    }

    #[test]
    fn quota_of_no_sandboxes_is_not_called_a_limit() {
        let beyond = |excess| ServiceError::BeyondQuota { owner: Owner::from_valid_name("a"), excess };
        let none = beyond(QuotaExcess::new(QuotaResource::Sandboxes, 1, 0));
        assert_eq!(none.to_string(), "owner `a` may have no sandboxes: its quota is 0");
        assert_eq!(none.hint(), Some("the operator can change the quota of this owner"));
        let memory = beyond(QuotaExcess::new(QuotaResource::Memory, "2Gi", "1Gi"));
        assert_eq!(memory.to_string(), "2Gi memory exceeds the whole quota of owner `a`: 1Gi allowed");
        assert!(memory.hint().is_some_and(|hint| hint.contains("smaller limit")));
    }

    #[test]
    fn chain_puts_the_cause_after_the_action() {
        let source = std::io::Error::other("no luck");
        assert_eq!(error_chain(&ServiceError::Io { action: "sail", source }), "could not sail: no luck");
    }
}
