//! Network `on` where the host forwards nothing, and for ordinary users: by the egress process, with every name allowed.

use e2e::probe::{banner, host_reached, http, http_at, probe, probe_by_run, resolve, tls, with};
use e2e::run::{RunCommand, TestUser, all_users};
use e2e::server::TestServer;
use e2e::test_network::hosts::{EDGE, OTHER, RESOLVER, SHELL, WEB};
use e2e::test_network::{
    self, HOST_ADDRESS, HOST_PORT, OTHER_ADDRESSES, PACKAGE_GREETING, PACKAGE_NAME, TestNetwork,
    authority_certificate,
};
use serde_json::{Value, json};

use super::{is_refused, server_builder};

fn default_server(user: TestUser, network: &str) -> TestServer {
    server_builder(user).env("CORACLE_NETWORK_DEFAULT", network).start()
}

/// What works without a link: TCP and names, whatever the first bytes are.
fn passing_steps() -> Vec<(Value, &'static str)> {
    vec![
        (http("web.example"), "web.example"),
        (tls("alias.example"), EDGE.name()),
        (http_at(OTHER.v4, "anything"), "other.example"),
        (http_at(OTHER.v6, "anything"), "other.example"),
        (with(tls("web.example"), json!({"to": OTHER.v4, "verify": false})), "other.example"),
    ]
}

fn refused_steps() -> Vec<Value> {
    let near = OTHER_ADDRESSES.map(|address| banner(address, 80));
    let more = [
        banner(HOST_ADDRESS, HOST_PORT),
        http("meta.example"),
        http("local.example"),
        json!({"do": "udp", "to": WEB.v4, "port": 443}),
    ];
    near.into_iter().chain(more).collect()
}

fn check_results(steps: &[(Value, &str)], refused: &[Value], results: &[Value], shown: &str) {
    let (passing, others) = results.split_at(steps.len());
    for ((step, host), result) in steps.iter().zip(passing) {
        assert_eq!(host_reached(result), Some(*host), "{shown}: {step}: {result}");
    }
    for (step, result) in refused.iter().zip(others) {
        let silent = result["length"] == 0 && result["end"] != "open";
        assert!(is_refused(result) || silent, "{shown}: {step}: {result}");
    }
}

#[test]
fn a_host_that_does_not_forward_has_a_network_without_links() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    test_network::set_forwarding(false);
    for user in all_users() {
        let server = default_server(user, "auto");
        let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
        let (steps, refused) = (passing_steps(), refused_steps());
        let all: Vec<Value> = steps.iter().map(|(step, _)| step.clone()).chain(refused.clone()).collect();
        check_results(&steps, &refused, &probe(&mut sandbox, &all), &format!("as {user:?}"));
        let first = probe(&mut sandbox, &[banner(SHELL.v4, 22), resolve("web.example")]);
        assert_eq!(first[0]["got"], format!("SSH-2.0-test at {}\r\n", SHELL.v4), "as {user:?}: {first:?}");
        assert_eq!(first[1]["addresses"], json!([WEB.v6, WEB.v4]), "as {user:?}: {first:?}");
        let inspected = server.client().inspect_sandbox(&sandbox.id).to_string();
        assert!(inspected.contains("\"network\":\"on, by egress"), "as {user:?}: {inspected}");
        sandbox.delete();
        assert!(test_network::sandbox_links().is_empty(), "no link was made");
    }
    let near = OTHER_ADDRESSES.into_iter().chain([HOST_ADDRESS]);
    assert_eq!(near.map(|address| world.count_contacts(address)).sum::<usize>(), 0);
    assert_eq!(world.count_contacts(RESOLVER.v4), 0);
}

#[test]
fn a_command_of_its_own_has_a_network_without_a_link() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::use_world_resolver();
    test_network::set_forwarding(false);
    for user in all_users() {
        for network in ["on", "auto"] {
            let run = RunCommand::new(user).flag("--network", network);
            let (steps, refused) = (passing_steps(), refused_steps());
            let all: Vec<Value> = steps.iter().map(|(step, _)| step.clone()).chain(refused.clone()).collect();
            let (results, _) = probe_by_run(&run, &all);
            check_results(&steps, &refused, &results, &format!("{network}, as {user:?}"));
        }
    }
}

#[test]
fn pip_installs_a_package_with_forwarding_off() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::set_forwarding(false);
    let installed = std::process::Command::new("/usr/bin/python3").args(["-m", "pip", "--version"]).output();
    let pip = installed.is_ok_and(|output| output.status.success());
    if !pip {
        testkit::skip_test("there is no pip in the host's Python");
        return;
    }
    for user in all_users() {
        let server = default_server(user, "auto");
        for filtered in [false, true] {
            let policy = super::policy("deny", &["allow packages.example:443"]);
            let request = if filtered { super::with_policy(&policy) } else { json!({"resourceLimits": {}}) };
            let mut sandbox = server.create_sandbox_with(&request);
            sandbox.upload("/tmp/authority.pem", authority_certificate().as_bytes());
            let ran = sandbox.run(&format!(
                "PIP_INDEX_URL=https://packages.example/simple /usr/bin/python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
                 --cert /tmp/authority.pem --target /tmp/installed \
                 {PACKAGE_NAME} && PYTHONPATH=/tmp/installed /usr/bin/python3 -c 'import coracle_test_package'"
            ));
            assert!(ran.stdout.contains(PACKAGE_GREETING), "as {user:?}, filtered: {filtered}: {ran:?}");
            sandbox.delete();
        }
    }
}

#[test]
fn links_are_used_again_when_the_host_forwards() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::set_forwarding(false);
    let server = default_server(TestUser::Same, "on");
    let mut sandbox = server.create_sandbox();
    assert_eq!(host_reached(&probe(&mut sandbox, &[http("web.example")])[0]), Some("web.example"));
    assert!(test_network::sandbox_links().is_empty());
    test_network::set_forwarding(true);
    let mut linked = server.create_sandbox();
    assert_eq!(host_reached(&probe(&mut linked, &[http("web.example")])[0]), Some("web.example"));
    assert!(linked.run("cat /proc/net/dev").stdout.contains("eth0"), "it has a link");
    let datagram = json!({"do": "udp", "to": WEB.v4, "port": 7, "text": "datagram"});
    assert_eq!(probe(&mut linked, std::slice::from_ref(&datagram))[0]["got"], "datagram");
    assert_eq!(host_reached(&probe(&mut sandbox, &[http("web.example")])[0]), Some("web.example"));
    assert!(is_refused(&probe(&mut sandbox, &[datagram])[0]));
    sandbox.delete();
    linked.delete();
}
