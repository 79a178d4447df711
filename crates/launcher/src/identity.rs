//! The identity of a state directory: the name under which its control groups, links and uids are
//! known on this host.
//!
//! It is random, made once, and stored as `<state>/identity` together with the directory's inode,
//! birth time and device. A renamed directory keeps all of these, so it keeps its identity and its
//! running sandboxes. A copied directory has different ones: it gets a new identity, and records
//! that were made under the former one no longer refer to a process, a group or a uid of this host.
//!
//! [`examine_identity`] changes nothing, so that a start can fail without having changed the directory;
//! [`ExaminedIdentity::assign_identity`] writes. The identity is written last: a start that is killed half-way
//! repeats the same steps.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::{Deserialize, Serialize};

use crate::process::record::boot_id;
use crate::volumes::{self, VolumeError};

const IDENTITY_FILE: &str = "identity";

/// The identity of a server on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerIdentity {
    /// Part of the names of control groups, packet filters and links.
    pub instance: String,
    /// Whether records without a signature belong to this server, because the directory was made by
    /// a version that did not sign records.
    pub owns_unsigned_records: bool,
    /// Whether network `auto` is `on` where sandboxes cannot have a link too: not in a directory that was made by a
    /// version in which it was `off` there.
    #[serde(default)]
    pub auto_without_link: bool,
}

/// How a directory without an identity is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceNaming {
    /// The name that older versions used for this directory.
    pub former: String,
    /// The prefix of a new name, if the operator chose one.
    pub prefix: Option<String>,
}

/// Where the identity of a directory comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityOrigin {
    /// The directory is new.
    New,
    /// The directory was made by a version that derived the name from the path. It keeps that name
    /// and its running sandboxes.
    Upgraded,
    Known,
    /// The directory is a copy of a directory with this identity.
    CopyOf(String),
}

/// The identity that a directory has or will have.
#[derive(Debug)]
pub struct ExaminedIdentity {
    pub origin: IdentityOrigin,
    pub identity: ServerIdentity,
    state: PathBuf,
    /// The content to write; `None` if the file is already correct.
    fresh: Option<IdentityFile>,
}

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("`{0}` is not a valid identity file")]
    Malformed(PathBuf),
    #[error(
        "`{state}` is a copy of another state directory, but the server of the original is using its disk `{disk}`"
    )]
    SharedDisk { state: PathBuf, disk: PathBuf },
    #[error(transparent)]
    Disks(#[from] VolumeError),
}

impl IdentityError {
    /// Returns advice for the operator.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Malformed(_) => Some(
                "remove the file: sandboxes that are still running are then not adopted, their files stay",
            ),
            Self::SharedDisk { .. } => Some(
                "copy the disks too, instead of linking to them; `coracle backup` and `coracle restore` do that",
            ),
            Self::Disks(error) => error.hint(),
            Self::Io { .. } => None,
        }
    }
}

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct IdentityFile {
    instance: String,
    #[serde(default)]
    owns_unsigned_records: bool,
    #[serde(default)]
    auto_without_link: bool,
    #[serde(flatten)]
    fingerprint: DirectoryFingerprint,
}

/// The properties that distinguish a directory from its copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct DirectoryFingerprint {
    inode: u64,
    /// Seconds and nanoseconds, where the filesystem records it.
    born: Option<(i64, u32)>,
    device: (u32, u32),
    boot: String,
}

impl DirectoryFingerprint {
    fn of_directory(directory: &Path) -> io::Result<Self> {
        let wanted = StatxFlags::INO | StatxFlags::BTIME;
        let found = statx(CWD, directory, AtFlags::empty(), wanted)?;
        let has_birth = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
        Ok(Self {
            inode: found.stx_ino,
            born: has_birth.then_some((found.stx_btime.tv_sec, found.stx_btime.tv_nsec)),
            device: (found.stx_dev_major, found.stx_dev_minor),
            boot: boot_id()?.to_owned(),
        })
    }

    /// Whether both describe the same directory.
    ///
    /// Device numbers are not stable across reboots, so the birth time decides then. Within one boot
    /// they are stable, and they distinguish a snapshot of a whole filesystem, which keeps inodes and
    /// birth times, from the original. Without birth times only the device can be compared. If a
    /// device got another number, the directory is then taken for a copy of itself, which does no
    /// harm after a reboot because no sandbox is running.
    fn is_same_directory(&self, other: &Self) -> bool {
        let same_birth = self.born.is_some() && self.born == other.born;
        let same_device = self.device == other.device;
        let distinct = self.born.is_some() && other.born.is_some() && !same_birth;
        let rebooted = self.boot != other.boot;
        self.inode == other.inode && !distinct && (same_device || (rebooted && same_birth))
    }
}

/// Finds out which identity the directory has or needs, and whether it can be used. Changes nothing.
pub fn examine_identity(state: &Path, naming: &InstanceNaming) -> Result<ExaminedIdentity, IdentityError> {
    let place = DirectoryFingerprint::of_directory(state).during("examine", state)?;
    let (origin, fresh) = match read_identity(state)? {
        Some(stored) if stored.fingerprint == place => {
            let identity = identity_of(&stored);
            return Ok(ExaminedIdentity {
                origin: IdentityOrigin::Known,
                identity,
                state: state.to_owned(),
                fresh: None,
            });
        }
        Some(stored) if stored.fingerprint.is_same_directory(&place) => {
            (IdentityOrigin::Known, IdentityFile { fingerprint: place, ..stored })
        }
        Some(stored) => {
            check_copied_disks(state)?;
            let auto_without_link = stored.auto_without_link;
            let fresh = new_identity(naming, place).during("name", state)?;
            (IdentityOrigin::CopyOf(stored.instance), IdentityFile { auto_without_link, ..fresh })
        }
        None if has_sandboxes(state)? => {
            let instance = naming.former.clone();
            (
                IdentityOrigin::Upgraded,
                IdentityFile {
                    instance,
                    owns_unsigned_records: true,
                    auto_without_link: false,
                    fingerprint: place,
                },
            )
        }
        None => (IdentityOrigin::New, new_identity(naming, place).during("name", state)?),
    };
    Ok(ExaminedIdentity {
        origin,
        identity: identity_of(&fresh),
        state: state.to_owned(),
        fresh: Some(fresh),
    })
}

impl ExaminedIdentity {
    /// Gives the directory this identity. Call it with the directory locked.
    pub fn assign_identity(self) -> Result<ServerIdentity, IdentityError> {
        if let IdentityOrigin::CopyOf(former) = &self.origin {
            tracing::warn!(
                former,
                instance = self.identity.instance,
                "state directory is a copy; it gets a new identity, and its sandboxes count as stopped"
            );
            self.drop_original_claims()?;
        }
        if let Some(fresh) = &self.fresh {
            write_identity(&self.state, fresh)?;
        }
        Ok(self.identity)
    }

    /// Removes the original's claims on uids and control groups of this host from the copy. The
    /// records of sandboxes need no change, because they are signed.
    fn drop_original_claims(&self) -> Result<(), IdentityError> {
        volumes::copied_disks::renew_pool_identifier(&self.state.join("disk"))?;
        let ranges = self.state.join("ranges");
        for entry in list_entries(&ranges)? {
            fs::remove_file(&entry).during("remove", &entry)?;
        }
        let groups = self.state.join("groups");
        match fs::remove_file(&groups) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).during("remove", &groups),
            _ => Ok(()),
        }
    }
}

/// Makes sure that a directory restored from a backup is recognised as a copy, even if the
/// filesystem gave it the inode of the original.
pub fn mark_as_copy(state: &Path) -> Result<(), IdentityError> {
    let path = state.join(IDENTITY_FILE);
    let mut file = read_identity(state)?.ok_or(IdentityError::Malformed(path))?;
    file.fingerprint = DirectoryFingerprint { inode: 0, born: None, ..file.fingerprint };
    write_identity(state, &file)
}

/// Returns the identity of a directory, if it has one.
pub fn stored_instance(state: &Path) -> Result<Option<String>, IdentityError> {
    Ok(read_identity(state)?.map(|stored| stored.instance))
}

fn identity_of(file: &IdentityFile) -> ServerIdentity {
    ServerIdentity {
        instance: file.instance.clone(),
        owns_unsigned_records: file.owns_unsigned_records,
        auto_without_link: file.auto_without_link,
    }
}

fn new_identity(naming: &InstanceNaming, place: DirectoryFingerprint) -> io::Result<IdentityFile> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let random = u64::from_ne_bytes(random);
    let instance = match &naming.prefix {
        Some(prefix) => format!("{prefix}-{random:016x}"),
        None => format!("c{random:016x}"),
    };
    Ok(IdentityFile { instance, owns_unsigned_records: false, auto_without_link: true, fingerprint: place })
}

/// Whether an older version left records of sandboxes here. Without any there is no reason to keep
/// the former name.
fn has_sandboxes(state: &Path) -> Result<bool, IdentityError> {
    Ok(!list_entries(&state.join("boxes"))?.is_empty())
}

fn check_copied_disks(state: &Path) -> Result<(), IdentityError> {
    match volumes::copied_disks::disk_in_use(&state.join("disk"))? {
        Some(disk) => Err(IdentityError::SharedDisk { state: state.to_owned(), disk }),
        None => Ok(()),
    }
}

fn read_identity(state: &Path) -> Result<Option<IdentityFile>, IdentityError> {
    let path = state.join(IDENTITY_FILE);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.during("read", &path)?,
    };
    let file: IdentityFile =
        serde_json::from_slice(&text).map_err(|_malformed| IdentityError::Malformed(path.clone()))?;
    // The instance name becomes part of paths.
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let valid = (1..=64).contains(&file.instance.len()) && file.instance.bytes().all(plain);
    if valid { Ok(Some(file)) } else { Err(IdentityError::Malformed(path)) }
}

/// Writes the file atomically and durably: a power loss cannot undo it.
fn write_identity(state: &Path, file: &IdentityFile) -> Result<(), IdentityError> {
    let (path, draft) = (state.join(IDENTITY_FILE), state.join(format!("{IDENTITY_FILE}.new")));
    let text = serde_json::to_vec(file).map_err(io::Error::other).during("describe", &path)?;
    let options = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft);
    options
        .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
        .during("write", &draft)?;
    fs::rename(&draft, &path).during("write", &path)?;
    File::open(state).and_then(|state| state.sync_all()).during("write out", state)
}

fn list_entries(directory: &Path) -> Result<Vec<PathBuf>, IdentityError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.during("list", directory)?,
    };
    let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    paths.during("list", directory)
}

/// Adds the attempted action and the path to an error.
trait IdentityErrorContext<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, IdentityError>;
}

impl<T> IdentityErrorContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, IdentityError> {
        self.map_err(|source| IdentityError::Io { action, path: path.to_owned(), source })
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn naming() -> InstanceNaming {
        InstanceNaming { former: "cformer".to_owned(), prefix: None }
    }

    fn assign(state: &Path) -> (IdentityOrigin, ServerIdentity) {
        let examined = examine_identity(state, &naming()).unwrap();
        (examined.origin.clone(), examined.assign_identity().unwrap())
    }

    #[test]
    fn renamed_directory_keeps_its_identity() {
        let parent = TempDir::new().unwrap();
        let (first, second) = (parent.path().join("a"), parent.path().join("b"));
        fs::create_dir(&first).unwrap();
        let (origin, identity) = assign(&first);
        assert_eq!(origin, IdentityOrigin::New);
        fs::rename(&first, &second).unwrap();
        assert_eq!(assign(&second), (IdentityOrigin::Known, identity));
    }

    #[test]
    fn copied_directory_gets_a_new_identity_and_drops_claims() {
        let parent = TempDir::new().unwrap();
        let (first, second) = (parent.path().join("a"), parent.path().join("b"));
        for state in [&first, &second] {
            fs::create_dir_all(state.join("ranges")).unwrap();
        }
        let (_, original) = assign(&first);
        fs::copy(first.join(IDENTITY_FILE), second.join(IDENTITY_FILE)).unwrap();
        fs::write(second.join("ranges/7"), "x 1").unwrap();
        fs::write(second.join("groups"), "/sys/fs/cgroup/x\n").unwrap();
        let (origin, copy) = assign(&second);
        assert_eq!(origin, IdentityOrigin::CopyOf(original.instance.clone()));
        assert_ne!(copy.instance, original.instance);
        assert!(!second.join("ranges/7").exists() && !second.join("groups").exists());
        assert_eq!(assign(&second), (IdentityOrigin::Known, copy), "the copy keeps its new identity");
        assert_eq!(assign(&first), (IdentityOrigin::Known, original), "the original is untouched");
    }

    #[test]
    fn examining_a_copy_changes_nothing() {
        let parent = TempDir::new().unwrap();
        let (first, second) = (parent.path().join("a"), parent.path().join("b"));
        fs::create_dir(&first).unwrap();
        fs::create_dir_all(second.join("ranges")).unwrap();
        assign(&first);
        fs::copy(first.join(IDENTITY_FILE), second.join(IDENTITY_FILE)).unwrap();
        fs::write(second.join("ranges/7"), "x 1").unwrap();
        examine_identity(&second, &naming()).unwrap();
        assert_eq!(
            fs::read(first.join(IDENTITY_FILE)).unwrap(),
            fs::read(second.join(IDENTITY_FILE)).unwrap()
        );
        assert!(second.join("ranges/7").exists());
    }

    #[test]
    fn directory_of_an_older_version_keeps_its_former_name() {
        let state = TempDir::new().unwrap();
        fs::create_dir(state.path().join("boxes")).unwrap();
        assert_eq!(
            examine_identity(state.path(), &naming()).unwrap().origin,
            IdentityOrigin::New,
            "nothing to keep"
        );
        fs::write(state.path().join("boxes/a"), "{}").unwrap();
        let (origin, identity) = assign(state.path());
        assert_eq!(origin, IdentityOrigin::Upgraded);
        let instance = "cformer".to_owned();
        let expected = ServerIdentity { instance, owns_unsigned_records: true, auto_without_link: false };
        assert_eq!(identity, expected);
        assert_eq!(assign(state.path()), (IdentityOrigin::Known, identity));
    }

    #[test]
    fn directory_of_an_earlier_version_keeps_its_network() {
        let parent = TempDir::new().unwrap();
        let (state, copy) = (parent.path().join("a"), parent.path().join("b"));
        fs::create_dir(&state).unwrap();
        assert!(assign(&state).1.auto_without_link, "it is new");
        let file = fs::read_to_string(state.join(IDENTITY_FILE)).unwrap();
        let earlier = file.replace("\"auto_without_link\":true,", "");
        assert_ne!(earlier, file);
        fs::write(state.join(IDENTITY_FILE), &earlier).unwrap();
        assert!(!assign(&state).1.auto_without_link);
        fs::create_dir(&copy).unwrap();
        fs::write(copy.join(IDENTITY_FILE), &earlier).unwrap();
        assert!(!assign(&copy).1.auto_without_link, "a copy behaves like the original");
    }

    #[test]
    fn chosen_name_becomes_a_prefix() {
        let state = TempDir::new().unwrap();
        let naming = InstanceNaming { prefix: Some("blue".to_owned()), ..naming() };
        let identity = examine_identity(state.path(), &naming).unwrap().identity;
        assert!(identity.instance.starts_with("blue-"), "{identity:?}");
    }

    #[test]
    fn malformed_identity_is_refused() {
        let state = TempDir::new().unwrap();
        for text in ["", "{}", r#"{"instance":"../x","inode":1,"born":null,"device":[1,1],"boot":"b"}"#] {
            fs::write(state.path().join(IDENTITY_FILE), text).unwrap();
            assert!(
                matches!(examine_identity(state.path(), &naming()), Err(IdentityError::Malformed(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn fingerprints_differ_by_inode_birth_and_device() {
        let place = |inode, born, minor, boot: &str| DirectoryFingerprint {
            inode,
            born,
            device: (8, minor),
            boot: boot.to_owned(),
        };
        let one = place(1, Some((5, 5)), 1, "x");
        assert!(one.is_same_directory(&one));
        assert!(
            one.is_same_directory(&place(1, Some((5, 5)), 2, "y")),
            "device numbers change with a reboot"
        );
        assert!(
            !one.is_same_directory(&place(1, Some((5, 5)), 2, "x")),
            "a snapshot of the whole filesystem"
        );
        assert!(!one.is_same_directory(&place(1, Some((5, 6)), 1, "x")));
        assert!(!one.is_same_directory(&place(2, Some((5, 5)), 1, "x")));
        let without = place(1, None, 1, "x");
        assert!(without.is_same_directory(&place(1, None, 1, "y")));
        assert!(!without.is_same_directory(&place(1, None, 2, "y")));
        assert!(
            without.is_same_directory(&place(1, Some((5, 5)), 1, "x")),
            "a newer kernel shows the birth time"
        );
    }
}
