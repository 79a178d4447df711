//! Ways around a policy by names and by what a connection says of itself. Each succeeds in a sandbox with network `on`, or
//! from the host itself where `on` forbids it too, and fails in a filtered one.

use e2e::probe::{dns, host_reached, http, http_at, probe, tls_at, with};
use e2e::run::{TestUser, all_users};
use e2e::sandbox::RemoteSandbox;
use e2e::test_network::hosts::{OTHER, PROXY, RESOLVER, WEB};
use e2e::test_network::{HOST_ADDRESS, HOST_ADDRESS_V6, TestNetwork};
use serde_json::{Value, json};

use crate::filtered::{create_filtered, create_open, is_refused, policy, start_server, with_policy};

/// What an attack on the policy `allow web.example` wants.
#[derive(Clone, Copy)]
enum Goal {
    /// A connection or datagram to this address.
    Contact(&'static str),
    /// That a name server outside is asked for this name.
    Query(&'static str),
    /// That the response to the raw request contains this text.
    Response(&'static str),
}

struct NetworkAttack {
    step: Value,
    goal: Goal,
}

fn attack(goal: Goal, step: Value) -> NetworkAttack {
    NetworkAttack { step, goal }
}

impl NetworkAttack {
    /// Runs the attack and returns whether it reached its goal, with its result.
    fn succeeds(&self, world: &TestNetwork, sandbox: &mut RemoteSandbox) -> (bool, Value) {
        let contacts = |address| world.count_contacts(address);
        let before = if let Goal::Contact(address) = self.goal { contacts(address) } else { 0 };
        let asked = |name: &str| world.queries().iter().filter(|query| query.name.ends_with(name)).count();
        let asked_before = if let Goal::Query(name) = self.goal { asked(name) } else { 0 };
        let result = probe(sandbox, std::slice::from_ref(&self.step)).remove(0);
        let reached = match self.goal {
            Goal::Contact(address) => contacts(address) > before,
            Goal::Query(name) => asked(name) > asked_before,
            Goal::Response(text) => result["got"].as_str().is_some_and(|got| got.contains(text)),
        };
        (reached, result)
    }
}

/// Shows that every attack works over a link, and that none does under the policy, as root and as an ordinary user.
fn check_attacks(rules: &[&str], attacks: &[NetworkAttack]) {
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        if user == TestUser::Same {
            let mut open = create_open(&server);
            for attack in attacks {
                let (reached, result) = attack.succeeds(&world, &mut open);
                assert!(reached, "{} does not work with network on: {result}", attack.step);
            }
            open.delete();
        }
        let mut filtered = server.create_sandbox_with(&with_policy(&policy("deny", rules)));
        for attack in attacks {
            let (reached, result) = attack.succeeds(&world, &mut filtered);
            assert!(!reached, "as {user:?}: {} was not stopped by the filter: {result}", attack.step);
        }
        filtered.delete();
    }
}

#[test]
fn bare_addresses_and_foreign_resolvers_lead_nowhere() {
    if !testkit::needs_root() {
        return;
    }
    let raw = |address: &str, port: u16| json!({"do": "raw", "to": address, "port": port, "send": ["x\n"], "wait": 0.3});
    let at = |address: &'static str| Goal::Contact(address);
    let asked = Goal::Query("other.example");
    let server = |step: Value, more: Value| with(with(step, json!({"server": RESOLVER.v4})), more);
    check_attacks(
        &["allow web.example"],
        &[
            attack(at(OTHER.v4), http_at(OTHER.v4, OTHER.v4)),
            attack(at(OTHER.v6), http_at(OTHER.v6, "other.example")),
            attack(at(OTHER.v4), raw(OTHER.v4, 7)),
            attack(at(OTHER.v6), raw(OTHER.v6, 22)),
            attack(at(OTHER.v4), raw("::ffff:93.184.216.77", 7)),
            attack(at(OTHER.v4), json!({"do": "udp", "to": OTHER.v4, "port": 443})),
            attack(at(OTHER.v6), json!({"do": "udp", "to": OTHER.v6, "port": 7})),
            attack(asked, server(dns("other.example", "A"), json!({}))),
            attack(asked, server(dns("other.example", "A"), json!({"tcp": true}))),
            attack(asked, server(dns("other.example", "A"), json!({"tls": true, "sni": "dns.example"}))),
            attack(asked, server(dns("other.example", "A"), json!({"tls": true, "sni": "web.example"}))),
            attack(
                asked,
                json!({"do": "doh", "to": RESOLVER.v4, "host": "dns.example", "name": "other.example"}),
            ),
            attack(
                asked,
                json!({"do": "doh", "to": RESOLVER.v4, "host": "dns.example", "name": "other.example",
                "sni": "web.example"}),
            ),
        ],
    );
}

#[test]
fn an_allowed_name_leads_to_its_own_host_only() {
    if !testkit::needs_root() {
        return;
    }
    let other = Goal::Contact(OTHER.v4);
    let unverified = json!({"verify": false});
    let entry = json!({"do": "edit", "path": "/etc/hosts", "text": format!("\n{} web.example\n", OTHER.v4)});
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut filtered = create_filtered(&server, &["web.example"]);
        let mut steps = vec![
            // As `curl --resolve` and `curl --connect-to` do.
            attack(other, with(tls_at(OTHER.v4, "web.example"), unverified.clone())),
            attack(Goal::Contact(OTHER.v6), with(tls_at(OTHER.v6, "web.example"), unverified.clone())),
            attack(other, http_at(OTHER.v4, "web.example")),
        ];
        if user == TestUser::Same {
            let mut open = create_open(&server);
            probe(&mut open, std::slice::from_ref(&entry));
            for attack in &steps {
                let (reached, result) = attack.succeeds(&world, &mut open);
                assert!(reached, "{} does not work with network on: {result}", attack.step);
            }
            let (reached, result) = attack(other, http("web.example")).succeeds(&world, &mut open);
            assert!(reached, "/etc/hosts does not work with network on: {result}");
            open.delete();
        }
        assert!(probe(&mut filtered, std::slice::from_ref(&entry))[0]["error"].is_null());
        steps.push(attack(other, http("web.example")));
        steps.push(attack(other, json!({"do": "tls", "to": "web.example", "sni": "web.example"})));
        for attack in &steps {
            let (reached, result) = attack.succeeds(&world, &mut filtered);
            assert!(!reached, "as {user:?}: {}: {result}", attack.step);
            assert_eq!(host_reached(&result), Some("web.example"), "as {user:?}: {}: {result}", attack.step);
        }
        filtered.delete();
    }
}

#[test]
fn what_a_client_hello_hides_is_not_let_through() {
    if !testkit::needs_root() {
        return;
    }
    const ENCRYPTED_HELLO: u16 = 0xfe0d;
    let other = |members: Value| {
        attack(
            Goal::Contact(OTHER.v4),
            with(with(tls_at(OTHER.v4, "other.example"), json!({"verify": false})), members),
        )
    };
    let hello = |members: Value| {
        let step = json!({"do": "hello", "to": OTHER.v4, "sni": "other.example", "wait": 0.5});
        attack(Goal::Contact(OTHER.v4), with(step, members))
    };
    check_attacks(
        &["allow web.example"],
        &[
            other(json!({})),
            other(json!({"sni": null})),
            other(json!({"sni": "OTHER.example"})),
            other(json!({"pieces": 1, "pause": 0})),
            other(json!({"records": 1})),
            other(json!({"records": 10})),
            other(json!({"records": 100, "pieces": 7, "pause": 0})),
            other(json!({"host": "web.example"})),
            hello(json!({"pad": 20_000})),
            hello(json!({"pad": 20_000, "sni": "web.example"})),
            hello(json!({"pad": 100, "kind": ENCRYPTED_HELLO})),
            hello(json!({"pad": 100, "kind": ENCRYPTED_HELLO, "sni": "web.example"})),
            hello(json!({"cut": 60})),
            hello(json!({"cut": 60, "sni": "web.example"})),
            hello(json!({"port": 8443})),
            hello(json!({"port": 8443, "sni": "web.example"})),
            // TLS on the port of HTTP, and HTTP on that of TLS.
            hello(json!({"port": 80, "sni": "web.example"})),
            attack(Goal::Contact(OTHER.v4), with(http_at(OTHER.v4, "web.example"), json!({"port": 443}))),
        ],
    );
}

#[test]
fn a_client_hello_that_never_ends_is_given_up() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["web.example"]);
    let step = json!({"do": "hello", "to": WEB.v4, "sni": "web.example", "cut": 60, "wait": 8});
    let result = probe(&mut sandbox, &[step]).remove(0);
    assert!(result["end"] != "open" && result["took"].as_f64() < Some(7.0), "{result}");
    assert_eq!(world.count_contacts(WEB.v4), 0, "nothing of it was passed on");
    sandbox.delete();
}

/// Raw requests to an allowed host, in which another host of the same server is hidden.
fn hidden_requests() -> Vec<(&'static str, String)> {
    let good = "GET /first HTTP/1.1\r\nHost: web.example\r\n\r\n";
    let hidden = "GET /hidden HTTP/1.1\r\nHost: shared.example\r\n\r\n";
    vec![
        ("a pipelined second request", format!("{good}{hidden}")),
        ("another host than the name", hidden.to_owned()),
        (
            "a target with its own host",
            "GET http://shared.example/hidden HTTP/1.1\r\nHost: web.example\r\n\r\n".to_owned(),
        ),
        ("two hosts", "GET /hidden HTTP/1.1\r\nHost: web.example\r\nHost: shared.example\r\n\r\n".to_owned()),
        (
            "two hosts, the other way",
            "GET /hidden HTTP/1.1\r\nHost: shared.example\r\nHost: web.example\r\n\r\n".to_owned(),
        ),
        ("lines without returns", "GET /hidden HTTP/1.1\nHost: shared.example\n\n".to_owned()),
        (
            "a body of its own length",
            format!(
                "POST /first HTTP/1.1\r\nHost: web.example\r\nContent-Length: 0\r\nContent-Length: {}\r\n\r\n{hidden}",
                hidden.len()
            ),
        ),
        (
            "a chunked body with a length",
            format!(
                "POST /first HTTP/1.1\r\nHost: web.example\r\nTransfer-Encoding: chunked\r\nContent-Length: {}\r\n\r\n0\r\n\r\n{hidden}",
                hidden.len() + 5
            ),
        ),
        (
            "after a change of protocol",
            format!(
                "GET /first HTTP/1.1\r\nHost: web.example\r\nConnection: Upgrade\r\nUpgrade: anything\r\n\r\n{hidden}"
            ),
        ),
        ("HTTP/1.0 without a host", "GET /hidden HTTP/1.0\r\n\r\n".to_owned()),
    ]
}

#[test]
fn every_request_of_a_connection_is_judged() {
    if !testkit::needs_root() {
        return;
    }
    let raw = |text: &str| json!({"do": "raw", "to": WEB.v4, "port": 80, "send": [text], "wait": 0.4});
    let attacks: Vec<NetworkAttack> =
        hidden_requests().iter().map(|(_, text)| attack(Goal::Response("/hidden"), raw(text))).collect();
    check_attacks(&["allow web.example"], &attacks);
}

#[test]
fn an_allowed_host_is_no_way_to_another() {
    if !testkit::needs_root() {
        return;
    }
    let request = "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n";
    let tunnel = |target: &str| json!({"do": "tunnel", "to": PROXY.v4, "port": 80, "target": target, "request": request});
    check_attacks(
        &["allow proxy.example"],
        &[
            attack(Goal::Contact(OTHER.v4), tunnel("other.example:80")),
            attack(Goal::Contact(OTHER.v4), tunnel("93.184.216.77:80")),
            attack(
                Goal::Contact(OTHER.v4),
                json!({"do": "raw", "to": PROXY.v4, "port": 80, "wait": 0.4,
                "send": ["CONNECT other.example:80 HTTP/1.1\r\nHost: proxy.example\r\n\r\n", request]}),
            ),
        ],
    );
}

#[test]
fn denied_names_carry_nothing_out() {
    if !testkit::needs_root() {
        return;
    }
    let long = format!("{0}.{0}.{0}.tunnel.other.example", "q".repeat(60));
    let ask = |kind: &str| attack(Goal::Query("tunnel.other.example"), dns(&long, kind));
    let tcp = |kind: &str| {
        attack(Goal::Query("tunnel.other.example"), with(dns(&long, kind), json!({"tcp": true})))
    };
    check_attacks(
        &["allow web.example"],
        &[
            ask("TXT"),
            ask("NULL"),
            ask("MX"),
            ask("CNAME"),
            ask("SRV"),
            ask("NS"),
            ask("A"),
            tcp("TXT"),
            tcp("AAAA"),
        ],
    );
}

/// Names that an attacker's name server answers with addresses near the host.
const MISLEADING_NAMES: [&str; 7] =
    ["meta", "local", "mapped", "translated", "nowhere", "testhost", "private"];

#[test]
fn names_that_lead_to_the_host_or_its_neighbours_are_refused() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let near = [
        "127.0.0.1",
        "::1",
        HOST_ADDRESS,
        HOST_ADDRESS_V6,
        "169.254.169.254",
        "fd00:ec2::254",
        "10.1.2.3",
        "fd12::1",
        "64:ff9b::a9fe:a9fe",
    ];
    // The attack works where nothing is filtered: the host itself connects there.
    for address in ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1", "::", "64:ff9b::a9fe:a9fe"] {
        std::net::TcpStream::connect((address, 80)).unwrap_or_else(|error| panic!("{address}: {error}"));
    }
    e2e::eventually("they are recorded", || world.contacts().len() >= 6);
    let before: Vec<usize> = near.iter().map(|address| world.count_contacts(address)).collect();
    for user in all_users() {
        let server = start_server(user);
        let all = ["allow *.example", "allow 0.0.0.0/0", "allow ::/0"];
        let mut sandbox = server.create_sandbox_with(&with_policy(&policy("allow", &all)));
        let steps: Vec<Value> = MISLEADING_NAMES
            .iter()
            .map(|name| format!("{name}.example"))
            .flat_map(|name| {
                [http_at(WEB.v4, &name), with(tls_at(WEB.v4, &name), json!({"verify": false})), http(&name)]
            })
            .collect();
        for (step, result) in steps.iter().zip(probe(&mut sandbox, &steps)) {
            let named = matches!(result["error"].as_str(), Some("EAI_NODATA" | "EAI_NONAME"));
            let page = matches!(result["status"].as_u64(), Some(400..=599));
            assert!(is_refused(&result) || named || page, "as {user:?}: {step}: {result}");
        }
        sandbox.delete();
    }
    let after: Vec<usize> = near.iter().map(|address| world.count_contacts(address)).collect();
    assert_eq!(before, after, "{near:?}");
}

#[test]
fn a_name_that_changes_its_address_leads_nowhere_else() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let near = ["127.0.0.1", HOST_ADDRESS, "169.254.169.254"];
    let server = start_server(TestUser::Same);
    let mut sandbox = create_filtered(&server, &["*.example"]);
    let names = ["rebind-local.example", "rebind-host.example", "rebind-meta.example"];
    let first: Vec<Value> = names.iter().map(|name| http(name)).collect();
    for result in probe(&mut sandbox, &first) {
        assert_eq!(
            host_reached(&result),
            Some("web.example"),
            "the first answer is a public address: {result}"
        );
    }
    let mut again = vec![json!({"do": "wait", "seconds": 1.5})];
    for name in names {
        again.extend([
            http(name),
            http_at(WEB.v4, name),
            with(tls_at(WEB.v4, name), json!({"verify": false})),
        ]);
        again.push(json!({"do": "raw", "to": WEB.v4, "port": 8099, "wait": 0.3}));
    }
    probe(&mut sandbox, &again);
    for address in near {
        assert_eq!(world.count_contacts(address), 0, "{address} was reached");
    }
    assert!(
        world.queries().iter().filter(|query| query.name == names[0]).count() > 1,
        "it was asked for again"
    );
    sandbox.delete();
}
