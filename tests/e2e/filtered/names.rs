//! What the resolver of a filtered sandbox answers.

use e2e::probe::{dns, probe, resolve, with};
use e2e::run::{TestUser, all_users};
use e2e::sandbox::RemoteSandbox;
use e2e::test_network::hosts::{EDGE, RESOLVER, SECOND, WEB, record_type};
use e2e::test_network::{self, TestNetwork};
use serde_json::{Value, json};

use super::{create_filtered, policy, start_server, with_policy};

const NO_SUCH_NAME: u64 = 3;

/// The data of the answers of one type.
fn data_of(result: &Value, kind: u16) -> Vec<&str> {
    let answers = result["answers"].as_array().map(Vec::as_slice).unwrap_or_default();
    answers
        .iter()
        .filter(|answer| answer["type"] == kind)
        .filter_map(|answer| answer["data"].as_str())
        .collect()
}

fn ask(sandbox: &mut RemoteSandbox, step: Value) -> Value {
    probe(sandbox, &[step]).remove(0)
}

#[test]
fn denied_names_do_not_exist_and_the_world_is_not_asked() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example", "*.absent.example"]);
        let tcp = json!({"tcp": true});
        let steps = [
            dns("other.example", "A"),
            dns("other.example", "AAAA"),
            with(dns("other.example", "A"), tcp.clone()),
            dns("other.example", "TXT"),
            dns("sub.web.example", "A"),
            dns("other.example", "ANY"),
            with(dns("other.example", "A"), json!({"server": RESOLVER.v4})),
            with(dns("other.example", "A"), json!({"server": RESOLVER.v6})),
            with(dns("other.example", "A"), with(tcp, json!({"server": RESOLVER.v4}))),
        ];
        for (step, result) in steps.iter().zip(probe(&mut sandbox, &steps)) {
            assert_eq!(result["code"], NO_SUCH_NAME, "as {user:?}: {step}: {result}");
            assert!(result["took"].as_f64() < Some(1.0), "as {user:?}: {step}: {result}");
        }
        let absent = ask(&mut sandbox, dns("some.absent.example", "A"));
        assert_eq!(absent["code"], NO_SUCH_NAME, "{absent}");
        sandbox.delete();
    }
    for name in ["other.example", "sub.web.example"] {
        assert!(!world.was_asked_for(name), "{name} was asked for in the world");
    }
    assert_eq!(world.count_contacts(RESOLVER.v4) + world.count_contacts(RESOLVER.v6), 0);
}

#[test]
fn allowed_names_resolve_over_udp_and_tcp_through_every_server() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example", "alias.example", "many.example"]);
        let steps = [
            dns("web.example", "A"),
            with(dns("WEB.example", "A"), json!({"tcp": true})),
            with(dns("web.example", "A"), json!({"server": RESOLVER.v4})),
            with(dns("web.example", "A"), json!({"server": RESOLVER.v6, "tcp": true})),
        ];
        for (step, result) in steps.iter().zip(probe(&mut sandbox, &steps)) {
            assert_eq!(data_of(&result, record_type::A), [WEB.v4], "as {user:?}: {step}: {result}");
        }
        let found = ask(&mut sandbox, resolve("web.example"));
        assert_eq!(found["addresses"], json!([WEB.v6, WEB.v4]), "as {user:?}");
        let chain = ask(&mut sandbox, dns("alias.example", "A"));
        let aliases = ["alias.example.net.cdn.example", "pop1.cdn.example", "edge.cdn.example"];
        assert_eq!(data_of(&chain, record_type::CNAME), aliases, "as {user:?}: {chain}");
        assert_eq!(data_of(&chain, record_type::A), [EDGE.v4], "as {user:?}: {chain}");
        let many = ask(&mut sandbox, with(dns("many.example", "A"), json!({"tcp": true})));
        assert!(data_of(&many, record_type::A).len() > 20, "as {user:?}: {many}");
        let cut = ask(&mut sandbox, dns("many.example", "A"));
        assert!(cut["truncated"] == true || data_of(&cut, record_type::A).len() > 20, "as {user:?}: {cut}");
        sandbox.delete();
    }
    assert_eq!(world.count_contacts(RESOLVER.v4) + world.count_contacts(RESOLVER.v6), 0);
}

#[test]
fn a_name_is_asked_for_once_as_long_as_its_answer_is_valid() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["*.example"]);
    for _ in 0..3 {
        let found = ask(&mut sandbox, dns("packages.example", "A"));
        assert_eq!(data_of(&found, record_type::A).len(), 1, "{found}");
    }
    let asked = |name: &str| {
        let queries = world.queries();
        queries.iter().filter(|query| query.name == name && query.kind == record_type::A).count()
    };
    assert_eq!(asked("packages.example"), 1, "an answer of {:?}", world.queries());
    sandbox.delete();
}

#[test]
fn other_types_are_answered_for_allowed_names_without_keys_for_encrypted_hellos() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["web.example"]);
    for kind in ["HTTPS", "SVCB"] {
        let found = ask(&mut sandbox, dns("web.example", kind));
        assert_eq!((&found["code"], &found["answers"]), (&json!(0), &json!([])), "{kind}: {found}");
    }
    let found = ask(&mut sandbox, dns("web.example", "TXT"));
    assert_eq!(found["code"], 0, "{found}");
    sandbox.delete();
    // Names by which clients look for encrypted DNS do not exist, even if every name is allowed.
    let mut sandbox = server.create_sandbox_with(&with_policy(&policy("allow", &["allow web.example"])));
    for name in ["use-application-dns.net", "_dns.resolver.arpa"] {
        let found = ask(&mut sandbox, dns(name, "A"));
        assert_eq!(found["code"], NO_SUCH_NAME, "{name}: {found}");
        assert!(!world.was_asked_for(name));
    }
    let found = ask(&mut sandbox, dns("web.example", "HTTPS"));
    assert_eq!((&found["code"], &found["answers"]), (&json!(0), &json!([])), "{found}");
    sandbox.delete();
}

#[test]
fn addresses_that_are_never_reachable_are_removed_from_answers() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["*.example"]);
    let mixed = ["A", "AAAA"].map(|kind| ask(&mut sandbox, dns("mixed.example", kind)));
    assert_eq!(data_of(&mixed[0], record_type::A), [WEB.v4], "{mixed:?}");
    assert_eq!(data_of(&mixed[1], record_type::AAAA), [WEB.v6], "{mixed:?}");
    for name in ["meta", "local", "mapped", "translated", "nowhere", "testhost", "private"] {
        for kind in ["A", "AAAA"] {
            let found = ask(&mut sandbox, dns(&format!("{name}.example"), kind));
            let addresses = [record_type::A, record_type::AAAA].map(|kind| data_of(&found, kind));
            assert!(addresses.iter().all(Vec::is_empty), "{name} {kind}: {found}");
        }
    }
    sandbox.delete();
}

#[test]
fn addresses_of_ipv6_are_not_answered_where_the_host_has_none() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::set_ipv6(false);
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example", WEB.v6]);
        let found = ask(&mut sandbox, dns("web.example", "AAAA"));
        assert_eq!((&found["code"], &found["answers"]), (&json!(0), &json!([])), "as {user:?}: {found}");
        let found = ask(&mut sandbox, json!({"do": "tls", "to": "web.example", "sni": "web.example"}));
        assert_eq!(e2e::probe::host_reached(&found), Some("web.example"), "as {user:?}: {found}");
        let found = ask(&mut sandbox, json!({"do": "http", "to": WEB.v6, "host": "web.example"}));
        assert!(super::is_refused(&found) || found["error"] == "EADDRNOTAVAIL", "as {user:?}: {found}");
        sandbox.delete();
    }
}

#[test]
fn addresses_that_were_answered_are_remembered_longer_than_the_answer_is_valid() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["brief.example:22"]);
    let banner = |address: &str| json!({"do": "raw", "to": address, "port": 22, "wait": 0.5});
    let before = ask(&mut sandbox, banner(WEB.v4));
    assert_eq!(before["length"].as_u64().unwrap_or(0), 0, "nothing has led to this address: {before}");
    let results = probe(
        &mut sandbox,
        &[
            resolve("brief.example"),
            json!({"do": "wait", "seconds": 1.3}),
            resolve("brief.example"),
            banner(WEB.v4),
            banner(SECOND.v4),
        ],
    );
    assert_eq!(results[0]["addresses"], json!([WEB.v4]), "{results:?}");
    for (index, address) in [(3, WEB.v4), (4, SECOND.v4)] {
        let got = results[index]["got"].as_str().unwrap_or_default();
        // The second address may not have been answered yet, if the first is kept for a minute.
        let answered =
            results[2]["addresses"] == json!([address]) || results[0]["addresses"] == json!([address]);
        assert_eq!(got.contains(address), answered, "{address}: {results:?}");
    }
    assert!(world.count_contacts(WEB.v4) > 0);
    sandbox.delete();
}
