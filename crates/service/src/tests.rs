//! Tests of the whole service, over a fake backend.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod acceptance;
mod acquire;
mod contexts;
mod events;
mod expiry;
mod file_edits;
mod file_table;
mod inheritance;
mod key_removal;
mod lifecycle;
mod malicious_agent;
mod malicious_search;
mod malicious_sessions;
mod network;
mod older_agent;
mod owners;
mod planning;
mod pools;
mod restart;
mod revival;
mod snapshots;
mod terminals;
mod vaults;
mod volumes;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use domain::{Entrypoint, Labels, Owner, Phase, SandboxId, SandboxSpec};
use tempfile::TempDir;

use crate::clock::Clock;
use crate::sandboxes::registry::SandboxHandle;
use crate::{
    CreateSandboxRequest, ImageAliases, ImageSource, OwnerQuotas, Sandbox, SandboxFilter, SandboxPage,
    SandboxRef, Service, ServiceConfig,
};
use testkit::fake_backend::FakeBackend;

/// A service with its own state directory and its fake backend.
struct TestBench {
    service: Service,
    backend: Arc<FakeBackend>,
    state: TempDir,
    owner: Owner,
}

impl TestBench {
    async fn new() -> Self {
        Self::with(FakeBackend::new(), tempfile::tempdir().unwrap(), Clock::from_host()).await
    }

    async fn with(backend: Arc<FakeBackend>, state: TempDir, clock: Clock) -> Self {
        let service = Service::start_with_clock(config(&state), backend.clone(), clock).await.unwrap();
        Self { service, backend, state, owner: Owner::operator() }
    }

    /// Ends the server as a crash would, as far as one process can: clients and the backend are not notified.
    async fn crash(self) -> (Arc<FakeBackend>, TempDir) {
        self.service.stop().await;
        (self.backend, self.state)
    }

    async fn create(&self) -> Sandbox {
        self.service.create_sandbox(&self.owner, plain()).await.unwrap()
    }

    fn sandbox(&self, id: &SandboxId) -> SandboxRef {
        self.service.sandbox(&self.owner, id).unwrap()
    }

    fn all(&self) -> SandboxPage {
        let every = |_: &Phase| true;
        let filter = SandboxFilter { labels: Labels::new(), phase: &every, offset: 0, limit: 1000 };
        self.service.list_sandboxes(&self.owner, &filter)
    }

    fn handle(&self, sandbox: &Sandbox) -> Arc<SandboxHandle> {
        self.service.0.lifecycle.registry.find(&sandbox.id).unwrap()
    }

    /// Waits until the sandbox is removed.
    async fn wait_until_gone(&self, sandbox: &Sandbox) {
        let Some(handle) = self.service.0.lifecycle.registry.find(&sandbox.id) else { return };
        let mut state = handle.state.clone();
        state.wait_for(|sandbox| sandbox.phase == Phase::Stopped).await.unwrap();
    }

    /// Waits until there are `count` sandboxes.
    async fn until_count(&self, count: usize) {
        while self.all().total != count {
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the sandbox is in a phase that passes.
    async fn until(&self, sandbox: &Sandbox, passes: impl Fn(Phase) -> bool) -> Sandbox {
        let mut state = self.handle(sandbox).state.clone();
        let reached = state.wait_for(|sandbox| passes(sandbox.phase));
        tokio::time::timeout(Duration::from_secs(3600), reached).await.unwrap().unwrap().clone()
    }
}

fn config(state: &TempDir) -> ServiceConfig {
    ServiceConfig {
        state_dir: state.path().to_owned(),
        sandboxes: 20,
        soft_sandboxes: None,
        park_after: Duration::from_secs(600),
        commands_per_sandbox: 3,
        snapshots_per_owner: 3,
        volumes_per_owner: 3,
        quotas: OwnerQuotas::default(),
        default_limits: domain::SandboxLimits::ZERO,
        require_limits: true,
        aliases: ImageAliases {
            table: vec![("alias of other".to_owned(), "other".to_owned())],
            ..ImageAliases::default()
        },
        pools: Vec::new(),
        volume_size: domain::Bytes::from_mib(64),
        max_timeout: Some(Duration::from_secs(86_400)),
        output: Default::default(),
        most_network: domain::NetworkAccess::On,
        default_policy: None,
        metric_owners: None,
        open_files_percent: 80,
    }
}

/// A quota of the operator, who is not limited by that of the others.
fn operators_quota(quota: crate::OwnerQuota) -> OwnerQuotas {
    OwnerQuotas {
        named: std::collections::BTreeMap::from([(Owner::operator(), quota)]),
        ..OwnerQuotas::default()
    }
}

fn plain() -> CreateSandboxRequest {
    CreateSandboxRequest {
        origin: "test",
        source: ImageSource::from_name("host"),
        spec: SandboxSpec::with_defaults(),
        labels: Labels::new(),
        notes: Vec::new(),
        timeout: None,
        idle_timeout: None,
        defaulted: Vec::new(),
        merge_notes: |own, _| own.to_vec(),
    }
}

fn with_entrypoint() -> CreateSandboxRequest {
    let spec = SandboxSpec {
        entrypoint: Entrypoint::Argv(vec!["serve".to_owned()]),
        ..SandboxSpec::with_defaults()
    };
    CreateSandboxRequest { spec, ..plain() }
}
