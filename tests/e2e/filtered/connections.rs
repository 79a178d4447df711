//! What passes through a filter, and how a refusal looks.

use e2e::probe::{banner, host_reached, http, http_at, probe, resolve, tls, tls_at, with};
use e2e::run::{TestUser, all_users};
use e2e::test_network::hosts::{OTHER, PROXY, SHELL, WEB};
use e2e::test_network::{HOST_ADDRESS, HOST_ADDRESS_V6, HOST_PORT, OTHER_ADDRESSES, TestNetwork};
use serde_json::{Value, json};

use super::{create_filtered, is_refused, policy, start_server, with_policy};

#[test]
fn a_protocol_in_which_the_server_speaks_first_works_for_names_that_were_resolved() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["shell.example:22"]);
        let lines = with(banner(SHELL.v4, 22), json!({"send": ["one\n", "two\n"]}));
        let results = probe(
            &mut sandbox,
            &[banner(SHELL.v4, 22), banner("shell.example", 22), lines.clone(), banner(WEB.v4, 22)],
        );
        assert_eq!(
            results[0]["length"].as_u64().unwrap_or(0),
            0,
            "as {user:?}: not yet resolved: {results:?}"
        );
        assert_eq!(
            results[1]["got"],
            format!("SSH-2.0-test at {}\r\n", SHELL.v4),
            "as {user:?}: {results:?}"
        );
        let said = results[2]["got"].as_str().unwrap_or_default();
        assert!(said.ends_with("heard one\nheard two\n"), "as {user:?}: {results:?}");
        assert_eq!(results[3]["length"].as_u64().unwrap_or(0), 0, "as {user:?}: {results:?}");
        sandbox.delete();
    }
}

#[test]
fn tls_on_another_port_is_checked_by_its_name_too() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["web.example"]);
    let port = json!({"port": 8443});
    let results = probe(
        &mut sandbox,
        &[
            with(tls("web.example"), port.clone()),
            with(tls_at(WEB.v4, "shared.example"), port.clone()),
            with(tls_at(OTHER.v4, "web.example"), with(port, json!({"verify": false}))),
        ],
    );
    assert_eq!(host_reached(&results[0]), Some("web.example"), "{results:?}");
    assert!(is_refused(&results[1]), "another name of the same address: {results:?}");
    assert_ne!(host_reached(&results[2]), Some("other.example"), "{results:?}");
    assert_eq!(world.count_contacts(OTHER.v4), 0);
    sandbox.delete();
}

#[test]
fn a_refused_request_gets_a_page_that_names_the_rule() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = server
        .create_sandbox_with(&with_policy(&policy("allow", &["deny *.other.example", "deny other.example"])));
    let results =
        probe(&mut sandbox, &[http_at(OTHER.v4, "a.other.example"), http_at(OTHER.v6, "other.example")]);
    for (result, rule) in results.iter().zip(["*.other.example", "other.example"]) {
        let text = result["text"].as_str().map_or_else(|| result["body"].to_string(), str::to_owned);
        assert!(result["status"] == 403 && text.contains(rule), "{rule}: {results:?}");
    }
    assert_eq!(world.count_contacts(OTHER.v4) + world.count_contacts(OTHER.v6), 0);
    sandbox.delete();
}

#[test]
fn large_transfers_and_requests_on_one_connection_pass_unchanged() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example"]);
        let size = 6_000_000;
        let path = json!({"path": format!("/bytes/{size}")});
        let posted = "p".repeat(100_000);
        let pipelined =
            "GET /one HTTP/1.1\r\nHost: web.example\r\n\r\nGET /two HTTP/1.1\r\nHost: WEB.example:80\r\n\r\n";
        let results = probe(
            &mut sandbox,
            &[
                with(http("web.example"), path.clone()),
                with(tls("web.example"), path),
                with(http("web.example"), json!({"method": "POST", "body": posted})),
                json!({"do": "raw", "to": "web.example", "port": 80, "send": [pipelined], "wait": 0.5}),
                with(tls("web.example"), json!({"more_hosts": ["web.example", "web.example"]})),
                json!({"do": "raw", "to": "web.example", "port": 80, "pause": 0.05, "wait": 0.5,
                    "send": ["GE", "T / HTTP/1.1\r", "\nHo", "st: web.exa", "mple\r\n\r", "\n"]}),
            ],
        );
        assert_eq!(results[0]["length"], size, "as {user:?}: {:?}", results[0]["error"]);
        assert_eq!(results[1]["length"], size, "as {user:?}: {:?}", results[1]["error"]);
        assert_eq!(results[2]["body"]["body"].as_str(), Some(posted.as_str()), "as {user:?}");
        let text = results[3]["got"].as_str().unwrap_or_default();
        assert!(text.contains("\"/one\"") && text.contains("\"/two\""), "as {user:?}: {}", results[3]);
        assert_eq!(host_reached(&results[4]["more2"]), Some("web.example"), "as {user:?}: {}", results[4]);
        let text = results[5]["got"].as_str().unwrap_or_default();
        assert!(text.contains("\"web.example\""), "a request in pieces, as {user:?}: {}", results[5]);
        sandbox.delete();
    }
}

#[test]
fn the_loopback_inside_and_ports_through_the_server_work_as_before() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &[]);
        sandbox.start_background("cd /tmp && exec python3 -m http.server --bind :: 8000");
        e2e::eventually("it listens", || sandbox.run("exec 3<>/dev/tcp/127.0.0.1/8000").code == Some(0));
        let results = probe(
            &mut sandbox,
            &[
                http_at("127.0.0.1", "x").clone(),
                json!({"do": "http", "to": "127.0.0.1", "port": 8000}),
                json!({"do": "http", "to": "::1", "port": 8000}),
            ],
        );
        assert_eq!(results[0]["error"], "ECONNREFUSED", "as {user:?}: {results:?}");
        assert_eq!((&results[1]["status"], &results[2]["status"]), (&json!(200), &json!(200)), "{results:?}");
        let path = format!("/v1/sandboxes/{}/proxy/8000/", sandbox.id);
        let answer = server.client().get(&path).expect("the server answers");
        assert_eq!(answer.status, 200, "as {user:?}: {}", answer.text());
        sandbox.delete();
    }
}

/// Steps towards every address that no policy opens.
fn never_reachable_steps(server_port: u16) -> Vec<Value> {
    let fixed = OTHER_ADDRESSES.map(|address| json!({"do": "raw", "to": address, "port": 80, "wait": 0.5}));
    let host = [HOST_ADDRESS, HOST_ADDRESS_V6].into_iter().flat_map(|address| {
        [HOST_PORT, server_port].map(|port| json!({"do": "raw", "to": address, "port": port, "wait": 0.5}))
    });
    fixed.into_iter().chain(host).collect()
}

#[test]
fn networks_near_the_host_stay_unreachable_under_every_policy() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let steps = never_reachable_steps(server.port().parse().expect("a port is a number"));
        let all = ["allow 0.0.0.0/0", "allow ::/0", "allow *.example"];
        for policy in [policy("allow", &["allow web.example"]), policy("deny", &all)] {
            let mut sandbox = server.create_sandbox_with(&with_policy(&policy));
            for (step, result) in steps.iter().zip(probe(&mut sandbox, &steps)) {
                let got = result["got"].as_str().unwrap_or_default();
                assert!(got.is_empty(), "as {user:?}: {step} reached: {result}");
                let ended = result["error"].as_str().or(result["end"].as_str()).unwrap_or_default();
                assert!(ended != "timeout" && ended != "open", "as {user:?}: {step} hangs: {result}");
            }
            sandbox.delete();
        }
    }
    for address in OTHER_ADDRESSES.into_iter().chain([HOST_ADDRESS, HOST_ADDRESS_V6]) {
        assert_eq!(world.count_contacts(address), 0, "{address} was reached");
    }
}

#[test]
fn an_operator_opens_single_targets_near_the_host() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = super::server_builder(TestUser::Same).env("CORACLE_NETWORK_ALLOW", "10.1.2.3:80").start();
    let mut sandbox = create_filtered(&server, &["10.1.2.3", "private.example"]);
    let reach = |port: u16| {
        json!({"do": "raw", "to": "10.1.2.3", "port": port, "wait": 0.5,
        "send": ["GET / HTTP/1.1\r\nHost: 10.1.2.3\r\n\r\n"]})
    };
    let results = probe(&mut sandbox, &[reach(80), reach(7), resolve("private.example")]);
    assert!(world.count_contacts("10.1.2.3") == 1, "{results:?}");
    assert_eq!(results[1]["length"].as_u64().unwrap_or(0), 0, "{results:?}");
    sandbox.delete();
}

#[test]
fn datagrams_and_pings_are_refused_at_once() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = server.create_sandbox_with(&with_policy(&policy("allow", &["allow web.example"])));
        let steps = [
            json!({"do": "udp", "to": WEB.v4, "port": 443}),
            json!({"do": "udp", "to": WEB.v6, "port": 443}),
            json!({"do": "udp", "to": PROXY.v4, "port": 7}),
            json!({"do": "udp", "to": HOST_ADDRESS, "port": 7}),
        ];
        for (step, result) in steps.iter().zip(probe(&mut sandbox, &steps)) {
            assert!(is_refused(&result), "as {user:?}: {step}: {result}");
        }
        let pinged =
            probe(&mut sandbox, &[json!({"do": "ping", "to": WEB.v4}), json!({"do": "ping", "to": WEB.v6})]);
        for result in pinged {
            assert!(result["error"].is_string() && result["type"] != 0, "as {user:?}: {result}");
        }
        sandbox.delete();
    }
    assert!(
        world.contacts().iter().all(|contact| !contact.over_udp || contact.port == 53),
        "a datagram passed"
    );
}
