//! Limits of sessions, and requests that are not valid.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::fake_backend::FakeBackend;
use testkit::unjailed_agent::example_program;
use tokio::time::Instant;

use super::AioSandbox;
use super::shell::start_shell_server;
use super::{path_of_url, provision};
use crate::setup::{OPERATOR_KEY, start_with};

#[tokio::test]
async fn j20_invalid_bodies_are_refused_in_the_form_of_fastapi() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (path, body, field) in [
        ("exec", json!({}), "command"),
        ("exec", json!({"command": null}), "command"),
        ("exec", json!({"command": 7}), "command"),
        ("exec", json!({"command": "a\0b"}), "command"),
        ("exec", json!({"command": "x".repeat(200_000)}), "command"),
        ("exec", json!({"command": "true", "timeout": -1}), "timeout"),
        ("exec", json!({"command": "true", "hard_timeout": "soon"}), "hard_timeout"),
        ("exec", json!({"command": "true", "no_change_timeout": -5}), "no_change_timeout"),
        ("exec", json!({"command": "true", "exec_dir": "a\0"}), "exec_dir"),
        ("exec", json!({"command": "true", "exec_dir": "/".repeat(5000)}), "exec_dir"),
        ("view", json!({}), "id"),
        ("wait", json!({"id": "a\0"}), "id"),
        ("write", json!({"id": "s", "input": "x"}), "press_enter"),
        ("write", json!({"id": "s", "press_enter": true}), "input"),
        ("sessions/create", json!({"id": "x".repeat(257)}), "id"),
        ("sessions/create", json!({"id": "a\0"}), "id"),
        ("sessions/create", json!({"id": ["a"]}), "id"),
        ("sessions/update", json!({"no_change_timeout": 1}), "id"),
    ] {
        let refused = sandbox.post(&format!("/v1/shell/{path}"), body).await.expect(422);
        assert_eq!(refused["detail"][0]["loc"], json!(["body", field]), "{path} {refused}");
    }
    let nulls = json!({
        "command": "echo ok", "id": null, "exec_dir": null, "async_mode": null, "timeout": null, "strict": null,
        "no_change_timeout": null, "hard_timeout": null, "preserve_symlinks": null, "truncate": null, "other": [1],
    });
    assert_eq!(sandbox.exec(nulls).await["output"], "ok");
    let created =
        sandbox.request("POST", "/v1/shell/sessions/create").header("content-type", "application/json");
    assert_eq!(created.send().await.expect(200)["success"], true, "an empty body");
    let sessions = sandbox.get("/v1/shell/sessions").await.expect(200);
    assert_eq!(sessions["data"]["sessions"].as_object().unwrap().len(), 2, "nothing else was started");
}

async fn create_with_sessions<'a>(server: &'a testkit::test_server::TestServer, most: u32) -> AioSandbox<'a> {
    let body = json!({"sandbox_id": "small", "max_shell_sessions": most});
    let created = provision(server, "POST", "/api/sandboxes").json(&body).send().await.expect(200);
    assert_eq!(created["max_shell_sessions"], most);
    AioSandbox { server, path: path_of_url(created["sandbox_url"].as_str().unwrap()) }
}

#[tokio::test]
async fn at_the_limit_idle_sessions_without_a_name_go_first() {
    let server = start_shell_server().await;
    let sandbox = create_with_sessions(&server, 2).await;
    sandbox.create_session("named").await;
    for number in 0..4 {
        assert_eq!(sandbox.exec_text(&format!("echo {number}")).await, number.to_string());
    }
    let stats = sandbox.get("/v1/shell/sessions/stats").await.expect(200)["data"].clone();
    let expected = json!({
        "total_sessions": 2, "active_sessions": 2, "idle_sessions": 0, "max_sessions": 2, "session_timeout": 3600,
        "usage_ratio": 1.0,
    });
    assert_eq!(stats, expected);
    for id in ["named", "other"] {
        sandbox.create_session(id).await;
        sandbox.exec(json!({"command": "read line", "id": id, "async_mode": true})).await;
    }
    let text =
        "Cannot create shell session: session limit reached and all 2 existing sessions have active commands";
    for (path, body) in [("exec", json!({"command": "true"})), ("sessions/create", json!({"id": "third"}))] {
        let refused = sandbox.post(&format!("/v1/shell/{path}"), body).await.expect(400);
        assert_eq!(refused, json!({"success": false, "message": text, "data": null, "hint": null}));
    }
    sandbox.create_session("named").await;
    let deleted = sandbox.request("DELETE", "/v1/shell/sessions").send().await.expect(200);
    assert_eq!(deleted["data"], json!({"cleaned_sessions": 2}));
    assert_eq!(sandbox.exec_text("echo free").await, "free");
}

#[tokio::test]
async fn as_many_sessions_as_were_granted_can_be_busy_at_once() {
    const MAX_COMMANDS: u32 = 12;
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.commands_per_sandbox = MAX_COMMANDS, |_| {}).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    let body = json!({"sandbox_id": "large", "max_shell_sessions": MAX_COMMANDS + 1});
    let refused = provision(&server, "POST", "/api/sandboxes").json(&body).send().await.expect(400);
    assert!(refused["detail"].as_str().unwrap().contains("maximum of 12"), "{refused}");
    let created =
        provision(&server, "POST", "/api/sandboxes").json(&json!({"sandbox_id": "plain"})).send().await;
    assert_eq!(created.expect(200)["max_shell_sessions"], MAX_COMMANDS, "the default is not more either");

    let sandbox = create_with_sessions(&server, MAX_COMMANDS).await;
    for number in 0..MAX_COMMANDS {
        let id = format!("session {number}");
        sandbox.create_session(&id).await;
        sandbox.exec(json!({"command": "read line", "id": id, "async_mode": true})).await;
    }
    let sessions = sandbox.get("/v1/shell/sessions").await.expect(200)["data"]["sessions"].clone();
    let sessions: Vec<_> = sessions.as_object().unwrap().values().collect();
    assert_eq!(sessions.len(), 12);
    assert!(sessions.iter().all(|session| session["status"] == "running"), "{sessions:?}");
}

#[tokio::test]
async fn calls_beyond_the_limit_are_served_or_refused_with_the_limit() {
    let server = start_shell_server().await;
    let sandbox = create_with_sessions(&server, 3).await;
    let calls = (0..20).map(|number| {
        let body = json!({"command": format!("echo {number}")});
        sandbox.post("/v1/shell/exec", body)
    });
    for (number, response) in futures_util::future::join_all(calls).await.into_iter().enumerate() {
        if response.status == 400 {
            assert!(response.text().contains("session limit reached"), "{}", response.text());
        } else {
            assert_eq!(response.expect(200)["data"]["output"], Value::from(number.to_string()));
        }
    }
}

/// By when the server has read the limit of a session, also on a busy host.
const LIMIT_READ_TIME: Duration = Duration::from_secs(3);

/// Runs a command that prints once and then waits for input, and returns how long the response took after the output. Once
/// the output has come, the clock stands still and jumps to whatever comes next.
async fn time_until_quiet(sandbox: &AioSandbox<'_>, body: Value, session: &str) -> (Value, Duration) {
    let path = format!("{}/v1/shell/exec", sandbox.path);
    let waiting = tokio::spawn(sandbox.server.request("POST", &path).json(&body).send());
    loop {
        let view = sandbox.shell("view", json!({"id": session})).await;
        if view["output"].as_str().unwrap().contains("waits") {
            break;
        }
        tokio::task::yield_now().await;
    }
    let began = Instant::now();
    // The limit of the session is read after a second. If the clock jumped meanwhile, the sandbox would seem not to answer.
    while body["no_change_timeout"].is_null() && began.elapsed() < LIMIT_READ_TIME {
        sandbox.shell("view", json!({"id": session})).await;
    }
    tokio::time::pause();
    let response = waiting.await.unwrap().expect(200);
    tokio::time::resume();
    (response["data"].clone(), began.elapsed())
}

#[tokio::test]
async fn n7_j06_no_change_timeout_is_exact() {
    const TOLERANCE: Duration = Duration::from_secs(2);
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    const PRINT: &str = "echo waits; read line; echo $line";
    // DeerFlow lists a directory in this way.
    const LIST: &str =
        "find waits -maxdepth 2 -type f -o -type d 2>/dev/null | head -500; read line; echo $line";
    sandbox.exec_text("mkdir waits").await;
    for (number, (command, of_session, of_call, expected)) in [
        (PRINT, None, Some(600), 600),
        (LIST, None, Some(600), 600),
        (PRINT, Some(600), None, 600),
        (PRINT, Some(5), Some(605), 605),
        (PRINT, None, None, 120),
    ]
    .into_iter()
    .enumerate()
    {
        // Each is a fresh session, as that of a client which retries.
        let session = format!("session {number}");
        sandbox.shell("sessions/create", json!({"id": session, "no_change_timeout": of_session})).await;
        let body = json!({"command": command, "id": session, "no_change_timeout": of_call});
        let (result, took) = time_until_quiet(&sandbox, body, &session).await;
        assert_eq!((&result["status"], &result["output"]), (&json!("no_change_timeout"), &json!("waits")));
        let expected = Duration::from_secs(expected);
        let is_exact = took > expected.saturating_sub(TOLERANCE) && took < expected + TOLERANCE;
        assert!(is_exact, "{of_session:?} {of_call:?}: {took:?} instead of {expected:?}");
        // The command goes on.
        sandbox.shell("write", json!({"id": session, "input": "typed", "press_enter": true})).await;
        let waited = sandbox.shell("wait", json!({"id": session, "seconds": 20})).await;
        assert_eq!(waited["status"], "completed", "{waited}");
        let view = sandbox.shell("view", json!({"id": session})).await;
        assert!(view["output"].as_str().unwrap().trim_end().ends_with("typed"), "{view}");
    }
}
