//! The privileged process that makes and removes sandboxes on this host: namespaces, overlays, control groups
//! and filters.
//!
//! `process` is the launcher: it takes requests of `protocol` in packets, and builds each `jail` from a plan.
//! `backend-local` is its client, without privileges; `coracle run` is launcher and client in one process.

mod cgroups;
mod client_connection;
mod ids;
mod jail;
mod measure_words;
mod pidfd_queue;
mod process;
mod uid_ranges;
mod volumes;

pub mod backup;
pub mod container;
pub mod identity;
pub mod images;
pub mod network;
pub mod probe;
pub mod protocol;
pub mod role_filters;
pub mod settings;

pub use cgroups::{join_egress_group, leave_leaf_group, move_to_leaf_group, remove_empty_groups};
pub use jail::plan;
pub use jail::stages::StageTime;
pub use process::agent_program::program_copies::{ProgramSource, SandboxPrograms};
pub use process::create::{BeginCreateError, CreatedSandbox, PendingCreate};
pub use process::puller::{PULLER_SUBCOMMAND, PULLER_VARIABLES};
pub use process::record::{LauncherRecord, LauncherRecords};
pub use process::serve::LauncherLoop;
pub use process::snapshot_record::{SnapshotDraft, SnapshotRecord};
pub use process::{Launcher, LauncherError};
pub use uid_ranges::DEFAULT_UID_BASE;
pub use volumes::VolumeKind;
