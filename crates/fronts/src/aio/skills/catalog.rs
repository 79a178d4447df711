//! Reads and removes registered skills.

use axum::Json;
use axum::extract::{Path, State};
use http::{StatusCode, Uri};
use serde::Serialize;
use serde_json::{Map, Value};
use service::SandboxRef;

use super::front_matter::FrontMatterBudget;
use super::index::{RegisteredSkill, SkillIndex};
use super::limits::{SkillWork, finish_until, request_deadline};
use super::skill_files::{read_content, read_metadata};
use crate::aio::AioState;
use crate::aio::envelope::{ResponseEnvelope, data_response};
use crate::aio::problem::AioProblem;
use crate::aio::target::AioTarget;
use crate::kit::query::QueryParams;

#[derive(Clone, Debug, Serialize)]
pub(super) struct SkillMetadata {
    pub(super) name: String,
    pub(super) path: String,
    /// The front matter of its `SKILL.md`.
    pub(super) metadata: Map<String, Value>,
    /// Always empty: nothing is installed for a skill.
    pub(super) dependency_commands: [(); 0],
}

#[derive(Serialize)]
pub(super) struct SkillCollection {
    skills: Vec<SkillMetadata>,
}

#[derive(Serialize)]
pub(super) struct SkillContent {
    name: String,
    path: String,
    content: String,
}

#[derive(Serialize)]
pub(super) struct DeletedSkills {
    count: usize,
    deleted: Vec<String>,
}

impl SkillMetadata {
    pub(super) fn new(skill: RegisteredSkill, metadata: Map<String, Value>) -> Self {
        Self { name: skill.name, path: skill.record.path, metadata, dependency_commands: [] }
    }
}

/// `GET /v1/skills/metadatas?names=a,b`: skills whose `SKILL.md` is gone or cannot be read are left out.
pub(super) async fn list_metadatas(
    target: AioTarget,
    State(state): State<AioState>,
    uri: Uri,
) -> Result<Json<ResponseEnvelope<SkillCollection>>, AioProblem> {
    let _permit = state.skills.begin_work(target.sandbox.owner(), SkillWork::Scan)?;
    let skills = finish_until(request_deadline(), read_metadatas(&target.sandbox, &uri)).await?;
    Ok(data_response(SkillCollection { skills }))
}

async fn read_metadatas(sandbox: &SandboxRef, uri: &Uri) -> Result<Vec<SkillMetadata>, AioProblem> {
    let index = SkillIndex::of_sandbox(sandbox);
    let query = QueryParams::from_uri(uri);
    let wanted: Option<Vec<&str>> =
        query.first("names").filter(|names| !names.is_empty()).map(|names| names.split(',').collect());
    let (mut skills, mut budget) = (Vec::new(), FrontMatterBudget::default());
    for name in index.names().await? {
        if wanted.as_ref().is_some_and(|wanted| !wanted.iter().any(|wanted| wanted.trim() == name)) {
            continue;
        }
        let Some(skill) = index.find(&name).await? else { continue };
        match read_metadata(sandbox, &skill.record.path, &mut budget).await {
            Ok(Some(metadata)) => skills.push(SkillMetadata::new(skill, metadata)),
            Ok(None) => {}
            // The limit of the request is no fault of this skill.
            Err(_unreadable) => budget.check()?,
        }
    }
    Ok(skills)
}

/// `GET /v1/skills/{name}/content`
pub(super) async fn get_content(
    target: AioTarget,
    Path(name): Path<String>,
) -> Result<Json<ResponseEnvelope<SkillContent>>, AioProblem> {
    let skill = SkillIndex::of_sandbox(&target.sandbox).find(&name).await?.ok_or_else(no_skill)?;
    let content = read_content(&target.sandbox, &skill.record.path).await?.ok_or_else(no_skill)?;
    Ok(data_response(SkillContent { name: skill.name, path: skill.record.path, content }))
}

/// `DELETE /v1/skills/{name}`
pub(super) async fn delete_skill(
    target: AioTarget,
    Path(name): Path<String>,
) -> Result<Json<ResponseEnvelope<SkillMetadata>>, AioProblem> {
    let index = SkillIndex::of_sandbox(&target.sandbox);
    let skill = index.find(&name).await?.ok_or_else(no_skill)?;
    // A skill must be removable whatever its file contains.
    let mut budget = FrontMatterBudget::default();
    let metadata = read_metadata(&target.sandbox, &skill.record.path, &mut budget).await.ok().flatten();
    index.remove(&skill).await?;
    Ok(data_response(SkillMetadata::new(skill, metadata.unwrap_or_default())))
}

/// `DELETE /v1/skills`
pub(super) async fn delete_all_skills(
    target: AioTarget,
    State(state): State<AioState>,
) -> Result<Json<ResponseEnvelope<DeletedSkills>>, AioProblem> {
    let _permit = state.skills.begin_work(target.sandbox.owner(), SkillWork::Scan)?;
    let deleted = finish_until(request_deadline(), remove_all(&target.sandbox)).await?;
    Ok(data_response(DeletedSkills { count: deleted.len(), deleted }))
}

/// Removes all skills, and returns their names.
async fn remove_all(sandbox: &SandboxRef) -> Result<Vec<String>, AioProblem> {
    let index = SkillIndex::of_sandbox(sandbox);
    let mut deleted = Vec::new();
    for name in index.names().await? {
        if let Some(skill) = index.find(&name).await? {
            index.remove(&skill).await?;
            deleted.push(name);
        }
    }
    Ok(deleted)
}

fn no_skill() -> AioProblem {
    AioProblem::new(StatusCode::NOT_FOUND, "Skill not found")
}
