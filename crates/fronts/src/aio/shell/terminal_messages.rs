//! The messages of a terminal's WebSocket, all of them JSON.
//!
//! ```text
//! to the client:    session_id ready                    for a new terminal
//!                   restore_output terminal_restored    for one that was left
//!                   output… · ping · pong · error
//! from the client:  input · resize · ping · pong; any other text is input
//! ```
//! Output may be split inside a character, which a codec without state cannot join. The codec therefore passes output
//! on as bytes, and [`encode_output`] makes text of it.

use bytes::Bytes;
use futures_util::{SinkExt, stream};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::kit::command_ending::exit_code;
use crate::kit::socket::{CLOSE_FAILED, CLOSE_NORMAL, CloseReason, MessageSink, SocketError, SocketMessage};
use crate::kit::terminal_socket::{TerminalAction, TerminalCodec, TerminalEnding, TerminalEvent};
use crate::kit::time::now_ms;
use crate::kit::utf8_decoder::Utf8Decoder;

/// For a client that opens a new terminal.
pub(super) static NEW_TERMINAL_CODEC: TerminalCodec = TerminalCodec {
    decode: decode_message,
    encode: |event| encode_event(event, ConnectedText { kind: "ready", text: "Terminal is ready" }),
    close: close_reason,
    ping: Some(ping_message),
};

/// For a client that comes back to a terminal.
pub(super) static RESTORED_TERMINAL_CODEC: TerminalCodec = TerminalCodec {
    decode: decode_message,
    encode: |event| {
        encode_event(event, ConnectedText { kind: "terminal_restored", text: "Terminal is restored" })
    },
    close: close_reason,
    ping: Some(ping_message),
};

/// The first message to a client.
struct ConnectedText {
    kind: &'static str,
    text: &'static str,
}

/// Messages from the client.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum TerminalClientMessage {
    Input { data: String },
    Resize { data: ResizeData },
    Ping,
    Pong,
}

#[derive(Deserialize)]
struct ResizeData {
    cols: u16,
    rows: u16,
}

/// The id of a new terminal.
pub(super) fn session_message(id: &str) -> SocketMessage {
    data_message("session_id", id)
}

pub(super) fn error_message(text: &str) -> SocketMessage {
    data_message("error", text)
}

/// Makes text messages of the output.
pub(super) fn encode_output(sink: impl MessageSink) -> impl MessageSink {
    let mut decoder = Utf8Decoder::default();
    sink.with_flat_map(move |message| {
        let message = match message {
            SocketMessage::Binary(bytes) => {
                let mut text = String::new();
                decoder.decode(&bytes, &mut text);
                (!text.is_empty()).then(|| data_message("output", &text))
            }
            message => Some(message),
        };
        stream::iter(message.map(Ok::<_, SocketError>))
    })
}

fn decode_message(message: &SocketMessage) -> Result<TerminalAction, String> {
    let text = match message {
        SocketMessage::Text(text) => text,
        SocketMessage::Binary(bytes) => return Ok(TerminalAction::Input(bytes.to_vec())),
        _ => return Err("a message must be text or binary".to_owned()),
    };
    let parsed = serde_json::from_str::<Value>(text).ok();
    let Some(parsed) = parsed.filter(|parsed| parsed["type"].is_string()) else {
        return Ok(TerminalAction::Input(text.clone().into_bytes()));
    };
    match serde_json::from_value(parsed).map_err(|error| error.to_string())? {
        TerminalClientMessage::Input { data } => Ok(TerminalAction::Input(data.into_bytes())),
        TerminalClientMessage::Resize { data: ResizeData { cols, rows } } => {
            Ok(TerminalAction::Resize { columns: cols, rows })
        }
        TerminalClientMessage::Ping => Ok(TerminalAction::Ping),
        TerminalClientMessage::Pong => Ok(TerminalAction::Pong),
    }
}

fn encode_event(event: &TerminalEvent<'_>, connected: ConnectedText) -> SocketMessage {
    match event {
        TerminalEvent::Replay(missed) => {
            data_message("restore_output", &String::from_utf8_lossy(&missed.bytes))
        }
        TerminalEvent::Connected { .. } => data_message(connected.kind, connected.text),
        TerminalEvent::Output { bytes, .. } => SocketMessage::Binary(Bytes::copy_from_slice(bytes)),
        TerminalEvent::Exited(exit) => {
            data_message("output", &format!("\r\n[the shell has ended with code {}]\r\n", exit_code(*exit)))
        }
        TerminalEvent::Fault { message, .. } => error_message(message),
        TerminalEvent::Pong => json_message(&json!({"type": "pong", "timestamp": now_ms()})),
    }
}

fn ping_message() -> SocketMessage {
    json_message(&json!({"type": "ping", "timestamp": now_ms()}))
}

fn data_message(kind: &str, data: &str) -> SocketMessage {
    json_message(&json!({"type": kind, "data": data}))
}

fn json_message(message: &Value) -> SocketMessage {
    SocketMessage::Text(message.to_string())
}

fn close_reason(ending: TerminalEnding) -> CloseReason {
    match ending {
        TerminalEnding::ClientGone => CloseReason::new(CLOSE_NORMAL, ""),
        TerminalEnding::Exited => CloseReason::new(CLOSE_NORMAL, "the shell has ended"),
        TerminalEnding::StartFailed => CloseReason::new(CLOSE_FAILED, "the shell could not be started"),
        TerminalEnding::TerminalGone => CloseReason::new(CLOSE_FAILED, "the terminal is gone"),
        TerminalEnding::TakenOver => CloseReason::new(CLOSE_NORMAL, "another client has taken over"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_plain_text_become_actions() {
        let input = |text: &str| TerminalAction::Input(text.as_bytes().to_vec());
        for (text, expected) in [
            (r#"{"type":"input","data":"ls\r"}"#, input("ls\r")),
            (
                r#"{"type":"resize","data":{"cols":90,"rows":30}}"#,
                TerminalAction::Resize { columns: 90, rows: 30 },
            ),
            (r#"{"type":"ping","timestamp":7}"#, TerminalAction::Ping),
            (r#"{"type":"pong","data":null}"#, TerminalAction::Pong),
            ("ls\r", input("ls\r")),
            ("1", input("1")),
            ("{}", input("{}")),
        ] {
            let decoded = decode_message(&SocketMessage::Text(text.to_owned()));
            assert_eq!(decoded, Ok(expected), "{text}");
        }
        for text in [r#"{"type":"reboot"}"#, r#"{"type":"resize","data":{"cols":-1,"rows":1}}"#] {
            assert!(decode_message(&SocketMessage::Text(text.to_owned())).is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn characters_may_be_split() {
        let (sink, received) = recording_sink();
        let mut sink = Box::pin(encode_output(sink));
        for piece in [&b"a\xe6"[..], b"\x97", b"\xa5b"] {
            sink.send(SocketMessage::Binary(Bytes::copy_from_slice(piece))).await.unwrap();
        }
        sink.send(SocketMessage::Ping).await.unwrap();
        let received = received.lock().unwrap().clone();
        assert_eq!(
            received,
            [data_message("output", "a"), data_message("output", "日b"), SocketMessage::Ping]
        );
    }

    type Received = std::sync::Arc<std::sync::Mutex<Vec<SocketMessage>>>;

    /// A sink that keeps what it is sent.
    fn recording_sink() -> (impl MessageSink, Received) {
        let received = Received::default();
        let kept = received.clone();
        let sink = futures_util::sink::unfold((), move |(), message| {
            kept.lock().unwrap().push(message);
            std::future::ready(Ok::<_, SocketError>(()))
        });
        (sink, received)
    }
}
