//! The limits of all sandboxes of a server together.

use e2e::host;
use e2e::run::ORDINARY_USER;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

/// Whether control groups limit the sandboxes of the user who runs the tests.
fn has_groups() -> bool {
    let has = testkit::is_root() || std::env::var_os("CORACLE_TEST_DELEGATED").is_some();
    if !has {
        testkit::skip_test("it needs control groups");
    }
    has
}

#[test]
fn memory_of_all_sandboxes_together_is_limited() {
    if !has_groups() {
        return;
    }
    let server = ServerBuilder::new().env("CORACLE_LIMITS_TOTAL_MEMORY", "144m").start();
    let limits = json!({"resourceLimits": {"memory": "120Mi"}});
    // The number of bytes marks the processes among all others. Each fits into the limit of its sandbox.
    let bytes = ((80 << 20) + std::process::id()).to_string();
    let mark = format!("bs={bytes}");
    let hold = format!("dd if=/dev/zero bs={bytes} count=1 | sleep 1000");
    let holders = || host::pids_with_command_line(&mark).into_iter().filter(|pid| holds(*pid)).count();
    let mut first = server.create_sandbox_with(&limits);
    first.start_background(&hold);
    e2e::eventually("the first sandbox has its memory", || holders() == 1);
    let mut second = server.create_sandbox_with(&limits);
    second.start_background(&hold);
    // The kernel ends one of them; which one is its choice.
    e2e::eventually("the kernel ends a process", || oom_kills(&server) > 0);
    assert!(holders() <= 1, "both have their memory");
}

/// Whether a process has read all of its input.
fn holds(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
    resident.is_some_and(|kib| kib > 79 << 10)
}

fn oom_kills(server: &TestServer) -> u64 {
    let page = server.client().get("/v1/sandboxes?pageSize=200").expect("the server answers").json();
    let ids = page["items"].as_array().cloned().unwrap_or_default();
    let kills = ids.iter().map(|item| {
        let path = format!("/coracle/v1/sandboxes/{}", item["id"].as_str().unwrap_or_default());
        let report = server.client().get(&path).expect("the server answers").json();
        report["usage"]["oomKills"].as_u64().unwrap_or(0)
    });
    kills.sum()
}

#[test]
fn processes_of_all_sandboxes_together_are_limited() {
    if !has_groups() {
        return;
    }
    let server = ServerBuilder::new().env("CORACLE_LIMITS_TOTAL_PIDS", "60").start();
    let mut first = server.create_sandbox();
    let start = "for i in $(seq 1 35); do sleep 1000 & done; echo started";
    assert!(first.run(start).stdout.contains("started"));
    let ran = server.create_sandbox().run(start);
    assert!(ran.stderr.contains("fork") || ran.stderr.contains("Resource temporarily"), "{ran:?}");
}

#[test]
fn limit_that_can_never_fit_is_refused() {
    if !has_groups() {
        return;
    }
    let server = ServerBuilder::new()
        .env("CORACLE_LIMITS_TOTAL_MEMORY", "512m")
        .env("CORACLE_LIMITS_TOTAL_CPUS", "0.5")
        .start();
    let create = |limits: serde_json::Value| {
        let request = json!({"image": {"uri": "host"}, "timeout": 60, "entrypoint": ["sleep", "infinity"],
            "resourceLimits": limits});
        server.client().post("/v1/sandboxes", &request).expect("the server answers")
    };
    for (limits, expected) in [
        (json!({"memory": "1Gi"}), "memory of 1Gi can never fit into the 512Mi of all sandboxes together"),
        (json!({"cpu": "2"}), "cpus of 2 can never fit into the 0.5 of all sandboxes together"),
    ] {
        let answer = create(limits);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains(expected), "{}", answer.text());
    }
    // The defaults are larger, and lowered.
    assert_eq!(create(json!({})).status, 202);
    let metrics = server.client().get("/metrics").expect("the server answers").text();
    for line in ["{resource=\"memory\"} 536870912", "{resource=\"cpus\"} 0.5"] {
        assert!(metrics.contains(&format!("coracle_total_limit{line}")), "{metrics}");
    }
}

#[test]
fn total_of_a_host_without_control_groups_is_refused_at_the_start() {
    if !testkit::needs_root() {
        return;
    }
    let home = ORDINARY_USER.make_home();
    let mut server = ServerBuilder::new()
        .as_user(ORDINARY_USER)
        .env("CORACLE_REQUIRE_LIMITS", "false")
        .env("CORACLE_LIMITS_TOTAL_MEMORY", "1g")
        .spawn(home.path());
    let ended = server.wait().expect("it is our child");
    let log = std::fs::read_to_string(home.path().join("log")).expect("it was written");
    assert!(!ended.success() && log.contains("no control group enforces `limits.total_memory`"), "{log}");
}
