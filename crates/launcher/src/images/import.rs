//! Importing an image: unpack it into a draft, store its layers, then add its name.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use linux::fs::RootDirectory;
use linux::spawn::SingleThread;

use super::budget::{ImageBudget, LIMIT_BESIDE_USED_IMAGES};
use super::record::{ImageBase, ImageRecord, LayerRecord};
use super::store::{self, ImageStore};
use super::unpack::{self, ImportSource, UnpackTask, UnpackedImage, UnpackedLayer};
use super::{
    CollectionResult, Digest, HOST_IMAGE, ImageError, ImageErrorContext, blobs, collect, name, worker,
};

/// The process that unpacks.
#[derive(Clone, Copy)]
pub enum UnpackMode<'thread> {
    /// A separate, unprivileged process.
    Worker(&'thread SingleThread),
    /// This process, for trusted sources.
    InProcess,
}

/// The handling of an existing image with the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingImagePolicy {
    Refuse,
    Replace,
}

/// An image to import.
pub struct ImageImport<'a> {
    pub name: &'a str,
    pub source: ImportSource,
    /// The expected digest of its manifest.
    pub wanted: Option<Digest>,
    pub existing: ExistingImagePolicy,
    /// The operator's limit on the size of all images together.
    pub most: Option<u64>,
    /// The base of the source's layers.
    pub below: ImportBase,
}

/// The base of the source's layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ImportBase {
    #[default]
    Nothing,
    /// The image `host`.
    Host,
    /// The layers of another image, whose configuration is used as well.
    Image(ImageRecord),
}

/// The maximum number of layers of an image.
const MAX_LAYERS: usize = 200;

/// The result of an import.
#[derive(Debug)]
pub struct ImportedImage {
    pub record: ImageRecord,
    /// The images and layers that were removed to make space.
    pub gone: CollectionResult,
}

impl ImportSource {
    /// Determines the kind of source at `path`.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        if !fs::metadata(path).during("open", path)?.is_dir() {
            return Ok(Self::Archive(File::open(path).during("open", path)?));
        }
        let root = RootDirectory::open(path).during("open", path)?;
        let has = |name: &str| root.stat(Path::new(name)).is_ok();
        if has("oci-layout") && has("index.json") {
            return Self::from_layout(&root, None);
        }
        Ok(Self::Tree(std::path::absolute(path).during("open", path)?))
    }

    /// An OCI layout in a directory that other users may change. With `owner`, everything in it
    /// must belong to that user: callers must not get files imported that they could not read
    /// themselves.
    pub fn from_layout(root: &RootDirectory, owner: Option<u32>) -> Result<Self, ImageError> {
        blobs::open_layout(root, owner).map(Self::Layout)
    }

    /// An archive that the caller has opened. With `owner`, the file must belong to that user, so that a
    /// caller cannot import what it could not read itself, nor pass a pipe that never ends.
    pub fn from_archive(file: File, owner: Option<u32>) -> Result<Self, ImageError> {
        blobs::check_file(&file, Path::new("archive"), owner)?;
        Ok(Self::Archive(file))
    }
}

/// Imports an image and removes unused images to make space for it. The import is atomic: an image
/// that would not fit even after removing all of them replaces none.
pub fn import_image(
    state: &Path,
    import: ImageImport<'_>,
    unpacker: UnpackMode<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<ImportedImage, ImageError> {
    let ImageImport { name, source, wanted, existing, most, below } = import;
    name::file_name(name)?;
    if name == HOST_IMAGE {
        return Err(ImageError::Reserved(name.to_owned()));
    }
    let store = ImageStore::open(state)?;
    if existing == ExistingImagePolicy::Refuse
        && store::find_image(state, name)?.is_some_and(|found| found.name == name)
    {
        return Err(ImageError::Exists(name.to_owned()));
    }
    let task = UnpackTask {
        wanted,
        have: store.list_layers()?.into_iter().collect(),
        most,
        may_give_away: linux::privileges::is_host_root(),
    };
    let draft = store.make_draft()?;
    let unpacked = match unpacker {
        UnpackMode::Worker(thread) => worker::unpack_in_worker(thread, source, &draft, &task, progress),
        UnpackMode::InProcess => {
            let root = RootDirectory::open(&draft).during("open", &draft)?;
            unpack::unpack_source(source, &root, &task, progress)
        }
    };
    let kept = unpacked.and_then(|unpacked| {
        let (unpacked, base) = stack_on_base(unpacked, below)?;
        store_image(state, &store, name, unpacked, base, &task)
    });
    // The reason for a failed import matters more than an error about the draft, which the next
    // import clears.
    let cleared = store.clear_draft();
    let record = kept?;
    cleared?;
    let gone = collect::collect_locked(state, &store, most, Some(name))?;
    Ok(ImportedImage { record, gone })
}

/// Puts the layers of a source on top of those of its base, which are all stored already.
fn stack_on_base(
    unpacked: UnpackedImage,
    below: ImportBase,
) -> Result<(UnpackedImage, ImageBase), ImageError> {
    let record = match below {
        ImportBase::Nothing => return Ok((unpacked, ImageBase::Own)),
        ImportBase::Host => return Ok((unpacked, ImageBase::Host)),
        ImportBase::Image(record) => record,
    };
    let here = |layer: LayerRecord| UnpackedLayer {
        digest: layer.digest,
        bytes: None,
        place: 0,
        mount_point: layer.mount_point,
    };
    let layers: Vec<UnpackedLayer> = record.layers.into_iter().map(here).chain(unpacked.layers).collect();
    if layers.len() > MAX_LAYERS {
        return Err(ImageError::TooLarge("200 layers"));
    }
    Ok((UnpackedImage { manifest: None, config: record.config, layers }, record.base))
}

/// Rejects an image that exceeds its limit, counting its layers that existed before and everything
/// that cannot be removed.
fn check_size(
    state: &Path,
    store: &ImageStore,
    name: &str,
    unpacked: &UnpackedImage,
    task: &UnpackTask,
) -> Result<(), ImageError> {
    let mut budget = ImageBudget::new(task.most);
    let mut seen = BTreeSet::new();
    for layer in unpacked.layers.iter().filter(|layer| seen.insert(layer.digest.clone())) {
        let bytes = match layer.bytes {
            Some(bytes) => bytes,
            None => store.layer_bytes(&layer.digest)?,
        };
        budget.spend_bytes(bytes)?;
    }
    let Some(most) = task.most else { return Ok(()) };
    let staying = collect::unremovable_bytes(state, name, &seen)?;
    if staying.is_some_and(|staying| budget.bytes().saturating_add(staying) > most) {
        return Err(ImageError::TooLarge(LIMIT_BESIDE_USED_IMAGES));
    }
    Ok(())
}

/// Adds the layers and then the name of the image to the store.
fn store_image(
    state: &Path,
    store: &ImageStore,
    name: &str,
    unpacked: UnpackedImage,
    base: ImageBase,
    task: &UnpackTask,
) -> Result<ImageRecord, ImageError> {
    check_size(state, store, name, &unpacked, task)?;
    store.flush()?;
    let mut layers = Vec::new();
    let mut added = task.have.clone();
    for layer in unpacked.layers {
        if let Some(bytes) = layer.bytes
            && added.insert(layer.digest.clone())
        {
            store.add_layer(layer.place, &layer.digest, bytes)?;
        }
        let bytes = store.layer_bytes(&layer.digest)?;
        layers.push(LayerRecord { digest: layer.digest, bytes, mount_point: layer.mount_point });
    }
    let record = ImageRecord {
        name: name.to_owned(),
        manifest: unpacked.manifest,
        config: unpacked.config,
        layers,
        base,
    };
    store.add_name(&record)?;
    Ok(record)
}
