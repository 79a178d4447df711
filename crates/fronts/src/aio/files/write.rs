//! `POST /v1/file/write`: writes or appends a text, or the bytes that a text stands for.
//!
//! The body is decoded while it arrives, and its content is spooled. When the whole request is valid, the file is
//! replaced at once, or the bytes are appended while other appends wait. Otherwise nothing is changed.

use std::time::Duration;

use axum::body::BodyDataStream;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use service::{FileAttributes, ServiceError, WriteFileRequest, WriteMode};

use super::FileCall;
use super::content::{ContentDecoder, ContentEncoding, InvalidContent};
use super::failure::{FileAction, file_problem};
use super::spool::{ContentSpool, DRAFT_DIRECTORY, SpooledContent};
use crate::aio::AioState;
use crate::aio::body::parse_json;
use crate::aio::envelope::success_response;
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::body::{BodyError, drain_body};
use crate::kit::json_text_scanner::{JsonTextError, JsonTextScanner};

/// How long the client may send nothing.
const PIECE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct WriteFileBody {
    file: Option<String>,
    /// Empty instead of the content, which is spooled.
    content: Option<String>,
    encoding: Option<ContentEncoding>,
    append: Option<bool>,
    leading_newline: Option<bool>,
    trailing_newline: Option<bool>,
    sudo: Option<bool>,
}

#[derive(Serialize)]
pub(in crate::aio) struct WriteFileResult {
    file: String,
    bytes_written: u64,
}

/// The content, and which encodings it is valid in.
struct ReceivedContent {
    spooled: SpooledContent,
    is_base64: bool,
    is_raw: bool,
}

pub(super) async fn write_file(
    target: AioTarget,
    State(state): State<AioState>,
    request: Request,
) -> Result<Response, AioProblem> {
    let mut body = request.into_body().into_data_stream();
    let received = receive_body(&target, &mut body, state.settings.json_body_limit).await;
    let (kept, content) = match received {
        Ok(received) => received,
        Err(problem) => {
            drain_body(body).await;
            return Err(problem);
        }
    };
    let written = match parse_json(&kept) {
        Ok(body) => write_content(target, body, &content).await,
        Err(problem) => Err(problem),
    };
    content.spooled.discard().await;
    let result = written?;
    Ok(success_response("File written successfully", result).into_response())
}

/// Writes a text that is in memory already; the content of `body` stands for it.
pub(in crate::aio) async fn write_text(
    target: AioTarget,
    body: WriteFileBody,
    text: String,
) -> Result<WriteFileResult, AioProblem> {
    let mut intake = ContentIntake::new(&target);
    intake.add_text(text.into()).await.map_err(|error| draft_problem(&target, error))?;
    let content = intake.finish().await.map_err(|error| draft_problem(&target, error))?;
    let written = write_content(target, body, &content).await;
    content.spooled.discard().await;
    written
}

/// Receives a body, and returns what it contains beside its content.
async fn receive_body(
    target: &AioTarget,
    body: &mut BodyDataStream,
    max_kept: usize,
) -> Result<(Vec<u8>, ReceivedContent), AioProblem> {
    let mut scanner = JsonTextScanner::new("content", max_kept);
    let mut intake = ContentIntake::new(target);
    while let Some(piece) = next_piece(body).await? {
        let mut text = Vec::new();
        scanner.scan_piece(&piece, &mut text).map_err(text_problem)?;
        intake.add_text(text).await.map_err(|error| draft_problem(target, error))?;
    }
    let kept = scanner.finish().map_err(text_problem)?;
    let content = intake.finish().await.map_err(|error| draft_problem(target, error))?;
    Ok((kept, content))
}

/// Content that is being received: its spool, and the checks of its encodings.
struct ContentIntake {
    spool: ContentSpool,
    checks: [ContentCheck; 2],
}

impl ContentIntake {
    fn new(target: &AioTarget) -> Self {
        Self {
            spool: ContentSpool::new(target.sandbox.clone()),
            checks: [ContentEncoding::Base64, ContentEncoding::Raw].map(ContentCheck::new),
        }
    }

    async fn add_text(&mut self, text: Vec<u8>) -> Result<(), ServiceError> {
        for check in &mut self.checks {
            check.add_piece(&text);
        }
        self.spool.add_bytes(text.into()).await
    }

    async fn finish(self) -> Result<ReceivedContent, ServiceError> {
        let spooled = self.spool.finish().await?;
        let [is_base64, is_raw] = self.checks.map(ContentCheck::into_validity);
        Ok(ReceivedContent { spooled, is_base64, is_raw })
    }
}

async fn next_piece(body: &mut BodyDataStream) -> Result<Option<Bytes>, AioProblem> {
    match tokio::time::timeout(PIECE_TIMEOUT, body.next()).await {
        Ok(None) => Ok(None),
        Ok(Some(Ok(piece))) => Ok(Some(piece)),
        Ok(Some(Err(_))) => Err(BodyError::EndedEarly.into()),
        Err(_elapsed) => Err(BodyError::Timeout.into()),
    }
}

/// Checks the request as a whole, and writes the content.
async fn write_content(
    target: AioTarget,
    body: WriteFileBody,
    content: &ReceivedContent,
) -> Result<WriteFileResult, AioProblem> {
    let call = FileCall::new(target, FileAction::Write, "file", body.file, body.sudo)?;
    if body.content.is_none() {
        return Err(AioProblem::missing_field("content"));
    }
    let encoding = body.encoding.unwrap_or_default();
    match encoding {
        ContentEncoding::Base64 if !content.is_base64 => {
            return Err(AioProblem::bad_request("Invalid base64 content"));
        }
        ContentEncoding::Raw if !content.is_raw => {
            return Err(AioProblem::bad_request("Invalid raw content: a character is above U+00FF"));
        }
        _ => {}
    }
    let is_text = encoding == ContentEncoding::Utf8;
    let newline = |wanted: Option<bool>| if is_text && wanted == Some(true) { "\n" } else { "" };
    let mode = if body.append == Some(true) { WriteMode::Append } else { WriteMode::Replace };
    let edges = (newline(body.leading_newline), newline(body.trailing_newline));
    let bytes_written = copy_content(&call, &content.spooled, encoding, mode, edges).await?;
    Ok(WriteFileResult { file: call.path, bytes_written })
}

/// Writes the decoded content between two texts, and returns how many bytes that are.
async fn copy_content(
    call: &FileCall,
    content: &SpooledContent,
    encoding: ContentEncoding,
    mode: WriteMode,
    (before, after): (&'static str, &'static str),
) -> Result<u64, AioProblem> {
    let failed = |error| call.problem(error);
    // The draft was valid when it was received; only root inside the sandbox can have changed it.
    let invalid = |_: InvalidContent| {
        AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "the content was changed while it was written")
    };
    let mut pieces = content.read_pieces().await.map_err(failed)?;
    let attributes = FileAttributes::default();
    let request = WriteFileRequest { mode, attributes, new_file_mode: None };
    let mut writer = call.files().write_file(&call.identity, &call.path, request).await.map_err(failed)?;
    let mut decoder = ContentDecoder::new(encoding);
    let mut count = before.len() + after.len();
    if !before.is_empty() {
        writer.send_bytes(Bytes::from_static(before.as_bytes())).await.map_err(failed)?;
    }
    while let Some(piece) = pieces.next_piece().await.map_err(failed)? {
        let decoded = match encoding {
            // The piece itself is passed on.
            ContentEncoding::Utf8 => piece,
            _ => decoder.decode_piece(&piece).map_err(invalid)?.into(),
        };
        count += decoded.len();
        if !decoded.is_empty() {
            writer.send_bytes(decoded).await.map_err(failed)?;
        }
    }
    decoder.finish().map_err(invalid)?;
    if !after.is_empty() {
        writer.send_bytes(Bytes::from_static(after.as_bytes())).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)?;
    Ok(u64::try_from(count).unwrap_or(u64::MAX))
}

/// Whether a text is valid in an encoding, found out while the text passes by.
struct ContentCheck(Option<ContentDecoder>);

impl ContentCheck {
    fn new(encoding: ContentEncoding) -> Self {
        Self(Some(ContentDecoder::new(encoding)))
    }

    fn add_piece(&mut self, text: &[u8]) {
        if let Some(decoder) = &mut self.0
            && decoder.decode_piece(text).is_err()
        {
            self.0 = None;
        }
    }

    fn into_validity(self) -> bool {
        self.0.is_some_and(|decoder| decoder.finish().is_ok())
    }
}

fn draft_problem(target: &AioTarget, error: ServiceError) -> AioProblem {
    file_problem(target, FileAction::Write, DRAFT_DIRECTORY, error)
}

fn text_problem(error: JsonTextError) -> AioProblem {
    match error {
        JsonTextError::TooLong(limit) => BodyError::TooLong(limit).into(),
        _ => AioProblem::invalid(["body"], error.to_string(), "json_invalid"),
    }
}
