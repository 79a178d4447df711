//! Parses the parameters of an isolated session, and fills in defaults.

use std::time::Duration;

use domain::{Identity, Nest, NestMount, Screen, Sharing, Store, View};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use service::OpenSession;

use super::Fault;

/// The fields that are echoed in responses.
pub(super) const ECHOED: [&str; 11] = [
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
const ALLOWED: [&str; 9] =
    ["/data", "/mnt", "/media", "/srv", "/workspace", "/home", "/root", "/tmp", "/var/tmp"];

/// Paths below which nothing can be mounted.
const RESERVED: [&str; 3] = ["/proc", "/dev", "/sys"];

/// Variables that a strict session does not get.
const SECRETS: [&str; 9] =
    ["*_API_KEY", "*_TOKEN", "*_SECRET", "*_PASSWORD", "AWS_*", "ALI_*", "ALIYUN_*", "K8S_*", "KUBE_*"];

const USUAL_IDLE: u64 = 1800;
const LONGEST_IDLE: u64 = 365 * 24 * 3600;

/// Limits on the mounts and on the description of one session, since all of it is stored with the
/// session.
const MOST: usize = 64;
const LONGEST: usize = 48 << 10;

#[derive(Clone, Deserialize, Serialize)]
pub(super) struct CreateBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    workspace: Option<Workspace>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlays: Option<Vec<Overlay>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<Profile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_writable: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    binds: Option<Vec<Bind>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    share_net: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    env_passthrough: Option<Passthrough>,
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
struct Workspace {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Mode>,
}

#[derive(Clone, Deserialize, Serialize)]
struct Overlay {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Mode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    persist: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Rw,
    Overlay,
    Ro,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Profile {
    #[default]
    Strict,
    Balanced,
}

#[derive(Clone, Deserialize, Serialize)]
struct Bind {
    source: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    dest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    readonly: Option<bool>,
}

#[derive(Clone, Deserialize, Serialize)]
struct Passthrough {
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Direction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<Vec<String>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Direction {
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
pub(super) fn parse(body: CreateBody) -> Result<(OpenSession, Map<String, Value>), Fault> {
    if body.uid_mode == Some(UidMode::Userns) {
        let message = "`uid_mode` `userns` is not supported: sandboxes cannot create user namespaces";
        return Err(Fault::new(StatusCode::SERVICE_UNAVAILABLE, "NOT_SUPPORTED", message));
    }
    let body = complete(body);
    let profile = body.profile.unwrap_or_default();
    let mounts = mounts(&body)?;
    let idle = body.idle_timeout_seconds.unwrap_or(USUAL_IDLE);
    if idle > LONGEST_IDLE {
        return Err(Fault::invalid(format!("`idle_timeout_seconds` must be at most {LONGEST_IDLE}")));
    }
    let Ok(Value::Object(echo)) = serde_json::to_value(&body) else {
        return Err(Fault::runtime("failed to serialize the session"));
    };
    let note = Value::Object(echo.clone()).to_string();
    if note.len() > LONGEST {
        return Err(Fault::invalid(format!("session description exceeds {LONGEST} bytes")));
    }
    let shared = |share| if share { Sharing::Shared } else { Sharing::Own };
    let nest = Nest {
        mounts,
        temporary: shared(profile == Profile::Balanced),
        network: shared(body.share_net.unwrap_or(true)),
        screen: screen(body.env_passthrough.as_ref(), profile),
        idle: (idle > 0).then(|| Duration::from_secs(idle)),
        note,
    };
    let identity = match (body.uid, body.gid) {
        (None, None) => Identity::Default,
        (Some(uid), Some(gid)) => Identity::Ids { uid, gid },
        (Some(uid), None) => Identity::User(uid.to_string()),
        (None, Some(gid)) => Identity::Ids { uid: 0, gid },
    };
    let first = nest.mounts.first().map(|mount| mount.target.clone());
    let directory = first.map(|path| domain::process::Directory {
        path,
        missing: domain::process::Missing::Ignore,
        expand: false,
    });
    Ok((OpenSession { identity, directory, env: Default::default(), terminal: None, nest: Some(nest) }, echo))
}

/// Fills in defaults, so that responses show the effective values.
fn complete(mut body: CreateBody) -> CreateBody {
    body.profile.get_or_insert_default();
    if let Some(workspace) = &mut body.workspace {
        workspace.mode.get_or_insert(Mode::Overlay);
    }
    for overlay in body.overlays.iter_mut().flatten() {
        overlay.mode.get_or_insert(Mode::Overlay);
    }
    body.share_net.get_or_insert(true);
    body.uid_mode.get_or_insert(UidMode::Setpriv);
    body.idle_timeout_seconds.get_or_insert(USUAL_IDLE);
    body
}

fn mounts(body: &CreateBody) -> Result<Vec<NestMount>, Fault> {
    let mut mounts = Vec::new();
    if let Some(Workspace { path, mode }) = &body.workspace {
        mounts.push(shown(path, mode.unwrap_or(Mode::Overlay), None)?);
    }
    for Overlay { path, mode, persist } in body.overlays.iter().flatten() {
        mounts.push(shown(path, mode.unwrap_or(Mode::Overlay), *persist)?);
    }
    if mounts.is_empty() {
        return Err(Fault::invalid("`workspace` or `overlays` is missing"));
    }
    for path in body.extra_writable.iter().flatten() {
        let path = allowed(path)?;
        mounts.push(NestMount {
            source: path.clone(),
            target: path,
            view: View::ReadWrite,
            without_links: true,
        });
    }
    for bind in body.binds.iter().flatten() {
        let source = allowed(&bind.source)?;
        let target = clean(bind.dest.as_deref().unwrap_or(&bind.source))?;
        let view = if bind.readonly == Some(true) { View::ReadOnly } else { View::ReadWrite };
        mounts.push(NestMount { source, target, view, without_links: true });
    }
    if mounts.len() > MOST {
        return Err(Fault::invalid(format!("session has more than {MOST} directories")));
    }
    for (index, mount) in mounts.iter().enumerate() {
        if mounts[..index].iter().any(|other| other.target == mount.target) {
            return Err(Fault::invalid(format!("`{}` is given twice", mount.target)));
        }
    }
    Ok(mounts)
}

fn shown(path: &str, mode: Mode, persist: Option<bool>) -> Result<NestMount, Fault> {
    let path = clean(path)?;
    let view = match (mode, persist) {
        (Mode::Overlay, persist) => {
            View::Overlay(if persist == Some(false) { Store::Memory } else { Store::Disk })
        }
        (Mode::Rw | Mode::Ro, Some(_)) => {
            return Err(Fault::invalid("`persist` requires the mode `overlay`"));
        }
        (Mode::Rw, None) => View::ReadWrite,
        (Mode::Ro, None) => View::ReadOnly,
    };
    Ok(NestMount { source: path.clone(), target: path, view, without_links: false })
}

/// Normalises an absolute path; refuses `..` and paths reserved for the session.
fn clean(path: &str) -> Result<String, Fault> {
    let wrong = |why: &str| Fault::invalid(format!("`{}` {why}", path.chars().take(256).collect::<String>()));
    if !path.starts_with('/') || path.len() > 4096 || path.contains('\0') {
        return Err(wrong("is not an absolute path"));
    }
    let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty() && *word != ".").collect();
    if words.is_empty() || words.contains(&"..") {
        return Err(wrong("cannot be mounted in a session"));
    }
    let path = format!("/{}", words.join("/"));
    if RESERVED.iter().any(|reserved| is_in(&path, reserved)) {
        return Err(wrong("is reserved for the session itself"));
    }
    Ok(path)
}

fn allowed(path: &str) -> Result<String, Fault> {
    let path = clean(path)?;
    if ALLOWED.iter().any(|prefix| is_in(&path, prefix)) {
        return Ok(path);
    }
    Err(Fault::invalid(format!("`{path}` must be below one of {}", ALLOWED.join(", "))))
}

fn is_in(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns the filter for environment variables. `deny` without keys excludes secrets; without a mode
/// and keys, the profile decides.
fn screen(passthrough: Option<&Passthrough>, profile: Profile) -> Screen {
    let secrets = || Screen { only: None, without: SECRETS.map(str::to_owned).to_vec() };
    let keys = passthrough.and_then(|given| given.keys.clone()).unwrap_or_default();
    match passthrough.and_then(|given| given.mode) {
        Some(Direction::Allow) => Screen { only: Some(keys), without: Vec::new() },
        Some(Direction::Deny) | None if !keys.is_empty() => Screen { only: None, without: keys },
        Some(Direction::Deny) => secrets(),
        None if profile == Profile::Strict => secrets(),
        None => Screen::default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(body: Value) -> Result<(Nest, Map<String, Value>), Fault> {
        let body = serde_json::from_value(body).map_err(|error| Fault::invalid(error.to_string()))?;
        parse(body).map(|(open, echo)| (open.nest.expect("the session is isolated"), echo))
    }

    #[test]
    fn defaults_are_applied_and_echoed() {
        let (nest, echo) = check(json!({"workspace": {"path": "/tmp"}})).unwrap();
        assert_eq!(nest.mounts[0].view, View::Overlay(Store::Disk));
        assert_eq!((nest.temporary, nest.network), (Sharing::Own, Sharing::Shared));
        assert_eq!(nest.idle, Some(Duration::from_secs(1800)));
        assert!(nest.screen.without.contains(&"*_TOKEN".to_owned()));
        assert_eq!(echo["workspace"], json!({"path": "/tmp", "mode": "overlay"}));
        let (nest, _) = check(json!({"workspace": {"path": "/w/"}, "profile": "balanced"})).unwrap();
        assert_eq!((nest.mounts[0].target.as_str(), nest.mounts[0].view), ("/w", View::Overlay(Store::Disk)));
        assert_eq!((nest.temporary, nest.screen), (Sharing::Shared, Screen::default()));
    }

    #[test]
    fn variables_are_filtered_as_requested() {
        let screened = |profile: &str, given: Value| {
            let body = json!({"workspace": {"path": "/w"}, "profile": profile, "env_passthrough": given});
            check(body).unwrap().0.screen
        };
        let secrets = Screen { only: None, without: SECRETS.map(str::to_owned).to_vec() };
        let nothing = || json!({"mode": null, "keys": null});
        assert_eq!(screened("strict", nothing()), secrets);
        assert_eq!(screened("balanced", nothing()), Screen::default());
        assert_eq!(screened("balanced", json!({"mode": "deny", "keys": null})), secrets);
        let named = Screen { only: None, without: vec!["A".to_owned()] };
        assert_eq!(screened("strict", json!({"mode": null, "keys": ["A"]})), named);
        assert_eq!(screened("strict", json!({"mode": "allow"})).only, Some(Vec::new()));
    }

    #[test]
    fn every_field_is_parsed() {
        let (nest, _) = check(json!({
            "overlays": [{"path": "/a", "persist": false}, {"path": "/a/b", "mode": "ro"}],
            "extra_writable": ["/media/x"], "binds": [{"source": "/srv/s", "dest": "/mnt/d", "readonly": true}],
            "share_net": false, "env_passthrough": {"mode": "allow", "keys": ["A"]}, "idle_timeout_seconds": 0,
        }))
        .unwrap();
        let views: Vec<View> = nest.mounts.iter().map(|mount| mount.view).collect();
        assert_eq!(views, [View::Overlay(Store::Memory), View::ReadOnly, View::ReadWrite, View::ReadOnly]);
        assert_eq!((nest.mounts[3].source.as_str(), nest.mounts[3].target.as_str()), ("/srv/s", "/mnt/d"));
        assert_eq!((nest.network, nest.idle), (Sharing::Own, None));
        assert_eq!(nest.screen.only, Some(vec!["A".to_owned()]));
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
