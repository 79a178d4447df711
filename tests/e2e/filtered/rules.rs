//! Every kind of rule, on both families, as root and as an ordinary user.

use e2e::probe::{host_reached, http, http_at, probe_by_run, tls, tls_at, with};
use e2e::run::{RunCommand, TestUser, all_users};
use e2e::test_network::hosts::{OTHER, PACKAGES, SECOND, WEB};
use e2e::test_network::{self, TestNetwork};
use serde_json::{Value, json};

use super::Expected::{self, Reaches, Refused};
use super::{change_policy, check_steps, create_filtered, policy, start_server};

/// One policy, and what can be reached under it.
struct RuleCase {
    shown: &'static str,
    default: &'static str,
    rules: &'static [&'static str],
    steps: Vec<(Value, Expected)>,
}

fn family(step: Value, family: u8) -> Value {
    with(step, json!({"family": family}))
}

/// An HTTP request to an address without any name.
fn plain(address: &str) -> Value {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    http_at(address, &host)
}

fn rules_by_name() -> Vec<RuleCase> {
    vec![
        RuleCase {
            shown: "one name",
            default: "deny",
            rules: &["allow Web.Example."],
            steps: vec![
                (family(http("web.example"), 4), Reaches(&WEB)),
                (family(http("web.example"), 6), Reaches(&WEB)),
                (family(tls("web.example"), 4), Reaches(&WEB)),
                (family(tls("WEB.example"), 6), Reaches(&WEB)),
                (http("other.example"), Refused),
                (tls("other.example"), Refused),
                // The same address by another name.
                (http("shared.example"), Refused),
                (tls_at(WEB.v4, "shared.example"), Refused),
                (http("sub.web.example"), Refused),
                (http_at(OTHER.v4, "other.example"), Refused),
                (http_at(OTHER.v6, "other.example"), Refused),
                (tls_at(OTHER.v4, "other.example"), Refused),
                (tls_at(OTHER.v6, "other.example"), Refused),
            ],
        },
        RuleCase {
            shown: "all names below one",
            default: "deny",
            rules: &["allow *.packages.example"],
            steps: vec![
                (http("a.packages.example"), Reaches(&PACKAGES)),
                (tls("files.eu.packages.example"), Reaches(&PACKAGES)),
                (http("packages.example"), Refused),
                (tls_at(PACKAGES.v6, "packages.example"), Refused),
                (http("notpackages.example"), Refused),
            ],
        },
        RuleCase {
            shown: "a name with a port",
            default: "deny",
            rules: &["allow web.example:443", "allow other.example:80"],
            steps: vec![
                (tls("web.example"), Reaches(&WEB)),
                (http("web.example"), Refused),
                (http("other.example"), Reaches(&OTHER)),
                (tls("other.example"), Refused),
                (with(tls("web.example"), json!({"port": 8443})), Refused),
            ],
        },
        RuleCase {
            shown: "a chain of aliases needs no rule of its own",
            default: "deny",
            rules: &["allow alias.example"],
            steps: vec![
                (tls("alias.example"), Reaches(&e2e::test_network::hosts::EDGE)),
                (tls("edge.cdn.example"), Refused),
                (tls_at(e2e::test_network::hosts::EDGE.v4, "edge.cdn.example"), Refused),
            ],
        },
    ]
}

fn rules_by_address() -> Vec<RuleCase> {
    vec![
        RuleCase {
            shown: "one address of IPv4",
            default: "deny",
            rules: &["allow 93.184.216.34"],
            steps: vec![
                (plain(WEB.v4), Reaches(&WEB)),
                (with(tls_at(WEB.v4, "web.example"), json!({"verify": false, "sni": null})), Reaches(&WEB)),
                (plain(WEB.v6), Refused),
                (plain(OTHER.v4), Refused),
            ],
        },
        RuleCase {
            shown: "one address of IPv6",
            default: "deny",
            rules: &["allow 2606:2800:220:1::34"],
            steps: vec![(plain(WEB.v6), Reaches(&WEB)), (plain(WEB.v4), Refused), (plain(OTHER.v6), Refused)],
        },
        RuleCase {
            shown: "ranges",
            default: "deny",
            rules: &["allow 93.184.216.0/24", "allow 2606:2800:220:1::/64"],
            steps: vec![
                (plain(WEB.v4), Reaches(&WEB)),
                (plain(OTHER.v4), Reaches(&OTHER)),
                (plain(OTHER.v6), Reaches(&OTHER)),
                (plain(PACKAGES.v4), Refused),
                (plain(PACKAGES.v6), Refused),
            ],
        },
        RuleCase {
            shown: "addresses with ports",
            default: "deny",
            rules: &["allow 93.184.216.34:80", "allow [2606:2800:220:1::/64]:443"],
            steps: vec![
                (plain(WEB.v4), Reaches(&WEB)),
                (with(tls_at(WEB.v4, "web.example"), json!({"verify": false, "sni": null})), Refused),
                (plain(WEB.v6), Refused),
                (with(tls_at(OTHER.v6, "x"), json!({"verify": false, "sni": null})), Reaches(&OTHER)),
            ],
        },
    ]
}

fn order_of_rules() -> Vec<RuleCase> {
    vec![
        RuleCase {
            shown: "deny before allow",
            default: "deny",
            rules: &["deny other.example", "allow *.example"],
            steps: vec![(http("web.example"), Reaches(&WEB)), (http("other.example"), Refused)],
        },
        RuleCase {
            shown: "allow before deny",
            default: "allow",
            rules: &["allow other.example", "deny *.example"],
            steps: vec![(http("other.example"), Reaches(&OTHER)), (http("web.example"), Refused)],
        },
        RuleCase {
            shown: "a denied range before an allowed name",
            default: "deny",
            rules: &["deny 93.184.216.0/24", "allow web.example", "allow second.example"],
            steps: vec![
                (family(http("web.example"), 4), Refused),
                (family(http("web.example"), 6), Reaches(&WEB)),
                (http("second.example"), Reaches(&SECOND)),
            ],
        },
        RuleCase {
            shown: "an allowed name before a denied range",
            default: "deny",
            rules: &["allow web.example", "deny 93.184.216.0/24"],
            steps: vec![(family(tls("web.example"), 4), Reaches(&WEB)), (plain(WEB.v4), Refused)],
        },
        RuleCase {
            shown: "everything but",
            default: "allow",
            rules: &["deny other.example", "deny 93.184.217.10"],
            steps: vec![
                (http("web.example"), Reaches(&WEB)),
                (plain(WEB.v4), Reaches(&WEB)),
                (http("other.example"), Refused),
                (family(tls("packages.example"), 4), Refused),
                (http_at("169.254.169.254", "meta.example"), Refused),
            ],
        },
        RuleCase {
            shown: "nothing at all",
            default: "deny",
            rules: &[],
            steps: vec![(http("web.example"), Refused), (plain(WEB.v4), Refused), (plain(WEB.v6), Refused)],
        },
    ]
}

fn check_cases(user: TestUser, cases: &[RuleCase]) {
    let server = start_server(user);
    let mut sandbox = create_filtered(&server, &[]);
    for RuleCase { shown, default, rules, steps } in cases {
        change_policy(&server, &sandbox.id, "PUT", &policy(default, rules));
        check_steps(&mut sandbox, steps, &format!("{shown}, as {user:?}"));
    }
    sandbox.delete();
}

#[test]
fn rules_by_name_admit_their_names_alone() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        check_cases(user, &rules_by_name());
    }
    assert!(!world.was_asked_for("sub.web.example"), "a denied name was asked for in the world");
    assert_eq!(world.count_contacts(SECOND.v4), 0);
}

#[test]
fn rules_by_address_admit_their_addresses_alone() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        check_cases(user, &rules_by_address());
    }
    assert_eq!(world.count_contacts(PACKAGES.v4) + world.count_contacts(PACKAGES.v6), 0);
}

#[test]
fn the_first_rule_that_matches_decides() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        check_cases(user, &order_of_rules());
    }
    assert_eq!(world.count_contacts("169.254.169.254"), 0);
}

#[test]
fn a_policy_is_in_force_from_the_first_moment() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example"]);
        let steps = [(tls("web.example"), Reaches(&WEB)), (http_at(OTHER.v4, "other.example"), Refused)];
        check_steps(&mut sandbox, &steps, &format!("as {user:?}"));
        sandbox.delete();
    }
    assert_eq!(world.count_contacts(OTHER.v4), 0);
}

#[test]
fn a_command_of_its_own_has_the_same_rules() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    test_network::use_world_resolver();
    for user in all_users() {
        let run = RunCommand::new(user)
            .flag("--network", "filtered")
            .flag("--allow", "*.packages.example")
            .flag("--allow", "web.example:443")
            .flag("--deny", "bad.packages.example");
        let steps = [
            (tls("web.example"), Some("web.example")),
            (http("a.packages.example"), Some("packages.example")),
            (http("web.example"), None),
            (http("bad.packages.example"), None),
            (tls_at(OTHER.v4, "other.example"), None),
            (http_at(OTHER.v6, "other.example"), None),
        ];
        let [asked, expected] = [0, 1].map(|_| steps.iter());
        let asked: Vec<Value> = asked.map(|(step, _)| step.clone()).collect();
        let (results, ended) = probe_by_run(&run, &asked);
        for ((step, expected), result) in expected.zip(&results) {
            assert_eq!(host_reached(result), *expected, "as {user:?}: {step}: {result}: {ended:?}");
            assert!(expected.is_some() || super::is_refused(result), "as {user:?}: {step}: {result}");
        }
    }
    assert_eq!(world.count_contacts(OTHER.v4) + world.count_contacts(OTHER.v6), 0);
}
