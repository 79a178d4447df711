//! Tables of the host that no control group divides: open files, terminals and inotify instances. One sandbox
//! must not use them up.

use std::path::Path;

use e2e::run::{ORDINARY_USER, RunCommand, all_users, attack_outside};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

fn kernel_number(path: &str) -> u64 {
    let text = std::fs::read_to_string(path).expect("a kernel file");
    text.trim().parse().expect("a number")
}

fn file_max() -> u64 {
    kernel_number("/proc/sys/fs/file-max")
}

#[test]
fn open_files_of_all_processes_together_fit_into_the_hosts_table() {
    const PIDS: u64 = 4096;
    let limit = (file_max() / (2 * PIDS)).max(1024);
    let beyond = (limit + 100).to_string();
    let outside = attack_outside(&["eat", "descriptors", &beyond]);
    if outside.code != Some(0) {
        return testkit::skip_test("the host's own limit on open files is lower than that of a sandbox");
    }
    for user in all_users() {
        let run = RunCommand::new(user).with_attacks().flag("--pids", &PIDS.to_string());
        let ended = run.run_argv(&["/attacks/attacks", "eat", "descriptors", &beyond]);
        assert!(ended.stdout.starts_with("stopped: open: EMFILE after"), "{user:?}: {ended:?}");
        let shown = run.run_shell("ulimit -Hn").stdout;
        assert_eq!(shown.trim(), limit.to_string(), "{user:?}");
    }
}

#[test]
fn terminals_are_limited_for_each_sandbox_and_session() {
    let outside = attack_outside(&["eat", "terminals", "33"]);
    assert_eq!(outside.code, Some(0), "the attack does not work outside: {outside:?}");
    let stopped = "stopped: open: ENOSPC after 32";
    for user in all_users() {
        let ended =
            RunCommand::new(user).with_attacks().run_argv(&["/attacks/attacks", "eat", "terminals", "33"]);
        assert!(ended.stdout.starts_with(stopped), "{user:?}: {ended:?}");
    }
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox =
        server.create_sandbox_with(&json!({"extensions": {"bootstrap.execd.isolation": "enable"}}));
    sandbox.upload_attacks();
    let answer = sandbox.request_inside("POST", "v1/isolated/session", &json!({"workspace": {"path": "/w"}}));
    let session = answer.json()["session_id"].as_str().expect("an id").to_owned();
    let code = json!({"code": "/opt/attacks eat terminals 33"});
    let answer = sandbox.request_inside("POST", &format!("v1/isolated/session/{session}/run"), &code);
    assert!(answer.text().contains(stopped), "{}", answer.text());
}

#[test]
fn one_sandbox_of_an_ordinary_user_leaves_inotify_instances_to_the_others() {
    if !testkit::needs_root() {
        return;
    }
    let limit = kernel_number("/proc/sys/user/max_inotify_instances") / 4;
    let beyond = (limit + 1).to_string();
    let outside = attack_outside(&["eat", "watchers", &beyond]);
    assert_eq!(outside.code, Some(0), "the attack does not work outside: {outside:?}");
    let run = RunCommand::new(ORDINARY_USER).with_attacks();
    let ended = run.run_argv(&["/attacks/attacks", "eat", "watchers", &beyond]);
    assert!(ended.stdout.starts_with(&format!("stopped: inotify_init1: EMFILE after {limit}")), "{ended:?}");
}

/// Checks that a sandbox with more than a hundredth of the host's files lives while the server allows that, and
/// is ended by a server that does not.
fn check_ended_for_files(attack: &str) {
    if file_max() > 10_000_000 {
        return testkit::skip_test("this host's table of open files cannot be filled");
    }
    let begin = |server: &TestServer| -> (RemoteSandbox, String) {
        let mut sandbox = server.create_sandbox();
        sandbox.upload_attacks();
        let command = sandbox.start_background(&format!("tail -f /dev/null | {attack}"));
        (sandbox, command)
    };
    let lenient = TestServer::start();
    let (mut sandbox, command) = begin(&lenient);
    e2e::eventually("the files are open", || sandbox.logs(&command).contains("holding"));
    assert_eq!(sandbox.run("echo alive").stdout, "alive\n");
    drop(lenient);

    let strict = ServerBuilder::new().env("CORACLE_LIMITS_OPEN_FILES_PERCENT", "1").start();
    let mut neighbour = strict.create_sandbox();
    let (sandbox, _) = begin(&strict);
    let status = || strict.client().get(&format!("/v1/sandboxes/{}", sandbox.id)).expect("an answer").json();
    e2e::eventually("the sandbox is ended", || status()["status"]["state"] == "Failed");
    let message = status()["status"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("too many open files"), "{message}");
    assert!(strict.log().contains(
        "host is about to run out of open files; ending the largest sandbox of the owner with the most"
    ));
    assert_eq!(neighbour.run("echo alive").stdout, "alive\n");
}

#[test]
fn sandbox_with_most_open_files_is_ended_before_the_hosts_table_is_full() {
    if testkit::needs_root() {
        let processes = file_max() / 100 / 1000 + 5;
        check_ended_for_files(&format!("/opt/attacks eat descriptors 1000 {processes}"));
    }
}

#[test]
fn files_that_wait_in_sockets_are_found_too() {
    if testkit::needs_root() {
        let files = file_max() / 100 + 5000;
        check_ended_for_files(&format!("/opt/attacks eat files-in-flight {files}"));
    }
}

/// The limit itself is checked: reaching it would take half of the TCP memory of this host.
#[test]
fn tcp_buffers_of_all_sandboxes_are_limited() {
    if !testkit::needs_root() {
        return;
    }
    let mounts = std::fs::read_to_string("/proc/mounts").expect("a kernel file");
    let memory = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| {
        words.get(2) == Some(&"cgroup") && words[3].split(',').any(|option| option == "memory")
    });
    let Some(memory) = memory else {
        return testkit::skip_test("cgroup v2 counts TCP buffers with the memory of a sandbox");
    };
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let instances = std::fs::read_dir(Path::new(memory[1]).join("coracle")).expect("the server made it");
    let group = instances
        .flatten()
        .map(|entry| entry.path())
        .find(|group| group.join(format!("{}.cmd", sandbox.id)).is_dir())
        .expect("the sandbox has a group");
    let limit = kernel_number(&group.join("memory.kmem.tcp.limit_in_bytes").to_string_lossy());
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").expect("a kernel file");
    let pages: u64 =
        text.split_whitespace().nth(2).and_then(|word| word.parse().ok()).expect("three numbers");
    assert!(limit <= pages * rustix::param::page_size() as u64 / 2, "{limit} of {pages} pages");
}
