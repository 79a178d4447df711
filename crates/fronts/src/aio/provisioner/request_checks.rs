//! Checks of create requests. Everything is checked before anything is created.

use domain::volume::is_mount_target;
use domain::{MountAccess, SandboxKey};
use serde::Deserialize;
use service::Service;

use super::problem::ProvisionerProblem;
use crate::aio::body::require_field;
use crate::aio::guest::{DEFAULT_SKILLS_ROOT, SKILL_CATEGORIES, USER_DATA};
use crate::aio::notes::AioNotes;
use crate::aio::problem::AioProblem;

/// The longest id of a sandbox.
const MAX_ID_BYTES: usize = 63;
/// The longest id of a conversation.
const MAX_THREAD_BYTES: usize = 64;
/// The longest name of a user.
const MAX_USER_BYTES: usize = 128;
const MAX_PATH_BYTES: usize = 1024;
const MAX_EXTRA_MOUNTS: usize = 10;

pub(super) const ACP_WORKSPACE: &str = "/mnt/acp-workspace";
pub(super) const LARK_CLI: &str = "/mnt/integrations/lark-cli";
/// The directories of the Lark client that may be mounted.
const LARK_CLI_TARGETS: [&str; 4] = ["config", "config/locks", "data", "runtime"];

/// The body of a create request.
#[derive(Deserialize)]
pub(super) struct ProvisionBody {
    sandbox_id: Option<String>,
    thread_id: Option<String>,
    user_id: Option<String>,
    max_shell_sessions: Option<u64>,
    skills_container_path: Option<String>,
    extra_mounts: Option<Vec<ExtraMountBody>>,
    /// The projection of legacy skills shows whether a user sees them, so the mount exists either way.
    #[expect(dead_code, reason = "its type is checked")]
    include_legacy_skills: Option<bool>,
    /// Only effective where the provisioner has an image with the Lark client, which this one has not.
    #[expect(dead_code, reason = "its type is checked")]
    provision_lark_cli_runtime: Option<bool>,
    provision_lark_cli_broker: Option<bool>,
}

#[derive(Deserialize)]
struct ExtraMountBody {
    host_path: Option<String>,
    container_path: Option<String>,
    read_only: Option<bool>,
}

/// A create request that is valid.
#[derive(Debug)]
pub(super) struct ProvisionRequest {
    pub(super) id: String,
    pub(super) user: String,
    pub(super) thread: Option<String>,
    /// The number of shell sessions that the client asks for.
    pub(super) shell_sessions: Option<u32>,
    pub(super) skills_root: String,
    pub(super) extra_mounts: Vec<ExtraMount>,
}

/// A directory of the host that a client wants to have mounted. Both paths are absolute and normal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExtraMount {
    pub(super) host_path: String,
    pub(super) target: String,
    pub(super) access: MountAccess,
}

impl ProvisionBody {
    pub(super) fn check(self, max_shell_sessions: u32) -> Result<ProvisionRequest, ProvisionerProblem> {
        let id = check_sandbox_id(require_field(self.sandbox_id, "sandbox_id")?)?;
        let user = self.user_id.unwrap_or_else(|| "default".to_owned());
        let user = check_name("user_id", user, MAX_USER_BYTES)?;
        let thread =
            self.thread_id.map(|thread| check_name("thread_id", thread, MAX_THREAD_BYTES)).transpose()?;
        let check_sessions = |count| check_shell_sessions(count, max_shell_sessions);
        let shell_sessions = self.max_shell_sessions.map(check_sessions).transpose()?;
        let skills_root = match self.skills_container_path {
            Some(path) => check_skills_root(path)?,
            None => DEFAULT_SKILLS_ROOT.to_owned(),
        };
        let extra_mounts = check_extra_mounts(self.extra_mounts.unwrap_or_default(), &skills_root)?;
        if self.provision_lark_cli_broker == Some(true) {
            return Err(ProvisionerProblem::NoLarkBroker);
        }
        Ok(ProvisionRequest { id, user, thread, shell_sessions, skills_root, extra_mounts })
    }
}

impl ProvisionRequest {
    /// The directory name of the conversation.
    pub(super) fn thread_directory(&self) -> &str {
        self.thread.as_deref().unwrap_or(&self.id)
    }

    /// Refuses the request if the sandbox that exists under the id cannot fulfil it.
    pub(super) fn check_existing(
        &self,
        service: &Service,
        key: &SandboxKey,
    ) -> Result<(), ProvisionerProblem> {
        let Some(existing) = service.sandbox_of_key(key) else { return Ok(()) };
        if existing.is_being_removed() {
            return Err(ProvisionerProblem::conflict(format!("Sandbox '{}' is being removed", self.id)));
        }
        let notes = AioNotes::of_sandbox(&existing);
        if (notes.user_id.as_ref(), notes.thread_id.as_ref()) != (Some(&self.user), self.thread.as_ref()) {
            let message = format!("Sandbox '{}' belongs to another user or thread", self.id);
            return Err(ProvisionerProblem::conflict(message));
        }
        if existing.check_usable().is_err() {
            // It is replaced or resumed; a successor has what is requested.
            return Ok(());
        }
        let present = notes.max_shell_sessions;
        match self.shell_sessions {
            Some(requested) if requested > present => Err(ProvisionerProblem::conflict(format!(
                "Sandbox '{}' has {present} shell sessions, fewer than the requested {requested}",
                self.id
            ))),
            _ => Ok(()),
        }
    }
}

fn check_sandbox_id(id: String) -> Result<String, ProvisionerProblem> {
    let starts = id.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !starts || id.len() > MAX_ID_BYTES || !id.bytes().all(is_name_byte) {
        let message = "must be 1 to 63 letters, digits, `-` and `_`, and begin with a letter or digit";
        return Err(AioProblem::invalid_field("sandbox_id", message).into());
    }
    Ok(id)
}

fn check_name(field: &str, name: String, max_bytes: usize) -> Result<String, ProvisionerProblem> {
    if name.is_empty() || name.len() > max_bytes || !name.bytes().all(is_name_byte) {
        let message = format!("must be 1 to {max_bytes} letters, digits, `-` and `_`");
        return Err(AioProblem::invalid_field(field, message).into());
    }
    Ok(name)
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

fn check_shell_sessions(count: u64, most: u32) -> Result<u32, ProvisionerProblem> {
    if count == 0 {
        return Err(AioProblem::invalid_field("max_shell_sessions", "must be greater than 0").into());
    }
    match u32::try_from(count) {
        Ok(count) if count <= most => Ok(count),
        _ => Err(ProvisionerProblem::bad_request(format!(
            "max_shell_sessions is {count}, more than the maximum of {most} that this server allows"
        ))),
    }
}

/// Checks the directory below which skills are mounted.
fn check_skills_root(path: String) -> Result<String, ProvisionerProblem> {
    let refuse = |reason: &str| {
        let message = format!("skills_container_path {reason}");
        Err(ProvisionerProblem::bad_request(message))
    };
    if normalize_path(&path).as_deref() != Some(&path) || !is_mount_target(&path) {
        return refuse("must be a canonical absolute path, not `/`, and not in /proc, /sys or /dev");
    }
    for reserved in [USER_DATA, ACP_WORKSPACE, LARK_CLI] {
        if is_same_or_below(&path, reserved) || is_same_or_below(reserved, &path) {
            return refuse(&format!("overlaps with {reserved}"));
        }
    }
    Ok(path)
}

fn check_extra_mounts(
    bodies: Vec<ExtraMountBody>,
    skills_root: &str,
) -> Result<Vec<ExtraMount>, ProvisionerProblem> {
    if bodies.len() > MAX_EXTRA_MOUNTS {
        let message = format!("Too many extra mounts; max is {MAX_EXTRA_MOUNTS}");
        return Err(ProvisionerProblem::bad_request(message));
    }
    let mut mounts: Vec<ExtraMount> = Vec::new();
    for (index, body) in bodies.into_iter().enumerate() {
        let missing = |field: &str| {
            let loc = ["body", "extra_mounts", &index.to_string(), field];
            AioProblem::invalid(loc, "Field required", "missing")
        };
        let host_path = body.host_path.ok_or_else(|| missing("host_path"))?;
        let container_path = body.container_path.ok_or_else(|| missing("container_path"))?;
        let refuse = |reason: &str, path: &str| {
            let path: String = path.chars().take(MAX_PATH_BYTES).collect();
            ProvisionerProblem::bad_request(format!("{reason}: {path}"))
        };
        let normal_host = normalize_path(&host_path);
        let host_path =
            normal_host.ok_or_else(|| refuse("Extra mount host path is not valid", &host_path))?;
        let target = normalize_path(&container_path).filter(|target| is_extra_target(target, skills_root));
        let target = target.ok_or_else(|| refuse("Unsupported extra mount path", &container_path))?;
        if mounts.iter().any(|mount| mount.target == target) {
            return Err(refuse("Duplicate extra mount path", &target));
        }
        let access = match body.read_only {
            Some(true) => MountAccess::ReadOnly,
            Some(false) | None => MountAccess::ReadWrite,
        };
        mounts.push(ExtraMount { host_path, target, access });
    }
    Ok(mounts)
}

/// Whether a client may choose the directory that is mounted here.
fn is_extra_target(target: &str, skills_root: &str) -> bool {
    let below = |root: &str, names: &[&str]| {
        let name = target.strip_prefix(root).and_then(|rest| rest.strip_prefix('/'));
        name.is_some_and(|name| names.contains(&name))
    };
    target == ACP_WORKSPACE || below(LARK_CLI, &LARK_CLI_TARGETS) || below(skills_root, &SKILL_CATEGORIES)
}

/// Returns an absolute path without `.`, `..` and doubled slashes, taken literally; `None` if it is not absolute, has
/// control characters or is too long.
pub(in crate::aio) fn normalize_path(path: &str) -> Option<String> {
    if !path.starts_with('/') || path.len() > MAX_PATH_BYTES || path.contains(char::is_control) {
        return None;
    }
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    Some(format!("/{}", parts.join("/")))
}

/// Whether a normal path is `above` or lies below it.
pub(super) fn is_same_or_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use serde_json::{Value, json};

    use super::*;
    use crate::aio::body::parse_json;

    fn check(fields: Value) -> Result<ProvisionRequest, StatusCode> {
        let mut body = json!({"sandbox_id": "a1"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let parsed: Result<ProvisionBody, _> = parse_json(body.to_string().as_bytes());
        let parsed = parsed.map_err(|problem| problem.status)?;
        parsed.check(200).map_err(|problem| problem.status())
    }

    #[track_caller]
    fn expect_status(fields: Value, status: u16) {
        let found = check(fields.clone()).map(|_| ()).map_err(|status| status.as_u16());
        assert_eq!(found, if status == 200 { Ok(()) } else { Err(status) }, "{fields}");
    }

    #[test]
    fn n119_only_canonical_ids_are_accepted() {
        let long = |count: usize| "x".repeat(count);
        for good in ["a", "A1_b-2", &long(64)] {
            expect_status(json!({"thread_id": good}), 200);
        }
        for bad in ["", "thread.with.dot", "../escape", "a/b", "a\0", "ü", &long(65)] {
            expect_status(json!({"thread_id": bad}), 422);
            expect_status(json!({"sandbox_id": bad}), 422);
        }
        for bad in ["", "..", "a b", &long(129)] {
            expect_status(json!({"user_id": bad}), 422);
        }
        expect_status(json!({"sandbox_id": "-a"}), 422);
        expect_status(json!({"sandbox_id": null}), 422);
        expect_status(json!({"thread_id": null, "user_id": null}), 200);
        expect_status(json!({"include_legacy_skills": "maybe"}), 422);
    }

    #[test]
    fn shell_sessions_are_positive_and_limited() {
        expect_status(json!({"max_shell_sessions": null}), 200);
        expect_status(json!({"max_shell_sessions": 200}), 200);
        for (bad, status) in [(json!(0), 422), (json!(-1), 422), (json!("7"), 422), (json!(201), 400)] {
            expect_status(json!({"max_shell_sessions": bad}), status);
        }
        expect_status(json!({"max_shell_sessions": u64::MAX}), 400);
    }

    #[test]
    fn skills_root_is_canonical_and_overlaps_with_nothing() {
        for good in ["/mnt/skills", "/opt/skills", "/mnt/user-data-skills", "/mnt/integrations/other"] {
            expect_status(json!({"skills_container_path": good}), 200);
        }
        for bad in [
            "",
            "/",
            "//mnt/skills",
            "mnt/skills",
            "/mnt/skills/",
            "/mnt/../mnt/skills",
            "/mnt/./skills",
            "/mnt",
            "/mnt/user-data",
            "/mnt/user-data/skills",
            "/mnt/acp-workspace/x",
            "/mnt/integrations",
            "/mnt/integrations/lark-cli",
            "/mnt/integrations/lark-cli/config",
            "/proc/skills",
            "/a\nb",
        ] {
            expect_status(json!({"skills_container_path": bad}), 400);
        }
    }

    #[test]
    fn n125_extra_mounts_have_known_targets() {
        let mount = |target: &str| json!({"host_path": "/srv/x", "container_path": target});
        for good in [
            "/mnt/acp-workspace",
            "/mnt/skills/public",
            "/mnt/skills/custom",
            "/mnt/skills/legacy",
            "/mnt/skills/integrations",
            "/mnt/integrations/lark-cli/config",
            "/mnt/integrations/lark-cli/data",
            "/mnt/integrations/lark-cli/config/locks",
            "/mnt/integrations/lark-cli/runtime",
            "/mnt//skills/./custom",
        ] {
            expect_status(json!({"extra_mounts": [mount(good)]}), 200);
        }
        for bad in
            ["/mnt/skills", "/mnt/skills/other", "/mnt/user-data", "/mnt/user-data/workspace", "/etc", ""]
        {
            expect_status(json!({"extra_mounts": [mount(bad)]}), 400);
        }
        let moved = json!({"skills_container_path": "/opt/s", "extra_mounts": [mount("/opt/s/public")]});
        expect_status(moved, 200);
        let stale = json!({"skills_container_path": "/opt/s", "extra_mounts": [mount("/mnt/skills/public")]});
        expect_status(stale, 400);
    }

    #[test]
    fn n126_malformed_extra_mounts_are_refused() {
        let mount = |host: &str| json!({"host_path": host, "container_path": "/mnt/skills/custom"});
        expect_status(json!({"extra_mounts": [mount("relative")]}), 400);
        expect_status(json!({"extra_mounts": [mount("C:\\state")]}), 400);
        expect_status(json!({"extra_mounts": [mount("/a\0")]}), 400);
        expect_status(json!({"extra_mounts": [mount("/a"), mount("/b")]}), 400);
        expect_status(json!({"extra_mounts": vec![mount("/a"); 11]}), 400);
        expect_status(json!({"extra_mounts": [{"host_path": "/a"}]}), 422);
        expect_status(json!({"extra_mounts": [{"container_path": "/mnt/skills/custom"}]}), 422);
        expect_status(json!({"extra_mounts": "all"}), 422);
    }

    #[test]
    fn paths_are_normalized_literally() {
        assert_eq!(normalize_path("/a//b/./c/../d/"), Some("/a/b/d".to_owned()));
        assert_eq!(normalize_path("/../.."), Some("/".to_owned()));
        assert_eq!(normalize_path("a"), None);
        assert!(is_same_or_below("/a/b", "/a") && is_same_or_below("/a", "/a"));
        assert!(!is_same_or_below("/ab", "/a"));
    }
}
