//! The log of what sandboxes tried to reach.

use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use domain::{Owner, PolicyAction, PolicyEdit, PolicyRule, SandboxId};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use service::{NetworkRecord, NetworkRecordKind};
use testkit::fake_backend::FakeBackend;
use testkit::test_server::TestServer;

use crate::setup::{
    OPERATOR_KEY, UNKNOWN_ID, create_without_front, expect_error, issue_key, start, start_with,
    start_with_keys, with_key,
};

fn record(number: u64, verdict: PolicyAction) -> NetworkRecord {
    NetworkRecord {
        number,
        time: UNIX_EPOCH + Duration::from_secs(number),
        kind: NetworkRecordKind::Connection,
        name: Some("a.example.org".to_owned()),
        address: Some("192.0.2.1:443".parse().unwrap()),
        verdict,
        reason: "default".to_owned(),
        bytes_sent: 0,
        bytes_received: 0,
    }
}

/// A server with one sandbox, of which every second connection was denied.
async fn with_records(count: u64) -> (TestServer, SandboxId) {
    let server = start().await;
    let id = create_without_front(&server, &Owner::operator()).await.id;
    for number in 1..=count {
        let verdict = if number % 2 == 0 { PolicyAction::Deny } else { PolicyAction::Allow };
        server.backend.add_network_record(&id, record(number, verdict));
    }
    (server, id)
}

fn path(id: &SandboxId, query: &str) -> String {
    format!("/coracle/v1/sandboxes/{id}/network?{query}")
}

fn numbers(page: &Value) -> Vec<u64> {
    page["records"].as_array().unwrap().iter().map(|record| record["number"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn log_is_read_in_pages_and_by_verdict() {
    let (server, id) = with_records(7).await;
    let page = server.get(&path(&id, "limit=3")).await.expect(200);
    assert_eq!((numbers(&page), &page["next"], &page["dropped"]), (vec![1, 2, 3], &json!(3), &json!(0)));
    assert_eq!(
        page["records"][0],
        json!({
            "number": 1, "time": "1970-01-01T00:00:01Z", "kind": "connection", "verdict": "allow",
            "reason": "default", "bytesSent": 0, "bytesReceived": 0, "name": "a.example.org",
            "address": "192.0.2.1", "port": 443,
        })
    );
    let page = server.get(&path(&id, "after=3&denied=true")).await.expect(200);
    assert_eq!((numbers(&page), &page["next"]), (vec![4, 6], &json!(7)));
    server.backend.drop_network_records(&id, 5);
    let page = server.get(&path(&id, "after=1")).await.expect(200);
    assert_eq!((numbers(&page), &page["dropped"]), (vec![6, 7], &json!(4)));
    for query in ["after=x", "limit=0", "follow=perhaps"] {
        expect_error(&server.get(&path(&id, query)).await, 400, "INVALID_CURSOR");
    }
    let unknown = format!("/coracle/v1/sandboxes/{UNKNOWN_ID}/network");
    expect_error(&server.get(&unknown).await, 404, "SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn log_is_followed_from_the_last_seen_record_to_the_end_of_the_sandbox() {
    let (server, id) = with_records(3).await;
    let request = server.request("GET", &path(&id, "follow=true")).header("last-event-id", "2");
    let answer = request.send_and_stream().await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut stream = answer.into_body();
    let mut next = async || {
        let frame = stream.frame().await?.unwrap().into_data().unwrap();
        Some(String::from_utf8(frame.to_vec()).unwrap())
    };
    let first = next().await.unwrap();
    assert!(first.starts_with("id: 3\nevent: record\n"), "{first}");
    server.backend.add_network_record(&id, record(4, PolicyAction::Deny));
    server.backend.drop_network_records(&id, 3);
    let second = next().await.unwrap();
    assert!(second.contains("id: 4\n") && second.contains("\"verdict\":\"deny\""), "{second}");
    server.service.sandbox_of(None, &id).unwrap().destroy().await.unwrap();
    assert_eq!(next().await, None);
}

#[tokio::test]
async fn log_belongs_to_the_owner_and_the_operator() {
    let server = start_with_keys(|_| {}).await;
    let (_, key) = issue_key(&server, "one").await;
    let (_, other) = issue_key(&server, "other").await;
    let id = create_without_front(&server, &Owner::parse("one").unwrap()).await.id;
    for (key, status) in [(key.as_str(), 200), (OPERATOR_KEY, 200), (other.as_str(), 404)] {
        assert_eq!(with_key(&server, key, "GET", &path(&id, "")).send().await.status, status);
    }
}

#[tokio::test]
async fn host_without_a_filter_has_no_log() {
    let backend = FakeBackend::new();
    backend.filtered.store(false, Ordering::Relaxed);
    let server = start_with(backend, |_| {}, |_| {}).await;
    let id = create_without_front(&server, &Owner::operator()).await.id;
    let refused = server.get(&path(&id, "")).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["code"]), (501, &json!("NOT_SUPPORTED")));
}

#[tokio::test]
async fn report_of_a_filtered_sandbox_has_its_policy() {
    let (server, id) = with_records(0).await;
    let at = format!("/coracle/v1/sandboxes/{id}");
    assert_eq!(server.get(&at).await.expect(200).get("policy"), None);
    let rule = PolicyRule { action: PolicyAction::Allow, target: "*.example.org:443".parse().unwrap() };
    let sandbox = server.service.sandbox_of(None, &id).unwrap();
    sandbox.network().edit_policy(PolicyEdit::Merge(vec![rule])).await.unwrap();
    let report = server.get(&at).await.expect(200);
    assert_eq!(
        report["policy"],
        json!({"mode": "enforcing", "defaultAction": "deny", "rules": ["allow *.example.org:443"]})
    );
    assert_eq!(report["inForce"]["network"], "filtered by name");
}
