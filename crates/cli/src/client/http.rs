//! Requests and responses over plain HTTP, and the errors that people see when they fail.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use super::way::Way;
use crate::output::WithHint;

/// The body of a request: known bytes or a stream.
pub(super) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the head of a response may take. Creating and removing are the slowest calls.
const ANSWER: Duration = Duration::from_secs(120);
/// The largest JSON response that is read; a page of 200 sandboxes is far below.
const LARGEST_JSON: usize = 64 << 20;
const LARGEST_PROBLEM: usize = 64 << 10;

/// The base address of an API, and the headers that authorize access to it.
#[derive(Clone, Debug)]
pub(super) struct Api {
    http: Client<Way, Body>,
    base: String,
    headers: HeaderMap,
    /// Whether this is the socket of the server's operators.
    pub(super) operator_socket: bool,
}

/// The server refused the request.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(super) status: StatusCode,
    code: String,
    message: String,
    /// The advice of the server.
    hint: Option<String>,
    retry_after: Option<String>,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = if self.status.is_server_error() { "failed" } else { "refused" };
        write!(f, "the server {verdict} ({}): {}", self.status.as_u16(), self.message)
    }
}

impl std::error::Error for Refused {}

impl Refused {
    /// Advice about what the user can do.
    pub(crate) fn hint(&self) -> Option<String> {
        match self.status {
            StatusCode::UNAUTHORIZED => Some(
                "set CORACLE_API_KEY to a valid key; the operator makes one with `coracle key create OWNER`"
                    .to_owned(),
            ),
            _ if self.hint.is_some() => self.hint.clone(),
            StatusCode::NOT_FOUND if self.code == NO_SANDBOX => {
                Some("`coracle ls` lists the sandboxes".to_owned())
            }
            StatusCode::NOT_FOUND if self.code == NO_SNAPSHOT => {
                Some("`coracle snapshot ls` lists the snapshots".to_owned())
            }
            StatusCode::TOO_MANY_REQUESTS => {
                let wait = self.retry_after.as_deref().unwrap_or("a few");
                Some(format!("try again in {wait} s, or remove sandboxes with `coracle rm`"))
            }
            _ => None,
        }
    }
}

/// The body of every refusal.
#[derive(Deserialize)]
struct Problem {
    #[serde(default)]
    code: String,
    message: String,
}

/// The error code of a missing sandbox.
const NO_SANDBOX: &str = "DOCKER::SANDBOX_NOT_FOUND";
/// The error code of a missing snapshot.
const NO_SNAPSHOT: &str = "SNAPSHOT::NOT_FOUND";
/// The header in which the server gives advice, apart from the error itself.
const HINT: &str = "coracle-hint";

/// The header in which the server says that another image stands in for the requested one.
const STAND_IN: &str = "coracle-image-stand-in";

/// The message of a response about an image that stands in for another.
pub(super) fn stand_in(answer: &Response<Incoming>) -> Option<String> {
    answer.headers().get(STAND_IN)?.to_str().ok().map(str::to_owned)
}

/// The message of a response about a sandbox that had died, for people.
pub(super) fn revival(answer: &Response<Incoming>) -> Option<String> {
    let text = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
    text("coracle-restarted").map(|how| revival_text(how, text("coracle-restart-cause")))
}

pub(super) fn revival_text(how: &str, cause: Option<&str>) -> String {
    let cause = cause.unwrap_or("unknown cause");
    match how {
        "restart" => format!("the sandbox had died ({cause}) and was restarted with its files"),
        "replace" => format!("the sandbox had died ({cause}) and was replaced; its disk is empty"),
        "files-lost" => {
            format!(
                "the sandbox had died ({cause}) and its files were lost; this is a new one with an empty disk"
            )
        }
        other => format!("the sandbox had died ({cause}): {other}"),
    }
}

/// Seconds, rounded up, so that nothing ends earlier than requested.
pub(super) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

impl Api {
    /// An API at `base`, which is `http://host[:port][/path]`, or `unix:` and the path of the
    /// socket of a server's operators.
    pub(super) fn new(base: &str, headers: HeaderMap) -> Result<Self> {
        if let Some(path) = base.strip_prefix("unix:") {
            let http = Client::builder(TokioExecutor::new()).build(Way::Socket(path.into()));
            return Ok(Self { http, base: "http://localhost".to_owned(), headers, operator_socket: true });
        }
        if base.starts_with("https://") {
            return Err(anyhow!("`{base}` speaks TLS, which this client does not"))
                .hint("use http, or a local proxy that adds TLS");
        }
        if !base.starts_with("http://") {
            bail!("`{base}` is not an address such as `http://127.0.0.1:8080`");
        }
        let http = Client::builder(TokioExecutor::new()).build(Way::network(CONNECT));
        Ok(Self { http, base: base.trim_end_matches('/').to_owned(), headers, operator_socket: false })
    }

    /// The same connections with another base address and other headers.
    pub(super) fn at(&self, base: String, headers: HeaderMap) -> Self {
        Self { http: self.http.clone(), base, headers, operator_socket: self.operator_socket }
    }

    pub(super) fn base(&self) -> &str {
        &self.base
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub(super) async fn get(&self, path: &str) -> Result<Response<Incoming>> {
        self.call(Method::GET, path, None, empty()).await
    }

    /// Opens a WebSocket on a kept connection, if there is one.
    pub(super) async fn upgrade(&self, path: &str) -> Result<Upgraded> {
        let mut entropy = [0; 16];
        rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
        let key = STANDARD.encode(entropy);
        let request = Request::get(format!("{}{path}", self.base))
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, &key);
        let request = request.body(empty()).with_context(|| format!("`{}` is not an address", self.base))?;
        let response = tokio::time::timeout(ANSWER, self.request(request))
            .await
            .with_context(|| format!("no answer from `{}` within {} s", self.base, ANSWER.as_secs()))??;
        let accepted = response.headers().get(header::SEC_WEBSOCKET_ACCEPT);
        if response.status() == StatusCode::SWITCHING_PROTOCOLS
            && accepted.is_some_and(|value| value.as_bytes() == derive_accept_key(key.as_bytes()).as_bytes())
        {
            return hyper::upgrade::on(response).await.context("the server did not switch to a WebSocket");
        }
        if response.status().is_success() || response.status().is_informational() {
            bail!("the server did not switch to a WebSocket");
        }
        refusal(response).await
    }

    async fn request(&self, mut request: Request<Body>) -> Result<Response<Incoming>> {
        request.headers_mut().extend(self.headers.clone());
        match self.http.request(request).await {
            Ok(response) => Ok(response),
            Err(error) => unreachable(&self.base, error),
        }
    }

    /// A delete whose response has a body.
    pub(super) async fn delete_for(&self, path: &str) -> Result<Response<Incoming>> {
        self.call(Method::DELETE, path, None, empty()).await
    }

    pub(super) async fn delete(&self, path: &str) -> Result<()> {
        self.call(Method::DELETE, path, None, empty()).await.map(drop)
    }

    pub(super) async fn post_json(&self, path: &str, body: &serde_json::Value) -> Result<Response<Incoming>> {
        self.call(Method::POST, path, Some("application/json"), full(body.to_string())).await
    }

    pub(super) async fn put_json(&self, path: &str, body: &serde_json::Value) -> Result<Response<Incoming>> {
        self.call(Method::PUT, path, Some("application/json"), full(body.to_string())).await
    }

    /// As [`Api::post_json`], for a response that is a stream of events.
    pub(super) async fn post_for_events(
        &self,
        path: &str,
        body: &serde_json::Value,
    ) -> Result<Response<Incoming>> {
        let request = Request::post(format!("{}{path}", self.base))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "text/event-stream")
            .body(full(body.to_string()))
            .with_context(|| format!("`{}` is not an address", self.base))?;
        let response = tokio::time::timeout(ANSWER, self.request(request))
            .await
            .with_context(|| format!("no answer from `{}` within {} s", self.base, ANSWER.as_secs()))??;
        if response.status().is_success() { Ok(response) } else { refusal(response).await }
    }

    /// As [`Api::send`], for requests whose response begins soon.
    async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&str>,
        body: Body,
    ) -> Result<Response<Incoming>> {
        tokio::time::timeout(ANSWER, self.send(method, path, content_type, body))
            .await
            .with_context(|| format!("no answer from `{}` within {} s", self.base, ANSWER.as_secs()))?
    }

    /// Sends a request and returns the response once its head reports success.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&str>,
        body: Body,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(content_type) = content_type {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        let request = request.body(body).with_context(|| format!("`{}` is not an address", self.base))?;
        let response = self.request(request).await?;
        if response.status().is_success() { Ok(response) } else { refusal(response).await }
    }
}

/// Whether no connection could be made at all.
pub(super) fn is_unreachable(error: &anyhow::Error) -> bool {
    let of_http = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect())
    };
    error.chain().any(of_http)
}

fn unreachable<T>(base: &str, error: hyper_util::client::legacy::Error) -> Result<T> {
    let connecting = error.is_connect();
    // The user named the server, not the path of the API that this client appends.
    let server = base.trim_end_matches("/v1").trim_end_matches("/coracle");
    let failed = Err(error).with_context(|| format!("could not talk to the server at `{server}`"));
    if connecting {
        failed.hint("start one with `coracle serve`, or name another with --url")
    } else {
        failed
    }
}

async fn refusal<T>(response: Response<Incoming>) -> Result<T> {
    let status = response.status();
    let told = |name: &str| {
        let value = response.headers().get(name)?;
        value.to_str().ok().map(str::to_owned)
    };
    let (retry_after, hint) = (told(header::RETRY_AFTER.as_str()), told(HINT));
    let body = Limited::new(response.into_body(), LARGEST_PROBLEM).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let Problem { code, mut message } = serde_json::from_slice(&body).unwrap_or_else(|_| Problem {
        code: String::new(),
        message: String::from_utf8_lossy(&body).trim().to_owned(),
    });
    if let Some(hint) = &hint
        && let Some(bare) = message.strip_suffix(&format!("; hint: {hint}"))
    {
        message = bare.to_owned();
    }
    Err(Refused { status, code, message, hint, retry_after }.into())
}

/// Reads a JSON response, up to a bound.
pub(super) async fn json<T: DeserializeOwned>(response: Response<Incoming>) -> Result<T> {
    let body = Limited::new(response.into_body(), LARGEST_JSON).collect().await;
    let body = body.map_err(|error| anyhow!(error)).context("the answer broke off")?.to_bytes();
    serde_json::from_slice(&body).context("the answer is not what this client understands")
}

pub(super) fn empty() -> Body {
    full(Bytes::new())
}

pub(super) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A header whose value is kept out of logs and debug output.
pub(super) fn secret_header(headers: &mut HeaderMap, name: HeaderName, value: &str) -> Result<()> {
    let mut value = HeaderValue::from_str(value).context("the value of a header has odd characters")?;
    value.set_sensitive(true);
    headers.insert(name, value);
    Ok(())
}

/// Encodes pairs as a query, with its question mark.
pub(super) fn query(pairs: &[(&str, &str)]) -> String {
    let encoded = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
    format!("?{encoded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_http_is_spoken() {
        assert!(Api::new("http://127.0.0.1:1/", HeaderMap::new()).is_ok());
        for base in ["https://x", "127.0.0.1:80", "ftp://x", ""] {
            assert!(Api::new(base, HeaderMap::new()).is_err(), "{base}");
        }
    }

    #[test]
    fn query_escapes_the_characters_of_a_path() {
        assert_eq!(query(&[("path", "/a b&c=d+é")]), "?path=%2Fa+b%26c%3Dd%2B%C3%A9");
    }

    #[test]
    fn a_secret_header_does_not_show_in_debug_output() {
        let mut headers = HeaderMap::new();
        secret_header(&mut headers, header::AUTHORIZATION, "hunter2").expect("a right header");
        assert!(!format!("{headers:?}").contains("hunter2"));
    }
}
