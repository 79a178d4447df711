//! The requests that DeerFlow's client sends, and what it reads of the responses. The numbers are those of its acceptance
//! list.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::shell::start_shell_server;
use super::{AioSandbox, provision};

/// The home of the only sandbox: its agent has no root of its own.
fn home_of_sandbox(sandbox: &AioSandbox<'_>) -> String {
    let id = sandbox.server.backend.ids()[0].clone();
    sandbox.server.backend.home(&id).display().to_string()
}

impl AioSandbox<'_> {
    /// The data of a success, in a response that never has the text by which AIO reports a broken shell.
    async fn data_of(&self, path: &str, body: Value) -> Value {
        let response = self.post(path, body).await;
        assert!(!response.text().contains("ErrorObservation"), "{path}");
        response.expect(200)["data"].clone()
    }
}

#[tokio::test]
async fn n2_n3_n4_n5_n6_retry_in_a_fresh_session_is_served() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    // The first call has no id, the retry that of a session with a new name.
    let first = json!({"command": "echo once", "no_change_timeout": 600});
    let first = sandbox.data_of("/v1/shell/exec", first).await;
    assert_eq!(first["output"], "once", "no retry is needed");
    let fresh = "0f8fad5b-d9cb-469f-a165-70867728950e";
    assert_eq!(fresh.len(), 36);
    assert_ne!(first["session_id"], fresh);
    let created = sandbox.data_of("/v1/shell/sessions/create", json!({"id": fresh})).await;
    assert_eq!(created["session_id"], fresh);
    let body = json!({"command": "echo again", "id": fresh, "no_change_timeout": 600});
    let again = sandbox.data_of("/v1/shell/exec", body).await;
    assert_eq!((&again["output"], &again["session_id"]), (&json!("again"), &json!(fresh)));
    for success in [true, false] {
        let path = format!("/v1/shell/sessions/{fresh}");
        assert_eq!(sandbox.request("DELETE", &path).send().await.expect(200)["success"], success);
    }
}

#[tokio::test]
async fn n9_n10_n11_n13_n18_env_is_a_field_of_bash_and_never_text() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let command = "echo \"[$SECRET]\"  # unchanged";
    let plain = sandbox.data_of("/v1/shell/exec", json!({"command": command})).await;
    assert_eq!((&plain["command"], &plain["output"]), (&json!(command), &json!("[]")));
    for _ in 0..2 {
        let session = json!({"session_id": "env-session"});
        sandbox.data_of("/v1/bash/sessions/create", session.clone()).await;
        let text = format!("exec < /dev/null\n{command}; cat");
        let body = json!({
            "session_id": "env-session", "command": text, "env": {"SECRET": "$(id) 'b"}, "hard_timeout": 600,
        });
        let ran = sandbox.data_of("/v1/bash/exec", body).await;
        assert_eq!((&ran["stdout"], &ran["exit_code"]), (&json!("[$(id) 'b]\n"), &json!(0)), "{ran}");
        assert_eq!(ran["status"], "completed");
        sandbox.data_of("/v1/bash/sessions/env-session/close", json!({})).await;
    }
    for name in ["A-B", "1A", "", "A B", "A=B"] {
        let body = json!({"command": "touch started", "env": {name: "x"}});
        sandbox.post("/v1/bash/exec", body).await.expect(400);
    }
    for env in [json!(null), json!({})] {
        sandbox.data_of("/v1/bash/exec", json!({"command": "! test -e started", "env": env})).await;
    }
}

#[tokio::test]
async fn n12_env_command_without_a_session_is_served_again() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let body =
        json!({"command": "echo \"$SECRET\"; echo wrong >&2", "env": {"SECRET": "s"}, "hard_timeout": 600.0});
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let ran = sandbox.data_of("/v1/bash/exec", body.clone()).await;
        assert_eq!((&ran["stdout"], &ran["stderr"]), (&json!("s\n"), &json!("wrong\n")), "{ran}");
        assert_eq!((&ran["status"], &ran["exit_code"]), (&json!("completed"), &json!(0)));
        sessions.push(ran["session_id"].clone());
    }
    assert_ne!(sessions[0], sessions[1]);
}

#[tokio::test]
async fn capabilities_announce_no_mount_contract_version() {
    let server = start_shell_server().await;
    let capabilities = provision(&server, "GET", "/api/capabilities").send().await.expect(200);
    assert_eq!(capabilities, json!({"lark_cli_init_image": false, "lark_cli_broker_image": false}));
}

/// A command that ends only if it is killed.
const RESISTING: &str = "trap '' HUP INT TERM; echo begun; sleep 1000";

/// How long a response about a session may take here. DeerFlow waits five seconds, but the host of a test may be busy; a
/// response that waited for the command would take far longer.
const SESSION_TIMEOUT: Duration = Duration::from_secs(20);

#[tokio::test]
async fn cleanup_of_a_busy_session_does_not_wait_for_its_command() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    sandbox.create_session("s").await;
    sandbox.exec(json!({"command": RESISTING, "id": "s", "async_mode": true})).await;
    while sandbox.shell("view", json!({"id": "s"})).await["output"] != "begun" {
        tokio::task::yield_now().await;
    }
    let path = format!("{}/v1/shell/exec", sandbox.path);
    let waiting = json!({"command": "true", "id": "s", "hard_timeout": 600});
    let waiting = tokio::spawn(server.request("POST", &path).json(&waiting).send());
    let began = Instant::now();
    let deleted = sandbox.request("DELETE", "/v1/shell/sessions/s").send().await.expect(200);
    assert_eq!(deleted["success"], true);
    assert!(began.elapsed() < SESSION_TIMEOUT, "the delete took {:?}", began.elapsed());
    waiting.await.unwrap().expect(404);
    sandbox.post("/v1/shell/exec", json!({"command": "true", "id": "s"})).await.expect(404);

    let bash = json!({"command": RESISTING, "session_id": "b", "async_mode": true});
    sandbox.data_of("/v1/bash/exec", bash).await;
    let began = Instant::now();
    sandbox.data_of("/v1/bash/sessions/b/close", json!({})).await;
    assert!(began.elapsed() < SESSION_TIMEOUT, "the close took {:?}", began.elapsed());
}

#[tokio::test]
async fn session_create_does_not_wait_for_running_commands() {
    let server = start_shell_server().await;
    let body = json!({"sandbox_id": "one", "max_shell_sessions": 2});
    provision(&server, "POST", "/api/sandboxes").json(&body).send().await.expect(200);
    let sandbox = AioSandbox::create(&server, "one").await;
    for id in ["first", "second"] {
        sandbox.create_session(id).await;
        sandbox.exec(json!({"command": RESISTING, "id": id, "async_mode": true})).await;
    }
    for (id, status) in [("first", 200), ("third", 400)] {
        let began = Instant::now();
        sandbox.post("/v1/shell/sessions/create", json!({"id": id})).await.expect(status);
        assert!(began.elapsed() < SESSION_TIMEOUT, "{id} took {:?}", began.elapsed());
    }
    let began = Instant::now();
    sandbox.data_of("/v1/bash/sessions/create", json!({"session_id": "env"})).await;
    assert!(began.elapsed() < SESSION_TIMEOUT, "the create took {:?}", began.elapsed());
}

#[tokio::test]
async fn requests_of_deerflow_2_1_are_served() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let file = format!("{}/notes", home_of_sandbox(&sandbox));
    // A command with variables has no session, and no command has a hard timeout.
    let command =
        json!({"command": "printf 'one\\n%s\\n' \"$SECRET\" > notes; cat notes", "env": {"SECRET": "two"}});
    let ran = sandbox.data_of("/v1/bash/exec", command).await;
    assert_eq!(
        (&ran["stdout"], &ran["stderr"], &ran["exit_code"]),
        (&json!("one\ntwo\n"), &Value::Null, &json!(0))
    );
    let read = sandbox.data_of("/v1/file/read", json!({"file": file})).await["content"].clone();
    assert_eq!(read, "one\ntwo\n");
    // An append is a read and a write.
    let longer = format!("{}three\r\n", read.as_str().unwrap());
    sandbox.data_of("/v1/file/write", json!({"file": file, "content": longer})).await;
    let range = sandbox.data_of("/v1/file/read", json!({"file": file, "start_line": 1, "end_line": 3})).await;
    assert_eq!(range["content"].as_str().unwrap().trim_end(), "two\nthree");
    let after = json!({"command": "cat notes; echo \"[$SECRET]\"", "no_change_timeout": 600});
    assert_eq!(sandbox.data_of("/v1/shell/exec", after).await["output"], "one\ntwo\nthree\n[]");
}

#[tokio::test]
async fn n21_n23_n24_ranges_and_downloads_are_exact() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home_of_sandbox(&sandbox);
    let file = format!("{home}/lines");
    sandbox.data_of("/v1/file/write", json!({"file": file, "content": "one\ntwo\nthree\n"})).await;
    let read = json!({"file": file, "start_line": 0, "end_line": 2});
    let read = sandbox.data_of("/v1/file/read", read).await;
    assert_eq!(read["content"].as_str().unwrap().trim_end_matches('\n'), "one\ntwo");
    let long = "0123456789".repeat(300_000);
    for content in [long.as_str(), ""] {
        sandbox.data_of("/v1/file/write", json!({"file": file, "content": content})).await;
        let downloaded = sandbox.get(&format!("/v1/file/download?path={file}")).await;
        assert_eq!((downloaded.status.as_u16(), downloaded.text() == content), (200, true));
    }
}

#[tokio::test]
async fn n30_n31_n32_listings_have_the_fields_that_are_read() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home_of_sandbox(&sandbox);
    for (name, content) in
        [("root/a.py", "x = 1\nneedle = 2\n"), ("root/sub/b.py", "needle\n"), ("root-2/c.py", "needle")]
    {
        sandbox
            .data_of("/v1/file/write", json!({"file": format!("{home}/{name}"), "content": content}))
            .await;
    }
    let root = format!("{home}/root");
    let found = sandbox.data_of("/v1/file/find", json!({"path": root, "glob": "**/*.py"})).await;
    assert_eq!(found["files"], json!([format!("{root}/a.py"), format!("{root}/sub/b.py")]));
    let listed = json!({"path": root, "recursive": true, "show_hidden": false});
    let listed = sandbox.data_of("/v1/file/list", listed).await;
    for entry in listed["files"].as_array().unwrap() {
        assert!(entry["path"].as_str().unwrap().starts_with(&format!("{root}/")), "{entry}");
        assert!(entry["is_directory"].is_boolean(), "{entry}");
    }
}

#[tokio::test]
async fn n112_n113_n114_n115_provisioner_answers_what_its_client_reads() {
    let server = start_shell_server().await;
    let mount = |target: &str| json!({"host_path": "/srv/x", "container_path": target, "read_only": false});
    let body = json!({"sandbox_id": "a", "extra_mounts": [mount("/mnt/acp-workspace"), mount("/mnt/skills/custom")]});
    let created = provision(&server, "POST", "/api/sandboxes").json(&body).send().await.expect(200);
    let refused = json!({"sandbox_id": "b", "extra_mounts": [mount("/etc")]});
    let refused = provision(&server, "POST", "/api/sandboxes").json(&refused).send().await;
    assert!(refused.expect(400)["detail"].is_string());
    let list = provision(&server, "GET", "/api/sandboxes").send().await.expect(200);
    assert_eq!(list, json!({"sandboxes": [created], "count": 1}));
    for field in ["sandbox_id", "sandbox_url", "status"] {
        assert!(list["sandboxes"][0][field].is_string(), "{field}");
    }
    assert_eq!(provision(&server, "GET", "/api/sandboxes/a").send().await.expect(200)["status"], "Running");
    provision(&server, "GET", "/api/sandboxes/b").send().await.expect(404);
}
