//! Attacks in a sandbox whose sessions can have their own namespaces: from such a session, from the agent,
//! and from the process that makes the namespaces.

use e2e::host;
use e2e::sandbox::{CommandRun, RemoteSandbox};
use e2e::server::TestServer;
use serde_json::json;

use super::Secret;
use super::agent::{REFUSED, attack_from_process};

const READS: [&str; 5] =
    ["read", "read-through-proc", "read-through-descriptors", "read-through-dots", "read-by-handle"];

fn sandbox_with_isolated_sessions(server: &TestServer) -> RemoteSandbox {
    let mut sandbox =
        server.create_sandbox_with(&json!({"extensions": {"bootstrap.execd.isolation": "enable"}}));
    sandbox.upload_attacks();
    sandbox
}

fn open(sandbox: &mut RemoteSandbox) -> String {
    let answer = sandbox.request_inside("POST", "v1/isolated/session", &json!({"workspace": {"path": "/w"}}));
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["session_id"].as_str().expect("an id").to_owned()
}

/// Tries an attack in the session's shell.
fn attack(sandbox: &mut RemoteSandbox, session: &str, attack: &str) -> CommandRun {
    let code = json!({"code": format!("/opt/attacks {}", attack.replace(':', " "))});
    let answer = sandbox.request_inside("POST", &format!("v1/isolated/session/{session}/run"), &code);
    assert_eq!(answer.status, 200, "{attack}: {}", answer.text());
    CommandRun::from_events(&answer.text())
}

fn check_stopped(verdict: &str, attack: &str, from: &str) {
    // The filter may also kill the process, which prints nothing.
    assert!(verdict.starts_with("stopped: ") || verdict.is_empty(), "{attack} from {from}: {verdict}");
}

#[test]
fn session_gains_nothing_from_the_kernel_or_its_namespace_init() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = open(&mut sandbox);
    let own = ["trace:1", "read-memory:1", "steal-descriptor:1", "overwrite-binary:1", "join-namespaces:1"];
    let mounts = ["remount-writable:/usr", "uncover:/tmp", "uncover:/proc/sys", "pivot-root"];
    for name in REFUSED.into_iter().chain(own).chain(mounts) {
        let ran = attack(&mut sandbox, &session, name);
        check_stopped(&ran.stdout, name, "a session");
        assert_ne!(ran.code, Some(0), "{name}: {ran:?}");
    }
}

#[test]
fn session_reaches_neither_host_nor_rest_of_sandbox() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = open(&mut sandbox);
    let host = Secret::new();
    let token = "only-the-sandbox-has-this";
    assert_eq!(sandbox.run(&format!("echo {token} > /tmp/secret; sleep 31337 &")).code, Some(0));
    for (path, token) in [(host.path().as_str(), host.token.as_str()), ("/tmp/secret", token)] {
        for way in READS {
            let name = format!("{way}:{path}:{token}");
            check_stopped(&attack(&mut sandbox, &session, &name).stdout, &name, "a session");
        }
    }
    let seen = attack(&mut sandbox, &session, "find-process:31337");
    check_stopped(&seen.stdout, "find-process", "a session");
    let other = open(&mut sandbox);
    let hide = json!({"code": format!("echo {token} > /tmp/secret; echo {token} > /w/secret")});
    sandbox.request_inside("POST", &format!("v1/isolated/session/{other}/run"), &hide);
    for path in ["/tmp/secret", "/w/secret"] {
        for way in READS {
            let name = format!("{way}:{path}:{token}");
            check_stopped(&attack(&mut sandbox, &session, &name).stdout, &name, "another session");
        }
    }
}

#[test]
fn subverted_agent_with_a_namespace_broker_gains_nothing() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    open(&mut sandbox);
    let secret = Secret::new();
    let reads = READS.map(|way| format!("{way}:{}:{}", secret.path(), secret.token));
    let attacks: Vec<String> = REFUSED.map(str::to_owned).into_iter().chain(reads).collect();
    let agent = host::agent_pid(&sandbox.id).expect("its agent runs");
    let verdicts = attack_from_process(agent, agent, &attacks);
    for name in &attacks {
        check_stopped(verdicts.get(name).map_or("was not tried", String::as_str), name, "the agent");
    }
}

#[test]
fn command_cannot_reach_the_namespace_broker() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    for name in ["trace 2", "read-memory 2", "steal-descriptor 2", "overwrite-binary 2", "join-namespaces 2"]
    {
        let ran = sandbox.run(&format!("/opt/attacks {name}"));
        check_stopped(&ran.stdout, name, "a command");
    }
    // Where the kernel confines signals to a Landlock domain, the process cannot even be killed.
    let ran = sandbox.run("/opt/attacks signal 2");
    assert!(!ran.stdout.starts_with("broken"), "{ran:?}");
}

fn signal_namespace_broker(sandbox: &RemoteSandbox, signal: &str) {
    let broker = host::namespace_broker_pid(&sandbox.id).expect("it runs").to_string();
    let sent =
        std::process::Command::new("kill").args([signal, &broker]).status().expect("there is a `kill`");
    assert!(sent.success());
}

#[test]
fn killed_namespace_broker_affects_only_new_sessions() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = open(&mut sandbox);
    signal_namespace_broker(&sandbox, "-KILL");
    let reported =
        sandbox.request_inside("POST", "v1/isolated/session", &json!({"workspace": {"path": "/w"}}));
    assert!(reported.status >= 400, "{}", reported.text());
    let reported = sandbox.request_inside("GET", "v1/isolated/capabilities", &serde_json::Value::Null).json();
    assert_eq!(reported["available"], false, "{reported}");
    let kept = attack(&mut sandbox, &session, "mount-tmpfs");
    check_stopped(&kept.stdout, "mount-tmpfs", "a session that continues");
    assert_eq!(sandbox.run("echo well").stdout, "well\n");
}

#[test]
fn stopped_namespace_broker_delays_requests_for_a_bounded_time() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    signal_namespace_broker(&sandbox, "-STOP");
    let reported =
        sandbox.request_inside("POST", "v1/isolated/session", &json!({"workspace": {"path": "/w"}}));
    assert!(reported.status >= 400, "{}", reported.text());
    let ran = sandbox.run("echo well");
    assert_eq!(ran.stdout, "well\n");
    assert!(ran.took < std::time::Duration::from_secs(2) * e2e::slowness_factor(), "{ran:?}");
}

/// The process may mount and make namespaces, which is its work. That gives no access to the host.
#[test]
fn subverted_namespace_broker_gains_no_host_file_or_kernel_access() {
    if !testkit::needs_root() {
        return;
    }
    const BEYOND: [&str; 13] = [
        "mount-cgroup-release-agent",
        "clone-user-namespace",
        "user-namespace-then-mount",
        "socket:raw",
        "socket:packet",
        "socket:netfilter",
        "bpf",
        "add-key",
        "userfaultfd",
        "perf",
        "kernel-log",
        "make-device:block",
        "set-clock",
    ];
    let server = TestServer::start();
    let sandbox = sandbox_with_isolated_sessions(&server);
    let secret = Secret::new();
    let reads = READS.map(|way| format!("{way}:{}:{}", secret.path(), secret.token));
    let attacks: Vec<String> = BEYOND.map(str::to_owned).into_iter().chain(reads).collect();
    let agent = host::agent_pid(&sandbox.id).expect("its agent runs");
    let broker = host::namespace_broker_pid(&sandbox.id).expect("it runs");
    let verdicts = attack_from_process(agent, broker, &attacks);
    for name in &attacks {
        check_stopped(
            verdicts.get(name).map_or("was not tried", String::as_str),
            name,
            "the namespace broker",
        );
    }
}
