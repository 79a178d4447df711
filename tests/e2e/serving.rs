//! A server as its clients see it: images, its log, other users.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, ORDINARY_USER, TestUser};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// A root filesystem with one program, which no other image has.
fn root_filesystem(directory: &Path) {
    let bin = directory.join("bin");
    fs::create_dir_all(&bin).expect("our own directory");
    fs::copy(ProgramCopies::shared().attacks_path(), bin.join("only-here")).expect("our own directory");
}

fn import(server: &TestServer, name: &str, source: &Path) {
    let mut command = ProgramCopies::shared().command();
    command.args(["image", "import", name]).arg(source).arg("--state-dir").arg(server.state_directory());
    let ended: CommandOutput = command.output().expect("the binary runs").into();
    assert_eq!(ended.code, Some(0), "{name} was not imported: {ended:?}");
}

#[test]
fn an_imported_image_makes_sandboxes_with_its_programs() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let work = TestUser::Same.make_home();
    let tree = work.path().join("tree");
    root_filesystem(&tree);
    let archive = work.path().join("root.tar");
    let packed = Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".").status();
    assert!(packed.expect("there is a tar").success());
    for (name, source) in [("from-directory", tree.as_path()), ("from-tar:v1", archive.as_path())] {
        import(&server, name, source);
        let mut sandbox = server.create_sandbox_with(&json!({
            "image": {"uri": name},
            "entrypoint": ["/bin/only-here", "daemon", "3600"],
        }));
        let ran = sandbox.run_argv(&["/bin/only-here", "flood", "4"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "ffffsucceeded: all was taken\n"), "{ran:?}");
        let absent = sandbox.run_argv(&["/usr/bin/env"]);
        assert_ne!(absent.code, Some(0), "the host's own programs are in {name}: {absent:?}");
    }
    // No other image has the program.
    assert_ne!(server.create_sandbox().run_argv(&["/bin/only-here", "flood", "4"]).code, Some(0));
}

/// The log has its most verbose level, and requests of every kind are sent, valid and invalid.
#[test]
fn no_key_or_token_is_logged() {
    const KEY: &str = "a-key-of-the-operator-0123456789";
    let server =
        server_builder(TestUser::Same).env("CORACLE_API_KEY", KEY).env("CORACLE_LOG", "trace").start();
    let wrong = "a-key-of-somebody-else-987654321";
    server.add_secret(wrong);
    let with = |key: &str| vec![("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())];
    let mut client = server.client();
    client.set_headers(&with(wrong));
    assert_eq!(client.get("/v1/sandboxes").expect("the server answers").status, 401);
    client.set_headers(&with(KEY));
    let request = json!({
        "image": {"uri": "host"}, "timeout": 600, "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
    });
    let id = client.post("/v1/sandboxes", &request).expect("the server answers").json()["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let path = format!("/v1/sandboxes/{id}/endpoints/44772?use_server_proxy=true");
    let endpoint = client.get(&path).expect("the server answers").json();
    let headers: Vec<(String, String)> = endpoint["headers"]
        .as_object()
        .expect("a token is needed")
        .iter()
        .map(|(name, value)| (name.clone(), value.as_str().unwrap_or_default().to_owned()))
        .collect();
    let mut inside = server.client();
    inside.set_headers(&headers);
    for (_, token) in &headers {
        server.add_secret(token);
    }
    let below = format!("/v1/sandboxes/{id}/proxy/44772");
    let ran = inside.post(&format!("{below}/command"), &json!({"command": "echo ran"}));
    assert!(ran.expect("the server answers").text().contains("ran"));
    for path in ["files/info?path=/root", "files/download?path=/no/such", "command/status/none", "ping"] {
        inside.get(&format!("{below}/{path}")).expect("the server answers");
    }
    inside.set_headers(&[(headers[0].0.clone(), "not-the-token-of-this-sandbox".to_owned())]);
    server.add_secret("not-the-token-of-this-sandbox");
    inside.get(&format!("{below}/ping")).expect("the server answers");
    assert_eq!(client.delete(&format!("/v1/sandboxes/{id}")).expect("the server answers").status, 204);
    // The log is searched when the server ends.
    assert!(server.log().matches("\"request completed\"").count() >= 8, "the log is too quiet");
}

/// A server as a certain user; only root has all limits.
fn server_builder(user: TestUser) -> ServerBuilder {
    let start = ServerBuilder::new().as_user(user);
    if user == TestUser::Same && testkit::is_root() {
        start
    } else {
        start.env("CORACLE_REQUIRE_LIMITS", "false")
    }
}

#[test]
fn an_ordinary_users_server_makes_sandboxes_too() {
    let user = if testkit::is_root() { ORDINARY_USER } else { TestUser::Same };
    let server = server_builder(user).start();
    let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
    let ran = sandbox.run("id -u; echo to stderr >&2; exit 3");
    assert_eq!(
        (ran.code, ran.stdout.as_str(), ran.stderr.as_str()),
        (Some(3), "0\n", "to stderr\n"),
        "{ran:?}"
    );
    let content: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    sandbox.upload("/root/binary file", &content);
    let read = sandbox.request_inside("GET", "files/download?path=/root/binary%20file", &Value::Null);
    assert_eq!(read.status, 200, "{}", read.text());
    assert!(read.body == content, "{} bytes came back", read.body.len());
    assert_eq!(sandbox.run("stat -c %s '/root/binary file'").stdout, "300000\n");
    // A limit that cannot be enforced is refused by name, not ignored.
    let named = json!({
        "image": {"uri": "host"}, "timeout": 600, "entrypoint": ["tail", "-f", "/dev/null"],
        "resourceLimits": {"memory": "64Mi"},
    });
    let answer = server.client().post("/v1/sandboxes", &named).expect("the server answers");
    assert!(answer.status >= 400 && answer.text().contains("memory"), "{} {}", answer.status, answer.text());
    let id = sandbox.id.clone();
    sandbox.delete();
    let gone = server.client().get(&format!("/v1/sandboxes/{id}")).expect("the server answers");
    assert_eq!(gone.status, 404);
    let mode = fs::metadata(server.state_directory()).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o022, 0, "others can write to the state directory");
}

/// The official SDKs always send limits. Those that are their defaults do not keep an ordinary user
/// from making sandboxes, and the report says that nothing enforces them.
#[test]
fn sdk_default_limits_do_not_refuse_an_ordinary_users_sandbox() {
    let user = if testkit::is_root() { ORDINARY_USER } else { TestUser::Same };
    let server = server_builder(user).start();
    let held = server.client().get("/coracle/v1/capabilities").expect("the server answers").json();
    if held["limits"].to_string().contains("memory") {
        return testkit::skip_test("this ordinary user has a delegated control group");
    }
    let limits = json!({"cpu": "1", "memory": "2Gi"});
    let sandbox = server.create_sandbox_with(&json!({"resourceLimits": limits}));
    let path = format!("/coracle/v1/sandboxes/{}", sandbox.id);
    let report = server.client().get(&path).expect("the server answers").json();
    assert!(report["weaker"].to_string().contains("memory"), "{report}");
    let named = json!({
        "image": {"uri": "host"}, "timeout": 600, "entrypoint": ["tail", "-f", "/dev/null"],
        "resourceLimits": {"cpu": "1", "memory": "1Gi"},
    });
    let refused = server.client().post("/v1/sandboxes", &named).expect("the server answers");
    assert!(refused.status >= 400 && refused.text().contains("limit on memory"), "{}", refused.text());
    let strict = ServerBuilder::new().as_user(user).start();
    let all = json!({
        "image": {"uri": "host"}, "timeout": 600, "entrypoint": ["tail", "-f", "/dev/null"],
        "resourceLimits": limits,
    });
    let refused = strict.client().post("/v1/sandboxes", &all).expect("the server answers");
    assert!(refused.status >= 400 && refused.text().contains("limit on memory"), "{}", refused.text());
    let log = strict.log();
    assert!(
        log.contains("every sandbox is refused") && log.contains("CORACLE_REQUIRE_LIMITS=false"),
        "{log}"
    );
}

#[test]
fn a_server_that_cannot_open_its_database_ends_with_an_error() {
    let home = TestUser::Same.make_home();
    let server = home.path().join("state/server");
    fs::create_dir_all(&server).expect("our own directory");
    fs::set_permissions(home.path().join("state"), fs::Permissions::from_mode(0o711)).expect("our own");
    fs::write(server.join("coracle.db"), "this is no database\n".repeat(500)).expect("our own directory");
    let mut process = ServerBuilder::new().spawn(home.path());
    let pid = rustix::process::Pid::from_child(&process);
    let (ended, waiting) = std::sync::mpsc::channel();
    let waits = std::thread::spawn(move || {
        let status = process.wait().expect("it is our child");
        ended.send(status).expect("the test thread receives it");
    });
    let status = waiting.recv_timeout(std::time::Duration::from_secs(60)).unwrap_or_else(|_| {
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is our child");
        panic!("the supervisor continues without a server")
    });
    waits.join().expect("it has sent");
    assert_eq!(status.code(), Some(1));
}
