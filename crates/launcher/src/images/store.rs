//! The images of a state directory: adding, finding, listing.
//!
//! ```text
//!  <state>/images/names/<name>        an image, as JSON: written whole, renamed into place
//!  <state>/images/layers/<digest>     a layer: its `tree`, and how many `bytes` it takes up
//!  <state>/images/base-1              what lies below every image: the places jails mount on
//!  <state>/images/draft               what is being made or removed
//! ```
//!
//! A writer holds the lock, so a draft that it finds was left behind by a writer that was killed.
//! Readers need no lock: a name is added after its layers and removed before them.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use linux::fs::RootDirectory;
use rustix::fs::FlockOperation;

use super::layer::write_text;
use super::name::{file_name, with_default_tag};
use super::record::ImageRecord;
use super::{Digest, ImageError, ImageErrorContext};

pub(super) const NAMES_DIRECTORY: &str = "names";
pub(super) const LAYERS_DIRECTORY: &str = "layers";
const DRAFT_DIRECTORY: &str = "draft";
const TREE_DIRECTORY: &str = "tree";
const BYTES_FILE: &str = "bytes";
/// The number changes with the content.
const BASE_DIRECTORY: &str = "base-1";

/// The images, locked for changes.
pub(super) struct ImageStore {
    pub(super) path: PathBuf,
    pub(super) root: RootDirectory,
}

/// Whether to wait while the images are locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockWait {
    Wait,
    GiveUp,
}

impl ImageStore {
    /// Locks the images for changes; returns `None` if they are locked and `patience` is to give
    /// up.
    pub(super) fn lock(state: &Path, patience: LockWait) -> Result<Option<Self>, ImageError> {
        let path = images_directory(state);
        for directory in [path.clone(), path.join(NAMES_DIRECTORY), path.join(LAYERS_DIRECTORY)] {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
            made.during("make", &directory)?;
        }
        let root = RootDirectory::open(&path).during("open", &path)?;
        let operation = match patience {
            LockWait::Wait => FlockOperation::LockExclusive,
            LockWait::GiveUp => FlockOperation::NonBlockingLockExclusive,
        };
        match rustix::fs::flock(&root, operation) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            locked => locked.map_err(io::Error::from).during("lock", &path)?,
        }
        root.remove_tree(Path::new(DRAFT_DIRECTORY)).during("clear", &path)?;
        let store = Self { path, root };
        store.make_base()?;
        Ok(Some(store))
    }

    /// Like [`ImageStore::lock`], but waits for the lock.
    pub(super) fn open(state: &Path) -> Result<Self, ImageError> {
        let locked = Self::lock(state, LockWait::Wait)?;
        Ok(locked.expect("a waiting lock is always acquired"))
    }

    /// Creates an empty directory for unfinished changes.
    pub(super) fn make_draft(&self) -> Result<PathBuf, ImageError> {
        let draft = Path::new(DRAFT_DIRECTORY);
        self.root.remove_tree(draft).during("clear", draft)?;
        self.root.make_directory(draft, 0o700).during("make", draft)?;
        Ok(self.path.join(DRAFT_DIRECTORY))
    }

    pub(super) fn clear_draft(&self) -> Result<(), ImageError> {
        self.root.remove_tree(Path::new(DRAFT_DIRECTORY)).during("clear", Path::new(DRAFT_DIRECTORY))
    }

    /// Turns the tree at `place` of the draft into a layer.
    pub(super) fn add_layer(&self, place: usize, digest: &Digest, bytes: u64) -> Result<(), ImageError> {
        let draft = Path::new(DRAFT_DIRECTORY);
        let layer = draft.join(format!("layer-{place}"));
        self.root.make_directory(&layer, 0o700).during("make", &layer)?;
        let tree = draft.join(place.to_string());
        self.root.rename_without_replacing(&tree, &layer.join(TREE_DIRECTORY)).during("keep", &layer)?;
        let text = bytes.to_string();
        write_text(&self.root, &layer.join(BYTES_FILE), 0o600, text.as_bytes()).during("describe", &layer)?;
        self.root.rename_without_replacing(&layer, &layer_path(digest)).during("keep", &layer)
    }

    /// Stores the image under its name and replaces another of this name.
    pub(super) fn add_name(&self, record: &ImageRecord) -> Result<(), ImageError> {
        let place = Path::new(NAMES_DIRECTORY).join(file_name(&record.name)?);
        let fresh = Path::new(DRAFT_DIRECTORY).join("record");
        let text = serde_json::to_vec(record).map_err(io::Error::other).during("describe", &place)?;
        write_text(&self.root, &fresh, 0o600, &text).during("describe", &place)?;
        self.root.rename(&fresh, &place).during("keep", &place)
    }

    /// Flushes everything to disk before it gets a name; otherwise a power failure could leave
    /// layers whose content does not match their digest.
    pub(super) fn flush(&self) -> Result<(), ImageError> {
        rustix::fs::syncfs(&self.root).map_err(io::Error::from).during("write out", &self.path)
    }

    pub(super) fn list_layers(&self) -> Result<Vec<Digest>, ImageError> {
        list_layers_in(&self.path)
    }

    /// Returns the size of a layer in bytes.
    pub(super) fn layer_bytes(&self, digest: &Digest) -> Result<u64, ImageError> {
        layer_bytes(&self.path, digest)
    }

    /// Moves a name or layer into the draft, from where it is removed.
    pub(super) fn move_away(&self, path: &Path) -> Result<PathBuf, ImageError> {
        let name = path.file_name().unwrap_or_default();
        let away = Path::new(DRAFT_DIRECTORY).join(name);
        self.root.rename_without_replacing(path, &away).during("remove", path)?;
        Ok(away)
    }

    /// Creates the directories that a jail mounts on, for images that lack some of them.
    fn make_base(&self) -> Result<(), ImageError> {
        let base = Path::new(BASE_DIRECTORY);
        if self.root.stat(base).is_ok() {
            return Ok(());
        }
        self.make_draft()?;
        let draft = Path::new(DRAFT_DIRECTORY).join(BASE_DIRECTORY);
        let directories = [
            ("", 0o755),
            ("proc", 0o555),
            ("sys", 0o555),
            ("dev", 0o755),
            ("run", 0o755),
            ("etc", 0o755),
            ("tmp", 0o1777),
            ("root", 0o700),
        ];
        for (name, mode) in directories {
            let path = if name.is_empty() { draft.clone() } else { draft.join(name) };
            let made = self.root.make_directory(&path, mode);
            made.and_then(|()| self.root.set_mode(&path, mode)).during("make", &path)?;
        }
        self.root.rename(&draft, base).during("keep", base)?;
        self.clear_draft()
    }
}

/// Images that are locked against changes.
pub struct LockedImages {
    _store: ImageStore,
}

/// Locks the images against changes. Returns `None` if another process holds the lock for longer than `timeout`.
#[expect(clippy::disallowed_methods, reason = "a lock of a file cannot be waited for with a time limit")]
pub fn lock_images(state: &Path, timeout: Duration) -> Result<Option<LockedImages>, ImageError> {
    const RETRY_INTERVAL: Duration = Duration::from_millis(50);
    let begun = Instant::now();
    loop {
        match ImageStore::lock(state, LockWait::GiveUp)? {
            Some(store) => return Ok(Some(LockedImages { _store: store })),
            None if begun.elapsed() >= timeout => return Ok(None),
            None => std::thread::sleep(RETRY_INTERVAL),
        }
    }
}

/// Returns the size of a layer in bytes, or zero if it is gone.
pub(super) fn layer_bytes_or_zero(state: &Path, digest: &Digest) -> Result<u64, ImageError> {
    match layer_bytes(&images_directory(state), digest) {
        Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(0),
        bytes => bytes,
    }
}

fn layer_bytes(images: &Path, digest: &Digest) -> Result<u64, ImageError> {
    let path = images.join(layer_path(digest)).join(BYTES_FILE);
    let text = fs::read_to_string(&path).during("read", &path)?;
    text.parse().map_err(io::Error::other).during("read", &path)
}

pub(super) fn layer_path(digest: &Digest) -> PathBuf {
    Path::new(LAYERS_DIRECTORY).join(digest.hex())
}

pub(super) fn images_directory(state: &Path) -> PathBuf {
    state.join("images")
}

/// Returns the trees of an image's layers and of the base below all images, topmost first. Of
/// layers that occur twice only the upper one is used: it has everything that the lower one has.
pub(super) fn layer_trees(state: &Path, record: &ImageRecord) -> Vec<PathBuf> {
    let mut trees = trees_at_mount_point(state, record, "/");
    trees.push(images_directory(state).join(BASE_DIRECTORY));
    trees
}

/// Returns the trees of those layers of an image that belong to one mount point, topmost first.
pub(super) fn trees_at_mount_point(state: &Path, record: &ImageRecord, mount_point: &str) -> Vec<PathBuf> {
    let images = images_directory(state);
    let mut seen = std::collections::BTreeSet::new();
    let layers = record.layers.iter().rev().filter(|layer| layer.mount_point == mount_point);
    let layers = layers.filter(|layer| seen.insert(&layer.digest));
    layers.map(|layer| images.join(layer_path(&layer.digest)).join(TREE_DIRECTORY)).collect()
}

/// Returns the digests of all stored layers.
pub fn list_layers(state: &Path) -> Result<Vec<Digest>, ImageError> {
    list_layers_in(&images_directory(state))
}

fn list_layers_in(images: &Path) -> Result<Vec<Digest>, ImageError> {
    let path = images.join(LAYERS_DIRECTORY);
    let entries = match fs::read_dir(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.during("list", &path)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.during("list", &path)?.file_name();
        let digest = name.to_str().and_then(|hex| Digest::parse(&format!("sha256:{hex}")).ok());
        found.extend(digest);
    }
    Ok(found)
}

/// Returns the image `name`, if it exists.
pub fn find_image(state: &Path, name: &str) -> Result<Option<ImageRecord>, ImageError> {
    for name in [Some(name.to_owned()), with_default_tag(name)].into_iter().flatten() {
        // An invalid image name may still be an alias.
        let Ok(file) = file_name(&name) else { return Ok(None) };
        if let Some(record) = read_record(&images_directory(state).join(NAMES_DIRECTORY).join(file))? {
            return Ok(Some(record));
        }
    }
    Ok(None)
}

fn read_record(path: &Path) -> Result<Option<ImageRecord>, ImageError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => {
            let text = text.during("read", path)?;
            serde_json::from_slice(&text).map(Some).map_err(io::Error::other).during("read", path)
        }
    }
}

/// Records that an image is in use, so that it is not removed first.
pub fn touch_image(state: &Path, record: &ImageRecord) -> Result<(), ImageError> {
    let path = images_directory(state).join(NAMES_DIRECTORY).join(file_name(&record.name)?);
    let now = fs::File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
    match now {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        now => now.during("touch", &path),
    }
}

/// Returns all images and when each was last used, sorted by name.
pub fn list_images(state: &Path) -> Result<Vec<(ImageRecord, SystemTime)>, ImageError> {
    let directory = images_directory(state).join(NAMES_DIRECTORY);
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.during("list", &directory)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.during("list", &directory)?.path();
        let used = fs::metadata(&path).and_then(|facts| facts.modified());
        // An image that was removed meanwhile is skipped.
        if let (Some(record), Ok(used)) = (read_record(&path)?, used) {
            found.push((record, used));
        }
    }
    found.sort_by(|one, other| one.0.name.cmp(&other.0.name));
    Ok(found)
}
