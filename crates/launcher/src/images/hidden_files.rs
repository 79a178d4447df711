//! Files of the host that not everyone may read, hidden from sandboxes of the image `host`.
//!
//! Root inside can read every file of a lower layer whose owner is mapped, whatever its mode. So a layer of
//! whiteouts lies above each tree of the host. It hides files without read permission for others, and
//! directories without read or search permission for others, with everything below them.
//!
//! ```text
//! <state>/hidden/record         the stamps of the directories that were walked, and the layers made from them
//! <state>/hidden/<version>/usr  the layer above /usr: whiteouts, and the directories that lead to them
//! ```
//!
//! Finding these files takes a walk over all of `/usr`. The result is recorded with the identity and times of
//! some directories and of the package database, and is used again as long as these are unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;
use linux::mounts::{self, MountDepth};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::path_stamp::PathStamp;
use super::{HostImage, ImageError, ImageErrorContext, ImageTree};
use crate::volumes::tree_name;

/// The version of the records of earlier walks. Increase it when this code would hide the same files differently, or would
/// repeat a walk after other changes of the host: an update of Coracle then does not rely on what a former version recorded.
const FORMAT_VERSION: u32 = 2;

const RECORD_NAME: &str = "record";

/// Directories that are stamped with the directories directly in them. Files are put into those of `/usr/local` by hand,
/// without a package database that would show it.
const STAMPED_DIRECTORIES: [&str; 2] = ["/usr", "/usr/local"];

/// The databases of dpkg, rpm, apk and pacman: files of `/usr` seldom change without them.
const PACKAGE_DATABASES: [&str; 6] = [
    "/var/lib/dpkg/status",
    "/var/lib/rpm",
    "/var/lib/rpm/rpmdb.sqlite",
    "/usr/lib/sysimage/rpm",
    "/lib/apk/db/installed",
    "/var/lib/pacman/local",
];

/// The files of one tree that are hidden.
#[derive(Debug, Default, PartialEq, Eq)]
struct HiddenFiles {
    /// Relative to the tree; nothing below a hidden directory is listed.
    paths: Vec<PathBuf>,
    /// The directories above them, for their modes and owners.
    directories: BTreeMap<PathBuf, DirectoryAttributes>,
}

/// The attributes of a directory. A directory that is in several layers has those of the topmost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DirectoryAttributes {
    mode: u32,
    uid: u32,
    gid: u32,
    modified: (i64, i64),
}

/// The recorded result of a walk.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct HiddenRecord {
    format: u32,
    /// The server for which the walk was made, if it was made for one.
    made_for: Option<String>,
    stamps: Vec<PathStamp>,
    /// The trees that were walked, by mount point.
    walked: Vec<String>,
    version: String,
    /// The mount points of trees that have a layer.
    layers: Vec<String>,
    /// The mount points of trees that are hidden completely.
    dropped: Vec<String>,
}

/// Hides files of the host's trees that not everyone may read, with layers below `dir`.
///
/// A recorded walk is used while its stamps are unchanged; for a `server` only if it was made for that
/// server, so that each start of a server walks again.
pub fn hide_unreadable_files(
    image: HostImage,
    dir: &Path,
    server: Option<String>,
) -> Result<HostImage, ImageError> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).during("make", dir)?;
    let walked: Vec<&ImageTree> = host_trees(&image).collect();
    let record = match read_record(dir).filter(|record| record.is_valid(dir, &walked, server.as_ref())) {
        Some(record) => record,
        None => make_layers(dir, &walked, server)?,
    };
    let hide = |tree: ImageTree| {
        if record.dropped.contains(&tree.mount_point) {
            return None;
        }
        let mut lowers = tree.lowers;
        if record.layers.contains(&tree.mount_point) {
            lowers.insert(0, dir.join(&record.version).join(tree_name(&tree.mount_point)));
        }
        Some(ImageTree { mount_point: tree.mount_point, lowers })
    };
    Ok(HostImage { trees: image.trees.into_iter().filter_map(hide).collect() })
}

/// Lists the paths of the host that sandboxes of the image `host` do not see.
pub fn list_hidden_paths(image: &HostImage) -> Result<Vec<PathBuf>, ImageError> {
    let mut all = Vec::new();
    for tree in host_trees(image) {
        let root = Path::new(&tree.mount_point);
        if is_unreadable_root(root)? {
            all.push(root.to_owned());
        }
        all.extend(walk_tree(root)?.paths.into_iter().map(|path| root.join(path)));
    }
    Ok(all)
}

/// Removes the layers of earlier walks, unless a sandbox could still use one; `are_used` is only called if
/// there are any.
pub fn remove_old_layers(dir: &Path, are_used: impl FnOnce() -> io::Result<bool>) -> Result<(), ImageError> {
    let current = read_record(dir).map(|record| record.version);
    let store = RootDirectory::open(dir).during("open", dir)?;
    let entries = store.list_entries().during("list", dir)?;
    let names = entries.iter().map(|entry| std::ffi::OsStr::from_bytes(entry.name.to_bytes()));
    let is_kept = |name: &&std::ffi::OsStr| {
        *name == RECORD_NAME || current.as_ref().is_some_and(|version| *name == version.as_str())
    };
    let old: Vec<_> = names.filter(|name| !is_kept(name)).collect();
    if old.is_empty() || are_used().during("look for users of", dir)? {
        return Ok(());
    }
    old.into_iter().map(Path::new).try_for_each(|name| store.remove_tree(name).during("remove", name))
}

/// The trees that show directories of the host as they are; the skeleton holds only copies.
fn host_trees(image: &HostImage) -> impl Iterator<Item = &ImageTree> {
    image.trees.iter().filter(|tree| tree.mount_point != "/")
}

fn read_record(dir: &Path) -> Option<HiddenRecord> {
    serde_json::from_slice(&fs::read(dir.join(RECORD_NAME)).ok()?).ok()
}

impl HiddenRecord {
    fn is_valid(&self, dir: &Path, trees: &[&ImageTree], server: Option<&String>) -> bool {
        self.format == FORMAT_VERSION
            && server.is_none_or(|server| self.made_for.as_ref() == Some(server))
            && self.walked.iter().eq(trees.iter().map(|tree| &tree.mount_point))
            && self.stamps.iter().all(|stamp| *stamp == PathStamp::of(&stamp.path))
            && (self.layers.is_empty() || dir.join(&self.version).is_dir())
    }
}

/// Stamps everything whose change makes another walk necessary.
fn take_stamps(trees: &[&ImageTree]) -> Vec<PathStamp> {
    let mut all: Vec<PathBuf> = trees.iter().map(|tree| PathBuf::from(&tree.mount_point)).collect();
    for directory in STAMPED_DIRECTORIES {
        all.push(PathBuf::from(directory));
        all.extend(subdirectories(Path::new(directory)));
    }
    all.extend(PACKAGE_DATABASES.map(PathBuf::from));
    all.sort();
    all.dedup();
    all.iter().map(|path| PathStamp::of(path)).collect()
}

/// The directories directly in a directory; none if it cannot be listed.
fn subdirectories(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// Walks the trees, writes their layers and the record.
fn make_layers(dir: &Path, trees: &[&ImageTree], server: Option<String>) -> Result<HiddenRecord, ImageError> {
    // Before the walk: a change during it must be noticed.
    let stamps = take_stamps(trees);
    let mut found: Vec<(&str, HiddenFiles)> = Vec::new();
    let mut dropped: Vec<String> = Vec::new();
    for tree in trees {
        let root = Path::new(&tree.mount_point);
        let is_below_hidden = |(above, files): &(&str, HiddenFiles)| {
            root.strip_prefix(above)
                .is_ok_and(|path| files.paths.iter().any(|hidden| path.starts_with(hidden)))
        };
        let is_below_dropped = dropped.iter().any(|above| root.starts_with(above));
        if is_unreadable_root(root)? || is_below_dropped || found.iter().any(is_below_hidden) {
            dropped.push(tree.mount_point.clone());
        } else {
            found.push((&tree.mount_point, walk_tree(root)?));
        }
    }
    found.retain(|(_, files)| !files.paths.is_empty());
    let version = layer_version(&found);
    let store = RootDirectory::open(dir).during("open", dir)?;
    if !found.is_empty() && store.stat(Path::new(&version)).is_err() {
        write_layers(&store, Path::new(&version), &found)?;
    }
    let record = HiddenRecord {
        format: FORMAT_VERSION,
        made_for: server,
        stamps,
        walked: trees.iter().map(|tree| tree.mount_point.clone()).collect(),
        version,
        layers: found.iter().map(|(mount_point, _)| (*mount_point).to_owned()).collect(),
        dropped,
    };
    write_record(dir, &record).during("write the record of", dir)?;
    Ok(record)
}

fn write_record(dir: &Path, record: &HiddenRecord) -> io::Result<()> {
    let (draft, path) = (dir.join(".record"), dir.join(RECORD_NAME));
    fs::write(&draft, serde_json::to_vec(record)?)?;
    fs::rename(draft, path)
}

/// Whether a mounted filesystem is hidden completely. `/usr` itself is not: without it no program would
/// start.
fn is_unreadable_root(root: &Path) -> Result<bool, ImageError> {
    let found = fs::metadata(root).during("look at", root)?;
    Ok(root != Path::new("/usr") && !is_open_to_all(FileType::Directory, found.mode()))
}

/// Whether everyone may read a file, or list and enter a directory.
fn is_open_to_all(kind: FileType, mode: u32) -> bool {
    let needed = match kind {
        FileType::Directory => 0o005,
        // The mode of a link means nothing.
        FileType::Symlink => 0,
        _ => 0o004,
    };
    mode & needed == needed
}

/// Finds the hidden files of one filesystem, as the lower layer made from it shows them: without what is
/// mounted below it.
fn walk_tree(root: &Path) -> Result<HiddenFiles, ImageError> {
    // Only root may make a copy of the mount; otherwise the walk does not cross into other mounts.
    let directory = mounts::clone_tree(root, MountDepth::Single).or_else(|_not_permitted| {
        rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from)
    });
    let directory = directory.during("open", root)?;
    let mut hidden = HiddenFiles::default();
    let mut pending = vec![PathBuf::new()];
    while let Some(path) = pending.pop() {
        let listed = list_directory(&directory, &path, &mut hidden, &mut pending);
        listed.map_err(io::Error::from).during("list", &root.join(&path))?;
    }
    hidden.paths.sort();
    hidden.add_directories(&directory, root)?;
    Ok(hidden)
}

/// Adds the hidden entries of one directory to `hidden`, and its directories to `pending`.
fn list_directory(
    root: &OwnedFd,
    path: &Path,
    hidden: &mut HiddenFiles,
    pending: &mut Vec<PathBuf>,
) -> rustix::io::Result<()> {
    let opened = match open_beneath(root, path) {
        Ok(opened) => opened,
        // Something is mounted there, or it was just removed or replaced.
        Err(Errno::XDEV | Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        Err(errno) if path == Path::new("") => return Err(errno),
        // What cannot be examined is hidden: without permission, on a broken disk, with too long a path.
        Err(_unexamined) => {
            hidden.paths.push(path.to_owned());
            return Ok(());
        }
    };
    let is_root = path == Path::new("");
    if !is_root && !is_open_to_all(FileType::Directory, rustix::fs::fstat(&opened)?.st_mode) {
        hidden.paths.push(path.to_owned());
        return Ok(());
    }
    let mut entries = Dir::read_from(&opened)?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let below = || path.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
        let (kind, mode) = match entry.file_type() {
            FileType::Symlink => continue,
            FileType::Directory => {
                pending.push(below());
                continue;
            }
            _ => match rustix::fs::statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => (FileType::from_raw_mode(found.st_mode), found.st_mode),
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(errno),
            },
        };
        match kind {
            // Some filesystems do not tell the type of an entry in a listing.
            FileType::Directory => pending.push(below()),
            kind if !is_open_to_all(kind, mode) => hidden.paths.push(below()),
            _ => {}
        }
    }
    Ok(())
}

fn open_beneath(root: &OwnedFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let path = if path == Path::new("") { Path::new(".") } else { path };
    rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)
}

impl HiddenFiles {
    fn add_directories(&mut self, root_directory: &OwnedFd, root: &Path) -> Result<(), ImageError> {
        for path in &self.paths {
            for above in path.ancestors().skip(1).filter(|above| *above != Path::new("")) {
                if self.directories.contains_key(above) {
                    break;
                }
                match rustix::fs::statat(root_directory, above, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(found) => {
                        self.directories.insert(above.to_owned(), DirectoryAttributes::from(&found));
                    }
                    // It was just removed, and what was to be hidden below it with it.
                    Err(Errno::NOENT | Errno::NOTDIR) => {}
                    Err(errno) => {
                        return Err(io::Error::from(errno)).during("look at", &root.join(above));
                    }
                }
            }
        }
        Ok(())
    }
}

impl From<&Stat> for DirectoryAttributes {
    fn from(found: &Stat) -> Self {
        Self {
            mode: found.st_mode & 0o7777,
            uid: found.st_uid,
            gid: found.st_gid,
            modified: (found.st_mtime, i64::try_from(found.st_mtime_nsec).unwrap_or(0)),
        }
    }
}

/// The name derived from the content of the layers.
fn layer_version(found: &[(&str, HiddenFiles)]) -> String {
    let mut hash = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(&FORMAT_VERSION.to_le_bytes());
    for (mount_point, files) in found {
        part(mount_point.as_bytes());
        files.paths.iter().for_each(|path| part(path.as_os_str().as_bytes()));
        for (path, look) in &files.directories {
            part(path.as_os_str().as_bytes());
            [look.mode, look.uid, look.gid].iter().for_each(|number| part(&number.to_le_bytes()));
        }
    }
    hash.finalize().to_hex().as_str()[..16].to_owned()
}

/// Writes a draft and renames it when it is complete.
fn write_layers(
    store: &RootDirectory,
    version: &Path,
    found: &[(&str, HiddenFiles)],
) -> Result<(), ImageError> {
    let draft = Path::new(".draft");
    store.remove_tree(draft).during("remove", draft)?;
    store.make_directory(draft, 0o755).during("make", draft)?;
    for (mount_point, files) in found {
        let layer = draft.join(tree_name(mount_point));
        store.make_directory(&layer, 0o755).during("make", &layer)?;
        let layer = store.open_subdirectory(&layer).during("open", &layer)?;
        write_layer(&layer, files)?;
    }
    store.rename_without_replacing(draft, version).during("keep the layers", version)
}

fn write_layer(layer: &RootDirectory, files: &HiddenFiles) -> Result<(), ImageError> {
    for path in files.directories.keys() {
        layer.make_directory(path, 0o700).during("make", path)?;
    }
    for path in &files.paths {
        layer.make_whiteout(path).during("hide", path)?;
    }
    // Last, and the deepest first: making an entry changes the times of its directory.
    for (path, look) in files.directories.iter().rev() {
        match layer.set_owner(path, look.uid, look.gid) {
            // An ordinary user may not give files away, and in a container some owners have no id: the directory
            // stays ours then.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput) => {}
            owned => owned.during("set the owner of", path)?,
        }
        layer.set_mode(path, look.mode).during("mark", path)?;
        let time = Timespec { tv_sec: look.modified.0, tv_nsec: look.modified.1 };
        let times = Timestamps { last_access: time, last_modification: time };
        let directory = layer.open_subdirectory(path).during("open", path)?;
        rustix::fs::futimens(directory.as_fd(), &times).map_err(io::Error::from).during("date", path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    use super::*;

    fn make_file(path: &Path, mode: u32) {
        fs::create_dir_all(path.parent().expect("it has one")).expect("our own directory");
        fs::write(path, "x").expect("our own directory");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("our own file");
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("our own file");
    }

    fn image_of(root: &Path) -> HostImage {
        let tree = |path: &Path| {
            let mount_point = path.to_str().expect("text").to_owned();
            ImageTree { mount_point, lowers: vec![path.to_owned()] }
        };
        HostImage { trees: vec![tree(Path::new("/")), tree(root)] }
    }

    /// A tree with an open file, a closed one, and closed directories.
    fn sample() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        set_mode(dir.path(), 0o755);
        make_file(&dir.path().join("bin/open"), 0o755);
        make_file(&dir.path().join("etc/app/key"), 0o640);
        make_file(&dir.path().join("data/db"), 0o644);
        make_file(&dir.path().join("listed/known"), 0o644);
        symlink("/nowhere", dir.path().join("bin/link")).expect("our own directory");
        set_mode(&dir.path().join("data"), 0o700);
        set_mode(&dir.path().join("listed"), 0o711);
        set_mode(&dir.path().join("etc/app"), 0o2775);
        dir
    }

    #[test]
    fn only_what_everyone_may_read_stays() {
        let dir = sample();
        let hidden = walk_tree(dir.path()).expect("it can be walked");
        assert_eq!(hidden.paths, ["data", "etc/app/key", "listed"].map(PathBuf::from));
        let shown: Vec<_> = hidden.directories.keys().cloned().collect();
        assert_eq!(shown, ["etc", "etc/app"].map(PathBuf::from));
    }

    #[test]
    fn layer_holds_whiteouts_below_directories_that_look_alike() {
        let (dir, state) = (sample(), tempfile::tempdir().expect("a directory"));
        let image = hide_unreadable_files(image_of(dir.path()), state.path(), None).expect("it is hidden");
        assert_eq!(image.trees[1].lowers.len(), 2);
        let layer = &image.trees[1].lowers[0];
        let key = fs::symlink_metadata(layer.join("etc/app/key")).expect("a whiteout");
        assert!(key.file_type().is_char_device() && key.rdev() == 0);
        let (ours, theirs) = (layer.join("etc/app"), dir.path().join("etc/app"));
        let look = |path: &Path| {
            let found = fs::metadata(path).expect("a directory");
            (found.mode(), found.uid(), found.mtime())
        };
        assert_eq!(look(&ours), look(&theirs));
        assert!(!layer.join("bin").exists(), "nothing is hidden there");
    }

    #[test]
    fn record_is_used_until_the_tree_changes() {
        let (dir, state) = (sample(), tempfile::tempdir().expect("a directory"));
        let hide = |server: Option<&str>| {
            let server = server.map(str::to_owned);
            hide_unreadable_files(image_of(dir.path()), state.path(), server).expect("it is hidden").trees
        };
        let layer = |trees: &[ImageTree]| trees[1].lowers[0].clone();
        let first = hide(None);
        // A change deep below does not show in any stamp.
        make_file(&dir.path().join("etc/app/other"), 0o600);
        assert_eq!(hide(None), first);
        let fresh = hide(Some("a"));
        assert!(layer(&fresh).join("etc/app/other").symlink_metadata().is_ok(), "a server walks again");
        make_file(&dir.path().join("etc/app/third"), 0o600);
        assert_eq!(hide(Some("a")), fresh, "the same server does not");
        make_file(&dir.path().join("new/fourth"), 0o600);
        let changed = hide(None);
        for name in ["etc/app/third", "new/fourth"] {
            assert!(layer(&changed).join(name).symlink_metadata().is_ok(), "{name}");
        }
        remove_old_layers(state.path(), || Ok(true)).expect("a sandbox uses them");
        assert!(layer(&first).exists());
        remove_old_layers(state.path(), || Ok(false)).expect("no sandbox uses them");
        assert!(!layer(&first).exists() && layer(&changed).exists());
    }

    #[test]
    fn directories_in_usr_and_in_usr_local_are_stamped() {
        let stamped: Vec<PathBuf> = take_stamps(&[]).into_iter().map(|stamp| stamp.path).collect();
        for directory in ["/usr", "/usr/local"].map(Path::new) {
            assert!(stamped.contains(&directory.to_owned()));
            for below in subdirectories(directory) {
                assert!(stamped.contains(&below), "{}", below.display());
            }
        }
        assert!(stamped.contains(&PathBuf::from("/usr/share")), "every system has it");
    }

    #[test]
    fn tree_whose_root_is_closed_is_dropped() {
        let (dir, state) = (sample(), tempfile::tempdir().expect("a directory"));
        set_mode(dir.path(), 0o700);
        let image = hide_unreadable_files(image_of(dir.path()), state.path(), None).expect("it is hidden");
        assert_eq!(image.trees.len(), 1);
        assert_eq!(list_hidden_paths(&image_of(dir.path())).expect("a list")[0], dir.path());
    }

    #[test]
    fn tree_below_a_hidden_directory_is_dropped() {
        let (dir, state) = (sample(), tempfile::tempdir().expect("a directory"));
        let inner = dir.path().join("data/mounted");
        fs::create_dir(&inner).expect("our own directory");
        set_mode(&inner, 0o755);
        let mut image = image_of(dir.path());
        image.trees.extend(image_of(&inner).trees.into_iter().skip(1));
        let hidden = hide_unreadable_files(image, state.path(), None).expect("it is hidden");
        assert_eq!(hidden.trees.len(), 2);
    }
}
