//! The terminal for people: its WebSocket, its page and its address.

use serde_json::json;

use super::AioSandbox;
use super::json_socket::JsonSocket;
use super::shell::start_shell_server;

async fn open(sandbox: &AioSandbox<'_>, query: &str) -> JsonSocket {
    JsonSocket::open(sandbox, &format!("/v1/shell/ws{query}")).await
}

#[tokio::test]
async fn terminal_is_restored_for_a_client_that_comes_back() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let mut socket = open(&sandbox, "").await;
    let first = socket.next().await.unwrap();
    assert_eq!(first["type"], "session_id");
    let id = first["data"].as_str().unwrap().to_owned();
    assert_eq!(socket.next().await.unwrap()["type"], "ready");
    socket.send(json!({"type": "resize", "data": {"cols": 91, "rows": 33}})).await;
    socket.send(json!({"type": "input", "data": "stty size; echo $((40+2))-é\r"})).await;
    socket.read_until("42-é").await;
    socket.send(json!({"type": "ping", "timestamp": 7})).await;
    while socket.next().await.unwrap()["type"] != "pong" {}

    let mut second = open(&sandbox, &format!("?session_id={id}")).await;
    let refused = second.next().await.unwrap();
    assert_eq!(refused, json!({"type": "error", "data": "Session is already connected"}));
    assert_eq!(second.next().await, None);
    socket.close().await;

    let mut again = open(&sandbox, &format!("?session_id={id}")).await;
    let restored = again.next().await.unwrap();
    assert_eq!(restored["type"], "restore_output");
    let text = restored["data"].as_str().unwrap();
    assert!(text.contains("33 91") && text.contains("42-é"), "{text}");
    assert_eq!(again.next().await.unwrap()["type"], "terminal_restored");
    again.send_text("echo $((50+5))\r").await;
    again.read_until("55").await;
}

#[tokio::test]
async fn unknown_terminal_is_an_error_message() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let mut socket = open(&sandbox, "?session_id=none").await;
    assert_eq!(socket.next().await.unwrap(), json!({"type": "error", "data": "Session not found"}));
    assert_eq!(socket.next().await, None);
    sandbox.get("/v1/shell/ws").await.expect(400);
}

#[tokio::test]
async fn page_loads_nothing_from_elsewhere() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let url = sandbox.request("GET", "/v1/shell/terminal-url").header("x-forwarded-proto", "https");
    let url = url.header("x-forwarded-host", "public.test").header("x-forwarded-prefix", "/p/").send().await;
    let url = url.expect(200)["data"].as_str().unwrap().to_owned();
    let (page, id) = url.split_once("?session_id=").unwrap();
    assert_eq!(page, format!("https://public.test/p{}/terminal", sandbox.path));
    let mut socket = open(&sandbox, &format!("?session_id={id}")).await;
    assert_eq!(socket.next().await.unwrap()["type"], "terminal_restored");
    let page = sandbox.get("/terminal").await;
    assert_eq!((page.status.as_u16(), page.header("referrer-policy")), (200, Some("no-referrer")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert!(!page.text().contains("src=") && !page.text().contains("http://"));
}
