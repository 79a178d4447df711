//! `[volumes]`: the directories of the host that may be mounted in sandboxes, and the size of volumes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use domain::Bytes;
use launcher::settings::AllowedDirectory;
use serde::{Deserialize, Serialize};

use super::quantity;
use super::raw::{RawPaths, RawVolumes};
use crate::output::WithHint;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct VolumeSettings {
    /// Directories of the host that may be mounted.
    pub host_paths: Vec<AllowedDirectory>,
    /// Directories of the host that only sandboxes of one front may mount.
    #[serde(default)]
    pub reserved_paths: Vec<AllowedDirectory>,
    /// The size of a volume whose claim names none.
    #[serde(with = "quantity")]
    pub default_size: Bytes,
}

/// Checks the section. `reserved` are the directories that settings of fronts name: the setting, its front and the path.
pub(super) fn check_volumes(
    raw: &RawVolumes,
    state_dir: &Path,
    reserved: &[(String, &'static str, PathBuf)],
) -> Result<VolumeSettings> {
    let written = match &raw.host_paths {
        None => Vec::new(),
        Some(RawPaths::List(paths)) => paths.clone(),
        Some(RawPaths::Text(text)) => std::env::split_paths(text).collect(),
    };
    let checked = written.iter().map(|path| {
        check_host_path(&format!("`volumes.host_paths` has `{}`", path.display()), path, state_dir)
    });
    let host_paths = checked.collect::<Result<Vec<_>>>()?;
    let mut reserved_paths = Vec::new();
    for (setting, front, path) in reserved {
        let found = check_host_path(&format!("`{setting}` is `{}`", path.display()), path, state_dir)?;
        refuse_overlap(setting, &found, &host_paths)?;
        refuse_overlap(setting, &found, &reserved_paths)?;
        reserved_paths.push(AllowedDirectory { purpose: Some((*front).to_owned()), ..found });
    }
    Ok(VolumeSettings {
        host_paths,
        reserved_paths,
        default_size: super::parse_bytes_or(
            "volumes.default_size",
            raw.default_size.as_ref(),
            Bytes::from_mib(1024),
        )?,
    })
}

/// A directory that is reserved for one front must not be reachable through another listed one.
fn refuse_overlap(setting: &str, reserved: &AllowedDirectory, listed: &[AllowedDirectory]) -> Result<()> {
    let overlaps = |other: &&AllowedDirectory| {
        other.real.starts_with(&reserved.real) || reserved.real.starts_with(&other.real)
    };
    match listed.iter().find(overlaps) {
        None => Ok(()),
        Some(other) => {
            let (path, other) = (reserved.written.display(), other.written.display());
            Err(anyhow!(
                "`{setting}` is `{path}`, which overlaps with `{other}`, which other sandboxes may mount"
            ))
            .with_hint("list directories under `volumes.host_paths` that neither contain it nor lie in it")
        }
    }
}

/// The directory behind the path, which `written` introduces in errors. Links in the path are resolved now and never
/// again.
fn check_host_path(written: &str, path: &Path, state_dir: &Path) -> Result<AllowedDirectory> {
    let setting = || written;
    if !path.is_absolute() {
        return Err(anyhow!("{}, which is not absolute", setting())).with_hint("write it from `/` on");
    }
    let real = resolve_links(path)
        .with_context(|| format!("{}, which cannot be found", setting()))
        .with_hint("make the directory first; only what lies below it is made when it is missing")?;
    if !real.is_dir() {
        return Err(anyhow!("{}, which is no directory", setting()))
            .with_hint("name the directory around it");
    }
    // The state directory may not exist yet, but then its own name is not a link.
    let state = resolve_links(state_dir).unwrap_or_else(|_missing| state_dir.to_owned());
    let kernel = ["/proc", "/sys", "/dev"].iter().any(|own| real.starts_with(own));
    if real == Path::new("/") || kernel || state.starts_with(&real) || real.starts_with(&state) {
        return Err(anyhow!("{}, which would open the host or the server's own state", setting())).with_hint(
            "name a directory that holds nothing but what sandboxes may have, such as /srv/sandboxes",
        );
    }
    Ok(AllowedDirectory { written: path.to_owned(), real, purpose: None })
}

#[expect(
    clippy::disallowed_methods,
    reason = "the operator's own paths, before anything runs; what is opened later is opened without links"
)]
fn resolve_links(path: &Path) -> std::io::Result<PathBuf> {
    path.canonicalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(paths: &[&str], state: &Path) -> Result<Vec<AllowedDirectory>> {
        let host_paths = Some(RawPaths::List(paths.iter().map(PathBuf::from).collect()));
        let raw = RawVolumes { host_paths, default_size: None };
        check_volumes(&raw, state, &[]).map(|volumes| volumes.host_paths)
    }

    #[test]
    fn nothing_may_be_mounted_unless_it_is_listed() {
        let volumes =
            check_volumes(&RawVolumes::default(), Path::new("/var/lib/coracle"), &[]).expect("defaults");
        assert!(volumes.host_paths.is_empty());
        assert_eq!(volumes.default_size, Bytes::from_mib(1024));
    }

    #[test]
    fn paths_that_would_expose_the_host_are_refused() {
        let place = tempfile::tempdir().expect("a directory");
        let state = place.path().join("data/state");
        std::fs::create_dir_all(&state).expect("our own directory");
        let (data, link) = (place.path().join("data"), place.path().join("link"));
        std::os::unix::fs::symlink("/", &link).expect("our own directory");
        let text = |path: &Path| path.to_str().expect("plain").to_owned();
        let inside = text(&state);
        for wrong in ["/", "/proc", "/sys/kernel", "/dev/shm", "data", &text(&data), &inside, &text(&link)] {
            written(&[wrong], &state).expect_err(wrong);
        }
        let missing = written(&[&text(&place.path().join("none"))], &state).expect_err("it is not there");
        assert!(missing.to_string().contains("cannot be found"), "{missing:#}");
    }

    #[test]
    fn links_in_a_listed_path_are_resolved() {
        let place = tempfile::tempdir().expect("a directory");
        let real = resolve_links(place.path()).expect("it exists").join("real");
        std::fs::create_dir(&real).expect("our own directory");
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&real, &link).expect("our own directory");
        let found = written(&[link.to_str().expect("plain")], Path::new("/var/lib/coracle"));
        assert_eq!(
            found.expect("it may be listed"),
            [AllowedDirectory { written: link, real, purpose: None }]
        );
    }

    #[test]
    fn reserved_directory_overlaps_with_no_listed_one() {
        let place = tempfile::tempdir().expect("a directory");
        let real = resolve_links(place.path()).expect("it exists");
        let inner = real.join("flow/inner");
        std::fs::create_dir_all(&inner).expect("our own directory");
        std::fs::create_dir(real.join("other")).expect("our own directory");
        let reserved = [("deerflow.state_root".to_owned(), "deerflow", real.join("flow"))];
        let check = |listed: PathBuf| {
            let raw = RawVolumes { host_paths: Some(RawPaths::List(vec![listed])), default_size: None };
            check_volumes(&raw, Path::new("/var/lib/coracle"), &reserved)
        };
        for overlapping in [real.clone(), real.join("flow"), inner] {
            let error = check(overlapping).expect_err("it overlaps");
            assert!(error.to_string().contains("deerflow.state_root"), "{error:#}");
        }
        let volumes = check(real.join("other")).expect("they are apart");
        assert_eq!(volumes.reserved_paths[0].purpose.as_deref(), Some("deerflow"));
    }
}
