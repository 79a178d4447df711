//! The terminal for people: its WebSocket, its page and its address.

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use super::AioSandbox;
use super::shell::start_shell_server;

struct TerminalSocket(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl TerminalSocket {
    async fn open(sandbox: &AioSandbox<'_>, query: &str) -> Self {
        let url = format!("ws://{}{}/v1/shell/ws{query}", sandbox.server.address, sandbox.path);
        Self(connect_async(url).await.unwrap().0)
    }

    /// The next message; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            match self.0.next().await?.ok()? {
                Message::Text(text) => return Some(serde_json::from_str(&text).unwrap()),
                Message::Close(_) => return None,
                _ => {}
            }
        }
    }

    async fn send(&mut self, message: Value) {
        self.0.send(Message::text(message.to_string())).await.unwrap();
    }

    /// Reads output until it contains a text.
    async fn read_until(&mut self, text: &str) {
        let mut output = String::new();
        while !output.contains(text) {
            let message = self.next().await.unwrap();
            if message["type"] == "output" {
                output += message["data"].as_str().unwrap();
            }
        }
    }
}

#[tokio::test]
async fn terminal_is_restored_for_a_client_that_comes_back() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let mut socket = TerminalSocket::open(&sandbox, "").await;
    let first = socket.next().await.unwrap();
    assert_eq!(first["type"], "session_id");
    let id = first["data"].as_str().unwrap().to_owned();
    assert_eq!(socket.next().await.unwrap()["type"], "ready");
    socket.send(json!({"type": "resize", "data": {"cols": 91, "rows": 33}})).await;
    socket.send(json!({"type": "input", "data": "stty size; echo $((40+2))-é\r"})).await;
    socket.read_until("42-é").await;
    socket.send(json!({"type": "ping", "timestamp": 7})).await;
    while socket.next().await.unwrap()["type"] != "pong" {}

    let mut second = TerminalSocket::open(&sandbox, &format!("?session_id={id}")).await;
    let refused = second.next().await.unwrap();
    assert_eq!(refused, json!({"type": "error", "data": "Session is already connected"}));
    assert_eq!(second.next().await, None);
    socket.0.close(None).await.unwrap();
    while socket.next().await.is_some() {}

    let mut again = TerminalSocket::open(&sandbox, &format!("?session_id={id}")).await;
    let restored = again.next().await.unwrap();
    assert_eq!(restored["type"], "restore_output");
    let text = restored["data"].as_str().unwrap();
    assert!(text.contains("33 91") && text.contains("42-é"), "{text}");
    assert_eq!(again.next().await.unwrap()["type"], "terminal_restored");
    again.0.send(Message::text("echo $((50+5))\r")).await.unwrap();
    again.read_until("55").await;
}

#[tokio::test]
async fn unknown_terminal_is_an_error_message() {
    let server = start_shell_server().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let mut socket = TerminalSocket::open(&sandbox, "?session_id=none").await;
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
    let mut socket = TerminalSocket::open(&sandbox, &format!("?session_id={id}")).await;
    assert_eq!(socket.next().await.unwrap()["type"], "terminal_restored");
    let page = sandbox.get("/terminal").await;
    assert_eq!((page.status.as_u16(), page.header("referrer-policy")), (200, Some("no-referrer")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert!(!page.text().contains("src=") && !page.text().contains("http://"));
}
