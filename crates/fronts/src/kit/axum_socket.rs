//! The web server's WebSocket as a connection of messages. Nothing else in the kit's socket loops
//! names the web server's types.

use std::borrow::Cow;

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, future};

use super::socket::{CloseReason, MessageSink, MessageStream, SocketError, SocketMessage};

/// Splits a WebSocket into its two directions.
pub(crate) fn split_socket(socket: WebSocket) -> (impl MessageSink, impl MessageStream) {
    let (sink, stream) = socket.split();
    let sink = sink.sink_map_err(socket_error).with(|message| future::ok(axum_message(message)));
    let stream = stream.map(|message| message.map(socket_message).map_err(socket_error));
    (sink, stream)
}

fn socket_error(error: axum::Error) -> SocketError {
    SocketError(error.into_inner())
}

fn socket_message(message: Message) -> SocketMessage {
    match message {
        Message::Text(text) => SocketMessage::Text(text.as_str().to_owned()),
        Message::Binary(bytes) => SocketMessage::Binary(bytes),
        Message::Ping(_) => SocketMessage::Ping,
        Message::Pong(_) => SocketMessage::Pong,
        Message::Close(frame) => SocketMessage::Close(frame.map(|frame| CloseReason {
            code: frame.code,
            reason: Cow::Owned(frame.reason.as_str().to_owned()),
        })),
    }
}

fn axum_message(message: SocketMessage) -> Message {
    match message {
        SocketMessage::Text(text) => Message::Text(text.into()),
        SocketMessage::Binary(bytes) => Message::Binary(bytes),
        SocketMessage::Ping => Message::Ping(Bytes::new()),
        SocketMessage::Pong => Message::Pong(Bytes::new()),
        SocketMessage::Close(reason) => Message::Close(
            reason.map(|reason| CloseFrame { code: reason.code, reason: reason.reason.as_ref().into() }),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_conversion() {
        for message in [
            SocketMessage::Text("a".to_owned()),
            SocketMessage::Binary(Bytes::from_static(b"b")),
            SocketMessage::Ping,
            SocketMessage::Pong,
            SocketMessage::Close(None),
            SocketMessage::Close(Some(CloseReason::new(4001, "TAKEN_OVER"))),
        ] {
            assert_eq!(socket_message(axum_message(message.clone())), message);
        }
    }
}
