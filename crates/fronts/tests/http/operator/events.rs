//! The feed of events.

use domain::Owner;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;
use testkit::test_server::TestServer;

use crate::setup::{
    OPERATOR_KEY, create_without_front, expect_error, issue_key, start, start_with_keys, with_key,
};

/// The phases in a piece of the feed.
fn phases(text: &str) -> Vec<String> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = data.map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.map(|event| event["phase"].as_str().unwrap_or("other").to_owned()).collect()
}

/// Reads a stream until it has shown a phase; `false` if it ends before.
async fn shows(stream: &mut Incoming, phase: &str) -> bool {
    while let Some(frame) = stream.frame().await {
        let bytes = frame.unwrap().into_data().unwrap();
        if phases(std::str::from_utf8(&bytes).unwrap()).iter().any(|shown| shown == phase) {
            return true;
        }
    }
    false
}

#[tokio::test]
async fn events_are_read_from_a_cursor_on() {
    let server = start().await;
    let sandbox = create_without_front(&server, &Owner::operator()).await;
    server.service.sandbox(&sandbox.owner, &sandbox.id).unwrap().destroy().await.unwrap();
    let read = async |query: &str| server.get(&format!("/coracle/v1/events?follow=false{query}")).await;
    let all = read("").await;
    assert_eq!(all.header("content-type"), Some("text/event-stream"));
    assert_eq!(phases(all.text()), ["starting", "running", "stopping", "stopped"]);
    assert_eq!(phases(read("&after=2").await.text()), ["stopping", "stopped"]);
    assert_eq!(phases(read("&tail=1").await.text()), ["stopped"]);
    for query in ["&after=x", "&after=-1", "&tail=x"] {
        expect_error(&read(query).await, 400, "INVALID_CURSOR");
    }
}

async fn follow(server: &TestServer, key: &str) -> Incoming {
    with_key(server, key, "GET", "/coracle/v1/events").send_and_stream().await.into_body()
}

#[tokio::test]
async fn stream_ends_when_its_key_is_revoked_and_shows_only_the_owners_sandboxes() {
    let server = start_with_keys(|_| {}).await;
    let (id, key) = issue_key(&server, "one").await;
    issue_key(&server, "one").await;
    let (mut own, mut all) = (follow(&server, &key).await, follow(&server, OPERATOR_KEY).await);
    let foreign = create_without_front(&server, &Owner::parse("other").unwrap()).await;
    server.service.sandbox(&foreign.owner, &foreign.id).unwrap().destroy().await.unwrap();
    assert!(shows(&mut all, "stopped").await);
    let sandbox = create_without_front(&server, &Owner::parse("one").unwrap()).await;
    // The first event that the owner sees is of the own sandbox, which still runs.
    assert!(shows(&mut own, "running").await);
    assert!(server.service.revoke_key(&id).await.unwrap());
    server.service.sandbox(&sandbox.owner, &sandbox.id).unwrap().destroy().await.unwrap();
    assert!(!shows(&mut own, "stopped").await, "a revoked key still receives events");
    assert!(shows(&mut all, "stopped").await);
}
