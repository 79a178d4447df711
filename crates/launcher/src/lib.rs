//! The privileged process that makes and removes sandboxes on this host: namespaces, overlays, control groups
//! and filters.
//!
//! `process` is the launcher: it takes requests of `protocol` in packets, and builds each `jail` from a plan.
//! `backend-local` is its client, without privileges; `coracle run` is launcher and client in one process.

mod cgroups;
mod ids;
mod jail;
mod measure_words;
mod process;
mod uid_ranges;
mod volumes;

pub mod backup;
pub mod identity;
pub mod images;
pub mod network;
pub mod packet;
pub mod probe;
pub mod protocol;
pub mod settings;

pub use cgroups::{leave_leaf_group, move_to_leaf_group};
pub use jail::plan;
pub use process::create::{BeginCreateError, CreatedSandbox, PendingCreate};
pub use process::record::{LauncherRecord, LauncherRecords};
pub use process::serve::LauncherLoop;
pub use process::snapshot_record::{SnapshotDraft, SnapshotRecord};
pub use process::{Launcher, LauncherError};
pub use uid_ranges::DEFAULT_UID_BASE;
pub use volumes::VolumeKind;
