//! The description from which a sandbox is created.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::guest::GuestSettings;
use crate::hook::SandboxHooks;
use crate::lifecycle::OnDeath;
use crate::network_policy::NetworkPolicy;
use crate::quantity::{Bytes, MilliCpus};
use crate::sandbox::SandboxId;
use crate::snapshot::SnapshotId;
use crate::volume::MountSpec;

/// Everything that is decided before a sandbox exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxSpec {
    /// The image as named by the client. The service decides which image the name stands for.
    pub image: String,
    /// The snapshot whose files the sandbox starts with; `image` is then the image beneath them.
    pub snapshot: Option<SnapshotId>,
    pub resources: ResourceLimits,
    pub network: NetworkAccess,
    /// What the sandbox may reach if its network is [`NetworkAccess::Filtered`]; `None` means nothing. In any other mode it
    /// has no meaning. Shared, because states of sandboxes are copied often and a policy may be long.
    pub policy: Option<Arc<NetworkPolicy>>,
    pub mounts: Vec<MountSpec>,
    /// Added to the environment of every process.
    pub env: BTreeMap<String, String>,
    /// A file inside in which commands store variables for all commands that start later.
    pub env_file: Option<String>,
    /// The variable that holds the sandbox's own id.
    pub id_variable: Option<String>,
    pub entrypoint: Entrypoint,
    pub hooks: SandboxHooks,
    pub isolated_sessions: IsolatedSessions,
    pub guest: GuestSettings,
    /// The action to take when the sandbox has died and is used again; `None` if the caller did not
    /// specify it.
    pub on_death: Option<OnDeath>,
}

/// Limits. `None` means that the caller named none and the server's default applies; an explicit
/// limit that cannot be enforced makes the create fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceLimits {
    pub memory: Option<Bytes>,
    pub cpus: Option<MilliCpus>,
    pub pids: Option<u32>,
    pub disk: Option<Bytes>,
}

/// Every limit of a sandbox, whether its caller named it or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxLimits {
    pub memory: Bytes,
    pub cpus: MilliCpus,
    pub pids: u32,
    pub disk: Bytes,
}

impl SandboxLimits {
    /// Nothing at all: no process can run with these.
    pub const ZERO: Self = Self { memory: Bytes(0), cpus: MilliCpus(0), pids: 0, disk: Bytes(0) };

    /// Returns the named limits, and these for the others.
    pub fn completing(self, named: &ResourceLimits) -> Self {
        Self {
            memory: named.memory.unwrap_or(self.memory),
            cpus: named.cpus.unwrap_or(self.cpus),
            pids: named.pids.unwrap_or(self.pids),
            disk: named.disk.unwrap_or(self.disk),
        }
    }
}

/// Whether isolated sessions can be opened in a sandbox. This needs a process that keeps the
/// required privileges, so it is decided when the sandbox is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsolatedSessions {
    #[default]
    Off,
    On,
}

/// The network that a sandbox can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkAccess {
    /// Only its own loopback.
    Off,
    /// Other machines, but not this host and its local networks.
    On,
    /// `On` where possible, otherwise `Off`.
    Auto,
    /// What a policy allows, by name or address.
    Filtered,
}

impl NetworkAccess {
    /// The name used in APIs and settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
            Self::Filtered => "filtered",
        }
    }

    /// Whether a client may ask for this network where `most` is the widest that the operator allows. The order is off,
    /// filtered, on. `auto` is always possible: it gives at most what is allowed.
    pub fn is_within(self, most: Self) -> bool {
        match (self, most) {
            (Self::Off | Self::Auto, _) | (_, Self::On | Self::Auto) => true,
            (Self::Filtered, Self::Filtered) => true,
            (Self::Filtered | Self::On, Self::Off) | (Self::On, Self::Filtered) => false,
        }
    }
}

impl SandboxSpec {
    /// A sandbox of the default image with default values for everything else.
    pub fn with_defaults() -> Self {
        Self {
            image: "host".to_owned(),
            snapshot: None,
            resources: ResourceLimits::default(),
            network: NetworkAccess::Off,
            policy: None,
            mounts: Vec::new(),
            env: BTreeMap::new(),
            env_file: None,
            id_variable: None,
            entrypoint: Entrypoint::FromImage,
            hooks: SandboxHooks::default(),
            isolated_sessions: IsolatedSessions::Off,
            guest: GuestSettings::root_only(),
            on_death: None,
        }
    }

    /// The action to take when the sandbox has died and is used again.
    pub fn on_death(&self) -> OnDeath {
        self.on_death.unwrap_or_default()
    }

    /// The policy of a filtered network.
    pub fn policy_or_deny_all(&self) -> Arc<NetworkPolicy> {
        self.policy.clone().unwrap_or_else(|| Arc::new(NetworkPolicy::deny_all()))
    }

    /// The environment of every process in the sandbox with this id.
    pub fn process_environment(&self, id: &SandboxId) -> BTreeMap<String, String> {
        let own = self.id_variable.iter().map(|name| (name.clone(), id.as_str().to_owned()));
        self.env.clone().into_iter().chain(own).collect()
    }
}

/// The main process of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entrypoint {
    /// No process is started.
    None,
    /// The command of the image. If the image has none, no process is started.
    FromImage,
    /// This program with its arguments; at least one word. If it would only wait, no process is started.
    Argv(Vec<String>),
}

impl Entrypoint {
    /// The command that stands for [`Entrypoint::None`] where only a list of words can be stored or shown.
    const IDLE_COMMAND: [&str; 3] = ["tail", "-f", "/dev/null"];

    /// The inverse of [`Entrypoint::to_words`].
    pub fn from_words(words: Vec<String>) -> Self {
        match words.as_slice() {
            [] => Self::FromImage,
            words if words == Self::IDLE_COMMAND => Self::None,
            _ => Self::Argv(words),
        }
    }

    /// The words by which the entrypoint is stored and shown; no words mean the command of the image.
    pub fn to_words(&self) -> Vec<String> {
        match self {
            Self::None => Self::IDLE_COMMAND.map(str::to_owned).to_vec(),
            Self::FromImage => Vec::new(),
            Self::Argv(words) => words.clone(),
        }
    }

    /// Whether there is nothing to start: no entrypoint, or one that would only wait.
    pub fn is_idle(&self) -> bool {
        let Self::Argv(words) = self else { return true };
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        matches!(
            words.as_slice(),
            ["tail" | "/usr/bin/tail", "-f", "/dev/null"]
                | ["sleep" | "/bin/sleep" | "/usr/bin/sleep", "infinity" | "inf"]
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn stored_words_name_the_same_entrypoint_again() {
        let serve = Entrypoint::Argv(argv(&["serve", "-f"]));
        for entrypoint in [Entrypoint::None, Entrypoint::FromImage, serve] {
            assert_eq!(Entrypoint::from_words(entrypoint.to_words()), entrypoint);
        }
        assert_eq!(Entrypoint::None.to_words(), argv(&["tail", "-f", "/dev/null"]));
        assert_eq!(Entrypoint::FromImage.to_words(), Vec::<String>::new());
    }

    #[test]
    fn client_may_ask_for_no_wider_network_than_the_operator_allows() {
        use NetworkAccess::{Auto, Filtered, Off, On};
        let allowed = |most| [Off, Auto, Filtered, On].map(|wanted: NetworkAccess| wanted.is_within(most));
        assert_eq!(allowed(Off), [true, true, false, false]);
        assert_eq!(allowed(Filtered), [true, true, true, false]);
        assert_eq!(allowed(On), [true; 4]);
    }

    #[test]
    fn command_that_only_waits_is_idle() {
        let sleep = Entrypoint::from_words(argv(&["sleep", "infinity"]));
        assert!(sleep.is_idle() && sleep.to_words() == argv(&["sleep", "infinity"]));
        assert!(Entrypoint::None.is_idle() && Entrypoint::FromImage.is_idle());
        assert!(!Entrypoint::from_words(argv(&["sleep", "9"])).is_idle());
    }
}
