//! Isolated sessions: separate namespaces inside a sandbox, for one session.

use std::time::{Duration, SystemTime};

/// The parts of a sandbox that an isolated session can change. It has its own processes, terminals
/// and shared memory; everything else is read-only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IsolatedSessionSpec {
    pub mounts: Vec<IsolatedMount>,
    pub temporary: ResourceSharing,
    pub network: ResourceSharing,
    pub env_filter: EnvFilter,
    /// The session is closed after this time without a run.
    pub idle: Option<Duration>,
    /// Text stored by a front, which alone interprets it.
    pub note: String,
}

/// Whether something is shared with the sandbox or private to the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResourceSharing {
    #[default]
    Own,
    Shared,
}

/// A directory of the sandbox, created if it is missing, and the path at which the session sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsolatedMount {
    pub source: String,
    pub target: String,
    pub view: MountView,
    /// No symlink may be followed to the source, because its caller was restricted to certain
    /// directories.
    pub without_links: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountView {
    ReadWrite,
    ReadOnly,
    /// Changes are discarded when the session ends: those on disk are limited by the sandbox's disk,
    /// those in memory by its memory.
    Overlay(OverlayStore),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlayStore {
    Disk,
    Memory,
}

/// Selects the sandbox's variables that the session inherits; patterns support `*` and ignore case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvFilter {
    pub only: Option<Vec<String>>,
    pub without: Vec<String>,
}

/// The state of an isolated session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsolatedSessionStatus {
    pub created: SystemTime,
    /// When a run last began or ended.
    pub used: SystemTime,
    /// How long it may remain unused, if it has an idle timeout.
    pub idle_left: Option<Duration>,
    /// Whether its namespaces still exist.
    pub alive: bool,
}
