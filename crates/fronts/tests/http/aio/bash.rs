//! Commands on pipes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

impl AioSandbox<'_> {
    /// Runs a command and returns its result.
    async fn bash_exec(&self, body: Value) -> Value {
        self.post("/v1/bash/exec", body).await.expect(200)["data"].clone()
    }

    async fn bash_output(&self, body: Value) -> Value {
        self.post("/v1/bash/output", body).await.expect(200)["data"].clone()
    }

    async fn bash_sessions(&self) -> Vec<Value> {
        self.get("/v1/bash/sessions").await.expect(200)["data"].as_array().unwrap().clone()
    }

    /// The message of a refusal in the envelope.
    async fn refused(&self, path: &str, body: Value, status: u16) -> String {
        let response = self.post(path, body).await;
        let refused = response.expect(status);
        assert_eq!((&refused["success"], &refused["data"]), (&json!(false), &Value::Null), "{refused}");
        refused["message"].as_str().unwrap().to_owned()
    }

    /// Waits until a command has printed something, and returns what.
    async fn wait_for_output(&self, session: &str) -> Value {
        let output = self.bash_output(json!({"session_id": session, "wait": true, "wait_timeout": 30})).await;
        assert!(output["stdout"].is_string() || output["stderr"].is_string(), "{output}");
        output
    }
}

#[tokio::test]
async fn j11_exec_separates_streams_and_keeps_env_to_one_command() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let body = json!({
        "command": "echo \"$A\"; echo wrong >&2; exit 3", "env": {"A": "b c", "B": null},
        "session_id": null, "exec_dir": null, "timeout": null, "hard_timeout": 600.0, "unknown": [1],
    });
    let first = sandbox.bash_exec(body).await;
    assert_eq!((&first["stdout"], &first["stderr"]), (&json!("b c\n"), &json!("wrong\n")));
    assert_eq!((&first["status"], &first["exit_code"]), (&json!("completed"), &json!(3)));
    assert_eq!((&first["offset"], &first["stderr_offset"]), (&json!(4), &json!(6)));
    let session = first["session_id"].as_str().unwrap();
    let second = sandbox.bash_exec(json!({"command": "echo \"[$A]\"", "session_id": session})).await;
    assert_eq!((&second["stdout"], &second["stderr"]), (&json!("[]\n"), &Value::Null));
    assert_eq!(second["session_id"], first["session_id"], "the generated id is reusable");
    assert_ne!(second["command_id"], first["command_id"]);
    let silent =
        sandbox.bash_exec(json!({"command": "exec < /dev/null\nread x; true", "session_id": session})).await;
    assert_eq!((&silent["stdout"], &silent["exit_code"]), (&Value::Null, &json!(0)));
}

#[tokio::test]
async fn j11_bad_requests_start_nothing() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for name in ["", "1A", "A-B", "A=B", "ü"] {
        let body = json!({"command": "true", "env": {name: "x"}});
        assert!(sandbox.refused("/v1/bash/exec", body, 400).await.contains("variable name"));
    }
    for directory in ["/missing", "/etc/passwd", "relative"] {
        for (async_mode, timeout) in [(false, 0), (true, 0), (false, 5)] {
            let body = json!({
                "command": "true", "exec_dir": directory, "async_mode": async_mode, "timeout": timeout,
                "session_id": "s",
            });
            sandbox.refused("/v1/bash/exec", body, 400).await;
        }
    }
    for body in [
        json!({}),
        json!({"command": 7}),
        json!({"command": null}),
        json!({"command": "a\0b"}),
        json!({"command": "true", "timeout": -1}),
        json!({"command": "true", "max_output_length": -1}),
        json!({"command": "true", "session_id": "x".repeat(252)}),
        json!({"command": "true", "env": {"A": 7}}),
        json!({"command": "true", "env": {"A": "\0"}}),
    ] {
        let response = sandbox.post("/v1/bash/exec", body.clone()).await;
        assert!(response.expect(422)["detail"][0]["loc"].is_array(), "{body}");
    }
    let ran = sandbox.bash_sessions().await.iter().any(|session| session["command_count"] != 0);
    assert!(!ran, "a command was started");
}

#[tokio::test]
async fn j11_hard_timeout_kills_and_unknown_session_is_created() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let body = json!({"command": "echo on; sleep 1000", "hard_timeout": 0.3, "session_id": "my/own ü"});
    let late = sandbox.bash_exec(body).await;
    assert_eq!((&late["status"], &late["exit_code"]), (&json!("timed_out"), &json!(-1)));
    assert_eq!((&late["stdout"], &late["session_id"]), (&json!("on\n"), &json!("my/own ü")));
    let next =
        sandbox.bash_exec(json!({"command": "pwd", "session_id": "my/own ü", "exec_dir": "/usr"})).await;
    assert_eq!((&next["status"], &next["stdout"]), (&json!("completed"), &json!("/usr\n")));
    let next =
        sandbox.bash_exec(json!({"command": "cd /; pwd; echo $OLDPWD", "session_id": "my/own ü"})).await;
    assert_eq!(next["stdout"], "/\n/usr\n", "the directory is kept");
    let sessions = sandbox.bash_sessions().await;
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    let session = &sessions[0];
    assert_eq!((&session["session_id"], &session["status"]), (&json!("my/own ü"), &json!("ready")));
    assert_eq!((&session["working_dir"], &session["command_count"]), (&json!("/usr"), &json!(3)));
}

#[tokio::test]
async fn j12_output_returns_what_is_new() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let text = "printf é; printf err >&2; read x; printf \"<$x>\"; read y; printf end >&2";
    let started = sandbox.bash_exec(json!({"command": text, "async_mode": true, "session_id": "s"})).await;
    assert_eq!((&started["status"], &started["offset"]), (&json!("running"), &json!(0)));
    let mut at = (0, 0);
    let (mut stdout, mut stderr) = (String::new(), String::new());
    while (stdout.as_str(), stderr.as_str()) != ("é", "err") {
        let output = sandbox
            .bash_output(json!({
                "session_id": "s", "offset": at.0, "stderr_offset": at.1, "wait": true, "wait_timeout": 30,
            }))
            .await;
        stdout += output["stdout"].as_str().unwrap_or_default();
        stderr += output["stderr"].as_str().unwrap_or_default();
        at = (output["offset"].as_u64().unwrap(), output["stderr_offset"].as_u64().unwrap());
    }
    assert_eq!(at, (2, 3));
    let from = |at: (u64, u64)| json!({"session_id": "s", "offset": at.0, "stderr_offset": at.1});
    let nothing = sandbox.bash_output(from(at)).await;
    assert_eq!(
        (&nothing["stdout"], &nothing["stderr"], &nothing["offset"]),
        (&Value::Null, &Value::Null, &json!(2))
    );
    assert_eq!(nothing["command"]["status"], "running");

    sandbox.post("/v1/bash/write", json!({"session_id": "s", "input": "line\n"})).await.expect(200);
    let mut waiting = from(at);
    waiting["wait"] = json!(true);
    let woken = sandbox.bash_output(waiting.clone()).await;
    assert_eq!((&woken["stdout"], &woken["offset"]), (&json!("<line>"), &json!(8)));
    // Offsets that were never a place together are honoured, too.
    let mixed = sandbox.bash_output(from((3, 1))).await;
    assert_eq!((&mixed["stdout"], &mixed["stderr"]), (&json!("line>"), &json!("rr")));

    let command = started["command_id"].clone();
    let body = json!({"session_id": "s", "input": "\n", "command_id": command});
    sandbox.post("/v1/bash/write", body).await.expect(200);
    let body = json!({"session_id": "s", "offset": 8, "stderr_offset": 3, "wait": true});
    let last = sandbox.bash_output(body).await;
    assert_eq!((&last["stderr"], &last["stderr_offset"]), (&json!("end"), &json!(6)));
    let body = json!({"session_id": "s", "offset": 8, "stderr_offset": 6, "wait": true, "wait_timeout": 600});
    let ended = sandbox.bash_output(body).await;
    assert_eq!(
        (&ended["command"]["status"], &ended["command"]["exit_code"]),
        (&json!("completed"), &json!(0))
    );

    // An earlier command is still readable by its id.
    sandbox.bash_exec(json!({"command": "echo other", "session_id": "s"})).await;
    let other = sandbox.bash_output(json!({"session_id": "s"})).await;
    assert_eq!(other["stdout"], "other\n");
    let first = sandbox.bash_output(json!({"session_id": "s", "command_id": command})).await;
    assert_eq!((&first["stdout"], &first["stderr"]), (&json!("é<line>"), &json!("errend")));
    assert_eq!(first["command"]["command_id"], command);
}

#[tokio::test]
async fn j12_kill_is_told_from_completion() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (text, signal, exit_code) in [
        ("echo on; sleep 1000", json!("SIGINT"), -2),
        ("echo on; sleep 1000", json!("SIGKILL"), -9),
        ("echo on; sleep 1000", Value::Null, -15),
        ("trap 'exit 7' TERM; echo on; read x", json!("SIGTERM"), 7),
    ] {
        sandbox.bash_exec(json!({"command": text, "async_mode": true, "session_id": "s"})).await;
        let at = sandbox.wait_for_output("s").await["offset"].clone();
        sandbox.post("/v1/bash/kill", json!({"session_id": "s", "signal": signal})).await.expect(200);
        let body = json!({"session_id": "s", "offset": at, "wait": true, "wait_timeout": 30});
        let ended = sandbox.bash_output(body).await;
        let command = &ended["command"];
        assert_eq!(
            (&command["status"], &command["exit_code"]),
            (&json!("killed"), &json!(exit_code)),
            "{text}"
        );
    }
    sandbox.post("/v1/bash/kill", json!({"session_id": "s"})).await.expect(200);
    sandbox.post("/v1/bash/kill", json!({"session_id": "s", "signal": "SIGHUP"})).await.expect(422);
    let died = sandbox.bash_exec(json!({"command": "kill -SEGV $$", "session_id": "s"})).await;
    assert_eq!((&died["status"], &died["exit_code"]), (&json!("killed"), &json!(-11)));
}

#[tokio::test]
async fn j12_unknown_sessions_and_commands_are_not_found() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (path, more) in [
        ("/v1/bash/output", json!({})),
        ("/v1/bash/write", json!({"input": "x"})),
        ("/v1/bash/kill", json!({})),
    ] {
        for id in ["nope", &"0".repeat(32), &"x".repeat(300)] {
            let mut body = more.clone();
            body["session_id"] = json!(id);
            assert_eq!(sandbox.refused(path, body, 404).await, format!("Session {id} not found"));
        }
    }
    sandbox.bash_exec(json!({"command": "true", "session_id": "s"})).await;
    let other = sandbox.bash_exec(json!({"command": "true"})).await["command_id"].clone();
    for command in [other, json!("nonsense"), json!("0".repeat(32))] {
        sandbox.refused("/v1/bash/output", json!({"session_id": "s", "command_id": command}), 404).await;
    }
    sandbox.refused("/v1/bash/write", json!({"session_id": "s", "input": "x"}), 400).await;
}

#[tokio::test]
async fn soft_timeout_answers_while_the_command_runs() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let text = "echo on; read x; echo done";
    let body = json!({"command": text, "timeout": 0.5, "session_id": "s"});
    let running = sandbox.bash_exec(body.clone()).await;
    assert_eq!((&running["status"], &running["exit_code"]), (&json!("running"), &Value::Null));
    assert_eq!((&running["stdout"], &running["offset"]), (&json!("on\n"), &json!(3)));
    // A second command waits for its turn, and its id is known.
    let queued = sandbox.bash_exec(json!({"command": "echo next", "timeout": 0.1, "session_id": "s"})).await;
    assert_eq!((&queued["status"], &queued["stdout"]), (&json!("running"), &Value::Null));
    sandbox.post("/v1/bash/write", json!({"session_id": "s", "input": "\n"})).await.expect(200);
    let body = json!({"session_id": "s", "command_id": queued["command_id"], "wait": true});
    let next = sandbox.bash_output(body).await;
    assert_eq!(next["stdout"], "next\n");
    let body = json!({"session_id": "s", "command_id": running["command_id"], "offset": running["offset"]});
    let first = sandbox.bash_output(body).await;
    assert_eq!((&first["stdout"], &first["command"]["status"]), (&json!("done\n"), &json!("completed")));
}

#[tokio::test]
async fn middle_of_long_output_is_truncated() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let text = "head -c 200000 /dev/zero | tr '\\0' x; printf 'é\\377' >&2";
    let long = sandbox.bash_exec(json!({"command": text})).await;
    let stdout = long["stdout"].as_str().unwrap();
    assert!(stdout.len() < 50_100 && stdout.contains("[150000 characters truncated]"), "{}", stdout.len());
    assert_eq!((&long["stderr"], &long["stderr_offset"]), (&json!("é\u{fffd}"), &json!(3)));
    assert_eq!(long["offset"], 200_000);
    let whole = sandbox.bash_exec(json!({"command": text, "max_output_length": 0})).await;
    assert_eq!(whole["stdout"].as_str().unwrap().len(), 200_000);
}

#[tokio::test]
async fn offsets_stay_correct_after_output_was_dropped() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let text = "printf first >&2; head -c 40000000 /dev/zero | tr '\\0' x; printf last >&2; read x; printf y";
    sandbox.bash_exec(json!({"command": text, "async_mode": true, "session_id": "s"})).await;
    let body = json!({"session_id": "s", "stderr_offset": 5, "offset": 40_000_000, "wait": true});
    let last = sandbox.bash_output(body).await;
    assert_eq!(
        (&last["stderr"], &last["stderr_offset"], &last["stdout"]),
        (&json!("last"), &json!(9), &Value::Null)
    );
    assert_eq!(last["offset"], 40_000_000);
    let all = sandbox.bash_output(json!({"session_id": "s"})).await;
    assert!(all["stdout"].as_str().unwrap().len() < 20_000_000, "the beginning and the end are kept");
    assert_eq!((&all["stderr"], &all["stderr_offset"]), (&json!("firstlast"), &json!(9)));
    assert_eq!(all["offset"], 40_000_000);
    sandbox.post("/v1/bash/write", json!({"session_id": "s", "input": "\n"})).await.expect(200);
    let body = json!({"session_id": "s", "offset": 40_000_000, "stderr_offset": 9, "wait": true});
    let end = sandbox.bash_output(body).await;
    assert_eq!((&end["stdout"], &end["offset"]), (&json!("y"), &json!(40_000_001)));
}

#[tokio::test]
async fn session_is_created_once_and_closed_at_once() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let create = |body| sandbox.post("/v1/bash/sessions/create", body);
    let body = json!({"session_id": "s", "exec_dir": "/usr"});
    for again in [body, json!({"session_id": "s", "exec_dir": "/"}), json!({"session_id": "s"})] {
        let response = create(again).await;
        let info = &response.expect(200)["data"];
        assert_eq!((&info["session_id"], &info["working_dir"]), (&json!("s"), &json!("/usr")), "{info}");
        assert!(info["created_at"].as_str().unwrap().ends_with('Z'), "{info}");
    }
    sandbox.refused("/v1/bash/sessions/create", json!({"exec_dir": "/missing"}), 400).await;
    let unnamed = create(json!({})).await.expect(200)["data"]["session_id"].clone();
    assert_eq!(
        sandbox.bash_exec(json!({"command": "true", "session_id": unnamed})).await["session_id"],
        unnamed
    );

    // The command ignores SIGTERM, but nobody waits for it.
    let deaf = "trap '' TERM; echo on; while :; do read x; done";
    sandbox.bash_exec(json!({"command": deaf, "async_mode": true, "session_id": "s"})).await;
    sandbox.wait_for_output("s").await;
    let begun = Instant::now();
    for _ in 0..2 {
        sandbox.post("/v1/bash/sessions/s/close", Value::Null).await.expect(200);
        sandbox.refused("/v1/bash/output", json!({"session_id": "s"}), 404).await;
    }
    let fresh = sandbox.bash_exec(json!({"command": "pwd", "session_id": "s"})).await;
    assert_ne!(fresh["stdout"], "/usr\n", "a closed session is created anew");
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    sandbox.post("/v1/bash/sessions/unknown/close", Value::Null).await.expect(200);
}

#[tokio::test]
async fn script_of_a_session_is_read_before_each_command() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let script =
        sandbox.bash_exec(json!({"command": "f=$(mktemp); echo 'v=from-script' > $f; printf $f"})).await;
    let body = json!({"session_id": "s", "snapshot_path": script["stdout"]});
    sandbox.post("/v1/bash/sessions/create", body).await.expect(200);
    let ran = sandbox.bash_exec(json!({"command": "echo $v", "session_id": "s"})).await;
    assert_eq!(ran["stdout"], "from-script\n");
    let path = script["stdout"].as_str().unwrap();
    let removed = sandbox.bash_exec(json!({"command": format!("rm {path}"), "session_id": "s"})).await;
    assert_eq!(removed["exit_code"], 0);
    let ran = sandbox.bash_exec(json!({"command": "echo $v-", "session_id": "s"})).await;
    assert_eq!(ran["stdout"], "-\n", "a script that is not readable is ignored");
}

#[tokio::test]
async fn fifty_sessions_are_kept_and_the_longest_idle_is_closed_first() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let deaf = json!({"command": "echo on; read x", "async_mode": true, "session_id": "busy"});
    sandbox.bash_exec(deaf).await;
    sandbox.post("/v1/bash/sessions/create", json!({"session_id": "named"})).await.expect(200);
    for _ in 0..60 {
        sandbox.bash_exec(json!({"command": "true"})).await;
    }
    let sessions = sandbox.bash_sessions().await;
    assert_eq!(sessions.len(), 50);
    for kept in ["busy", "named"] {
        assert!(sessions.iter().any(|session| session["session_id"] == kept), "{kept}");
    }
}
