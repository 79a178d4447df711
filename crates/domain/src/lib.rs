//! The core types of Coracle and their rules: no I/O, no async, no serialisation.
//!
//! Every border (a front, the agent's wire format, the store) has its own types and converts to
//! these, so a compatible API can change without changes in the core.

pub mod context;
pub mod guest;
pub mod hook;
pub mod journal;
pub mod key;
pub mod lifecycle;
pub mod nest;
pub mod pool;
pub mod process;
pub mod quantity;
pub mod sandbox;
pub mod signal;
pub mod snapshot;
pub mod spec;
pub mod volume;

pub use context::{ContextId, Language, NotALanguage, Worker};
pub use guest::{Guest, User};
pub use hook::{Hook, Hooks, Periodic, Schedule};
pub use journal::{Backpressure, Position, Retention, Stream};
pub use key::{Key, NotAKey};
pub use lifecycle::{Cause, Files, OnDeath, Phase, Request, Verdict};
pub use nest::{Nest, NestMount, NestStatus, Screen, Sharing, Store, View};
pub use pool::{Capacity, Pool, Refill};
pub use process::{Exit, Identity, ProcessId, SessionId};
pub use quantity::{Bytes, Cpus, MAX_PIDS, MIN_DISK, MIN_MEMORY};
pub use sandbox::{Labels, NotAnOwner, Owner, SandboxId};
pub use snapshot::{NotASnapshotId, SandboxSettings, Snapshot, SnapshotId, SnapshotState};
pub use spec::{Nesting, Network, Resources, Spec};
pub use volume::{Access, Mount, Source, Volume, VolumeId, VolumeName};
