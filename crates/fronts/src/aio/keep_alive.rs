//! Responses that may take long. Blanks precede the JSON, which allows them there, so that no client or proxy takes the
//! connection for dead.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header;
use serde::Serialize;
use serde_json::json;
use tokio::time::timeout;

use super::envelope::ResponseEnvelope;
use super::problem::AioProblem;

/// How often a blank is sent.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

type WaitingResult<T> = Pin<Box<dyn Future<Output = Result<ResponseEnvelope<T>, AioProblem>> + Send>>;

/// Responds with the result. If that takes longer than the interval, the status is sent before the result is known, so
/// a later error is a failure in the envelope. Dropping the response drops the future.
pub(super) async fn respond_with_blanks<T: Serialize + Send + 'static>(
    result: impl Future<Output = Result<ResponseEnvelope<T>, AioProblem>> + Send + 'static,
) -> Result<Response, AioProblem> {
    let mut waiting: WaitingResult<T> = Box::pin(result);
    match timeout(KEEP_ALIVE_INTERVAL, &mut waiting).await {
        Ok(result) => Ok(Json(result?).into_response()),
        Err(_elapsed) => Ok(late_response(waiting)),
    }
}

fn late_response<T: Serialize + Send + 'static>(waiting: WaitingResult<T>) -> Response {
    let pieces = stream::unfold((Some(waiting), true), async |(waiting, is_first)| {
        let mut waiting = waiting?;
        let blank = Bytes::from_static(b" ");
        if is_first {
            return Some((blank, (Some(waiting), false)));
        }
        match timeout(KEEP_ALIVE_INTERVAL, &mut waiting).await {
            Err(_elapsed) => Some((blank, (Some(waiting), false))),
            Ok(result) => Some((encode_result(result), (None, false))),
        }
    });
    let pieces = futures_util::StreamExt::map(pieces, Ok::<_, Infallible>);
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(pieces)).into_response()
}

fn encode_result<T: Serialize>(result: Result<ResponseEnvelope<T>, AioProblem>) -> Bytes {
    let body = match result {
        Ok(envelope) => serde_json::to_vec(&envelope).expect("responses consist of texts and numbers"),
        Err(problem) => {
            let AioProblem { message, data, hint, .. } = problem;
            json!({"success": false, "message": message, "data": data, "hint": hint}).to_string().into_bytes()
        }
    };
    body.into()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::Value;

    use super::*;

    async fn body_after(
        wait: Duration,
        result: Result<ResponseEnvelope<u32>, AioProblem>,
    ) -> Result<(u16, Bytes), AioProblem> {
        let response = respond_with_blanks(async move {
            tokio::time::sleep(wait).await;
            result
        });
        let response = response.await?;
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
    async fn late_error_is_a_failure_in_the_envelope() {
        let refused = || Err(AioProblem::bad_request("refused"));
        let early = body_after(KEEP_ALIVE_INTERVAL / 2, refused()).await.unwrap_err();
        assert_eq!(early.status, 400);
        let (status, late) = body_after(KEEP_ALIVE_INTERVAL * 2, refused()).await.unwrap();
        let late: Value = serde_json::from_slice(&late).unwrap();
        assert_eq!((status, &late["success"], &late["message"]), (200, &json!(false), &json!("refused")));
    }
}
