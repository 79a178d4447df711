//! A command's output as records with offsets: one JSON object per line.
//!
//! ```text
//! {"type":"output","stream":"stdout","offset":0,"length":2,"text":"a\n"}
//! {"type":"output","stream":"stderr","offset":2,"length":1,"base64":"/w=="}
//! {"type":"gap","offset":3,"length":97}
//! {"type":"end","offset":100,"running":false,"exit_code":0}
//! ```

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use domain::{ExitReason, StreamKind as SourceStream};
use futures_util::{FutureExt, Stream, stream};
use http::header;
use serde::Serialize;
use service::{OutputEvent, OutputStream, ServiceError};

use super::command_ending::exit_code;

pub(crate) const RECORDS_CONTENT_TYPE: &str = "application/x-ndjson";

/// How many bytes are batched into one write when output arrives faster than the client reads.
const MAX_BATCH_BYTES: usize = 128 << 10;

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputRecord<'a> {
    Output {
        stream: &'static str,
        offset: u64,
        length: usize,
        /// The bytes, if they are UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// Bytes that are no longer retained.
    Gap { offset: u64, length: u64 },
    /// The last record.
    End {
        /// The offset at which the next call would continue.
        offset: u64,
        running: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        exit_code: Option<i32>,
    },
    /// The last record, if following the output failed.
    Error { error: String },
}

/// The state of a response body in progress.
struct RecordStream {
    following: OutputStream,
    /// The offset of the next byte.
    next: u64,
    /// The offset at which the response ends; `None` if it ends with the command.
    to: Option<u64>,
    /// How the command ended, if it had already ended when the request arrived.
    ended: Option<ExitReason>,
    lines: Vec<u8>,
    over: bool,
}

/// Streams the output from `from` up to the offset `to`, or to the end of the command.
pub(crate) fn records_response(
    following: OutputStream,
    from: u64,
    to: Option<u64>,
    ended: Option<ExitReason>,
) -> Response {
    let records = RecordStream { following, next: from, to, ended, lines: Vec::new(), over: false };
    ([(header::CONTENT_TYPE, RECORDS_CONTENT_TYPE)], Body::from_stream(records.into_byte_stream()))
        .into_response()
}

impl RecordStream {
    fn into_byte_stream(self) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> + Send {
        stream::unfold(self, |mut records| async move {
            if records.over {
                return None;
            }
            while records.lines.is_empty() {
                records.read_event().await;
            }
            while !records.over && records.lines.len() < MAX_BATCH_BYTES {
                let Some(event) = records.following.next().now_or_never() else { break };
                records.handle_event(event);
            }
            let lines = std::mem::take(&mut records.lines);
            Some((Ok(Bytes::from(lines)), records))
        })
    }

    async fn read_event(&mut self) {
        if self.to.is_some_and(|to| self.next >= to) {
            return self.write_end(self.ended);
        }
        let event = self.following.next().await;
        self.handle_event(event);
    }

    fn handle_event(&mut self, event: Result<OutputEvent, ServiceError>) {
        match event {
            Ok(OutputEvent::Output { stream, at, mut bytes }) => {
                let room = self.to.map_or(u64::MAX, |to| to.saturating_sub(at.0));
                bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
                self.next = at.0 + bytes.len() as u64;
                self.write_output(stream, at.0, &bytes);
            }
            Ok(OutputEvent::Gap { from, to, .. }) => {
                self.next = to.0;
                self.write_record(&OutputRecord::Gap { offset: from.0, length: to.0.saturating_sub(from.0) });
            }
            Ok(OutputEvent::Ended(end)) => self.write_end(Some(end.exit)),
            Err(error) => {
                self.write_record(&OutputRecord::Error { error: error.to_string() });
                self.over = true;
            }
        }
        if !self.over && self.to.is_some_and(|to| self.next >= to) {
            self.write_end(self.ended);
        }
    }

    fn write_output(&mut self, stream: SourceStream, offset: u64, bytes: &[u8]) {
        let stream = match stream {
            SourceStream::Stdout => "stdout",
            SourceStream::Stderr => "stderr",
            SourceStream::Terminal => "terminal",
            // Kernel reports are not printed output, but they occupy offsets.
            SourceStream::KernelEvent => "report",
        };
        if bytes.is_empty() {
            return;
        }
        let text = std::str::from_utf8(bytes).ok();
        let base64 = text.is_none().then(|| STANDARD.encode(bytes));
        self.write_record(&OutputRecord::Output { stream, offset, length: bytes.len(), text, base64 });
    }

    fn write_end(&mut self, exit: Option<ExitReason>) {
        let (running, exit_code) = (exit.is_none(), exit.map(exit_code));
        self.write_record(&OutputRecord::End { offset: self.next, running, exit_code });
        self.over = true;
    }

    fn write_record(&mut self, record: &OutputRecord<'_>) {
        serde_json::to_writer(&mut self.lines, record).expect("records contain only strings and numbers");
        self.lines.push(b'\n');
    }
}
