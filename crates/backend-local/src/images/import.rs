//! Importing an image: unpack it into a draft, store its layers, then add its name.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use linux::fs::Root;
use linux::spawn::SingleThread;

use super::budget::{BESIDE_USED, Budget};
use super::record::{ImageBase, LayerRecord, Record};
use super::store::{self, Store};
use super::unpack::{self, Source, Task, Unpacked, UnpackedLayer};
use super::{Collected, Digest, During, HOST, ImageError, blobs, collect, name, worker};

/// The process that unpacks.
#[derive(Clone, Copy)]
pub enum Unpacker<'thread> {
    /// A separate, unprivileged process.
    Worker(&'thread SingleThread),
    /// This process, for trusted sources.
    InProcess,
}

/// The handling of an existing image with the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Refuse,
    Replace,
}

/// An image to import.
pub struct Import<'a> {
    pub name: &'a str,
    pub source: Source,
    /// The expected digest of its manifest.
    pub wanted: Option<Digest>,
    pub existing: Existing,
    /// The operator's limit on the size of all images together.
    pub most: Option<u64>,
    /// The base of the source's layers.
    pub below: Below,
}

/// The base of the source's layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Below {
    #[default]
    Nothing,
    /// The image `host`.
    Host,
    /// The layers of another image, whose configuration is used as well.
    Image(Record),
}

/// The maximum number of layers of an image.
const MAX_LAYERS: usize = 200;

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    pub record: Record,
    /// The images and layers that were removed to make space.
    pub gone: Collected,
}

impl Source {
    /// Determines the kind of source at `path`.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        if !fs::metadata(path).during("open", path)?.is_dir() {
            return Ok(Self::Archive(File::open(path).during("open", path)?));
        }
        let root = Root::open(path).during("open", path)?;
        let has = |name: &str| root.stat(Path::new(name)).is_ok();
        if has("oci-layout") && has("index.json") {
            return Self::layout(&root, None);
        }
        Ok(Self::Tree(std::path::absolute(path).during("open", path)?))
    }

    /// An OCI layout in a directory that other users may change. With `owner`, everything in it
    /// must belong to that user: callers must not get files imported that they could not read
    /// themselves.
    pub fn layout(root: &Root, owner: Option<u32>) -> Result<Self, ImageError> {
        blobs::open_layout(root, owner).map(Self::Layout)
    }

    /// An archive that somebody else has opened. With `owner`, it must belong to that user: who hands
    /// over a descriptor may not have what it could not read itself, nor make us wait for a pipe.
    pub fn archive(file: File, owner: Option<u32>) -> Result<Self, ImageError> {
        blobs::check_file(&file, Path::new("archive"), owner)?;
        Ok(Self::Archive(file))
    }
}

/// Imports an image and removes unused images to make space for it. The import is atomic: an image
/// that would not fit even after removing all of them replaces none.
pub fn import(
    state: &Path,
    import: Import<'_>,
    unpacker: Unpacker<'_>,
    progress: &mut dyn FnMut(&str),
) -> Result<Imported, ImageError> {
    let Import { name, source, wanted, existing, most, below } = import;
    name::file_name(name)?;
    if name == HOST {
        return Err(ImageError::Reserved(name.to_owned()));
    }
    let store = Store::open(state)?;
    if existing == Existing::Refuse && store::find(state, name)?.is_some_and(|found| found.name == name) {
        return Err(ImageError::Exists(name.to_owned()));
    }
    let task = Task {
        wanted,
        have: store.layers()?.into_iter().collect(),
        most,
        may_give_away: rustix::process::geteuid().is_root(),
    };
    let draft = store.make_draft()?;
    let unpacked = match unpacker {
        Unpacker::Worker(thread) => worker::unpack_apart(thread, source, &draft, &task, progress),
        Unpacker::InProcess => {
            let root = Root::open(&draft).during("open", &draft)?;
            unpack::unpack(source, &root, &task, progress)
        }
    };
    let kept = unpacked.and_then(|unpacked| {
        let (unpacked, base) = stack(unpacked, below)?;
        keep(state, &store, name, unpacked, base, &task)
    });
    // The reason for a failed import matters more than an error about the draft, which the next
    // import clears.
    let cleared = store.clear_draft();
    let record = kept?;
    cleared?;
    let gone = collect::collect_in(state, &store, most, Some(name))?;
    Ok(Imported { record, gone })
}

/// Puts the layers of a source on top of those of its base, which are all stored already.
fn stack(unpacked: Unpacked, below: Below) -> Result<(Unpacked, ImageBase), ImageError> {
    let record = match below {
        Below::Nothing => return Ok((unpacked, ImageBase::Own)),
        Below::Host => return Ok((unpacked, ImageBase::Host)),
        Below::Image(record) => record,
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
    Ok((Unpacked { manifest: None, config: record.config, layers }, record.base))
}

/// Rejects an image that exceeds its limit, counting its layers that existed before and everything
/// that cannot be removed.
fn check_size(
    state: &Path,
    store: &Store,
    name: &str,
    unpacked: &Unpacked,
    task: &Task,
) -> Result<(), ImageError> {
    let mut budget = Budget::new(task.most);
    let mut seen = BTreeSet::new();
    for layer in unpacked.layers.iter().filter(|layer| seen.insert(layer.digest.clone())) {
        let bytes = match layer.bytes {
            Some(bytes) => bytes,
            None => store.bytes_of(&layer.digest)?,
        };
        budget.spend(bytes)?;
    }
    let Some(most) = task.most else { return Ok(()) };
    let staying = collect::staying_beside(state, name, &seen)?;
    if staying.is_some_and(|staying| budget.bytes().saturating_add(staying) > most) {
        return Err(ImageError::TooLarge(BESIDE_USED));
    }
    Ok(())
}

/// Adds the layers and then the name of the image to the store.
fn keep(
    state: &Path,
    store: &Store,
    name: &str,
    unpacked: Unpacked,
    base: ImageBase,
    task: &Task,
) -> Result<Record, ImageError> {
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
        let bytes = store.bytes_of(&layer.digest)?;
        layers.push(LayerRecord { digest: layer.digest, bytes, mount_point: layer.mount_point });
    }
    let record =
        Record { name: name.to_owned(), manifest: unpacked.manifest, config: unpacked.config, layers, base };
    store.add_name(&record)?;
    Ok(record)
}
