//! Which skills are registered: one small file for each, in the directory in which commands start.
//!
//! They are there, and not in the memory of the server, so that they live and end with the sandbox. Code inside may change
//! them; it gains nothing, because all they lead to is read and removed as the user it runs as.

use serde::{Deserialize, Serialize};
use service::{FileAttributes, FileKind, SandboxRef};

use super::is_skill_name;
use super::skill_files::{SKILL_USER, is_missing, read_text, write_bytes};
use crate::aio::problem::AioProblem;

/// Where the files are, below the guest's default directory.
const INDEX_DIRECTORY: &str = ".aio/skills";
const INDEX_SUFFIX: &str = ".json";
const MAX_SKILLS: usize = 256;
const MAX_RECORD_BYTES: usize = 8 << 10;

/// A registered skill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegisteredSkill {
    pub(super) name: String,
    pub(super) record: SkillRecord,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SkillRecord {
    pub(super) path: String,
    /// Whether the directory was made from an archive, so that it is removed with the skill.
    pub(super) extracted: bool,
}

/// The registered skills of one sandbox.
pub(super) struct SkillIndex<'a> {
    sandbox: &'a SandboxRef,
}

impl<'a> SkillIndex<'a> {
    pub(super) fn of_sandbox(sandbox: &'a SandboxRef) -> Self {
        Self { sandbox }
    }

    /// The names of all skills, sorted.
    pub(super) async fn names(&self) -> Result<Vec<String>, AioProblem> {
        let entries = match self.sandbox.files().list_directory(&SKILL_USER, INDEX_DIRECTORY, 1).await {
            Err(error) if is_missing(&error) => return Ok(Vec::new()),
            entries => entries?,
        };
        let files = entries.iter().filter(|entry| entry.kind == FileKind::File);
        let names = files.filter_map(|entry| entry.path.rsplit('/').next()?.strip_suffix(INDEX_SUFFIX));
        let mut names: Vec<_> =
            names.filter(|name| is_skill_name(name)).map(str::to_owned).take(MAX_SKILLS).collect();
        names.sort();
        Ok(names)
    }

    /// A skill; `None` if it is not registered, or if its record is not one of ours.
    pub(super) async fn find(&self, name: &str) -> Result<Option<RegisteredSkill>, AioProblem> {
        if !is_skill_name(name) {
            return Ok(None);
        }
        let text = read_text(self.sandbox, &record_path(name), MAX_RECORD_BYTES).await?;
        let record = text.and_then(|text| serde_json::from_str::<SkillRecord>(&text).ok());
        let record = record.filter(|record| record.path.starts_with('/') && !record.path.contains('\0'));
        Ok(record.map(|record| RegisteredSkill { name: name.to_owned(), record }))
    }

    pub(super) async fn add(&self, skill: &RegisteredSkill) -> Result<(), AioProblem> {
        let names = self.names().await?;
        if names.len() >= MAX_SKILLS && !names.contains(&skill.name) {
            return Err(AioProblem::bad_request(format!("limit of skills reached ({MAX_SKILLS})")));
        }
        let attributes = FileAttributes::default();
        self.sandbox.files().make_directory(&SKILL_USER, INDEX_DIRECTORY, attributes).await?;
        let record = serde_json::to_vec(&skill.record).expect("a record is text");
        Ok(write_bytes(self.sandbox, &record_path(&skill.name), record.into(), 0o644).await?)
    }

    /// Removes records of skills that were added in vain, and nothing else.
    pub(super) async fn forget(&self, names: impl Iterator<Item = &str>) {
        for name in names {
            if let Err(error) = self.sandbox.files().remove_file(&SKILL_USER, &record_path(name), false).await
            {
                tracing::debug!(%error, "failed to remove the record of a skill; it stays in the sandbox");
            }
        }
    }

    /// Removes a skill, with its files if they came from an archive.
    pub(super) async fn remove(&self, skill: &RegisteredSkill) -> Result<(), AioProblem> {
        let files = self.sandbox.files();
        if skill.record.extracted {
            files.remove_file(&SKILL_USER, &skill.record.path, true).await?;
        }
        Ok(files.remove_file(&SKILL_USER, &record_path(&skill.name), false).await?)
    }
}

fn record_path(name: &str) -> String {
    format!("{INDEX_DIRECTORY}/{name}{INDEX_SUFFIX}")
}
