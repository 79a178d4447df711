//! Starting commands, following their output, and asking them to end.

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use coracle_client::events::{CommandEvent, EventDecoder};
use coracle_client::exec::ExecRequest;
use domain::{ProcessId, SandboxId};
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http as web;
use super::lifecycle::ServerClient;
use super::sandbox::SandboxClient;

/// A command whose events are being received.
#[derive(Debug)]
pub(crate) struct CommandExecution {
    body: Incoming,
    decoder: EventDecoder,
}

/// The output of a command, from an offset on.
#[derive(Debug)]
pub(crate) struct LogStream {
    body: Incoming,
    encoding: LogEncoding,
}

/// The format in which the server sends it.
#[derive(Debug)]
enum LogEncoding {
    /// One JSON object per line.
    Records { pending: Vec<u8>, read: usize },
    /// The bytes alone, as other implementations of the API send them; the offset of the next byte, and
    /// the offset of the end if it is known.
    Plain { next: u64, end: Option<u64> },
}

/// A piece of a command's output.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum LogRecord {
    Output {
        #[serde(default, skip_serializing_if = "String::is_empty")]
        stream: String,
        offset: u64,
        length: u64,
        /// The bytes, if they are UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// Bytes that are no longer kept.
    Gap {
        offset: u64,
        length: u64,
    },
    /// The last record: the offset at which the next call would continue.
    End {
        offset: u64,
        #[serde(default)]
        running: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        exit_code: Option<i32>,
    },
    Error {
        error: String,
    },
    #[serde(other)]
    Unknown,
}

const CURSOR_HEADER: &str = "execd-commands-tail-cursor";
const RECORDS_CONTENT_TYPE: &str = "application/x-ndjson";
/// More than a server ever puts into one record.
const MAX_RECORD_BYTES: usize = 8 << 20;

impl SandboxClient {
    pub(crate) async fn run_command(&self, request: &ExecRequest) -> Result<CommandExecution> {
        Ok(CommandExecution::new(self.api.post_for_events("/command", &request.body()).await?))
    }

    /// Starts a command in the background and returns its id.
    pub(crate) async fn start_detached(&self, request: &ExecRequest) -> Result<String> {
        let mut body = request.body();
        body["background"] = json!(true);
        let mut execution = CommandExecution::new(self.api.post_for_events("/command", &body).await?);
        while let Some(event) = execution.next_event().await? {
            match event {
                CommandEvent::Started(id) => return Ok(id),
                CommandEvent::Failed(failure) => {
                    bail!("the command could not be started: {}", failure.value)
                }
                CommandEvent::Stdout(_)
                | CommandEvent::Stderr(_)
                | CommandEvent::Gap { .. }
                | CommandEvent::Completed => {}
            }
        }
        bail!("the server did not name the process")
    }

    /// Asks the command's whole group to end.
    pub(crate) async fn interrupt_process(&self, process: &str) -> Result<()> {
        self.api.delete(&format!("/command{}", web::encode_query(&[("id", process)]))).await
    }

    pub(crate) async fn open_logs(&self, process: &ProcessId, from: u64, follow: bool) -> Result<LogStream> {
        let cursor = from.to_string();
        let mut pairs = vec![("cursor", cursor.as_str()), ("coracle.records", "true")];
        if follow {
            pairs.push(("follow", "true"));
        }
        let answer = self.api.get(&format!("/command/{process}/logs{}", web::encode_query(&pairs))).await?;
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let form = if header("content-type").is_some_and(|kind| kind.starts_with(RECORDS_CONTENT_TYPE)) {
            LogEncoding::Records { pending: Vec::new(), read: 0 }
        } else {
            LogEncoding::Plain { next: from, end: header(CURSOR_HEADER).and_then(|value| value.parse().ok()) }
        };
        Ok(LogStream { encoding: form, body: answer.into_body() })
    }
}

impl ServerClient {
    /// The output of a process in the sandbox of any owner, as the operator reads it.
    pub(crate) async fn open_logs_as_operator(
        &self,
        id: &SandboxId,
        process: &ProcessId,
        from: u64,
        follow: bool,
    ) -> Result<LogStream> {
        let path = format!("/sandboxes/{id}/processes/{process}/logs?cursor={from}&follow={follow}");
        let answer = self.operator_api().get(&path).await?;
        Ok(LogStream {
            encoding: LogEncoding::Records { pending: Vec::new(), read: 0 },
            body: answer.into_body(),
        })
    }
}

impl CommandExecution {
    fn new(answer: Response<Incoming>) -> Self {
        Self { body: answer.into_body(), decoder: EventDecoder::default() }
    }

    /// The next event; `None` when the stream has ended. Dropping the future loses nothing.
    pub(crate) async fn next_event(&mut self) -> Result<Option<CommandEvent>> {
        loop {
            if let Some(event) = self.decoder.next_event() {
                return Ok(Some(event));
            }
            match next_chunk(&mut self.body).await? {
                Some(chunk) => self.decoder.feed(&chunk)?,
                None => return Ok(self.decoder.finish()),
            }
        }
    }
}

impl LogStream {
    /// The next record; `None` after the last one.
    pub(crate) async fn next_record(&mut self) -> Result<Option<LogRecord>> {
        let Self { body, encoding: form } = self;
        match form {
            LogEncoding::Records { pending, read } => loop {
                if let Some(end) = pending[*read..].iter().position(|byte| *byte == b'\n') {
                    let record = serde_json::from_slice(&pending[*read..*read + end]);
                    *read += end + 1;
                    return record.map(Some).context("the server sent a record that is not understood");
                }
                pending.drain(..std::mem::take(read));
                if pending.len() > MAX_RECORD_BYTES {
                    bail!("the server sent a record of more than {MAX_RECORD_BYTES} bytes");
                }
                match next_chunk(body).await? {
                    Some(chunk) => pending.extend_from_slice(&chunk),
                    None => return Ok(None),
                }
            },
            LogEncoding::Plain { next, end } => {
                let Some(chunk) = next_chunk(body).await? else {
                    return Ok(end.take().map(|offset| LogRecord::End {
                        offset,
                        running: false,
                        exit_code: None,
                    }));
                };
                let (offset, length) = (*next, chunk.len() as u64);
                *next += length;
                Ok(Some(LogRecord::from_bytes(offset, length, &chunk)))
            }
        }
    }
}

impl LogRecord {
    fn from_bytes(offset: u64, length: u64, bytes: &[u8]) -> Self {
        let text = std::str::from_utf8(bytes).ok().map(str::to_owned);
        let base64 = text.is_none().then(|| STANDARD.encode(bytes));
        Self::Output { stream: String::new(), offset, length, text, base64 }
    }
}

/// The next bytes of a body; trailers are skipped.
pub(super) async fn next_chunk(body: &mut Incoming) -> Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| anyhow!(error)).context("the server ended the stream too early")?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}
