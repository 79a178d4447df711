//! Messages about isolated sessions: sessions with their own namespaces inside a sandbox.

use serde::{Deserialize, Serialize};

/// The parts of its sandbox that an isolated session can change. The rest of the file tree is
/// read-only; processes, terminals and shared memory belong to the session alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedSessionSpec {
    /// The order does not matter; a mount inside another one covers it there.
    #[serde(default)]
    pub mounts: Vec<IsolatedMount>,
    /// Whether the session shares the sandbox's `/tmp`; otherwise it gets an empty one of its own.
    #[serde(default)]
    pub share_temporary: bool,
    /// Whether the session shares the sandbox's network; otherwise it has only a loopback device.
    #[serde(default)]
    pub share_network: bool,
    #[serde(default)]
    pub screen: EnvFilter,
    /// The session is closed after this time without a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// Stored for the client and returned on request; the agent does not interpret it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedMount {
    /// A path in the sandbox; created if it is missing.
    pub source: String,
    pub target: String,
    pub view: MountView,
    /// The path to the source must contain no symbolic link, because the client may only name
    /// sources inside certain directories.
    #[serde(default)]
    pub without_links: bool,
}

/// How a directory appears in the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountView {
    ReadWrite,
    ReadOnly,
    /// Changes are visible only in the session and are discarded with it. They are stored on the
    /// sandbox's disk if `kept`, else in its memory.
    Overlay {
        kept: bool,
    },
}

/// The sandbox's variables that a session inherits. Patterns may contain `*` and ignore case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvFilter {
    /// If given, only these are inherited, and the few without which no shell works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Vec<String>>,
    #[serde(default)]
    pub without: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedSessionStatus {
    pub created_ms: u64,
    /// When a run last began or ended.
    pub used_ms: u64,
    /// The time left until the session is closed as idle; `None` without an idle limit and during a
    /// run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_left_ms: Option<u64>,
    /// Whether its namespaces still exist.
    pub alive: bool,
}
