//! Parses the parameters of an isolated session, and fills in defaults.

use std::time::Duration;

use domain::{
    EnvFilter, IsolatedMount, IsolatedSessionSpec, MountView, OverlayStore, ResourceSharing, UserIdentity,
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use service::OpenSessionRequest;

use super::ExecdProblem;

/// The fields that are echoed in responses.
pub(super) const ECHOED_FIELDS: [&str; 11] = [
    "workspace",
    "overlays",
    "profile",
    "extra_writable",
    "binds",
    "share_net",
    "env_passthrough",
    "uid",
    "gid",
    "uid_mode",
    "idle_timeout_seconds",
];

/// Mount sources besides workspace and overlays must be below one of these. They contain no programs
/// and no configuration, which a session could otherwise change for everything else in the sandbox.
const ALLOWED_SOURCES: [&str; 9] =
    ["/data", "/mnt", "/media", "/srv", "/workspace", "/home", "/root", "/tmp", "/var/tmp"];

/// Paths below which nothing can be mounted.
const RESERVED_PATHS: [&str; 3] = ["/proc", "/dev", "/sys"];

/// Variables that a strict session does not get.
const SECRET_VARIABLES: [&str; 9] =
    ["*_API_KEY", "*_TOKEN", "*_SECRET", "*_PASSWORD", "AWS_*", "ALI_*", "ALIYUN_*", "K8S_*", "KUBE_*"];

const DEFAULT_IDLE_SECONDS: u64 = 1800;
const MAX_IDLE_SECONDS: u64 = 365 * 24 * 3600;

/// Limits on the mounts and on the description of one session, since all of it is stored with the
/// session.
const MAX_MOUNTS: usize = 64;
const MAX_NOTE_BYTES: usize = 48 << 10;

#[derive(Clone, Deserialize, Serialize)]
pub(super) struct CreateIsolatedBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    workspace: Option<WorkspaceBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlays: Option<Vec<OverlayBody>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<IsolationProfile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_writable: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    binds: Option<Vec<BindMountBody>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    share_net: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    env_passthrough: Option<EnvPassthrough>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid_mode: Option<UidMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_timeout_seconds: Option<u64>,
}

#[derive(Clone, Deserialize, Serialize)]
struct WorkspaceBody {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<SessionMountMode>,
}

#[derive(Clone, Deserialize, Serialize)]
struct OverlayBody {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<SessionMountMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    persist: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum SessionMountMode {
    Rw,
    Overlay,
    Ro,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum IsolationProfile {
    #[default]
    Strict,
    Balanced,
}

#[derive(Clone, Deserialize, Serialize)]
struct BindMountBody {
    source: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    dest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    readonly: Option<bool>,
}

#[derive(Clone, Deserialize, Serialize)]
struct EnvPassthrough {
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<PassthroughMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<Vec<String>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum PassthroughMode {
    Allow,
    Deny,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum UidMode {
    Setpriv,
    Userns,
}

/// Returns the session to open, and the fields that responses echo.
pub(super) fn parse_create_body(
    body: CreateIsolatedBody,
) -> Result<(OpenSessionRequest, Map<String, Value>), ExecdProblem> {
    if body.uid_mode == Some(UidMode::Userns) {
        let message = "`uid_mode` `userns` is not supported: sandboxes cannot create user namespaces";
        return Err(ExecdProblem::new(StatusCode::SERVICE_UNAVAILABLE, "NOT_SUPPORTED", message));
    }
    let body = apply_defaults(body);
    let profile = body.profile.unwrap_or_default();
    let mounts = parse_mounts(&body)?;
    let idle = body.idle_timeout_seconds.unwrap_or(DEFAULT_IDLE_SECONDS);
    if idle > MAX_IDLE_SECONDS {
        return Err(ExecdProblem::invalid(format!(
            "`idle_timeout_seconds` must be at most {MAX_IDLE_SECONDS}"
        )));
    }
    let Ok(Value::Object(echo)) = serde_json::to_value(&body) else {
        return Err(ExecdProblem::runtime_error("failed to serialize the session"));
    };
    let note = Value::Object(echo.clone()).to_string();
    if note.len() > MAX_NOTE_BYTES {
        return Err(ExecdProblem::invalid(format!("session description exceeds {MAX_NOTE_BYTES} bytes")));
    }
    let shared = |share| if share { ResourceSharing::Shared } else { ResourceSharing::Own };
    let spec = IsolatedSessionSpec {
        mounts,
        temporary: shared(profile == IsolationProfile::Balanced),
        network: shared(body.share_net.unwrap_or(true)),
        env_filter: env_filter(body.env_passthrough.as_ref(), profile),
        idle: (idle > 0).then(|| Duration::from_secs(idle)),
        note,
    };
    let identity = match (body.uid, body.gid) {
        (None, None) => UserIdentity::Default,
        (Some(uid), Some(gid)) => UserIdentity::Ids { uid, gid },
        (Some(uid), None) => UserIdentity::User(uid.to_string()),
        (None, Some(gid)) => UserIdentity::Ids { uid: 0, gid },
    };
    let first = spec.mounts.first().map(|mount| mount.target.clone());
    let directory = first.map(|path| domain::process::WorkingDirectory {
        path,
        missing: domain::process::MissingDirectory::Ignore,
        expand: false,
    });
    Ok((
        OpenSessionRequest {
            identity,
            directory,
            env: Default::default(),
            terminal: None,
            isolation: Some(spec),
        },
        echo,
    ))
}

/// Fills in defaults, so that responses show the effective values.
fn apply_defaults(mut body: CreateIsolatedBody) -> CreateIsolatedBody {
    body.profile.get_or_insert_default();
    if let Some(workspace) = &mut body.workspace {
        workspace.mode.get_or_insert(SessionMountMode::Overlay);
    }
    for overlay in body.overlays.iter_mut().flatten() {
        overlay.mode.get_or_insert(SessionMountMode::Overlay);
    }
    body.share_net.get_or_insert(true);
    body.uid_mode.get_or_insert(UidMode::Setpriv);
    body.idle_timeout_seconds.get_or_insert(DEFAULT_IDLE_SECONDS);
    body
}

fn parse_mounts(body: &CreateIsolatedBody) -> Result<Vec<IsolatedMount>, ExecdProblem> {
    let mut mounts = Vec::new();
    if let Some(WorkspaceBody { path, mode }) = &body.workspace {
        mounts.push(parse_mount(path, mode.unwrap_or(SessionMountMode::Overlay), None)?);
    }
    for OverlayBody { path, mode, persist } in body.overlays.iter().flatten() {
        mounts.push(parse_mount(path, mode.unwrap_or(SessionMountMode::Overlay), *persist)?);
    }
    if mounts.is_empty() {
        return Err(ExecdProblem::invalid("`workspace` or `overlays` is missing"));
    }
    for path in body.extra_writable.iter().flatten() {
        let path = check_mount_source(path)?;
        mounts.push(IsolatedMount {
            source: path.clone(),
            target: path,
            view: MountView::ReadWrite,
            without_links: true,
        });
    }
    for bind in body.binds.iter().flatten() {
        let source = check_mount_source(&bind.source)?;
        let target = normalize_path(bind.dest.as_deref().unwrap_or(&bind.source))?;
        let view = if bind.readonly == Some(true) { MountView::ReadOnly } else { MountView::ReadWrite };
        mounts.push(IsolatedMount { source, target, view, without_links: true });
    }
    if mounts.len() > MAX_MOUNTS {
        return Err(ExecdProblem::invalid(format!("session has more than {MAX_MOUNTS} directories")));
    }
    for (index, mount) in mounts.iter().enumerate() {
        if mounts[..index].iter().any(|other| other.target == mount.target) {
            return Err(ExecdProblem::invalid(format!("`{}` is given twice", mount.target)));
        }
    }
    Ok(mounts)
}

fn parse_mount(
    path: &str,
    mode: SessionMountMode,
    persist: Option<bool>,
) -> Result<IsolatedMount, ExecdProblem> {
    let path = normalize_path(path)?;
    let view = match (mode, persist) {
        (SessionMountMode::Overlay, persist) => {
            MountView::Overlay(if persist == Some(false) { OverlayStore::Memory } else { OverlayStore::Disk })
        }
        (SessionMountMode::Rw | SessionMountMode::Ro, Some(_)) => {
            return Err(ExecdProblem::invalid("`persist` requires the mode `overlay`"));
        }
        (SessionMountMode::Rw, None) => MountView::ReadWrite,
        (SessionMountMode::Ro, None) => MountView::ReadOnly,
    };
    Ok(IsolatedMount { source: path.clone(), target: path, view, without_links: false })
}

/// Normalises an absolute path; refuses `..` and paths reserved for the session.
fn normalize_path(path: &str) -> Result<String, ExecdProblem> {
    let wrong =
        |why: &str| ExecdProblem::invalid(format!("`{}` {why}", path.chars().take(256).collect::<String>()));
    if !path.starts_with('/') || path.len() > 4096 || path.contains('\0') {
        return Err(wrong("is not an absolute path"));
    }
    let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty() && *word != ".").collect();
    if words.is_empty() || words.contains(&"..") {
        return Err(wrong("cannot be mounted in a session"));
    }
    let path = format!("/{}", words.join("/"));
    if RESERVED_PATHS.iter().any(|reserved| is_in(&path, reserved)) {
        return Err(wrong("is reserved for the session itself"));
    }
    Ok(path)
}

fn check_mount_source(path: &str) -> Result<String, ExecdProblem> {
    let path = normalize_path(path)?;
    if ALLOWED_SOURCES.iter().any(|prefix| is_in(&path, prefix)) {
        return Ok(path);
    }
    Err(ExecdProblem::invalid(format!("`{path}` must be below one of {}", ALLOWED_SOURCES.join(", "))))
}

fn is_in(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns the filter for environment variables. `deny` without keys excludes secrets; without a mode
/// and keys, the profile decides.
fn env_filter(passthrough: Option<&EnvPassthrough>, profile: IsolationProfile) -> EnvFilter {
    let secrets = || EnvFilter { only: None, without: SECRET_VARIABLES.map(str::to_owned).to_vec() };
    let keys = passthrough.and_then(|given| given.keys.clone()).unwrap_or_default();
    match passthrough.and_then(|given| given.mode) {
        Some(PassthroughMode::Allow) => EnvFilter { only: Some(keys), without: Vec::new() },
        Some(PassthroughMode::Deny) | None if !keys.is_empty() => EnvFilter { only: None, without: keys },
        Some(PassthroughMode::Deny) => secrets(),
        None if profile == IsolationProfile::Strict => secrets(),
        None => EnvFilter::default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(body: Value) -> Result<(IsolatedSessionSpec, Map<String, Value>), ExecdProblem> {
        let body = serde_json::from_value(body).map_err(|error| ExecdProblem::invalid(error.to_string()))?;
        parse_create_body(body).map(|(open, echo)| (open.isolation.expect("the session is isolated"), echo))
    }

    #[test]
    fn defaults_are_applied_and_echoed() {
        let (spec, echo) = check(json!({"workspace": {"path": "/tmp"}})).unwrap();
        assert_eq!(spec.mounts[0].view, MountView::Overlay(OverlayStore::Disk));
        assert_eq!((spec.temporary, spec.network), (ResourceSharing::Own, ResourceSharing::Shared));
        assert_eq!(spec.idle, Some(Duration::from_secs(1800)));
        assert!(spec.env_filter.without.contains(&"*_TOKEN".to_owned()));
        assert_eq!(echo["workspace"], json!({"path": "/tmp", "mode": "overlay"}));
        let (spec, _) = check(json!({"workspace": {"path": "/w/"}, "profile": "balanced"})).unwrap();
        assert_eq!(
            (spec.mounts[0].target.as_str(), spec.mounts[0].view),
            ("/w", MountView::Overlay(OverlayStore::Disk))
        );
        assert_eq!((spec.temporary, spec.env_filter), (ResourceSharing::Shared, EnvFilter::default()));
    }

    #[test]
    fn variables_are_filtered_as_requested() {
        let screened = |profile: &str, given: Value| {
            let body = json!({"workspace": {"path": "/w"}, "profile": profile, "env_passthrough": given});
            check(body).unwrap().0.env_filter
        };
        let secrets = EnvFilter { only: None, without: SECRET_VARIABLES.map(str::to_owned).to_vec() };
        let nothing = || json!({"mode": null, "keys": null});
        assert_eq!(screened("strict", nothing()), secrets);
        assert_eq!(screened("balanced", nothing()), EnvFilter::default());
        assert_eq!(screened("balanced", json!({"mode": "deny", "keys": null})), secrets);
        let named = EnvFilter { only: None, without: vec!["A".to_owned()] };
        assert_eq!(screened("strict", json!({"mode": null, "keys": ["A"]})), named);
        assert_eq!(screened("strict", json!({"mode": "allow"})).only, Some(Vec::new()));
    }

    #[test]
    fn every_field_is_parsed() {
        let (spec, _) = check(json!({
            "overlays": [{"path": "/a", "persist": false}, {"path": "/a/b", "mode": "ro"}],
            "extra_writable": ["/media/x"], "binds": [{"source": "/srv/s", "dest": "/mnt/d", "readonly": true}],
            "share_net": false, "env_passthrough": {"mode": "allow", "keys": ["A"]}, "idle_timeout_seconds": 0,
        }))
        .unwrap();
        let views: Vec<MountView> = spec.mounts.iter().map(|mount| mount.view).collect();
        assert_eq!(
            views,
            [
                MountView::Overlay(OverlayStore::Memory),
                MountView::ReadOnly,
                MountView::ReadWrite,
                MountView::ReadOnly
            ]
        );
        assert_eq!((spec.mounts[3].source.as_str(), spec.mounts[3].target.as_str()), ("/srv/s", "/mnt/d"));
        assert_eq!((spec.network, spec.idle), (ResourceSharing::Own, None));
        assert_eq!(spec.env_filter.only, Some(vec!["A".to_owned()]));
    }

    #[test]
    fn invalid_requests_are_refused() {
        let with = |name: &str, value: Value| json!({"workspace": {"path": "/w"}, name: value});
        for wrong in [
            json!({}),
            json!({"workspace": {"path": "relative"}}),
            json!({"workspace": {"path": "/"}}),
            json!({"workspace": {"path": "/a/../proc"}}),
            json!({"workspace": {"path": "/proc/1/root"}}),
            json!({"workspace": {"path": "/dev/shm"}}),
            json!({"workspace": {"path": "/w", "mode": "wx"}}),
            with("overlays", json!([{"path": "/w"}])),
            with("overlays", json!([{"path": "/x", "mode": "rw", "persist": true}])),
            with("binds", json!([{"source": "/etc", "dest": "/mnt/etc"}])),
            with("binds", json!([{"source": "/database"}])),
            with("extra_writable", json!(["/usr"])),
            with("profile", json!("loose")),
            with("env_passthrough", json!({"keys": ["k".repeat(50_000)]})),
            with("idle_timeout_seconds", json!(-1)),
        ] {
            let refused = check(wrong.clone()).map(drop).unwrap_err();
            assert_eq!(refused.0.code, "INVALID_REQUEST_BODY", "{wrong}");
        }
        let userns = check(with("uid_mode", json!("userns"))).map(drop).unwrap_err();
        assert_eq!(userns.0.code, "NOT_SUPPORTED");
    }
}
