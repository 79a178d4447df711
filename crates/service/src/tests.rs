//! Tests of the whole service, over a fake backend.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod acceptance;
mod acquire;
mod contexts;
mod events;
mod expiry;
mod inheritance;
mod liar;
mod lifecycle;
mod owners;
mod pools;
mod pretend;
mod restart;
mod revival;
mod snapshots;
mod volumes;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use domain::{Labels, Owner, Phase, Resources, Spec};
use tempfile::TempDir;

use crate::clock::Clock;
use crate::registry::Handle;
use crate::{Config, Create, Filter, Page, Quotas, Sandbox, Service};
use pretend::Pretend;

/// A service with its own state directory and its fake backend.
struct Bench {
    service: Service,
    backend: Arc<Pretend>,
    state: TempDir,
    owner: Owner,
}

impl Bench {
    async fn new() -> Self {
        Self::with(Pretend::new(), tempfile::tempdir().unwrap(), Clock::host()).await
    }

    async fn with(backend: Arc<Pretend>, state: TempDir, clock: Clock) -> Self {
        let service = Service::start_at(config(&state), backend.clone(), clock).await.unwrap();
        Self { service, backend, state, owner: Owner::single() }
    }

    /// Ends the server as a crash would, as far as one process can: clients and the backend are not notified.
    async fn crash(self) -> (Arc<Pretend>, TempDir) {
        self.service.stop().await;
        (self.backend, self.state)
    }

    async fn create(&self) -> Sandbox {
        self.service.create(&self.owner, plain()).await.unwrap()
    }

    fn all(&self) -> Page {
        let every = |_: &Phase| true;
        let filter = Filter { labels: Labels::new(), phase: &every, offset: 0, limit: 1000 };
        self.service.list(&self.owner, &filter)
    }

    fn handle(&self, sandbox: &Sandbox) -> Arc<Handle> {
        self.service.0.registry.find(&sandbox.id).unwrap()
    }

    /// Waits until the sandbox is removed.
    async fn gone(&self, sandbox: &Sandbox) {
        let Some(handle) = self.service.0.registry.find(&sandbox.id) else { return };
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

fn config(state: &TempDir) -> Config {
    Config {
        state_dir: state.path().to_owned(),
        sandboxes: 20,
        soft_sandboxes: None,
        park_after: Duration::from_secs(600),
        commands_per_sandbox: 3,
        snapshots_per_owner: 3,
        volumes_per_owner: 3,
        quotas: Quotas::default(),
        usual: Resources::default(),
        require_limits: true,
        pools: Vec::new(),
        volume_size: domain::Bytes::mib(64),
        longest_timeout: Some(Duration::from_secs(86_400)),
        output: Default::default(),
        metric_owners: None,
    }
}

/// A quota of the operator, who is not limited by that of the others.
fn operators_quota(quota: crate::Quota) -> Quotas {
    Quotas { named: std::collections::BTreeMap::from([(Owner::single(), quota)]), ..Quotas::default() }
}

fn plain() -> Create {
    Create {
        origin: "test",
        spec: Spec::plain(),
        labels: Labels::new(),
        notes: Vec::new(),
        timeout: None,
        idle_timeout: None,
        pool: None,
        defaulted: Vec::new(),
        merge_notes: |own, _| own.to_vec(),
    }
}

fn with_entrypoint() -> Create {
    let spec = Spec { entrypoint: vec!["serve".to_owned()], ..Spec::plain() };
    Create { spec, ..plain() }
}
