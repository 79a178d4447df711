//! `POST /v1/file/replace`: replaces every occurrence of a text in a file.

use axum::Json;
use axum::extract::Request;
use serde::Deserialize;
use serde_json::{Value, json};
use service::FileEdit;

use super::FileCall;
use super::failure::FileAction;
use crate::aio::body::{parse_json, require_field};
use crate::aio::envelope::{ResponseEnvelope, success_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::body::read_body;

/// The longest body with texts that are held in memory while a file is edited.
pub(super) const MAX_EDIT_BODY: usize = 8 << 20;

#[derive(Debug, Deserialize)]
pub(in crate::aio) struct ReplaceTextBody {
    file: Option<String>,
    old_str: Option<String>,
    new_str: Option<String>,
    sudo: Option<bool>,
}

pub(super) async fn replace_in_file(
    target: AioTarget,
    request: Request,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let bytes = read_body(request.into_body(), MAX_EDIT_BODY).await?;
    replace_text(target, parse_json(&bytes)?).await
}

pub(in crate::aio) async fn replace_text(
    target: AioTarget,
    body: ReplaceTextBody,
) -> Result<Json<ResponseEnvelope<Value>>, AioProblem> {
    let call = FileCall::new(target, FileAction::Replace, "file", body.file, body.sudo)?;
    let old = require_field(body.old_str, "old_str")?;
    let new = require_field(body.new_str, "new_str")?;
    if old.is_empty() {
        return Err(AioProblem::invalid_field("old_str", "the text is empty"));
    }
    let edit = FileEdit { path: call.path.clone(), old, new };
    let counts = call.files().replace_text(&call.identity, vec![edit]).await;
    let counts = counts.map_err(|error| call.problem(error))?;
    let replaced_count = counts.first().copied().unwrap_or(0);
    let message = format!("Replacement completed, replaced {replaced_count} occurrences");
    Ok(success_response(message, json!({"file": call.path, "replaced_count": replaced_count})))
}
