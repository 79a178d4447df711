//! Disks: whether a volume can be created, whether its limit is enforced, and how much space is
//! free.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use domain::Bytes;
use linux::fs::Root;
use linux::namespaces::{self, Namespaces};

use super::Check;
use super::attempt::{During, in_child};
use crate::volumes::{Kind, Settings, Volumes};

/// The mechanism that limits the disk of a sandbox on this host.
pub(super) struct Disk {
    pub(super) check: Check,
    pub(super) by: Option<String>,
}

const NAME: &str = "disk";
const LIMIT: Bytes = Bytes::mib(16);
const POOL: Bytes = Bytes::mib(256);

pub(super) fn look(state: &Path, rootless: bool) -> Disk {
    if rootless {
        let consequence = "files written by a sandbox are kept in memory";
        let check = Check::weaker(NAME, "a tmpfs of the limit's size", consequence)
            .fix("run as root, then volumes are stored on disk");
        return Disk { check, by: Some("tmpfs".to_owned()) };
    }
    let btrfs = match exercise(state, Kind::Btrfs) {
        Ok(detail) => return Disk { check: Check::ok(NAME, detail), by: Some("btrfs quota".to_owned()) },
        Err(error) => error,
    };
    match exercise(state, Kind::Ext4) {
        Ok(detail) => {
            let consequence = "creating a volume takes milliseconds instead of fractions of one";
            let check =
                Check::weaker(NAME, format!("{detail} ({btrfs})"), consequence).fix("`modprobe btrfs`");
            Disk { check, by: Some("ext4 image".to_owned()) }
        }
        Err(ext4) => {
            let fix = "`modprobe loop btrfs`; in a container, make /dev/loop-control and /dev/loop* usable";
            Disk { check: Check::missing(NAME, format!("{btrfs}; {ext4}")).fix(fix), by: None }
        }
    }
}

pub(super) fn free_space(state: &Path, floor: Bytes) -> Check {
    let place = existing(state);
    let name = "free space";
    let free = match rustix::fs::statvfs(&place) {
        Ok(status) => status.f_bavail.saturating_mul(status.f_frsize),
        Err(error) => return Check::missing(name, format!("`{}`: {error}", place.display())),
    };
    let detail = format!("{} MiB at `{}`", free >> 20, place.display());
    if free >= floor.0 {
        return Check::ok(name, detail);
    }
    Check::missing(name, format!("{detail}, less than the floor of {} MiB", floor.0 >> 20))
        .fix("free some space, or lower the floor in the configuration")
}

/// Returns the nearest existing directory: the state directory itself is created by the first
/// start.
pub(super) fn existing(state: &Path) -> PathBuf {
    let found = state.ancestors().find(|path| path.is_dir());
    found.filter(|path| *path != Path::new("")).unwrap_or(Path::new("/")).to_owned()
}

/// Creates a volume in a separate mount namespace, fills it up and removes it.
fn exercise(state: &Path, kind: Kind) -> Result<String, String> {
    let place = existing(state);
    let name = PathBuf::from(format!(".coracle-doctor-{}", rustix::process::getpid().as_raw_nonzero()));
    let root = Root::open(&place).during("open the state directory")?;
    let directory = place.join(&name);
    let tried = in_child(|| {
        namespaces::unshare(Namespaces::MOUNT).during("make a mount namespace")?;
        linux::mounts::make_private().during("make mounts private")?;
        fill_one(&directory, kind)
    });
    root.remove_tree(&name).during("remove the test directory")?;
    tried
}

fn fill_one(directory: &Path, kind: Kind) -> Result<String, String> {
    let settings = Settings { kind: Some(kind), pool: Some(POOL), floor: Bytes(0), ..Settings::default() };
    let mut volumes = Volumes::open(directory, settings).map_err(chain)?;
    let prepared = volumes.prepare(LIMIT).map_err(chain)?;
    let volume = volumes.assign(prepared, "doctor", LIMIT).map_err(chain)?;
    let held = overfill(&volume.disk.join("file"));
    volumes.remove("doctor").map_err(chain)?;
    held?;
    let means = if kind == Kind::Btrfs { "btrfs quotas" } else { "ext4 images" };
    Ok(format!("{means} enforce a limit"))
}

fn overfill(path: &Path) -> Result<(), String> {
    let mut file = File::create(path).during("make a file")?;
    let chunk = vec![1; 1 << 20];
    for _ in 0..=LIMIT.0 >> 20 {
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
fn chain(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
