//! Files of skills, read and written as the guest's user.

use domain::UserIdentity;
use http::StatusCode;
use serde_json::{Map, Value};
use service::{FileAttributes, FileError, FileFault, SandboxRef, ServiceError, WriteFileRequest, WriteMode};

use super::SKILL_FILE;
use super::front_matter::{parse_metadata, split_text};
use crate::aio::problem::AioProblem;

/// The longest `SKILL.md` that is read.
const MAX_SKILL_FILE_BYTES: usize = 1 << 20;

/// Everything is done as the user of the guest.
pub(super) const SKILL_USER: UserIdentity = UserIdentity::Default;

/// The content of a `SKILL.md`.
pub(super) struct SkillText {
    pub(super) metadata: Map<String, Value>,
    /// Without the front matter.
    pub(super) content: String,
}

impl SkillText {
    pub(super) fn parse(text: &str) -> Result<Self, AioProblem> {
        let (front_matter, content) = split_text(text);
        let metadata = front_matter.map(parse_metadata).transpose();
        let metadata = metadata.map_err(|error| AioProblem::bad_request(error.to_string()))?;
        Ok(Self { metadata: metadata.unwrap_or_default(), content: content.to_owned() })
    }

    /// The skill in a directory; `None` if there is none.
    pub(super) async fn read(sandbox: &SandboxRef, directory: &str) -> Result<Option<Self>, AioProblem> {
        let path = format!("{directory}/{SKILL_FILE}");
        match read_text(sandbox, &path, MAX_SKILL_FILE_BYTES).await? {
            Some(text) => Self::parse(&text).map(Some),
            None => Ok(None),
        }
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
