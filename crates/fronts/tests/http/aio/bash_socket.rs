//! The WebSocket of `/v1/bash`, with a client of WebSockets.

use serde_json::{Value, json};

use super::AioSandbox;
use super::json_socket::JsonSocket;
use super::shell::start_shell_server;

impl JsonSocket {
    async fn exec(&mut self, command: &str) {
        self.send(json!({"type": "exec", "data": command})).await;
    }

    /// Reads until the current command has ended, and returns its two outputs and the last message.
    async fn read_command(&mut self) -> (String, String, Value) {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        loop {
            let message = self.next().await.unwrap();
            let text = message["data"].as_str().unwrap_or_default();
            match (message["type"].as_str().unwrap(), message["stream"].as_str()) {
                ("output", Some("stdout")) => stdout += text,
                ("output", Some("stderr")) => stderr += text,
                ("command_done", _) => return (stdout, stderr, message),
                _ => panic!("{message}"),
            }
        }
    }
}

/// Connects to a session, and returns the connection with the id of the session.
async fn open(sandbox: &AioSandbox<'_>, query: &str) -> (JsonSocket, String) {
    let mut socket = JsonSocket::open(sandbox, &format!("/v1/bash/ws{query}")).await;
    let first = socket.next().await.unwrap();
    assert_eq!(first["type"], "session_id");
    (socket, first["data"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn commands_of_a_socket_run_one_after_the_other() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let (mut socket, id) = open(&sandbox, "").await;
    socket.exec("echo out-é; echo wrong >&2; exit 3").await;
    socket.exec("echo second").await;
    let (stdout, stderr, done) = socket.read_command().await;
    assert_eq!((stdout.as_str(), stderr.as_str()), ("out-é\n", "wrong\n"));
    assert_eq!((&done["exit_code"], &done["status"]), (&json!(3), &json!("completed")));
    let (stdout, _, second) = socket.read_command().await;
    assert_eq!((stdout.as_str(), &second["exit_code"]), ("second\n", &json!(0)));
    assert_ne!(done["command_id"], second["command_id"]);
    // The other routes know the commands by the same ids.
    let body = json!({"session_id": id, "command_id": done["command_id"]});
    let output = sandbox.post("/v1/bash/output", body).await.expect(200);
    assert_eq!(output["data"]["stdout"], "out-é\n");
}

#[tokio::test]
async fn input_of_a_socket_reaches_the_running_command() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let (mut socket, id) = open(&sandbox, "?session_id=chosen").await;
    assert_eq!(id, "chosen");
    let idle = json!({"type": "input", "data": "early\n"});
    socket.send(idle).await;
    let refused = socket.next().await.unwrap();
    assert_eq!(refused, json!({"type": "error", "data": "No running process to write to"}));
    socket.exec("echo waits; read line; echo got $line").await;
    socket.read_until("waits\n").await;
    socket.send(json!({"type": "input", "data": "typed\n"})).await;
    assert_eq!(socket.read_command().await.0, "got typed\n");
    socket.exec("sleep 1000").await;
    // The command may not have begun yet, and a signal to nothing is no error.
    let running = json!({"session_id": "chosen", "wait": true, "wait_timeout": 0});
    while sandbox.post("/v1/bash/output", running.clone()).await.expect(200)["data"]["command"]["status"]
        != "running"
    {
        tokio::task::yield_now().await;
    }
    sandbox.post("/v1/bash/kill", json!({"session_id": "chosen"})).await.expect(200);
    let (_, _, killed) = socket.read_command().await;
    assert_eq!((&killed["status"], &killed["exit_code"]), (&json!("killed"), &json!(-15)));
}

#[tokio::test]
async fn wrong_messages_of_a_socket_are_errors_and_do_not_end_it() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let (mut socket, _) = open(&sandbox, "").await;
    for wrong in [
        "ls",
        "[]",
        r#"{"type":"exec"}"#,
        r#"{"type":"kill","data":"x"}"#,
        r#"{"type":"exec","data":"a\u0000"}"#,
    ] {
        socket.send_text(wrong).await;
        assert_eq!(socket.next().await.unwrap()["type"], "error", "{wrong}");
    }
    socket.send(json!({"type": "ping"})).await;
    assert_eq!(socket.next().await.unwrap()["type"], "pong");
    socket.exec("echo on").await;
    assert_eq!(socket.read_command().await.0, "on\n");
    let plain = sandbox.get("/v1/bash/ws").await;
    assert_eq!(plain.expect(400)["success"], false);
}

#[tokio::test]
async fn command_of_a_socket_goes_on_without_its_client() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let (mut socket, id) = open(&sandbox, "").await;
    socket.exec("echo begun; read line; echo $line").await;
    socket.read_until("begun\n").await;
    socket.close().await;
    let (mut again, same) = open(&sandbox, &format!("?session_id={id}")).await;
    assert_eq!(same, id);
    sandbox.post("/v1/bash/write", json!({"session_id": id, "input": "end\n"})).await.expect(200);
    let rest = json!({"session_id": id, "offset": 6, "wait": true});
    assert_eq!(sandbox.post("/v1/bash/output", rest).await.expect(200)["data"]["stdout"], "end\n");
    again.exec("echo next").await;
    assert_eq!(again.read_command().await.0, "next\n");
}
