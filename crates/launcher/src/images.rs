//! Images: the initial files of a sandbox.
//!
//! An image is a list of trees, each with a mount point and the layers below it; a sandbox adds one
//! upper layer per tree. `host` consists of the host's own `/usr` and a small skeleton. Named
//! images are stored in `<state>/images` as layers, each once, by the digest of its content; they
//! come from directories, archives, OCI layouts and registries. Which image a client's name stands for is
//! decided before: here every name is that of an image.
//!
//! ```text
//! import ─► worker (an unprivileged fork) ─► unpack ─► manifest, blobs, stream
//!    │                                          └─────► layer ◄─ tarball, directory
//!    └────► store ◄─ collect
//! ```

mod accounts;
mod blobs;
mod budget;
mod collect;
mod digest;
mod directory;
mod essentials;
mod hidden_files;
mod host;
mod host_programs;
mod import;
mod layer;
mod manifest;
mod name;
mod path_stamp;
mod record;
mod skeleton;
mod skeleton_record;
mod store;
mod stream;
mod tarball;
mod unpack;
mod worker;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

pub use collect::{
    CollectionResult, OWN_SERVERS_DIRECTORY, collect_images, collect_images_if_unlocked, remove_image,
    space_for_image, stored_image_bytes,
};
pub use digest::Digest;
pub use hidden_files::{hide_unreadable_files, list_hidden_paths, remove_old_layers};
pub(crate) use host::host_image_trees;
pub use host::{HostImage, create_host_skeleton, premade_usr_directories, remove_old_skeletons};
pub use host_programs::HostPrograms;
pub use import::{ExistingImagePolicy, ImageImport, ImportBase, ImportedImage, UnpackMode, import_image};
pub use manifest::host_architecture;
pub use record::{ImageBase, ImageConfig, ImageRecord, LayerRecord};
pub use store::{LockedImages, find_image, list_images, list_layers, lock_images, touch_image};
pub use unpack::{ImportSource, UpperTree};

/// The image that needs no import.
pub use domain::HOST_IMAGE;
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A part of the file system: its mount point and the layers below it, topmost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageTree {
    pub mount_point: String,
    pub lowers: Vec<PathBuf>,
}

/// An existing image, found by the name a client used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundImage {
    pub name: String,
    /// In the order in which they must be mounted.
    pub trees: Vec<ImageTree>,
    /// Set for every process, not inherited from the host.
    pub env: Vec<(String, String)>,
    /// Its record in the store, if it is stored there.
    pub record: Option<ImageRecord>,
}

impl FoundImage {
    /// The layers that must not be removed while a sandbox of this image exists.
    pub fn layers(&self) -> Vec<Digest> {
        let layers = self.record.iter().flat_map(|record| &record.layers);
        layers.map(|layer| layer.digest.clone()).collect()
    }

    /// Whether all layers exist; the image may have been removed a moment ago.
    pub fn has_all_layers(&self) -> bool {
        self.trees.iter().flat_map(|tree| &tree.lowers).all(|lower| lower.is_dir())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("`{0}` is not a valid image name")]
    BadName(String),
    #[error("image `{0}` not found")]
    Unknown(String),
    #[error(
        "image `{name}` is based on this host's files and changes `{mount_point}`, which was a separate file system \
         when the image was created and no longer is"
    )]
    HostChanged { name: String, mount_point: String },
    #[error("`{0}` is built from this host and cannot be imported or removed")]
    Reserved(String),
    #[error("image `{0}` already exists")]
    Exists(String),
    #[error("entry `{entry}` rejected: {reason}")]
    Hostile { entry: String, reason: &'static str },
    #[error("image is larger than {0}")]
    TooLarge(&'static str),
    #[error("source is neither a directory nor a tar archive (plain, gzip or zstd)")]
    NotAnArchive,
    #[error("source is not a root file system: it has neither `bin` nor `usr`")]
    NotARoot,
    #[error("image is malformed: {0}")]
    Malformed(String),
    #[error("image has no entry for linux/{0}")]
    NoPlatform(&'static str),
    #[error("content does not match digest `{0}`")]
    Mismatch(String),
    /// An error reported by a worker.
    #[error("{message}")]
    Refused { message: String, hint: Option<String> },
    #[error("the process that unpacked the image died ({0})")]
    WorkerDied(String),
}

impl ImageError {
    /// A hint on how to fix the problem.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::BadName(_) => {
                Some("use lower-case letters, digits and `._/-`, optionally followed by `:tag`")
            }
            Self::Unknown(_) => Some(backend::MISSING_IMAGE_HINT),
            Self::Exists(_) => Some("remove the image first with `coracle image rm`"),
            Self::TooLarge(budget::LIMIT_BESIDE_USED_IMAGES) => {
                Some("end sandboxes or delete snapshots, or raise the limit on images")
            }
            Self::NotARoot => Some("give a whole system, as written by `docker export`, or an image"),
            Self::Mismatch(_) => {
                Some("download or save the image again; if that does not help, do not trust its source")
            }
            Self::Refused { hint, .. } => hint.as_deref(),
            _ => None,
        }
    }
}

/// Finds the image `name`.
pub fn resolve_image(state: &Path, host: &HostImage, name: &str) -> Result<FoundImage, ImageError> {
    if name == HOST_IMAGE {
        let env = merge_environment(&[]);
        return Ok(FoundImage { name: name.to_owned(), trees: host.trees.clone(), env, record: None });
    }
    let record = store::find_image(state, name)?.ok_or_else(|| ImageError::Unknown(name.to_owned()))?;
    let trees = trees_of(state, host, &record)?;
    let env = merge_environment(&record.config.env);
    Ok(FoundImage { name: record.name.clone(), trees, env, record: Some(record) })
}

/// Returns the trees of a stored image, on top of the host's current trees if it is based on them.
/// Records name layers by their digests, which stay the same when the directory is renamed or
/// copied.
pub fn trees_of(state: &Path, host: &HostImage, record: &ImageRecord) -> Result<Vec<ImageTree>, ImageError> {
    if record.base == ImageBase::Own {
        return Ok(vec![ImageTree {
            mount_point: "/".to_owned(),
            lowers: store::layer_trees(state, record),
        }]);
    }
    let tree_of = |layer: &LayerRecord| host.trees.iter().any(|tree| tree.mount_point == layer.mount_point);
    if let Some(layer) = record.layers.iter().find(|layer| !tree_of(layer)) {
        let (name, mount_point) = (record.name.clone(), layer.mount_point.clone());
        return Err(ImageError::HostChanged { name, mount_point });
    }
    let over = |tree: &ImageTree| {
        let mut lowers = store::trees_at_mount_point(state, record, &tree.mount_point);
        lowers.extend(tree.lowers.iter().cloned());
        ImageTree { mount_point: tree.mount_point.clone(), lowers }
    };
    Ok(host.trees.iter().map(over).collect())
}

/// Returns the environment of every process: the image's own variables over the defaults. There is
/// no default `HOME`, because it depends on the user.
fn merge_environment(own: &[(String, String)]) -> Vec<(String, String)> {
    let usual = [("PATH", DEFAULT_PATH), ("LANG", "C.UTF-8")];
    let mut env: BTreeMap<String, String> =
        usual.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    env.extend(own.iter().cloned());
    env.into_iter().collect()
}

/// Adds the attempted action and the path to an error.
trait ImageErrorContext<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, ImageError>;
}

impl<T> ImageErrorContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, ImageError> {
        self.map_err(|source| ImageError::Io { action, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
