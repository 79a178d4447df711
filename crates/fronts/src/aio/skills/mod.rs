//! `/v1/skills`: directories with a `SKILL.md`, registered under a name.
//!
//! ```text
//! register a zip        spooled in the sandbox ─► archive.rs checks all of it ─► written as the guest's user ─► index.rs
//! register a directory                                                                                      ─► index.rs
//! metadatas, content    index.rs ─► SKILL.md ─► front_matter.rs
//! ```
//! Archives are hostile. They are parsed here, in safe code that runs without privileges and within fixed bounds, and not
//! by a program inside: that would have to exist in every image, and its answers could not be trusted. What is written
//! goes through the file API as the guest's user, so an archive reaches nothing that a command could not. Dependencies of
//! a skill are never installed, so `dependency_commands` is always empty.
//! What works with many skills takes a permit of limits.rs and ends at its deadline.

mod archive;
mod catalog;
mod front_matter;
mod index;
mod limits;
mod register;
mod skill_files;

use axum::routing::{delete, get, post};

pub(super) use self::limits::SkillLimits;
use super::routes::AioRoute;

/// The file that makes a directory a skill.
const SKILL_FILE: &str = "SKILL.md";
const MAX_NAME_BYTES: usize = 64;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/skills", delete(catalog::delete_all_skills)),
        ("/v1/skills/register", post(register::register_skills)),
        ("/v1/skills/metadatas", get(catalog::list_metadatas)),
        ("/v1/skills/{name}", delete(catalog::delete_skill)),
        ("/v1/skills/{name}/content", get(catalog::get_content)),
    ]
}

/// Whether a text can name a skill, and a directory and a file after it.
fn is_skill_name(name: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_name_byte)
}
