//! A client of WebSockets whose messages are JSON.

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use super::AioSandbox;

pub(super) struct JsonSocket(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl JsonSocket {
    /// Connects to a path of the API of a sandbox.
    pub(super) async fn open(sandbox: &AioSandbox<'_>, path: &str) -> Self {
        let url = format!("ws://{}{}{path}", sandbox.server.address, sandbox.path);
        Self(connect_async(url).await.unwrap().0)
    }

    /// The next message; `None` at the end.
    pub(super) async fn next(&mut self) -> Option<Value> {
        loop {
            match self.0.next().await?.ok()? {
                Message::Text(text) => return Some(serde_json::from_str(&text).unwrap()),
                Message::Close(_) => return None,
                _ => {}
            }
        }
    }

    pub(super) async fn send(&mut self, message: Value) {
        self.send_text(&message.to_string()).await;
    }

    pub(super) async fn send_text(&mut self, text: &str) {
        self.0.send(Message::text(text)).await.unwrap();
    }

    /// Reads output until it contains a text.
    pub(super) async fn read_until(&mut self, text: &str) {
        let mut output = String::new();
        while !output.contains(text) {
            let message = self.next().await.unwrap();
            if message["type"] == "output" {
                output += message["data"].as_str().unwrap();
            }
        }
    }

    /// Closes the connection and waits until the server has done so, too.
    pub(super) async fn close(mut self) {
        self.0.close(None).await.unwrap();
        while self.next().await.is_some() {}
    }
}
