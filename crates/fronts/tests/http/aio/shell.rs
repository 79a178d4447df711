//! Shell sessions and their commands, with a real agent. Tests with a number check that point of the contract.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use testkit::fake_backend::FakeBackend;
use testkit::test_server::TestServer;
use testkit::unjailed_agent::example_program;

use super::AioSandbox;
use crate::setup::{OPERATOR_KEY, start_with};

/// A server whose sandboxes may run many commands.
pub(super) async fn start_shell_server() -> TestServer {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let server = start_with(backend, |config| config.commands_per_sandbox = 128, |_| {}).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    server
}

impl AioSandbox<'_> {
    /// Posts to the shell API and returns the data of a success.
    pub(super) async fn shell(&self, path: &str, body: Value) -> Value {
        let response = self.post(&format!("/v1/shell/{path}"), body).await;
        let envelope = response.expect(200);
        assert_eq!(envelope["success"], true, "{envelope}");
        assert!(!response.text().contains("ErrorObservation"));
        envelope["data"].clone()
    }

    pub(super) async fn exec(&self, body: Value) -> Value {
        self.shell("exec", body).await
    }

    pub(super) async fn exec_text(&self, command: &str) -> String {
        let result = self.exec(json!({"command": command})).await;
        assert_eq!(result["status"], "completed", "{result}");
        result["output"].as_str().unwrap().to_owned()
    }

    pub(super) async fn create_session(&self, id: &str) {
        self.shell("sessions/create", json!({"id": id})).await;
    }
}

#[tokio::test]
async fn j02_exec_returns_output_and_code_of_a_new_session() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let response = sandbox.post("/v1/shell/exec", json!({"command": "echo hi"})).await.expect(200);
    assert_eq!(response["message"], "Command executed");
    let data = &response["data"];
    let id = data["session_id"].as_str().unwrap();
    let expected = json!({
        "session_id": id, "command": "echo hi", "status": "completed", "exit_code": 0, "output": "hi",
        "console": [{"ps1": "$ ", "command": "echo hi", "output": "hi"}],
    });
    assert_eq!(*data, expected);
    let again = sandbox.exec(json!({"command": "(exit 3)", "id": id})).await;
    assert_eq!((&again["status"], &again["exit_code"]), (&json!("completed"), &json!(3)));
    let other = sandbox.exec(json!({"command": "true", "id": ""})).await;
    assert_ne!(other["session_id"], id);
}

#[tokio::test]
async fn exit_in_a_command_does_not_end_the_session() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let left = sandbox.exec(json!({"command": "x=1; echo hi; exit 3", "id": "s"})).await;
    assert_eq!(
        (&left["status"], &left["exit_code"], &left["output"]),
        (&json!("completed"), &json!(3), &json!("hi"))
    );
    let next = sandbox.exec(json!({"command": "echo $x", "id": "s"})).await;
    assert_eq!((&next["status"], &next["output"]), (&json!("completed"), &json!("1")));
    let killed = sandbox.exec(json!({"command": "kill -9 $$", "id": "s"})).await;
    assert_eq!((&killed["status"], &killed["exit_code"]), (&json!("terminated"), &json!(-1)));
    let next = sandbox.exec(json!({"command": "echo $x", "id": "s"})).await;
    assert_eq!((&next["status"], &next["output"]), (&json!("completed"), &json!("1")));
}

#[tokio::test]
async fn j03_parallel_commands_never_mix() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for _ in 0..2 {
        let calls = (0..50).map(|number| {
            let sandbox = &sandbox;
            async move {
                let command = format!("for i in 1 2 3; do echo {number}-$i; done");
                (number, sandbox.exec_text(&command).await)
            }
        });
        for (number, output) in join_all(calls).await {
            assert_eq!(output, format!("{number}-1\n{number}-2\n{number}-3"));
        }
    }
}

#[tokio::test]
async fn j04_unknown_session_is_not_created() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let expected = json!({"success": false, "message": "Session not found", "data": null, "hint": null});
    for id in ["none", "0123456789abcdef0123456789abcdef", &"x".repeat(300)] {
        for (path, body) in [
            ("exec", json!({"command": "true", "id": id})),
            ("exec", json!({"command": "true", "id": id, "async_mode": true})),
            ("view", json!({"id": id})),
            ("wait", json!({"id": id})),
            ("write", json!({"id": id, "input": "x", "press_enter": true})),
            ("kill", json!({"id": id})),
            ("sessions/update", json!({"id": id, "no_change_timeout": 5})),
        ] {
            let response = sandbox.post(&format!("/v1/shell/{path}"), body).await;
            assert_eq!(response.expect(404), expected, "{path}");
        }
        let deleted = sandbox.request("DELETE", &format!("/v1/shell/sessions/{id}")).send().await.expect(200);
        assert_eq!(
            (&deleted["success"], &deleted["message"]),
            (&json!(false), &json!(format!("Session {id} not found")))
        );
    }
    assert_eq!(sandbox.get("/v1/shell/sessions").await.expect(200)["data"]["sessions"], json!({}));
}

#[tokio::test]
async fn j05_session_is_opened_once_and_keeps_its_state() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let creates = (0..8).map(|_| sandbox.shell("sessions/create", json!({"id": "sub agent/1"})));
    for created in join_all(creates).await {
        assert_eq!(created["session_id"], "sub agent/1");
        assert!(created["working_dir"].as_str().unwrap().starts_with('/'));
    }
    let exec = |command: &str| sandbox.exec(json!({"command": command, "id": "sub agent/1"}));
    exec("cd /usr; export A=b; f() { echo from f; }").await;
    assert_eq!(exec("pwd; echo $A; f").await["output"], "/usr\nb\nfrom f");
    let listed = sandbox.get("/v1/shell/sessions").await.expect(200)["data"]["sessions"].clone();
    assert_eq!(listed["sub agent/1"]["working_dir"], "/usr");
    assert_eq!(
        (&listed["sub agent/1"]["status"], &listed["sub agent/1"]["current_command"]),
        (&json!("completed"), &Value::Null)
    );
    let delete = || sandbox.request("DELETE", "/v1/shell/sessions/sub%20agent/1").send();
    let deleted = delete().await.expect(200);
    assert_eq!((&deleted["success"], &deleted["data"]["session_id"]), (&json!(true), &json!("sub agent/1")));
    assert_eq!(delete().await.expect(200)["success"], false);
    sandbox.post("/v1/shell/exec", json!({"command": "true", "id": "sub agent/1"})).await.expect(404);
}

#[tokio::test]
async fn j06_quiet_command_is_left_running() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let begun = Instant::now();
    let body = json!({"command": "echo first; read line; echo got $line", "id": "s", "no_change_timeout": 3});
    let quiet = sandbox.exec(body).await;
    assert_eq!(
        (&quiet["status"], &quiet["output"], &quiet["exit_code"]),
        (&json!("no_change_timeout"), &json!("first"), &Value::Null)
    );
    // A busy host may take longer than the limit, but nothing else waits as long as this.
    assert!((3.0..40.0).contains(&begun.elapsed().as_secs_f64()), "{:?}", begun.elapsed());
    let view = sandbox.shell("view", json!({"id": "s"})).await;
    assert_eq!((&view["status"], &view["output"]), (&json!("running"), &json!("first")));
    let waited = sandbox.shell("wait", json!({"id": "s", "seconds": 1})).await;
    assert_eq!(waited["status"], "running");
    sandbox.shell("write", json!({"id": "s", "input": "this", "press_enter": true})).await;
    assert_eq!(sandbox.shell("wait", json!({"id": "s"})).await["status"], "completed");
    let view = sandbox.shell("view", json!({"id": "s"})).await;
    assert_eq!(
        (&view["status"], &view["output"], &view["exit_code"]),
        (&json!("completed"), &json!("first\ngot this"), &json!(0))
    );
}

#[tokio::test]
async fn limit_of_the_session_applies_without_one_of_the_call() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.shell("sessions/create", json!({"id": "s", "no_change_timeout": 50})).await;
    let updated = sandbox.shell("sessions/update", json!({"id": "s"})).await;
    assert_eq!(updated, json!({"session_id": "s", "no_change_timeout": 50}));
    let updated = sandbox.shell("sessions/update", json!({"id": "s", "no_change_timeout": 2})).await;
    assert_eq!(updated, json!({"session_id": "s", "no_change_timeout": 2}));
    let begun = Instant::now();
    let quiet = sandbox.exec(json!({"command": "read line", "id": "s"})).await;
    assert_eq!(quiet["status"], "no_change_timeout");
    assert!((2.0..40.0).contains(&begun.elapsed().as_secs_f64()), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn j07_soft_and_hard_timeout_and_async_mode() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let soft = sandbox.exec(json!({"command": "echo a; read line", "id": "s", "timeout": 0.3})).await;
    let expected = json!({
        "session_id": "s", "command": "echo a; read line", "status": "running", "output": null, "console": null, "exit_code": null,
    });
    assert_eq!(soft, expected);
    sandbox.shell("write", json!({"id": "s", "input": "", "press_enter": true})).await;
    sandbox.exec(json!({"command": "cd /usr; x=1", "id": "s"})).await;
    let hard = sandbox
        .exec(json!({"command": "cd /; x=2; echo before; sleep 600", "id": "s", "hard_timeout": 0.5}))
        .await;
    assert_eq!((&hard["status"], &hard["output"]), (&json!("hard_timeout"), &json!("before")));
    let after = sandbox.exec(json!({"command": "pwd; echo $x", "id": "s"})).await;
    assert_eq!((&after["status"], &after["output"]), (&json!("completed"), &json!("/usr\n1")));
    let sent = sandbox
        .post("/v1/shell/exec", json!({"command": "read line; echo $line", "id": "s", "async_mode": true}));
    let sent = sent.await.expect(200);
    assert_eq!(
        (&sent["message"], &sent["data"]["status"], &sent["data"]["output"]),
        (&json!("Command sent for execution"), &json!("running"), &Value::Null)
    );
    sandbox.shell("write", json!({"id": "s", "input": "done", "press_enter": true})).await;
    assert_eq!(sandbox.shell("wait", json!({"id": "s"})).await["status"], "completed");
    let view = sandbox.shell("view", json!({"id": "s"})).await;
    assert_eq!(view["console"].as_array().unwrap().last().unwrap()["output"], "done");
}

#[tokio::test]
async fn j08_killed_session_is_unknown() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    sandbox.exec(json!({"command": "(exit 4)", "id": "s"})).await;
    let killed = sandbox.shell("kill", json!({"id": "s"})).await;
    assert_eq!(killed, json!({"status": "terminated", "exit_code": 4, "returncode": 4}));
    sandbox.post("/v1/shell/view", json!({"id": "s"})).await.expect(404);
    sandbox.create_session("s").await;
    sandbox.exec(json!({"command": "sleep 600", "id": "s", "async_mode": true})).await;
    let waiting = sandbox.shell_failure("wait", json!({"id": "s"}));
    let killing = async {
        let killed = sandbox.shell("kill", json!({"id": "s"})).await;
        assert_eq!(killed, json!({"status": "terminated", "exit_code": null, "returncode": null}));
    };
    let (waited, ()) = futures_util::join!(waiting, killing);
    assert!(waited.is_none_or(|waited| waited == "terminated"));
}

impl AioSandbox<'_> {
    /// The status of a response that may be 404.
    async fn shell_failure(&self, path: &str, body: Value) -> Option<Value> {
        let response = self.post(&format!("/v1/shell/{path}"), body).await;
        (response.status == 200).then(|| response.json()["data"]["status"].clone())
    }
}

#[tokio::test]
async fn idle_session_runs_input_as_a_command() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let written =
        sandbox.shell("write", json!({"id": "s", "input": "echo typed", "press_enter": true})).await;
    assert_eq!(written["status"], "running");
    sandbox.shell("wait", json!({"id": "s"})).await;
    assert_eq!(sandbox.shell("view", json!({"id": "s"})).await["output"], "typed");
}

#[tokio::test]
async fn j09_long_output_is_plain_and_truncated() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let command = "printf '\\033[31mhead\\033[0m\\r\\n'; for i in $(seq 200); do printf '%05000d\\n' $i; done; echo tail";
    let cut = sandbox.exec(json!({"command": command})).await;
    let cut = cut["output"].as_str().unwrap();
    assert!((29_990..=30_000).contains(&cut.chars().count()));
    assert!(cut.starts_with("head\n0000") && cut.ends_with("0200\ntail") && cut.contains("truncated"));
    let full = sandbox.exec(json!({"command": command, "truncate": false})).await;
    let full = full["output"].as_str().unwrap();
    assert_eq!(full.len(), "head\n".len() + 200 * 5001 + "tail".len());
    assert!(full.lines().skip(1).take(200).all(|line| line.len() == 5000) && !full.contains(['\r', '\x1b']));
    assert_eq!(sandbox.exec_text("printf 'a\\377b\\n\\n'; echo err >&2").await, "a\u{fffd}b\n\nerr");
}

#[tokio::test]
async fn j10_utf8_survives() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("名前 🦀").await;
    let result = sandbox.exec(json!({"command": "x='漢字 🦀 é'; echo \"$x\"", "id": "名前 🦀"})).await;
    assert_eq!((&result["output"], &result["session_id"]), (&json!("漢字 🦀 é"), &json!("名前 🦀")));
}

#[tokio::test]
async fn directory_of_a_command_stays_that_of_the_session() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let made = sandbox.exec_text("d=$(mktemp -d); mkdir $d/real; ln -s real $d/link; echo $d").await;
    let exec = |body: Value| sandbox.exec(body);
    let real = exec(json!({"id": "s", "command": "pwd", "exec_dir": format!("{made}/link")})).await;
    assert_eq!((&real["output"], &real["command"]), (&json!(format!("{made}/real")), &json!("pwd")));
    assert_eq!(exec(json!({"id": "s", "command": "pwd"})).await["output"], format!("{made}/real"));
    let body =
        json!({"id": "s", "command": "pwd", "exec_dir": format!("{made}/link"), "preserve_symlinks": true});
    assert_eq!(exec(body).await["output"], format!("{made}/link"));
    let ignored = exec(json!({"id": "s", "command": "pwd", "exec_dir": "/no/such/dir"})).await;
    assert_eq!(
        (&ignored["status"], &ignored["output"]),
        (&json!("completed"), &json!(format!("{made}/real")))
    );
    let strict =
        exec(json!({"id": "s", "command": "touch x", "exec_dir": "/no/such/dir", "strict": true})).await;
    let expected = json!({
        "session_id": "s", "command": "touch x", "status": "terminated", "exit_code": 1,
        "output": "/no/such/dir No such file or directory",
        "console": [{"ps1": "$ ", "command": "touch x", "output": "/no/such/dir No such file or directory"}],
    });
    assert_eq!(strict, expected);
    let view = sandbox.shell("view", json!({"id": "s"})).await;
    let commands: Vec<_> =
        view["console"].as_array().unwrap().iter().map(|record| record["command"].clone()).collect();
    assert_eq!(commands, ["pwd"; 4]);
    let created =
        sandbox.shell("sessions/create", json!({"id": "t", "exec_dir": format!("{made}/link")})).await;
    assert_eq!(created["working_dir"], format!("{made}/real"));
    let created = sandbox
        .shell(
            "sessions/create",
            json!({"id": "u", "exec_dir": format!("{made}/link"), "preserve_symlinks": true}),
        )
        .await;
    assert_eq!(created["working_dir"], format!("{made}/link"));
    assert_eq!(sandbox.shell("view", json!({"id": "u"})).await["console"], json!([]));
    let found = sandbox.shell("sessions/create", json!({"id": "s", "exec_dir": "/usr"})).await;
    assert_eq!(found["working_dir"], format!("{made}/real"), "an existing session is not changed");
    sandbox.exec_text(&format!("rm -r {made}")).await;
}

#[tokio::test]
async fn commands_of_one_session_run_in_order() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    sandbox.exec(json!({"command": "read line; x=1", "id": "s", "async_mode": true})).await;
    let late = sandbox.exec(json!({"command": "x=$x-2", "id": "s", "timeout": 0.2})).await;
    assert_eq!(late["status"], "running", "it waits for its turn");
    let last = sandbox.exec(json!({"command": "echo $x-3", "id": "s"}));
    let unblock = sandbox.shell("write", json!({"id": "s", "input": "go", "press_enter": true}));
    let (last, _) = futures_util::join!(last, unblock);
    assert_eq!(last["output"], "1-2-3");
}

#[tokio::test]
async fn events_carry_the_output_as_it_is_printed() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let request = |path: &str, body: Value| {
        sandbox.request("POST", path).header("accept", "text/event-stream").json(&body)
    };
    let command = json!({"command": "echo one; read line; echo $line; echo", "id": "s"});
    let mut response = request("/v1/shell/exec", command).send_and_stream().await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut text = String::new();
    while !text.contains("one") {
        let frame = response.frame().await.unwrap().unwrap();
        text += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
    }
    assert_eq!(text, ": connected\n\ndata: {\"output\":\"one\"}\n\n");
    let viewing = request("/v1/shell/view", json!({"id": "s"})).send();
    let unblock = sandbox.shell("write", json!({"id": "s", "input": "two", "press_enter": true}));
    let (viewed, _) = futures_util::join!(viewing, unblock);
    let rest = response.collect().await.unwrap().to_bytes();
    let expected = "data: {\"output\":\"\\ntwo\"}\n\ndata: {\"end\":true,\"message\":\"No more output\"}\n\n";
    assert_eq!(std::str::from_utf8(&rest).unwrap(), expected);
    assert_eq!(event_outputs(viewed.text()), "one\ntwo");
    assert!(viewed.text().ends_with("data: {\"end\":true,\"message\":\"No more output\"}\n\n"));
}

/// The output in all events, joined.
fn event_outputs(text: &str) -> String {
    let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let outputs = events.map(|data| {
        serde_json::from_str::<Value>(data).unwrap()["output"].as_str().unwrap_or_default().to_owned()
    });
    outputs.collect()
}

#[tokio::test]
async fn client_that_disconnects_leaves_its_command_running() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    let call = sandbox.exec(json!({"command": "read line; echo got $line", "id": "s"}));
    let status = async {
        loop {
            let view = sandbox.shell("view", json!({"id": "s"})).await;
            if view["status"] == "running" {
                return;
            }
        }
    };
    // The call is dropped, which closes its connection.
    tokio::select! { _ = call => panic!("the command has ended"), () = status => {} }
    let queued = sandbox.exec(json!({"command": "echo queued", "id": "s"}));
    assert!(tokio::time::timeout(Duration::from_millis(300), queued).await.is_err());
    sandbox.shell("write", json!({"id": "s", "input": "it", "press_enter": true})).await;
    sandbox.shell("wait", json!({"id": "s"})).await;
    let view = sandbox.shell("view", json!({"id": "s"})).await;
    assert_eq!(view["output"], "got it", "the queued command was dropped");
}
