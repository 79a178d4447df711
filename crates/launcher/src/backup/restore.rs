//! Restores a state directory from a backup.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use linux::fs::RootDirectory;
use rustix::fs::{AtFlags, CWD, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};
use serde::Serialize;
use tar::{Archive, Entry, EntryType};

use super::archive::{ARCHIVE_VERSION, MANIFEST_NAME, PART_PREFIX, SummingReader};
use super::tree::{
    ATTRIBUTE_KEY_PREFIX, ATTRIBUTE_KEY_PREFIX_V1, KEPT_ATTRIBUTE_PREFIX, from_hex, path_in_directory,
};
use super::{
    BackupError, BackupErrorContext, BackupManifest, BackupPart, MIN_FREE_SPACE, ProgressReport,
    require_space, sync_parent,
};
use crate::identity;

/// The names that may be at the top of a restored state directory.
const KNOWN_ENTRIES: [&str; 6] = ["server", "identity", "boxes", "snapshots", "disk", "images"];
/// No manifest is longer.
const MAX_MANIFEST_SIZE: u64 = 16 << 20;

/// A state directory that was restored.
#[derive(Clone, Debug, Serialize)]
pub struct RestoredState {
    pub state_dir: PathBuf,
    pub manifest: BackupManifest,
}

/// Restores a backup as the state directory `target`, which must be empty or absent. The directory has
/// another name until it is complete and its checksums are verified.
pub fn restore_backup(
    file: &Path,
    target: &Path,
    report: ProgressReport<'_>,
) -> Result<RestoredState, BackupError> {
    check_target(target)?;
    let source = File::open(file).during("open", file)?;
    let parent = target.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o755).create(parent).during("make", parent)?;
    let name = target.file_name().unwrap_or(OsStr::new("state")).to_string_lossy().into_owned();
    let draft = parent.join(format!(".{name}.restoring-{}", std::process::id()));
    fs::DirBuilder::new().mode(0o700).create(&draft).during("make", &draft)?;
    let outcome = unpack_archive(&source, file, &draft, report).and_then(|manifest| {
        identity::mark_as_copy(&draft).map_err(|error| BackupError::Io {
            action: "mark as restored",
            path: draft.clone(),
            source: io::Error::other(error),
        })?;
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o711))
            .during("open to the server", &draft)?;
        let opened = File::open(&draft).during("open", &draft)?;
        rustix::fs::syncfs(&opened).map_err(io::Error::from).during("write out", &draft)?;
        put_in_place(&draft, target)?;
        Ok(manifest)
    });
    if outcome.is_err() {
        let removed = RootDirectory::open(parent)
            .and_then(|parent| parent.remove_tree(Path::new(draft.file_name().unwrap_or_default())));
        if let Err(error) = removed {
            tracing::warn!(%error, path = %draft.display(), "could not remove a restore that failed");
        }
    }
    Ok(RestoredState { state_dir: target.to_owned(), manifest: outcome? })
}

fn check_target(target: &Path) -> Result<(), BackupError> {
    match fs::read_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        entries => match entries.during("list", target)?.next() {
            Some(_) => Err(BackupError::NotEmpty(target.to_owned())),
            None => Ok(()),
        },
    }
}

/// Renames the directory to `target`. An empty directory there is replaced; one that was filled
/// meanwhile is not.
fn put_in_place(draft: &Path, target: &Path) -> Result<(), BackupError> {
    let renamed = rustix::fs::renameat_with(CWD, draft, CWD, target, RenameFlags::empty());
    match renamed {
        Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => {
            return Err(BackupError::NotEmpty(target.to_owned()));
        }
        renamed => renamed.map_err(io::Error::from).during("name", target)?,
    }
    sync_parent(target)
}

/// Unpacks everything and compares the checksums.
fn unpack_archive(
    source: &File,
    file: &Path,
    draft: &Path,
    report: ProgressReport<'_>,
) -> Result<BackupManifest, BackupError> {
    let damaged = |why: String| BackupError::Damaged { path: file.to_owned(), why };
    let decoder = zstd::Decoder::new(source).during("read", file)?;
    let (reader, sums) = SummingReader::new(decoder, report);
    let mut archive = Archive::new(reader);
    let is_root = linux::privileges::is_host_root();
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(is_root);
    archive.set_mask(0);
    archive.set_unpack_xattrs(false);
    let mut restoring =
        RestoreWriter { root: RootDirectory::open(draft).during("open", draft)?, times: Vec::new(), is_root };
    let mut parts: Vec<BackupPart> = Vec::new();
    let (mut current, mut whole, mut manifest): (Option<String>, String, Option<BackupManifest>) =
        Default::default();
    for entry in archive.entries().during("read", file)? {
        let mut entry = entry.map_err(|error| damaged(error.to_string()))?;
        let path = entry.path().map_err(|error| damaged(error.to_string()))?.into_owned();
        let name = path.to_string_lossy().into_owned();
        if let Some(part) = name.strip_prefix(PART_PREFIX) {
            let former = current.replace(part.to_owned());
            let ended = sums.borrow_mut().end_part(former.as_deref().unwrap_or_default());
            parts.extend(former.map(|_| ended));
            whole = sums.borrow().total_checksum();
        } else if name == MANIFEST_NAME && current.as_deref() == Some("manifest") {
            let mut text = Vec::new();
            let read = (&mut entry).take(MAX_MANIFEST_SIZE).read_to_end(&mut text);
            read.map_err(|error| damaged(error.to_string()))?;
            manifest = Some(serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?);
        } else {
            let known = path.components().next().is_some_and(|first| {
                matches!(first, Component::Normal(first) if KNOWN_ENTRIES.iter().any(|known| first == *known))
            });
            if !known {
                return Err(damaged(format!("it holds `{name}`")));
            }
            let placement = EntryPlacement::of_path(&path).map_err(&damaged)?;
            let size = stored_size(&mut entry).map_err(|error| damaged(format!("`{name}`: {error}")))?;
            require_space(draft, size.saturating_add(MIN_FREE_SPACE))?;
            let placed = restoring.write_entry(&mut entry, &path, placement);
            placed.map_err(|error| damaged(format!("`{name}`: {error}")))?;
        }
    }
    let manifest = manifest.ok_or_else(|| damaged("its end is missing".to_owned()))?;
    // The frame's own checksum comes after the last entry.
    let mut rest = archive.into_inner();
    io::copy(&mut rest, &mut io::sink()).map_err(|error| damaged(error.to_string()))?;
    check_manifest(&manifest, &parts, &whole, is_root, &damaged)?;
    restoring.set_times().during("set the times in", draft)?;
    Ok(manifest)
}

fn check_manifest(
    manifest: &BackupManifest,
    parts: &[BackupPart],
    whole: &str,
    is_root: bool,
    damaged: &dyn Fn(String) -> BackupError,
) -> Result<(), BackupError> {
    if manifest.version > ARCHIVE_VERSION {
        return Err(damaged(format!("version {} is newer than this program", manifest.version)));
    }
    if manifest.of_root != is_root {
        return Err(BackupError::OtherUser(if manifest.of_root { "root" } else { "an ordinary user" }));
    }
    for (expected, found) in manifest.parts.iter().zip(parts) {
        if expected != found {
            return Err(damaged(format!("the checksum of part `{}` is wrong", expected.name)));
        }
    }
    if manifest.parts.len() != parts.len() || manifest.checksum != whole {
        return Err(damaged("its checksum is wrong".to_owned()));
    }
    Ok(())
}

/// The kinds of entries that are allowed depend on their path: the server trusts its own directories,
/// and opens files in them as root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryPlacement {
    /// Directories and files of the server, which belong to root and are closed to others.
    Private,
    /// The top directory of a layer, with the owner and mode that it has in the image.
    LayerTop,
    /// Within a layer: links, owners and modes are those of the image.
    Layer,
}

impl EntryPlacement {
    fn of_path(path: &Path) -> Result<Self, String> {
        let parts: Option<Vec<&OsStr>> = path
            .components()
            .map(|part| if let Component::Normal(name) = part { Some(name) } else { None })
            .collect();
        let Some(parts) = parts else { return Err(format!("it holds the path `{}`", path.display())) };
        let is = |index: usize, name: &str| parts.get(index).is_some_and(|part| *part == name);
        let base = parts.get(1).is_some_and(|part| part.as_encoded_bytes().starts_with(b"base-"));
        // A layer is `images/layers/<digest>/<tree>`, the base `images/base-<version>`.
        let depth_of_top = match (is(0, "images"), is(1, "layers"), base) {
            (true, true, _) => 4,
            (true, _, true) => 2,
            _ => return Ok(Self::Private),
        };
        Ok(match parts.len().cmp(&depth_of_top) {
            std::cmp::Ordering::Less => Self::Private,
            std::cmp::Ordering::Equal => Self::LayerTop,
            std::cmp::Ordering::Greater => Self::Layer,
        })
    }
}

/// How many bytes an entry takes up, without holes. The archive cannot yield more for it.
fn stored_size<R: Read>(entry: &mut Entry<'_, R>) -> io::Result<u64> {
    if entry.header().entry_type() != EntryType::GNUSparse {
        return Ok(entry.size());
    }
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        if extension?.key_bytes() == b"size" {
            return Err(io::Error::other("it has two sizes"));
        }
    }
    entry.header().entry_size()
}

struct RestoreWriter {
    root: RootDirectory,
    /// The times of directories, which change as they are filled.
    times: Vec<(PathBuf, i64)>,
    is_root: bool,
}

impl RestoreWriter {
    /// Writes one entry to its path. Paths lead through no links, so nothing is written elsewhere.
    fn write_entry<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        path: &Path,
        placement: EntryPlacement,
    ) -> io::Result<()> {
        let header = entry.header();
        let (mode, uid, gid) = match placement {
            EntryPlacement::Private => (0o700, 0, 0),
            EntryPlacement::LayerTop | EntryPlacement::Layer => {
                (header.mode()?, parse_id(header.uid()?)?, parse_id(header.gid()?)?)
            }
        };
        let mtime = header.mtime()?.cast_signed();
        let kind = header.entry_type();
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            self.root.make_directories(parent, 0o700)?;
        }
        let attributes = read_attributes(entry)?;
        match kind {
            EntryType::Directory => {
                match self.root.make_directory(path, 0o700) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    made => made?,
                }
                self.set_owner(path, uid, gid)?;
                self.root.set_mode(path, mode & 0o7777)?;
                self.times.push((path.to_owned(), mtime));
            }
            EntryType::Regular | EntryType::GNUSparse => {
                let (directory, name) = self.parent_of(path)?;
                entry.unpack(path_in_directory(&directory, name))?;
                if placement != EntryPlacement::Layer {
                    self.set_owner(path, 0, 0)?;
                    self.root.set_mode(path, 0o600)?;
                }
            }
            other if placement != EntryPlacement::Layer => {
                return Err(io::Error::other(format!("unexpected kind {other:?} outside of a layer")));
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().ok_or_else(missing_name)?.into_owned();
                self.root.create_symlink(Path::new(OsStr::from_bytes(&target)), path)?;
                self.set_owner(path, uid, gid)?;
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().ok_or_else(missing_name)?.into_owned();
                let target = Path::new(OsStr::from_bytes(&target));
                if EntryPlacement::of_path(target) != Ok(EntryPlacement::Layer) {
                    return Err(io::Error::other("it is another name of a file outside of a layer"));
                }
                self.root.create_hard_link(target, path)?;
            }
            EntryType::Char => {
                self.root.make_whiteout(path)?;
                self.set_owner(path, uid, gid)?;
            }
            EntryType::Fifo => {
                self.root.make_fifo(path, mode & 0o7777)?;
                self.set_owner(path, uid, gid)?;
            }
            other => return Err(io::Error::other(format!("unexpected kind {other:?}"))),
        }
        if placement == EntryPlacement::Private { Ok(()) } else { self.set_attributes(path, &attributes) }
    }

    fn set_owner(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        if self.is_root { self.root.set_owner(path, uid, gid) } else { Ok(()) }
    }

    fn parent_of<'a>(&self, path: &'a Path) -> io::Result<(File, &'a OsStr)> {
        let name = path.file_name().ok_or_else(missing_name)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok((self.root.open_with(parent, OFlags::PATH | OFlags::DIRECTORY, 0)?, name))
    }

    fn set_attributes(&self, path: &Path, attributes: &[ExtendedAttribute]) -> io::Result<()> {
        if attributes.is_empty() {
            return Ok(());
        }
        let file = self.root.open_with(path, OFlags::RDONLY | OFlags::NONBLOCK, 0)?;
        for (name, value) in attributes {
            rustix::fs::fsetxattr(&file, name.as_slice(), value, XattrFlags::empty())?;
        }
        Ok(())
    }

    fn set_times(&self) -> io::Result<()> {
        for (path, seconds) in self.times.iter().rev() {
            let time = Timespec { tv_sec: *seconds, tv_nsec: 0 };
            let times = Timestamps { last_access: time, last_modification: time };
            let (directory, name) = self.parent_of(path)?;
            rustix::fs::utimensat(&directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

/// The name and the value of an extended attribute.
type ExtendedAttribute = (Vec<u8>, Vec<u8>);

/// The attributes of an entry that are kept.
fn read_attributes<R: Read>(entry: &mut Entry<'_, R>) -> io::Result<Vec<ExtendedAttribute>> {
    let Some(extensions) = entry.pax_extensions()? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for extension in extensions {
        let extension = extension?;
        let (key, value) = (extension.key_bytes(), extension.value_bytes());
        let attribute = if let Some(name) = key.strip_prefix(ATTRIBUTE_KEY_PREFIX.as_bytes()) {
            from_hex(name).zip(from_hex(value)).ok_or_else(|| io::Error::other("an attribute is damaged"))?
        } else if let Some(name) = key.strip_prefix(ATTRIBUTE_KEY_PREFIX_V1.as_bytes()) {
            (name.to_vec(), value.to_vec())
        } else {
            continue;
        };
        if attribute.0.starts_with(KEPT_ATTRIBUTE_PREFIX.as_bytes()) {
            found.push(attribute);
        }
    }
    Ok(found)
}

fn parse_id(number: u64) -> io::Result<u32> {
    u32::try_from(number).map_err(io::Error::other)
}

fn missing_name() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it has no name")
}

#[cfg(test)]
mod tests;
