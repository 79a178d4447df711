//! `coracle image` against a server, without one, and images that are made from sandboxes.

use std::fs;
use std::path::Path;
use std::process::Command;

use e2e::binary::ProgramCopies;
use e2e::http::HttpClient;
use e2e::run::{CommandOutput, TestUser};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

const OPERATOR: &str = "the-operators-own-key";

fn keyed() -> TestServer {
    // The server removes its sandboxes when the test ends, which would fail without the key.
    ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).env("CORACLE_ON_STOP", "remove").start()
}

fn client(server: &TestServer, key: &str) -> HttpClient {
    let mut client = server.client();
    client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
    client
}

/// A key of another owner.
fn tenant(server: &TestServer) -> String {
    let issued = client(server, OPERATOR).post("/coracle/v1/keys", &json!({"owner": "tenant"}));
    let key = issued.expect("the server answers").json()["key"].as_str().expect("a key").to_owned();
    server.add_secret(&key);
    key
}

fn command(server: &TestServer, key: &str, arguments: &[&str]) -> Command {
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &format!("http://{}", server.address())]).args(arguments);
    command.env("CORACLE_API_KEY", key);
    command
}

fn coracle(server: &TestServer, arguments: &[&str]) -> CommandOutput {
    command(server, OPERATOR, arguments).output().expect("the binary runs").into()
}

fn ok(server: &TestServer, arguments: &[&str]) -> String {
    let ended = coracle(server, arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    ended.stdout.trim().to_owned()
}

/// A root file system with one program under two names.
fn root_filesystem(directory: &Path) {
    fs::create_dir_all(directory.join("bin")).expect("our own directory");
    fs::copy(ProgramCopies::shared().coracle_path(), directory.join("bin/tool")).expect("our own directory");
    fs::hard_link(directory.join("bin/tool"), directory.join("bin/same")).expect("our own directory");
}

#[test]
fn image_commands_work_on_the_server_that_is_named() {
    let server = keyed();
    let work = TestUser::Same.make_home();
    let tree = work.path().join("tree");
    root_filesystem(&tree);
    let archive = work.path().join("root.tar");
    let packed = Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".").status();
    assert!(packed.expect("there is a tar").success());
    for (name, source) in [("from-directory", &tree), ("from-tar:v1", &archive)] {
        let said = ok(&server, &["image", "import", name, source.to_str().expect("a plain path")]);
        assert!(said.starts_with(name), "{said}");
        let again = coracle(&server, &["image", "import", name, source.to_str().expect("a plain path")]);
        assert!(again.code == Some(1) && again.stderr.contains("already"), "{again:?}");
    }
    let state = server.state_directory();
    assert!(fs::read_dir(state.join("server/downloads")).is_ok_and(|mut left| left.next().is_none()));
    let listed: Value = serde_json::from_str(&ok(&server, &["--json", "image", "ls"])).expect("it is JSON");
    let names: Vec<&str> =
        listed.as_array().into_iter().flatten().filter_map(|one| one["name"].as_str()).collect();
    assert_eq!(names, ["host", "from-directory", "from-tar:v1"]);
    let sizes: Vec<u64> =
        listed.as_array().into_iter().flatten().filter_map(|one| one["bytes"].as_u64()).collect();
    let program = fs::metadata(ProgramCopies::shared().coracle_path()).expect("it is there").len();
    assert!(sizes[1] < program * 3 / 2, "the second name of the program is a link: {sizes:?}");
    assert!(ok(&server, &["image", "inspect", "from-directory"]).contains("layer:"));
    assert_eq!(ok(&server, &["image", "rm", "from-tar:v1"]), "from-tar:v1");
    let gone = coracle(&server, &["image", "rm", "from-tar:v1"]);
    assert!(gone.code == Some(1) && gone.stderr.contains("from-tar:v1"), "{gone:?}");
    assert!(ok(&server, &["image", "gc"]).contains("layers removed"));
    // A file that is not an archive is refused and leaves nothing.
    let wrong = work.path().join("wrong");
    fs::write(&wrong, "no archive").expect("our own directory");
    let refused = coracle(&server, &["image", "import", "wrong", wrong.to_str().expect("a plain path")]);
    assert!(refused.code == Some(1) && refused.stderr.contains("archive"), "{refused:?}");

    let key = tenant(&server);
    for arguments in [&["image", "ls"][..], &["image", "gc"], &["image", "commit", &"a".repeat(20), "x"]] {
        let foreign: CommandOutput =
            command(&server, &key, arguments).output().expect("the binary runs").into();
        assert!(foreign.code == Some(1) && foreign.stderr.contains("operator"), "{arguments:?}: {foreign:?}");
    }
}

#[test]
fn without_a_server_the_state_directory_is_used_and_named() {
    if std::net::TcpStream::connect("127.0.0.1:8080").is_ok() {
        testkit::skip_test("something listens where a server would by default");
        return;
    }
    let home = TestUser::Same.make_home();
    let state = home.path().join("state");
    let run = |arguments: &[&str]| -> CommandOutput {
        let mut command = ProgramCopies::shared().command();
        command.args(arguments).env("CORACLE_STATE_DIR", &state).env_remove("CORACLE_URL");
        command.output().expect("the binary runs").into()
    };
    let listed = run(&["image", "ls"]);
    assert!(listed.code == Some(0) && listed.stdout.contains("host"), "{listed:?}");
    let said = format!("no server answers; working on the state directory `{}`", state.display());
    assert!(listed.stderr.contains(&said), "{listed:?}");
    // An explicit directory prints no notice, and an explicit server is required to answer.
    let named = run(&["image", "ls", "--state-dir", state.to_str().expect("a plain path")]);
    assert!(named.code == Some(0) && named.stderr.is_empty(), "{named:?}");
    let unreachable = run(&["image", "ls", "--url", "http://127.0.0.1:1"]);
    assert!(unreachable.code == Some(1) && unreachable.stderr.contains("127.0.0.1:1"), "{unreachable:?}");
    let commit = run(&["image", "commit", &"a".repeat(20), "x"]);
    assert!(commit.code == Some(1) && commit.stderr.contains("coracle serve"), "{commit:?}");
}

/// Changes of every kind: added, removed, replaced, ownership changed.
const CHANGE: &str = "set -e; echo mine > /root/file; mkdir -p /srv/data; echo x > /srv/data/x; chown 33:33 /srv/data/x; \
    printf '#!/bin/sh\necho tool\n' > /usr/local/bin/own-tool; chmod 755 /usr/local/bin/own-tool; \
    rm /etc/shells; rm -rf /usr/share/doc; mkdir /usr/share/doc; touch /usr/share/doc/only; mkfifo /tmp/pipe";
const CHECK: &str = "cat /root/file; stat -c %u:%g /srv/data/x; own-tool; test ! -e /etc/shells; ls /usr/share/doc; \
    test ! -e /tmp/pipe && python3 --version >/dev/null 2>&1; test -x /usr/bin/env && echo whole";
const FOUND: &str = "mine\n33:33\ntool\nonly\nwhole\n";

/// Creates a sandbox over HTTP with a key, and runs shell text in it through the command line.
fn run_in(server: &TestServer, key: &str, body: &Value, text: &str) -> String {
    let made = client(server, key).post("/v1/sandboxes", body).expect("the server answers");
    assert_eq!(made.status, 202, "{}", made.text());
    let id = made.json()["id"].as_str().expect("an id").to_owned();
    let ran: CommandOutput =
        command(server, key, &["exec", &id, "-c", text]).output().expect("the binary runs").into();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.stdout
}

fn create_request(image: &str) -> Value {
    json!({"image": {"uri": image}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"]})
}

#[test]
fn committed_image_serves_pools_and_other_owners() {
    if !testkit::needs_root() {
        return;
    }
    let server = keyed();
    let id = ok(&server, &["create", "--key", "builder"]);
    ok(&server, &["exec", &id, "-c", CHANGE]);
    let made = coracle(&server, &["image", "commit", "builder", "made:1"]);
    assert!(made.code == Some(0) && made.stdout.starts_with("made:1 ("), "{made:?}");
    assert!(made.stderr.contains("every owner"), "{made:?}");
    let taken = coracle(&server, &["image", "commit", &id, "made:1"]);
    assert!(taken.code == Some(1) && taken.stderr.contains("image rm"), "{taken:?}");
    // Nothing is left of the intermediate snapshot, and the sandbox continues.
    assert_eq!(ok(&server, &["--json", "snapshot", "ls"]), "[]");
    assert_eq!(ok(&server, &["exec", &id, "--", "cat", "/root/file"]), "mine");

    let key = tenant(&server);
    assert_eq!(run_in(&server, &key, &create_request("made:1"), CHECK), FOUND);
    ok(&server, &["pool", "create", "p", "--image", "made:1", "--level", "1"]);
    e2e::eventually("one is warm", || {
        let pool = client(&server, OPERATOR).get("/v1/pools/p").expect("the server answers").json();
        pool["status"]["available"] == 1
    });
    let warm = json!({
        "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"], "extensions": {"poolRef": "p"},
    });
    assert_eq!(run_in(&server, &key, &warm, CHECK), FOUND);
    let inspected = ok(&server, &["image", "inspect", "made:1"]);
    assert!(inspected.contains("this host's files"), "{inspected}");

    // One more on top, from a snapshot of a sandbox of the first; the layers of the first stay.
    let second = ok(&server, &["create", "--image", "made:1"]);
    ok(&server, &["exec", &second, "-c", "rm /root/file; echo second > /root/second"]);
    let snapshot = ok(&server, &["snapshot", "create", &second]);
    ok(&server, &["image", "commit", &snapshot, "made:2"]);
    ok(&server, &["pool", "rm", "p"]);
    ok(&server, &["rm", "--all"]);
    ok(&server, &["image", "rm", "made:1"]);
    ok(&server, &["image", "gc"]);
    let text = "cat /root/second; test ! -e /root/file && own-tool";
    assert_eq!(run_in(&server, &key, &create_request("made:2"), text), "second\ntool\n");
    let from = json!({"snapshotId": snapshot, "resourceLimits": {}});
    assert_eq!(run_in(&server, OPERATOR, &from, text), "second\ntool\n");
}

#[test]
fn commit_refuses_missing_and_foreign_sandboxes() {
    if !testkit::needs_root() {
        return;
    }
    let server = keyed();
    let key = tenant(&server);
    let foreign =
        client(&server, &key).post("/v1/sandboxes", &create_request("host")).expect("the server answers");
    let foreign = foreign.json()["id"].as_str().expect("an id").to_owned();
    for id in [foreign.as_str(), &"a".repeat(20), "ffffffff-ffff-4fff-bfff-ffffffffffff"] {
        let refused = coracle(&server, &["image", "commit", id, "x"]);
        assert!(refused.code == Some(1) && refused.stderr.contains(id), "{refused:?}");
    }
    let own = ok(&server, &["create"]);
    for name in ["host", "Not A Name"] {
        let refused = coracle(&server, &["image", "commit", &own, name]);
        assert!(refused.code == Some(1) && refused.stderr.contains(name), "{refused:?}");
    }
    let mut operator = client(&server, OPERATOR);
    for body in [json!({}), json!({"name": "x"}), json!({"name": "x", "sandbox": "../x"})] {
        let answer = operator.post("/coracle/v1/images/commit", &body).expect("the server answers");
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
    }
}
