//! What a command has printed, from a byte offset on: up to now, or as it comes.

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::{Position, ProcessId};
use futures_util::{Stream, stream};
use http::{HeaderName, HeaderValue, Uri, header};
use service::{Event, Following, ServiceError};

use super::fault::{Fault, process_id};
use super::{Name, Scope};
use crate::opensandbox::Front;
use crate::opensandbox::lines::incomplete_suffix;
use crate::opensandbox::query::Query;

const CURSOR: HeaderName = HeaderName::from_static("execd-commands-tail-cursor");
/// As many bytes can be missing of a character that was begun.
const LONGEST_CUT: u64 = 3;

/// `GET /command/{id}/logs?cursor=…[&follow=true]`
pub(super) async fn read(
    State(front): State<Front>,
    scope: Scope,
    Name(process): Name,
    uri: Uri,
) -> Result<Response, Fault> {
    let process = process_id(&process)?;
    let query = Query::of(&uri);
    let cursor: u64 = query.number("cursor").map_err(Fault::invalid)?.unwrap_or(0);
    let status = front.service.status(&scope.owner, &scope.id, &process).await?;
    let from = cursor.min(status.written);
    if query.is_on("follow") {
        let following = front.service.follow(&scope.owner, &scope.id, &process, Position(from)).await?;
        return Ok(plain(pieces(following, u64::MAX)));
    }
    let to = match status.ended {
        Some(end) => end.written.max(status.written),
        None => whole_characters(&front, &scope, &process, from, status.written).await?,
    };
    let mut response = if from < to {
        let following = front.service.follow(&scope.owner, &scope.id, &process, Position(from)).await?;
        plain(pieces(following, to))
    } else {
        plain(stream::empty())
    };
    response.headers_mut().insert(CURSOR, HeaderValue::from(to));
    Ok(response)
}

fn plain(pieces: impl Stream<Item = Result<Bytes, ServiceError>> + Send + 'static) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from_stream(pieces)).into_response()
}

/// The output up to the offset `to`, or to the end of the command. What is no longer kept is
/// left out.
fn pieces(following: Following, to: u64) -> impl Stream<Item = Result<Bytes, ServiceError>> + Send {
    stream::unfold(Some(following), move |following| async move {
        let mut following = following?;
        loop {
            match following.next().await {
                Ok(Event::Output { at, mut bytes, .. }) => {
                    let room = to.saturating_sub(at.0);
                    bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
                    let more = (bytes.len() as u64) < room;
                    return Some((Ok(bytes), more.then_some(following)));
                }
                Ok(Event::Gap { to: behind, .. }) if behind.0 < to => {}
                Ok(Event::Gap { .. } | Event::Ended(_)) => return None,
                Err(error) => return Some((Err(error), None)),
            }
        }
    })
}

/// The offset up to which the output holds no cut character; the rest comes with the next call.
async fn whole_characters(
    front: &Front,
    scope: &Scope,
    process: &ProcessId,
    from: u64,
    written: u64,
) -> Result<u64, Fault> {
    let near = written.saturating_sub(LONGEST_CUT).max(from);
    if near == written {
        return Ok(written);
    }
    let mut following = front.service.follow(&scope.owner, &scope.id, process, Position(near)).await?;
    let mut tail = Vec::new();
    while (tail.len() as u64) < written - near {
        match following.next().await? {
            Event::Output { bytes, .. } => tail.extend_from_slice(&bytes),
            Event::Gap { .. } | Event::Ended(_) => break,
        }
    }
    tail.truncate(usize::try_from(written - near).unwrap_or(usize::MAX));
    Ok(written - incomplete_suffix(&tail) as u64)
}
