//! Nests: namespaces of their own inside a sandbox, for one session.

use std::time::{Duration, SystemTime};

/// What a session sees of its sandbox. The rest can be read and not changed, but for processes,
/// terminals and shared memory, which are its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nest {
    pub mounts: Vec<NestMount>,
    pub temporary: Sharing,
    pub network: Sharing,
    pub screen: Screen,
    /// After how long without a run it is closed.
    pub idle: Option<Duration>,
    /// Text that a front keeps with it and alone understands.
    pub note: String,
}

/// Whether something is the sandbox's or the nest's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Own,
    Shared,
}

/// A directory of the sandbox, made if it is missing, and where it is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NestMount {
    pub source: String,
    pub target: String,
    pub view: View,
    /// No link may lead to the source, since whoever named it was held to certain directories.
    pub without_links: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    ReadWrite,
    ReadOnly,
    /// Changes end with the nest: those on disk are bounded by the sandbox's disk, those in memory by
    /// its memory.
    Overlay(Store),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    Disk,
    Memory,
}

/// Which of the sandbox's variables come along; patterns have `*` and ignore case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Screen {
    pub only: Option<Vec<String>>,
    pub without: Vec<String>,
}

/// How a nest is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NestStatus {
    pub created: SystemTime,
    /// When a run last began or ended.
    pub used: SystemTime,
    /// How long it may still go unused, where that matters.
    pub idle_left: Option<Duration>,
    /// Whether its namespaces are still there.
    pub alive: bool,
}
