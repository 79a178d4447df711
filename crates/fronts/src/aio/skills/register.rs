//! `POST /v1/skills/register`: skills from an archive, or from a directory that exists.

use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use bytes::Bytes;
use futures_util::Stream;
use http::{StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value};
use service::{FileAttributes, FileKind, SandboxRef};

use super::archive::{ArchiveError, MAX_ARCHIVE_BYTES, SkillArchive, parent_paths};
use super::catalog::SkillMetadata;
use super::front_matter::FrontMatterBudget;
use super::index::{RegisteredSkill, SkillIndex, SkillRecord};
use super::limits::{ArchivePermit, SkillLimits, SkillWork, finish_until, request_deadline};
use super::skill_files::{SKILL_USER, is_missing, metadata_of_text, read_metadata, write_bytes};
use super::{SKILL_FILE, is_skill_name};
use crate::aio::AioState;
use crate::aio::body::check_text;
use crate::aio::envelope::{ResponseEnvelope, success_response};
use crate::aio::files::spool::{ContentSpool, SpooledContent};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::body::drain_body;
use crate::kit::headers::header_text;
use crate::kit::multipart::{FileNameForm, MultipartReader};
use crate::server::request_log::unique_hex;

/// How long drafts are removed after a request has ended; an agent may be slow on purpose.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_FIELD_BYTES: usize = 4096;
const MAX_CHILDREN: usize = 256;
/// Where archives are extracted unless the request names another directory, below the home of the guest's user.
const DEFAULT_ROOT: &str = "skills";

#[derive(Serialize)]
pub(super) struct RegistrationResult {
    count: usize,
    registered: Vec<SkillMetadata>,
}

/// The fields of the request.
#[derive(Default)]
struct RegistrationForm {
    file: Option<SpooledContent>,
    /// The name of the archive, without its suffix.
    file_stem: String,
    path: Option<String>,
    name: Option<String>,
}

/// A skill that may be registered. Its text is not kept, since there can be many.
struct SkillCandidate {
    skill: RegisteredSkill,
    metadata: Map<String, Value>,
}

pub(super) async fn register_skills(
    target: AioTarget,
    State(state): State<AioState>,
    request: Request,
) -> Result<Json<ResponseEnvelope<RegistrationResult>>, AioProblem> {
    let kind = header_text(request.headers(), header::CONTENT_TYPE.as_str()).unwrap_or_default().to_owned();
    let mut parts = MultipartReader::new(&kind, request.into_body().into_data_stream())?;
    let form = match read_form(&target.sandbox, &mut parts).await {
        Ok(form) => form,
        Err(problem) => {
            drain_body(parts.into_body()).await;
            return Err(problem);
        }
    };
    let permit = state.skills.begin_work(target.sandbox.owner(), SkillWork::Registration)?;
    // A task of its own, so that a client that disconnects leaves no half-written directory behind. It holds the permit
    // to its end, because such a client gives back the slot of its request before.
    let sandbox = target.sandbox.clone();
    let registered = tokio::spawn(async move {
        let _permit = permit;
        register_form(&state.skills, &sandbox, form).await
    });
    let registered = registered.await;
    let registered = registered
        .unwrap_or_else(|_panic| Err(AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error")))?;
    Ok(success_response("Skills registered", RegistrationResult { count: registered.len(), registered }))
}

async fn read_form<S, E>(
    sandbox: &SandboxRef,
    parts: &mut MultipartReader<S>,
) -> Result<RegistrationForm, AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut form = RegistrationForm::default();
    while let Some(part) = parts.next_part().await? {
        match part.name.as_str() {
            "path" => form.path = read_field(parts, "path").await?,
            "name" => form.name = read_field(parts, "name").await?,
            "file" if form.file.is_some() => {
                return Err(AioProblem::invalid_field("file", "more than one file"));
            }
            "file" => {
                let name = part.file_name(FileNameForm::LastSegment).unwrap_or_default();
                form.file_stem = name.strip_suffix(".zip").unwrap_or(name).to_owned();
                form.file = Some(spool_file(sandbox, parts).await?);
            }
            _ => {}
        }
    }
    if let Some(path) = &mut form.path {
        let trimmed = path.trim_end_matches('/').to_owned();
        if !trimmed.starts_with('/') {
            return Err(AioProblem::invalid_field("path", "the path is not absolute"));
        }
        *path = trimmed;
    }
    if form.name.as_deref().is_some_and(|name| !is_skill_name(name)) {
        return Err(AioProblem::invalid_field("name", NAME_RULE));
    }
    Ok(form)
}

const NAME_RULE: &str = "a name has 1 to 64 letters, digits, `.`, `_` and `-`, and no `.` at its beginning";

async fn read_field<S, E>(parts: &mut MultipartReader<S>, field: &str) -> Result<Option<String>, AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut text = Vec::new();
    while let Some(piece) = parts.next_chunk().await? {
        if text.len() + piece.len() > MAX_FIELD_BYTES {
            return Err(AioProblem::invalid_field(field, "the text is too long"));
        }
        text.extend_from_slice(&piece);
    }
    let text = String::from_utf8(text).or(Err(AioProblem::invalid_field(field, "the text is not UTF-8")))?;
    Ok(Some(check_text(text, field)?).filter(|text| !text.is_empty()))
}

async fn spool_file<S, E>(
    sandbox: &SandboxRef,
    parts: &mut MultipartReader<S>,
) -> Result<SpooledContent, AioProblem>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let (mut spool, mut size) = (ContentSpool::new(sandbox.clone()), 0);
    while let Some(piece) = parts.next_chunk().await? {
        size += piece.len();
        if size > MAX_ARCHIVE_BYTES {
            return Err(too_large());
        }
        spool.add_bytes(piece).await?;
    }
    Ok(spool.finish().await?)
}

fn too_large() -> AioProblem {
    let message = format!("the archive exceeds {MAX_ARCHIVE_BYTES} bytes");
    AioProblem::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

async fn register_form(
    limits: &SkillLimits,
    sandbox: &SandboxRef,
    mut form: RegistrationForm,
) -> Result<Vec<SkillMetadata>, AioProblem> {
    let deadline = request_deadline();
    let Some(file) = form.file.take() else {
        return finish_until(deadline, register_directory(sandbox, form)).await;
    };
    let root = match &form.path {
        Some(path) => path.clone(),
        None => format!("{}/{DEFAULT_ROOT}", finish_until(deadline, default_directory(sandbox)).await?),
    };
    let draft = format!("{root}/.skills-{}", unique_hex());
    let extracting = async {
        let permit = limits.take_archive().await?;
        let content = read_spooled(&file).await?;
        register_archive(sandbox, &form, &root, &draft, &permit, content).await
    };
    let registered = finish_until(deadline, extracting).await;
    let removing = async {
        file.discard().await;
        if let Err(error) = sandbox.files().remove_file(&SKILL_USER, &draft, true).await {
            tracing::debug!(%error, "failed to remove the draft of a skill; it stays in the sandbox");
        }
    };
    if tokio::time::timeout(CLEANUP_TIMEOUT, removing).await.is_err() {
        tracing::debug!("the draft of a skill was not removed in time; it stays in the sandbox");
    }
    registered
}

/// The directory in which commands of the guest start, as the agent resolves it.
async fn default_directory(sandbox: &SandboxRef) -> Result<String, AioProblem> {
    let found = sandbox.files().stat_files(&SKILL_USER, &[".".to_owned()]).await?;
    let directory = found.into_iter().next().map(|directory| directory.path).unwrap_or_default();
    Ok(directory.trim_end_matches("/.").to_owned())
}

async fn read_spooled(file: &SpooledContent) -> Result<Bytes, AioProblem> {
    let (mut pieces, mut content) = (file.read_pieces().await?, Vec::new());
    while let Some(piece) = pieces.next_piece().await? {
        // The draft is inside the sandbox, so its size is checked again.
        if content.len() + piece.len() > MAX_ARCHIVE_BYTES {
            return Err(too_large());
        }
        content.extend_from_slice(&piece);
    }
    Ok(content.into())
}

/// Writes the skills of an archive to `draft`, moves them into place and registers them.
async fn register_archive(
    sandbox: &SandboxRef,
    form: &RegistrationForm,
    root: &str,
    draft: &str,
    permit: &ArchivePermit,
    content: Bytes,
) -> Result<Vec<SkillMetadata>, AioProblem> {
    let archive = permit.unpack_blocking(move || SkillArchive::open(content)).await?;
    let directories = archive.find_skills()?;
    let (mut candidates, mut budget) = (Vec::new(), FrontMatterBudget::default());
    for directory in &directories {
        let metadata = read_archive_metadata(permit, &archive, directory, &mut budget).await?;
        let own_name = if directory.is_empty() { form.file_stem.as_str() } else { directory };
        let name = choose_name(form.name.as_deref(), &metadata, own_name, directories.len())?;
        let record = SkillRecord { path: format!("{root}/{name}"), extracted: true };
        candidates.push(SkillCandidate { skill: RegisteredSkill { name, record }, metadata });
    }
    check_candidates(sandbox, &candidates).await?;
    for (directory, candidate) in directories.iter().zip(&candidates) {
        let place = format!("{draft}/{}", candidate.skill.name);
        write_skill(sandbox, permit, &archive, directory, &place).await?;
    }
    let (files, mut placed) = (sandbox.files(), Vec::new());
    for candidate in &candidates {
        let (from, to) = (format!("{draft}/{}", candidate.skill.name), &candidate.skill.record.path);
        if let Err(error) = files.move_file(&SKILL_USER, &from, to, false).await {
            remove_placed(sandbox, &placed).await;
            return Err(error.into());
        }
        placed.push(to.as_str());
    }
    let paths: Vec<String> = placed.into_iter().map(str::to_owned).collect();
    let registered = add_candidates(sandbox, candidates).await;
    if registered.is_err() {
        remove_placed(sandbox, &paths.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
    registered
}

/// Removes directories that were moved into place, after a later step has failed.
async fn remove_placed(sandbox: &SandboxRef, paths: &[&str]) {
    for path in paths {
        if let Err(error) = sandbox.files().remove_file(&SKILL_USER, path, true).await {
            tracing::debug!(%error, "failed to remove a skill that was not registered; it stays in the sandbox");
        }
    }
}

async fn write_skill(
    sandbox: &SandboxRef,
    permit: &ArchivePermit,
    archive: &SkillArchive,
    directory: &str,
    place: &str,
) -> Result<(), AioProblem> {
    let make = |path: String| async move {
        sandbox.files().make_directory(&SKILL_USER, &path, FileAttributes::default()).await
    };
    make(place.to_owned()).await?;
    for (path, file) in archive.files_of_skill(directory) {
        if let Some(parent) = parent_paths(path).last() {
            make(format!("{place}/{parent}")).await?;
        }
        let (archive, file) = (archive.clone(), file.clone());
        let mode = if file.is_executable { 0o755 } else { 0o644 };
        let content = permit.unpack_blocking(move || archive.read_file(&file)).await?;
        write_bytes(sandbox, &format!("{place}/{path}"), content, mode).await?;
    }
    Ok(())
}

async fn read_archive_metadata(
    permit: &ArchivePermit,
    archive: &SkillArchive,
    directory: &str,
    budget: &mut FrontMatterBudget,
) -> Result<Map<String, Value>, AioProblem> {
    let found = archive.files_of_skill(directory).find(|(path, _)| *path == SKILL_FILE);
    let file = found.map(|(_, file)| file.clone()).ok_or(ArchiveError::NoSkill)?;
    let archive = archive.clone();
    let content = permit.unpack_blocking(move || archive.read_file(&file)).await?;
    let text = std::str::from_utf8(&content);
    let text = text.or(Err(AioProblem::bad_request("SKILL.md of the archive is not UTF-8")))?;
    Ok(metadata_of_text(text, budget)?)
}

/// Registers a directory of the sandbox, or the directories in it.
async fn register_directory(
    sandbox: &SandboxRef,
    form: RegistrationForm,
) -> Result<Vec<SkillMetadata>, AioProblem> {
    let RegistrationForm { path, name, .. } = form;
    let path = path.ok_or_else(|| AioProblem::invalid_field("file", "neither a file nor a path is given"))?;
    let (mut found, mut budget) = (Vec::new(), FrontMatterBudget::default());
    if let Some(metadata) = read_metadata(sandbox, &path, &mut budget).await? {
        found.push((path.clone(), metadata));
    } else {
        let entries = match sandbox.files().list_directory(&SKILL_USER, &path, 1).await {
            Err(error) if is_missing(&error) => Vec::new(),
            entries => entries?,
        };
        let directories = entries.into_iter().filter(|entry| entry.kind == FileKind::Directory);
        for entry in directories.take(MAX_CHILDREN) {
            if let Some(metadata) = read_metadata(sandbox, &entry.path, &mut budget).await? {
                found.push((entry.path, metadata));
            }
        }
    }
    if found.is_empty() {
        let message = format!("no {SKILL_FILE} in `{path}` or a directory in it");
        return Err(AioProblem::new(StatusCode::NOT_FOUND, message));
    }
    let (count, mut candidates) = (found.len(), Vec::new());
    for (path, metadata) in found {
        let own_name = path.rsplit('/').next().unwrap_or_default();
        let name = choose_name(name.as_deref(), &metadata, own_name, count)?;
        let skill = RegisteredSkill { name, record: SkillRecord { path, extracted: false } };
        candidates.push(SkillCandidate { skill, metadata });
    }
    check_candidates(sandbox, &candidates).await?;
    add_candidates(sandbox, candidates).await
}

/// The name of a skill: that of the request, else that of its front matter, else that of its directory or archive.
fn choose_name(
    requested: Option<&str>,
    metadata: &Map<String, Value>,
    own_name: &str,
    count: usize,
) -> Result<String, AioProblem> {
    if requested.is_some() && count > 1 {
        return Err(AioProblem::invalid_field(
            "name",
            "there are several skills, which cannot have one name",
        ));
    }
    let written = metadata.get("name").and_then(|name| name.as_str());
    let name = requested.or(written).unwrap_or(own_name);
    if !is_skill_name(name) {
        return Err(AioProblem::invalid_field("name", format!("the skill has no usable name; {NAME_RULE}")));
    }
    Ok(name.to_owned())
}

/// Refuses names that belong to another skill, of this request or registered before.
async fn check_candidates(sandbox: &SandboxRef, candidates: &[SkillCandidate]) -> Result<(), AioProblem> {
    let index = SkillIndex::of_sandbox(sandbox);
    for (number, SkillCandidate { skill, .. }) in candidates.iter().enumerate() {
        let name = &skill.name;
        let is_twice = candidates[..number].iter().any(|other| other.skill.name == *name);
        let other = index.find(name).await?.filter(|other| other.record.path != skill.record.path);
        if is_twice || other.is_some() {
            let message = format!("another skill is called `{name}`");
            return Err(AioProblem::new(StatusCode::CONFLICT, message));
        }
        let path = [skill.record.path.clone()];
        if skill.record.extracted && sandbox.files().stat_files(&SKILL_USER, &path).await.is_ok() {
            let message = format!("`{}` already exists", skill.record.path);
            return Err(AioProblem::new(StatusCode::CONFLICT, message));
        }
    }
    Ok(())
}

async fn add_candidates(
    sandbox: &SandboxRef,
    candidates: Vec<SkillCandidate>,
) -> Result<Vec<SkillMetadata>, AioProblem> {
    let (index, mut registered) = (SkillIndex::of_sandbox(sandbox), Vec::new());
    for SkillCandidate { skill, metadata } in candidates {
        if let Err(problem) = index.add(&skill).await {
            index.forget(registered.iter().map(|skill: &SkillMetadata| skill.name.as_str())).await;
            return Err(problem);
        }
        registered.push(SkillMetadata::new(skill, metadata));
    }
    Ok(registered)
}

impl From<ArchiveError> for AioProblem {
    fn from(error: ArchiveError) -> Self {
        Self::bad_request(error.to_string())
    }
}
