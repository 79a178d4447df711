//! The core types of Coracle and their rules: no I/O, no async, no serialisation.
//!
//! Every border (a front, the agent's wire format, the store) has its own types and converts to
//! these, so a compatible API can change without changes in the core.

pub mod address;
pub mod context;
pub mod exec_id;
pub mod guest;
pub mod hook;
pub mod image_name;
pub mod isolated_session;
pub mod journal;
pub mod key;
pub mod lifecycle;
pub mod network_policy;
pub mod policy_edit;
pub mod pool;
pub mod process;
pub mod quantity;
pub mod sandbox;
pub mod signal;
pub mod snapshot;
pub mod spec;
pub mod vault;
pub mod volume;

pub use address::{AddressError, AddressPrefix, NetworkTarget};
pub use context::{Language, LanguageError, LanguageRuntime};
pub use exec_id::{ContextId, ExecIdError, ProcessId, SessionId, SessionName, SessionNameError};
pub use guest::{GuestSettings, GuestUser, ImageDefaults};
pub use hook::{HookCommand, HookSchedule, PeriodicHook, SandboxHooks, ShutdownHook};
pub use image_name::{HOST_IMAGE, split_image_tag};
pub use isolated_session::{
    EnvFilter, IsolatedMount, IsolatedSessionSpec, IsolatedSessionStatus, MountView, OverlayStore,
    ResourceSharing,
};
pub use journal::{Backpressure, JournalOffset, OutputRetention, StreamKind};
pub use key::{KeyHandle, SandboxKey, SandboxKeyError};
pub use lifecycle::{EndCause, FilesState, LifecycleRequest, OnDeath, Phase, Verdict};
pub use network_policy::{
    DomainName, DomainNameError, MAX_POLICY_RULES, NetworkPolicy, PolicyAction, PolicyDecision, PolicyError,
    PolicyRule, PolicyTarget, TargetHost,
};
pub use policy_edit::{PolicyEdit, PolicyMode};
pub use pool::{PoolCapacity, PoolSpec, RefillRate};
pub use process::{ExitReason, UserIdentity};
pub use quantity::{Bytes, MAX_PIDS, MIN_DISK, MIN_MEMORY, MilliCpus};
pub use sandbox::{Labels, Owner, OwnerError, SandboxId};
pub use snapshot::{SandboxSettings, Snapshot, SnapshotId, SnapshotIdError, SnapshotState};
pub use spec::{Entrypoint, IsolatedSessions, NetworkAccess, ResourceLimits, SandboxLimits, SandboxSpec};
pub use vault::{
    Binding, BindingAuth, BindingError, ChangeSet, Credential, HeaderCredential, HostPattern,
    MAX_SECRET_BYTES, MAX_VAULT_ENTRIES, NewCredential, PathPattern, RequestFacts, RequestMatch,
    SealedSecret, SecretText, Substitution, SubstitutionSurface, UrlScheme, Vault, VaultChanges, VaultEntry,
    VaultError,
};
pub use volume::{MountAccess, MountSource, MountSpec, Volume, VolumeId, VolumeName};
