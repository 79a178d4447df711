//! The test internet itself: what the tests of filters rely on works on the host without any sandbox.

use std::process::Command;

use e2e::probe::{
    banner, dns, host_reached, http, http_at, parse_results, probe_argv, resolve, tls, tls_at, with,
};
use e2e::run::CommandOutput;
use e2e::test_network::hosts::{EDGE, OTHER, PACKAGES, PROXY, RESOLVER, SECOND, SHELL, WEB};
use e2e::test_network::{self, GATEWAY, TestNetwork};
use serde_json::{Value, json};

/// Runs steps on the host of the test.
fn probe_on_host(steps: &[Value]) -> Vec<Value> {
    let argv = probe_argv(steps);
    let output = Command::new(&argv[0]).args(&argv[1..]).output().expect("there is a Python");
    let output = CommandOutput::from(output);
    parse_results(&output.stdout, steps, &output)
}

#[test]
fn hosts_of_the_test_internet_answer_by_name_and_address() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    test_network::use_world_resolver();
    for host in [&WEB, &OTHER, &EDGE, &PROXY, &SHELL] {
        let [name, v4, v6] = [host.name(), host.v4, host.v6];
        let steps =
            [http(name), http_at(v4, name), http_at(v6, name), tls(name), tls_at(v4, name), tls_at(v6, name)];
        for (step, result) in steps.iter().zip(probe_on_host(&steps)) {
            assert_eq!(host_reached(&result), Some(name), "{step}: {result}");
        }
    }
    let [deep, alias] = ["a.b.packages.example", "alias.example"];
    let results =
        probe_on_host(&[http(deep), tls(alias), tls_at(OTHER.v4, "web.example"), tls("absent.example")]);
    assert_eq!(host_reached(&results[0]), Some(PACKAGES.name()), "{results:?}");
    assert_eq!(host_reached(&results[1]), Some(EDGE.name()), "{results:?}");
    assert_eq!(results[2]["error"], "TLS: CERTIFICATE_VERIFY_FAILED", "{results:?}");
    assert_eq!(results[3]["error"], "EAI_NONAME", "{results:?}");
    assert!(world.count_contacts(OTHER.v4) >= 3 && world.was_asked_for(alias));
    assert_eq!(world.count_contacts(SECOND.v4), 0);
}

#[test]
fn services_of_the_test_internet_answer() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::use_world_resolver();
    let results = probe_on_host(&[
        banner("shell.example", 22),
        json!({"do": "udp", "to": WEB.v4, "port": 443, "text": "quic"}),
        json!({"do": "udp", "to": WEB.v6, "port": 7, "text": "echo"}),
        with(dns("web.example", "A"), json!({"server": RESOLVER.v4})),
        with(dns("web.example", "AAAA"), json!({"server": RESOLVER.v6, "tcp": true})),
        with(dns("web.example", "A"), json!({"server": RESOLVER.v4, "tls": true, "sni": "dns.example"})),
        json!({"do": "doh", "to": RESOLVER.v4, "host": "dns.example", "name": "web.example"}),
        json!({"do": "tunnel", "to": PROXY.v4, "port": 80, "target": "other.example:80",
            "request": "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n"}),
        json!({"do": "socks", "to": PROXY.v4, "port": 1080, "target": "other.example", "target_port": 80,
            "request": "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n"}),
        json!({"do": "ping", "to": WEB.v4}),
        json!({"do": "tls", "to": WEB.v4, "sni": "web.example", "pieces": 1}),
        json!({"do": "tls", "to": WEB.v4, "sni": "web.example", "records": 10}),
        json!({"do": "hello", "to": WEB.v4, "sni": "web.example", "pad": 20_000}),
        json!({"do": "http", "to": GATEWAY, "path": "/"}),
    ]);
    assert_eq!(results[0]["got"], format!("SSH-2.0-test at {}\r\n", SHELL.v4), "{results:?}");
    assert_eq!((&results[1]["got"], &results[2]["got"]), (&json!("quic"), &json!("echo")), "{results:?}");
    for (index, address) in [(3, WEB.v4), (4, WEB.v6), (5, WEB.v4), (6, WEB.v4)] {
        assert_eq!(results[index]["answers"][0]["data"], address, "{index}: {results:?}");
    }
    assert_eq!(host_reached(&results[7]["inside"]), Some("other.example"), "{results:?}");
    assert_eq!(host_reached(&results[8]), Some("other.example"), "{results:?}");
    assert_eq!(results[9]["type"], 0, "{results:?}");
    assert_eq!(host_reached(&results[10]), Some("web.example"), "{results:?}");
    assert_eq!(host_reached(&results[11]), Some("web.example"), "{results:?}");
    assert_eq!(results[12]["server"], true, "{results:?}");
}

#[test]
fn records_of_the_test_internet_change_as_they_should() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::use_world_resolver();
    let results = probe_on_host(&[
        dns("rebind-meta.example", "A"),
        dns("rebind-meta.example", "A"),
        dns("many.example", "A"),
        with(dns("many.example", "A"), json!({"tcp": true})),
        dns("web.example", "HTTPS"),
        dns("alias.example", "A"),
        resolve("six.example"),
    ]);
    assert_eq!(results[0]["answers"][0]["data"], WEB.v4, "{results:?}");
    assert_eq!(results[1]["answers"][0]["data"], "169.254.169.254", "{results:?}");
    assert_eq!(
        (&results[2]["truncated"], results[2]["answers"].as_array().map(Vec::len)),
        (&json!(true), Some(0))
    );
    assert_eq!(results[3]["answers"].as_array().map(Vec::len), Some(61), "{results:?}");
    assert_eq!(results[4]["answers"][0]["type"], 65, "{results:?}");
    assert_eq!(results[5]["answers"].as_array().map(Vec::len), Some(4), "{results:?}");
    assert_eq!(results[6]["addresses"], json!([WEB.v6]), "{results:?}");
}
