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
use service::{Events, LifeEvent, OperatorEvent, Told, Trouble};

use super::access::{Caller, Scope};
use super::{Front, time};
use crate::{answer, auth};

/// Interval of comments that keep otherwise silent connections alive.
const HEARTBEAT: Duration = Duration::from_secs(15);

#[derive(Serialize)]
struct Shown<'a> {
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
struct Wish {
    after: Option<u64>,
    /// Start this many events before the end, regardless of `after`.
    tail: Option<usize>,
    follow: bool,
}

/// `GET /coracle/v1/events`: streams events from now on, after the event of `?after=` or
/// `Last-Event-ID`, or from the last `?tail=` events on. With `follow=false` the stream ends after
/// the existing events. The operator sees the events of all sandboxes, other callers those of their
/// own.
pub(super) async fn events(State(front): State<Front>, Scope(whose): Scope, request: Parts) -> Response {
    let query = match Wish::parse(request.uri.query().unwrap_or_default(), &request.headers) {
        Ok(query) => query,
        Err(why) => return answer::error(StatusCode::BAD_REQUEST, "INVALID_CURSOR", why),
    };
    let after = if query.follow { query.after } else { query.after.or(Some(0)) };
    let events = match query.tail {
        Some(count) => front.service.last_events(whose.clone(), count),
        None => front.service.events(whose.clone(), after),
    };
    let reader = Reader { front, request, whose, events, follow: query.follow };
    let frames = futures_util::stream::unfold(reader, |mut reader| async move {
        let frame = reader.next().await?;
        Some((Ok::<_, Infallible>(frame), reader))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (kind, Body::from_stream(frames)).into_response()
}

/// An open event stream.
struct Reader {
    front: Front,
    /// The request that opened the stream, with its key.
    request: Parts,
    whose: Option<Owner>,
    events: Events,
    follow: bool,
}

impl Reader {
    /// Returns the next frame, as long as the caller may see it: a stream ends once the key that opened
    /// it is revoked or has expired.
    async fn next(&mut self) -> Option<Bytes> {
        let frame = if self.follow { following(&mut self.events).await? } else { ready(&mut self.events)? };
        (self.front.scope(&self.request) == Ok(self.whose.clone())).then_some(frame)
    }
}

async fn following(events: &mut Events) -> Option<Bytes> {
    match tokio::time::timeout(HEARTBEAT, events.next()).await {
        Ok(items) => items.map(|items| frame(&items)),
        Err(_elapsed) => Some(Bytes::from_static(b": keep-alive\n\n")),
    }
}

fn ready(events: &mut Events) -> Option<Bytes> {
    let items = events.ready();
    (!items.is_empty()).then(|| frame(&items))
}

fn frame(items: &[Told]) -> Bytes {
    let text = items.iter().map(|item| match item {
        Told::Event(event) => format!("id: {}\nevent: phase\ndata: {}\n\n", event.id, json!(shown(event))),
        Told::Operator(event) => {
            format!("id: {}\nevent: operator\ndata: {}\n\n", event.id, shown_act(event))
        }
        Told::Missed { after, through } => {
            format!("event: missed\ndata: {}\n\n", json!({"after": after, "through": through}))
        }
    });
    text.collect::<String>().into()
}

fn shown(event: &LifeEvent) -> Shown<'_> {
    Shown {
        id: event.id,
        time: time(event.time),
        owner: event.owner.as_str(),
        sandbox: event.sandbox.as_str(),
        phase: event.phase.name(),
        cause: event.cause.map(domain::Cause::name),
        restart: event.restart().map(service::Revived::name),
    }
}

/// Describes an action of the operator on something that belongs to this owner.
fn shown_act(event: &OperatorEvent) -> Value {
    json!({
        "id": event.id,
        "time": time(event.time),
        "owner": event.owner.as_str(),
        "operator": event.act.kind.name(),
        "kind": event.act.thing.name(),
        "subject": event.act.subject,
    })
}

impl Wish {
    fn parse(query: &str, headers: &HeaderMap) -> Result<Self, &'static str> {
        let mut parsed = Self { after: None, tail: None, follow: true };
        if let Some(id) = auth::text(headers, "last-event-id") {
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
pub(super) async fn errors(State(front): State<Front>, Scope(whose): Scope) -> Response {
    let item = |trouble: Trouble| {
        json!({
            "time": time(trouble.time),
            "owner": trouble.owner.as_str(),
            "sandbox": trouble.sandbox.as_ref().map(|id| id.as_str()),
            "operation": trouble.operation,
            "kind": trouble.kind,
            "message": trouble.message,
        })
    };
    let items: Vec<_> = front.service.troubles(whose.as_ref()).into_iter().map(item).collect();
    Json(json!({ "items": items })).into_response()
}

/// `GET /coracle/v1/capabilities`: the features that this host supports.
pub(super) async fn capabilities(State(front): State<Front>, _: Caller) -> Response {
    let offered = front.service.capabilities();
    let versions: BTreeMap<&String, &String> =
        offered.host_versions.iter().map(|(name, version)| (name, version)).collect();
    Json(json!({
        "pause": offered.pause,
        "attach": offered.attach,
        "snapshot": offered.snapshot,
        "network": offered.network,
        "limits": offered.limits,
        "weaker": offered.weaker,
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
            Wish::parse(query, headers).map(|parsed| (parsed.after, parsed.follow))
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
