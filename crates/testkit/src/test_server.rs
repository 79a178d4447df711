//! A server in this process: the real service and, as its caller builds it, the real HTTP surface, over
//! the fake backend.
//!
//! It does not depend on `fronts`, so that a copy of `fronts` can be tested with it too.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use service::{OwnerQuotas, Service, ServiceConfig};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::fake_backend::FakeBackend;
use crate::test_client::{TestRequest, TestResponse};

/// A running server. It ends when this is dropped, and its sandboxes with it.
pub struct TestServer {
    pub address: SocketAddr,
    pub service: Service,
    pub backend: Arc<FakeBackend>,
    serving: JoinHandle<()>,
    _state: TempDir,
}

impl TestServer {
    /// Starts a service and `serve`, which answers the connections of a listener until it is aborted.
    pub async fn start<F: Future<Output = ()> + Send + 'static>(
        backend: Arc<FakeBackend>,
        change: impl FnOnce(&mut ServiceConfig),
        serve: impl FnOnce(Service, TcpListener) -> F,
    ) -> Self {
        let state = tempfile::tempdir().unwrap();
        let mut config = plain_config(state.path());
        change(&mut config);
        let service = Service::start(config, backend.clone()).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(service.clone(), listener));
        Self { address, service, backend, serving, _state: state }
    }

    /// A request to this server, not sent yet.
    pub fn request(&self, method: &str, path: &str) -> TestRequest {
        TestRequest::new(self.address, method, path)
    }

    pub async fn get(&self, path: &str) -> TestResponse {
        self.request("GET", path).send().await
    }

    pub async fn delete(&self, path: &str) -> TestResponse {
        self.request("DELETE", path).send().await
    }

    /// Posts a JSON body.
    pub async fn post(&self, path: &str, body: serde_json::Value) -> TestResponse {
        self.request("POST", path).json(&body).send().await
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.serving.abort();
        self.backend.kill_agents();
    }
}

/// Small limits, so that a test can reach them.
fn plain_config(state_dir: &Path) -> ServiceConfig {
    ServiceConfig {
        state_dir: state_dir.to_owned(),
        sandboxes: 20,
        soft_sandboxes: None,
        park_after: Duration::from_secs(600),
        commands_per_sandbox: 3,
        snapshots_per_owner: 3,
        volumes_per_owner: 3,
        quotas: OwnerQuotas::default(),
        default_limits: domain::SandboxLimits::ZERO,
        require_limits: true,
        aliases: Default::default(),
        pools: Vec::new(),
        volume_size: domain::Bytes::from_mib(64),
        max_timeout: Some(Duration::from_secs(86_400)),
        output: Default::default(),
        metric_owners: None,
        open_files_percent: 80,
        most_network: domain::NetworkAccess::On,
        default_policy: None,
    }
}
