//! Disks: whether a volume can be created, whether its limit is enforced, and how much space is
//! free.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use domain::Bytes;
use linux::fs::RootDirectory;
use linux::namespaces::{self, NamespaceSet};

use super::HostCheck;
use super::attempt::{ProbeErrorContext, run_in_child};
use super::container_facts::ContainerNeed;
use crate::volumes::{VolumeKind, VolumeStore, VolumeStoreSettings};

/// The mechanism that limits the disk of a sandbox on this host.
pub(super) struct DiskSupport {
    pub(super) check: HostCheck,
    pub(super) by: Option<String>,
}

const CHECK_NAME: &str = "disk";
const TEST_LIMIT: Bytes = Bytes::from_mib(16);
const TEST_POOL_SIZE: Bytes = Bytes::from_mib(256);

pub(super) fn probe_disk(state: &Path, rootless: bool) -> DiskSupport {
    if rootless {
        let consequence = "files written by a sandbox are kept in memory";
        let check = HostCheck::weaker(CHECK_NAME, "a tmpfs of the limit's size", consequence)
            .with_fix("run as root, then volumes are stored on disk");
        return DiskSupport { check, by: Some("tmpfs".to_owned()) };
    }
    let btrfs = match try_volume(state, VolumeKind::Btrfs) {
        Ok(detail) => {
            return DiskSupport {
                check: HostCheck::ok(CHECK_NAME, detail),
                by: Some("btrfs quota".to_owned()),
            };
        }
        Err(error) => error,
    };
    match try_volume(state, VolumeKind::Ext4) {
        Ok(detail) => {
            let consequence = "creating a volume takes milliseconds instead of fractions of one";
            let check = HostCheck::weaker(CHECK_NAME, format!("{detail} ({btrfs})"), consequence)
                .with_fix("`modprobe btrfs`");
            DiskSupport { check, by: Some("ext4 image".to_owned()) }
        }
        Err(ext4) => {
            let fix = "`modprobe loop btrfs`; in a container, make /dev/loop-control and /dev/loop* usable";
            DiskSupport {
                check: HostCheck::missing(CHECK_NAME, format!("{btrfs}; {ext4}"))
                    .with_fix(fix)
                    .with_needs(&[ContainerNeed::Privileges]),
                by: None,
            }
        }
    }
}

/// The result where no process can be made to try it.
pub(super) fn untried_disk() -> DiskSupport {
    DiskSupport { check: HostCheck::untried(CHECK_NAME, "system calls"), by: None }
}

/// Returns the name of the filesystem that `path` is on, or its number if we do not know the name.
pub(super) fn filesystem_name(path: &Path) -> String {
    const NAMES: [(u64, &str); 7] = [
        (0x794c_7630, "overlayfs"),
        (0xef53, "ext4"),
        (0x9123_683e, "btrfs"),
        (0x5846_5342, "xfs"),
        (0x0102_1994, "tmpfs"),
        (0x6969, "nfs"),
        (0x6573_5546, "fuse"),
    ];
    let kind = match rustix::fs::statfs(path) {
        Ok(facts) => facts.f_type.cast_unsigned(),
        Err(error) => return format!("an unknown filesystem ({error})"),
    };
    let name = NAMES.iter().find(|(number, _)| *number == kind);
    name.map_or_else(|| format!("a filesystem of type {kind:#x}"), |(_, name)| (*name).to_owned())
}

pub(super) fn check_free_space(state: &Path, floor: Bytes) -> HostCheck {
    let place = existing_ancestor(state);
    let name = "free space";
    let free = match rustix::fs::statvfs(&place) {
        Ok(status) => status.f_bavail.saturating_mul(status.f_frsize),
        Err(error) => return HostCheck::missing(name, format!("`{}`: {error}", place.display())),
    };
    let detail = format!("{} MiB at `{}`", free >> 20, place.display());
    if free >= floor.0 {
        return HostCheck::ok(name, detail);
    }
    HostCheck::missing(name, format!("{detail}, less than the floor of {} MiB", floor.0 >> 20))
        .with_fix("free some space, or lower the floor in the configuration")
}

/// Returns the nearest existing directory: the state directory itself is created by the first
/// start.
pub(super) fn existing_ancestor(state: &Path) -> PathBuf {
    let found = state.ancestors().find(|path| path.is_dir());
    found.filter(|path| *path != Path::new("")).unwrap_or(Path::new("/")).to_owned()
}

/// Creates a volume in a separate mount namespace, fills it up and removes it.
fn try_volume(state: &Path, kind: VolumeKind) -> Result<String, String> {
    let place = existing_ancestor(state);
    let name = PathBuf::from(format!(".coracle-doctor-{}", rustix::process::getpid().as_raw_nonzero()));
    let root = RootDirectory::open(&place).during("open the state directory")?;
    let directory = place.join(&name);
    let tried = run_in_child(|| {
        namespaces::unshare_namespaces(NamespaceSet::MOUNT).during("make a mount namespace")?;
        linux::mounts::make_private().during("make mounts private")?;
        fill_volume(&directory, kind)
    });
    root.remove_tree(&name).during("remove the test directory")?;
    tried
}

fn fill_volume(directory: &Path, kind: VolumeKind) -> Result<String, String> {
    let settings = VolumeStoreSettings {
        kind: Some(kind),
        pool: Some(TEST_POOL_SIZE),
        floor: Bytes(0),
        ..VolumeStoreSettings::default()
    };
    let mut volumes = VolumeStore::open(directory, settings).map_err(format_error_chain)?;
    let prepared = volumes.prepare(TEST_LIMIT).map_err(format_error_chain)?;
    let volume = volumes.assign(prepared, &super::probe_id(), TEST_LIMIT).map_err(format_error_chain)?;
    let held = fill_past_limit(&volume.disk.join("file"));
    volumes.remove(&super::probe_id()).map_err(format_error_chain)?;
    held?;
    let means = if kind == VolumeKind::Btrfs { "btrfs quotas" } else { "ext4 images" };
    Ok(format!("{means} enforce a limit"))
}

fn fill_past_limit(path: &Path) -> Result<(), String> {
    let mut file = File::create(path).during("make a file")?;
    let chunk = vec![1; 1 << 20];
    for _ in 0..=TEST_LIMIT.0 >> 20 {
        match file.write_all(&chunk).and_then(|()| file.sync_data()) {
            Ok(()) => {}
            Err(error) if is_full(&error) => return fs::remove_file(path).during("remove a file"),
            Err(error) => return Err(error).during("fill a volume"),
        }
    }
    Err("the disk limit of a volume is not enforced".to_owned())
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::QuotaExceeded | io::ErrorKind::StorageFull)
}

/// Formats an error and all its causes in one line.
fn format_error_chain(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
