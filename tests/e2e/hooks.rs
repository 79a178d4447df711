//! Hooks: commands that run before the main process of a sandbox, and periodically.

use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

fn create(server: &TestServer, lifecycle: Value) -> e2e::http::HttpResponse {
    let request = json!({
        "image": {"uri": "host"}, "resourceLimits": {"cpu": "1", "memory": "512Mi"},
        "entrypoint": ["sh", "-c", "cp /root/made /root/seen; exec sleep infinity"], "lifecycle": lifecycle,
    });
    server.client().post("/v1/sandboxes", &request).expect("the server answers")
}

#[test]
fn pre_start_hooks_end_before_the_entrypoint_starts() {
    let server = TestServer::start();
    let script = "sleep 0.2; echo $HOME > /root/made";
    let mut sandbox = server.create_sandbox_with(&json!({
        "entrypoint": ["sh", "-c", "cp /root/made /root/seen; exec sleep infinity"],
        "lifecycle": {"preStart": {"command": ["sh", "-c", script]}},
    }));
    e2e::eventually("the entrypoint ran", || sandbox.run("cat /root/seen").stdout == "/root\n");
}

#[test]
fn failed_or_slow_hook_leaves_no_sandbox() {
    let server = TestServer::start();
    for (command, timeout, expected) in [
        ("echo out; echo no luck >&2; exit 3", 60, "exited with code 3: out\nno luck"),
        ("echo waiting; sleep 600", 1, "was killed at its timeout: waiting"),
        ("kill -9 $$", 60, "was killed by signal 9"),
    ] {
        let hook = json!({"command": ["sh", "-c", command], "timeoutSeconds": timeout});
        let answer = create(&server, json!({"preStart": hook}));
        assert_eq!(
            (answer.status, answer.json()["code"].as_str()),
            (400, Some("DOCKER::SANDBOX_START_FAILED"))
        );
        let message = answer.json()["message"].to_string().replace("\\n", "\n");
        assert!(message.contains(expected), "{message}");
    }
    let absent = create(&server, json!({"preStart": {"command": ["no-such-program"]}}));
    assert!(absent.text().contains("could not be run"), "{}", absent.text());
    let left = server.client().get("/v1/sandboxes").expect("the server answers").json();
    assert_eq!(left["pagination"]["totalItems"], 0, "{left}");
}

#[test]
fn delete_does_not_wait_for_pre_start_hooks() {
    let server = TestServer::start();
    std::thread::scope(|scope| {
        let endless = json!({"preStart": {"command": ["sleep", "600"], "timeoutSeconds": 600}});
        let creating = scope.spawn(|| create(&server, endless));
        let mut id = None;
        e2e::eventually("it is being made", || {
            let page = server.client().get("/v1/sandboxes").expect("the server answers").json();
            id = page["items"][0]["id"].as_str().map(str::to_owned);
            id.is_some()
        });
        let path = format!("/v1/sandboxes/{}", id.expect("it was just seen"));
        assert_eq!(server.client().delete(&path).expect("the server answers").status, 204);
        let answer = creating.join().expect("it does not panic");
        assert!(answer.status >= 400, "{}", answer.text());
    });
}

#[test]
fn periodic_hook_runs_repeatedly_and_after_a_crash() {
    let mut server = TestServer::start();
    let script = "echo run >> /root/runs; echo printed; exit 4";
    let hook = json!({"name": "tick", "schedule": "@every 1s", "command": ["sh", "-c", script]});
    let mut sandbox = server.create_sandbox_with(&json!({"lifecycle": {"periodic": [hook]}}));
    let runs = |sandbox: &mut RemoteSandbox| sandbox.run("cat /root/runs").stdout.lines().count();
    e2e::eventually("it ran twice", || runs(&mut sandbox) >= 2);
    e2e::eventually("its end is reported", || {
        let last = &server.client().inspect_sandbox(&sandbox.id)["hooks"][0]["last"];
        last["exit"] == "code 4" && last["tail"] == "printed\n"
    });
    let before = runs(&mut sandbox);
    server.kill();
    server.restart(&ServerBuilder::new());
    let mut again = RemoteSandbox::existing(server.client(), &sandbox.id);
    e2e::eventually("it runs again", || runs(&mut again) > before + 1);
}

#[test]
fn periodic_hook_never_overlaps_itself_even_across_a_crash() {
    let mut server = TestServer::start();
    let script =
        "mkdir /root/lock || echo met >> /root/met; sleep 2.5; rmdir /root/lock; echo x >> /root/runs";
    let hook = json!({"name": "slow", "schedule": "@every 1s", "command": ["sh", "-c", script]});
    let mut sandbox = server.create_sandbox_with(&json!({"lifecycle": {"periodic": [hook]}}));
    e2e::eventually("it runs", || sandbox.run("test -d /root/lock").code == Some(0));
    server.kill();
    server.restart(&ServerBuilder::new());
    let mut again = RemoteSandbox::existing(server.client(), &sandbox.id);
    e2e::eventually("it ran twice", || again.run("cat /root/runs").stdout.lines().count() >= 2);
    assert_eq!(again.run("cat /root/met").code, Some(1));
}

#[test]
fn hooks_due_while_paused_are_skipped() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let hook = json!({"name": "tick", "schedule": "@every 1s", "command": ["sh", "-c", "date +%s%3N >> /root/runs"]});
    let mut sandbox = server.create_sandbox_with(&json!({"lifecycle": {"periodic": [hook]}}));
    let mut clock = server.create_sandbox();
    let runs = |sandbox: &mut RemoteSandbox| -> Vec<u64> {
        let shown = sandbox.run("cat /root/runs").stdout;
        shown.lines().map(|line| line.parse().expect("a number")).collect()
    };
    e2e::eventually("it ran", || !runs(&mut sandbox).is_empty());
    assert_eq!(sandbox.change_lifecycle("pause"), 202);
    assert_eq!(clock.run("sleep 3.5").code, Some(0));
    assert_eq!(sandbox.change_lifecycle("resume"), 202);
    let before = runs(&mut sandbox).len();
    e2e::eventually("it runs again", || runs(&mut sandbox).len() >= before + 2);
    let times = runs(&mut sandbox);
    let apart: Vec<u64> = times.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(apart.iter().all(|time| *time >= 200), "several runs at once: {apart:?}");
    assert!(apart.iter().any(|time| *time >= 3000), "the hook ran while paused: {apart:?}");
}
