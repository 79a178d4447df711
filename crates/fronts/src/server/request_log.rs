//! Per-request tracing: an id on the response, a line in the log, a metric.
//!
//! Neither the path nor the query of a request is logged, only the pattern of its route: ids are
//! harmless, but file paths and tokens in queries are not ours to keep.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderName, HeaderValue};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tracing::Instrument;

const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// A request id longer than this is replaced rather than echoed.
const MAX_REQUEST_ID_LENGTH: usize = 128;

/// The pattern of the matched route, attached to the response by a nested router.
#[derive(Clone)]
pub(crate) struct RouteLabel(pub(crate) String);

/// Assigns an id to the request, runs it and logs it.
pub(crate) async fn log_request(mut request: Request, next: Next) -> Response {
    let id = request_id(&request);
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let started = Instant::now();
    request.headers_mut().insert(REQUEST_ID_HEADER, id.clone());
    let id_text = id.to_str().unwrap_or_default();
    let span = tracing::info_span!("request", id = id_text);
    let mut response = next.run(request).instrument(span).await;
    let inner = response.extensions_mut().remove::<RouteLabel>().map(|route| route.0);
    let route = inner.or(route).unwrap_or_else(|| "unmatched".to_owned());
    let (status, elapsed) = (response.status().as_u16(), started.elapsed());
    #[expect(
        clippy::cast_possible_truncation,
        reason = "only a request longer than 500 million years would overflow"
    )]
    let micros = elapsed.as_micros() as u64;
    tracing::info!(target: "access", request_id = id_text, %method, route, status, micros, "request completed");
    metrics::histogram!("coracle_http_request_seconds", "route" => route, "status" => status.to_string())
        .record(elapsed);
    response.headers_mut().insert(REQUEST_ID_HEADER, id);
    response
}

fn request_id(request: &Request) -> HeaderValue {
    let given = request.headers().get(REQUEST_ID_HEADER).filter(|value| {
        !value.is_empty()
            && value.len() <= MAX_REQUEST_ID_LENGTH
            && value.to_str().is_ok_and(|text| text.is_ascii())
    });
    given.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&unique_hex()).expect("hexadecimal digits are a valid header value")
    })
}

/// Returns 32 hexadecimal digits that are unique across calls and servers.
pub(crate) fn unique_hex() -> String {
    static SEEDS: LazyLock<[u64; 4]> =
        LazyLock::new(|| std::array::from_fn(|_| RandomState::new().build_hasher().finish()));
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut hasher = blake3::Hasher::new();
    for seed in *SEEDS {
        hasher.update(&seed.to_ne_bytes());
    }
    hasher.update(&COUNT.fetch_add(1, Ordering::Relaxed).to_ne_bytes());
    hasher.finalize().to_hex()[..32].to_owned()
}

/// Installs the Prometheus recorder for this process. Must be called once, before anything is
/// measured.
pub fn install_metrics() -> Result<PrometheusHandle, BuildError> {
    // Sandboxes start within milliseconds, so the buckets are finest there.
    const SECONDS: [f64; 15] =
        [0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0];
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .install_recorder()
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::middleware::from_fn;
    use axum::routing::get;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn response_carries_the_id_of_its_request() {
        let router = Router::new().route("/", get(async || "answer")).layer(from_fn(log_request));
        for path in ["/", "/other"] {
            let request =
                Request::builder().uri(path).header(REQUEST_ID_HEADER, "mine").body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.headers()[REQUEST_ID_HEADER], "mine");
        }
    }

    fn id_of(value: &str) -> HeaderValue {
        request_id(
            &Request::builder().header(REQUEST_ID_HEADER, value).body(axum::body::Body::empty()).unwrap(),
        )
    }

    #[test]
    fn short_ids_are_echoed_and_others_replaced() {
        assert_eq!(id_of("abc-1"), "abc-1");
        assert_eq!(id_of("").len(), 32);
        assert_eq!(id_of(&"x".repeat(129)).len(), 32);
        assert_ne!(unique_hex(), unique_hex());
    }
}
