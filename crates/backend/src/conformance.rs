//! Checks that every backend must pass, run against a real one.
//!
//! A backend's tests implement [`BackendUnderTest`] and call [`check_all`]. The checks use only the trait
//! and the agent behind it, so they apply to namespaces, containers and clusters alike. A feature
//! that a backend does not list in its [`BackendCapabilities`](crate::Capabilities) must be rejected, and
//! that is checked instead.

mod agent;
mod checks;
mod restarts;
mod snapshots;

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use domain::{SandboxId, SandboxSpec};

use crate::{Enforced, FoundSandbox, SharedBackend};

/// A backend under test. Its default limits must not be required, and it must reject unknown
/// images.
#[async_trait::async_trait]
pub trait BackendUnderTest: Send + Sync {
    /// Opens the backend like a newly started server. Everything that was open before is gone, as
    /// after a crash, but sandboxes remain.
    async fn open(&self) -> SharedBackend;
    /// A directory on the sandboxes' machine that may be mounted into them. It contains a file
    /// `greeting` with the text `hello`.
    fn shared_directory(&self) -> PathBuf;
    /// Kills a sandbox as an accident would, without the backend's involvement.
    async fn kill_sandbox(&self, id: &SandboxId);
}

/// The time limit for one check, on the slowest machine.
const CHECK_TIMEOUT: Duration = Duration::from_secs(120);

type Check = for<'a> fn(&'a dyn BackendUnderTest) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Runs every check, one after the other, and returns their names. Panics at the first failure.
pub async fn check_all(subject: &dyn BackendUnderTest) -> Vec<&'static str> {
    let mut passed = Vec::new();
    for (name, check) in checks::ALL {
        let outcome = tokio::time::timeout(CHECK_TIMEOUT, check(subject)).await;
        outcome.unwrap_or_else(|_| panic!("conformance: `{name}` timed out"));
        passed.push(*name);
    }
    passed
}

/// A sandbox created by one check.
struct TestSandbox {
    backend: SharedBackend,
    id: SandboxId,
    in_force: Enforced,
}

impl TestSandbox {
    async fn create_plain(backend: &SharedBackend) -> Self {
        Self::create_from_spec(backend, &SandboxSpec::with_defaults()).await
    }

    async fn create_from_spec(backend: &SharedBackend, spec: &SandboxSpec) -> Self {
        let id = fresh_id();
        let in_force = backend.create(&id, spec).await.expect("a sandbox can be created");
        Self { backend: backend.clone(), id, in_force }
    }

    /// The same sandbox, accessed through another backend.
    fn through_backend(self, backend: &SharedBackend) -> Self {
        Self { backend: backend.clone(), ..self }
    }

    async fn find_listed(&self) -> Option<FoundSandbox> {
        find_sandbox(&self.backend, &self.id).await
    }

    async fn destroy(self) {
        self.backend.destroy(&self.id).await.expect("a sandbox can be destroyed");
        assert_eq!(self.find_listed().await, None, "a destroyed sandbox is still listed");
    }
}

async fn find_sandbox(backend: &SharedBackend, id: &SandboxId) -> Option<FoundSandbox> {
    let all = backend.list_sandboxes().await.expect("sandboxes can be listed");
    all.into_iter().find(|found| found.id == *id)
}

/// Returns an unused id.
fn fresh_id() -> SandboxId {
    let source = RandomState::new();
    let mut entropy = [0; 20];
    for (index, byte) in entropy.iter_mut().enumerate() {
        *byte = source.hash_one(index).to_le_bytes()[0];
    }
    SandboxId::from_entropy(entropy)
}
