//! The one printer: all output of the command line goes through here.
//!
//! Results go to standard output, as tables or lines for people and as JSON with `--json`. Errors,
//! hints, warnings and progress go to standard error; progress is shown only on a terminal.
//!
//! Names and messages may come from inside a sandbox, so control characters in them are escaped. Only
//! [`Printer::print_bytes`] writes the output of commands as it is.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::client::ServerResponseError;
use crate::commands::ProgramStartError;

/// Writes results and errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Printer {
    json: bool,
    watched: bool,
    /// Whether warnings, remarks and notes are left out; errors never are.
    quiet: bool,
}

impl Printer {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, watched: io::stderr().is_terminal(), quiet: false }
    }

    /// The same printer without warnings, remarks and notes.
    pub(crate) fn quiet(self) -> Self {
        Self { watched: false, quiet: true, ..self }
    }

    /// Whether results are printed for a program.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    pub(crate) fn print_line(&self, text: impl fmt::Display) -> Result<()> {
        self.write_stdout(&escape_controls(&text.to_string()))
    }

    fn write_stdout(&self, line: &str) -> Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }

    /// Writes bytes as they came from a sandbox.
    pub(crate) fn print_bytes(&self, bytes: &[u8]) -> Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        Ok(out.flush()?)
    }

    /// As [`Printer::print_bytes`], to standard error.
    pub(crate) fn print_error_bytes(&self, bytes: &[u8]) -> Result<()> {
        Ok(io::stderr().lock().write_all(bytes)?)
    }

    /// One JSON value, on several lines, so that people can read it as well.
    pub(crate) fn print_json(&self, value: &(impl Serialize + ?Sized)) -> Result<()> {
        self.print_json_text(&serde_json::to_string_pretty(value)?)
    }

    /// A JSON text, in which control characters are escaped as JSON does.
    pub(crate) fn print_json_text(&self, json: &str) -> Result<()> {
        self.write_stdout(&escape_json_controls(json))
    }

    pub(crate) fn print_table(&self, header: &[&str], rows: Vec<Vec<String>>) -> Result<()> {
        self.print_line(render_table(header, rows))
    }

    /// `value` for programs, otherwise the table for people.
    pub(crate) fn print_json_or_table(
        &self,
        value: &(impl Serialize + ?Sized),
        header: &[&str],
        rows: Vec<Vec<String>>,
    ) -> Result<()> {
        if self.json { self.print_json(value) } else { self.print_table(header, rows) }
    }

    pub(crate) fn warn(&self, text: impl fmt::Display) {
        if !self.quiet {
            write_message(&format!("warning: {text}"));
        }
    }

    /// A line on standard error that belongs there for people and programs alike.
    pub(crate) fn remark(&self, text: impl fmt::Display) {
        if !self.quiet {
            write_message(&text.to_string());
        }
    }

    /// A remark for people who watch; programs that read standard error do not get it.
    pub(crate) fn note_on_terminal(&self, text: impl fmt::Display) {
        if self.watched {
            write_message(&text.to_string());
        }
    }

    /// An error for people, or with `--json` as one line with one object.
    pub(crate) fn print_error(&self, error: &anyhow::Error) {
        let complaint = ErrorReport::from_error(error);
        match self.json {
            true => write_stderr(&escape_json_controls(&complaint.to_json_line())),
            false => write_stderr(&escape_controls(&complaint.to_text())),
        }
    }

    /// A progress line for work that has taken more than a second.
    pub(crate) fn start_progress(&self, what: impl Into<String>) -> ProgressLine {
        ProgressLine {
            what: escape_cell(&what.into()),
            watched: self.watched,
            started: Instant::now(),
            shown: None,
        }
    }
}

/// Standard error may be closed; then there is no other place to report that.
fn write_stderr(text: &str) {
    io::stderr().lock().write_all(text.as_bytes()).ok();
}

/// Writes one message to standard error.
fn write_message(text: &str) {
    write_stderr(&format!("{}\n", escape_controls(text)));
}

/// Whether a terminal might obey a character, or show the text around it in another order.
fn is_unsafe_on_terminal(letter: char) -> bool {
    let reorders = matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    reorders || (letter.is_control() && !matches!(letter, '\n' | '\t'))
}

/// Replaces what a terminal might obey by an escape such as `\u{1b}`.
fn escape_controls(text: &str) -> Cow<'_, str> {
    escape_with(text, |letter, out| out.extend(letter.escape_unicode()))
}

/// As [`escape_controls`], for JSON texts: there, such characters occur only in strings.
fn escape_json_controls(json: &str) -> Cow<'_, str> {
    escape_with(json, |letter, out| out.push_str(&format!("\\u{:04x}", u32::from(letter))))
}

fn escape_with(text: &str, escape: impl Fn(char, &mut String)) -> Cow<'_, str> {
    if !text.contains(is_unsafe_on_terminal) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().fold(String::with_capacity(text.len()), |mut out, letter| {
        if is_unsafe_on_terminal(letter) {
            escape(letter, &mut out)
        } else {
            out.push(letter)
        }
        out
    });
    Cow::Owned(escaped)
}

/// A text in one line of a table or a progress line: line ends are escaped too.
fn escape_cell(text: &str) -> String {
    escape_controls(text).replace('\n', "\\n")
}

fn render_table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|name| name.to_uppercase()));
    let escape_row = |row: Vec<String>| row.iter().map(|cell| escape_controls(cell).into_owned()).collect();
    table.add_rows(rows.into_iter().map(escape_row).collect::<Vec<Vec<String>>>());
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// The outermost message, its causes, and a hint.
#[derive(Debug, Serialize)]
struct ErrorReport {
    error: String,
    caused_by: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl ErrorReport {
    fn from_error(error: &anyhow::Error) -> Self {
        let mut messages: Vec<String> = error.chain().map(ToString::to_string).collect();
        // Some libraries repeat the message of their source; printing it twice does not help.
        messages.dedup();
        let caused_by = messages.split_off(1);
        Self { error: messages.remove(0), caused_by, hint: error.chain().find_map(find_hint) }
    }

    fn to_text(&self) -> String {
        let mut text = format!("error: {}\n", self.error);
        for cause in &self.caused_by {
            text.push_str(&format!("caused by: {cause}\n"));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("hint: {hint}\n"));
        }
        text
    }

    fn to_json_line(&self) -> String {
        let object = serde_json::to_string(self).expect("texts become JSON");
        format!("{object}\n")
    }
}

pub(crate) fn find_hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(hinted) = error.downcast_ref::<HintedError>() {
        return Some(hinted.hint.clone());
    }
    if let Some(refused) = error.downcast_ref::<ServerResponseError>() {
        return refused.hint();
    }
    if let Some(failed) = error.downcast_ref::<ProgramStartError>() {
        return Some(failed.hint().to_owned());
    }
    find_host_hint(error)
}

/// Returns the advice in an error of this host.
#[cfg(feature = "whole")]
fn find_host_hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    use backend::BackendError;
    if let Some(image) = error.downcast_ref::<launcher::images::ImageError>() {
        return image.hint().map(str::to_owned);
    }
    if let Some(launcher) = error.downcast_ref::<launcher::LauncherError>() {
        return launcher.hint().map(str::to_owned);
    }
    error.downcast_ref::<BackendError>().and_then(BackendError::hint).map(str::to_owned)
}

/// A client uses nothing of this host.
#[cfg(not(feature = "whole"))]
fn find_host_hint(_: &(dyn std::error::Error + 'static)) -> Option<String> {
    None
}

/// An error with advice for the reader. Its message and causes are those of the error inside.
#[derive(Debug)]
pub(crate) struct HintedError {
    error: anyhow::Error,
    hint: String,
}

impl fmt::Display for HintedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl std::error::Error for HintedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Adds advice to a failure.
pub(crate) trait WithHint<T> {
    fn with_hint(self, hint: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<anyhow::Error>> WithHint<T> for Result<T, E> {
    fn with_hint(self, hint: impl Into<String>) -> Result<T> {
        self.map_err(|error| anyhow::Error::new(HintedError { error: error.into(), hint: hint.into() }))
    }
}

/// Work in progress. Nothing is printed during the first second.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    what: String,
    watched: bool,
    started: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    const SHOW_DELAY: Duration = Duration::from_secs(1);
    const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

    /// Shows how many bytes are done, and the total if it is known.
    pub(crate) fn show_bytes(&mut self, done: u64, total: Option<u64>) {
        let amount = match total {
            Some(total) if total > 0 => {
                format!("{} of {} ({}%)", format_bytes(done), format_bytes(total), done * 100 / total)
            }
            _ => format_bytes(done),
        };
        self.show_detail(&amount);
    }

    pub(crate) fn show_detail(&mut self, detail: &str) {
        let quiet = self.started.elapsed() < Self::SHOW_DELAY;
        let fresh = self.shown.is_some_and(|shown| shown.elapsed() < Self::UPDATE_INTERVAL);
        if self.watched && !quiet && !fresh {
            write_stderr(&format!("\r\x1b[K{}: {}", self.what, escape_cell(detail)));
            self.shown = Some(Instant::now());
        }
    }
}

impl Drop for ProgressLine {
    /// Clears the line, so that whatever is printed next starts on a clean one.
    fn drop(&mut self) {
        if self.shown.is_some() {
            write_stderr("\r\x1b[K");
        }
    }
}

/// An amount of bytes for people.
pub(crate) fn format_bytes(bytes: u64) -> String {
    domain::Bytes(bytes).human_readable()
}

/// An amount in the short form of the API, such as `512Mi`, as [`format_bytes`] writes it; other texts stay as they are.
pub(crate) fn format_amount(text: &str) -> String {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)];
    let bytes = units.iter().find_map(|(unit, shift)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(1 << shift)
    });
    bytes.map_or_else(|| text.to_owned(), format_bytes)
}

/// A count with its noun: `1 sandbox`, `2 sandboxes`.
pub(crate) fn format_count(count: usize, noun: &str) -> String {
    let ending = match count {
        1 => "",
        _ if noun.ends_with('x') || noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {noun}{ending}")
}

/// A span of time for people, in its largest unit.
pub(crate) fn format_duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A span of time that was configured, as the command line takes it: every unit that is not zero.
pub(crate) fn format_exact_duration(seconds: u64) -> String {
    let parts =
        [(seconds / 86_400, "d"), (seconds / 3600 % 24, "h"), (seconds / 60 % 60, "m"), (seconds % 60, "s")];
    let shown: String =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, unit)| format!("{count}{unit}")).collect();
    if shown.is_empty() { "0s".to_owned() } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};
    use backend::BackendError;

    #[test]
    fn an_error_is_printed_with_its_causes_and_its_hint() {
        let error = Err::<(), _>(io::Error::from_raw_os_error(libc_enoent()))
            .context("could not read `/etc/coracle.toml`")
            .context("could not start")
            .with_hint("name another file with --config")
            .expect_err("it is an error");
        assert_eq!(
            ErrorReport::from_error(&error).to_text(),
            "error: could not start\n\
             caused by: could not read `/etc/coracle.toml`\n\
             caused by: No such file or directory (os error 2)\n\
             hint: name another file with --config\n"
        );
    }

    fn libc_enoent() -> i32 {
        rustix::io::Errno::NOENT.raw_os_error()
    }

    #[test]
    fn the_hint_of_a_failed_step_is_found_below_its_context() {
        let step = BackendError::Step {
            step: "user namespace".to_owned(),
            message: "Operation not permitted".to_owned(),
            hint: Some("sysctl kernel.unprivileged_userns_clone=1".to_owned()),
        };
        let error = anyhow::Error::new(step).context("could not make the sandbox");
        assert_eq!(
            ErrorReport::from_error(&error).to_text(),
            "error: could not make the sandbox\n\
             caused by: step `user namespace` failed: Operation not permitted\n\
             hint: sysctl kernel.unprivileged_userns_clone=1\n"
        );
    }

    #[test]
    fn an_error_without_advice_has_no_hint() {
        assert_eq!(
            ErrorReport::from_error(&anyhow!("nothing to be done")).to_text(),
            "error: nothing to be done\n"
        );
    }

    #[test]
    fn a_table_has_aligned_columns_and_no_lines() {
        let rows = vec![
            vec!["abc".to_owned(), "Running".to_owned()],
            vec!["abcdefgh".to_owned(), "Paused".to_owned()],
        ];
        assert_eq!(
            render_table(&["id", "state"], rows),
            "ID        STATE\nabc       Running\nabcdefgh  Paused"
        );
        assert_eq!(render_table(&["id"], Vec::new()), "ID");
    }

    #[test]
    fn control_characters_are_escaped() {
        for (text, escaped) in [
            ("plain ü 名 \n\t", "plain ü 名 \n\t"),
            ("a\u{1b}[2Jb", "a\\u{1b}[2Jb"),
            ("\r\u{7}\u{7f}\u{9b}", "\\u{d}\\u{7}\\u{7f}\\u{9b}"),
            ("exe.\u{202e}txt", "exe.\\u{202e}txt"),
        ] {
            assert_eq!(escape_controls(text), escaped);
        }
        assert_eq!(escape_cell("a\nb\u{1b}"), "a\\nb\\u{1b}");
    }

    #[test]
    fn escaped_json_has_the_same_meaning() {
        let value = serde_json::json!({"name": "a\u{1b}[2J\u{9b}\u{7f}\u{202e}\n"});
        let text = serde_json::to_string(&value).expect("texts become JSON");
        let escaped = escape_json_controls(&text);
        assert!(escaped.is_ascii(), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).expect("JSON"), value);
    }

    #[test]
    fn error_with_a_name_from_inside_is_escaped() {
        let error = anyhow!("the sandbox listed `\u{1b}]0;title\u{7}`, which is not a plain name");
        let text = ErrorReport::from_error(&error).to_text();
        assert!(escape_controls(&text).chars().all(|letter| letter == '\n' || !letter.is_control()));
    }

    #[test]
    fn amounts_are_short() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")]
        {
            assert_eq!(format_bytes(bytes), text);
        }
        for (short, text) in [("16Ki", "16.0 KiB"), ("1Gi", "1.0 GiB"), ("0.5", "0.5"), ("xMi", "xMi")] {
            assert_eq!(format_amount(short), text);
        }
        assert_eq!(
            (format_count(1, "sandbox"), format_count(2, "key")),
            ("1 sandbox".to_owned(), "2 keys".to_owned())
        );
        for (seconds, text) in [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (86_401, "1d1s")] {
            assert_eq!(format_exact_duration(seconds), text);
        }
        for (seconds, text) in [(5, "5s"), (90, "1m"), (7200, "2h"), (200_000, "2d")] {
            assert_eq!(format_duration(seconds), text);
        }
    }
}
