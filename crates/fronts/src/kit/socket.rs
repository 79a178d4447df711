//! Connections that carry whole messages, whatever they run over.
//!
//! A WebSocket is one; frames on stdin and stdout may be another. The loops of terminals and commands
//! use only these types, and `axum_socket.rs` adapts the web server's.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Sink, SinkExt, Stream, StreamExt};
use tokio::time::timeout;

/// The close code of a connection that has done its work.
pub(crate) const CLOSE_NORMAL: u16 = 1000;
/// The close code of a connection that failed on the server's side.
pub(crate) const CLOSE_FAILED: u16 = 1011;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SocketMessage {
    Text(String),
    Binary(Bytes),
    /// The transport answers it.
    Ping,
    Pong,
    Close(Option<CloseReason>),
}

/// The code and reason in the last message of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CloseReason {
    pub(crate) code: u16,
    pub(crate) reason: Cow<'static, str>,
}

impl CloseReason {
    pub(crate) const fn new(code: u16, reason: &'static str) -> Self {
        Self { code, reason: Cow::Borrowed(reason) }
    }
}

/// The connection broke.
#[derive(Debug, thiserror::Error)]
#[error("the connection is broken")]
pub(crate) struct SocketError(#[source] pub(crate) Box<dyn std::error::Error + Send + Sync>);

/// The direction from the client. This names a bound; everything that fits it implements it.
pub(crate) trait MessageStream:
    Stream<Item = Result<SocketMessage, SocketError>> + Send + Unpin
{
}

/// The direction to the client.
pub(crate) trait MessageSink: Sink<SocketMessage, Error = SocketError> + Send + Unpin {}

impl<T> MessageStream for T where T: Stream<Item = Result<SocketMessage, SocketError>> + Send + Unpin {}
impl<T> MessageSink for T where T: Sink<SocketMessage, Error = SocketError> + Send + Unpin {}

/// Builds a binary message from the byte that says what it is, and its content.
pub(crate) fn tagged_message(tag: u8, content: &[u8]) -> SocketMessage {
    SocketMessage::Binary([&[tag][..], content].concat().into())
}

/// Sends the last message and waits for the client to close the connection too. Hanging up at once
/// would reset the connection of a client that has not read everything yet.
pub(crate) async fn close_socket(
    sink: &mut impl MessageSink,
    stream: &mut impl MessageStream,
    reason: CloseReason,
    limit: Duration,
) {
    let said = timeout(limit, sink.send(SocketMessage::Close(Some(reason)))).await;
    let heard = async { while let Some(Ok(_)) = stream.next().await {} };
    if !matches!(said, Ok(Ok(()))) || timeout(limit, heard).await.is_err() {
        tracing::debug!("client disconnected without closing its socket");
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{sink, stream};

    use super::*;

    fn discard() -> impl MessageSink {
        sink::drain().sink_map_err(|never| match never {})
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_never_closes_is_not_awaited_forever() {
        let begun = tokio::time::Instant::now();
        let limit = Duration::from_secs(10);
        let mut sink = Box::pin(discard());
        let reason = CloseReason::new(CLOSE_NORMAL, "");
        close_socket(&mut sink, &mut stream::pending(), reason.clone(), limit).await;
        assert_eq!(begun.elapsed(), limit);
        close_socket(&mut sink, &mut stream::empty(), reason, limit).await;
        assert_eq!(begun.elapsed(), limit);
    }

    #[test]
    fn tag_precedes_the_content() {
        assert_eq!(tagged_message(1, b"ab"), SocketMessage::Binary(Bytes::from_static(b"\x01ab")));
    }
}
