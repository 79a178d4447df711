//! Names and beginnings of ids on the command line.

use std::process::{Output, Stdio};

use e2e::binary::Programs;
use e2e::server::Server;
use serde_json::{Value, json};

fn coracle(server: &Server, words: &[&str]) -> Output {
    let mut command = Programs::shared().command();
    command.args(["--url", &format!("http://{}", server.address())]).args(words).stdin(Stdio::null());
    command.output().expect("the binary runs")
}

/// What a command that must succeed prints.
fn text(server: &Server, words: &[&str]) -> String {
    let output = coracle(server, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it is text").trim_end().to_owned()
}

fn read_json(server: &Server, words: &[&str]) -> Value {
    let text = text(server, &[&["--json"], words].concat());
    serde_json::from_str(&text).expect("it is JSON")
}

/// The error of a command that must fail.
fn refusal(server: &Server, words: &[&str]) -> String {
    let output = coracle(server, words);
    assert!(!output.status.success(), "{words:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_command_takes_a_name_or_a_unique_prefix() {
    let server = Server::start();
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
    assert_eq!(header, ["ID", "NAME", "IMAGE", "STATE", "AGE", "EXPIRES", "LABELS"]);
    assert!(shown.contains("my box") && shown.contains("team=search"), "{shown}");
    let listed = server.client().get("/v1/sandboxes").expect("an answer").json();
    assert_eq!(listed["items"][0]["extensions"]["coracle.key"], "my box", "{listed}");
    assert_eq!(text(&server, &["rm", "my box"]), id);
    assert!(refusal(&server, &["inspect", "my box"]).contains("no sandbox has the id or name `my box`"));
}

#[test]
fn ambiguous_prefix_lists_candidates_and_acts_on_none() {
    let server = Server::start();
    let mut ids: Vec<String> = Vec::new();
    // Ids begin with one of 26 letters, so two of 27 begin alike.
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
    // In the API a name or a prefix is nothing.
    let answer = server.client().get(&format!("/v1/sandboxes/{}", &ids[0][..9])).expect("an answer");
    assert_eq!(answer.status, 404);
    text(&server, &["rm", "--all"]);
}

#[test]
fn snapshots_and_volumes_are_found_by_name_and_prefix() {
    if !testkit::needs_root() {
        return;
    }
    let server = Server::start();
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
