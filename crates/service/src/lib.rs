//! The one core that every front calls.

mod agent_client;
mod error;
mod files;
mod following;
mod processes;
mod store;
mod tokens;
mod transfer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use backend::SharedBackend;
use domain::{Labels, Owner, Phase, SandboxId, Spec};

pub use agent_client::AgentError;
pub use backend::{AgentStream, Capabilities, InForce, Usage};
pub use error::{ErrorKind, FileError, FileFault, ServiceError};
pub use files::{Attributes, Change, Edit, FileInfo, FileKind, WatchEvent, WriteMode};
pub use following::{Event, Following, Input};
pub use processes::{Busy, Ended, OpenSession, ProcessStatus, Reach, Run, SessionStatus};
pub use store::StoreError;
pub use tokens::Secret;
pub use transfer::{Reading, Watching, Writing};

/// The core. A clone is a handle to the same one.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {}

#[derive(Clone, Debug)]
pub struct Config {
    /// Holds the database `coracle.db` and the server's secret.
    pub state_dir: PathBuf,
    /// How many sandboxes there may be at once.
    pub sandboxes: usize,
    pub commands_per_sandbox: u32,
    /// The longest time to live that a client may ask for.
    pub longest_timeout: Option<Duration>,
}

/// What became of a request that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// It already held: nothing changed.
    AlreadySo,
}

/// A sandbox to be made.
#[derive(Clone, Debug)]
pub struct Create {
    /// The front that asks.
    pub origin: &'static str,
    pub spec: Spec,
    pub labels: Labels,
    /// Bytes that the front stores and alone understands.
    pub notes: Vec<u8>,
    pub timeout: Option<Duration>,
    pub idle_timeout: Option<Duration>,
}

/// A sandbox as it is at one moment.
#[derive(Clone, Debug)]
pub struct Sandbox {
    pub id: SandboxId,
    pub owner: Owner,
    pub origin: String,
    pub spec: Spec,
    pub labels: Labels,
    pub notes: Vec<u8>,
    pub phase: Phase,
    pub phase_since: SystemTime,
    pub created: SystemTime,
    pub expires: Option<SystemTime>,
    pub in_force: InForce,
}

/// Which sandboxes to list: those with all of `labels` whose phase passes.
pub struct Filter<'a> {
    pub labels: Labels,
    pub phase: &'a (dyn Fn(&Phase) -> bool + Sync),
    pub offset: usize,
    pub limit: usize,
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct Page {
    pub items: Vec<Sandbox>,
    /// How many there are in all that pass the filter.
    pub total: usize,
}

impl Service {
    /// Opens the store, adopts what lives, finishes half-done work and starts the reaper.
    pub async fn start(config: Config, backend: SharedBackend) -> Result<Self, ServiceError> {
        todo!()
    }

    /// Stops the drivers and the store; sandboxes stay. Returns how many stay.
    pub async fn stop(&self) -> usize {
        todo!()
    }

    /// Answers when a command can run. Dropping the future undoes it.
    pub async fn create(&self, owner: &Owner, wish: Create) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    pub fn get(&self, owner: &Owner, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// Newest first.
    pub fn list(&self, owner: &Owner, filter: &Filter<'_>) -> Page {
        todo!()
    }

    /// Sets the labels that have a value and removes those that have none.
    pub async fn patch_labels(
        &self,
        owner: &Owner,
        id: &SandboxId,
        patch: BTreeMap<String, Option<String>>,
    ) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// Moves the expiry, to earlier or later. A sandbox that never expires is a conflict.
    pub async fn renew(
        &self,
        owner: &Owner,
        id: &SandboxId,
        expires: SystemTime,
    ) -> Result<Sandbox, ServiceError> {
        todo!()
    }

    /// Returns when it is paused.
    pub async fn pause(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        todo!()
    }

    /// Returns when it runs.
    pub async fn resume(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        todo!()
    }

    /// Returns when it is gone.
    pub async fn destroy(&self, owner: &Owner, id: &SandboxId) -> Result<Outcome, ServiceError> {
        todo!()
    }

    pub async fn usage(&self, owner: &Owner, id: &SandboxId) -> Result<Usage, ServiceError> {
        todo!()
    }

    pub fn capabilities(&self) -> &Capabilities {
        todo!()
    }

    /// How many sandboxes there are in each phase, by its name.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        todo!()
    }

    /// The token that opens one sandbox for one purpose; the same after a restart.
    pub fn token(&self, id: &SandboxId, purpose: &'static str) -> Secret {
        todo!()
    }

    /// Whose sandbox it is, if the token is right.
    pub fn owner_by_token(&self, id: &SandboxId, purpose: &'static str, presented: &str) -> Option<Owner> {
        todo!()
    }

    /// Sets the one key of the configuration; its owner is [`Owner::single`].
    pub fn set_single_key(&self, key: Option<&str>) {
        todo!()
    }

    pub fn owner_by_key(&self, presented: &str) -> Option<Owner> {
        todo!()
    }

    /// Whether there is no key at all, so that nobody is asked for one.
    pub fn keyless(&self) -> bool {
        todo!()
    }
}
