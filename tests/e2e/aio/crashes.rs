//! A sandbox that was killed: its id leads to a new one at once, and files of the host are still there.

use std::fs;
use std::time::{Duration, Instant};

use e2e::aio::{AioSandbox, StateRoot, keyed_client};
use e2e::host;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// How long a create may take until its sandbox can be used.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

#[test]
fn j23_killed_sandbox_is_created_again_with_its_user_data() {
    if !testkit::needs_root() {
        return;
    }
    let root = StateRoot::make();
    let server = root.server().env("CORACLE_DEERFLOW_AUTO_RESTART", "false").start();
    let fields = json!({"user_id": "ann", "thread_id": "t"});
    let mut sandbox = AioSandbox::create_with(&server, "killed", &fields);
    sandbox.run("echo kept > /mnt/user-data/outputs/result; echo lost > /home/gem/note");
    let agent = host::agent_pid(&sandbox.container).expect("its agent runs");
    let agent = Pid::from_raw(i32::try_from(agent).expect("a pid")).expect("a pid is not zero");
    kill_process(agent, Signal::KILL).expect("root may signal it");

    let mut provisioner = keyed_client(server.address());
    e2e::eventually("the crash is noticed", || {
        let answer = provisioner.get("/api/sandboxes/killed").expect("the server answers");
        assert!(matches!(answer.status, 200 | 404), "{} {}", answer.status, answer.text());
        answer.status == 404
    });
    // A request for the sandbox looks whether it lives; the list follows when its death is reported.
    e2e::eventually("the list omits it", || {
        provisioner.get("/api/sandboxes").expect("the server answers").json()["count"] == 0
    });
    // Its client is not served by anything else meanwhile.
    let answer = sandbox.try_get("/v1/sandbox").expect("the server answers");
    assert_eq!((answer.status, answer.json()["data"].is_null()), (404, true), "{}", answer.text());

    let began = Instant::now();
    let mut again = AioSandbox::create_with(&server, "killed", &fields);
    assert_eq!(again.run("cat /mnt/user-data/outputs/result; cat /home/gem/note 2>/dev/null"), "kept");
    let took = began.elapsed();
    assert!(took <= READY_TIMEOUT * e2e::slowness_factor(), "it was ready after {took:?}");
    assert_ne!(again.container, sandbox.container);
    // A crash does not change the address, so a client that kept it goes on.
    assert_eq!(again.path, sandbox.path);
    assert_eq!(sandbox.run("echo on"), "on");
    let outside = root.path().join("users/ann/threads/t/user-data/outputs/result");
    assert_eq!(fs::read_to_string(outside).expect("the host has the file"), "kept\n");
}
