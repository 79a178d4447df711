//! Names and id prefixes on the command line.

use std::process::{Output, Stdio};

use e2e::binary::ProgramCopies;
use e2e::server::TestServer;
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

fn read_json(server: &TestServer, words: &[&str]) -> Value {
    let text = text(server, &[&["--json"], words].concat());
    serde_json::from_str(&text).expect("it is JSON")
}

/// The error of a command that must fail.
fn refusal(server: &TestServer, words: &[&str]) -> String {
    let output = coracle(server, words);
    assert!(!output.status.success(), "{words:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_command_takes_a_name_or_a_unique_prefix() {
    let server = TestServer::start();
    let id = text(&server, &["create", "--key", "my box", "--label", "team=search"]);
    let prefix = &id[..9];
    for reference in [id.as_str(), "my box", prefix] {
        assert_eq!(text(&server, &["exec", reference, "--", "echo", "hello"]), "hello", "{reference}");
        assert_eq!(read_json(&server, &["inspect", reference])["id"], json!(id));
        assert!(read_json(&server, &["usage", reference]).is_array());
        let file = server.directory().join("out");
        let path = file.to_str().expect("it is text");
        text(&server, &["exec", reference, "-c", "echo inside > /tmp/f"]);
        text(&server, &["cp", &format!("{reference}:/tmp/f"), path]);
        assert_eq!(std::fs::read_to_string(&file).expect("it was copied"), "inside\n");
        text(&server, &["cp", path, &format!("{reference}:/tmp/g")]);
        let process = text(&server, &["exec", "-d", reference, "--", "echo", "logged"]);
        assert!(text(&server, &["logs", "-f", reference, &process]).contains("logged"));
    }
    let shown = text(&server, &["ls"]);
    let header: Vec<&str> = shown.lines().next().expect("a header").split_whitespace().collect();
    assert_eq!(header, ["ID", "NAME", "IMAGE", "PHASE", "AGE", "EXPIRES", "LABELS"]);
    assert!(shown.contains("my box") && shown.contains("team=search"), "{shown}");
    let listed = server.client().get("/v1/sandboxes").expect("an answer").json();
    assert_eq!(listed["items"][0]["extensions"]["coracle.key"], "my box", "{listed}");
    assert_eq!(text(&server, &["rm", "my box"]), id);
    assert!(refusal(&server, &["inspect", "my box"]).contains("no sandbox has the id or name `my box`"));
}

#[test]
fn ambiguous_prefix_lists_candidates_and_acts_on_none() {
    let server = TestServer::start();
    let mut ids: Vec<String> = Vec::new();
    // Ids begin with one of 26 letters, so two of 27 share their first letter.
    let shared = loop {
        ids.push(text(&server, &["create"]));
        let newest = ids.last().expect("one was made");
        let alike: Vec<&String> = ids.iter().filter(|id| id[..1] == newest[..1]).collect();
        if alike.len() > 1 {
            break alike[0][..1].to_owned();
        }
    };
    for words in [["rm", &shared], ["inspect", &shared]] {
        let why = refusal(&server, &words);
        assert!(why.contains(&format!("`{shared}` could mean 2 sandboxes")), "{why}");
        assert!(ids.iter().filter(|id| id.starts_with(&shared)).all(|id| why.contains(id.as_str())), "{why}");
        assert!(why.contains("hint: "), "{why}");
    }
    assert_eq!(text(&server, &["ls", "-q"]).lines().count(), ids.len());
    // The API accepts no names or prefixes.
    let answer = server.client().get(&format!("/v1/sandboxes/{}", &ids[0][..9])).expect("an answer");
    assert_eq!(answer.status, 404);
    text(&server, &["rm", "--all"]);
}

#[test]
fn snapshots_and_volumes_are_found_by_name_and_prefix() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    text(&server, &["create", "--key", "source"]);
    let snapshot = text(&server, &["snapshot", "create", "source", "--name", "daily"]);
    for reference in [snapshot.as_str(), "daily", &snapshot[..8]] {
        assert_eq!(read_json(&server, &["snapshot", "inspect", reference])["id"], json!(snapshot));
    }
    assert_eq!(read_json(&server, &["snapshot", "ls", "--sandbox", "source"])[0]["id"], json!(snapshot));
    let made = text(&server, &["create", "--snapshot", "daily"]);
    assert_eq!(read_json(&server, &["inspect", &made])["snapshot"], json!(snapshot));
    text(&server, &["rm", &made]);
    text(&server, &["snapshot", "create", "source", "--name", "daily"]);
    assert!(refusal(&server, &["snapshot", "rm", "daily"]).contains("could mean 2 snapshots"));
    assert_eq!(text(&server, &["snapshot", "rm", &snapshot]), snapshot);
    text(&server, &["snapshot", "rm", "daily"]);

    text(&server, &["volume", "create", "data", "--size", "64m"]);
    let volume = read_json(&server, &["volume", "inspect", "data"]);
    let id = volume["id"].as_str().expect("it has an id");
    assert_eq!(read_json(&server, &["volume", "inspect", &id[..8]])["name"], "data");
    assert_eq!(text(&server, &["volume", "rm", &id[..8]]), "data");
}

/// The row of a process in `ps`, by its id.
fn process_row(server: &TestServer, words: &[&str], id: &str) -> Option<Value> {
    let listed = read_json(server, &[&["ps"], words].concat());
    listed.as_array().expect("it is a list").iter().find(|row| row["id"] == id).cloned()
}

#[test]
fn ps_shows_commands_sessions_and_contexts_and_kill_ends_their_trees() {
    let server = TestServer::start();
    let id = text(&server, &["create", "--key", "busy"]);
    let spin = "sleep 1000 & while :; do :; done";
    let command = text(&server, &["exec", "-d", "busy", "-c", spin]);
    let mut client = server.client();
    let execd = format!("/v1/sandboxes/{id}/proxy/44772");
    let session = client.post(&format!("{execd}/session"), &json!({})).expect("an answer").json();
    let session = session["session_id"].as_str().expect("it has an id").to_owned();
    let context = client.post(&format!("{execd}/code/context"), &json!({"language": "bash"}));
    let context = context.expect("an answer").json();
    let context = context["id"].as_str().expect("it has an id").to_owned();

    e2e::eventually("the command has used the processor", || {
        process_row(&server, &["busy"], &command).is_some_and(|row| row["cpuMillis"].as_u64() >= Some(50))
    });
    let row = process_row(&server, &["busy"], &command).expect("it runs");
    assert_eq!((&row["kind"], &row["state"]), (&json!("command"), &json!("running")), "{row}");
    assert!(row["text"] == spin && row["startedAt"].is_string(), "{row}");
    assert!(row["memoryBytes"].as_u64() > Some(100 << 10) && row["processes"] == 2, "{row}");
    for (id, kind) in [(&session, "session"), (&context, "context")] {
        let row = process_row(&server, &["busy"], id).expect("it is open");
        assert_eq!((&row["kind"], &row["state"]), (&json!(kind), &json!("idle")), "{row}");
        assert!(row["memoryBytes"].is_u64(), "{row}");
    }
    assert!(text(&server, &["ps", "busy"]).starts_with("PROCESS "));

    // The child in the background ends with its command, for any part of the id.
    assert_eq!(text(&server, &["kill", "busy", &command[..12]]), command);
    e2e::eventually("the command has ended with all it started", || {
        process_row(&server, &["busy"], &command).is_none()
    });
    let row = process_row(&server, &["busy", "--all"], &command).expect("the ended process is still listed");
    assert_eq!(row["state"], "ended", "{row}");
    assert!(refusal(&server, &["kill", "busy", &command]).contains("hint: "));
    assert!(refusal(&server, &["kill", "busy", "ffff", "--signal", "TERM"]).contains("no process"));
    assert!(refusal(&server, &["kill", "--signal", "NONSENSE", "busy", &session]).contains("signal"));
    text(&server, &["kill", "--signal", "KILL", "busy", &session, &context]);
    e2e::eventually("their shells have ended", || {
        [&session, &context]
            .iter()
            .all(|id| process_row(&server, &["busy"], id).is_some_and(|row| row.get("memoryBytes").is_none()))
    });
}

#[test]
fn pause_resume_extend_and_url_take_names() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let id = text(&server, &["create", "--key", "web", "--timeout", "5m", "--idle-timeout", "90m"]);
    assert_eq!(text(&server, &["pause", "web"]), id);
    assert_eq!(read_json(&server, &["inspect", "web"])["phase"], "paused");
    assert!(refusal(&server, &["pause", "web"]).contains("hint: "));
    assert_eq!(text(&server, &["resume", "web"]), id);
    assert_eq!(read_json(&server, &["inspect", "web"])["phase"], "running");
    assert!(refusal(&server, &["resume", "web"]).contains("hint: "));

    let before = read_json(&server, &["inspect", "web"])["expiresAt"].as_str().map(str::to_owned);
    let extended = read_json(&server, &["extend", "web", "2h"]);
    assert!(extended["expiresAt"].as_str() > before.as_deref(), "{extended}");
    let shown = text(&server, &["inspect", "web"]);
    for words in ["(in ", "1h30m", "web", "1.0 GiB by ", "B of ", "cpu time used", " ago)"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let endless = text(&server, &["create"]);
    let why = refusal(&server, &["extend", &endless, "1h"]);
    assert!(why.contains("hint: only a sandbox created with a timeout can be renewed"), "{why}");

    text(
        &server,
        &["exec", "-d", "web", "-c", "cd /tmp && echo served > f && exec python3 -m http.server 8123"],
    );
    let url = text(&server, &["url", "web", "8123"]);
    assert_eq!(url, format!("http://{}/v1/sandboxes/{id}/proxy/8123/", server.address()));
    let signed = text(&server, &["url", "web", "8123", "--signed", "1h"]);
    assert!(signed.starts_with(url.trim_end_matches('/')) && signed.len() > url.len(), "{signed}");
    let path = signed.strip_prefix(&format!("http://{}", server.address())).expect("it is at the server");
    e2e::eventually("the port answers", || {
        server.client().get(&format!("{path}f")).is_ok_and(|answer| answer.text() == "served\n")
    });
    assert!(refusal(&server, &["url", "web", "0"]).contains("0"));
}

#[test]
fn events_can_begin_with_the_last_ones() {
    let server = TestServer::start();
    for _ in 0..2 {
        let id = text(&server, &["create"]);
        text(&server, &["rm", &id]);
    }
    let all: Vec<String> = text(&server, &["--json", "events"]).lines().map(str::to_owned).collect();
    assert!(all.len() >= 4, "{all:?}");
    let last: Vec<String> =
        text(&server, &["--json", "events", "--tail", "2"]).lines().map(str::to_owned).collect();
    assert_eq!(last, all[all.len() - 2..]);
    assert_eq!(text(&server, &["events", "--tail", "0"]), "");
    assert!(text(&server, &["events", "--tail", "1"]).contains(" default "));
}
