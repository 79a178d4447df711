//! Checks that every backend must pass, run against a real one.
//!
//! A backend's tests implement [`BackendUnderTest`] and call [`check_all`]. The checks use only the trait
//! and the agent behind it, so they apply to namespaces, containers and clusters alike. A feature
//! that a backend does not list in its [`BackendCapabilities`](crate::BackendCapabilities) must be rejected,
//! which is checked where a request for it exists. A check that needs a missing trait or feature is skipped and
//! reported with the reason.

mod agent;
mod checks;
mod edits;
mod filters;
mod restarts;
mod snapshots;

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use domain::{Bytes, MilliCpus, SandboxId, SandboxLimits, SandboxSpec};

use crate::{
    Enforced, FoundSandbox, Images, LimitPlan, Reconfigure, ResolvedSpec, SharedBackend, Snapshots, Volumes,
};

/// A backend under test. It must reject unknown images.
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

type RunCheck =
    for<'a> fn(&'a dyn BackendUnderTest) -> Pin<Box<dyn Future<Output = CheckOutcome> + Send + 'a>>;

/// One check, and the trait that a backend must offer for it.
struct Check {
    name: &'static str,
    feature: Feature,
    run: RunCheck,
}

/// The traits of a backend. Every backend has sandboxes; the others are optional.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feature {
    Sandboxes,
    Images,
    Volumes,
    Snapshots,
    Reconfigure,
}

/// How a check ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckOutcome {
    Passed,
    /// It does not apply to this backend, for this reason.
    Skipped(&'static str),
}

/// A check that returns nothing applies to every backend.
impl From<()> for CheckOutcome {
    fn from((): ()) -> Self {
        Self::Passed
    }
}

/// The names of the checks that passed, and those that were skipped.
#[derive(Debug, Default)]
pub struct ConformanceReport {
    pub passed: Vec<&'static str>,
    pub skipped: Vec<SkippedCheck>,
}

/// A check of something that the backend does not offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedCheck {
    pub name: &'static str,
    pub reason: &'static str,
}

/// Runs every check, one after the other. Panics at the first failure.
pub async fn check_all(subject: &dyn BackendUnderTest) -> ConformanceReport {
    let mut report = ConformanceReport::default();
    let backend = subject.open().await;
    for Check { name, feature, run } in checks::ALL {
        let outcome = if feature.is_offered(&backend) {
            let outcome = tokio::time::timeout(CHECK_TIMEOUT, run(subject)).await;
            outcome.unwrap_or_else(|_| panic!("conformance: `{name}` timed out"))
        } else {
            CheckOutcome::Skipped("the backend does not offer the trait of this check")
        };
        match outcome {
            CheckOutcome::Passed => report.passed.push(name),
            CheckOutcome::Skipped(reason) => report.skipped.push(SkippedCheck { name, reason }),
        }
    }
    report
}

impl Feature {
    fn is_offered(self, backend: &SharedBackend) -> bool {
        match self {
            Self::Sandboxes => true,
            Self::Images => backend.images().is_some(),
            Self::Volumes => backend.volumes().is_some(),
            Self::Snapshots => backend.snapshots().is_some(),
            Self::Reconfigure => backend.reconfigure().is_some(),
        }
    }
}

fn images(backend: &SharedBackend) -> &dyn Images {
    backend.images().expect("checks of images run only on backends with images")
}

fn volumes(backend: &SharedBackend) -> &dyn Volumes {
    backend.volumes().expect("checks of volumes run only on backends with volumes")
}

fn snapshots(backend: &SharedBackend) -> &dyn Snapshots {
    backend.snapshots().expect("checks of snapshots run only on backends with snapshots")
}

fn reconfigure(backend: &SharedBackend) -> &dyn Reconfigure {
    backend.reconfigure().expect("checks of changes run only on backends that make them")
}

/// The limits of a sandbox whose spec names none.
const DEFAULT_LIMITS: SandboxLimits = SandboxLimits {
    memory: Bytes::from_mib(256),
    cpus: MilliCpus(1000),
    pids: 128,
    disk: Bytes::from_mib(64),
};

/// The plan that a service makes of a spec, where default limits need not be enforced.
fn plan_of(spec: &SandboxSpec) -> ResolvedSpec {
    let limits = LimitPlan::new(&spec.resources, DEFAULT_LIMITS, false);
    ResolvedSpec { spec: spec.clone(), limits, max_processes: 16 }
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
        let in_force = backend.create(&id, &plan_of(spec)).await.expect("a sandbox can be created");
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
