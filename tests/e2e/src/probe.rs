//! Network steps inside a sandbox, by one Python program; `probe.py` has the steps and what each returns.
//!
//! The program is the same for every way in which a sandbox is made, so a test can compare root with an ordinary user and
//! network `on` with `filtered`.

use serde_json::{Value, json};

use crate::run::{CommandOutput, RunCommand};
use crate::sandbox::RemoteSandbox;
use crate::test_network;

const PROGRAM: &str = include_str!("probe.py");

/// The arguments that run these steps.
pub fn probe_argv(steps: &[Value]) -> [String; 5] {
    let steps = Value::from(steps.to_vec()).to_string();
    let certificates = test_network::authority_certificate().to_owned();
    ["/usr/bin/python3".to_owned(), "-c".to_owned(), PROGRAM.to_owned(), steps, certificates]
}

/// Runs the steps in a sandbox of a server and returns a result for each.
pub fn probe(sandbox: &mut RemoteSandbox, steps: &[Value]) -> Vec<Value> {
    let argv = probe_argv(steps);
    let ran = sandbox.run_argv(&argv.each_ref().map(String::as_str));
    parse_results(&ran.stdout, steps, &ran)
}

/// Runs the steps by `coracle run`.
pub fn probe_by_run(run: &RunCommand, steps: &[Value]) -> (Vec<Value>, CommandOutput) {
    let argv = probe_argv(steps);
    let ran = run.run_argv(&argv.each_ref().map(String::as_str));
    (parse_results(&ran.stdout, steps, &ran), ran)
}

/// The results that a program printed, one for each step.
pub fn parse_results(stdout: &str, steps: &[Value], shown: &impl std::fmt::Debug) -> Vec<Value> {
    let results: Vec<Value> = stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(results.len(), steps.len(), "not every step has a result: {shown:?}");
    results
}

/// An HTTP request to a name or address.
pub fn http(to: &str) -> Value {
    json!({"do": "http", "to": to})
}

/// An HTTP request to an address for another host.
pub fn http_at(address: &str, host: &str) -> Value {
    json!({"do": "http", "to": address, "host": host})
}

/// An HTTPS request to a name, which is checked.
pub fn tls(name: &str) -> Value {
    json!({"do": "tls", "to": name, "sni": name})
}

/// An HTTPS request to an address, with a name that is checked.
pub fn tls_at(address: &str, name: &str) -> Value {
    json!({"do": "tls", "to": address, "sni": name})
}

/// A connection that only listens to what comes first; to a name, over IPv4.
pub fn banner(to: &str, port: u16) -> Value {
    let family = if to.contains(':') { 6 } else { 4 };
    json!({"do": "raw", "to": to, "port": port, "wait": 0.7, "family": family})
}

pub fn resolve(name: &str) -> Value {
    json!({"do": "resolve", "name": name})
}

pub fn dns(name: &str, kind: &str) -> Value {
    json!({"do": "dns", "name": name, "type": kind})
}

/// The host of the world that answered a request, if one did.
pub fn host_reached(result: &Value) -> Option<&str> {
    if result["status"] == 200 { result["body"]["at"].as_str() } else { None }
}

/// Adds or replaces members of a step.
pub fn with(mut step: Value, members: Value) -> Value {
    for (name, value) in members.as_object().into_iter().flatten() {
        step[name] = value.clone();
    }
    step
}
