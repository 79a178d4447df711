//! Responses that may take long. Blanks precede the JSON, which allows them there, so that no client or proxy takes the
//! connection for dead.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::header;
use serde::Serialize;
use tokio::time::timeout;

use super::envelope::ResponseEnvelope;
use super::problem::AioProblem;

/// How often a blank is sent.
pub(super) const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// A result that can also be sent after blanks.
pub(super) trait JsonPieces: IntoResponse + Send + 'static {
    /// The JSON, in pieces that are made while it is sent.
    fn into_pieces(self) -> impl Iterator<Item = Bytes> + Send + 'static;
}

impl<T: Serialize + Send + 'static> JsonPieces for ResponseEnvelope<T> {
    fn into_pieces(self) -> impl Iterator<Item = Bytes> + Send + 'static {
        let body = serde_json::to_vec(&self).expect("responses consist of texts and numbers");
        std::iter::once(Bytes::from(body))
    }
}

type LateResult<R> = Pin<Box<dyn Future<Output = R> + Send>>;

/// Responds with the result. If that takes longer than the interval, the status 200 is sent before the result is known.
/// A later error is then turned into a result by `late_failure`, with the same fields as any other: some clients look
/// only at these. Dropping the response drops the future.
pub(super) async fn respond_with_blanks<R: JsonPieces, E: Into<AioProblem> + Send + 'static>(
    result: impl Future<Output = Result<R, E>> + Send + 'static,
    late_failure: impl FnOnce(E) -> R + Send + 'static,
) -> Result<Response, AioProblem> {
    let mut waiting = Box::pin(result);
    match timeout(KEEP_ALIVE_INTERVAL, &mut waiting).await {
        Ok(Ok(result)) => Ok(result.into_response()),
        Ok(Err(error)) => Err(error.into()),
        Err(_elapsed) => {
            Ok(late_response(Box::pin(async move { waiting.await.unwrap_or_else(late_failure) })))
        }
    }
}

fn late_response<R: JsonPieces>(waiting: LateResult<R>) -> Response {
    let blank = || stream::iter([Bytes::from_static(b" ")]).left_stream();
    let later = stream::unfold(Some(waiting), move |waiting| async move {
        let mut waiting = waiting?;
        match timeout(KEEP_ALIVE_INTERVAL, &mut waiting).await {
            Err(_elapsed) => Some((blank(), Some(waiting))),
            Ok(result) => Some((stream::iter(result.into_pieces()).right_stream(), None)),
        }
    });
    let pieces = blank().chain(later.flatten()).map(Ok::<_, Infallible>);
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(pieces)).into_response()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    use super::*;

    async fn body_after(
        wait: Duration,
        result: Result<ResponseEnvelope<u32>, AioProblem>,
    ) -> Result<(u16, Bytes), AioProblem> {
        let response = async move {
            tokio::time::sleep(wait).await;
            result
        };
        let late_failure = |problem: AioProblem| ResponseEnvelope::failure(problem.message, 9);
        let response = respond_with_blanks(response, late_failure).await?;
        let status = response.status().as_u16();
        Ok((status, response.into_body().collect().await.expect("the body cannot fail").to_bytes()))
    }

    #[tokio::test(start_paused = true)]
    async fn blanks_precede_a_late_result() {
        let done = || Ok(ResponseEnvelope::success("done", 7));
        let (_, early) = body_after(KEEP_ALIVE_INTERVAL / 2, done()).await.unwrap();
        assert!(early.starts_with(b"{"));
        let (_, late) = body_after(KEEP_ALIVE_INTERVAL * 7 / 2, done()).await.unwrap();
        assert!(late.starts_with(b"   {"), "{late:?}");
        let parse = |body: &Bytes| serde_json::from_slice::<Value>(body).unwrap();
        assert_eq!(parse(&early), parse(&late));
    }

    #[tokio::test(start_paused = true)]
    async fn late_error_is_a_failure_with_data() {
        let refused = || Err(AioProblem::bad_request("refused"));
        let early = body_after(KEEP_ALIVE_INTERVAL / 2, refused()).await.unwrap_err();
        assert_eq!(early.status, 400);
        let (status, late) = body_after(KEEP_ALIVE_INTERVAL * 2, refused()).await.unwrap();
        let late: Value = serde_json::from_slice(&late).unwrap();
        let expected = json!({"success": false, "message": "refused", "data": 9, "hint": null});
        assert_eq!((status, late), (200, expected));
    }
}
