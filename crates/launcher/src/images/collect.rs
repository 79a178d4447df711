//! Removing images, and the layers that are not needed any more.
//!
//! There are no reference counts: the users of a layer are looked up when needed. A layer is needed
//! if an image names it, or a record of a sandbox or a snapshot (the *roots*). A record that names
//! a layer is written before the layer is used, and its writer then checks that the layer still
//! exists; the collector moves a layer away and then checks the roots again. So one of the two
//! always notices the other.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::record::ImageRecord;
use super::store::{self, ImageStore, LAYERS_DIRECTORY, LockWait, NAMES_DIRECTORY, layer_path};
use super::{Digest, HOST_IMAGE, ImageError, ImageErrorContext, name};

/// Directories below the state directory with records that may name layers, and the suffix of these
/// records. Each record is a JSON object whose field `made_of` describes the image it is based on.
const RECORD_DIRECTORIES: [(&str, &str); 3] = [("boxes", ""), ("oneshot/boxes", ""), ("snapshots", ".json")];

/// The directory below the state directory with the state of servers of one sandbox, which use the images as well.
pub const OWN_SERVERS_DIRECTORY: &str = "own";

/// The images and layers that a collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CollectionResult {
    /// Images that were removed to free space.
    pub images: Vec<String>,
    pub layers: usize,
    pub bytes: u64,
}

/// Removes an image, even if a sandbox uses its layers: the name is removed at once, the layers
/// when they are not needed any more.
pub fn remove_image(state: &Path, image: &str) -> Result<CollectionResult, ImageError> {
    let place = Path::new(NAMES_DIRECTORY).join(name::file_name(image)?);
    if image == HOST_IMAGE {
        return Err(ImageError::Reserved(image.to_owned()));
    }
    let store = ImageStore::open(state)?;
    store.make_draft()?;
    if store.root.stat(&place).is_err() {
        return Err(ImageError::Unknown(image.to_owned()));
    }
    store.move_away(&place)?;
    remove_unneeded_layers(state, &store)
}

/// Removes unneeded layers and then, while the total exceeds `most` bytes, unused images, the least
/// recently used first.
pub fn collect_images(state: &Path, most: Option<u64>) -> Result<CollectionResult, ImageError> {
    collect_locked(state, &ImageStore::open(state)?, most, None)
}

/// Like [`collect_images`], but returns `None` if the images are being changed at this moment.
pub fn collect_images_if_unlocked(
    state: &Path,
    most: Option<u64>,
) -> Result<Option<CollectionResult>, ImageError> {
    let store = ImageStore::lock(state, LockWait::GiveUp)?;
    store.map(|store| collect_locked(state, &store, most, None)).transpose()
}

/// Like [`collect_images`], for a caller that holds the store. The image `spared` is kept: it was just
/// pulled and is about to be used.
pub(super) fn collect_locked(
    state: &Path,
    store: &ImageStore,
    most: Option<u64>,
    spared: Option<&str>,
) -> Result<CollectionResult, ImageError> {
    let mut collected = remove_unneeded_layers(state, store)?;
    let Some(most) = most else { return Ok(collected) };
    let mut images = store::list_images(state)?;
    images.sort_by_key(|(_, used)| *used);
    for (image, _) in images.into_iter().filter(|(image, _)| Some(image.name.as_str()) != spared) {
        if total_layer_bytes(store)? <= most {
            break;
        }
        if layers_needed_by_records(state)?.is_none_or(|needed| uses_any_layer(&image, &needed)) {
            continue;
        }
        store.make_draft()?;
        store.move_away(&Path::new(NAMES_DIRECTORY).join(name::file_name(&image.name)?))?;
        let more = remove_unneeded_layers(state, store)?;
        collected.images.push(image.name);
        collected.layers += more.layers;
        collected.bytes += more.bytes;
    }
    Ok(collected)
}

/// Returns the part of `most` that is left beside the layers that no collection removes: a larger
/// image never fits. Returns `None` without a limit, or if it is unknown at the moment.
pub fn space_for_image(state: &Path, most: Option<u64>, name: &str) -> Result<Option<u64>, ImageError> {
    let Some(most) = most else { return Ok(None) };
    let staying = unremovable_bytes(state, name, &BTreeSet::new())?;
    Ok(staying.map(|staying| most.saturating_sub(staying)))
}

/// Returns the number of bytes that no collection can remove: the layers of sandboxes and
/// snapshots, and of images that they use. An image called `name` with the layers `own` is not
/// counted, and neither is the one that it replaces.
pub(super) fn unremovable_bytes(
    state: &Path,
    name: &str,
    own: &BTreeSet<Digest>,
) -> Result<Option<u64>, ImageError> {
    let Some(mut staying) = layers_needed_by_records(state)? else { return Ok(None) };
    let images = store::list_images(state)?.into_iter().map(|(image, _)| image);
    let used: Vec<ImageRecord> =
        images.filter(|image| image.name != name && uses_any_layer(image, &staying)).collect();
    staying.extend(used.into_iter().flat_map(|image| image.layers).map(|layer| layer.digest));
    let mut bytes = 0_u64;
    for layer in staying.difference(own) {
        bytes = bytes.saturating_add(store::layer_bytes_or_zero(state, layer)?);
    }
    Ok(Some(bytes))
}

/// Returns the size of all layers together.
fn total_layer_bytes(store: &ImageStore) -> Result<u64, ImageError> {
    store.list_layers()?.iter().map(|layer| store.layer_bytes(layer)).sum()
}

/// Returns the size of all layers of a state directory together.
pub fn stored_image_bytes(state: &Path) -> Result<u64, ImageError> {
    let mut seen = BTreeSet::new();
    let records = store::list_images(state)?;
    let layers = records.iter().flat_map(|(record, _)| &record.layers);
    Ok(layers.filter(|layer| seen.insert(&layer.digest)).map(|layer| layer.bytes).sum())
}

fn uses_any_layer(image: &ImageRecord, needed: &BTreeSet<Digest>) -> bool {
    image.layers.iter().any(|layer| needed.contains(&layer.digest))
}

/// Removes the layers that are not needed.
fn remove_unneeded_layers(state: &Path, store: &ImageStore) -> Result<CollectionResult, ImageError> {
    let mut collected = CollectionResult::default();
    let Some(mut needed) = layers_needed_by_records(state)? else { return Ok(collected) };
    for (image, _) in store::list_images(state)? {
        needed.extend(image.layers.into_iter().map(|layer| layer.digest));
    }
    if store.root.stat(Path::new("draft")).is_err() {
        store.make_draft()?;
    }
    for layer in store.list_layers()?.into_iter().filter(|layer| !needed.contains(layer)) {
        let bytes = store.layer_bytes(&layer)?;
        let away = store.move_away(&layer_path(&layer))?;
        if layers_needed_by_records(state)?.is_none_or(|needed| needed.contains(&layer)) {
            // A sandbox began to use it in between.
            let back = Path::new(LAYERS_DIRECTORY).join(layer.hex());
            store.root.rename_without_replacing(&away, &back).during("keep", &back)?;
            continue;
        }
        store.root.remove_tree(&away).during("remove", &away)?;
        collected.layers += 1;
        collected.bytes += bytes;
    }
    store.clear_draft()?;
    Ok(collected)
}

/// Returns the layers that sandboxes need, or `None` if this is unknown now because a record is
/// just being written.
fn layers_needed_by_records(state: &Path) -> Result<Option<BTreeSet<Digest>>, ImageError> {
    let mut needed = BTreeSet::new();
    let mut directories: Vec<_> =
        RECORD_DIRECTORIES.iter().map(|(directory, ending)| (state.join(directory), *ending)).collect();
    let own_servers = record_files(&state.join(OWN_SERVERS_DIRECTORY), "")?;
    directories.extend(own_servers.into_iter().map(|server| (server.join("boxes"), "")));
    for (directory, ending) in directories {
        for path in record_files(&directory, ending)? {
            let Some(layers) = read_needed_layers(&path)? else { return Ok(None) };
            needed.extend(layers);
        }
    }
    Ok(Some(needed))
}

fn record_files(directory: &Path, ending: &str) -> Result<Vec<PathBuf>, ImageError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.during("list", directory)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.during("list", directory)?;
        if entry.file_name().as_encoded_bytes().ends_with(ending.as_bytes()) {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// The part of any record that matters here.
#[derive(serde::Deserialize)]
struct LayerHolderRecord {
    #[serde(default)]
    made_of: Option<LayerHolderImage>,
}

#[derive(serde::Deserialize)]
struct LayerHolderImage {
    #[serde(default)]
    record: Option<ImageRecord>,
}

impl LayerHolderRecord {
    fn layers(self) -> Vec<Digest> {
        let image = self.made_of.and_then(|made_of| made_of.record);
        image.map(|image| image.layers.into_iter().map(|layer| layer.digest).collect()).unwrap_or_default()
    }
}

fn read_needed_layers(path: &Path) -> Result<Option<Vec<Digest>>, ImageError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(Vec::new())),
        text => {
            let text = text.during("read", path)?;
            Ok(serde_json::from_slice::<LayerHolderRecord>(&text).ok().map(LayerHolderRecord::layers))
        }
    }
}
