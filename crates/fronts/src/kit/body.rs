//! Request bodies that are read as a whole, and the rest of refused ones.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};

/// How long a client may take to send such a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the rest of a refused body is read.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a body could not be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("request body exceeds {0} bytes")]
    TooLong(usize),
    #[error("request body was not received in time")]
    Timeout,
    #[error("request body ended early")]
    EndedEarly,
}

/// Reads a whole body of at most `limit` bytes.
pub(crate) async fn read_body(body: Body, limit: usize) -> Result<Bytes, BodyError> {
    let read = tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, limit)).await;
    read.map_err(|_elapsed| BodyError::Timeout)?.map_err(|error| {
        let by_limit =
            std::error::Error::source(&error).is_some_and(|e| e.is::<http_body_util::LengthLimitError>());
        if by_limit { BodyError::TooLong(limit) } else { BodyError::EndedEarly }
    })
}

/// Reads the rest of a refused body. A client that is still sending would otherwise see a broken connection instead of
/// the reason.
pub(crate) async fn drain_body<E>(rest: impl Stream<Item = Result<Bytes, E>>) {
    // A broken body never ends.
    let rest = rest.take_while(|piece| std::future::ready(piece.is_ok())).for_each(|_| async {});
    if tokio::time::timeout(DRAIN_TIMEOUT, rest).await.is_err() {
        tracing::debug!("stopped draining a refused body: it took too long");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn longer_bodies_are_refused() {
        assert_eq!(read_body(Body::from("four"), 4).await, Ok(Bytes::from("four")));
        assert_eq!(read_body(Body::from("fours"), 4).await, Err(BodyError::TooLong(4)));
    }
}
