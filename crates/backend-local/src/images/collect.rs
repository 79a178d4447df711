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

use super::record::Record;
use super::store::{self, LAYERS, NAMES, Patience, Store, layer_path};
use super::{Digest, During, HOST, ImageError, name};

/// Directories below the state directory with records that may name layers, and the suffix of these
/// records. Each record is a JSON object whose field `made_of` describes the image it is based on.
const ROOTS: [(&str, &str); 3] = [("boxes", ""), ("oneshot/boxes", ""), ("snapshots", ".json")];

/// The images and layers that a collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Collected {
    /// Images that were removed to free space.
    pub images: Vec<String>,
    pub layers: usize,
    pub bytes: u64,
}

/// Removes an image, even if a sandbox uses its layers: the name is removed at once, the layers
/// when they are not needed any more.
pub fn remove(state: &Path, image: &str) -> Result<Collected, ImageError> {
    let place = Path::new(NAMES).join(name::file_name(image)?);
    if image == HOST {
        return Err(ImageError::Reserved(image.to_owned()));
    }
    let store = Store::open(state)?;
    store.make_draft()?;
    if store.root.stat(&place).is_err() {
        return Err(ImageError::Unknown(image.to_owned()));
    }
    store.move_away(&place)?;
    sweep(state, &store)
}

/// Removes unneeded layers and then, while the total exceeds `most` bytes, unused images, the least
/// recently used first.
pub fn collect(state: &Path, most: Option<u64>) -> Result<Collected, ImageError> {
    collect_in(state, &Store::open(state)?, most, None)
}

/// Like [`collect`], but returns `None` if the images are being changed at this moment.
pub fn collect_if_free(state: &Path, most: Option<u64>) -> Result<Option<Collected>, ImageError> {
    let store = Store::lock(state, Patience::GiveUp)?;
    store.map(|store| collect_in(state, &store, most, None)).transpose()
}

/// Like [`collect`], for a caller that holds the store. The image `spared` is kept: it was just
/// pulled and is about to be used.
pub(super) fn collect_in(
    state: &Path,
    store: &Store,
    most: Option<u64>,
    spared: Option<&str>,
) -> Result<Collected, ImageError> {
    let mut collected = sweep(state, store)?;
    let Some(most) = most else { return Ok(collected) };
    let mut images = store::records(state)?;
    images.sort_by_key(|(_, used)| *used);
    for (image, _) in images.into_iter().filter(|(image, _)| Some(image.name.as_str()) != spared) {
        if total(store)? <= most {
            break;
        }
        if needed_by_records(state)?.is_none_or(|needed| is_used(&image, &needed)) {
            continue;
        }
        store.make_draft()?;
        store.move_away(&Path::new(NAMES).join(name::file_name(&image.name)?))?;
        let more = sweep(state, store)?;
        collected.images.push(image.name);
        collected.layers += more.layers;
        collected.bytes += more.bytes;
    }
    Ok(collected)
}

/// Returns the part of `most` that is left beside the layers that no collection removes: a larger
/// image never fits. Returns `None` without a limit, or if it is unknown at the moment.
pub fn room(state: &Path, most: Option<u64>, name: &str) -> Result<Option<u64>, ImageError> {
    let Some(most) = most else { return Ok(None) };
    let staying = staying_beside(state, name, &BTreeSet::new())?;
    Ok(staying.map(|staying| most.saturating_sub(staying)))
}

/// Returns the number of bytes that no collection can remove: the layers of sandboxes and
/// snapshots, and of images that they use. An image called `name` with the layers `own` is not
/// counted, and neither is the one that it replaces.
pub(super) fn staying_beside(
    state: &Path,
    name: &str,
    own: &BTreeSet<Digest>,
) -> Result<Option<u64>, ImageError> {
    let Some(mut staying) = needed_by_records(state)? else { return Ok(None) };
    let images = store::records(state)?.into_iter().map(|(image, _)| image);
    let used: Vec<Record> = images.filter(|image| image.name != name && is_used(image, &staying)).collect();
    staying.extend(used.into_iter().flat_map(|image| image.layers).map(|layer| layer.digest));
    let mut bytes = 0_u64;
    for layer in staying.difference(own) {
        bytes = bytes.saturating_add(store::bytes_if_there(state, layer)?);
    }
    Ok(Some(bytes))
}

/// Returns the size of all layers together.
fn total(store: &Store) -> Result<u64, ImageError> {
    store.layers()?.iter().map(|layer| store.bytes_of(layer)).sum()
}

/// Returns the size of all layers of a state directory together.
pub fn stored_bytes(state: &Path) -> Result<u64, ImageError> {
    let mut seen = BTreeSet::new();
    let records = store::records(state)?;
    let layers = records.iter().flat_map(|(record, _)| &record.layers);
    Ok(layers.filter(|layer| seen.insert(&layer.digest)).map(|layer| layer.bytes).sum())
}

fn is_used(image: &Record, needed: &BTreeSet<Digest>) -> bool {
    image.layers.iter().any(|layer| needed.contains(&layer.digest))
}

/// Removes the layers that are not needed.
fn sweep(state: &Path, store: &Store) -> Result<Collected, ImageError> {
    let mut collected = Collected::default();
    let Some(mut needed) = needed_by_records(state)? else { return Ok(collected) };
    for (image, _) in store::records(state)? {
        needed.extend(image.layers.into_iter().map(|layer| layer.digest));
    }
    if store.root.stat(Path::new("draft")).is_err() {
        store.make_draft()?;
    }
    for layer in store.layers()?.into_iter().filter(|layer| !needed.contains(layer)) {
        let bytes = store.bytes_of(&layer)?;
        let away = store.move_away(&layer_path(&layer))?;
        if needed_by_records(state)?.is_none_or(|needed| needed.contains(&layer)) {
            // A sandbox began to use it in between.
            let back = Path::new(LAYERS).join(layer.hex());
            store.root.rename_new(&away, &back).during("keep", &back)?;
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
fn needed_by_records(state: &Path) -> Result<Option<BTreeSet<Digest>>, ImageError> {
    let mut needed = BTreeSet::new();
    for (directory, ending) in ROOTS {
        for path in files_of(&state.join(directory), ending)? {
            let Some(layers) = layers_of(&path)? else { return Ok(None) };
            needed.extend(layers);
        }
    }
    Ok(Some(needed))
}

fn files_of(directory: &Path, ending: &str) -> Result<Vec<PathBuf>, ImageError> {
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
struct Rooted {
    #[serde(default)]
    made_of: Option<MadeOf>,
}

#[derive(serde::Deserialize)]
struct MadeOf {
    #[serde(default)]
    record: Option<Record>,
}

impl Rooted {
    fn layers(self) -> Vec<Digest> {
        let image = self.made_of.and_then(|made_of| made_of.record);
        image.map(|image| image.layers.into_iter().map(|layer| layer.digest).collect()).unwrap_or_default()
    }
}

fn layers_of(path: &Path) -> Result<Option<Vec<Digest>>, ImageError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(Vec::new())),
        text => {
            let text = text.during("read", path)?;
            Ok(serde_json::from_slice::<Rooted>(&text).ok().map(Rooted::layers))
        }
    }
}
