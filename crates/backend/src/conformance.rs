//! What every backend must do, as checks that run against a real one.
//!
//! A backend's tests implement [`Subject`] and call [`check_all`]. The checks know the trait and
//! the agent behind it and nothing else, so they hold for namespaces, containers and clusters
//! alike. What a backend does not offer by its [`Capabilities`](crate::Capabilities) must be
//! refused, and that is checked instead.

mod agent;
mod checks;
mod restarts;
mod snapshots;

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use domain::{SandboxId, Spec};

use crate::{Found, InForce, SharedBackend};

/// A backend under test. Its defaults must not require limits, and unknown images are refused.
#[async_trait::async_trait]
pub trait Subject: Send + Sync {
    /// Opens the backend as a server does that was just started. Whatever was open before is
    /// gone, as after a crash; sandboxes are not.
    async fn open(&self) -> SharedBackend;
    /// A directory where the sandboxes are that may be mounted into them, with a file `greeting`
    /// in it that says `hello`.
    fn shared(&self) -> PathBuf;
    /// Ends a sandbox as an accident would, without asking the backend.
    async fn strike(&self, id: &SandboxId);
}

/// How long one check may take, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(120);

type Check = for<'a> fn(&'a dyn Subject) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Runs every check, one after the other, and answers their names. It panics at the first that
/// fails.
pub async fn check_all(subject: &dyn Subject) -> Vec<&'static str> {
    let mut passed = Vec::new();
    for (name, check) in checks::ALL {
        let outcome = tokio::time::timeout(PATIENCE, check(subject)).await;
        outcome.unwrap_or_else(|_| panic!("conformance: `{name}` did not end"));
        passed.push(*name);
    }
    passed
}

/// A sandbox that one check made.
struct Made {
    backend: SharedBackend,
    id: SandboxId,
    in_force: InForce,
}

impl Made {
    async fn plain(backend: &SharedBackend) -> Self {
        Self::of(backend, &Spec::plain()).await
    }

    async fn of(backend: &SharedBackend, spec: &Spec) -> Self {
        let id = fresh_id();
        let in_force = backend.create(&id, spec).await.expect("a sandbox can be made");
        Self { backend: backend.clone(), id, in_force }
    }

    /// The same sandbox, through another backend.
    fn seen_by(self, backend: &SharedBackend) -> Self {
        Self { backend: backend.clone(), ..self }
    }

    async fn found(&self) -> Option<Found> {
        found(&self.backend, &self.id).await
    }

    async fn destroy(self) {
        self.backend.destroy(&self.id).await.expect("a sandbox can be destroyed");
        assert_eq!(self.found().await, None, "a destroyed sandbox is still listed");
    }
}

async fn found(backend: &SharedBackend, id: &SandboxId) -> Option<Found> {
    let all = backend.list().await.expect("sandboxes can be listed");
    all.into_iter().find(|found| found.id == *id)
}

/// An id that nobody had before.
fn fresh_id() -> SandboxId {
    let source = RandomState::new();
    let mut entropy = [0; 20];
    for (place, byte) in entropy.iter_mut().enumerate() {
        *byte = source.hash_one(place).to_le_bytes()[0];
    }
    SandboxId::from_entropy(entropy)
}
