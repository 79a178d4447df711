//! What nobody gets: more than the operator allows, more than there is, more than an agent needs.

use std::fs;

use e2e::host;
use e2e::http::Response;
use e2e::run::{Run, User};
use e2e::server::{Server, Start};
use serde_json::{Value, json};

fn create(server: &Server, limits: &Value) -> Response {
    let wish = json!({"image": {"uri": "host"}, "timeout": 60, "entrypoint": ["sleep", "infinity"],
        "resourceLimits": limits});
    server.client().post("/v1/sandboxes", &wish).expect("the server answers")
}

#[test]
fn a_client_that_asks_for_more_than_the_operator_allows_is_told_what_is_allowed() {
    let server = Start::new()
        .env("CORACLE_LIMITS_MAX_MEMORY", "2g")
        .env("CORACLE_LIMITS_MAX_CPUS", "1.5")
        .env("CORACLE_LIMITS_MAX_DISK", "3g")
        .start();
    for (limits, expected) in [
        (json!({"memory": "3Gi"}), "memory of 3Gi is more than the 2Gi allowed here"),
        (json!({"cpu": "2"}), "cpus of 2 is more than the 1.5 allowed here"),
        (json!({"disk": "4Gi"}), "disk of 4Gi is more than the 3Gi allowed here"),
    ] {
        let answer = create(&server, &limits);
        assert_eq!(answer.status, 400, "{limits}: {}", answer.text());
        let body = answer.json();
        assert_eq!(body["code"], "SANDBOX::INVALID_PARAMETER", "{body}");
        assert!(body["message"].as_str().is_some_and(|text| text.contains(expected)), "{body}");
    }
    let most = create(&server, &json!({"memory": "2Gi", "cpu": "1500m", "disk": "3Gi"}));
    assert_eq!(most.status, 202, "{}", most.text());
}

#[test]
fn a_disk_larger_than_all_disks_together_is_refused() {
    let ended = Run::new(User::Same).flag("--disk", "900t").argv(&["true"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("of all disks"), "{ended:?}");
}

#[test]
fn an_agent_has_a_bound_on_processor_time_too() {
    let server = Server::start();
    let sandbox = server.create();
    let agent = host::agent_of(&sandbox.id).expect("its agent runs");
    let groups = fs::read_to_string(format!("/proc/{agent}/cgroup")).expect("its agent runs");
    let bound = groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let v1 = controllers
            .split(',')
            .find(|name| *name == "cpu")
            .map(|_| format!("/sys/fs/cgroup/{controllers}{group}/cpu.cfs_quota_us"));
        let v2 = format!("/sys/fs/cgroup{group}/cpu.max");
        v1.and_then(|file| fs::read_to_string(file).ok()).or_else(|| fs::read_to_string(v2).ok())
    });
    let bound = bound.unwrap_or_else(|| panic!("no bound in {groups}"));
    assert_eq!(bound.split_whitespace().next(), Some("100000"), "one core");
}
