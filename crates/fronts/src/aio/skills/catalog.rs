//! Reads and removes registered skills.

use axum::Json;
use axum::extract::Path;
use http::{StatusCode, Uri};
use serde::Serialize;
use serde_json::{Map, Value};

use super::index::{RegisteredSkill, SkillIndex};
use super::skill_files::SkillText;
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
    uri: Uri,
) -> Result<Json<ResponseEnvelope<SkillCollection>>, AioProblem> {
    let index = SkillIndex::of_sandbox(&target.sandbox);
    let query = QueryParams::from_uri(&uri);
    let wanted: Option<Vec<&str>> =
        query.first("names").filter(|names| !names.is_empty()).map(|names| names.split(',').collect());
    let mut skills = Vec::new();
    for name in index.names().await? {
        if wanted.as_ref().is_some_and(|wanted| !wanted.iter().any(|wanted| wanted.trim() == name)) {
            continue;
        }
        let Some(skill) = index.find(&name).await? else { continue };
        if let Ok(Some(text)) = SkillText::read(&target.sandbox, &skill.record.path).await {
            skills.push(SkillMetadata::new(skill, text.metadata));
        }
    }
    Ok(data_response(SkillCollection { skills }))
}

/// `GET /v1/skills/{name}/content`
pub(super) async fn get_content(
    target: AioTarget,
    Path(name): Path<String>,
) -> Result<Json<ResponseEnvelope<SkillContent>>, AioProblem> {
    let skill = SkillIndex::of_sandbox(&target.sandbox).find(&name).await?.ok_or_else(no_skill)?;
    let text = SkillText::read(&target.sandbox, &skill.record.path).await?.ok_or_else(no_skill)?;
    Ok(data_response(SkillContent { name: skill.name, path: skill.record.path, content: text.content }))
}

/// `DELETE /v1/skills/{name}`
pub(super) async fn delete_skill(
    target: AioTarget,
    Path(name): Path<String>,
) -> Result<Json<ResponseEnvelope<SkillMetadata>>, AioProblem> {
    let index = SkillIndex::of_sandbox(&target.sandbox);
    let skill = index.find(&name).await?.ok_or_else(no_skill)?;
    // A skill must be removable whatever its file contains.
    let text = SkillText::read(&target.sandbox, &skill.record.path).await.ok().flatten();
    index.remove(&skill).await?;
    Ok(data_response(SkillMetadata::new(skill, text.map(|text| text.metadata).unwrap_or_default())))
}

/// `DELETE /v1/skills`
pub(super) async fn delete_all_skills(
    target: AioTarget,
) -> Result<Json<ResponseEnvelope<DeletedSkills>>, AioProblem> {
    let index = SkillIndex::of_sandbox(&target.sandbox);
    let mut deleted = Vec::new();
    for name in index.names().await? {
        if let Some(skill) = index.find(&name).await? {
            index.remove(&skill).await?;
            deleted.push(name);
        }
    }
    Ok(data_response(DeletedSkills { count: deleted.len(), deleted }))
}

fn no_skill() -> AioProblem {
    AioProblem::new(StatusCode::NOT_FOUND, "Skill not found")
}
