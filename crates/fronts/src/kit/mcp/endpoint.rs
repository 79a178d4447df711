//! The streamable HTTP transport: one POST is one message, and its response is a stream of events or a short error.
//!
//! rmcp speaks the protocol. Before it, the body is read within our limits and checked, because rmcp answers a body that
//! it cannot read in plain text and without a time limit. The checks of host names are ours as well, so rmcp's are off.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::Full;
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, ErrorCode};
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::json;

use super::handler::{McpServerInfo, ToolHandler};
use super::tools::ToolSet;
use crate::kit::body::{BodyError, read_body};

/// How often a comment is sent while a tool works, so that no client or proxy takes the connection for dead.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// The longest error text of rmcp that is passed on.
const MAX_ERROR_BYTES: usize = 4096;

/// A message that was received completely.
pub(crate) struct McpMessage {
    headers: HeaderMap,
    body: Bytes,
    calls_tool: bool,
    keep_alive: Duration,
}

/// The response to a message that cannot be read, so it belongs to no request.
#[derive(Debug)]
pub(crate) struct McpRefusal {
    status: StatusCode,
    code: ErrorCode,
    message: String,
}

impl From<BodyError> for McpRefusal {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Timeout => StatusCode::REQUEST_TIMEOUT,
            BodyError::EndedEarly => StatusCode::BAD_REQUEST,
        };
        Self { status, code: ErrorCode::INVALID_REQUEST, message: error.to_string() }
    }
}

impl IntoResponse for McpRefusal {
    fn into_response(self) -> Response {
        let Self { status, code, message } = self;
        let body = json!({"jsonrpc": "2.0", "id": null, "error": {"code": code, "message": message}});
        (status, axum::Json(body)).into_response()
    }
}

impl McpMessage {
    /// Receives a message of at most `limit` bytes.
    pub(crate) async fn receive(request: Request, limit: usize) -> Result<Self, McpRefusal> {
        let (parts, body) = request.into_parts();
        let body = read_body(body, limit).await?;
        let message = parse_message(&body)?;
        let calls_tool = matches!(
            &message,
            ClientJsonRpcMessage::Request(request) if matches!(request.request, ClientRequest::CallToolRequest(_))
        );
        Ok(Self { headers: parts.headers, body, calls_tool, keep_alive: KEEP_ALIVE_INTERVAL })
    }

    /// Whether the response may take long.
    pub(crate) fn calls_tool(&self) -> bool {
        self.calls_tool
    }

    /// Answers the message. Dropping the response ends the call of a tool.
    pub(crate) async fn answer<C: Clone + Send + Sync + 'static>(
        self,
        info: McpServerInfo,
        tools: &'static ToolSet<C>,
        context: C,
    ) -> Response {
        let Self { mut headers, body, keep_alive, .. } = self;
        // rmcp wants a host that it can parse; ours has led the request here already.
        headers.insert(header::HOST, HeaderValue::from_static("localhost"));
        let config = StreamableHttpServerConfig::default()
            .with_legacy_session_mode(false)
            .with_sse_keep_alive(Some(keep_alive))
            .with_max_request_body_bytes(body.len())
            .disable_allowed_hosts();
        let mut request = http::Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.headers_mut() = headers;
        let create_handler = move || Ok(ToolHandler { info, tools, context: context.clone() });
        let service =
            StreamableHttpService::new(create_handler, Arc::new(NeverSessionManager::default()), config);
        let response = service.handle(request).await.map(Body::new);
        match response.status().is_success() || is_json(&response) {
            true => response,
            false => wrap_error(response).await,
        }
    }
}

/// Parses a message, and refuses what is not one in the form that clients of the protocol read.
fn parse_message(body: &[u8]) -> Result<ClientJsonRpcMessage, McpRefusal> {
    serde_json::from_slice(body).map_err(|error| {
        let refuse = |code, message: String| McpRefusal { status: StatusCode::BAD_REQUEST, code, message };
        match body.trim_ascii_start().first() {
            Some(b'[') => {
                refuse(ErrorCode::INVALID_REQUEST, "batches of messages are not supported".to_owned())
            }
            Some(b'{') if error.is_data() => {
                refuse(ErrorCode::INVALID_REQUEST, format!("the body is no JSON-RPC message: {error}"))
            }
            _ => refuse(ErrorCode::PARSE_ERROR, format!("the body is not a JSON object: {error}")),
        }
    })
}

/// Turns an error in plain text into one of the protocol.
async fn wrap_error(response: Response) -> Response {
    let status = response.status();
    let text = axum::body::to_bytes(response.into_body(), MAX_ERROR_BYTES).await.unwrap_or_default();
    let message = String::from_utf8_lossy(&text).into_owned();
    McpRefusal { status, code: ErrorCode::INVALID_REQUEST, message }.into_response()
}

fn is_json(response: &Response) -> bool {
    response.headers().get(header::CONTENT_TYPE).is_some_and(|value| value == "application/json")
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use tokio::sync::Notify;
    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
    use tokio::time::timeout;

    use super::*;
    use crate::kit::mcp::{ToolArguments, ToolFuture, ToolOutput};

    const DEFINITIONS: &str = r#"[{"name": "wait", "inputSchema": {"type": "object"}}]"#;
    const INFO: McpServerInfo = McpServerInfo { name: "test", version: "1", instructions: "" };
    const BOTH_TYPES: &str = "application/json, text/event-stream";
    const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

    /// What the test and the tool tell each other.
    #[derive(Clone)]
    struct TestCalls {
        reports: UnboundedSender<&'static str>,
        go_on: Arc<Notify>,
    }

    /// Reports that a call was dropped.
    struct CallReport(UnboundedSender<&'static str>);

    impl Drop for CallReport {
        fn drop(&mut self) {
            self.0.send("dropped").unwrap_or_default();
        }
    }

    fn wait(calls: TestCalls, _: ToolArguments) -> ToolFuture {
        Box::pin(async move {
            calls.reports.send("begun").unwrap_or_default();
            let _report = CallReport(calls.reports);
            calls.go_on.notified().await;
            Ok(ToolOutput::from_data(json!({"waited": true})))
        })
    }

    /// Calls the tool, with the accepted types of a client.
    async fn call_wait(calls: TestCalls, accept: &str) -> Response {
        let tools = Box::leak(Box::new(ToolSet::new(DEFINITIONS, &[("wait", wait)])));
        let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"wait"}}"#;
        let request = http::Request::builder()
            .header("host", "any.host_name.example:1")
            .header("accept", accept)
            .header("content-type", "application/json");
        let message = McpMessage::receive(request.body(Body::from(call)).unwrap(), 1000).await.unwrap();
        assert!(message.calls_tool());
        let message = McpMessage { keep_alive: Duration::from_millis(10), ..message };
        message.answer(INFO, tools, calls).await
    }

    fn test_calls() -> (TestCalls, UnboundedReceiver<&'static str>) {
        let (reports, events) = unbounded_channel();
        (TestCalls { reports, go_on: Arc::default() }, events)
    }

    #[tokio::test]
    async fn comments_precede_a_late_result() {
        let (calls, _events) = test_calls();
        let response = call_wait(calls.clone(), BOTH_TYPES).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut body = response.into_body().into_data_stream();
        let first = timeout(EVENT_TIMEOUT, body.next()).await.unwrap().unwrap().unwrap();
        assert!(first.starts_with(b":"), "{first:?}");
        calls.go_on.notify_one();
        let mut text = String::new();
        while let Some(piece) = timeout(EVENT_TIMEOUT, body.next()).await.unwrap() {
            text.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
        }
        assert!(text.contains("data:") && text.contains("waited"), "{text}");
    }

    #[tokio::test]
    async fn call_ends_when_its_client_disconnects() {
        let (calls, mut events) = test_calls();
        let response = call_wait(calls, BOTH_TYPES).await;
        assert_eq!(events.recv().await, Some("begun"));
        drop(response);
        assert_eq!(timeout(EVENT_TIMEOUT, events.recv()).await, Ok(Some("dropped")));
    }

    #[tokio::test]
    async fn refusals_of_the_library_are_errors_of_the_protocol() {
        let (calls, mut events) = test_calls();
        let response = call_wait(calls, "text/html").await;
        assert_eq!(response.status(), 406);
        let body = axum::body::to_bytes(response.into_body(), 1000).await.unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert!(body["error"]["message"].as_str().unwrap().contains("application/json"), "{body}");
        assert_eq!(events.recv().await, None, "nothing was called");
    }

    async fn code_of(text: &str) -> i64 {
        let response = parse_message(text.as_bytes()).unwrap_err().into_response();
        assert_eq!(response.status(), 400, "{text}");
        let body = axum::body::to_bytes(response.into_body(), MAX_ERROR_BYTES).await.unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((&body["jsonrpc"], &body["id"]), (&json!("2.0"), &json!(null)));
        body["error"]["code"].as_i64().unwrap()
    }

    #[tokio::test]
    async fn bodies_that_are_no_message_are_refused() {
        for (text, code) in [
            ("", -32700),
            ("x", -32700),
            ("{", -32700),
            ("7", -32700),
            ("{}", -32600),
            (r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#, -32600),
            ("[]", -32600),
            (r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#, -32600),
        ] {
            assert_eq!(code_of(text).await, code, "{text}");
        }
        assert!(parse_message(br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#).is_ok());
    }
}
