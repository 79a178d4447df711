//! The description from which a sandbox is created.

use std::collections::BTreeMap;

use crate::guest::Guest;
use crate::hook::Hooks;
use crate::lifecycle::OnDeath;
use crate::quantity::{Bytes, Cpus};
use crate::sandbox::SandboxId;
use crate::snapshot::SnapshotId;
use crate::volume::Mount;

/// Everything that is decided before a sandbox exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The image as named by the client; the backend resolves aliases.
    pub image: String,
    /// The snapshot whose files the sandbox starts with; `image` is then the image beneath them.
    pub snapshot: Option<SnapshotId>,
    pub resources: Resources,
    pub network: Network,
    pub mounts: Vec<Mount>,
    /// Added to the environment of every process.
    pub env: BTreeMap<String, String>,
    /// A file inside in which commands store variables for all commands that start later.
    pub env_file: Option<String>,
    /// The variable that holds the sandbox's own id.
    pub id_variable: Option<String>,
    /// The main process. If it is empty or would only wait, no process is started.
    pub entrypoint: Vec<String>,
    pub hooks: Hooks,
    pub nesting: Nesting,
    pub guest: Guest,
    /// The action to take when the sandbox has died and is used again; `None` if the caller did not
    /// specify it.
    pub on_death: Option<OnDeath>,
}

/// Limits. `None` means that the caller named none and the server's default applies; an explicit
/// limit that cannot be enforced makes the create fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub memory: Option<Bytes>,
    pub cpus: Option<Cpus>,
    pub pids: Option<u32>,
    pub disk: Option<Bytes>,
}

/// Whether isolated sessions can be opened in a sandbox. This needs a process that keeps the
/// required privileges, so it is decided when the sandbox is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nesting {
    #[default]
    Off,
    On,
}

/// The network that a sandbox can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Only its own loopback.
    Off,
    /// Other machines, but not this host and its local networks.
    On,
    /// `On` where possible, otherwise `Off`.
    Auto,
    Filtered,
}

impl Spec {
    /// A sandbox of the default image with default values for everything else.
    pub fn plain() -> Self {
        Self {
            image: "host".to_owned(),
            snapshot: None,
            resources: Resources::default(),
            network: Network::Off,
            mounts: Vec::new(),
            env: BTreeMap::new(),
            env_file: None,
            id_variable: None,
            entrypoint: Vec::new(),
            hooks: Hooks::default(),
            nesting: Nesting::Off,
            guest: Guest::root(),
            on_death: None,
        }
    }

    /// The action to take when the sandbox has died and is used again.
    pub fn on_death(&self) -> OnDeath {
        self.on_death.unwrap_or_default()
    }

    /// The environment of every process in the sandbox with this id.
    pub fn environment(&self, id: &SandboxId) -> BTreeMap<String, String> {
        let own = self.id_variable.iter().map(|name| (name.clone(), id.as_str().to_owned()));
        self.env.clone().into_iter().chain(own).collect()
    }

    /// Whether the entrypoint would only wait. The sandbox then runs without it.
    pub fn only_waits(&self) -> bool {
        let words: Vec<&str> = self.entrypoint.iter().map(String::as_str).collect();
        matches!(
            words.as_slice(),
            [] | ["tail" | "/usr/bin/tail", "-f", "/dev/null"]
                | ["sleep" | "/bin/sleep" | "/usr/bin/sleep", "infinity" | "inf"]
        )
    }
}
