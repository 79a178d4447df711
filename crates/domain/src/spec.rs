//! What a sandbox is to be made of.

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
    /// The image as the client named it; the backend resolves aliases.
    pub image: String,
    /// The snapshot whose files it begins with; the image is then the one that lies below them.
    pub snapshot: Option<SnapshotId>,
    pub resources: Resources,
    pub network: Network,
    pub mounts: Vec<Mount>,
    /// Added to the environment of every process.
    pub env: BTreeMap<String, String>,
    /// A file inside that commands keep variables in, for all that start afterwards.
    pub env_file: Option<String>,
    /// The variable that tells a sandbox its own id.
    pub id_variable: Option<String>,
    /// The main process; empty, or one that only waits, needs no process at all.
    pub entrypoint: Vec<String>,
    pub hooks: Hooks,
    pub nesting: Nesting,
    pub guest: Guest,
    /// What becomes of it when it has died and is wanted again; `None` if the caller did not say.
    pub on_death: Option<OnDeath>,
}

/// Limits. `None` means that the caller named none and the server's default applies; a limit
/// that was named and cannot be enforced fails the create.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub memory: Option<Bytes>,
    pub cpus: Option<Cpus>,
    pub pids: Option<u32>,
    pub disk: Option<Bytes>,
}

/// Whether sessions with namespaces of their own can be opened in a sandbox. It costs a process that
/// keeps the rights for it, so it is decided beforehand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nesting {
    #[default]
    Off,
    On,
}

/// What a sandbox can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Its own loopback and nothing else.
    Off,
    /// Other machines, but not this host and what is near it.
    On,
    /// `On` where that is possible, else `Off`.
    Auto,
    Filtered,
}

impl Spec {
    /// A sandbox of the default image in which everything else is left open.
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

    /// What becomes of it when it has died and is wanted again.
    pub fn on_death(&self) -> OnDeath {
        self.on_death.unwrap_or_default()
    }

    /// What is in the environment of every process of the sandbox that has this id.
    pub fn environment(&self, id: &SandboxId) -> BTreeMap<String, String> {
        let own = self.id_variable.iter().map(|name| (name.clone(), id.as_str().to_owned()));
        self.env.clone().into_iter().chain(own).collect()
    }

    /// Whether the entrypoint would do nothing but wait. The sandbox then lives without it.
    pub fn only_waits(&self) -> bool {
        let words: Vec<&str> = self.entrypoint.iter().map(String::as_str).collect();
        matches!(
            words.as_slice(),
            [] | ["tail" | "/usr/bin/tail", "-f", "/dev/null"]
                | ["sleep" | "/bin/sleep" | "/usr/bin/sleep", "infinity" | "inf"]
        )
    }
}
