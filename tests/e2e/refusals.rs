//! Requests that the server refuses: the error names the limit or the state and has a useful hint.

use std::process::{Output, Stdio};

use e2e::binary::ProgramCopies;
use e2e::run::ORDINARY_USER;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

fn coracle(server: &TestServer, words: &[&str]) -> Output {
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &format!("http://{}", server.address())]).args(words).stdin(Stdio::null());
    command.output().expect("the binary runs")
}

/// The output of a command that must succeed.
fn text(server: &TestServer, words: &[&str]) -> String {
    let output = coracle(server, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it is text").trim_end().to_owned()
}

/// The error of a command that must fail.
fn refusal(server: &TestServer, words: &[&str]) -> String {
    let output = coracle(server, words);
    assert!(!output.status.success(), "{words:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The line of a table that begins with this word.
fn row(table: &str, name: &str) -> String {
    let line = table.lines().find(|line| line.split_whitespace().next() == Some(name));
    line.unwrap_or_else(|| panic!("no row `{name}`: {table}")).to_owned()
}

#[test]
fn pause_without_control_groups_is_refused_and_changes_nothing() {
    if !testkit::is_root() {
        return testkit::skip_test("it needs root to be another user");
    }
    if std::env::var_os("CORACLE_TEST_DELEGATED").is_some() {
        return testkit::skip_test("sandboxes in a delegated group can be paused");
    }
    let server = ServerBuilder::new().as_user(ORDINARY_USER).env("CORACLE_REQUIRE_LIMITS", "false").start();
    let id = text(&server, &["create", "--key", "a"]);
    let said = refusal(&server, &["pause", "a"]);
    assert!(said.contains("this host cannot pause sandboxes"), "{said}");
    assert!(said.contains("hint: ") && said.contains("`coracle doctor`"), "{said}");
    let answer = server.client().post(&format!("/v1/sandboxes/{id}/pause"), &json!({}));
    let answer = answer.expect("the server answers");
    assert_eq!((answer.status, answer.json()["code"].as_str()), (501, Some("SANDBOX::API_NOT_SUPPORTED")));
    assert_eq!(text(&server, &["exec", "a", "--", "echo", "runs"]), "runs");
    assert!(row(&text(&server, &["inspect", "a"]), "phase").ends_with("running"));
}

#[test]
fn limits_out_of_bounds_are_refused_with_the_bound() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    for (flag, value, message, hint) in [
        ("--memory", "1m", "memory of 1Mi is less than the 4Mi", "hint: name at least 4Mi"),
        ("--disk", "1m", "disk of 1Mi is less than the 8Mi", "hint: name at least 8Mi"),
        ("--pids", "10000000", "pids of 10000000 is more than the 4194304", "hint: name at most 4194304"),
        ("--cpus", "10000", "`10000` is more than 1000 cores", ""),
    ] {
        let said = refusal(&server, &["create", flag, value]);
        assert!(said.contains(message) && said.contains(hint), "{flag}: {said}");
        // The command line itself refuses values that are not a number of cores.
        assert!(flag == "--cpus" || said.contains("(400)"), "{flag}: {said}");
    }
    text(&server, &["create", "--pids", "4194304", "--disk", "8m"]);
    let small = refusal(&server, &["volume", "create", "v", "--size", "1m"]);
    assert!(small.contains("less than the 8Mi") && small.contains("hint: name at least 8Mi"), "{small}");
}

#[test]
fn exec_in_a_paused_or_dead_sandbox_says_how_to_continue() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let id = text(&server, &["create", "--key", "a"]);
    text(&server, &["pause", "a"]);
    let said = refusal(&server, &["exec", "a", "--", "true"]);
    assert!(said.contains("while it is paused") && said.contains("`coracle resume`"), "{said}");
    text(&server, &["resume", "a"]);
    kill_agent(&server, &id);
    let said = refusal(&server, &["exec", &id, "--", "true"]);
    assert!(said.contains("while it is failed") && said.contains("`coracle restart`"), "{said}");
    let shown = text(&server, &["inspect", &id]);
    assert!(row(&shown, "phase").ends_with("failed (agent died)"), "{shown}");
    let report: Value = serde_json::from_str(&text(&server, &["--json", "inspect", &id])).expect("JSON");
    assert_eq!((&report["phase"], &report["cause"]), (&json!("failed"), &json!("agent died")));
}

/// Kills the first process of a sandbox, and waits until the server has noticed.
fn kill_agent(server: &TestServer, id: &str) {
    let record = std::fs::read(server.state_directory().join("boxes").join(id)).expect("it has a record");
    let record: Value = serde_json::from_slice(&record).expect("it is JSON");
    let pid = record["process"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("it lives");
    let pid = rustix::process::Pid::from_raw(pid).expect("it is one");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it can be killed");
    e2e::eventually("the server has noticed", || {
        let answer = server.client().get(&format!("/v1/sandboxes/{id}")).expect("an answer");
        answer.json()["status"]["state"] == "Failed"
    });
}

#[test]
fn inspect_shows_how_the_main_process_ended() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox_with(&json!({"entrypoint": ["sh", "-c", "exit 3"]}));
    e2e::eventually("it has exited", || {
        row(&text(&server, &["inspect", &sandbox.id]), "phase").ends_with("exited (code 3)")
    });
}

#[test]
fn owner_that_may_have_no_sandboxes_gets_a_clear_error() {
    let config = tempfile::NamedTempFile::new().expect("the temporary directory can be written");
    std::fs::write(config.path(), "[owners.default]\nsandboxes = 0\n").expect("our own file");
    let path = config.path().to_str().expect("it is UTF-8");
    let server = ServerBuilder::new().argument("--config").argument(path).start();
    let said = refusal(&server, &["create"]);
    assert!(said.contains("owner `default` may have no sandboxes"), "{said}");
    assert!(said.contains("hint: the operator can change the quota of this owner"), "{said}");
}

#[test]
fn every_line_of_a_json_log_is_json_until_the_end() {
    let mut server = TestServer::start();
    text(&server, &["create"]);
    assert!(server.terminate().success());
    let log = server.log();
    for line in log.lines() {
        let parsed: Result<Value, _> = serde_json::from_str(line);
        assert!(parsed.is_ok_and(|line| line.is_object()), "{line}");
    }
    assert!(log.contains("1 sandbox stays"), "{log}");
    // Restarts the server, so that it can remove the sandbox.
    server.restart(&ServerBuilder::new());
}
