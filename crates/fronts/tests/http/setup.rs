//! Servers for the tests, and their owners.

use std::sync::Arc;

use domain::{Owner, SandboxSpec};
use fronts::HttpSettings;
use service::{CreateSandboxRequest, ImageSource, Sandbox, ServiceConfig};
use testkit::fake_backend::FakeBackend;
use testkit::test_client::{TestRequest, TestResponse};
use testkit::test_server::TestServer;
use testkit::unjailed_agent::example_program;

pub(crate) const OPERATOR_KEY: &str = "the-operators-own-key";
pub(crate) const KEY_HEADER: &str = "open-sandbox-api-key";
/// A well-formed id that no sandbox has.
pub(crate) const UNKNOWN_ID: &str = "aaaaaaaaaaaaaaaaaaaa";

/// A server without keys.
pub(crate) async fn start() -> TestServer {
    start_with(FakeBackend::new(), |_| {}, |_| {}).await
}

/// A server whose sandboxes have real agents.
pub(crate) async fn start_with_agents() -> TestServer {
    start_with(FakeBackend::with_agents(example_program("bare-agent")), |_| {}, |_| {}).await
}

/// A server that only the holders of keys may use.
pub(crate) async fn start_with_keys(change: impl FnOnce(&mut ServiceConfig)) -> TestServer {
    let server = start_with(FakeBackend::new(), change, |_| {}).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    server
}

/// Like [`start_with_keys`], with changed settings of the listener, agents in its sandboxes, and as many commands as a
/// server allows by default.
pub(crate) async fn start_with_keys_and_agents(change_http: impl FnOnce(&mut HttpSettings)) -> TestServer {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.commands_per_sandbox = 64, change_http).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    server
}

pub(crate) async fn start_with(
    backend: Arc<FakeBackend>,
    change: impl FnOnce(&mut ServiceConfig),
    change_http: impl FnOnce(&mut HttpSettings),
) -> TestServer {
    TestServer::start(backend, change, |service, listener| {
        let mut settings = HttpSettings::new(listener.local_addr().unwrap());
        change_http(&mut settings);
        let connections = settings.connection_settings();
        let router = fronts::build_router(service, settings);
        fronts::serve_network(listener, connections, router, std::future::pending())
    })
    .await
}

/// A new key of an owner, with its id.
pub(crate) async fn issue_key(server: &TestServer, owner: &str) -> (String, String) {
    let (key, secret) = server.service.issue_key(Owner::parse(owner).unwrap(), None).await.unwrap();
    (key.id, secret.expose().to_owned())
}

/// Creates a sandbox of an owner, without any front.
pub(crate) async fn create_without_front(server: &TestServer, owner: &Owner) -> Sandbox {
    let request = CreateSandboxRequest {
        origin: "test",
        source: ImageSource::from_name("host"),
        spec: SandboxSpec::with_defaults(),
        labels: Default::default(),
        notes: Vec::new(),
        timeout: None,
        idle_timeout: None,
        defaulted: Vec::new(),
        merge_notes: |own, _| own.to_vec(),
    };
    server.service.create_sandbox(owner, request).await.unwrap()
}

/// Asserts that a response is an error in the format of both fronts, with this code.
#[track_caller]
pub(crate) fn expect_error(response: &TestResponse, status: u16, code: &str) {
    let body = response.expect(status);
    assert_eq!(body["code"], code, "{body}");
    assert!(body["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    assert_eq!(body.as_object().map(|fields| fields.len()), Some(2), "{body}");
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert!(response.header("x-request-id").is_some(), "{:?}", response.headers);
}

/// A request of the holder of a key.
pub(crate) fn with_key(server: &TestServer, key: &str, method: &str, path: &str) -> TestRequest {
    server.request(method, path).header(KEY_HEADER, key)
}
