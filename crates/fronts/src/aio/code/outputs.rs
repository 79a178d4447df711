//! The output, displayed data and errors of code, in the form of AIO's outputs.
//!
//! Everything here comes from inside the sandbox. The number of outputs and their total length are bounded; what exceeds
//! the bounds is left out, and a last line says so.

use bytes::Bytes;
use domain::{ExitReason, StreamKind};
use http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value, json};
use service::{CodeError, CodeEvent, CodeExecution, MimeForms, ProcessEnd, ServiceError};

use crate::aio::problem::AioProblem;

/// How many bytes of all outputs of a run are returned.
const MAX_OUTPUT_BYTES: usize = 32 << 20;
/// How many outputs of a run are returned.
const MAX_OUTPUTS: usize = 10_000;

/// One output. Fields that its type does not have are left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "output_type", rename_all = "snake_case")]
pub(super) enum CodeOutput {
    Stream { name: StreamName, text: String },
    ExecuteResult { data: Map<String, Value>, metadata: Map<String, Value>, execution_count: Option<u64> },
    DisplayData { data: Map<String, Value>, metadata: Map<String, Value> },
    Error { ename: String, evalue: String, traceback: Vec<String> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum StreamName {
    Stdout,
    Stderr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CodeRunStatus {
    Ok,
    Error,
    Timeout,
}

/// A run of code that has ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RunReport {
    pub(super) status: CodeRunStatus,
    /// What happened, for people.
    pub(super) message: String,
    pub(super) execution_count: Option<u64>,
    pub(super) outputs: Vec<CodeOutput>,
    pub(super) exit_code: i32,
}

impl RunReport {
    /// A run that did not begin, because its directory cannot be used.
    pub(super) fn directory_error(reason: &str) -> Self {
        let output = CodeOutput::Error {
            ename: "DirectoryError".to_owned(),
            evalue: reason.to_owned(),
            traceback: vec![format!("DirectoryError: {reason}")],
        };
        Self {
            status: CodeRunStatus::Error,
            message: format!("the working directory cannot be used: {reason}"),
            execution_count: None,
            outputs: vec![output],
            exit_code: 1,
        }
    }

    /// Everything that was printed to a stream.
    pub(super) fn text_of(&self, stream: StreamName) -> String {
        let texts = self.outputs.iter().filter_map(|output| match output {
            CodeOutput::Stream { name, text } if *name == stream => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// The traceback of the first error.
    pub(super) fn traceback(&self) -> Option<Vec<String>> {
        self.outputs.iter().find_map(|output| match output {
            CodeOutput::Error { traceback, .. } => Some(traceback.clone()),
            _ => None,
        })
    }

    /// The value of the first error.
    pub(super) fn error_value(&self) -> Option<&str> {
        self.outputs.iter().find_map(|output| match output {
            CodeOutput::Error { evalue, .. } => Some(evalue.as_str()),
            _ => None,
        })
    }
}

/// Collects outputs within their bounds.
#[derive(Default)]
pub(super) struct OutputCollector {
    items: Vec<CollectedCodeOutput>,
    bytes: usize,
    is_full: bool,
    execution_count: Option<u64>,
    error: Option<String>,
}

enum CollectedCodeOutput {
    /// A character may be split between two pieces, so they are decoded at the end.
    Stream(StreamName, Vec<u8>),
    Other(CodeOutput),
}

/// The sandbox did not report the end of a run long after its time limit.
pub(super) fn unresponsive_sandbox() -> AioProblem {
    AioProblem::new(StatusCode::GATEWAY_TIMEOUT, "the sandbox did not end the run in time")
}

/// Reads the events of code in a context to its end.
pub(super) async fn collect_code_run(mut running: CodeExecution) -> Result<RunReport, ServiceError> {
    let mut collector = OutputCollector::default();
    loop {
        match running.next().await? {
            CodeEvent::Output { stream, bytes } => collector.add_bytes(stream, &bytes),
            CodeEvent::Gap { .. } => collector.add_note("a part of the output was lost"),
            CodeEvent::Count(count) => collector.execution_count = Some(count),
            CodeEvent::Display(forms) => collector.add_display(forms),
            CodeEvent::Result(forms) => collector.add_result(forms),
            CodeEvent::Error(error) => collector.add_error(error),
            CodeEvent::Garbled => {
                collector.add_note("a message of the kernel that is too long or malformed was left out");
            }
            CodeEvent::Ended(end) => return Ok(collector.end_in_context(&end)),
        }
    }
}

impl OutputCollector {
    /// Adds printed bytes. Neighbouring pieces of one stream become one output.
    pub(super) fn add_bytes(&mut self, stream: StreamKind, bytes: &Bytes) {
        let stream = match stream {
            StreamKind::Stderr => StreamName::Stderr,
            StreamKind::Stdout | StreamKind::Terminal => StreamName::Stdout,
            // Only contexts have such events, which arrive as events of their own.
            StreamKind::KernelEvent => return,
        };
        let room = MAX_OUTPUT_BYTES - self.bytes;
        let taken = &bytes[..bytes.len().min(room)];
        let has_room = self.items.len() < MAX_OUTPUTS;
        match self.items.last_mut() {
            Some(CollectedCodeOutput::Stream(last, text)) if *last == stream => text.extend_from_slice(taken),
            _ if has_room => {
                self.items.push(CollectedCodeOutput::Stream(stream, taken.to_vec()));
            }
            _ => {
                self.is_full = true;
                return;
            }
        }
        self.bytes += taken.len();
        self.is_full |= taken.len() < bytes.len();
    }

    fn add_display(&mut self, forms: MimeForms) {
        let size = forms_size(&forms);
        self.add_output(size, CodeOutput::DisplayData { data: mime_bundle(forms), metadata: Map::new() });
    }

    pub(super) fn add_result(&mut self, forms: MimeForms) {
        let (size, execution_count) = (forms_size(&forms), self.execution_count);
        let (data, metadata) = (mime_bundle(forms), Map::new());
        self.add_output(size, CodeOutput::ExecuteResult { data, metadata, execution_count });
    }

    pub(super) fn add_error(&mut self, error: CodeError) {
        let CodeError { name, value, traceback } = error;
        self.error.get_or_insert_with(|| name.clone());
        let size = name.len() + value.len() + traceback.iter().map(String::len).sum::<usize>();
        self.add_output(size, CodeOutput::Error { ename: name, evalue: value, traceback });
    }

    fn add_note(&mut self, text: &str) {
        self.add_bytes(StreamKind::Stderr, &Bytes::from(format!("coracle: {text}\n")));
    }

    fn add_output(&mut self, size: usize, output: CodeOutput) {
        if self.items.len() >= MAX_OUTPUTS || size > MAX_OUTPUT_BYTES - self.bytes {
            self.is_full = true;
            return;
        }
        self.bytes += size;
        self.items.push(CollectedCodeOutput::Other(output));
    }

    /// The report of code that ran in a context.
    fn end_in_context(mut self, end: &ProcessEnd) -> RunReport {
        let (status, message, exit_code) = match (end.exit, &self.error) {
            (ExitReason::Deadline, _) if end.interrupted => {
                let message = "the code reached its timeout and was interrupted; the session keeps its state"
                    .to_owned();
                (CodeRunStatus::Timeout, message, TIMEOUT_EXIT_CODE)
            }
            (ExitReason::Deadline, _) => {
                let message =
                    "the code reached its timeout and ignored the interrupt, so its kernel was killed; \
                               the state of the session is lost"
                        .to_owned();
                (CodeRunStatus::Timeout, message, TIMEOUT_EXIT_CODE)
            }
            (ExitReason::Code(0), None) => (CodeRunStatus::Ok, SUCCESS_MESSAGE.to_owned(), 0),
            (ExitReason::Code(0), Some(name)) => (CodeRunStatus::Error, format!("the code raised {name}"), 1),
            (exit, _) => {
                let (how, code) = describe_end(exit);
                let value = format!("the kernel {how}; the state of the session is lost");
                let (name, traceback) = ("KernelDied".to_owned(), vec![format!("KernelDied: {value}")]);
                self.add_error(CodeError { name, value: value.clone(), traceback });
                (CodeRunStatus::Error, value, code)
            }
        };
        self.into_report(status, message, exit_code)
    }

    /// The report of code that ran in a process of its own.
    pub(super) fn end_of_process(self, end: &ProcessEnd) -> RunReport {
        let (how, code) = describe_end(end.exit);
        let (status, message) = match (end.exit, &self.error) {
            (ExitReason::Deadline, _) => {
                (CodeRunStatus::Timeout, "the code reached its timeout, so its process was killed".to_owned())
            }
            (ExitReason::Code(0), _) => (CodeRunStatus::Ok, SUCCESS_MESSAGE.to_owned()),
            (ExitReason::Code(_), Some(name)) => (CodeRunStatus::Error, format!("the code raised {name}")),
            _ => (CodeRunStatus::Error, format!("the process {how}")),
        };
        self.into_report(status, message, code)
    }

    fn into_report(mut self, status: CodeRunStatus, message: String, exit_code: i32) -> RunReport {
        if self.is_full {
            let note =
                format!("coracle: the output exceeds {MAX_OUTPUT_BYTES} bytes or {MAX_OUTPUTS} pieces\n");
            self.items.push(CollectedCodeOutput::Stream(StreamName::Stderr, note.into_bytes()));
        }
        let outputs = self.items.into_iter().map(|item| match item {
            CollectedCodeOutput::Stream(name, text) => {
                CodeOutput::Stream { name, text: String::from_utf8_lossy(&text).into_owned() }
            }
            CollectedCodeOutput::Other(output) => output,
        });
        let (outputs, execution_count) = (outputs.collect(), self.execution_count);
        RunReport { status, message, execution_count, outputs, exit_code }
    }
}

const SUCCESS_MESSAGE: &str = "Code executed successfully";
/// The exit code of code that reached its timeout.
const TIMEOUT_EXIT_CODE: i32 = -1;
/// Shells add this to the number of a signal.
const SIGNAL_EXIT_BASE: i32 = 128;

fn describe_end(exit: ExitReason) -> (String, i32) {
    match exit {
        ExitReason::Code(code) => (format!("ended with exit code {code}"), code),
        ExitReason::Signal(signal) => (format!("was ended by signal {signal}"), SIGNAL_EXIT_BASE + signal),
        ExitReason::Oom => ("was killed because the memory of the sandbox was used up".to_owned(), 137),
        ExitReason::Deadline => ("was killed at its timeout".to_owned(), TIMEOUT_EXIT_CODE),
        ExitReason::Lost => ("ended in an unknown way".to_owned(), TIMEOUT_EXIT_CODE),
    }
}

fn forms_size(forms: &MimeForms) -> usize {
    forms.iter().map(|(mime, text)| mime.len() + text.len()).sum()
}

/// Structures are JSON text in the core and values in AIO's outputs.
fn mime_bundle(forms: MimeForms) -> Map<String, Value> {
    let value = |mime: &str, text: String| {
        let is_structure = mime == "application/json" || mime.ends_with("+json");
        let parsed = is_structure.then(|| serde_json::from_str(&text).ok()).flatten();
        parsed.unwrap_or_else(|| json!(text))
    };
    forms.into_iter().map(|(mime, text)| (mime.clone(), value(&mime, text))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    fn end(exit: ExitReason, interrupted: bool) -> ProcessEnd {
        ProcessEnd {
            exit,
            written: 0,
            ended: SystemTime::UNIX_EPOCH,
            duration: Duration::ZERO,
            user: Duration::ZERO,
            system: Duration::ZERO,
            max_rss: domain::Bytes(0),
            interrupted,
            signalled: None,
        }
    }

    fn printed(pieces: &[(StreamKind, &[u8])]) -> OutputCollector {
        let mut collector = OutputCollector::default();
        for (stream, bytes) in pieces {
            collector.add_bytes(*stream, &Bytes::copy_from_slice(bytes));
        }
        collector
    }

    #[test]
    fn pieces_of_one_stream_are_joined_before_they_are_decoded() {
        let report = printed(&[
            (StreamKind::Stdout, b"\xc3"),
            (StreamKind::Stdout, b"\xbc"),
            (StreamKind::Stderr, b"e"),
            (StreamKind::Stdout, b"o"),
        ])
        .end_in_context(&end(ExitReason::Code(0), false));
        assert_eq!((report.status, report.outputs.len()), (CodeRunStatus::Ok, 3));
        assert_eq!(
            (report.text_of(StreamName::Stdout), report.text_of(StreamName::Stderr)),
            ("üo".into(), "e".into())
        );
        assert_eq!(
            serde_json::to_value(&report.outputs[1]).unwrap(),
            json!({"output_type": "stream", "name": "stderr", "text": "e"})
        );
    }

    #[test]
    fn timeout_says_whether_the_state_is_kept() {
        for (interrupted, word) in [(true, "keeps"), (false, "lost")] {
            let report = OutputCollector::default().end_in_context(&end(ExitReason::Deadline, interrupted));
            assert_eq!(report.status, CodeRunStatus::Timeout);
            assert!(report.message.contains(word), "{}", report.message);
        }
    }

    #[test]
    fn outputs_are_bounded_in_number_and_length() {
        let mut collector = OutputCollector::default();
        for _ in 0..MAX_OUTPUTS {
            collector.add_bytes(StreamKind::Stdout, &Bytes::from_static(b"a"));
            collector.add_bytes(StreamKind::Stderr, &Bytes::from_static(b"b"));
        }
        let report = collector.end_in_context(&end(ExitReason::Code(0), false));
        assert_eq!(report.outputs.len(), MAX_OUTPUTS + 1);
        let long = Bytes::from(vec![b'x'; MAX_OUTPUT_BYTES]);
        let mut collector = OutputCollector::default();
        collector.add_bytes(StreamKind::Stdout, &long);
        collector.add_bytes(StreamKind::Stdout, &long);
        collector.add_display(MimeForms::from([("text/plain".to_owned(), "x".to_owned())]));
        let report = collector.end_in_context(&end(ExitReason::Code(0), false));
        assert_eq!((report.outputs.len(), report.text_of(StreamName::Stdout).len()), (2, MAX_OUTPUT_BYTES));
    }

    #[test]
    fn structures_in_a_bundle_are_values() {
        let forms = [("application/json", "{\"a\":1}"), ("text/plain", "{}"), ("application/x+json", "no")];
        let bundle = mime_bundle(forms.map(|(mime, text)| (mime.to_owned(), text.to_owned())).into());
        let expected = json!({"application/json": {"a": 1}, "text/plain": "{}", "application/x+json": "no"});
        assert_eq!(Value::Object(bundle), expected);
    }

    #[test]
    fn dead_kernel_is_an_error_in_the_outputs() {
        let report = OutputCollector::default().end_in_context(&end(ExitReason::Signal(9), false));
        assert_eq!((report.status, report.exit_code), (CodeRunStatus::Error, 137));
        assert!(report.traceback().unwrap()[0].starts_with("KernelDied"));
    }
}
