//! Commands in a sandbox whose agent has stopped: their requests end, with an error that every client sees.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::test_client::TestResponse;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::AioSandbox;
use super::shell::start_shell_server;

/// The limit of the commands that have one.
const HARD_TIMEOUT: Duration = Duration::from_secs(40);
/// How much later than a limit, or than the stop, the response may come.
const MAX_DELAY: Duration = Duration::from_secs(75);

/// Sends a request without waiting for its response.
fn post_in_background(sandbox: &AioSandbox<'_>, path: &str, body: &Value) -> JoinHandle<TestResponse> {
    let path = format!("{}{path}", sandbox.path);
    tokio::spawn(sandbox.server.request("POST", &path).json(body).send())
}

/// Waits until the command of a session of the shell has begun.
async fn wait_for_shell(sandbox: &AioSandbox<'_>, session: &str) {
    while sandbox.shell("view", json!({"id": session})).await["output"] != "begun" {
        tokio::task::yield_now().await;
    }
}

/// Waits until the command of a session of bash has begun.
async fn wait_for_bash(sandbox: &AioSandbox<'_>, session: &str) {
    let body = json!({"session_id": session, "wait": true});
    while sandbox.post("/v1/bash/output", body.clone()).await.expect(200)["data"]["stdout"] != "begun\n" {
        tokio::task::yield_now().await;
    }
}

/// The data of a response that began before its error was known.
#[track_caller]
fn late_failure(response: &TestResponse) -> (Value, Value) {
    assert!(response.text().starts_with(' '), "the response had begun: {}", response.text());
    let body = response.expect(200);
    assert_eq!(body["success"], false, "{body}");
    (body["data"].clone(), body["message"].clone())
}

#[tokio::test]
async fn command_in_a_hanging_sandbox_ends_with_an_error_in_its_data() {
    let server = start_shell_server().await;
    let hanging = AioSandbox::create(&server, "hanging").await;
    let id = server.backend.ids()[0].clone();
    let other = AioSandbox::create(&server, "other").await;
    hanging.create_session("s").await;
    let text = "echo begun; read line";
    let limit = HARD_TIMEOUT.as_secs();
    let exec = json!({"command": text, "id": "s", "hard_timeout": limit, "no_change_timeout": 600});
    let shell = post_in_background(&hanging, "/v1/shell/exec", &exec);
    wait_for_shell(&hanging, "s").await;
    // No limit of its own bounds how long this one waits for its turn.
    let queued = post_in_background(&hanging, "/v1/shell/exec", &json!({"command": "echo next", "id": "s"}));
    hanging.post("/v1/bash/sessions/create", json!({"session_id": "b"})).await.expect(200);
    let bash = json!({"command": text, "session_id": "b", "env": {"A": "b"}, "hard_timeout": limit});
    let bash = post_in_background(&hanging, "/v1/bash/exec", &bash);
    wait_for_bash(&hanging, "b").await;
    let output =
        json!({"session_id": "b", "offset": 6, "stderr_offset": 0, "wait": true, "wait_timeout": 20});

    server.backend.freeze_agent(&id);
    assert_eq!(other.exec_text("echo on").await, "on", "other sandboxes are not affected");
    let output = post_in_background(&hanging, "/v1/bash/output", &output);
    let began = Instant::now();
    tokio::time::pause();
    let [shell, queued, bash, output] =
        [shell.await, queued.await, bash.await, output.await].map(Result::unwrap);
    tokio::time::resume();
    assert!(began.elapsed() < HARD_TIMEOUT + MAX_DELAY, "{:?}", began.elapsed());

    let (data, message) = late_failure(&shell);
    assert_eq!(message, "the sandbox did not end the command in time");
    let expected = json!({
        "session_id": "s", "command": text, "status": "terminated", "exit_code": -1, "output": message,
        "console": [{"ps1": "$ ", "command": text, "output": message}],
    });
    assert_eq!(data, expected);
    let (data, message) = late_failure(&queued);
    assert_eq!((&data["session_id"], &data["command"]), (&json!("s"), &json!("echo next")));
    assert_eq!((&data["status"], &data["exit_code"]), (&json!("terminated"), &json!(-1)));
    assert_eq!(data["output"], message);
    let (data, message) = late_failure(&bash);
    let command = data["command_id"].as_str().unwrap();
    assert!(!command.is_empty());
    let expected = json!({
        "session_id": "b", "command_id": command, "command": text, "status": "killed", "stdout": null,
        "stderr": message, "exit_code": -1, "offset": 0, "stderr_offset": 0,
    });
    assert_eq!(data, expected);
    let (data, message) = late_failure(&output);
    let expected = json!({
        "session_id": "b", "stdout": null, "stderr": message, "offset": 6, "stderr_offset": 0, "command": null,
    });
    assert_eq!(data, expected);
}

/// A client that sees `terminated` gives the whole sandbox up, but nothing is wrong with this one.
#[tokio::test]
async fn queued_command_of_a_deleted_session_is_refused_after_its_response_has_begun() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let running = json!({"command": "echo begun; read line", "id": "s", "async_mode": true});
    sandbox.exec(running).await;
    wait_for_shell(&sandbox, "s").await;
    let queued = json!({"command": "echo next", "id": "s", "no_change_timeout": 600});
    let queued = post_in_background(&sandbox, "/v1/shell/exec", &queued);
    // Each of these requests goes to the agent behind the queued command, which so arrives before the clock jumps.
    for _ in 0..20 {
        wait_for_shell(&sandbox, "s").await;
    }
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(16)).await;
    tokio::time::resume();
    let deleted = sandbox.request("DELETE", "/v1/shell/sessions/s").send().await.expect(200);
    assert_eq!(deleted["success"], true);
    let (data, message) = late_failure(&queued.await.unwrap());
    assert_eq!((&data["status"], &data["exit_code"]), (&json!("completed"), &json!(126)));
    assert_eq!((&message, &data["output"]), (&json!("Session not found"), &message));
    assert_eq!(sandbox.exec_text("echo on").await, "on");
}
