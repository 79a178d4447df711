//! The output of a command from a byte offset on: up to now, or as it arrives.
//!
//! A gap in the retained output is named in the response headers. A body that would have any other gap
//! is aborted, so that it is not mistaken for complete output.

use axum::BoxError;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::{Position, ProcessId};
use futures_util::{Stream, stream};
use http::{HeaderName, HeaderValue, Uri, header};
use service::{Event, Following, ProcessStatus};

use super::fault::{Fault, process_id};
use super::{Name, Scope};
use crate::opensandbox::Front;
use crate::opensandbox::lines::incomplete_suffix;
use crate::opensandbox::query::Query;
use crate::records;

const CURSOR: HeaderName = HeaderName::from_static("execd-commands-tail-cursor");
/// The bytes of the combined output that are missing in the body.
const GAP: HeaderName = HeaderName::from_static("coracle-output-gap");
const TEXT: &str = "text/plain; charset=utf-8";
/// The most bytes that an incomplete character can have.
const LONGEST_CUT: u64 = 3;

/// Output that is no longer retained, up to and not including `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gap {
    from: u64,
    to: u64,
}

/// A command's output, with the event that was read ahead to find gaps.
struct Output {
    following: Following,
    ahead: Option<Event>,
    gap: Option<Gap>,
}

/// How an event is handled in the body of a response.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Send(Bytes),
    SendLast(Bytes),
    Skip,
    End,
    /// Output is missing that the response headers do not mention.
    BreakOff,
}

/// `GET /command/{id}/logs?cursor=…[&follow=true]`
pub(super) async fn read(
    State(front): State<Front>,
    scope: Scope,
    Name(process): Name,
    uri: Uri,
) -> Result<Response, Fault> {
    tail(&front, &scope, &process_id(&process)?, &uri, CURSOR).await
}

/// Responds with the output of one process; the header `cursor_header` carries the end offset.
pub(super) async fn tail(
    front: &Front,
    scope: &Scope,
    process: &ProcessId,
    uri: &Uri,
    cursor_header: HeaderName,
) -> Result<Response, Fault> {
    let query = Query::of(uri);
    let cursor: u64 = query.number("cursor").map_err(Fault::invalid)?.unwrap_or(0);
    let status = front.service.status(&scope.owner, &scope.id, process).await?;
    let from = cursor.min(status.written);
    if query.is_on("coracle.records") {
        let following = front.service.follow(&scope.owner, &scope.id, process, Position(from)).await?;
        let to = if query.is_on("follow") { None } else { Some(status.written) };
        return Ok(records::response(following, from, to, status.ended.map(|end| end.exit)));
    }
    if query.is_on("follow") {
        let output = open(front, scope, process, from, &status).await?;
        return Ok(plain(output, u64::MAX));
    }
    let mut to = match status.ended {
        Some(end) => end.written.max(status.written),
        None => whole_characters(front, scope, process, from, status.written).await?,
    };
    let mut response = if from < to {
        let output = open(front, scope, process, from, &status).await?;
        // A gap grows while a command prints, so the response ends before it; the next one starts there.
        if let (None, Some(gap)) = (status.ended, output.gap.filter(|gap| gap.from > from)) {
            to = to.min(gap.from);
        }
        plain(output, to)
    } else {
        ([(header::CONTENT_TYPE, TEXT)], Body::empty()).into_response()
    };
    response.headers_mut().insert(cursor_header, HeaderValue::from(to));
    Ok(response)
}

/// Starts reading at `from`. A gap shows at once or, since the beginning of the output is retained
/// separately from its end, where that beginning ends.
async fn open(
    front: &Front,
    scope: &Scope,
    process: &ProcessId,
    from: u64,
    status: &ProcessStatus,
) -> Result<Output, Fault> {
    let (written, beginning) = (status.written, status.first);
    let follow = |from| front.service.follow(&scope.owner, &scope.id, process, Position(from));
    let mut output = Output { following: follow(from).await?, ahead: None, gap: None };
    if from < written {
        let event = output.following.next().await?;
        output.gap = Gap::of(&event);
        output.ahead = Some(event);
    }
    if output.gap.is_none() && from < beginning && beginning < written {
        output.gap = Gap::of(&follow(beginning).await?.next().await?);
    }
    Ok(output)
}

impl Gap {
    fn of(event: &Event) -> Option<Self> {
        match event {
            Event::Gap { from, to } => Some(Self { from: from.0, to: to.0 }),
            Event::Output { .. } | Event::Ended(_) => None,
        }
    }

    /// Returns the part before `end`.
    fn before(self, end: u64) -> Option<Self> {
        Some(Self { to: self.to.min(end), ..self }).filter(|gap| gap.from < gap.to)
    }
}

/// Responds with the output up to the offset `to`, or to the end of the command.
fn plain(output: Output, to: u64) -> Response {
    let gap = output.gap.and_then(|gap| gap.before(to));
    let mut response =
        ([(header::CONTENT_TYPE, TEXT)], Body::from_stream(pieces(output, to))).into_response();
    if let Some(Gap { from, to }) = gap {
        let value = HeaderValue::try_from(format!("{from}-{to}")).expect("digits are a valid header value");
        response.headers_mut().insert(GAP, value);
    }
    response
}

fn pieces(output: Output, to: u64) -> impl Stream<Item = Result<Bytes, BoxError>> + Send {
    stream::unfold(Some(output), move |output| async move {
        let mut output = output?;
        loop {
            let event = match output.ahead.take() {
                Some(event) => Ok(event),
                None => output.following.next().await,
            };
            match event.map(|event| step(event, to, output.gap)) {
                Ok(Step::Send(bytes)) => return Some((Ok(bytes), Some(output))),
                Ok(Step::SendLast(bytes)) => return Some((Ok(bytes), None)),
                Ok(Step::Skip) => {}
                Ok(Step::End) => return None,
                Ok(Step::BreakOff) => return Some((Err("output was lost while it was read".into()), None)),
                Err(error) => return Some((Err(error.into()), None)),
            }
        }
    })
}

fn step(event: Event, to: u64, announced: Option<Gap>) -> Step {
    let gap = Gap::of(&event);
    match event {
        Event::Output { at, mut bytes, .. } => {
            let room = to.saturating_sub(at.0);
            bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
            if (bytes.len() as u64) < room { Step::Send(bytes) } else { Step::SendLast(bytes) }
        }
        Event::Gap { from, .. } if from.0 >= to => Step::End,
        Event::Gap { .. } if gap != announced => Step::BreakOff,
        Event::Gap { to: behind, .. } if behind.0 < to => Step::Skip,
        Event::Gap { .. } | Event::Ended(_) => Step::End,
    }
}

/// Returns the offset up to which the output has no incomplete character; the rest comes with the next
/// call.
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

#[cfg(test)]
mod tests {
    use super::*;

    const ANNOUNCED: Option<Gap> = Some(Gap { from: 10, to: 20 });

    fn gap(from: u64, to: u64) -> Event {
        Event::Gap { from: Position(from), to: Position(to) }
    }

    #[test]
    fn only_announced_gaps_are_skipped() {
        assert_eq!(step(gap(10, 20), 100, ANNOUNCED), Step::Skip);
        assert_eq!(step(gap(10, 20), 15, ANNOUNCED), Step::End);
        assert_eq!(step(gap(10, 21), 100, ANNOUNCED), Step::BreakOff);
        assert_eq!(step(gap(30, 40), 100, ANNOUNCED), Step::BreakOff);
        assert_eq!(step(gap(10, 20), u64::MAX, None), Step::BreakOff);
        assert_eq!(step(gap(10, 20), 10, None), Step::End);
    }

    #[test]
    fn output_ends_at_the_announced_offset() {
        let at = |to| {
            let bytes = Bytes::from_static(b"abcd");
            step(Event::Output { stream: domain::Stream::Stdout, at: Position(6), bytes }, to, None)
        };
        assert_eq!(at(11), Step::Send("abcd".into()));
        assert_eq!(at(10), Step::SendLast("abcd".into()));
        assert_eq!(at(8), Step::SendLast("ab".into()));
    }

    #[test]
    fn announced_gap_is_limited_to_the_response() {
        assert_eq!(ANNOUNCED.unwrap().before(15), Some(Gap { from: 10, to: 15 }));
        assert_eq!(ANNOUNCED.unwrap().before(u64::MAX), ANNOUNCED);
        assert_eq!(ANNOUNCED.unwrap().before(10), None);
    }
}
