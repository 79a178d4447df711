//! Messages about nests: namespaces of their own inside a sandbox, for one session.

use serde::{Deserialize, Serialize};

/// What the shell of a session sees of its sandbox. Everything else is there to be read, but for
/// processes, terminals and shared memory, which are its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nest {
    /// In any order; one that lies in another covers it there.
    #[serde(default)]
    pub mounts: Vec<NestMount>,
    /// Whether `/tmp` is the sandbox's; otherwise it is empty at first and nobody else's.
    #[serde(default)]
    pub share_temporary: bool,
    /// Whether the network is the sandbox's; otherwise there is a loopback and nothing else.
    #[serde(default)]
    pub share_network: bool,
    #[serde(default)]
    pub screen: Screen,
    /// After how long without a run it is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// Kept for whoever asks for it, and never looked at.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NestMount {
    /// A path of the sandbox; made if it is missing.
    pub source: String,
    pub target: String,
    pub view: View,
    /// No link may lead to the source, since whoever named it was held to certain directories.
    #[serde(default)]
    pub without_links: bool,
}

/// How a directory is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum View {
    ReadWrite,
    ReadOnly,
    /// Changes stay in the nest and end with it: on the sandbox's disk, or in its memory.
    Overlay {
        kept: bool,
    },
}

/// Which of the sandbox's variables come along. Patterns have `*` and ignore case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Screen {
    /// Only these, if given, and the few without which no shell works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Vec<String>>,
    #[serde(default)]
    pub without: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NestStatus {
    pub created_ms: u64,
    /// When a run last began or ended.
    pub used_ms: u64,
    /// How long it may still go unused; `None` if that does not matter, or while it is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_left_ms: Option<u64>,
    /// Whether its namespaces are still there.
    pub alive: bool,
}
