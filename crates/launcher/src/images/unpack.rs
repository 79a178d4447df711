//! Turning a source into layers: the task of the confined worker.
//!
//! The source is not trusted. The result is checked against the digests that the source itself claims,
//! so that the content of a layer matches its name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;
use serde::{Deserialize, Serialize};

use super::blobs::ImageBlobs;
use super::budget::ImageBudget;
use super::digest::HashingReader;
use super::directory::DirectoryContents;
use super::layer::{LayerForm, LayerWriter};
use super::manifest::{self, ImageManifest, LayerBlob};
use super::record::{ImageConfig, root_tree};
use super::stream::InflatedReader;
use super::{Digest, ImageError, ImageErrorContext, directory, tarball};

/// The source of an image.
#[derive(Debug)]
pub enum ImportSource {
    /// An archive: of a root file system, of an OCI layout, or of `docker save`.
    Archive(File),
    /// The files of an OCI layout.
    Layout(BTreeMap<PathBuf, File>),
    /// A root file system.
    Tree(PathBuf),
    /// The disk of a sandbox, and the trees whose changes it contains.
    Uppers { disk: PathBuf, trees: Vec<UpperTree> },
}

/// A tree of a sandbox's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpperTree {
    pub mount_point: String,
    /// The directory below the disk that contains the changes.
    pub directory: String,
}

/// The parameters for unpacking a source.
pub(super) struct UnpackTask {
    /// The expected digest of the manifest.
    pub(super) wanted: Option<Digest>,
    /// Layers that need not be unpacked again.
    pub(super) have: BTreeSet<Digest>,
    /// The size limit for the image, in addition to the one for every image.
    pub(super) most: Option<u64>,
    /// Whether the owners of files can be set.
    pub(super) may_give_away: bool,
}

/// The result of unpacking a source.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct UnpackedImage {
    pub(super) manifest: Option<Digest>,
    pub(super) config: ImageConfig,
    /// From the bottom up.
    pub(super) layers: Vec<UnpackedLayer>,
}

/// A layer, with its size if it was unpacked, into the directory numbered `place`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct UnpackedLayer {
    pub(super) digest: Digest,
    pub(super) bytes: Option<u64>,
    /// The number of its directory in the draft.
    pub(super) place: usize,
    pub(super) mount_point: String,
}

/// Unpacks the layers of `source` into numbered directories of `draft`.
pub(super) fn unpack_source(
    source: ImportSource,
    draft: &RootDirectory,
    task: &UnpackTask,
    progress: &mut dyn FnMut(&str),
) -> Result<UnpackedImage, ImageError> {
    let blobs = match source {
        ImportSource::Tree(path) => {
            let root = RootDirectory::open(&path).during("open", &path)?;
            return unpack_root(draft, task, progress, |layer| {
                directory::copy_directory(&root, layer, DirectoryContents::Tree)
            });
        }
        ImportSource::Uppers { disk, trees } => return copy_uppers(&disk, &trees, draft, task, progress),
        ImportSource::Layout(files) => ImageBlobs::Files(files),
        ImportSource::Archive(file) => ImageBlobs::from_tar(file, draft)?,
    };
    // Newer archives of `docker save` have both formats; the layout has digests of everything.
    if blobs.contains("index.json") && blobs.contains("oci-layout") || matches!(blobs, ImageBlobs::Files(_)) {
        let manifest = manifest::read_layout(&blobs, task.wanted.as_ref())?;
        return unpack_layers(&blobs, manifest, draft, task, progress);
    }
    if blobs.contains("manifest.json") && !has_root_system(&blobs) {
        let manifest = manifest::read_docker_save(&blobs)?;
        return unpack_layers(&blobs, manifest, draft, task, progress);
    }
    let archive = blobs.into_archive().expect("layouts were handled above");
    unpack_root(draft, task, progress, |layer| {
        let mut content = HashingReader::new(archive);
        tarball::unpack_tar(&mut content, layer)?;
        content.finish().during("read", Path::new("the archive")).map(|(digest, _)| digest)
    })
}

/// Whether an archive with a file `manifest.json` is nevertheless a root file system.
fn has_root_system(blobs: &ImageBlobs) -> bool {
    ["etc/passwd", "bin/sh", "usr/bin/env"].iter().any(|path| blobs.contains(path))
}

/// Unpacks a root file system as the only layer of an image without a configuration.
fn unpack_root(
    draft: &RootDirectory,
    task: &UnpackTask,
    progress: &mut dyn FnMut(&str),
    fill: impl FnOnce(&mut LayerWriter<'_>) -> Result<Digest, ImageError>,
) -> Result<UnpackedImage, ImageError> {
    let root = make_layer_directory(draft, 0)?;
    let mut budget = ImageBudget::new(task.most);
    let mut layer = LayerWriter::new(root, LayerForm::Whole, task.may_give_away, &mut budget, progress);
    let digest = fill(&mut layer)?;
    let tree = layer.root();
    if tree.stat(Path::new("bin")).is_err() && tree.stat(Path::new("usr")).is_err() {
        return Err(ImageError::NotARoot);
    }
    let bytes = Some(layer.finish()?);
    let layers = vec![UnpackedLayer { digest, bytes, place: 0, mount_point: root_tree() }];
    Ok(UnpackedImage { manifest: None, config: ImageConfig::default(), layers })
}

/// Copies the changes of a sandbox, one layer for each of its trees. A tree without changes has no
/// layer.
fn copy_uppers(
    disk: &Path,
    trees: &[UpperTree],
    draft: &RootDirectory,
    task: &UnpackTask,
    progress: &mut dyn FnMut(&str),
) -> Result<UnpackedImage, ImageError> {
    let disk = RootDirectory::open(disk).during("open", disk)?;
    let mut budget = ImageBudget::new(task.most);
    let mut layers = Vec::new();
    for (index, tree) in trees.iter().enumerate() {
        let path = Path::new(&tree.directory);
        let upper = match disk.open_subdirectory(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            upper => upper.during("open", path)?,
        };
        let root = make_layer_directory(draft, index)?;
        let mut layer = LayerWriter::new(root, LayerForm::Whole, task.may_give_away, &mut budget, progress);
        let digest = directory::copy_directory(&upper, &mut layer, DirectoryContents::Upper)?;
        let bytes = layer.finish()?;
        if bytes > 0 {
            let mount_point = tree.mount_point.clone();
            layers.push(UnpackedLayer { digest, bytes: Some(bytes), place: index, mount_point });
        }
    }
    Ok(UnpackedImage { manifest: None, config: ImageConfig::default(), layers })
}

fn unpack_layers(
    blobs: &ImageBlobs,
    manifest: ImageManifest,
    draft: &RootDirectory,
    task: &UnpackTask,
    progress: &mut dyn FnMut(&str),
) -> Result<UnpackedImage, ImageError> {
    if let Some(wanted) = &task.wanted
        && manifest.digest.as_ref() != Some(wanted)
    {
        return Err(ImageError::Mismatch(wanted.to_string()));
    }
    let mut have = task.have.clone();
    let mut unpacked = Vec::new();
    let mut budget = ImageBudget::new(task.most);
    let count = manifest.layers.len();
    for (place, part) in manifest.layers.iter().enumerate() {
        let new = have.insert(part.digest.clone());
        let mut report = |detail: &str| progress(&format!("layer {} of {count}: {detail}", place + 1));
        let bytes = if new {
            let root = make_layer_directory(draft, place)?;
            let tree =
                LayerWriter::new(root, LayerForm::Difference, task.may_give_away, &mut budget, &mut report);
            Some(unpack_layer(blobs, part, tree)?)
        } else {
            None
        };
        let (digest, mount_point) = (part.digest.clone(), root_tree());
        unpacked.push(UnpackedLayer { digest, bytes, place, mount_point });
    }
    Ok(UnpackedImage { manifest: manifest.digest, config: manifest.config, layers: unpacked })
}

/// Unpacks one layer and verifies both of its digests.
fn unpack_layer(blobs: &ImageBlobs, part: &LayerBlob, mut layer: LayerWriter<'_>) -> Result<u64, ImageError> {
    let mut content = HashingReader::new(InflatedReader::open(blobs.open(&part.path)?, &part.path)?);
    tarball::unpack_tar(&mut content, &mut layer)?;
    let bytes = layer.finish()?;
    let mismatch = |digest: &Digest| Err(ImageError::Mismatch(digest.to_string()));
    // Data behind the end of an archive is included as well, up to the size of a header.
    let mut rest = (&mut content).take(tarball::MAX_HEADER_SIZE);
    std::io::copy(&mut rest, &mut std::io::sink()).during("read", &part.path)?;
    let (digest, inflated) = content.into_parts();
    if digest != part.digest {
        return mismatch(&part.digest);
    }
    if let Some((packed, size)) = &part.packed {
        let (digest, length) = inflated.into_packed().finish().during("read", &part.path)?;
        if digest != *packed || length != *size {
            return mismatch(packed);
        }
    }
    Ok(bytes)
}

fn make_layer_directory(draft: &RootDirectory, place: usize) -> Result<RootDirectory, ImageError> {
    let path = PathBuf::from(place.to_string());
    draft.make_directory(&path, 0o755).during("make", &path)?;
    let root = draft.open_subdirectory(&path).during("open", &path)?;
    // Set through the descriptor, independent of the umask: the worker has no `/proc` to do it by path.
    rustix::fs::fchmod(&root, rustix::fs::Mode::from_raw_mode(0o755))
        .map_err(std::io::Error::from)
        .during("mark", &path)?;
    Ok(root)
}
