//! The mounts of a sandbox: the files of its conversation, skills, and what the client asks for besides.
//!
//! ```text
//! deerflow.state_root, on the host                     in the sandbox
//!   users/USER/threads/THREAD/user-data/workspace …    /mnt/user-data/workspace …   read-write
//!   users/USER/threads/THREAD/acp-workspace            /mnt/acp-workspace           read-only
//!   skills_view/public                                 SKILLS/public                read-only
//!   users/USER/skills_view/custom …                    SKILLS/custom …              read-only
//! ```
//! Directories of the host are for one owner, since clients choose what is mounted. Other owners have volumes.

use std::path::PathBuf;

use domain::volume::{MissingVolume, VolumeClaim, VolumeLifetime};
use domain::{MountAccess, MountSource, MountSpec, Owner, VolumeName};

use super::PROVISIONER_SECTION;
use super::problem::ProvisionerProblem;
use super::request_checks::{ACP_WORKSPACE, ExtraMount, ProvisionRequest, is_same_or_below};
use super::settings::{ProvisionerSettings, UserDataMode};
use crate::aio::guest::{SKILL_CATEGORIES, USER_DATA, USER_DATA_DIRECTORIES};

/// Separates the digests in names of volumes from all others.
const VOLUME_CONTEXT: &str = "coracle 2026 volume of a DeerFlow conversation";

/// The mounts of a new sandbox.
pub(super) fn choose_mounts(
    settings: &ProvisionerSettings,
    owner: &Owner,
    request: &ProvisionRequest,
) -> Result<Vec<MountSpec>, ProvisionerProblem> {
    let state_root = settings.state_root.as_deref().filter(|_| *owner == settings.owner);
    let mut mounts = match (settings.user_data, state_root) {
        (UserDataMode::None, _) => Vec::new(),
        (UserDataMode::Host, Some(root)) => host_mounts(root, request),
        // The directories of the host belong to another owner.
        (UserDataMode::Host, None) | (UserDataMode::Volume, _) => vec![volume_mount(settings, request)],
    };
    // Without a state root there is nothing to mount. DeerFlow always sends extra mounts, and works without them.
    let Some(root) = state_root else { return Ok(mounts) };
    for extra in &request.extra_mounts {
        let path = extra_mount_path(root, request, extra)?;
        mounts.retain(|mount| mount.target != extra.target);
        mounts.push(reserved_mount(root, path, &extra.target, granted_access(request, extra, path)));
    }
    Ok(mounts)
}

fn host_mounts(root: &str, request: &ProvisionRequest) -> Vec<MountSpec> {
    let user = format!("users/{}", request.user);
    let thread = format!("{user}/threads/{}", request.thread_directory());
    let mut mounts: Vec<MountSpec> = USER_DATA_DIRECTORIES
        .into_iter()
        .map(|name| {
            let path = format!("{thread}/user-data/{name}");
            reserved_mount(root, &path, &format!("{USER_DATA}/{name}"), MountAccess::ReadWrite)
        })
        .collect();
    let read_only = |path: &str, target: &str| reserved_mount(root, path, target, MountAccess::ReadOnly);
    mounts.push(read_only(&format!("{thread}/acp-workspace"), ACP_WORKSPACE));
    mounts.extend(SKILL_CATEGORIES.into_iter().map(|category| {
        // Public skills are the same for all users.
        let path = match category {
            "public" => "skills_view/public".to_owned(),
            category => format!("{user}/skills_view/{category}"),
        };
        read_only(&path, &format!("{}/{category}", request.skills_root))
    }));
    mounts
}

/// Only the user's own files can be written: others are shared by all users, and skills are read by the gateway.
fn granted_access(request: &ProvisionRequest, extra: &ExtraMount, path: &str) -> MountAccess {
    let is_own = is_same_or_below(path, &format!("users/{}", request.user));
    let is_skill = is_same_or_below(&extra.target, &request.skills_root);
    if is_own && !is_skill { extra.access } else { MountAccess::ReadOnly }
}

/// Returns the path below the state root that a client wants to have mounted.
fn extra_mount_path<'a>(
    root: &str,
    request: &ProvisionRequest,
    extra: &'a ExtraMount,
) -> Result<&'a str, ProvisionerProblem> {
    let refuse = |reason: &str| ProvisionerProblem::bad_request(format!("{reason}: {}", extra.host_path));
    let below = extra.host_path.strip_prefix(root).and_then(|rest| rest.strip_prefix('/'));
    let path = below.ok_or_else(|| refuse("Extra mount host path is outside DeerFlow state"))?;
    let own = format!("users/{}", request.user);
    if is_same_or_below(path, "users") && !is_same_or_below(path, &own) {
        return Err(refuse("Extra mount host path belongs to another user"));
    }
    Ok(path)
}

fn reserved_mount(root: &str, path: &str, target: &str, access: MountAccess) -> MountSpec {
    let path = PathBuf::from(format!("{root}/{path}"));
    let source = MountSource::Reserved { purpose: PROVISIONER_SECTION.to_owned(), path };
    MountSpec { source, target: target.to_owned(), access, sub_path: None }
}

fn volume_mount(settings: &ProvisionerSettings, request: &ProvisionRequest) -> MountSpec {
    let lifetime = settings.keep_user_data.map_or(VolumeLifetime::Kept, VolumeLifetime::AfterUse);
    let absent = MissingVolume::Make { size: None, lifetime };
    let claim = VolumeClaim { name: volume_name(&request.user, request.thread_directory()), absent };
    MountSpec {
        source: MountSource::Claim(claim),
        target: USER_DATA.to_owned(),
        access: MountAccess::ReadWrite,
        sub_path: None,
    }
}

/// The volume of one user's conversation. Names of volumes have fewer letters than those of users, so a digest stands
/// for both names.
fn volume_name(user: &str, thread: &str) -> VolumeName {
    let mut hasher = blake3::Hasher::new_derive_key(VOLUME_CONTEXT);
    // Neither name contains a slash.
    hasher.update(user.as_bytes()).update(b"/").update(thread.as_bytes());
    let name = format!("deerflow-{}", hasher.finalize().to_hex());
    VolumeName::parse(&name).expect("letters, digits and one hyphen between them")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ROOT: &str = "/srv/deerflow";

    fn settings(user_data: UserDataMode) -> ProvisionerSettings {
        let state_root = Some(ROOT.to_owned());
        ProvisionerSettings { user_data, state_root, ..ProvisionerSettings::default() }
    }

    fn request(extra: &[(&str, &str)]) -> ProvisionRequest {
        let mount = |(host_path, target): &(&str, &str)| ExtraMount {
            host_path: (*host_path).to_owned(),
            target: (*target).to_owned(),
            access: MountAccess::ReadOnly,
        };
        ProvisionRequest {
            id: "a1".to_owned(),
            user: "ann".to_owned(),
            thread: None,
            shell_sessions: None,
            skills_root: "/mnt/skills".to_owned(),
            extra_mounts: extra.iter().map(mount).collect(),
        }
    }

    fn shown(mounts: &[MountSpec]) -> Vec<(String, String, bool)> {
        let show = |mount: &MountSpec| {
            let source = match &mount.source {
                MountSource::Reserved { purpose, path } => {
                    assert_eq!(purpose, "deerflow");
                    path.strip_prefix(ROOT).unwrap().to_str().unwrap().to_owned()
                }
                MountSource::Claim(claim) => claim.name.to_string(),
                other => panic!("{other:?}"),
            };
            (source, mount.target.clone(), mount.access == MountAccess::ReadWrite)
        };
        mounts.iter().map(show).collect()
    }

    #[test]
    fn n127_host_directories_are_scoped_by_user_and_conversation() {
        let mounts = choose_mounts(&settings(UserDataMode::Host), &Owner::operator(), &request(&[])).unwrap();
        let expected = [
            ("users/ann/threads/a1/user-data/workspace", "/mnt/user-data/workspace", true),
            ("users/ann/threads/a1/user-data/uploads", "/mnt/user-data/uploads", true),
            ("users/ann/threads/a1/user-data/outputs", "/mnt/user-data/outputs", true),
            ("users/ann/threads/a1/acp-workspace", "/mnt/acp-workspace", false),
            ("skills_view/public", "/mnt/skills/public", false),
            ("users/ann/skills_view/custom", "/mnt/skills/custom", false),
            ("users/ann/skills_view/legacy", "/mnt/skills/legacy", false),
            ("users/ann/skills_view/integrations", "/mnt/skills/integrations", false),
        ];
        let expected = expected.map(|(source, target, rw)| (source.to_owned(), target.to_owned(), rw));
        assert_eq!(shown(&mounts), expected);
    }

    #[test]
    fn n129_extra_mounts_replace_mounts_at_the_same_target() {
        let extra = request(&[
            ("/srv/deerflow/users/ann/other", "/mnt/skills/custom"),
            ("/srv/deerflow/users/ann/integrations/lark-cli/data", "/mnt/integrations/lark-cli/data"),
        ]);
        let mounts = choose_mounts(&settings(UserDataMode::Host), &Owner::operator(), &extra).unwrap();
        let custom: Vec<_> =
            shown(&mounts).into_iter().filter(|(_, target, _)| target == "/mnt/skills/custom").collect();
        assert_eq!(custom, [("users/ann/other".to_owned(), "/mnt/skills/custom".to_owned(), false)]);
        assert_eq!(mounts.len(), 9);
        let alone = choose_mounts(&settings(UserDataMode::None), &Owner::operator(), &extra).unwrap();
        assert_eq!(alone.len(), 2);
    }

    #[test]
    fn n126_extra_mounts_outside_of_the_users_state_are_refused() {
        for path in [
            "/etc",
            ROOT,
            "/srv/deerflow2/x",
            "/srv/deerflow/users",
            "/srv/deerflow/users/bob/x",
            "/srv/deerflow/users/annabel",
        ] {
            let refused = choose_mounts(
                &settings(UserDataMode::Host),
                &Owner::operator(),
                &request(&[(path, "/mnt/skills/custom")]),
            );
            assert_eq!(refused.unwrap_err().status(), 400, "{path}");
        }
    }

    #[test]
    fn other_owners_get_volumes_and_nothing_of_the_host() {
        let other = Owner::from_valid_name("team");
        let extra = request(&[("/srv/deerflow/users/ann/x", "/mnt/skills/custom")]);
        for mode in [UserDataMode::Host, UserDataMode::Volume] {
            let mounts = choose_mounts(&settings(mode), &other, &extra).unwrap();
            assert_eq!(mounts.len(), 1);
            assert!(matches!(mounts[0].source, MountSource::Claim(_)), "{mounts:?}");
        }
        assert_eq!(choose_mounts(&settings(UserDataMode::None), &other, &extra).unwrap(), []);
    }

    #[test]
    fn volumes_of_different_conversations_have_different_names() {
        assert_eq!(volume_name("a", "b"), volume_name("a", "b"));
        for (user, thread) in [("ab", ""), ("a-b", ""), ("b", "a"), ("A", "b"), ("a", "B")] {
            assert_ne!(volume_name("a", "b"), volume_name(user, thread), "{user} {thread}");
        }
        let kept = |time| ProvisionerSettings { keep_user_data: time, ..settings(UserDataMode::Volume) };
        let lifetime = |settings: &ProvisionerSettings| match volume_mount(settings, &request(&[])).source {
            MountSource::Claim(VolumeClaim { absent: MissingVolume::Make { lifetime, .. }, .. }) => lifetime,
            other => panic!("{other:?}"),
        };
        assert_eq!(lifetime(&kept(None)), VolumeLifetime::Kept);
        let day = Duration::from_secs(86400);
        assert_eq!(lifetime(&kept(Some(day))), VolumeLifetime::AfterUse(day));
    }
}
