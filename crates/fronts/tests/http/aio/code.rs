//! Code in sessions and in processes of its own. The agent of these tests cannot run the JavaScript kernel, which is a
//! part of the whole program, so sessions are tested with Python.

use serde_json::{Value, json};

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

/// Runs Python in a session and returns the whole response.
async fn run_python(sandbox: &AioSandbox<'_>, session: &str, code: &str) -> Value {
    let body = json!({"code": code, "session_id": session, "timeout": 20});
    sandbox.post("/v1/jupyter/execute", body).await.expect(200)
}

#[tokio::test]
async fn j18_state_is_kept_by_the_session() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let first = run_python(&sandbox, "my session / ü", "x = 20; print('hi')").await;
    assert_eq!((&first["success"], &first["data"]["status"]), (&json!(true), &json!("ok")), "{first}");
    assert_eq!(
        first["data"]["outputs"],
        json!([{"output_type": "stream", "name": "stdout", "text": "hi\n"}])
    );
    assert_eq!(
        (&first["data"]["kernel_name"], &first["data"]["session_id"]),
        (&json!("python3"), &json!("my session / ü"))
    );
    let second = run_python(&sandbox, "my session / ü", "x + 1").await;
    let output = &second["data"]["outputs"][0];
    assert_eq!(
        (&output["output_type"], &output["data"]["text/plain"]),
        (&json!("execute_result"), &json!("21"))
    );
    assert_eq!((&output["execution_count"], &second["data"]["execution_count"]), (&json!(2), &json!(2)));
    let other = run_python(&sandbox, "other", "x").await;
    assert_eq!(other["data"]["outputs"][0]["ename"], "NameError");
}

#[tokio::test]
async fn j18_exception_is_no_error_of_the_request() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let raised = run_python(&sandbox, "s", "1/0").await;
    assert_eq!((&raised["success"], &raised["data"]["status"]), (&json!(false), &json!("error")), "{raised}");
    let output = &raised["data"]["outputs"][0];
    assert_eq!((&output["output_type"], &output["ename"]), (&json!("error"), &json!("ZeroDivisionError")));
    assert!(output["traceback"].as_array().is_some_and(|lines| !lines.is_empty()), "{output}");
}

#[tokio::test]
async fn j18_displayed_image_is_in_a_bundle() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let code = "class I:\n  def _repr_png_(self): return b'png'\n  def _repr_json_(self): return {'a': [1]}\ndisplay(I())";
    let shown = run_python(&sandbox, "s", code).await;
    let output = &shown["data"]["outputs"][0];
    assert_eq!(output["output_type"], "display_data", "{shown}");
    assert_eq!(output["data"]["image/png"], "cG5n");
    assert_eq!(output["data"]["application/json"], json!({"a": [1]}));
}

#[tokio::test]
async fn j18_timeout_interrupts_and_keeps_the_state() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    run_python(&sandbox, "s", "kept = 7").await;
    let body = json!({"code": "import time; time.sleep(60)", "session_id": "s", "timeout": 1});
    let ended = sandbox.post("/v1/jupyter/execute", body).await.expect(200);
    assert_eq!((&ended["success"], &ended["data"]["status"]), (&json!(false), &json!("timeout")), "{ended}");
    assert!(ended["message"].as_str().unwrap().contains("keeps its state"), "{ended}");
    let kept = run_python(&sandbox, "s", "kept").await;
    assert_eq!(kept["data"]["outputs"][0]["data"]["text/plain"], "7");
    // A kernel that ignores the interrupt is killed, and the next run has a new one.
    let stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
    let body = json!({"code": stubborn, "session_id": "s", "timeout": 1});
    let killed = sandbox.post("/v1/jupyter/execute", body).await.expect(200);
    assert_eq!(killed["data"]["status"], "timeout", "{killed}");
    assert!(killed["message"].as_str().unwrap().contains("state of the session is lost"), "{killed}");
    assert_eq!(run_python(&sandbox, "s", "kept").await["data"]["outputs"][0]["ename"], "NameError");
}

#[tokio::test]
async fn sessions_are_listed_and_deleted() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for message in ["Session created", "Session already exists"] {
        let body = json!({"session_id": "a", "kernel_name": "no-such-kernel"});
        let created = sandbox.post("/v1/jupyter/sessions/create", body).await.expect(200);
        assert_eq!(created["data"], json!({"session_id": "a", "kernel_name": "python3", "message": message}));
    }
    let anonymous = sandbox.post("/v1/jupyter/execute", json!({"code": "y = 1"})).await.expect(200);
    let anonymous = anonymous["data"]["session_id"].as_str().unwrap().to_owned();
    assert_eq!(run_python(&sandbox, &anonymous, "y").await["success"], true);
    let sessions = sandbox.get("/v1/jupyter/sessions").await.expect(200)["data"]["sessions"].clone();
    let names: Vec<_> = sessions.as_object().unwrap().keys().cloned().collect();
    assert_eq!(names.len(), 2, "{sessions}");
    assert!(names.contains(&anonymous) && sessions["a"]["last_used"].as_f64().unwrap() > 1e9, "{sessions}");
    assert_eq!(sandbox.get("/v1/jupyter/info").await.expect(200)["data"]["active_sessions"], 2);
    let path = |name: &str| format!("{}/v1/jupyter/sessions/{name}", sandbox.path);
    assert_eq!(server.delete(&path("a")).await.expect(200)["success"], true);
    assert_eq!(server.delete(&path("a")).await.expect(200)["success"], false);
    let cleaned = server.delete(&format!("{}/v1/jupyter/sessions", sandbox.path)).await.expect(200);
    assert_eq!(cleaned["data"]["cleaned_sessions"], 1);
}

#[tokio::test]
async fn sessions_without_a_name_do_not_pile_up() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    run_python(&sandbox, "named", "1").await;
    for _ in 0..10 {
        sandbox.post("/v1/jupyter/execute", json!({"code": "1"})).await.expect(200);
    }
    let sessions = sandbox.get("/v1/jupyter/sessions").await.expect(200)["data"]["sessions"].clone();
    assert_eq!(sessions.as_object().unwrap().len(), 9, "{sessions}");
    assert!(sessions.get("named").is_some(), "{sessions}");
}

#[tokio::test]
async fn code_starts_in_its_directory() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let run = async |session: &str, cwd: &str| {
        let body = json!({"code": "import os; os.getcwd()", "session_id": session, "cwd": cwd});
        sandbox.post("/v1/jupyter/execute", body).await.expect(200)
    };
    assert_eq!(run("new", "/usr").await["data"]["outputs"][0]["data"]["text/plain"], "'/usr'");
    assert_eq!(run("new", "/etc").await["data"]["outputs"][0]["data"]["text/plain"], "'/etc'");
    for session in ["new", "another"] {
        let refused = run(session, "/no/such/directory").await;
        assert_eq!(
            (&refused["success"], &refused["data"]["status"]),
            (&json!(false), &json!("error")),
            "{refused}"
        );
        assert_eq!(refused["data"]["outputs"][0]["ename"], "DirectoryError", "{refused}");
    }
}

#[tokio::test]
async fn j19_stateless_code_shows_the_value_of_an_expression() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (language, code, expected) in
        [("python", "print('p'); 6 * 7", "42"), ("javascript", "console.log('p'); 6 * 7", "42")]
    {
        let ran =
            sandbox.post("/v1/code/execute", json!({"language": language, "code": code})).await.expect(200);
        assert_eq!((&ran["success"], &ran["data"]["stdout"]), (&json!(true), &json!("p\n")), "{ran}");
        let output = &ran["data"]["outputs"][1];
        assert_eq!(
            (&output["output_type"], &output["data"]["text/plain"]),
            (&json!("execute_result"), &json!(expected))
        );
        assert_eq!((&ran["data"]["session_id"], &ran["data"]["exit_code"]), (&Value::Null, &json!(0)));
    }
    let sessions = sandbox.get("/v1/jupyter/sessions").await.expect(200);
    assert_eq!(sessions["data"]["sessions"], json!({}));
    let stateful = json!({"language": "python", "code": "z = 1", "stateful": true});
    let session = sandbox.post("/v1/code/execute", stateful).await.expect(200)["data"]["session_id"].clone();
    let again = json!({"language": "python", "code": "z", "session_id": session});
    assert_eq!(sandbox.post("/v1/code/execute", again).await.expect(200)["success"], true);
    let failed = json!({"language": "python", "code": "raise ValueError('x')"});
    let failed = sandbox.post("/v1/code/execute", failed).await.expect(200);
    assert!(failed["data"]["traceback"].to_string().contains("ValueError"), "{failed}");
}

#[tokio::test]
async fn j19_node_process_has_files_and_input() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let run = async |body: Value| sandbox.post("/v1/nodejs/execute", body).await.expect(200);
    let code = "const {a} = require('./lib/a.js'); console.log(a, require('fs').readFileSync(0, 'utf8'), __dirname);";
    let ran = run(json!({"code": code, "stdin": "in", "files": {"lib/a.js": "exports.a = 'file'"}})).await;
    let stdout = ran["data"]["stdout"].as_str().unwrap();
    let directory = stdout.strip_prefix("file in ").unwrap_or_else(|| panic!("{ran}")).trim_end().to_owned();
    assert!(directory.starts_with("/tmp/coracle-node-"), "{ran}");
    assert!(!std::path::Path::new(&directory).exists(), "the directory of the run stays");
    let exited = run(json!({"code": "process.exit(3)"})).await;
    assert_eq!((&exited["success"], &exited["data"]["exit_code"]), (&json!(false), &json!(3)), "{exited}");
    let thrown = run(json!({"code": "throw new TypeError('no')"})).await;
    assert_eq!(thrown["data"]["status"], "error");
    let error = thrown["data"]["outputs"].as_array().unwrap().last().unwrap();
    assert_eq!((&error["ename"], &error["evalue"]), (&json!("TypeError"), &json!("no")), "{thrown}");
    assert!(thrown["data"]["stderr"].as_str().unwrap().contains("TypeError: no"), "{thrown}");
    let module =
        run(json!({"code": "import os from 'os'; console.log(await Promise.resolve(typeof os.cpus))"})).await;
    assert_eq!(module["data"]["stdout"], "function\n", "{module}");
    let slow = run(json!({"code": "while (true) {}", "timeout": 1})).await;
    assert_eq!(
        (&slow["data"]["status"], &slow["data"]["exit_code"]),
        (&json!("timeout"), &json!(-1)),
        "{slow}"
    );
    let nowhere = run(json!({"code": "1", "cwd": "/no/such"})).await;
    assert_eq!(nowhere["data"]["outputs"][0]["ename"], "DirectoryError", "{nowhere}");
    let invalid = run(json!({"code": "let let"})).await;
    assert_eq!(
        invalid["data"]["outputs"].as_array().unwrap().last().unwrap()["ename"],
        "SyntaxError",
        "{invalid}"
    );
}

#[tokio::test]
async fn j20_invalid_requests_start_nothing() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (path, body, field) in [
        ("/v1/jupyter/execute", json!({}), "code"),
        ("/v1/jupyter/execute", json!({"code": null}), "code"),
        ("/v1/jupyter/execute", json!({"code": 1}), "code"),
        ("/v1/jupyter/execute", json!({"code": "a\0"}), "code"),
        ("/v1/jupyter/execute", json!({"code": "1", "timeout": 0}), "timeout"),
        ("/v1/jupyter/execute", json!({"code": "1", "timeout": 301}), "timeout"),
        ("/v1/jupyter/execute", json!({"code": "1", "session_id": "x".repeat(257)}), "session_id"),
        ("/v1/nodejs/execute", json!({"code": "1", "files": {"../x": ""}}), "files"),
        ("/v1/nodejs/execute", json!({"code": "1", "session_id": "a", "stdin": "x"}), "stdin"),
        ("/v1/nodejs/sessions", json!({"max_idle_time": 59}), "max_idle_time"),
        ("/v1/code/execute", json!({"code": "1"}), "language"),
        ("/v1/code/execute", json!({"code": "1", "language": "ruby"}), "language"),
    ] {
        let refused = sandbox.post(path, body.clone()).await.expect(422);
        assert_eq!(refused["detail"][0]["loc"], json!(["body", field]), "{path} {body}: {refused}");
    }
    let nulls =
        json!({"code": "1", "timeout": null, "kernel_name": null, "session_id": null, "cwd": null, "new": 1});
    assert_eq!(sandbox.post("/v1/jupyter/execute", nulls).await.expect(200)["success"], true);
    let path = format!("{}/v1/jupyter/sessions/create", sandbox.path);
    let empty = server.request("POST", &path).header("content-type", "application/json").send().await;
    assert_eq!(empty.expect(200)["success"], true);
    assert_eq!(sandbox.get("/v1/nodejs/sessions/unknown").await.expect(404)["message"], "Session not found");
    assert_eq!(sandbox.get("/v1/nodejs/sessions/%ff").await.expect(404)["message"], "Session not found");
}

#[tokio::test]
async fn versions_are_those_of_the_image() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let info = sandbox.get("/v1/nodejs/info").await.expect(200)["data"].clone();
    let version = info["node_version"].as_str().unwrap().strip_prefix('v').unwrap().to_owned();
    let major = version.split('.').next().unwrap();
    assert_eq!(info["current_version"], format!("node{major}"), "{info}");
    for accepted in [format!("node{major}"), major.to_owned(), version.clone()] {
        sandbox.post("/v1/nodejs/execute", json!({"code": "1", "version": accepted})).await.expect(200);
    }
    let refused =
        sandbox.post("/v1/nodejs/execute", json!({"code": "1", "version": "node1"})).await.expect(400);
    assert!(refused["message"].as_str().unwrap().contains(&version), "{refused}");
    let languages = sandbox.get("/v1/code/info").await.expect(200)["data"]["languages"].clone();
    assert_eq!(languages.as_array().unwrap().len(), 2, "{languages}");
}
