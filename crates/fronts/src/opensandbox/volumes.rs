//! The `volumes` of a create request: host directories and named volumes (`pvc`).
//!
//! Which host directories may be mounted is not decided here: only the launcher knows the operator's
//! list, and only it opens them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use domain::volume::{MissingVolume, VolumeClaim, VolumeLifetime, is_mount_target};
use domain::{Bytes, MountAccess, MountSource, MountSpec, VolumeName};
use http::StatusCode;
use serde::Deserialize;
use serde_json::Value;
use service::{ErrorKind, MountFault, ServiceError};

use super::problem::Problem;

/// Far more than one sandbox needs.
const MAX_VOLUMES: usize = 64;

/// As in the reference, fields may also be written in snake case; in particular, `read_only` must not
/// be ignored, since that would give write access.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeBody {
    name: Option<String>,
    #[serde(alias = "mount_path")]
    mount_path: Option<String>,
    #[serde(alias = "read_only")]
    read_only: Option<bool>,
    #[serde(alias = "sub_path")]
    sub_path: Option<String>,
    host: Option<HostVolume>,
    pvc: Option<PvcVolume>,
    /// Its fields contain secrets and are not parsed.
    ossfs: Option<Value>,
    #[serde(flatten)]
    rest: UnknownFields,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HostVolume {
    path: Option<String>,
    #[serde(flatten)]
    rest: UnknownFields,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PvcVolume {
    #[serde(alias = "claim_name")]
    claim_name: Option<String>,
    #[serde(alias = "create_if_not_exists")]
    create_if_not_exists: Option<bool>,
    #[serde(alias = "delete_on_sandbox_termination")]
    delete_on_sandbox_termination: Option<bool>,
    storage: Option<String>,
    #[serde(alias = "access_modes")]
    access_modes: Option<Vec<String>>,
    #[serde(flatten)]
    rest: UnknownFields,
}

/// Unknown fields. They are ignored with one exception: a request for a read-only volume, in whatever
/// spelling and position, must not result in a writable one.
type UnknownFields = BTreeMap<String, Value>;

fn check_unknown_fields(name: &str, rests: &[&UnknownFields]) -> Result<(), Problem> {
    let plain = |field: &str| field.to_lowercase().replace(['_', '-'], "");
    match rests.iter().flat_map(|rest| rest.keys()).find(|field| plain(field) == "readonly") {
        Some(field) => Err(Problem::invalid(format!(
            "volume `{name}`: write `readOnly` next to `mountPath` instead of `{field}`"
        ))),
        None => Ok(()),
    }
}

/// Parses all entries, or returns the first error.
pub(super) fn parse_volumes(entries: Vec<Value>) -> Result<Vec<MountSpec>, Problem> {
    if entries.len() > MAX_VOLUMES {
        return Err(Problem::invalid(format!("`volumes` has more than {MAX_VOLUMES} entries")));
    }
    let (mut names, mut targets) = (BTreeSet::new(), BTreeSet::new());
    let mut mounts = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        // The error text names the field and its type, but not its value.
        let entry: VolumeBody = serde_json::from_value(entry)
            .map_err(|error| Problem::invalid(format!("`volumes[{index}]`: {error}")))?;
        let name = parse_volume_name(entry.name.as_deref())?;
        if !names.insert(name.clone()) {
            return Err(invalid_volume(
                "VOLUME::DUPLICATE_NAME",
                &name,
                "another volume in this request has the same name",
            ));
        }
        let mount = parse_mount(&name, entry)?;
        if !targets.insert(mount.target.clone()) {
            let why = format!("another volume is already mounted at `{}`", mount.target);
            return Err(invalid_volume("VOLUME::INVALID_MOUNT_PATH", &name, why));
        }
        mounts.push(mount);
    }
    Ok(mounts)
}

fn invalid_volume(code: &'static str, name: &str, why: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, code, format!("volume `{name}`: {why}"))
}

/// Parses a volume name, which must be a DNS label.
fn parse_volume_name(text: Option<&str>) -> Result<String, Problem> {
    let text = text.unwrap_or_default();
    match VolumeName::parse(text) {
        Ok(name) if text.len() <= 63 => Ok(name.to_string()),
        _ => {
            let shown: String = text.chars().take(64).collect();
            let why = "a name has 1 to 63 lower-case letters, digits and `-`, and no `-` first or last";
            Err(invalid_volume("VOLUME::INVALID_NAME", &shown, why))
        }
    }
}

fn parse_mount(name: &str, entry: VolumeBody) -> Result<MountSpec, Problem> {
    let (host, pvc) = (entry.host.as_ref().map(|host| &host.rest), entry.pvc.as_ref().map(|pvc| &pvc.rest));
    check_unknown_fields(name, &[Some(&entry.rest), host, pvc].into_iter().flatten().collect::<Vec<_>>())?;
    let target = parse_mount_path(name, entry.mount_path.as_deref().unwrap_or_default())?;
    let sub_path = parse_sub_path(name, entry.sub_path.as_deref().unwrap_or_default())?;
    let source = match (entry.host, entry.pvc, entry.ossfs) {
        (Some(host), None, None) => host_source(name, host)?,
        (None, Some(pvc), None) => MountSource::Claim(parse_claim(name, pvc)?),
        (None, None, Some(_)) => {
            return Err(invalid_volume(
                "VOLUME::UNSUPPORTED_BACKEND",
                name,
                "object storage (`ossfs`) is not supported",
            ));
        }
        (None, None, None) => {
            return Err(invalid_volume(
                "VOLUME::INVALID_BACKEND",
                name,
                "one of `host`, `pvc` and `ossfs` is required",
            ));
        }
        _ => {
            return Err(invalid_volume(
                "VOLUME::INVALID_BACKEND",
                name,
                "only one of `host`, `pvc` and `ossfs` is allowed",
            ));
        }
    };
    let access = if entry.read_only == Some(true) { MountAccess::ReadOnly } else { MountAccess::ReadWrite };
    Ok(MountSpec { source, target, access, sub_path })
}

/// Normalises the mount path inside the sandbox.
fn parse_mount_path(name: &str, path: &str) -> Result<String, Problem> {
    let target = format!("/{}", normalize_path(path));
    if !path.starts_with('/') || !is_mount_target(&target) {
        let why = "`mountPath` must be absolute, without `..`, and neither `/` nor in /proc, /sys or /dev";
        return Err(invalid_volume("VOLUME::INVALID_MOUNT_PATH", name, why));
    }
    Ok(target)
}

fn parse_sub_path(name: &str, path: &str) -> Result<Option<String>, Problem> {
    let relative = normalize_path(path);
    if path.starts_with('/') || relative.split('/').any(|part| part == "..") || relative.contains('\0') {
        return Err(invalid_volume(
            "VOLUME::INVALID_SUB_PATH",
            name,
            "`subPath` must be relative and without `..`",
        ));
    }
    Ok(Some(relative).filter(|path| !path.is_empty()))
}

/// Removes empty parts and `.` from a path, and makes it relative.
fn normalize_path(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    parts.join("/")
}

fn host_source(name: &str, host: HostVolume) -> Result<MountSource, Problem> {
    let path = host.path.unwrap_or_default();
    let climbs = path.split('/').any(|part| part == "..");
    if !Path::new(&path).is_absolute() || climbs || path.contains('\0') || path.len() >= 4096 {
        return Err(invalid_volume(
            "VOLUME::INVALID_HOST_PATH",
            name,
            "`host.path` must be absolute and without `..`",
        ));
    }
    Ok(MountSource::Host(format!("/{}", normalize_path(&path)).into()))
}

fn parse_claim(name: &str, pvc: PvcVolume) -> Result<VolumeClaim, Problem> {
    const MODES: [&str; 4] = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"];
    let claimed = VolumeName::parse(pvc.claim_name.as_deref().unwrap_or_default()).map_err(|error| {
        invalid_volume("VOLUME::INVALID_PVC_NAME", name, format!("`pvc.claimName`: {error}"))
    })?;
    if let Some(mode) = pvc.access_modes.iter().flatten().find(|mode| !MODES.contains(&mode.as_str())) {
        let shown: String = mode.chars().take(64).collect();
        return Err(invalid_volume(
            "VOLUME::INVALID_BACKEND",
            name,
            format!("`pvc.accessModes`: unknown access mode `{shown}`"),
        ));
    }
    let size = pvc.storage.as_deref().map(Bytes::parse).transpose();
    let size = size.map_err(|error| {
        invalid_volume("VOLUME::INVALID_BACKEND", name, format!("`pvc.storage`: {error}"))
    })?;
    let goes = pvc.delete_on_sandbox_termination == Some(true);
    let lifetime = if goes { VolumeLifetime::WithSandboxes } else { VolumeLifetime::Kept };
    let absent = match pvc.create_if_not_exists {
        Some(false) => MissingVolume::Refuse,
        Some(true) | None => MissingVolume::Make { size, lifetime },
    };
    Ok(VolumeClaim { name: claimed, absent })
}

/// Returns the reference's status and code for a volume error.
pub(super) fn volume_error_status(error: &ServiceError) -> Option<(StatusCode, &'static str)> {
    const WRONG: StatusCode = StatusCode::BAD_REQUEST;
    const FAILED: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;
    Some(match (error, error.kind()) {
        (_, ErrorKind::Mount(fault)) => match fault {
            MountFault::NotAllowed => (WRONG, "VOLUME::HOST_PATH_NOT_ALLOWED"),
            MountFault::NotFound => (WRONG, "VOLUME::HOST_PATH_NOT_FOUND"),
            MountFault::NotMade => (FAILED, "VOLUME::HOST_PATH_CREATE_FAILED"),
            MountFault::SubPath => (WRONG, "VOLUME::INVALID_SUB_PATH"),
            MountFault::Target => (WRONG, "VOLUME::INVALID_MOUNT_PATH"),
            MountFault::NoVolume => (WRONG, "VOLUME::PVC_NOT_FOUND"),
            MountFault::Failed => (WRONG, "VOLUME::INVALID_HOST_PATH"),
        },
        (ServiceError::VolumeRemoving(_), _) => (StatusCode::CONFLICT, "VOLUME::PVC_INSPECT_FAILED"),
        (ServiceError::VolumeWork { .. }, ErrorKind::Unsupported) => (WRONG, "VOLUME::UNSUPPORTED_BACKEND"),
        (ServiceError::VolumeWork { .. }, ErrorKind::Invalid) => (WRONG, "VOLUME::INVALID_BACKEND"),
        (ServiceError::VolumeWork { .. }, ErrorKind::Internal) => (FAILED, "VOLUME::PVC_INSPECT_FAILED"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(change: Value) -> Result<MountSpec, Problem> {
        let mut entry = json!({"name": "data", "mountPath": "/data", "host": {"path": "/srv/data"}});
        for (name, value) in change.as_object().unwrap() {
            entry[name] = value.clone();
        }
        parse_volumes(vec![entry]).map(|mut mounts| mounts.remove(0))
    }

    #[test]
    fn host_directories_and_claims_are_parsed_with_defaults() {
        let host = one(json!({"subPath": "./a//b", "readOnly": true, "pvc": null})).unwrap();
        let expected = MountSpec::from_host("/srv/data", "/data", MountAccess::ReadOnly);
        assert_eq!(host, MountSpec { sub_path: Some("a/b".to_owned()), ..expected });
        let claimed = one(json!({"host": null, "mountPath": "/x/", "pvc": {"claimName": "v"}})).unwrap();
        let absent = MissingVolume::Make { size: None, lifetime: VolumeLifetime::Kept };
        let name = VolumeName::parse("v").unwrap();
        assert_eq!(claimed.source, MountSource::Claim(VolumeClaim { name, absent }));
        assert_eq!((claimed.target.as_str(), claimed.access), ("/x", MountAccess::ReadWrite));
        let asked = one(json!({"host": null, "pvc": {"claimName": "v", "storage": "1Gi",
            "deleteOnSandboxTermination": true, "storageClass": null, "accessModes": ["ReadWriteMany"]}}));
        let MountSource::Claim(claim) = asked.unwrap().source else { panic!("the source is not a claim") };
        let (size, lifetime) = (Some(Bytes(1 << 30)), VolumeLifetime::WithSandboxes);
        assert_eq!(claim.absent, MissingVolume::Make { size, lifetime });
    }

    #[test]
    fn unknown_fields_are_ignored_except_misspelled_read_only() {
        let newer = json!({"unknown": 1, "host": {"path": "/srv/data", "kind": "Directory"}});
        assert_eq!(one(newer).unwrap(), one(json!({})).unwrap());
        let underscored = one(json!({"read_only": true, "sub_path": "a"})).unwrap();
        assert_eq!(underscored, one(json!({"readOnly": true, "subPath": "a"})).unwrap());
        let claimed = |more: Value| one(json!({"host": null, "pvc": more})).unwrap();
        assert_eq!(claimed(json!({"claimName": "v", "labels": {}})), claimed(json!({"claimName": "v"})));
        for misplaced in [
            json!({"readonly": true}),
            json!({"host": {"path": "/srv/data", "readOnly": true}}),
            json!({"host": null, "pvc": {"claimName": "v", "read_only": true}}),
        ] {
            let refused = one(misplaced).unwrap_err();
            assert!(refused.message.contains("readOnly"), "{}", refused.message);
        }
    }

    #[test]
    fn every_invalid_field_has_its_own_code() {
        let pvc = |fields: Value| json!({"host": null, "pvc": fields});
        for (change, code) in [
            (json!({"name": null}), "VOLUME::INVALID_NAME"),
            (json!({"name": "Data"}), "VOLUME::INVALID_NAME"),
            (json!({"name": "a".repeat(64)}), "VOLUME::INVALID_NAME"),
            (json!({"host": null}), "VOLUME::INVALID_BACKEND"),
            (json!({"pvc": {"claimName": "v"}}), "VOLUME::INVALID_BACKEND"),
            (json!({"mountPath": null}), "VOLUME::INVALID_MOUNT_PATH"),
            (json!({"mountPath": "data"}), "VOLUME::INVALID_MOUNT_PATH"),
            (json!({"mountPath": "/"}), "VOLUME::INVALID_MOUNT_PATH"),
            (json!({"mountPath": "/a/../proc"}), "VOLUME::INVALID_MOUNT_PATH"),
            (json!({"mountPath": "//proc/x"}), "VOLUME::INVALID_MOUNT_PATH"),
            (json!({"subPath": "/a"}), "VOLUME::INVALID_SUB_PATH"),
            (json!({"subPath": "a/../.."}), "VOLUME::INVALID_SUB_PATH"),
            (json!({"host": {"path": "srv"}}), "VOLUME::INVALID_HOST_PATH"),
            (json!({"host": {"path": "/srv/../etc"}}), "VOLUME::INVALID_HOST_PATH"),
            (pvc(json!({"claimName": "A"})), "VOLUME::INVALID_PVC_NAME"),
            (pvc(json!({"claimName": "v", "storage": "much"})), "VOLUME::INVALID_BACKEND"),
            (pvc(json!({"claimName": "v", "accessModes": ["Sometimes"]})), "VOLUME::INVALID_BACKEND"),
            (json!({"host": null, "ossfs": {"accessKeySecret": "x"}}), "VOLUME::UNSUPPORTED_BACKEND"),
            (json!({"readOnly": "yes"}), "SANDBOX::INVALID_PARAMETER"),
        ] {
            assert_eq!(one(change.clone()).unwrap_err().code, code, "{change}");
        }
    }

    #[test]
    fn names_and_mount_paths_must_be_unique() {
        let entry = |name: &str, path: &str| json!({"name": name, "mountPath": path, "host": {"path": "/s"}});
        let both = |one: Value, other: Value| parse_volumes(vec![one, other]).unwrap_err().code;
        assert_eq!(both(entry("a", "/a"), entry("a", "/b")), "VOLUME::DUPLICATE_NAME");
        assert_eq!(both(entry("a", "/a"), entry("b", "/a/")), "VOLUME::INVALID_MOUNT_PATH");
        assert_eq!(parse_volumes(vec![entry("a", "/a"), entry("b", "/a/b")]).unwrap().len(), 2);
    }
}
