//! Lifecycle events as server-sent events, recent errors, and the capabilities of the host.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::Owner;
use serde::Serialize;
use serde_json::{Value, json};
use service::{FeedItem, FeedReader, LifecycleEvent, OperatorEvent, RecentError};

use super::access::{RequestOwner, VisibleOwners};
use super::{FRONT, OperatorState};
use crate::kit::error_format;
use crate::kit::headers::header_text;
use crate::kit::sse::format_event;
use crate::kit::time::format_rfc3339;
use crate::server::concurrency;

/// Interval of comments that keep otherwise silent connections alive.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);

#[derive(Serialize)]
struct PhaseEventBody<'a> {
    id: u64,
    time: String,
    owner: &'a str,
    sandbox: &'a str,
    phase: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'static str>,
    /// How a dead sandbox is restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    restart: Option<&'static str>,
}

/// The parsed query of an events request.
struct EventsQuery {
    after: Option<u64>,
    /// Start this many events before the end, regardless of `after`.
    tail: Option<usize>,
    follow: bool,
}

/// `GET /coracle/v1/events`: streams events from now on, after the event of `?after=` or
/// `Last-Event-ID`, or from the last `?tail=` events on. With `follow=false` the stream ends after
/// the existing events. The operator sees the events of all sandboxes, other callers those of their
/// own.
pub(super) async fn stream_events(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
    request: Parts,
) -> Response {
    let query = match EventsQuery::parse(request.uri.query().unwrap_or_default(), &request.headers) {
        Ok(query) => query,
        Err(why) => return error_format::build_error(StatusCode::BAD_REQUEST, "INVALID_CURSOR", why),
    };
    if let Err(error) = concurrency::begin_stream(&request.extensions) {
        return error.build_response(FRONT.error_format);
    }
    let after = if query.follow { query.after } else { query.after.or(Some(0)) };
    let events = match query.tail {
        Some(count) => state.service.last_events(whose.clone(), count),
        None => state.service.follow_events(whose.clone(), after),
    };
    let reader = EventFeedResponse { front: state, request, whose, events, follow: query.follow };
    let frames = futures_util::stream::unfold(reader, |mut reader| async move {
        let frame = reader.next_frame().await?;
        Some((Ok::<_, Infallible>(frame), reader))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (kind, Body::from_stream(frames)).into_response()
}

/// An open event stream.
struct EventFeedResponse {
    front: OperatorState,
    /// The request that opened the stream, with its key.
    request: Parts,
    whose: Option<Owner>,
    events: FeedReader,
    follow: bool,
}

impl EventFeedResponse {
    /// Returns the next frame, as long as the caller may see it: a stream ends once the key that opened
    /// it is revoked or has expired.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let frame = if self.follow {
            frame_or_heartbeat(&mut self.events).await?
        } else {
            ready_frame(&mut self.events)?
        };
        (self.front.visible_owner(&self.request) == Ok(self.whose.clone())).then_some(frame)
    }
}

async fn frame_or_heartbeat(events: &mut FeedReader) -> Option<Bytes> {
    match tokio::time::timeout(HEARTBEAT_INTERVAL, events.next_batch()).await {
        Ok(items) => items.map(|items| encode_frame(&items)),
        Err(_elapsed) => Some(Bytes::from_static(b": keep-alive\n\n")),
    }
}

fn ready_frame(events: &mut FeedReader) -> Option<Bytes> {
    let items = events.take_ready();
    (!items.is_empty()).then(|| encode_frame(&items))
}

fn encode_frame(items: &[FeedItem]) -> Bytes {
    let text = items.iter().map(|item| match item {
        FeedItem::Event(event) => format_event(Some(event.id), "phase", json!(phase_event_body(event))),
        FeedItem::Operator(event) => format_event(Some(event.id), "operator", operator_event_body(event)),
        FeedItem::Missed { after, through } => {
            format_event(None, "missed", json!({"after": after, "through": through}))
        }
    });
    text.collect::<String>().into()
}

fn phase_event_body(event: &LifecycleEvent) -> PhaseEventBody<'_> {
    PhaseEventBody {
        id: event.id,
        time: format_rfc3339(event.time),
        owner: event.owner.as_str(),
        sandbox: event.sandbox.as_str(),
        phase: event.phase.name(),
        cause: event.cause.map(domain::EndCause::name),
        restart: event.revival_kind().map(service::RevivalKind::name),
    }
}

/// Describes an action of the operator on something that belongs to this owner.
fn operator_event_body(event: &OperatorEvent) -> Value {
    json!({
        "id": event.id,
        "time": format_rfc3339(event.time),
        "owner": event.owner.as_str(),
        "operator": event.act.kind.name(),
        "kind": event.act.thing.name(),
        "subject": event.act.subject,
    })
}

impl EventsQuery {
    fn parse(query: &str, headers: &HeaderMap) -> Result<Self, &'static str> {
        let mut parsed = Self { after: None, tail: None, follow: true };
        if let Some(id) = header_text(headers, "last-event-id") {
            parsed.after = Some(id.parse().map_err(|_error| "`Last-Event-ID` must be a number")?);
        }
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "after" => parsed.after = Some(value.parse().map_err(|_error| "`after` must be a number")?),
                "tail" => parsed.tail = Some(value.parse().map_err(|_error| "`tail` must be a number")?),
                "follow" => {
                    parsed.follow = value.parse().map_err(|_error| "`follow` must be true or false")?
                }
                _ => {}
            }
        }
        Ok(parsed)
    }
}

/// `GET /coracle/v1/errors`: recent failed requests, newest first.
pub(super) async fn list_errors(
    State(state): State<OperatorState>,
    VisibleOwners(whose): VisibleOwners,
) -> Response {
    let item = |error: RecentError| {
        json!({
            "time": format_rfc3339(error.time),
            "owner": error.owner.as_str(),
            "sandbox": error.sandbox.as_ref().map(|id| id.as_str()),
            "operation": error.operation,
            "kind": error.kind,
            "message": error.message,
        })
    };
    let items: Vec<_> = state.service.recent_errors(whose.as_ref()).into_iter().map(item).collect();
    Json(json!({ "items": items })).into_response()
}

/// `GET /coracle/v1/capabilities`: the features that this host supports.
pub(super) async fn get_capabilities(State(state): State<OperatorState>, _: RequestOwner) -> Response {
    let offered = state.service.capabilities();
    let versions: BTreeMap<&String, &String> =
        offered.host_versions.iter().map(|(name, version)| (name, version)).collect();
    let limits: Vec<_> = offered.limits.iter().map(|limit| limit.as_str()).collect();
    Json(json!({
        "pause": offered.pause,
        "attach": offered.attach,
        "snapshot": offered.snapshot,
        "network": offered.network,
        "filtered": offered.filtered,
        "limits": limits,
        "weaker": offered.degraded,
        "hostVersions": versions,
    }))
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_overrides_the_last_event_id_header() {
        let mut headers = HeaderMap::new();
        let parse = |query: &str, headers: &HeaderMap| {
            EventsQuery::parse(query, headers).map(|parsed| (parsed.after, parsed.follow))
        };
        assert_eq!(parse("", &headers), Ok((None, true)));
        headers.insert("last-event-id", "7".parse().unwrap());
        assert_eq!(parse("follow=false", &headers), Ok((Some(7), false)));
        assert_eq!(parse("after=9", &headers), Ok((Some(9), true)));
        assert!(parse("after=-1", &headers).is_err() && parse("follow=maybe", &headers).is_err());
        headers.insert("last-event-id", "x".parse().unwrap());
        assert!(parse("", &headers).is_err());
    }
}
