//! Files of skills, read and written as the guest's user.

use domain::UserIdentity;
use http::StatusCode;
use serde_json::{Map, Value};
use service::{FileAttributes, FileError, FileFault, SandboxRef, ServiceError, WriteFileRequest, WriteMode};

use super::SKILL_FILE;
use super::front_matter::{FrontMatterBudget, FrontMatterError, parse_metadata, split_text};
use crate::aio::problem::AioProblem;

/// The longest `SKILL.md` that is read.
const MAX_SKILL_FILE_BYTES: usize = 1 << 20;

/// Everything is done as the user of the guest.
pub(super) const SKILL_USER: UserIdentity = UserIdentity::Default;

/// The front matter of a `SKILL.md`, which is empty if there is none.
pub(super) fn metadata_of_text(
    text: &str,
    budget: &mut FrontMatterBudget,
) -> Result<Map<String, Value>, FrontMatterError> {
    match split_text(text) {
        (Some(front_matter), _) => parse_metadata(front_matter, budget),
        (None, _) => Ok(Map::new()),
    }
}

/// The front matter of the skill in a directory; `None` if there is no skill.
pub(super) async fn read_metadata(
    sandbox: &SandboxRef,
    directory: &str,
    budget: &mut FrontMatterBudget,
) -> Result<Option<Map<String, Value>>, AioProblem> {
    let text = read_text(sandbox, &format!("{directory}/{SKILL_FILE}"), MAX_SKILL_FILE_BYTES).await?;
    Ok(text.map(|text| metadata_of_text(&text, budget)).transpose()?)
}

/// The text of the skill in a directory, without its front matter; `None` if there is no skill.
pub(super) async fn read_content(
    sandbox: &SandboxRef,
    directory: &str,
) -> Result<Option<String>, AioProblem> {
    let text = read_text(sandbox, &format!("{directory}/{SKILL_FILE}"), MAX_SKILL_FILE_BYTES).await?;
    let Some(text) = text else { return Ok(None) };
    metadata_of_text(&text, &mut FrontMatterBudget::default())?;
    Ok(Some(split_text(&text).1.to_owned()))
}

impl From<FrontMatterError> for AioProblem {
    fn from(error: FrontMatterError) -> Self {
        let status = match error {
            FrontMatterError::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}

/// Reads a text file; `None` if it does not exist.
pub(super) async fn read_text(
    sandbox: &SandboxRef,
    path: &str,
    limit: usize,
) -> Result<Option<String>, AioProblem> {
    let mut reader = match sandbox.files().read_file(&SKILL_USER, path, 0, None).await {
        Err(error) if is_missing(&error) => return Ok(None),
        opened => opened?,
    };
    let mut content = Vec::new();
    while let Some(piece) = reader.next().await? {
        if content.len() + piece.len() > limit {
            let message = format!("`{path}` exceeds {limit} bytes");
            return Err(AioProblem::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        content.extend_from_slice(&piece);
    }
    let text = String::from_utf8(content);
    text.map(Some).map_err(|_not_utf8| AioProblem::bad_request(format!("`{path}` is not UTF-8")))
}

pub(super) async fn write_bytes(
    sandbox: &SandboxRef,
    path: &str,
    content: bytes::Bytes,
    mode: u32,
) -> Result<(), ServiceError> {
    let attributes = FileAttributes { mode: Some(mode), ..FileAttributes::default() };
    let request = WriteFileRequest { mode: WriteMode::Replace, attributes, new_file_mode: None };
    let mut writer = sandbox.files().write_file(&SKILL_USER, path, request).await?;
    writer.send_bytes(content).await?;
    writer.finish().await
}

pub(super) fn is_missing(error: &ServiceError) -> bool {
    let fault = match error {
        ServiceError::File(FileError { fault, .. }) => fault,
        _ => return false,
    };
    matches!(fault, FileFault::NotFound | FileFault::NotADirectory)
}
