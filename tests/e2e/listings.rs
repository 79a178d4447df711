//! The lists and errors that the command line shows to operators and owners.

use std::process::{Output, Stdio};

use e2e::binary::ProgramCopies;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

const OPERATOR: &str = "the-operators-own-key";

fn coracle(url: &str, key: &str, words: &[&str]) -> Output {
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", url]).args(words).env("CORACLE_API_KEY", key).stdin(Stdio::null());
    command.output().expect("the binary runs")
}

fn address(server: &TestServer) -> String {
    format!("http://{}", server.address())
}

/// Standard output and standard error of a command that must succeed.
fn successful_output(server: &TestServer, key: &str, words: &[&str]) -> (String, String) {
    let output = coracle(&address(server), key, words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{words:?}: {stderr}");
    (stdout, stderr)
}

/// The error of a command that must fail.
fn refusal(url: &str, key: &str, words: &[&str]) -> String {
    let output = coracle(url, key, words);
    assert!(!output.status.success(), "{words:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A key for an owner, and its id.
fn key_of(server: &TestServer, owner: &str) -> (String, String) {
    let made = successful_output(server, OPERATOR, &["--json", "key", "create", owner]).0;
    let made: Value = serde_json::from_str(&made).expect("it is JSON");
    let text = |name: &str| made[name].as_str().expect("it is text").to_owned();
    (text("key"), text("id"))
}

fn with_keys() -> TestServer {
    ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start()
}

#[test]
fn operators_see_the_owner_in_ls_top_and_events() {
    let server = with_keys();
    let (key, _) = key_of(&server, "team");
    let (theirs, _) = successful_output(&server, &key, &["create", "--key", "theirs"]);
    let (own, _) = successful_output(&server, OPERATOR, &["create", "--key", "own"]);
    let shown = |key: &str, words: &[&str]| successful_output(&server, key, words).0;
    let header = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    let row = |text: &str, id: &str| {
        let row = text.lines().find(|line| line.contains(id)).map(str::to_owned);
        row.unwrap_or_else(|| panic!("{id} is not in\n{text}"))
    };

    let (plain, all) = (shown(OPERATOR, &["ls"]), shown(OPERATOR, &["ls", "--all-owners"]));
    let columns = ["ID", "NAME", "OWNER", "IMAGE", "PHASE", "AGE", "EXPIRES", "LABELS"];
    for text in [&plain, &all] {
        assert_eq!(header(text).split_whitespace().collect::<Vec<_>>(), columns, "{text}");
        assert!(row(text, &own).contains(" default ") && row(text, &own).contains(" running "), "{text}");
    }
    assert!(!plain.contains(&theirs) && row(&all, &theirs).contains(" team "), "{plain}\n{all}");
    let tenants = shown(&key, &["ls"]);
    assert!(!header(&tenants).contains("OWNER") && row(&tenants, &theirs).contains(" running "), "{tenants}");

    let top = shown(OPERATOR, &["top", "--once", "--every", "100ms"]);
    assert!(header(&top).contains("OWNER") && row(&top, &theirs).contains(" team "), "{top}");
    let events = shown(OPERATOR, &["events"]);
    assert!(row(&events, &theirs).contains(" team ") && row(&events, &own).contains(" default "), "{events}");
    successful_output(&server, OPERATOR, &["rm", "--all", "--all-owners"]);
}

#[test]
fn operators_socket_says_how_to_name_owners() {
    let server = with_keys();
    let socket = format!("unix:{}", server.state_directory().join("operator.sock").display());
    for words in [&["ls"][..], &["snapshot", "ls"], &["pool", "ls"]] {
        let why = refusal(&socket, "", words);
        assert!(why.contains("hint: ") && why.contains("--all-owners"), "{words:?}: {why}");
    }
    let why = refusal(&socket, "", &["rm", "nosuch"]);
    assert!(why.contains("`coracle ls --all-owners` lists the sandboxes"), "{why}");
}

#[test]
fn key_rm_takes_a_prefix_and_says_whether_sandboxes_stay() {
    let server = with_keys();
    let ((key, first), (_, second)) = (key_of(&server, "team"), key_of(&server, "team"));
    let (_, operators) = key_of(&server, "default");
    successful_output(&server, &key, &["create"]);
    let remove = |id: &str| successful_output(&server, OPERATOR, &["key", "rm", "--and-sandboxes", id]);

    let unknown = refusal(&address(&server), OPERATOR, &["key", "rm", "--and-sandboxes", "-", ""]);
    assert!(unknown.contains("there is no such key") && !unknown.contains("sandbox"), "{unknown}");
    let stay = "owner `team` still has 1 other valid key: its sandboxes stay";
    // Ids are random, so the first eight characters of two differ.
    assert_eq!(remove(&first[..8]), (first, stay.to_owned()));
    let stay = "owner `default` is the operator of the server: its sandboxes stay";
    assert_eq!(remove(&operators), (operators, stay.to_owned()));
    let gone = "owner `team` has no valid key left: 1 sandbox removed";
    assert_eq!(remove(&second), (second, gone.to_owned()));
    assert!(successful_output(&server, OPERATOR, &["ls", "-q", "--all-owners"]).0.is_empty());
}

#[test]
fn names_are_written_in_full_and_release_takes_an_id() {
    let server = TestServer::start();
    let url = address(&server);
    let text = |words: &[&str]| successful_output(&server, "", words).0;
    let linux = text(&["create", "--key", "build-linux"]);
    text(&["create", "--key", "build-mac"]);
    // The beginning of one name only, which must not be enough to remove it.
    for words in [&["rm", "build-l"][..], &["release", "build-l"], &["exec", "build-l", "--", "true"]] {
        let why = refusal(&url, "", words);
        assert!(why.contains("`build-l`"), "{words:?}: {why}");
    }
    assert_eq!(text(&["exec", &linux[..8], "--", "echo", "it runs"]), "it runs");
    let released = |reference: &str| {
        let told: Value = serde_json::from_str(&text(&["--json", "release", reference])).expect("it is JSON");
        told
    };
    assert_eq!(released(&linux), json!({"name": "build-linux", "released": true}));
    assert_eq!(released("build-mac"), json!({"name": "build-mac", "released": true}));
    let nameless = text(&["create"]);
    let why = refusal(&url, "", &["release", &nameless]);
    assert!(why.contains("has no name that could be released") && why.contains("hint: "), "{why}");
    let why = refusal(&url, "", &["release", "nosuch"]);
    assert!(why.contains("no sandbox has the id or name `nosuch`"), "{why}");
    text(&["rm", "--all"]);
}

#[test]
fn logs_of_a_session_are_those_of_its_newest_run() {
    let server = TestServer::start();
    let url = address(&server);
    let id = successful_output(&server, "", &["create", "--key", "busy"]).0;
    let mut client = server.client();
    let execd = format!("/v1/sandboxes/{id}/proxy/44772");
    let session = client.post(&format!("{execd}/session"), &json!({})).expect("an answer").json();
    let session = session["session_id"].as_str().expect("it has an id").to_owned();
    let why = refusal(&url, "", &["logs", "busy", &session]);
    assert!(why.contains("nothing was run in session"), "{why}");
    for number in [1, 2] {
        let run = json!({"command": format!("echo run {number}")});
        client.post(&format!("{execd}/session/{session}/run"), &run).expect("an answer");
    }
    assert_eq!(successful_output(&server, "", &["logs", "busy", &session]).0, "run 2");

    // Hints name commands that can be entered.
    let unknown = "f".repeat(32);
    for words in [&["logs", "busy", &unknown][..], &["kill", "busy", "ffff"]] {
        let why = refusal(&url, "", words);
        assert!(why.contains(&format!("`coracle ps --all {id}`")), "{words:?}: {why}");
    }
    let why = refusal(&url, "", &["kill", "-s", "FOO", "busy", &session]);
    assert!(why.contains("FOO") && why.contains("TERM") && !why.contains("body"), "{why}");
}

#[test]
fn inspect_shows_each_row_once() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let text = |words: &[&str]| successful_output(&server, "", words).0;
    text(&["create", "--key", "source"]);
    text(&["snapshot", "create", "source", "--name", "daily"]);
    let made = text(&["create", "--snapshot", "daily", "--memory", "64m"]);
    let shown = text(&["inspect", &made]);
    let mut names: Vec<&str> = shown.lines().filter_map(|line| line.split("  ").next()).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "{shown}");
    assert!(shown.contains("64.0 MiB by "), "{shown}");
    text(&["volume", "create", "data", "--size", "16m"]);
    for words in [&["volume", "ls"][..], &["volume", "inspect", "data"]] {
        assert!(text(words).contains("16.0 MiB"), "{}", text(words));
    }
    assert!(text(&["volume", "ls"]).starts_with("NAME  ID "), "{}", text(&["volume", "ls"]));
    text(&["rm", "--all"]);
}
