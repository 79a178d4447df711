//! The OpenSandbox API.

mod create;
mod diagnostics;
mod errors;
mod exec;
mod fairness;
mod files;
mod lifecycle;
mod owners;
mod pages;
mod policy;
mod vault;

use serde_json::{Value, json};
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;

/// The body of a create with nothing special.
fn create_body() -> Value {
    json!({
        "image": {"uri": "host"}, "timeout": 600, "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
    })
}

async fn create(server: &TestServer) -> String {
    id_of(&server.post("/v1/sandboxes", create_body()).await)
}

/// The id in the response to a create.
#[track_caller]
fn id_of(created: &TestResponse) -> String {
    created.expect(202)["id"].as_str().unwrap().to_owned()
}

/// The path of a sandbox.
fn path_of(id: &str) -> String {
    format!("/v1/sandboxes/{id}")
}

/// A path of the execution API of a sandbox.
fn inside(id: &str, path: &str) -> String {
    format!("/v1/sandboxes/{id}/proxy/44772/{path}")
}
