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
use service::{LifeEvent, Sandbox, Tail, Trouble};

use super::Front;
use super::access::{Addressed, KindText};
use super::problem::Problem;
use super::query::Query;
use super::types::{rfc3339, state};

/// The most output that a response includes, in bytes.
const LONGEST: u64 = 1 << 20;
const MOST_LINES: usize = 10_000;
const MOST_EVENTS: usize = 500;
const LINES: usize = 100;
const EVENTS: usize = 50;
const TEXT: &str = "text/plain; charset=utf-8";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
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
struct Content {
    text: String,
    truncated: bool,
    warnings: Vec<String>,
}

/// `GET /sandboxes/{id}/diagnostics/{kind}`
pub(super) async fn show(
    State(front): State<Front>,
    at: Addressed,
    KindText(kind): KindText,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::of(&uri);
    let sandbox = front.service.get(&at.owner, &at.id)?;
    match (kind.as_str(), query.first("scope").filter(|scope| !scope.is_empty())) {
        ("logs", Some(scope @ ("container" | "all"))) => {
            let content = logs(&front, &sandbox, LINES, None).await;
            Ok(described("logs", scope, &sandbox, content))
        }
        ("events", Some(scope @ ("runtime" | "lifecycle" | "all"))) => {
            Ok(described("events", scope, &sandbox, events(&front, &sandbox, scope, EVENTS)?))
        }
        ("logs" | "events", Some(_)) => {
            let message = "the scopes of logs are `container` and `all`, those of events `runtime`, \
                           `lifecycle` and `all`";
            Err(Problem::new(StatusCode::BAD_REQUEST, "DIAGNOSTICS_SCOPE_UNSUPPORTED", message))
        }
        ("logs", None) => {
            let tail = bounded(&query, "tail", LINES, MOST_LINES)?;
            let since = query.first("since").map(ago).transpose()?;
            Ok(deprecated(logs(&front, &sandbox, tail, since).await.told("(no logs)")))
        }
        ("events", None) => {
            let limit = bounded(&query, "limit", EVENTS, MOST_EVENTS)?;
            Ok(deprecated(events(&front, &sandbox, "all", limit)?.told("(no notable events)")))
        }
        ("inspect", _) => Ok(plain(inspect(&sandbox))),
        ("summary", _) => {
            let tail = bounded(&query, "tail", 50, MOST_LINES)?;
            let limit = bounded(&query, "event_limit", 20, MOST_EVENTS)?;
            let events = events(&front, &sandbox, "all", limit)?.told("(no notable events)");
            let logs = logs(&front, &sandbox, tail, None).await.told("(no logs)");
            Ok(plain(summary(&sandbox, &events, &logs, tail)))
        }
        _ => Err(Problem::new(StatusCode::NOT_FOUND, "NOT_FOUND", "unknown kind of diagnostics")),
    }
}

impl Content {
    /// Formats the content as plain text, with warnings at the end.
    fn told(self, nothing: &str) -> String {
        let text = if self.text.is_empty() { nothing.to_owned() } else { self.text };
        self.warnings.iter().fold(text, |text, warning| format!("{text}\n[warning] {warning}"))
    }
}

/// Returns the last lines that the main process printed. A sandbox that cannot be reached is not an
/// error here: diagnostics are used just when something is wrong.
async fn logs(front: &Front, sandbox: &Sandbox, lines: usize, since: Option<SystemTime>) -> Content {
    match front.service.entrypoint_tail(&sandbox.owner, &sandbox.id, LONGEST).await {
        Ok(Some(tail)) if since.is_some_and(|since| tail.ended.is_some_and(|end| end < since)) => {
            Content::default()
        }
        Ok(Some(tail)) => last_lines(&tail, lines),
        Ok(None) => Content::default(),
        Err(error) => {
            let warnings = vec![format!("the output of the main process cannot be read: {error}")];
            Content { warnings, ..Content::default() }
        }
    }
}

/// Keeps the last lines; the first one may be incomplete.
fn last_lines(tail: &Tail, most: usize) -> Content {
    let text = String::from_utf8_lossy(&tail.bytes);
    let begins = text.strip_suffix('\n').unwrap_or(&text).rmatch_indices('\n').nth(most.saturating_sub(1));
    let kept = begins.map_or(&*text, |(at, _)| &text[at + 1..]);
    let truncated = tail.cut || begins.is_some();
    Content { text: kept.to_owned(), truncated, warnings: Vec::new() }
}

/// Returns the phase changes of the sandbox (`lifecycle`) and its failures (`runtime`).
fn events(front: &Front, sandbox: &Sandbox, scope: &str, most: usize) -> Result<Content, Problem> {
    let own = front.service.events_of(&sandbox.owner, &sandbox.id, most + 1)?;
    let shown = own.iter().filter(|event| scope != "runtime" || is_an_end(event));
    let mut lines: Vec<(SystemTime, String)> = shown.map(|event| (event.time, phase_line(event))).collect();
    if scope != "lifecycle" {
        let troubles = front.service.troubles(Some(&sandbox.owner));
        let own = troubles.iter().filter(|trouble| trouble.sandbox.as_ref() == Some(&sandbox.id));
        lines.extend(own.map(|trouble| (trouble.time, trouble_line(trouble))));
    }
    lines.sort();
    let skipped = lines.len().saturating_sub(most);
    let text: String = lines[skipped..].iter().map(|(_, line)| format!("{line}\n")).collect();
    Ok(Content { text, truncated: skipped > 0, warnings: Vec::new() })
}

fn is_an_end(event: &LifeEvent) -> bool {
    matches!(event.phase, domain::Phase::Exited(_) | domain::Phase::Failed(_)) || event.cause.is_some()
}

fn phase_line(event: &LifeEvent) -> String {
    let cause = event.cause.map(|cause| format!(" ({})", cause.name())).unwrap_or_default();
    format!("{} {} {}{cause}", rfc3339(event.time), state(event.phase), event.phase)
}

fn trouble_line(trouble: &Trouble) -> String {
    format!("{} Warning {} failed: {}", rfc3339(trouble.time), trouble.operation, trouble.message)
}

/// Describes the sandbox and what is enforced for it.
fn inspect(sandbox: &Sandbox) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        writeln!(text, "{name:<16}{value}").expect("writing to a String cannot fail");
    };
    line("Sandbox ID:", sandbox.id.as_str());
    line("Image:", &sandbox.spec.image);
    line("Image used:", &sandbox.in_force.image);
    line("Status:", state(sandbox.phase));
    line("Since:", &rfc3339(sandbox.phase_since));
    line("Created At:", &rfc3339(sandbox.created));
    line("Expires At:", &sandbox.expires.map_or_else(|| "never".to_owned(), rfc3339));
    line("Entrypoint:", &sandbox.spec.entrypoint.join(" "));
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            write!(text, "\n{title}:\n  {}\n", lines.join("\n  ")).expect("writing to a String cannot fail");
        }
    };
    section("In force", sandbox.in_force.measures.iter().map(|(name, is)| format!("{name}: {is}")).collect());
    section("Weaker", sandbox.in_force.weaker.clone());
    section("Labels", sandbox.labels.iter().map(|(name, value)| format!("{name}={value}")).collect());
    // Any value may be a secret, regardless of its name.
    section("Environment", sandbox.spec.env.keys().map(|name| format!("{name}=***")).collect());
    text
}

fn summary(sandbox: &Sandbox, events: &str, logs: &str, tail: usize) -> String {
    let (wide, narrow) = ("=".repeat(72), "-".repeat(40));
    let head = format!("{wide}\nSANDBOX DIAGNOSTICS SUMMARY\nSandbox ID: {}\n{wide}\n", sandbox.id);
    let logs_title = format!("LOGS (last {tail} lines)");
    let parts =
        [("INSPECT", inspect(sandbox)), ("EVENTS", events.to_owned()), (&logs_title, logs.to_owned())];
    parts.iter().fold(head, |text, (title, part)| {
        format!("{text}\n{narrow}\n{title}\n{narrow}\n{}\n", part.trim_end_matches('\n'))
    })
}

fn described(kind: &'static str, scope: &str, sandbox: &Sandbox, content: Content) -> Response {
    let Content { text, truncated, warnings } = content;
    Json(Descriptor {
        sandbox_id: sandbox.id.to_string(),
        kind,
        scope: scope.to_owned(),
        delivery: "inline",
        content_type: TEXT,
        content_length: text.len(),
        content: text,
        truncated,
        warnings,
    })
    .into_response()
}

fn plain(text: String) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], text).into_response()
}

fn deprecated(text: String) -> Response {
    const DEPRECATION: HeaderName = HeaderName::from_static("deprecation");
    ([(DEPRECATION, "true")], plain(text)).into_response()
}

fn bounded(query: &Query, name: &str, usual: usize, most: usize) -> Result<usize, Problem> {
    let number = query.number(name).map_err(Problem::invalid)?.unwrap_or(usual);
    if (1..=most).contains(&number) {
        return Ok(number);
    }
    Err(Problem::invalid(format!("`{name}` must be a number from 1 to {most}")))
}

/// Parses `90s`, `10m`, `1h` or `2d` as a time that long ago.
fn ago(text: &str) -> Result<SystemTime, Problem> {
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
        let tail = Tail { bytes: text.as_bytes().to_vec(), cut: false, ended: None };
        let content = last_lines(&tail, most);
        (content.text, content.truncated)
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
            assert!(ago(text).is_ok(), "{text}");
        }
        for text in ["", "m", "10", "-1m", "1w", "99999999999999999999h", "é"] {
            assert!(ago(text).is_err(), "{text}");
        }
    }
}
