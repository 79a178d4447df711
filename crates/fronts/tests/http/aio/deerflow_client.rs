//! The requests that DeerFlow's client sends, and what it reads of the responses. The numbers are those of its acceptance
//! list.

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
async fn n2_n4_n5_n6_retry_in_a_fresh_session_is_served() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let first = sandbox.data_of("/v1/shell/exec", json!({"command": "echo once"})).await;
    assert_eq!(first["output"], "once", "no retry is needed");
    let fresh = "0f8fad5b-d9cb-469f-a165-70867728950e";
    let created = sandbox.data_of("/v1/shell/sessions/create", json!({"id": fresh})).await;
    assert_eq!(created["session_id"], fresh);
    let body = json!({"command": "echo again", "id": fresh, "no_change_timeout": 600});
    assert_eq!(sandbox.data_of("/v1/shell/exec", body).await["output"], "again");
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
