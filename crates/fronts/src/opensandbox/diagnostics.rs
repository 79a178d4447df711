//! Diagnostics of a misbehaving sandbox: the output of its main process, and its events. As JSON with
//! a scope, and as plain text in the older form, which `osb devops` shows.
//!
//! Values of variables and credentials are never included.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, StatusCode, Uri, header};
use serde::Serialize;
use service::{LifecycleEvent, OutputTail, RecentError, Sandbox, SandboxRef};

use super::OpenSandboxState;
use super::access::{KindText, OwnedSandbox};
use super::problem::Problem;
use super::types::state_name;
use crate::kit::query::QueryParams;
use crate::kit::time::format_rfc3339;

/// The most output that a response includes, in bytes.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;
const MAX_LINES: usize = 10_000;
const MAX_EVENTS: usize = 500;
const DEFAULT_LINES: usize = 100;
const DEFAULT_EVENTS: usize = 50;
const TEXT_CONTENT_TYPE: &str = "text/plain; charset=utf-8";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DiagnosticsBody {
    sandbox_id: String,
    kind: &'static str,
    scope: String,
    delivery: &'static str,
    content_type: &'static str,
    content_length: usize,
    content: String,
    truncated: bool,
    warnings: Vec<String>,
}

/// The content of a response, with warnings about it.
#[derive(Debug, Default, PartialEq, Eq)]
struct DiagnosticsText {
    text: String,
    truncated: bool,
    warnings: Vec<String>,
}

/// `GET /sandboxes/{id}/diagnostics/{kind}`
pub(super) async fn get_diagnostics(
    State(state): State<OpenSandboxState>,
    at: OwnedSandbox,
    KindText(kind): KindText,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = QueryParams::from_uri(&uri);
    let found = at.find(&state)?;
    let sandbox = found.current_state();
    match (kind.as_str(), query.first("scope").filter(|scope| !scope.is_empty())) {
        ("logs", Some(scope @ ("container" | "all"))) => {
            let content = read_logs(&found, DEFAULT_LINES, None).await;
            Ok(json_response("logs", scope, &sandbox, content))
        }
        ("events", Some(scope @ ("runtime" | "lifecycle" | "all"))) => {
            Ok(json_response("events", scope, &sandbox, list_events(&state, &found, scope, DEFAULT_EVENTS)))
        }
        ("logs" | "events", Some(_)) => {
            let message = "the scopes of logs are `container` and `all`, those of events `runtime`, \
                           `lifecycle` and `all`";
            Err(Problem::new(StatusCode::BAD_REQUEST, "DIAGNOSTICS_SCOPE_UNSUPPORTED", message))
        }
        ("logs", None) => {
            let tail = parse_bounded(&query, "tail", DEFAULT_LINES, MAX_LINES)?;
            let since = query.first("since").map(parse_ago).transpose()?;
            Ok(deprecated_response(read_logs(&found, tail, since).await.into_plain_text("(no logs)")))
        }
        ("events", None) => {
            let limit = parse_bounded(&query, "limit", DEFAULT_EVENTS, MAX_EVENTS)?;
            Ok(deprecated_response(
                list_events(&state, &found, "all", limit).into_plain_text("(no notable events)"),
            ))
        }
        ("inspect", _) => Ok(text_response(describe_sandbox(&sandbox))),
        ("summary", _) => {
            let tail = parse_bounded(&query, "tail", 50, MAX_LINES)?;
            let limit = parse_bounded(&query, "event_limit", 20, MAX_EVENTS)?;
            let events = list_events(&state, &found, "all", limit).into_plain_text("(no notable events)");
            let logs = read_logs(&found, tail, None).await.into_plain_text("(no logs)");
            Ok(text_response(format_summary(&sandbox, &events, &logs, tail)))
        }
        _ => Err(Problem::new(StatusCode::NOT_FOUND, "NOT_FOUND", "unknown kind of diagnostics")),
    }
}

impl DiagnosticsText {
    /// Formats the content as plain text, with warnings at the end.
    fn into_plain_text(self, nothing: &str) -> String {
        let text = if self.text.is_empty() { nothing.to_owned() } else { self.text };
        self.warnings.iter().fold(text, |text, warning| format!("{text}\n[warning] {warning}"))
    }
}

/// Returns the last lines that the main process printed. A sandbox that cannot be reached is not an
/// error here: diagnostics are used just when something is wrong.
async fn read_logs(sandbox: &SandboxRef, lines: usize, since: Option<SystemTime>) -> DiagnosticsText {
    match sandbox.entrypoint_tail(MAX_OUTPUT_BYTES).await {
        Ok(Some(tail)) if since.is_some_and(|since| tail.ended.is_some_and(|end| end < since)) => {
            DiagnosticsText::default()
        }
        Ok(Some(tail)) => last_lines(&tail, lines, since),
        Ok(None) => DiagnosticsText::default(),
        Err(error) => {
            let warnings = vec![format!("the output of the main process cannot be read: {error}")];
            DiagnosticsText { warnings, ..DiagnosticsText::default() }
        }
    }
}

/// Keeps the last lines, without those known to be older than `since`, and puts the time before each whose
/// time is known. The first one may be incomplete.
fn last_lines(tail: &OutputTail, most: usize, since: Option<SystemTime>) -> DiagnosticsText {
    let bytes = tail.bytes.as_slice();
    let whole = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let line_ends = whole.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    let cut_at = line_ends.map(|(at, _)| at + 1).nth(most.saturating_sub(1));
    let (mut at, mut text) = (cut_at.unwrap_or(0), String::new());
    for line in bytes[at..].split_inclusive(|byte| *byte == b'\n') {
        let known = tail.times.partition_point(|(from, _)| *from <= at);
        let time = known.checked_sub(1).map(|index| tail.times[index].1);
        at += line.len();
        if time.is_some_and(|time| since.is_some_and(|since| time < since)) {
            continue;
        }
        if let Some(time) = time {
            text.push_str(&format!("{} ", format_rfc3339(time)));
        }
        text.push_str(&String::from_utf8_lossy(line));
    }
    DiagnosticsText { text, truncated: tail.cut || cut_at.is_some(), warnings: Vec::new() }
}

/// Returns the phase changes of the sandbox (`lifecycle`) and its failures (`runtime`).
fn list_events(state: &OpenSandboxState, sandbox: &SandboxRef, scope: &str, most: usize) -> DiagnosticsText {
    let own = sandbox.lifecycle_events(most + 1);
    let shown = own.iter().filter(|event| scope != "runtime" || is_failure_event(event));
    let mut lines: Vec<(SystemTime, String)> = shown.map(|event| (event.time, phase_line(event))).collect();
    if scope != "lifecycle" {
        let troubles = state.service.recent_errors(Some(sandbox.owner()));
        let own = troubles.iter().filter(|trouble| trouble.sandbox.as_ref() == Some(sandbox.id()));
        lines.extend(own.map(|trouble| (trouble.time, error_line(trouble))));
    }
    lines.sort();
    let skipped = lines.len().saturating_sub(most);
    let text: String = lines[skipped..].iter().map(|(_, line)| format!("{line}\n")).collect();
    DiagnosticsText { text, truncated: skipped > 0, warnings: Vec::new() }
}

fn is_failure_event(event: &LifecycleEvent) -> bool {
    matches!(event.phase, domain::Phase::Exited(_) | domain::Phase::Failed(_)) || event.cause.is_some()
}

fn phase_line(event: &LifecycleEvent) -> String {
    let cause = event.cause.map(|cause| format!(" ({})", cause.name())).unwrap_or_default();
    format!("{} {} {}{cause}", format_rfc3339(event.time), state_name(event.phase), event.phase)
}

fn error_line(error: &RecentError) -> String {
    format!("{} Warning {} failed: {}", format_rfc3339(error.time), error.operation, error.message)
}

/// Describes the sandbox and what is enforced for it.
fn describe_sandbox(sandbox: &Sandbox) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        writeln!(text, "{name:<16}{value}").expect("writing to a String cannot fail");
    };
    line("Sandbox ID:", sandbox.id.as_str());
    line("Image:", &sandbox.spec.image);
    line("Image used:", &sandbox.in_force.image);
    line("Status:", state_name(sandbox.phase));
    line("Since:", &format_rfc3339(sandbox.phase_since));
    line("Created At:", &format_rfc3339(sandbox.created));
    line("Expires At:", &sandbox.expires.map_or_else(|| "never".to_owned(), format_rfc3339));
    line("Entrypoint:", &sandbox.spec.entrypoint.to_words().join(" "));
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            write!(text, "\n{title}:\n  {}\n", lines.join("\n  ")).expect("writing to a String cannot fail");
        }
    };
    let measures = sandbox.in_force.measures.iter();
    section("In force", measures.map(|held| format!("{}: {}", held.name(), held.words())).collect());
    section("Weaker", sandbox.in_force.degraded.clone());
    section("Labels", sandbox.labels.iter().map(|(name, value)| format!("{name}={value}")).collect());
    // Any value may be a secret, regardless of its name.
    section("Environment", sandbox.spec.env.keys().map(|name| format!("{name}=***")).collect());
    text
}

fn format_summary(sandbox: &Sandbox, events: &str, logs: &str, tail: usize) -> String {
    let (wide, narrow) = ("=".repeat(72), "-".repeat(40));
    let head = format!("{wide}\nSANDBOX DIAGNOSTICS SUMMARY\nSandbox ID: {}\n{wide}\n", sandbox.id);
    let logs_title = format!("LOGS (last {tail} lines)");
    let parts = [
        ("INSPECT", describe_sandbox(sandbox)),
        ("EVENTS", events.to_owned()),
        (&logs_title, logs.to_owned()),
    ];
    parts.iter().fold(head, |text, (title, part)| {
        format!("{text}\n{narrow}\n{title}\n{narrow}\n{}\n", part.trim_end_matches('\n'))
    })
}

fn json_response(kind: &'static str, scope: &str, sandbox: &Sandbox, content: DiagnosticsText) -> Response {
    let DiagnosticsText { text, truncated, warnings } = content;
    Json(DiagnosticsBody {
        sandbox_id: sandbox.id.to_string(),
        kind,
        scope: scope.to_owned(),
        delivery: "inline",
        content_type: TEXT_CONTENT_TYPE,
        content_length: text.len(),
        content: text,
        truncated,
        warnings,
    })
    .into_response()
}

fn text_response(text: String) -> Response {
    ([(header::CONTENT_TYPE, TEXT_CONTENT_TYPE)], text).into_response()
}

fn deprecated_response(text: String) -> Response {
    const DEPRECATION: HeaderName = HeaderName::from_static("deprecation");
    ([(DEPRECATION, "true")], text_response(text)).into_response()
}

fn parse_bounded(query: &QueryParams, name: &str, usual: usize, most: usize) -> Result<usize, Problem> {
    let number = query.parse_number(name).map_err(Problem::invalid)?.unwrap_or(usual);
    if (1..=most).contains(&number) {
        return Ok(number);
    }
    Err(Problem::invalid(format!("`{name}` must be a number from 1 to {most}")))
}

/// Parses `90s`, `10m`, `1h` or `2d` as a time that long ago.
fn parse_ago(text: &str) -> Result<SystemTime, Problem> {
    let wrong = || Problem::invalid("`since` must be a duration such as `90s`, `10m`, `1h` or `2d`");
    let text = text.trim();
    let unit = match text.as_bytes().last() {
        Some(b's') => 1,
        Some(b'm') => 60,
        Some(b'h') => 3_600,
        Some(b'd') => 86_400,
        _ => return Err(wrong()),
    };
    let count: u64 = text[..text.len() - 1].trim().parse().ok().ok_or_else(wrong)?;
    let length = count.checked_mul(unit).map(Duration::from_secs).ok_or_else(wrong)?;
    Ok(SystemTime::now().checked_sub(length).unwrap_or(SystemTime::UNIX_EPOCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, most: usize) -> (String, bool) {
        let tail = OutputTail { bytes: text.as_bytes().to_vec(), times: Vec::new(), cut: false, ended: None };
        let content = last_lines(&tail, most, None);
        (content.text, content.truncated)
    }

    #[test]
    fn lines_carry_the_time_of_their_beginning() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        // The second line begins in the part that was read at 2 and ends in the one read at 3.
        let times = vec![(0, at(1)), (2, at(2)), (4, at(3))];
        let tail = OutputTail { bytes: b"a\nbcd\ne".to_vec(), times, cut: false, ended: None };
        let text = |most, since| last_lines(&tail, most, since).text;
        let (first, second, third) =
            ("1970-01-01T00:00:01Z a\n", "1970-01-01T00:00:02Z bcd\n", "1970-01-01T00:00:03Z e");
        assert_eq!(text(9, None), [first, second, third].concat());
        assert_eq!(text(2, None), [second, third].concat());
        assert_eq!(text(9, Some(at(2))), [second, third].concat());
        let partly = OutputTail { times: vec![(6, at(3))], ..tail.clone() };
        assert_eq!(last_lines(&partly, 9, None).text, ["a\nbcd\n", third].concat());
    }

    #[test]
    fn last_lines_are_complete() {
        assert_eq!(lines("a\nb\nc\n", 2), ("b\nc\n".to_owned(), true));
        assert_eq!(lines("a\nb\nc", 2), ("b\nc".to_owned(), true));
        assert_eq!(lines("a\nb\n", 2), ("a\nb\n".to_owned(), false));
        assert_eq!(lines("", 2), (String::new(), false));
        assert_eq!(lines("\n\n\n", 1), ("\n".to_owned(), true));
    }

    #[test]
    fn duration_needs_a_unit() {
        for text in ["90s", "10m", " 1h ", "2 d", "18446744073709551615s"] {
            assert!(parse_ago(text).is_ok(), "{text}");
        }
        for text in ["", "m", "10", "-1m", "1w", "99999999999999999999h", "é"] {
            assert!(parse_ago(text).is_err(), "{text}");
        }
    }
}
