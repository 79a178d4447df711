//! Upper bounds: more than the operator allows, more than there is, more than an agent needs.

use std::fs;

use e2e::host;
use e2e::http::HttpResponse;
use e2e::run::{ORDINARY_USER, RunCommand, TestUser};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

fn create(server: &TestServer, limits: &Value, disk: &str) -> HttpResponse {
    let request = json!({"image": {"uri": "host"}, "timeout": 60, "entrypoint": ["sleep", "infinity"],
        "resourceLimits": limits, "extensions": {"coracle.disk": disk}});
    server.client().post("/v1/sandboxes", &request).expect("the server answers")
}

#[test]
fn request_above_the_operators_maximum_is_refused_with_the_maximum() {
    let server = ServerBuilder::new()
        .env("CORACLE_LIMITS_MAX_MEMORY", "2g")
        .env("CORACLE_LIMITS_MAX_CPUS", "1.5")
        .env("CORACLE_LIMITS_MAX_DISK", "3g")
        .start();
    for (limits, disk, expected) in [
        (json!({"memory": "3Gi"}), "1Gi", "memory of 3Gi is more than the 2Gi allowed here"),
        (json!({"cpu": "2"}), "1Gi", "cpus of 2 is more than the 1.5 allowed here"),
        (json!({}), "4Gi", "disk of 4Gi is more than the 3Gi allowed here"),
    ] {
        let answer = create(&server, &limits, disk);
        assert_eq!(answer.status, 400, "{limits}: {}", answer.text());
        let body = answer.json();
        assert_eq!(body["code"], "SANDBOX::INVALID_PARAMETER", "{body}");
        assert!(body["message"].as_str().is_some_and(|text| text.contains(expected)), "{body}");
    }
    let most = create(&server, &json!({"memory": "2Gi", "cpu": "1500m"}), "3Gi");
    assert_eq!(most.status, 202, "{}", most.text());
}

#[test]
fn a_disk_larger_than_all_disks_together_is_refused() {
    let ended = RunCommand::new(TestUser::Same).flag("--disk", "900t").run_argv(&["true"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("of all disks"), "{ended:?}");
}

#[test]
fn an_agent_has_a_bound_on_processor_time_too() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let agent = host::agent_pid(&sandbox.id).expect("its agent runs");
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

#[test]
fn without_root_journals_are_bounded_and_followed_after_a_restart() {
    if !testkit::needs_root() {
        return;
    }
    let start = || ServerBuilder::new().as_user(ORDINARY_USER).env("CORACLE_REQUIRE_LIMITS", "false");
    let mut server = start().start();
    let mut sandbox = RemoteSandbox::create(server.client(), &json!({"resourceLimits": {}}));
    let command = sandbox.start_background("echo before; sleep 600");
    e2e::eventually("it has printed", || sandbox.logs(&command).contains("before"));
    let record = fs::read(server.state_directory().join("boxes").join(&sandbox.id)).expect("it is recorded");
    let record: Value = serde_json::from_slice(&record).expect("a record is JSON");
    let agent = &record["process"]["pid"];
    let disks = fs::read_dir(format!("/proc/{agent}/fd")).expect("its agent runs").flatten();
    let sizes = disks.filter_map(|entry| {
        let status = rustix::fs::statvfs(entry.path()).ok()?;
        let is_directory = fs::metadata(entry.path()).ok()?.is_dir();
        is_directory.then_some(status.f_blocks * status.f_frsize)
    });
    assert!(sizes.collect::<Vec<u64>>().contains(&(128 << 20)), "no directory of the agent is bounded");
    server.kill();
    server.restart(&start());
    let mut again = RemoteSandbox::existing(server.client(), &sandbox.id);
    assert!(again.logs(&command).contains("before"));
}
