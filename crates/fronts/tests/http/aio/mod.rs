//! The API of AIO Sandbox, and the provisioner that creates its sandboxes.

mod access;
mod bash;
mod bash_socket;
mod code;
mod deerflow_client;
mod documents;
mod files;
mod hanging_agent;
mod hooks;
mod json_socket;
mod mcp;
mod observe;
mod ports;
mod provisioner;
mod provisioner_limits;
mod sandbox_info;
mod shell;
mod shell_limits;
mod shell_terminal;
mod skills;

use serde_json::{Value, json};
use testkit::test_client::{TestRequest, TestResponse};
use testkit::test_server::TestServer;

use crate::setup::OPERATOR_KEY;

/// A sandbox that the provisioner made, with the path of its API.
struct AioSandbox<'a> {
    server: &'a TestServer,
    path: String,
}

/// A request to the provisioner by the operator.
fn provision(server: &TestServer, method: &str, path: &str) -> TestRequest {
    server.request(method, path).header("x-api-key", OPERATOR_KEY)
}

impl<'a> AioSandbox<'a> {
    /// Creates a sandbox under an id, or finds it.
    async fn create(server: &'a TestServer, id: &str) -> Self {
        let created =
            provision(server, "POST", "/api/sandboxes").json(&json!({"sandbox_id": id})).send().await;
        Self { server, path: path_of_url(created.expect(200)["sandbox_url"].as_str().unwrap()) }
    }

    async fn get(&self, path: &str) -> TestResponse {
        self.server.get(&format!("{}{path}", self.path)).await
    }

    async fn post(&self, path: &str, body: Value) -> TestResponse {
        self.server.post(&format!("{}{path}", self.path), body).await
    }

    /// A request with this method.
    fn request(&self, method: &str, path: &str) -> TestRequest {
        self.server.request(method, &format!("{}{path}", self.path))
    }
}

/// The path of an address; where hosts name sandboxes, their paths work as well.
fn path_of_url(url: &str) -> String {
    let (_, rest) = url.split_once("://").unwrap();
    if let Some(at) = rest.find('/') {
        return rest[at..].to_owned();
    }
    let label = rest.split('.').next().unwrap().strip_prefix("aio-").unwrap();
    format!("/aio/{}", label.replace('-', "."))
}
