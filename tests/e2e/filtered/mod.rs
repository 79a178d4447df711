//! Network `filtered`: the names and addresses of a policy and nothing else. Every test makes its own host and internet.
//!
//! `rules` has each kind of rule, `names` what the resolver answers, `connections` what passes and how a refusal looks,
//! `changes` policies that change while a sandbox runs, `log` what is recorded, `one_command` is `coracle run`, and
//! `without_link` is network `on` where nothing is forwarded. The attacks are in `escape/filtered*.rs`.

mod changes;
mod connections;
mod log;
mod names;
mod one_command;
mod rules;
mod without_link;
mod world;

use e2e::probe::{host_reached, probe};
use e2e::run::TestUser;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use e2e::test_network::GATEWAY;
use e2e::test_network::hosts::WorldHost;
use serde_json::{Value, json};

/// A server whose sandboxes have no network unless they ask for one.
pub(crate) fn server_builder(user: TestUser) -> ServerBuilder {
    let start = ServerBuilder::new().as_user(user).env("CORACLE_NETWORK_RESOLVERS", GATEWAY);
    if user == TestUser::Same { start } else { start.env("CORACLE_REQUIRE_LIMITS", "false") }
}

pub(crate) fn start_server(user: TestUser) -> TestServer {
    server_builder(user).start()
}

/// A policy with these rules, such as `allow web.example`.
pub(crate) fn policy(default: &str, rules: &[&str]) -> Value {
    json!({"defaultAction": default, "egress": rules.iter().map(|rule| policy_rule(rule)).collect::<Vec<_>>()})
}

pub(crate) fn policy_rule(rule: &str) -> Value {
    let (action, target) = rule.split_once(' ').expect("a rule has two words");
    json!({"action": action, "target": target})
}

/// A request for a sandbox with this policy. An ordinary user's server enforces no limits.
pub(crate) fn with_policy(policy: &Value) -> Value {
    json!({"networkPolicy": policy, "resourceLimits": {}})
}

/// A sandbox that may reach these targets and nothing else.
pub(crate) fn create_filtered(server: &TestServer, allowed: &[&str]) -> RemoteSandbox {
    let rules: Vec<String> = allowed.iter().map(|target| format!("allow {target}")).collect();
    let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    server.create_sandbox_with(&with_policy(&policy("deny", &rules)))
}

/// A sandbox with network `on`, in which attacks work.
pub(crate) fn create_open(server: &TestServer) -> RemoteSandbox {
    server.create_sandbox_with(&json!({"extensions": {"coracle.network": "on"}, "resourceLimits": {}}))
}

fn policy_path(id: &str) -> String {
    format!("/v1/sandboxes/{id}/proxy/18080/policy")
}

/// What the server says of the policy of a sandbox.
pub(crate) fn read_policy(server: &TestServer, id: &str) -> Value {
    let answer = server.client().get(&policy_path(id)).expect("the server answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// Changes a policy and returns the status and the text of the answer.
pub(crate) fn send_policy(server: &TestServer, id: &str, method: &str, body: &Value) -> (u16, String) {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let answer = server
        .client()
        .request(method, &policy_path(id), "application/json", text.as_bytes())
        .expect("the server answers");
    (answer.status, answer.text())
}

/// Changes a policy, which must succeed.
pub(crate) fn change_policy(server: &TestServer, id: &str, method: &str, body: &Value) {
    let (status, text) = send_policy(server, id, method, body);
    assert_eq!(status, 200, "{method} {body}: {text}");
}

/// The expected result of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected {
    /// The request reaches this host.
    Reaches(&'static WorldHost),
    /// The connection is refused at once, or the name does not exist.
    Refused,
}

/// Errors of a connection or query that was refused at once.
const REFUSALS: [&str; 10] = [
    "ECONNRESET",
    "ECONNREFUSED",
    "ECONNABORTED",
    "EPIPE",
    "EHOSTUNREACH",
    "ENETUNREACH",
    "EACCES",
    "EAI_NONAME",
    "EAI_NODATA",
    "closed",
];

/// Whether the result of a step says that it was refused at once.
pub(crate) fn is_refused(result: &Value) -> bool {
    let error = result["error"].as_str().unwrap_or_default();
    let tls_ended = ["TLS: UNEXPECTED_EOF_WHILE_READING", "TLS: EOF occurred in violation of protocol"];
    result["status"] == 403 || REFUSALS.contains(&error) || tls_ended.contains(&error)
}

/// Checks one result.
pub(crate) fn assert_result(expected: Expected, result: &Value, shown: &str) {
    match expected {
        Expected::Reaches(host) => {
            assert_eq!(host_reached(result), Some(host.name()), "{shown}: {result}");
        }
        Expected::Refused => assert!(is_refused(result), "{shown} was not refused at once: {result}"),
    }
}

/// Runs steps in a sandbox and checks the result of each.
pub(crate) fn check_steps(sandbox: &mut RemoteSandbox, expected: &[(Value, Expected)], shown: &str) {
    let steps: Vec<Value> = expected.iter().map(|(step, _)| step.clone()).collect();
    let results = probe(sandbox, &steps);
    for ((step, expected), result) in expected.iter().zip(&results) {
        assert_result(*expected, result, &format!("{shown}: {step}"));
    }
}
