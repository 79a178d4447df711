//! The output of a command from a byte offset on: up to now, or as it arrives.
//!
//! A gap in the retained output is named in the response headers. A body that would have any other gap
//! is aborted, so that it is not mistaken for complete output.

use axum::BoxError;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::{JournalOffset, ProcessId};
use futures_util::{Stream, stream};
use http::{HeaderName, HeaderValue, Uri, header};
use service::{OutputEvent, OutputStream, ProcessStatus};

use super::problem::{ExecdProblem, parse_process_id};
use super::{ExecTarget, PathName};
use crate::kit::lines::incomplete_suffix;
use crate::kit::output_records;
use crate::kit::query::QueryParams;

const CURSOR_HEADER: HeaderName = HeaderName::from_static("execd-commands-tail-cursor");
/// The bytes of the combined output that are missing in the body.
const GAP_HEADER: HeaderName = HeaderName::from_static("coracle-output-gap");
const TEXT_CONTENT_TYPE: &str = "text/plain; charset=utf-8";
/// The most bytes that an incomplete character can have.
const MAX_PARTIAL_CHARACTER: u64 = 3;

/// Output that is no longer retained, up to and not including `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LogGap {
    from: u64,
    to: u64,
}

/// A command's output, with the event that was read ahead to find gaps.
struct LogReader {
    following: OutputStream,
    ahead: Option<OutputEvent>,
    gap: Option<LogGap>,
}

/// How an event is handled in the body of a response.
#[derive(Debug, PartialEq, Eq)]
enum LogStep {
    Send(Bytes),
    SendLast(Bytes),
    Skip,
    End,
    /// Output is missing that the response headers do not mention.
    BreakOff,
}

/// `GET /command/{id}/logs?cursor=…[&follow=true]`
pub(super) async fn get_command_logs(
    target: ExecTarget,
    PathName(process): PathName,
    uri: Uri,
) -> Result<Response, ExecdProblem> {
    logs_response(&target, &parse_process_id(&process)?, &uri, CURSOR_HEADER).await
}

/// Responds with the output of one process; the header `cursor_header` carries the end offset.
pub(super) async fn logs_response(
    target: &ExecTarget,
    process: &ProcessId,
    uri: &Uri,
    cursor_header: HeaderName,
) -> Result<Response, ExecdProblem> {
    let query = QueryParams::from_uri(uri);
    let cursor: u64 = query.parse_number("cursor").map_err(ExecdProblem::invalid)?.unwrap_or(0);
    let status = target.sandbox.processes().process_status(process).await?;
    let from = cursor.min(status.written);
    if query.is_on("follow") {
        target.begin_stream()?;
    }
    if query.is_on("coracle.records") {
        let following = target.sandbox.processes().follow_output(process, JournalOffset(from)).await?;
        let to = if query.is_on("follow") { None } else { Some(status.written) };
        return Ok(output_records::records_response(following, from, to, status.ended.map(|end| end.exit)));
    }
    if query.is_on("follow") {
        let output = open_log(target, process, from, &status).await?;
        return Ok(text_response(output, u64::MAX));
    }
    let mut to = match status.ended {
        Some(end) => end.written.max(status.written),
        None => whole_characters(target, process, from, status.written).await?,
    };
    let mut response = if from < to {
        let output = open_log(target, process, from, &status).await?;
        // A gap grows while a command prints, so the response ends before it; the next one starts there.
        if let (None, Some(gap)) = (status.ended, output.gap.filter(|gap| gap.from > from)) {
            to = to.min(gap.from);
        }
        text_response(output, to)
    } else {
        ([(header::CONTENT_TYPE, TEXT_CONTENT_TYPE)], Body::empty()).into_response()
    };
    response.headers_mut().insert(cursor_header, HeaderValue::from(to));
    Ok(response)
}

/// Starts reading at `from`. A gap shows at once or, since the beginning of the output is retained
/// separately from its end, where that beginning ends.
async fn open_log(
    target: &ExecTarget,
    process: &ProcessId,
    from: u64,
    status: &ProcessStatus,
) -> Result<LogReader, ExecdProblem> {
    let (written, beginning) = (status.written, status.first);
    let follow = |from| target.sandbox.processes().follow_output(process, JournalOffset(from));
    let mut output = LogReader { following: follow(from).await?, ahead: None, gap: None };
    if from < written {
        let event = output.following.next().await?;
        output.gap = LogGap::from_event(&event);
        output.ahead = Some(event);
    }
    if output.gap.is_none() && from < beginning && beginning < written {
        output.gap = LogGap::from_event(&follow(beginning).await?.next().await?);
    }
    Ok(output)
}

impl LogGap {
    fn from_event(event: &OutputEvent) -> Option<Self> {
        match event {
            OutputEvent::Gap { from, to, .. } => Some(Self { from: from.0, to: to.0 }),
            OutputEvent::Output { .. } | OutputEvent::Ended(_) => None,
        }
    }

    /// Returns the part before `end`.
    fn clip_before(self, end: u64) -> Option<Self> {
        Some(Self { to: self.to.min(end), ..self }).filter(|gap| gap.from < gap.to)
    }
}

/// Responds with the output up to the offset `to`, or to the end of the command.
fn text_response(output: LogReader, to: u64) -> Response {
    let gap = output.gap.and_then(|gap| gap.clip_before(to));
    let mut response =
        ([(header::CONTENT_TYPE, TEXT_CONTENT_TYPE)], Body::from_stream(body_stream(output, to)))
            .into_response();
    if let Some(LogGap { from, to }) = gap {
        let value = HeaderValue::try_from(format!("{from}-{to}")).expect("digits are a valid header value");
        response.headers_mut().insert(GAP_HEADER, value);
    }
    response
}

fn body_stream(output: LogReader, to: u64) -> impl Stream<Item = Result<Bytes, BoxError>> + Send {
    stream::unfold(Some(output), move |output| async move {
        let mut output = output?;
        loop {
            let event = match output.ahead.take() {
                Some(event) => Ok(event),
                None => output.following.next().await,
            };
            match event.map(|event| next_step(event, to, output.gap)) {
                Ok(LogStep::Send(bytes)) => return Some((Ok(bytes), Some(output))),
                Ok(LogStep::SendLast(bytes)) => return Some((Ok(bytes), None)),
                Ok(LogStep::Skip) => {}
                Ok(LogStep::End) => return None,
                Ok(LogStep::BreakOff) => {
                    return Some((Err("output was lost while it was read".into()), None));
                }
                Err(error) => return Some((Err(error.into()), None)),
            }
        }
    })
}

fn next_step(event: OutputEvent, to: u64, announced: Option<LogGap>) -> LogStep {
    let gap = LogGap::from_event(&event);
    match event {
        OutputEvent::Output { at, mut bytes, .. } => {
            let room = to.saturating_sub(at.0);
            bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
            if (bytes.len() as u64) < room { LogStep::Send(bytes) } else { LogStep::SendLast(bytes) }
        }
        OutputEvent::Gap { from, .. } if from.0 >= to => LogStep::End,
        OutputEvent::Gap { .. } if gap != announced => LogStep::BreakOff,
        OutputEvent::Gap { to: behind, .. } if behind.0 < to => LogStep::Skip,
        OutputEvent::Gap { .. } | OutputEvent::Ended(_) => LogStep::End,
    }
}

/// Returns the offset up to which the output has no incomplete character; the rest comes with the next
/// call.
async fn whole_characters(
    target: &ExecTarget,
    process: &ProcessId,
    from: u64,
    written: u64,
) -> Result<u64, ExecdProblem> {
    let near = written.saturating_sub(MAX_PARTIAL_CHARACTER).max(from);
    if near == written {
        return Ok(written);
    }
    let mut following = target.sandbox.processes().follow_output(process, JournalOffset(near)).await?;
    let mut tail = Vec::new();
    while (tail.len() as u64) < written - near {
        match following.next().await? {
            OutputEvent::Output { bytes, .. } => tail.extend_from_slice(&bytes),
            OutputEvent::Gap { .. } | OutputEvent::Ended(_) => break,
        }
    }
    tail.truncate(usize::try_from(written - near).unwrap_or(usize::MAX));
    Ok(written - incomplete_suffix(&tail) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANNOUNCED: Option<LogGap> = Some(LogGap { from: 10, to: 20 });

    fn gap(from: u64, to: u64) -> OutputEvent {
        OutputEvent::Gap { from: JournalOffset(from), to: JournalOffset(to), stderr_before: None }
    }

    #[test]
    fn only_announced_gaps_are_skipped() {
        assert_eq!(next_step(gap(10, 20), 100, ANNOUNCED), LogStep::Skip);
        assert_eq!(next_step(gap(10, 20), 15, ANNOUNCED), LogStep::End);
        assert_eq!(next_step(gap(10, 21), 100, ANNOUNCED), LogStep::BreakOff);
        assert_eq!(next_step(gap(30, 40), 100, ANNOUNCED), LogStep::BreakOff);
        assert_eq!(next_step(gap(10, 20), u64::MAX, None), LogStep::BreakOff);
        assert_eq!(next_step(gap(10, 20), 10, None), LogStep::End);
    }

    #[test]
    fn output_ends_at_the_announced_offset() {
        let at = |to| {
            let bytes = Bytes::from_static(b"abcd");
            next_step(
                OutputEvent::Output { stream: domain::StreamKind::Stdout, at: JournalOffset(6), bytes },
                to,
                None,
            )
        };
        assert_eq!(at(11), LogStep::Send("abcd".into()));
        assert_eq!(at(10), LogStep::SendLast("abcd".into()));
        assert_eq!(at(8), LogStep::SendLast("ab".into()));
    }

    #[test]
    fn announced_gap_is_limited_to_the_response() {
        assert_eq!(ANNOUNCED.unwrap().clip_before(15), Some(LogGap { from: 10, to: 15 }));
        assert_eq!(ANNOUNCED.unwrap().clip_before(u64::MAX), ANNOUNCED);
        assert_eq!(ANNOUNCED.unwrap().clip_before(10), None);
    }
}
