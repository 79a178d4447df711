//! Policies that change while a sandbox runs, and sandboxes that become filtered while they run.

use e2e::probe::{http, http_at, tls};
use e2e::run::{TestUser, all_users};
use e2e::sandbox::RemoteSandbox;
use e2e::server::TestServer;
use e2e::test_network::TestNetwork;
use e2e::test_network::hosts::{OTHER, SHELL, WEB};
use serde_json::{Value, json};

use super::Expected::{Reaches, Refused};
use super::{
    change_policy, check_steps, create_filtered, create_open, policy, policy_rule, read_policy, send_policy,
    server_builder, start_server, with_policy,
};

#[test]
fn a_changed_rule_applies_to_the_next_connection() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example"]);
        let state = read_policy(&server, &sandbox.id);
        assert_eq!(
            (&state["mode"], &state["enforcementMode"]),
            (&json!("enforcing"), &json!("dns+nft")),
            "{state}"
        );
        assert_eq!(state["policy"], policy("deny", &["allow web.example"]), "{state}");
        let first = [(tls("web.example"), Reaches(&WEB)), (http("other.example"), Refused)];
        check_steps(&mut sandbox, &first, &format!("before, as {user:?}"));
        let flip = json!([policy_rule("allow other.example"), policy_rule("deny web.example")]);
        change_policy(&server, &sandbox.id, "PATCH", &flip);
        let second = [
            (tls("web.example"), Refused),
            (http_at(WEB.v4, "web.example"), Refused),
            (http("other.example"), Reaches(&OTHER)),
        ];
        check_steps(&mut sandbox, &second, &format!("after, as {user:?}"));
        let state = read_policy(&server, &sandbox.id);
        let rules = state["policy"]["egress"].as_array().expect("there are rules");
        assert!(rules.contains(&policy_rule("allow other.example")), "{state}");
        assert!(!rules.contains(&policy_rule("allow web.example")), "one rule for each target: {state}");
        change_policy(&server, &sandbox.id, "DELETE", &json!(["OTHER.example"]));
        check_steps(&mut sandbox, &[(http("other.example"), Refused)], "without the rule");
        change_policy(&server, &sandbox.id, "POST", &policy("allow", &[]));
        assert_eq!(read_policy(&server, &sandbox.id)["mode"], "allow_all");
        check_steps(&mut sandbox, &[(http("other.example"), Reaches(&OTHER))], "everything");
        change_policy(&server, &sandbox.id, "PUT", &Value::Null);
        assert_eq!(read_policy(&server, &sandbox.id)["mode"], "deny_all");
        check_steps(&mut sandbox, &[(http_at(WEB.v4, "web.example"), Refused)], "nothing");
        sandbox.delete();
    }
}

#[test]
fn invalid_changes_are_refused_whole() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["web.example"]);
    let before = read_policy(&server, &sandbox.id)["policy"].clone();
    let many: Vec<Value> = (0..4097).map(|number| policy_rule(&format!("allow n{number}.example"))).collect();
    let long = "x".repeat(64);
    let bad = [
        ("PATCH", json!([]), 400),
        ("PATCH", json!([policy_rule("allow good.example"), policy_rule("allow a.*.example")]), 400),
        ("PATCH", json!([policy_rule("permit good.example")]), 400),
        ("PATCH", json!([policy_rule("allow good.example:0")]), 400),
        ("PATCH", json!([policy_rule("allow good.example:65536")]), 400),
        ("PATCH", json!([policy_rule(&format!("allow {long}.example"))]), 400),
        ("PATCH", json!([policy_rule("allow a..example")]), 400),
        ("PUT", json!({"defaultAction": "deny", "egress": [policy_rule("allow 10.0.0.0/33")]}), 400),
        ("PUT", json!({"defaultAction": "ask", "egress": []}), 400),
        ("PUT", json!({"defaultAction": "deny", "egress": many}), 413),
        (
            "PUT",
            json!({"defaultAction": "deny", "egress": [{"action": "allow", "target": "x".repeat(1 << 20)}]}),
            413,
        ),
    ];
    for (method, body, status) in bad {
        let (found, text) = send_policy(&server, &sandbox.id, method, &body);
        let shown: String = body.to_string().chars().take(120).collect();
        assert_eq!(found, status, "{method} {shown}: {text}");
        assert_eq!(read_policy(&server, &sandbox.id)["policy"], before, "{method} {shown} changed something");
    }
    // Ranges may overlap.
    let overlapping = policy("deny", &["allow 93.184.216.0/24", "allow 93.184.216.34", "deny 93.184.0.0/16"]);
    change_policy(&server, &sandbox.id, "PUT", &overlapping);
    let most: Vec<Value> = many[..4096].to_vec();
    change_policy(&server, &sandbox.id, "PUT", &json!({"defaultAction": "deny", "egress": most}));
    let unknown = send_policy(&server, "no-such-sandbox", "PATCH", &json!([policy_rule("allow a.example")]));
    assert_eq!(unknown.0, 404, "{unknown:?}");
    for policy in [policy("deny", &["allow a.*.example"]), policy("ask", &[])] {
        let request = json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["sleep", "infinity"],
            "networkPolicy": policy});
        let refused = server.client().post("/v1/sandboxes", &request).expect("the server answers");
        assert_eq!(refused.status, 400, "{policy}: {}", refused.text());
    }
    sandbox.delete();
}

/// Keeps a connection and prints what arrives on it.
fn start_lasting(sandbox: &mut RemoteSandbox, target: &str) -> String {
    let text = format!("exec 3<>/dev/tcp/{target}/22; cat <&3; echo ended");
    let command = sandbox.start_background(&format!("exec bash -c '{text}'"));
    e2e::eventually("it is connected", || sandbox.logs(&command).contains("SSH-2.0"));
    command
}

#[test]
fn open_connections_that_a_change_denies_end() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["shell.example", "web.example", "93.184.216.77"]);
        let by_name = start_lasting(&mut sandbox, "shell.example");
        let other_name = start_lasting(&mut sandbox, "web.example");
        let by_address = start_lasting(&mut sandbox, OTHER.v4);
        change_policy(&server, &sandbox.id, "PATCH", &json!([policy_rule("deny shell.example")]));
        e2e::eventually("it ends", || sandbox.logs(&by_name).contains("ended"));
        change_policy(&server, &sandbox.id, "DELETE", &json!(["93.184.216.77"]));
        e2e::eventually("it ends", || sandbox.logs(&by_address).contains("ended"));
        assert!(!sandbox.logs(&other_name).contains("ended"), "as {user:?}: an allowed connection ended");
        change_policy(&server, &sandbox.id, "PUT", &Value::Null);
        e2e::eventually("it ends", || sandbox.logs(&other_name).contains("ended"));
        sandbox.delete();
    }
}

#[test]
fn a_sandbox_becomes_filtered_while_it_runs_and_never_the_reverse() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut linked = create_open(&server);
    check_steps(&mut linked, &[(http_at(OTHER.v4, "other.example"), Reaches(&OTHER))], "network on");
    let lasting = start_lasting(&mut linked, SHELL.v4);
    assert!(interfaces(&mut linked).contains("eth0"));
    let mut closed = server.create_sandbox_with(&json!({"extensions": {"coracle.network": "off"}}));
    let before = world.count_contacts(OTHER.v4);
    for sandbox in [&mut linked, &mut closed] {
        change_policy(&server, &sandbox.id, "PUT", &policy("deny", &["allow web.example"]));
        let steps = [(tls("web.example"), Reaches(&WEB)), (http_at(OTHER.v4, "other.example"), Refused)];
        check_steps(sandbox, &steps, "filtered");
    }
    assert_eq!(world.count_contacts(OTHER.v4), before);
    assert!(!linked.logs(&lasting).contains("heard"));
    assert_eq!(interfaces(&mut linked).trim(), "lo", "the link is removed");
    let inspected = server.client().inspect_sandbox(&linked.id).to_string();
    assert!(inspected.contains("filtered"), "{inspected}");
    change_policy(&server, &linked.id, "PUT", &policy("allow", &[]));
    assert_eq!(interfaces(&mut linked).trim(), "lo", "everything is allowed, and by policy only");
    check_steps(&mut linked, &[(http("other.example"), Reaches(&OTHER))], "everything");
    linked.delete();
    closed.delete();
}

fn interfaces(sandbox: &mut RemoteSandbox) -> String {
    sandbox.run("ls /sys/class/net 2>/dev/null || cut -d: -f1 /proc/net/dev | tail -n +3").stdout
}

/// A server with one warm sandbox.
fn pooled_server() -> TestServer {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("coracle.toml");
    std::fs::write(&file, "[[pool]]\nname = \"warm\"\nlevel = 1\n").expect("our own directory");
    let server =
        server_builder(TestUser::Same).argument("--config").argument(&file.display().to_string()).start();
    wait_until_warm(&server);
    server
}

fn wait_until_warm(server: &TestServer) {
    let mut client = server.client();
    e2e::eventually("the pool is full", || {
        let pool = client.get("/v1/pools/warm").expect("the server answers").json();
        pool["status"]["available"] == 1
    });
}

#[test]
fn a_warm_sandbox_is_filtered_from_its_claim_on() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = pooled_server();
    for round in 0..3 {
        wait_until_warm(&server);
        let claim = json!({"networkPolicy": policy("deny", &["allow web.example"])});
        let mut sandbox = server.create_sandbox_with(&claim);
        let shown = server.client().get(&format!("/v1/sandboxes/{}", sandbox.id)).expect("it answers").json();
        assert_eq!(shown["allocation"]["poolRef"], "warm", "round {round}: {shown}");
        let steps = [
            (http_at(OTHER.v4, "other.example"), Refused),
            (tls("web.example"), Reaches(&WEB)),
            (http("web.example"), Reaches(&WEB)),
            (http("other.example"), Refused),
        ];
        check_steps(&mut sandbox, &steps, "a warm sandbox");
        sandbox.delete();
    }
    assert_eq!(world.count_contacts(OTHER.v4), 0);
}

#[test]
fn policies_survive_a_restart_of_the_server() {
    if !testkit::needs_root() {
        return;
    }
    for user in all_users() {
        let world = TestNetwork::create();
        let start = || server_builder(user).env("CORACLE_INSTANCE", "filtered-restart");
        let mut server = start().start();
        let mut sandbox = create_filtered(&server, &["web.example"]);
        change_policy(&server, &sandbox.id, "PATCH", &json!([policy_rule("allow shell.example")]));
        let steps = [
            (http_at(OTHER.v4, "other.example"), Refused),
            (tls("web.example"), Reaches(&WEB)),
            (http("shell.example"), Reaches(&SHELL)),
        ];
        check_steps(&mut sandbox, &steps, &format!("before, as {user:?}"));
        for graceful in [true, false] {
            if graceful {
                assert!(server.terminate().success());
            } else {
                server.kill();
            }
            let again = start().listen(server.address());
            server.restart(&again);
            let mut sandbox = RemoteSandbox::existing(server.client(), &sandbox.id);
            check_steps(&mut sandbox, &steps, &format!("as {user:?} after graceful = {graceful}"));
        }
        let mut sandbox = RemoteSandbox::existing(server.client(), &sandbox.id);
        change_policy(&server, &sandbox.id, "PUT", &policy("deny", &["allow other.example"]));
        check_steps(
            &mut sandbox,
            &[(http("other.example"), Reaches(&OTHER)), (tls("web.example"), Refused)],
            "changed",
        );
        sandbox.delete();
        assert_eq!(world.count_contacts(OTHER.v4) + world.count_contacts(OTHER.v6), 1);
    }
}

#[test]
fn both_notations_of_a_filtered_network_agree() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let filtered = json!({"coracle.network": "filtered"});
    let mut request = with_policy(&policy("deny", &["allow web.example"]));
    request["extensions"] = filtered.clone();
    let mut sandbox = server.create_sandbox_with(&request);
    check_steps(&mut sandbox, &[(http("web.example"), Reaches(&WEB))], "both");
    sandbox.delete();
    // Without a policy nothing passes.
    let mut sandbox = server.create_sandbox_with(&json!({"extensions": filtered}));
    assert_eq!(read_policy(&server, &sandbox.id)["mode"], "deny_all");
    check_steps(
        &mut sandbox,
        &[(http_at(WEB.v4, "web.example"), Refused), (http("web.example"), Refused)],
        "alone",
    );
    sandbox.delete();
}
