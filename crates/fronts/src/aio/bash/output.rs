//! `POST /v1/bash/output`: what a command has printed after two offsets.

use std::time::Duration;

use axum::response::Response;
use domain::{JournalOffset, ProcessId, StreamKind};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use service::{ErrorKind, FollowedOutput, OutputEvent, ProcessEnd};
use tokio::time::{Instant, timeout_at};

use super::command_status::BashCommand;
use super::fields::check_count;
use super::session::{find_session, require_session_id};
use super::stream_offsets::StreamOffsets;
use crate::aio::body::AioJson;
use crate::aio::commands::fields::parse_seconds;
use crate::aio::commands::session::GroupSession;
use crate::aio::envelope::{DEFAULT_MESSAGE, ResponseEnvelope};
use crate::aio::keep_alive::respond_with_blanks;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::lines::incomplete_suffix;

const DEFAULT_WAIT: Duration = Duration::from_secs(30);
/// Longer waits end after this time; clients ask again.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// How long reading output may take that exists already.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How much one response contains: a little more than is kept by default. Clients get the rest with the offsets of the
/// response.
const MAX_RESPONSE_BYTES: usize = 17 << 20;

#[derive(Deserialize)]
pub(super) struct BashOutputBody {
    session_id: Option<String>,
    command_id: Option<String>,
    offset: Option<i64>,
    stderr_offset: Option<i64>,
    wait: Option<bool>,
    wait_timeout: Option<f64>,
}

/// A checked request.
#[derive(Debug)]
struct BashOutputRequest {
    id: String,
    command_id: Option<String>,
    from: StreamOffsets,
    /// How long to wait if there is nothing new.
    wait: Option<Duration>,
}

#[derive(Debug, Default, Serialize)]
struct BashOutputResult {
    session_id: String,
    stdout: Option<String>,
    stderr: Option<String>,
    offset: u64,
    stderr_offset: u64,
    command: Option<BashCommand>,
}

impl BashOutputRequest {
    fn parse(body: BashOutputBody) -> Result<Self, AioProblem> {
        let limit = parse_seconds(body.wait_timeout, "wait_timeout")?;
        let limit = if body.wait_timeout.is_some() { limit.unwrap_or_default() } else { DEFAULT_WAIT };
        Ok(Self {
            id: require_session_id(body.session_id)?,
            command_id: body.command_id.filter(|id| !id.is_empty()),
            from: StreamOffsets {
                stdout: check_count(body.offset, "offset", 0)?,
                stderr: check_count(body.stderr_offset, "stderr_offset", 0)?,
            },
            wait: (body.wait == Some(true)).then(|| limit.min(MAX_WAIT)),
        })
    }
}

/// `POST /v1/bash/output`
pub(super) async fn read_output(
    target: AioTarget,
    AioJson(body): AioJson<BashOutputBody>,
) -> Result<Response, AioProblem> {
    let request = BashOutputRequest::parse(body)?;
    target.begin_stream()?;
    let (session_id, from) = (request.id.clone(), request.from);
    let fail_late = move |problem| late_failure(problem, session_id, from);
    respond_with_blanks(read_command_output(target, request), fail_late).await
}

/// The response if reading failed after the response had begun. The offsets are those of the request, so the client can
/// ask again. Whether the command still runs is not known.
fn late_failure(
    problem: AioProblem,
    session_id: String,
    from: StreamOffsets,
) -> ResponseEnvelope<BashOutputResult> {
    let result = BashOutputResult {
        session_id,
        stdout: None,
        stderr: Some(problem.message.clone()),
        offset: from.stdout,
        stderr_offset: from.stderr,
        command: None,
    };
    ResponseEnvelope { hint: problem.hint, ..ResponseEnvelope::failure(problem.message, result) }
}

async fn read_command_output(
    target: AioTarget,
    request: BashOutputRequest,
) -> Result<ResponseEnvelope<BashOutputResult>, AioProblem> {
    let BashOutputRequest { id, command_id, from, wait } = request;
    let session = find_session(&target, &id).await?;
    let process = match &command_id {
        Some(command) => Some(ProcessId::parse(command).map_err(|_invalid| no_command(command))?),
        None => session.shared.run.clone(),
    };
    let Some(process) = process else {
        let nothing = BashOutputResult { session_id: id, ..BashOutputResult::default() };
        return Ok(ResponseEnvelope::success(DEFAULT_MESSAGE, nothing));
    };
    let (followed, place) = follow_from(&target, &session, &process, from).await?;
    let mut reader = OutputReader { from, place, stdout: Vec::new(), stderr: Vec::new(), end: None };
    let FollowedOutput { status, mut output, .. } = followed;
    let (read_until, wait_until) = (Instant::now() + READ_TIMEOUT, wait.map(|wait| Instant::now() + wait));
    while reader.end.is_none() && reader.collected_bytes() < MAX_RESPONSE_BYTES {
        let must_read = reader.place.overall() < status.written || status.ended.is_some();
        let until = match (must_read, wait_until) {
            (true, _) => read_until,
            (false, Some(until)) if !reader.has_text() => until,
            (false, _) => break,
        };
        match timeout_at(until, output.next()).await {
            Ok(event) => reader.add_event(event?),
            Err(_elapsed) if must_read => {
                return Err(AioProblem::new(
                    StatusCode::GATEWAY_TIMEOUT,
                    "the sandbox does not send the output",
                ));
            }
            Err(_elapsed) => break,
        }
    }
    let (texts, offsets) = reader.take_texts();
    let result = BashOutputResult {
        session_id: id,
        stdout: texts.0,
        stderr: texts.1,
        offset: offsets.stdout,
        stderr_offset: offsets.stderr,
        command: Some(BashCommand::new(status, reader.end.as_ref())),
    };
    Ok(ResponseEnvelope::success(DEFAULT_MESSAGE, result))
}

/// Reads the output from the place with these offsets. If the agent does not know such a place, all is read from the
/// beginning. Returns the place where reading begins.
async fn follow_from(
    target: &AioTarget,
    session: &GroupSession,
    process: &ProcessId,
    from: StreamOffsets,
) -> Result<(FollowedOutput, StreamOffsets), AioProblem> {
    let follow = async |offset: u64| {
        let followed =
            target.sandbox.processes().follow_output_with_status(process, JournalOffset(offset)).await;
        let followed = followed.map_err(|error| match error.kind() {
            ErrorKind::NoProcess => no_command(process.as_str()),
            _ => error.into(),
        })?;
        if followed.status.session.as_ref() != Some(&session.session) {
            return Err(no_command(process.as_str()));
        }
        Ok::<_, AioProblem>(followed)
    };
    let followed = follow(from.overall()).await?;
    if followed.stderr_before == Some(from.stderr) {
        return Ok((followed, from));
    }
    Ok((follow(0).await?, StreamOffsets::default()))
}

fn no_command(id: &str) -> AioProblem {
    let shown: String = id.chars().take(64).collect();
    AioProblem::new(StatusCode::NOT_FOUND, format!("Command {shown} not found"))
}

/// Collects what comes after the offsets that a client has.
#[derive(Debug)]
struct OutputReader {
    from: StreamOffsets,
    place: StreamOffsets,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: Option<ProcessEnd>,
}

impl OutputReader {
    fn add_event(&mut self, event: OutputEvent) {
        let before = self.place;
        self.place.advance(&event);
        match event {
            OutputEvent::Output { stream: StreamKind::Stderr, bytes, .. } => {
                self.stderr.extend_from_slice(unseen_part(&bytes, before.stderr, self.from.stderr));
            }
            OutputEvent::Output { bytes, .. } => {
                self.stdout.extend_from_slice(unseen_part(&bytes, before.stdout, self.from.stdout));
            }
            OutputEvent::Gap { .. } => {}
            OutputEvent::Ended(end) => self.end = Some(end),
        }
    }

    fn collected_bytes(&self) -> usize {
        self.stdout.len() + self.stderr.len()
    }

    /// Whether there is more than the beginning of a character.
    fn has_text(&self) -> bool {
        [&self.stdout, &self.stderr].iter().any(|bytes| bytes.len() > incomplete_suffix(bytes))
    }

    /// The texts, `None` if empty, and the offsets after them. The beginning of a character is left for the next call,
    /// unless the command has ended.
    fn take_texts(&mut self) -> ((Option<String>, Option<String>), StreamOffsets) {
        let has_ended = self.end.is_some();
        let take = |bytes: &mut Vec<u8>| {
            let left = if has_ended { 0 } else { incomplete_suffix(bytes) };
            let text = String::from_utf8_lossy(&bytes[..bytes.len() - left]).into_owned();
            ((!text.is_empty()).then_some(text), left as u64)
        };
        let ((stdout, stdout_left), (stderr, stderr_left)) = (take(&mut self.stdout), take(&mut self.stderr));
        let offsets = StreamOffsets {
            stdout: (self.place.stdout - stdout_left).max(self.from.stdout),
            stderr: (self.place.stderr - stderr_left).max(self.from.stderr),
        };
        ((stdout, stderr), offsets)
    }
}

/// The part of `bytes`, which are at the offset `at`, from the offset `from` on.
fn unseen_part(bytes: &[u8], at: u64, from: u64) -> &[u8] {
    let seen = usize::try_from(from.saturating_sub(at)).unwrap_or(usize::MAX);
    bytes.get(seen..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(from: StreamOffsets, place: StreamOffsets) -> OutputReader {
        OutputReader { from, place, stdout: Vec::new(), stderr: Vec::new(), end: None }
    }

    fn output(stream: StreamKind, bytes: &'static [u8]) -> OutputEvent {
        OutputEvent::Output { stream, at: JournalOffset(0), bytes: bytes.into() }
    }

    #[test]
    fn only_bytes_after_the_offsets_are_returned() {
        let from = StreamOffsets { stdout: 4, stderr: 100 };
        let mut reader = reader(from, StreamOffsets::default());
        reader.add_event(output(StreamKind::Stdout, b"abc"));
        reader.add_event(output(StreamKind::Stderr, b"err"));
        assert!(!reader.has_text());
        reader.add_event(output(StreamKind::Stdout, b"defg"));
        let (texts, offsets) = reader.take_texts();
        assert_eq!(texts, (Some("efg".to_owned()), None));
        assert_eq!(offsets, StreamOffsets { stdout: 7, stderr: 100 }, "offsets never go back");
    }

    #[test]
    fn half_a_character_is_left_for_the_next_call() {
        let mut reader = reader(StreamOffsets::default(), StreamOffsets::default());
        reader.add_event(output(StreamKind::Stdout, b"\xc3"));
        assert!(!reader.has_text());
        let (texts, offsets) = reader.take_texts();
        assert_eq!((texts, offsets), ((None, None), StreamOffsets::default()));
    }
}
