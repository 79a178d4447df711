//! Commands, over the real agent without a jail.

use serde_json::{Value, json};
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;

use super::{create, inside};
use crate::setup::{expect_error, start_with, start_with_agents};
use testkit::fake_backend::FakeBackend;
use testkit::unjailed_agent::example_program;

/// The events in the response to a command.
#[track_caller]
fn events_of(response: &TestResponse) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let lines = response.text().lines().filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line.strip_prefix("data: ").unwrap_or(line)).unwrap()).collect()
}

/// The text of all events of one kind.
fn text_of(events: &[Value], kind: &str) -> String {
    let of_kind = events.iter().filter(|event| event["type"] == kind);
    of_kind.map(|event| event["text"].as_str().unwrap()).collect()
}

async fn run(server: &TestServer, id: &str, body: Value) -> Vec<Value> {
    events_of(&server.post(&inside(id, "command"), body).await)
}

#[tokio::test]
async fn events_of_a_command_are_its_output_and_its_end() {
    let server = start_with_agents().await;
    let id = create(&server).await;
    let events = run(&server, &id, json!({"command": "echo out; echo err >&2; pwd; exit 3"})).await;
    assert_eq!((events[0]["type"].as_str(), text_of(&events, "init").len()), (Some("init"), 32));
    let home = server.backend.home(&domain::SandboxId::parse(&id).unwrap());
    assert_eq!(text_of(&events, "stdout"), format!("out\n{}\n", home.display()));
    assert_eq!(text_of(&events, "stderr"), "err\n");
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["evalue"]), (&json!("error"), &json!("3")), "{last}");
    let events = run(&server, &id, json!({"argv": ["printf", "%s", "$HOME *"]})).await;
    assert_eq!(text_of(&events, "stdout"), "$HOME *");
    assert_eq!(events.last().unwrap()["type"], "execution_complete");
}

#[tokio::test]
async fn missing_program_and_directory_are_reported() {
    let server = start_with_agents().await;
    let id = create(&server).await;
    let events = run(&server, &id, json!({"argv": ["/no/such/program"]})).await;
    assert_eq!(events.last().unwrap()["type"], "error", "{events:?}");
    let absent = server.post(&inside(&id, "command"), json!({"command": "true", "cwd": "/no/such"})).await;
    assert!(absent.text().contains("/no/such"), "{}", absent.text());
}

#[tokio::test]
async fn background_command_has_a_status_and_logs_with_a_cursor() {
    let server = start_with_agents().await;
    let id = create(&server).await;
    let text = "echo first; read line < fifo; echo second";
    let fifo = run(&server, &id, json!({"command": "mkfifo fifo"})).await;
    assert_eq!(fifo.last().unwrap()["type"], "execution_complete");
    let started = run(&server, &id, json!({"command": text, "background": true})).await;
    let command = text_of(&started, "init");
    let logs = async |query: &str| server.get(&inside(&id, &format!("command/{command}/logs?{query}"))).await;
    let status = async || server.get(&inside(&id, &format!("command/status/{command}"))).await.expect(200);
    while logs("cursor=0").await.text() != "first\n" {
        tokio::task::yield_now().await;
    }
    assert_eq!(status().await["running"], true);
    let first = logs("cursor=0").await;
    let cursor = first.header("execd-commands-tail-cursor").unwrap().to_owned();
    assert_eq!(cursor, "6");
    assert_eq!(logs(&format!("cursor={cursor}")).await.text(), "");
    run(&server, &id, json!({"command": "echo > fifo"})).await;
    assert_eq!(logs(&format!("cursor={cursor}&follow=true")).await.text(), "second\n");
    let ended = status().await;
    assert_eq!((&ended["running"], &ended["exit_code"]), (&json!(false), &json!(0)), "{ended}");
    // A cursor beyond the end is its end.
    assert_eq!(logs("cursor=999999").await.text(), "");
    expect_error(&logs("cursor=-1").await, 400, "INVALID_REQUEST_BODY");
    expect_error(&logs("cursor=x").await, 400, "INVALID_REQUEST_BODY");
}

#[tokio::test]
async fn unknown_commands_are_not_found() {
    let server = start_with_agents().await;
    let id = create(&server).await;
    for process in ["none", "00000000000000000000000000000000"] {
        let status = server.get(&inside(&id, &format!("command/status/{process}"))).await;
        expect_error(&status, 404, "INVALID_REQUEST_BODY");
        let logs = server.get(&inside(&id, &format!("command/{process}/logs"))).await;
        expect_error(&logs, 404, "INVALID_REQUEST_BODY");
    }
    expect_error(&server.delete(&inside(&id, "command")).await, 400, "MISSING_QUERY");
}

#[tokio::test]
async fn too_many_commands_are_a_429_until_one_has_ended() {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.commands_per_sandbox = 3, |_| {}).await;
    let id = create(&server).await;
    // The entrypoint counts as a command too.
    let mut running = Vec::new();
    let refused = loop {
        let body = json!({"command": "exec sleep 600", "background": true});
        let answer = server.post(&inside(&id, "command"), body).await;
        if answer.status != 200 {
            break answer;
        }
        running.push(text_of(&events_of(&answer), "init"));
        assert!(running.len() <= 3, "there is no limit");
    };
    assert!(running.len() >= 2, "only {} commands ran", running.len());
    expect_error(&refused, 429, "SERVICE_UNAVAILABLE");
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    let ended = server.delete(&inside(&id, &format!("command?id={}", running[0]))).await;
    assert_eq!(ended.status, 200, "{}", ended.text());
    while server.post(&inside(&id, "command"), json!({"command": "true"})).await.status != 200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn session_keeps_its_variables_until_it_is_closed() {
    let server = start_with_agents().await;
    let id = create(&server).await;
    let opened = server.post(&inside(&id, "session"), json!({})).await.expect(200);
    let session = opened["session_id"].as_str().unwrap().to_owned();
    let run = async |command: &str| {
        let path = inside(&id, &format!("session/{session}/run"));
        events_of(&server.post(&path, json!({"command": command})).await)
    };
    run("kept=yes").await;
    assert_eq!(text_of(&run("echo $kept").await, "stdout"), "yes\n");
    let path = inside(&id, &format!("session/{session}"));
    assert_eq!(server.delete(&path).await.status, 200);
    expect_error(&server.delete(&path).await, 404, "CONTEXT_NOT_FOUND");
    let closed = server.post(&format!("{path}/run"), json!({"command": "true"})).await;
    expect_error(&closed, 404, "CONTEXT_NOT_FOUND");
}
