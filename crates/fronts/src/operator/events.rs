//! What becomes of sandboxes, as server-sent events, and what failed lately.

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

/// Keeps connections alive that would time out in silence.
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
    /// How a sandbox that had died is started again.
    #[serde(skip_serializing_if = "Option::is_none")]
    restart: Option<&'static str>,
}

/// What a reader asks for.
struct Wish {
    after: Option<u64>,
    /// Begin so many events before the end, whatever `after` says.
    tail: Option<usize>,
    follow: bool,
}

/// `GET /coracle/v1/events`: from now on, after the event of `?after=` or `Last-Event-ID`, or from
/// the last `?tail=` events on. With
/// `follow=false` it ends when all that is there has been told. The operator is told of all
/// sandboxes, everybody else of their own.
pub(super) async fn events(State(front): State<Front>, Scope(whose): Scope, request: Parts) -> Response {
    let wish = match Wish::parse(request.uri.query().unwrap_or_default(), &request.headers) {
        Ok(wish) => wish,
        Err(why) => return answer::error(StatusCode::BAD_REQUEST, "INVALID_PLACE", why),
    };
    let after = if wish.follow { wish.after } else { wish.after.or(Some(0)) };
    let events = match wish.tail {
        Some(count) => front.service.last_events(whose.clone(), count),
        None => front.service.events(whose.clone(), after),
    };
    let reader = Reader { front, request, whose, events, follow: wish.follow };
    let frames = futures_util::stream::unfold(reader, |mut reader| async move {
        let frame = reader.next().await?;
        Some((Ok::<_, Infallible>(frame), reader))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (kind, Body::from_stream(frames)).into_response()
}

/// Somebody who reads events.
struct Reader {
    front: Front,
    /// With the key that opened the stream.
    request: Parts,
    whose: Option<Owner>,
    events: Events,
    follow: bool,
}

impl Reader {
    /// The next frame, for as long as the caller may see it: a key that was revoked or has expired
    /// opens nothing any more, an old stream neither.
    async fn next(&mut self) -> Option<Bytes> {
        let frame = if self.follow { following(&mut self.events).await? } else { ready(&mut self.events)? };
        (self.front.scope(&self.request) == Ok(self.whose.clone())).then_some(frame)
    }
}

async fn following(events: &mut Events) -> Option<Bytes> {
    match tokio::time::timeout(HEARTBEAT, events.next()).await {
        Ok(told) => told.map(|told| frame(&told)),
        Err(_elapsed) => Some(Bytes::from_static(b": still there\n\n")),
    }
}

fn ready(events: &mut Events) -> Option<Bytes> {
    let told = events.ready();
    (!told.is_empty()).then(|| frame(&told))
}

fn frame(told: &[Told]) -> Bytes {
    let text = told.iter().map(|told| match told {
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

/// What the operator did with something of this owner's.
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
        let mut wish = Self { after: None, tail: None, follow: true };
        if let Some(place) = auth::text(headers, "last-event-id") {
            wish.after = Some(place.parse().map_err(|_error| "`Last-Event-ID` is not a number")?);
        }
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "after" => wish.after = Some(value.parse().map_err(|_error| "`after` is not a number")?),
                "tail" => wish.tail = Some(value.parse().map_err(|_error| "`tail` is not a number")?),
                "follow" => {
                    wish.follow = value.parse().map_err(|_error| "`follow` is neither true nor false")?
                }
                _ => {}
            }
        }
        Ok(wish)
    }
}

/// `GET /coracle/v1/errors`: the last requests that failed, the newest first.
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

/// `GET /coracle/v1/capabilities`: what this host really offers.
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
    fn a_place_comes_from_the_header_or_stronger_from_the_query() {
        let mut headers = HeaderMap::new();
        let wish = |query: &str, headers: &HeaderMap| {
            Wish::parse(query, headers).map(|wish| (wish.after, wish.follow))
        };
        assert_eq!(wish("", &headers), Ok((None, true)));
        headers.insert("last-event-id", "7".parse().unwrap());
        assert_eq!(wish("follow=false", &headers), Ok((Some(7), false)));
        assert_eq!(wish("after=9", &headers), Ok((Some(9), true)));
        assert!(wish("after=-1", &headers).is_err() && wish("follow=maybe", &headers).is_err());
        headers.insert("last-event-id", "x".parse().unwrap());
        assert!(wish("", &headers).is_err());
    }
}
