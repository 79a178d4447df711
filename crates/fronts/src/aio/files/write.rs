//! `POST /v1/file/write`: writes or appends a text, or the bytes that a text stands for.
//!
//! The body is decoded while it arrives, and its content is spooled: as bytes if `encoding` stands before it, else as
//! text. When the whole request is valid, the file is replaced at once, or the bytes are appended while other appends
//! wait. Otherwise nothing is changed.

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

/// The fields that decide how a content is received, as far as they stand before it.
#[derive(Deserialize)]
struct LeadingFields {
    encoding: Option<ContentEncoding>,
}

/// A content that was received completely.
struct ReceivedContent {
    spooled: SpooledContent,
    form: SpooledForm,
}

/// What a spool contains.
enum SpooledForm {
    /// The bytes that a text in this encoding stands for.
    Bytes { encoding: ContentEncoding, is_valid: bool },
    /// The text, and which encodings it is valid in.
    Text { is_base64: bool, is_raw: bool },
}

impl SpooledForm {
    fn is_valid_in(&self, wanted: ContentEncoding) -> bool {
        match (self, wanted) {
            (Self::Bytes { encoding, is_valid }, _) => *is_valid && *encoding == wanted,
            (Self::Text { .. }, ContentEncoding::Utf8) => true,
            (Self::Text { is_base64, .. }, ContentEncoding::Base64) => *is_base64,
            (Self::Text { is_raw, .. }, ContentEncoding::Raw) => *is_raw,
        }
    }
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
    let mut intake = ContentIntake::new(&target, Some(body.encoding.unwrap_or_default()));
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
    let mut intake = None;
    while let Some(piece) = next_piece(body).await? {
        let mut text = Vec::new();
        scanner.scan_piece(&piece, &mut text).map_err(text_problem)?;
        if text.is_empty() {
            continue;
        }
        let intake = intake.get_or_insert_with(|| ContentIntake::new(target, leading_encoding(&scanner)));
        intake.add_text(text).await.map_err(|error| draft_problem(target, error))?;
    }
    let kept = scanner.finish().map_err(text_problem)?;
    let intake = intake.unwrap_or_else(|| ContentIntake::new(target, None));
    let content = intake.finish().await.map_err(|error| draft_problem(target, error))?;
    Ok((kept, content))
}

/// The encoding, if it stands before the content. A field that is named again, or is invalid, is refused later.
fn leading_encoding(scanner: &JsonTextScanner) -> Option<ContentEncoding> {
    serde_json::from_slice::<LeadingFields>(&scanner.fields_before_text()?).ok()?.encoding
}

/// Content that is being received.
struct ContentIntake {
    spool: ContentSpool,
    form: IntakeForm,
}

enum IntakeForm {
    /// The text is decoded while it arrives.
    Bytes { encoding: ContentEncoding, check: ValidatingDecoder },
    /// The encoding is not known, so the text is spooled and checked for each of them.
    Text { base64: ValidatingDecoder, raw: ValidatingDecoder },
}

impl ContentIntake {
    fn new(target: &AioTarget, encoding: Option<ContentEncoding>) -> Self {
        let form = match encoding {
            Some(encoding) => IntakeForm::Bytes { encoding, check: ValidatingDecoder::new(encoding) },
            None => IntakeForm::Text {
                base64: ValidatingDecoder::new(ContentEncoding::Base64),
                raw: ValidatingDecoder::new(ContentEncoding::Raw),
            },
        };
        Self { spool: ContentSpool::new(target.sandbox.clone()), form }
    }

    async fn add_text(&mut self, text: Vec<u8>) -> Result<(), ServiceError> {
        let bytes = match &mut self.form {
            IntakeForm::Bytes { encoding: ContentEncoding::Utf8, .. } => text,
            IntakeForm::Bytes { check, .. } => check.decode_piece(&text).unwrap_or_default(),
            IntakeForm::Text { base64, raw } => {
                base64.decode_piece(&text);
                raw.decode_piece(&text);
                text
            }
        };
        self.spool.add_bytes(bytes.into()).await
    }

    async fn finish(self) -> Result<ReceivedContent, ServiceError> {
        let spooled = self.spool.finish().await?;
        let form = match self.form {
            IntakeForm::Bytes { encoding, check } => {
                SpooledForm::Bytes { encoding, is_valid: check.into_validity() }
            }
            IntakeForm::Text { base64, raw } => {
                SpooledForm::Text { is_base64: base64.into_validity(), is_raw: raw.into_validity() }
            }
        };
        Ok(ReceivedContent { spooled, form })
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
    if !content.form.is_valid_in(encoding) {
        return Err(AioProblem::bad_request(match encoding {
            ContentEncoding::Base64 => "Invalid base64 content",
            ContentEncoding::Raw => "Invalid raw content: a character is above U+00FF",
            ContentEncoding::Utf8 => "Invalid content",
        }));
    }
    let is_text = encoding == ContentEncoding::Utf8;
    let newline = |wanted: Option<bool>| if is_text && wanted == Some(true) { "\n" } else { "" };
    let mode = if body.append == Some(true) { WriteMode::Append } else { WriteMode::Replace };
    let edges = (newline(body.leading_newline), newline(body.trailing_newline));
    let spooled_encoding = match content.form {
        SpooledForm::Text { .. } if !is_text => Some(encoding),
        SpooledForm::Text { .. } | SpooledForm::Bytes { .. } => None,
    };
    let bytes_written = copy_content(&call, &content.spooled, spooled_encoding, mode, edges).await?;
    Ok(WriteFileResult { file: call.path, bytes_written })
}

/// Writes the content between two texts, and returns how many bytes that are. A text is decoded first.
async fn copy_content(
    call: &FileCall,
    content: &SpooledContent,
    text_encoding: Option<ContentEncoding>,
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
    let mut decoder = text_encoding.map(ContentDecoder::new);
    let mut count = before.len() + after.len();
    if !before.is_empty() {
        writer.send_bytes(Bytes::from_static(before.as_bytes())).await.map_err(failed)?;
    }
    while let Some(piece) = pieces.next_piece().await.map_err(failed)? {
        let decoded = match &mut decoder {
            None => piece,
            Some(decoder) => decoder.decode_piece(&piece).map_err(invalid)?.into(),
        };
        count += decoded.len();
        if !decoded.is_empty() {
            writer.send_bytes(decoded).await.map_err(failed)?;
        }
    }
    decoder.map_or(Ok(()), ContentDecoder::finish).map_err(invalid)?;
    if !after.is_empty() {
        writer.send_bytes(Bytes::from_static(after.as_bytes())).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)?;
    Ok(u64::try_from(count).unwrap_or(u64::MAX))
}

/// Decodes a text piece by piece, and remembers whether it was valid.
struct ValidatingDecoder(Option<ContentDecoder>);

impl ValidatingDecoder {
    fn new(encoding: ContentEncoding) -> Self {
        Self(Some(ContentDecoder::new(encoding)))
    }

    /// Decodes the next piece; `None` once the text is not valid.
    fn decode_piece(&mut self, text: &[u8]) -> Option<Vec<u8>> {
        let decoded = self.0.as_mut()?.decode_piece(text).ok();
        if decoded.is_none() {
            self.0 = None;
        }
        decoded
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
