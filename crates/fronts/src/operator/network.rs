//! What a sandbox tried to reach: the log of its network, as a page or as a stream that can be resumed.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::{NetworkPolicy, Owner, PolicyAction, PolicyRule};
use serde::Serialize;
use serde_json::{Value, json};
use service::{ErrorKind, NetworkLogPage, NetworkLogReader, NetworkRecord, SandboxRef, ServiceError};

use super::access::VisibleOwners;
use super::sandboxes::{parse_sandbox_id, sandbox_error_response, sandbox_not_found};
use super::{FRONT, OperatorState};
use crate::kit::error_format;
use crate::kit::headers::header_text;
use crate::kit::sse::format_event;
use crate::kit::time::format_rfc3339;
use crate::server::concurrency;

/// Interval of comments that keep otherwise silent connections alive.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;
/// How many records are asked for at once when a page is collected.
const BATCH: u32 = 1000;

/// The parsed query of a request for the log.
#[derive(Debug, PartialEq, Eq)]
struct LogQuery {
    after: u64,
    limit: usize,
    follow: bool,
    /// Return only what was denied.
    denied: bool,
}

impl LogQuery {
    fn parse(query: &str, headers: &HeaderMap) -> Result<Self, &'static str> {
        let mut parsed = Self { after: 0, limit: DEFAULT_LIMIT, follow: false, denied: false };
        if let Some(id) = header_text(headers, "last-event-id") {
            parsed.after = id.parse().map_err(|_error| "`Last-Event-ID` must be a number")?;
        }
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let switch = |what| value.parse().map_err(|_error| what);
            match &*name {
                "after" => parsed.after = value.parse().map_err(|_error| "`after` must be a number")?,
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
                    parsed.limit = limit.ok_or("`limit` must be a number from 1 to 1000")?;
                }
                "follow" => parsed.follow = switch("`follow` must be true or false")?,
                "denied" => parsed.denied = switch("`denied` must be true or false")?,
                _ => {}
            }
        }
        Ok(parsed)
    }

    fn wants(&self, record: &NetworkRecord) -> bool {
        !self.denied || record.verdict == PolicyAction::Deny
    }
}

/// `GET /coracle/v1/sandboxes/{id}/network`: records after the one with the number `?after=`, at most `?limit=`. With
/// `follow=true`, all of them and those to come, as server-sent events that can be resumed with `Last-Event-ID`.
pub(super) async fn get_network_log(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    id: Result<Path<String>, PathRejection>,
    request: Parts,
) -> Response {
    let Some(id) = parse_sandbox_id(id) else { return sandbox_not_found() };
    let query = match LogQuery::parse(request.uri.query().unwrap_or_default(), &request.headers) {
        Ok(query) => query,
        Err(why) => return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_CURSOR", why),
    };
    let sandbox = match state.service.sandbox_of(whose.as_ref(), &id) {
        Ok(sandbox) => sandbox,
        Err(error) => return sandbox_error_response(&error),
    };
    let answered = match query.follow {
        true => follow_log(state, whose, &sandbox, query, request),
        false => read_page(&sandbox, &query).await.map(|page| Json(page).into_response()),
    };
    answered.unwrap_or_else(|error| log_error_response(&error))
}

fn log_error_response(error: &ServiceError) -> Response {
    if error.kind() != ErrorKind::Unsupported {
        return sandbox_error_response(error);
    }
    let mut response =
        error_format::build_error(StatusCode::NOT_IMPLEMENTED, "NOT_SUPPORTED", &error.message_with_causes());
    error_format::add_hint(&mut response, error.hint());
    response
}

/// Collects a page. Records that the query does not want do not count, however many there are.
async fn read_page(sandbox: &SandboxRef, query: &LogQuery) -> Result<Value, ServiceError> {
    let (mut records, mut dropped, mut after) = (Vec::new(), 0, query.after);
    while records.len() < query.limit {
        let page = sandbox.network().read_log(after, BATCH).await?;
        let Some(last) = page.records.last().map(|record| record.number) else { break };
        dropped += page.dropped;
        after = last;
        records.extend(page.records.iter().filter(|record| query.wants(record)).map(record_body));
    }
    if records.len() > query.limit {
        records.truncate(query.limit);
        after = records.last().and_then(|record| record["number"].as_u64()).unwrap_or(after);
    }
    Ok(json!({ "records": records, "dropped": dropped, "next": after }))
}

/// An open stream of records.
struct LogStream {
    front: OperatorState,
    /// The request that opened the stream, with its key.
    request: Parts,
    whose: Option<Owner>,
    log: NetworkLogReader,
    query: LogQuery,
}

fn follow_log(
    state: OperatorState,
    whose: Option<Owner>,
    sandbox: &SandboxRef,
    query: LogQuery,
    request: Parts,
) -> Result<Response, ServiceError> {
    if let Err(error) = concurrency::begin_stream(&request.extensions) {
        return Ok(error.build_response(FRONT.error_format));
    }
    let log = sandbox.network().follow_log(query.after)?;
    let stream = LogStream { front: state, request, whose, log, query };
    let frames = futures_util::stream::unfold(stream, |mut stream| async move {
        let frame = stream.next_frame().await?;
        Some((Ok::<_, Infallible>(frame), stream))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((kind, Body::from_stream(frames)).into_response())
}

impl LogStream {
    /// Returns the next frame, as long as the caller may see it: a stream ends once the key that opened it is revoked or
    /// has expired.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let frame = match tokio::time::timeout(HEARTBEAT_INTERVAL, self.log.next_page()).await {
            Ok(page) => match page? {
                Ok(page) => encode_frame(&page, &self.query),
                Err(error) => {
                    tracing::warn!(error = %error.message_with_causes(), "failed to read a network log; its stream ends");
                    return None;
                }
            },
            Err(_elapsed) => heartbeat(),
        };
        (self.front.visible_owner(&self.request) == Ok(self.whose.clone())).then_some(frame)
    }
}

fn heartbeat() -> Bytes {
    Bytes::from_static(b": keep-alive\n\n")
}

fn encode_frame(page: &NetworkLogPage, query: &LogQuery) -> Bytes {
    let mut text = String::new();
    if page.dropped > 0 {
        text.push_str(&format_event(None, "missed", json!({ "count": page.dropped })));
    }
    for record in page.records.iter().filter(|record| query.wants(record)) {
        text.push_str(&format_event(Some(record.number), "record", record_body(record)));
    }
    if text.is_empty() { heartbeat() } else { text.into() }
}

fn record_body(record: &NetworkRecord) -> Value {
    let mut body = json!({
        "number": record.number,
        "time": format_rfc3339(record.time),
        "kind": record.kind.name(),
        "verdict": action_name(record.verdict),
        "reason": record.reason,
        "bytesSent": record.bytes_sent,
        "bytesReceived": record.bytes_received,
    });
    if let Some(name) = &record.name {
        body["name"] = json!(name);
    }
    if let Some(address) = record.address {
        body["address"] = json!(address.ip().to_string());
        body["port"] = json!(address.port());
    }
    body
}

/// The policy of a sandbox in a report.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReportedPolicy {
    mode: &'static str,
    default_action: &'static str,
    /// Each is its action and its target.
    rules: Vec<String>,
}

impl ReportedPolicy {
    pub(super) fn of_policy(policy: &NetworkPolicy) -> Self {
        let rule = |rule: &PolicyRule| format!("{} {}", action_name(rule.action), rule.target);
        Self {
            mode: policy.mode().name(),
            default_action: action_name(policy.default_action()),
            rules: policy.rules().iter().map(rule).collect(),
        }
    }
}

fn action_name(action: PolicyAction) -> &'static str {
    match action {
        PolicyAction::Allow => "allow",
        PolicyAction::Deny => "deny",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_overrides_the_last_event_id_header() {
        let mut headers = HeaderMap::new();
        let parse = |query: &str, headers: &HeaderMap| LogQuery::parse(query, headers);
        let plain = LogQuery { after: 0, limit: DEFAULT_LIMIT, follow: false, denied: false };
        assert_eq!(parse("", &headers), Ok(plain));
        headers.insert("last-event-id", "7".parse().unwrap());
        let parsed = parse("follow=true&denied=true&limit=5", &headers);
        assert_eq!(parsed, Ok(LogQuery { after: 7, limit: 5, follow: true, denied: true }));
        assert_eq!(parse("after=9", &headers).map(|query| query.after), Ok(9));
        for wrong in ["after=-1", "limit=0", "limit=1001", "follow=maybe", "denied=1"] {
            assert!(parse(wrong, &headers).is_err(), "{wrong}");
        }
    }
}
