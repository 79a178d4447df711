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
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::connector::ServerConnector;
use super::websocket::{ClientWebSocket, accept_value};
use crate::output::WithHint;

/// The body of a request: known bytes or a stream.
pub(super) type RequestBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the head of a response may take. Creating and removing are the slowest calls.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);
/// The largest JSON response that is read; a page of 200 sandboxes is far below.
const MAX_JSON_BYTES: usize = 64 << 20;
const MAX_PROBLEM_BYTES: usize = 64 << 10;

/// The base address of an API, and the headers that authorize access to it.
#[derive(Clone, Debug)]
pub(super) struct ApiClient {
    http: Client<ServerConnector, RequestBody>,
    base: String,
    headers: HeaderMap,
    /// Whether this is the socket of the server's operators.
    pub(super) operator_socket: bool,
}

/// The server refused the request.
#[derive(Debug)]
pub(crate) struct ServerResponseError {
    pub(super) status: StatusCode,
    code: String,
    message: String,
    /// The advice of the server.
    hint: Option<String>,
    retry_after: Option<String>,
}

impl std::fmt::Display for ServerResponseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = if self.status.is_server_error() { "failed" } else { "refused" };
        write!(f, "the server {verdict} ({}): {}", self.status.as_u16(), self.message)
    }
}

impl std::error::Error for ServerResponseError {}

impl ServerResponseError {
    /// Advice about what the user can do.
    pub(crate) fn hint(&self) -> Option<String> {
        match self.status {
            StatusCode::UNAUTHORIZED => Some(
                "set CORACLE_API_KEY to a valid key; the operator makes one with `coracle key create OWNER`"
                    .to_owned(),
            ),
            _ if self.hint.is_some() => self.hint.clone(),
            StatusCode::NOT_FOUND if self.code == SANDBOX_NOT_FOUND_CODE => {
                Some("`coracle ls` lists the sandboxes".to_owned())
            }
            StatusCode::NOT_FOUND if self.code == SNAPSHOT_NOT_FOUND_CODE => {
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
struct ProblemBody {
    #[serde(default)]
    code: String,
    message: String,
}

/// The error code of a missing sandbox.
const SANDBOX_NOT_FOUND_CODE: &str = "DOCKER::SANDBOX_NOT_FOUND";
/// The error code of a missing snapshot.
const SNAPSHOT_NOT_FOUND_CODE: &str = "SNAPSHOT::NOT_FOUND";
/// The header in which the server gives advice, apart from the error itself.
const HINT_HEADER: &str = "coracle-hint";

/// The header in which the server says that another image stands in for the requested one.
const STAND_IN_HEADER: &str = "coracle-image-stand-in";

/// The message of a response about an image that stands in for another.
pub(super) fn stand_in_message(answer: &Response<Incoming>) -> Option<String> {
    answer.headers().get(STAND_IN_HEADER)?.to_str().ok().map(str::to_owned)
}

/// The message of a response about a sandbox that had died, for people.
pub(super) fn revival_message(answer: &Response<Incoming>) -> Option<String> {
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

impl ApiClient {
    /// An API at `base`, which is `http://host[:port][/path]`, or `unix:` and the path of the
    /// socket of a server's operators.
    pub(super) fn new(base: &str, headers: HeaderMap) -> Result<Self> {
        if let Some(path) = base.strip_prefix("unix:") {
            let http = Client::builder(TokioExecutor::new()).build(ServerConnector::Socket(path.into()));
            return Ok(Self { http, base: "http://localhost".to_owned(), headers, operator_socket: true });
        }
        if base.starts_with("https://") {
            return Err(anyhow!("`{base}` speaks TLS, which this client does not"))
                .with_hint("use http, or a local proxy that adds TLS");
        }
        if !base.starts_with("http://") {
            bail!("`{base}` is not an address such as `http://127.0.0.1:8080`");
        }
        let http =
            Client::builder(TokioExecutor::new()).build(ServerConnector::over_network(CONNECT_TIMEOUT));
        Ok(Self { http, base: base.trim_end_matches('/').to_owned(), headers, operator_socket: false })
    }

    /// The same connections with another base address and other headers.
    pub(super) fn with_base(&self, base: String, headers: HeaderMap) -> Self {
        Self { http: self.http.clone(), base, headers, operator_socket: self.operator_socket }
    }

    pub(super) fn base(&self) -> &str {
        &self.base
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub(super) async fn get(&self, path: &str) -> Result<Response<Incoming>> {
        self.send_with_timeout(Method::GET, path, None, empty_body()).await
    }

    /// Opens a WebSocket on a kept connection, if there is one.
    ///
    /// Returns the headers of the response as well.
    pub(super) async fn open_websocket(
        &self,
        path: &str,
        extra: HeaderMap,
    ) -> Result<(ClientWebSocket<TokioIo<Upgraded>>, HeaderMap)> {
        let mut entropy = [0; 16];
        rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())?;
        let key = STANDARD.encode(entropy);
        let request = Request::get(format!("{}{path}", self.base))
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, &key);
        let mut request =
            request.body(empty_body()).with_context(|| format!("`{}` is not an address", self.base))?;
        request.headers_mut().extend(extra);
        let response =
            tokio::time::timeout(RESPONSE_TIMEOUT, self.send_raw(request)).await.with_context(|| {
                format!("no answer from `{}` within {} s", self.base, RESPONSE_TIMEOUT.as_secs())
            })??;
        let accepted = response.headers().get(header::SEC_WEBSOCKET_ACCEPT);
        if response.status() == StatusCode::SWITCHING_PROTOCOLS
            && accepted.is_some_and(|value| value.as_bytes() == accept_value(&key).as_bytes())
        {
            let headers = response.headers().clone();
            let upgraded = hyper::upgrade::on(response).await;
            let upgraded = upgraded.context("the server did not switch to a WebSocket")?;
            return Ok((ClientWebSocket::new(TokioIo::new(upgraded)), headers));
        }
        if response.status().is_success() || response.status().is_informational() {
            bail!("the server did not switch to a WebSocket");
        }
        response_error(response).await
    }

    async fn send_raw(&self, mut request: Request<RequestBody>) -> Result<Response<Incoming>> {
        request.headers_mut().extend(self.headers.clone());
        match self.http.request(request).await {
            Ok(response) => Ok(response),
            Err(error) => connection_error(&self.base, error),
        }
    }

    /// A delete whose response has a body.
    pub(super) async fn delete_for_response(&self, path: &str) -> Result<Response<Incoming>> {
        self.send_with_timeout(Method::DELETE, path, None, empty_body()).await
    }

    pub(super) async fn delete(&self, path: &str) -> Result<()> {
        self.send_with_timeout(Method::DELETE, path, None, empty_body()).await.map(drop)
    }

    pub(super) async fn post_json(&self, path: &str, body: &serde_json::Value) -> Result<Response<Incoming>> {
        self.send_with_timeout(Method::POST, path, Some("application/json"), full_body(body.to_string()))
            .await
    }

    pub(super) async fn put_json(&self, path: &str, body: &serde_json::Value) -> Result<Response<Incoming>> {
        self.send_with_timeout(Method::PUT, path, Some("application/json"), full_body(body.to_string())).await
    }

    /// As [`ApiClient::post_json`], for a response that is a stream of events.
    pub(super) async fn post_for_events(
        &self,
        path: &str,
        body: &serde_json::Value,
    ) -> Result<Response<Incoming>> {
        let request = Request::post(format!("{}{path}", self.base))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "text/event-stream")
            .body(full_body(body.to_string()))
            .with_context(|| format!("`{}` is not an address", self.base))?;
        let response =
            tokio::time::timeout(RESPONSE_TIMEOUT, self.send_raw(request)).await.with_context(|| {
                format!("no answer from `{}` within {} s", self.base, RESPONSE_TIMEOUT.as_secs())
            })??;
        if response.status().is_success() { Ok(response) } else { response_error(response).await }
    }

    /// As [`ApiClient::send`], for requests whose response begins soon.
    async fn send_with_timeout(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&str>,
        body: RequestBody,
    ) -> Result<Response<Incoming>> {
        tokio::time::timeout(RESPONSE_TIMEOUT, self.send(method, path, content_type, body))
            .await
            .with_context(|| {
                format!("no answer from `{}` within {} s", self.base, RESPONSE_TIMEOUT.as_secs())
            })?
    }

    /// Sends a request and returns the response once its head reports success.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&str>,
        body: RequestBody,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(content_type) = content_type {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        let request = request.body(body).with_context(|| format!("`{}` is not an address", self.base))?;
        let response = self.send_raw(request).await?;
        if response.status().is_success() { Ok(response) } else { response_error(response).await }
    }
}

/// Whether no connection could be made at all.
pub(super) fn is_unreachable(error: &anyhow::Error) -> bool {
    let of_http = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect())
    };
    error.chain().any(of_http)
}

fn connection_error<T>(base: &str, error: hyper_util::client::legacy::Error) -> Result<T> {
    let connecting = error.is_connect();
    // The user named the server, not the path of the API that this client appends.
    let server = base.split_once("/v1/sandboxes/").map_or(base, |(server, _)| server);
    let server = server.trim_end_matches("/v1").trim_end_matches("/coracle");
    let failed = Err(error).with_context(|| format!("could not talk to the server at `{server}`"));
    if connecting {
        failed.with_hint("start one with `coracle serve`, or name another with --url")
    } else {
        failed
    }
}

async fn response_error<T>(response: Response<Incoming>) -> Result<T> {
    let status = response.status();
    let header_text = |name: &str| {
        let value = response.headers().get(name)?;
        value.to_str().ok().map(str::to_owned)
    };
    let (retry_after, hint) = (header_text(header::RETRY_AFTER.as_str()), header_text(HINT_HEADER));
    let body = Limited::new(response.into_body(), MAX_PROBLEM_BYTES).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let ProblemBody { code, mut message } = serde_json::from_slice(&body).unwrap_or_else(|_| ProblemBody {
        code: String::new(),
        message: String::from_utf8_lossy(&body).trim().to_owned(),
    });
    if let Some(hint) = &hint
        && let Some(bare) = message.strip_suffix(&format!("; hint: {hint}"))
    {
        message = bare.to_owned();
    }
    Err(ServerResponseError { status, code, message, hint, retry_after }.into())
}

/// Reads a JSON response, up to a bound.
pub(super) async fn read_json<T: DeserializeOwned>(response: Response<Incoming>) -> Result<T> {
    let body = Limited::new(response.into_body(), MAX_JSON_BYTES).collect().await;
    let body = body.map_err(|error| anyhow!(error)).context("the answer broke off")?.to_bytes();
    serde_json::from_slice(&body).context("the answer is not what this client understands")
}

pub(super) fn empty_body() -> RequestBody {
    full_body(Bytes::new())
}

pub(super) fn full_body(bytes: impl Into<Bytes>) -> RequestBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A header whose value is kept out of logs and debug output.
pub(super) fn insert_secret_header(headers: &mut HeaderMap, name: HeaderName, value: &str) -> Result<()> {
    let mut value = HeaderValue::from_str(value).context("the value of a header has odd characters")?;
    value.set_sensitive(true);
    headers.insert(name, value);
    Ok(())
}

/// Encodes pairs as a query, with its question mark.
pub(super) fn encode_query(pairs: &[(&str, &str)]) -> String {
    let encoded = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
    format!("?{encoded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_http_is_spoken() {
        assert!(ApiClient::new("http://127.0.0.1:1/", HeaderMap::new()).is_ok());
        for base in ["https://x", "127.0.0.1:80", "ftp://x", ""] {
            assert!(ApiClient::new(base, HeaderMap::new()).is_err(), "{base}");
        }
    }

    #[test]
    fn query_escapes_the_characters_of_a_path() {
        assert_eq!(encode_query(&[("path", "/a b&c=d+é")]), "?path=%2Fa+b%26c%3Dd%2B%C3%A9");
    }

    #[test]
    fn a_secret_header_does_not_show_in_debug_output() {
        let mut headers = HeaderMap::new();
        insert_secret_header(&mut headers, header::AUTHORIZATION, "hunter2").expect("a right header");
        assert!(!format!("{headers:?}").contains("hunter2"));
    }
}
