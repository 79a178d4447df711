//! Errors and warnings as users see them: each says what was attempted, why it failed and what helps.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use e2e::binary::ProgramCopies;
use e2e::run::{ORDINARY_USER, RunCommand, TestUser, all_users};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn coracle(server: &TestServer, args: &[&str]) -> Output {
    let url = format!("http://{}", server.address());
    ProgramCopies::shared()
        .command()
        .args(["--url", &url])
        .args(args)
        .output()
        .expect("the binary can be run")
}

/// Runs `serve` with these arguments as a user, until it fails.
fn failing_serve(user: TestUser, args: &[&str]) -> String {
    let home = user.make_home();
    let mut command = ProgramCopies::shared().command();
    command.arg("serve").args(args).env("HOME", home.path()).env("CORACLE_NETWORK_DEFAULT", "off");
    user.apply_to(&mut command);
    let output = command.output().expect("the binary can be run");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    text(&output.stderr)
}

#[test]
fn taken_port_has_a_hint() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback can be bound");
    let address = taken.local_addr().expect("it is bound").to_string();
    let home = TestUser::Same.make_home();
    let state = home.path().join("state");
    let state = state.to_str().expect("it is UTF-8");
    let said = failing_serve(TestUser::Same, &["--listen", &address, "--state-dir", state]);
    assert!(said.contains(&format!("could not listen on {address}")), "{said}");
    assert!(said.contains("hint: another program listens there") && said.contains("--listen"), "{said}");
}

#[test]
fn unwritable_state_directory_has_a_hint() {
    if !testkit::is_root() {
        return testkit::skip_test("changing the user needs root");
    }
    let closed = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .expect("the temporary directory can be written");
    let state = closed.path().join("state");
    let state = state.to_str().expect("it is UTF-8");
    let said = failing_serve(ORDINARY_USER, &["--listen", "127.0.0.1:0", "--state-dir", state]);
    assert!(said.contains(&format!("state directory `{state}`")), "{said}");
    assert!(said.contains("hint: choose a directory that you may write to"), "{said}");
    let ended = RunCommand::new(ORDINARY_USER).state(closed.path()).run_argv(&["true"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("hint: choose a directory that you may write to"), "{ended:?}");
    assert!(!said.contains("another server uses"), "{said}");
}

#[test]
fn memory_too_small_to_start_is_refused_with_the_minimum() {
    if !testkit::is_root() {
        return testkit::skip_test("limits on memory need root here");
    }
    let refused = RunCommand::new(TestUser::Same).flag("--memory", "1m").run_argv(&["true"]);
    assert_eq!(refused.code, Some(125), "{refused:?}");
    assert!(refused.stderr.contains("memory of 1Mi is less than the 4Mi"), "{refused:?}");
    assert!(refused.stderr.contains("hint: name at least 4Mi"), "{refused:?}");
    let least =
        RunCommand::new(TestUser::Same).flag("--memory", "4m").run_argv(&["sh", "-c", "echo started"]);
    assert_eq!((least.code, least.stdout.as_str()), (Some(0), "started\n"), "{least:?}");
    let server = TestServer::start();
    let request = json!({"image": {"uri": "host"}, "resourceLimits": {"memory": "1Mi"},
        "entrypoint": ["tail", "-f", "/dev/null"]});
    let answer = server.client().post("/v1/sandboxes", &request).expect("the server answers");
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("memory of 1Mi is less than the 4Mi"), "{}", answer.text());
}

#[test]
fn create_errors_begin_with_the_attempted_action() {
    let server = TestServer::start();
    let output = coracle(&server, &["create", "--image", "nothing-like-this"]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.starts_with("error: could not create the sandbox\n"), "{said}");
    assert!(said.contains("nothing-like-this") && !said.contains("backend"), "{said}");
}

#[test]
fn request_above_the_whole_quota_does_not_suggest_deleting() {
    let config = tempfile::NamedTempFile::new().expect("the temporary directory can be written");
    std::fs::write(config.path(), "[owners.default]\nmemory = \"256Mi\"\n").expect("our own file");
    let path = config.path().to_str().expect("it is UTF-8");
    let server = ServerBuilder::new().argument("--config").argument(path).start();
    let output = coracle(&server, &["create", "--memory", "512m"]);
    let said = text(&output.stderr);
    assert!(
        said.contains("512Mi memory exceeds the whole quota of owner `default`: 256Mi allowed"),
        "{said}"
    );
    assert!(said.contains("hint: request a smaller limit") && !said.contains("delete"), "{said}");
    assert!(coracle(&server, &["create", "--memory", "256m"]).status.success());
}

#[test]
fn usage_of_an_error_does_not_show_url_as_required() {
    for (args, usage) in [
        (&["exec"][..], "Usage: coracle exec [OPTIONS] <SANDBOX>"),
        (&["--url", "http://127.0.0.1:1", "cp", "x"], "Usage: coracle cp [OPTIONS] <SRC> <DST>"),
    ] {
        let mut command = ProgramCopies::shared().command();
        let output = command.args(args).env("CORACLE_URL", "http://127.0.0.1:1").output();
        let output = output.expect("the binary can be run");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(usage) && !said.contains("--url"), "{said}");
    }
}

#[test]
fn doctor_and_run_agree_on_processes() {
    for user in all_users() {
        let home = user.make_home();
        let mut doctor = ProgramCopies::shared().command();
        doctor
            .args(["--json", "doctor", "--state-dir"])
            .arg(home.path().join("state"))
            .env("HOME", home.path());
        user.apply_to(&mut doctor);
        let report: Value = serde_json::from_slice(&doctor.output().expect("the binary can be run").stdout)
            .expect("it is JSON");
        let enforced = report["enforced"].as_array().expect("a list");
        let pids = enforced.iter().find(|measure| measure["what"] == "pids").expect("it is listed");
        assert!(pids["by"].is_string(), "{user:?}: {pids}");
        let run = RunCommand::new(user).flag("--pids", "20");
        let fine = run.run_argv(&["sh", "-c", "echo fine"]);
        assert_eq!((fine.code, fine.stdout.as_str()), (Some(0), "fine\n"), "{user:?}: {fine:?}");
        let run = RunCommand::new(user).flag("--pids", "20").flag("--timeout", "60s");
        let bomb = run.run_argv(&["sh", "-c", "for i in $(seq 60); do sleep 50 & done; echo unbounded"]);
        assert!(!bomb.stdout.contains("unbounded"), "{user:?}: {bomb:?}");
        let run = RunCommand::new(user).flag("--pids", "100").flag("--timeout", "60s");
        let fewer = run.run_argv(&["sh", "-c", "for i in $(seq 60); do sleep 50 & done; echo enough"]);
        assert!(fewer.stdout.contains("enough"), "{user:?}: {fewer:?}");
    }
}

#[test]
fn an_ordinary_users_run_has_one_warning_or_none() {
    if !testkit::is_root() {
        return testkit::skip_test("changing the user needs root");
    }
    if std::env::var_os("CORACLE_TEST_DELEGATED").is_some() {
        return testkit::skip_test("limits are enforced in a delegated group, so there is no warning");
    }
    let ended = RunCommand::new(ORDINARY_USER).run_argv(&["true"]);
    let warnings: Vec<&str> = ended.stderr.lines().collect();
    assert_eq!(warnings.len(), 1, "{ended:?}");
    let parts = ["warning: ", "no limit on memory", "no limit on cpus", "`coracle doctor`"];
    assert!(parts.iter().all(|part| warnings[0].contains(part)), "{ended:?}");
    let quiet = RunCommand::new(ORDINARY_USER).switch("--quiet").run_argv(&["sh", "-c", "echo said >&2"]);
    assert_eq!((quiet.code, quiet.stderr.as_str()), (Some(0), "said\n"), "{quiet:?}");
}
