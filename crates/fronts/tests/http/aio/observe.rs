//! The usage of a sandbox. The fake backend measures what the tests set.

use std::io::Read;

use serde_json::{Value, json};

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

const OBSERVE: &str = "/v1/sandbox/observe";

async fn post(sandbox: &AioSandbox<'_>, operation: &str, body: Value) -> Value {
    sandbox.post(&format!("{OBSERVE}/{operation}"), body).await.expect(200)["data"].clone()
}

#[tokio::test]
async fn session_begins_ends_and_is_exported() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let status = sandbox.get(&format!("{OBSERVE}/status")).await.expect(200);
    assert_eq!((&status["data"]["mode"], &status["data"]["session_id"]), (&json!("guardrail"), &json!(null)));
    let begin = json!({"duration_seconds": 60, "idempotency_key": "k"});
    let session = post(&sandbox, "start", begin.clone()).await;
    assert_eq!((&session["mode"], &session["interval_seconds"]), (&json!("capture"), &json!(10.0)));
    assert_eq!(post(&sandbox, "start", begin).await, session);
    let second = sandbox.post(&format!("{OBSERVE}/start"), json!({})).await;
    second.expect(409);
    let stopped = post(&sandbox, "stop", json!({"session_id": session["session_id"]})).await;
    assert_eq!((&stopped["session_id"], &stopped["stopped"]), (&session["session_id"], &json!(true)));
    sandbox.post(&format!("{OBSERVE}/stop"), json!({})).await.expect(404);
    let report = post(&sandbox, "export", json!({"idempotency_key": "e", "reason": "test"})).await;
    assert_eq!(report["session_id"], session["session_id"]);
    assert_eq!(post(&sandbox, "export", json!({"idempotency_key": "e"})).await, report);
    let listed = sandbox.get(&format!("{OBSERVE}/reports")).await.expect(200);
    assert_eq!(listed["data"], json!([report]));
    // The report says where it is.
    let path = report["path"].as_str().unwrap();
    let content = sandbox.get(path).await;
    assert_eq!((content.status.as_u16(), content.header("content-type")), (200, Some("application/gzip")));
    let mut text = String::new();
    flate2::read::GzDecoder::new(&content.body[..]).read_to_string(&mut text).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&document["reason"], &document["report_id"]), (&json!("test"), &report["report_id"]));
    assert!(document["samples"].is_array(), "{document}");
    sandbox.request("DELETE", path).send().await.expect(200);
    sandbox.get(path).await.expect(404);
}

#[tokio::test]
async fn exports_with_one_key_at_the_same_time_make_one_report() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let export = || post(&sandbox, "export", json!({"idempotency_key": "e"}));
    let (first, second, third) = tokio::join!(export(), export(), export());
    assert_eq!((&first, &second), (&second, &third));
    let listed = sandbox.get(&format!("{OBSERVE}/reports")).await.expect(200);
    assert_eq!(listed["data"], json!([first]));
}

#[tokio::test]
async fn live_figures_are_measured_or_null() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let live = sandbox.get(&format!("{OBSERVE}/live?top_rows=3")).await.expect(200)["data"].clone();
    assert_eq!(live["top_processes"], json!([]));
    assert_eq!(live["cgroup"]["memory_slab_bytes"], json!(null));
    let events = live["recent_events"].as_array().unwrap();
    assert_eq!(events.last().unwrap()["data"]["phase"], "running", "{live}");
}

#[tokio::test]
async fn sessions_and_reports_belong_to_one_sandbox() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let (one, two) = (AioSandbox::create(&server, "one").await, AioSandbox::create(&server, "two").await);
    let session = post(&one, "start", json!({})).await;
    let report = post(&one, "export", json!({})).await;
    two.get(report["path"].as_str().unwrap()).await.expect(404);
    let foreign = json!({"session_id": session["session_id"]});
    two.post(&format!("{OBSERVE}/export"), foreign.clone()).await.expect(404);
    two.post(&format!("{OBSERVE}/stop"), foreign).await.expect(404);
}

#[tokio::test]
async fn what_cannot_be_provided_is_refused() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (field, value) in [
        ("mode", json!("off")),
        ("duration_seconds", json!(0)),
        ("duration_seconds", json!(3601)),
        ("duration_seconds", json!(-1)),
        ("interval_seconds", json!(1)),
        ("include_processes", json!(true)),
        ("idempotency_key", json!("x".repeat(129))),
    ] {
        let refused = sandbox.post(&format!("{OBSERVE}/start"), json!({ field: value })).await.expect(422);
        assert_eq!(refused["detail"][0]["loc"], json!(["body", field]), "{refused}");
    }
}
