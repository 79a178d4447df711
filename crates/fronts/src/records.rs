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
use domain::{Exit, Stream as SourceStream};
use futures_util::{FutureExt, Stream, stream};
use http::header;
use serde::Serialize;
use service::{Event, Following, ServiceError};

pub(crate) const CONTENT_TYPE: &str = "application/x-ndjson";

/// How many bytes are batched into one write when output arrives faster than the client reads.
const BATCH: usize = 128 << 10;

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Record<'a> {
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
struct Records {
    following: Following,
    /// The offset of the next byte.
    next: u64,
    /// The offset at which the response ends; `None` if it ends with the command.
    to: Option<u64>,
    /// How the command ended, if it had already ended when the request arrived.
    ended: Option<Exit>,
    lines: Vec<u8>,
    over: bool,
}

/// Streams the output from `from` up to the offset `to`, or to the end of the command.
pub(crate) fn response(following: Following, from: u64, to: Option<u64>, ended: Option<Exit>) -> Response {
    let records = Records { following, next: from, to, ended, lines: Vec::new(), over: false };
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], Body::from_stream(records.lines())).into_response()
}

impl Records {
    fn lines(self) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> + Send {
        stream::unfold(self, |mut records| async move {
            if records.over {
                return None;
            }
            while records.lines.is_empty() {
                records.step().await;
            }
            while !records.over && records.lines.len() < BATCH {
                let Some(event) = records.following.next().now_or_never() else { break };
                records.take(event);
            }
            let lines = std::mem::take(&mut records.lines);
            Some((Ok(Bytes::from(lines)), records))
        })
    }

    async fn step(&mut self) {
        if self.to.is_some_and(|to| self.next >= to) {
            return self.end(self.ended);
        }
        let event = self.following.next().await;
        self.take(event);
    }

    fn take(&mut self, event: Result<Event, ServiceError>) {
        match event {
            Ok(Event::Output { stream, at, mut bytes }) => {
                let room = self.to.map_or(u64::MAX, |to| to.saturating_sub(at.0));
                bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
                self.next = at.0 + bytes.len() as u64;
                self.output(stream, at.0, &bytes);
            }
            Ok(Event::Gap { from, to }) => {
                self.next = to.0;
                self.write(&Record::Gap { offset: from.0, length: to.0.saturating_sub(from.0) });
            }
            Ok(Event::Ended(end)) => self.end(Some(end.exit)),
            Err(error) => {
                self.write(&Record::Error { error: error.to_string() });
                self.over = true;
            }
        }
        if !self.over && self.to.is_some_and(|to| self.next >= to) {
            self.end(self.ended);
        }
    }

    fn output(&mut self, stream: SourceStream, offset: u64, bytes: &[u8]) {
        let stream = match stream {
            SourceStream::Stdout => "stdout",
            SourceStream::Stderr => "stderr",
            SourceStream::Terminal => "terminal",
            // Kernel reports are not printed output, but they occupy offsets.
            SourceStream::Tell => "report",
        };
        if bytes.is_empty() {
            return;
        }
        let text = std::str::from_utf8(bytes).ok();
        let base64 = text.is_none().then(|| STANDARD.encode(bytes));
        self.write(&Record::Output { stream, offset, length: bytes.len(), text, base64 });
    }

    fn end(&mut self, exit: Option<Exit>) {
        let (running, exit_code) = (exit.is_none(), exit.map(exit_code));
        self.write(&Record::End { offset: self.next, running, exit_code });
        self.over = true;
    }

    fn write(&mut self, record: &Record<'_>) {
        serde_json::to_writer(&mut self.lines, record).expect("records contain only strings and numbers");
        self.lines.push(b'\n');
    }
}

/// The exit code as written in records: -1 if there was none.
fn exit_code(exit: Exit) -> i32 {
    match exit {
        Exit::Code(code) => code,
        Exit::Signal(_) | Exit::Oom | Exit::Deadline | Exit::Lost => -1,
    }
}
