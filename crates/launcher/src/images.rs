//! Images: the initial files of a sandbox.
//!
//! An image is a list of trees, each with a mount point and the layers below it; a sandbox adds one
//! upper layer per tree. `host` consists of the host's own `/usr` and a small skeleton. Named
//! images are stored in `<state>/images` as layers, each once, by the digest of its content; they
//! come from directories, archives, OCI layouts and registries. Well-known names that clients send
//! resolve through an alias table.
//!
//! ```text
//! import ─► worker (an unprivileged fork) ─► unpack ─► manifest, blobs, stream
//!    │                                          └─────► layer ◄─ tarball, directory
//!    └────► store ◄─ collect
//! ```

mod accounts;
mod aliases;
mod blobs;
mod budget;
mod collect;
mod digest;
mod directory;
mod essentials;
mod host;
mod host_programs;
mod import;
mod layer;
mod manifest;
mod name;
mod record;
mod skeleton;
mod store;
mod stream;
mod tarball;
mod unpack;
mod worker;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

pub use aliases::{AliasRule, ImageAliases};
pub use collect::{
    CollectionResult, collect_images, collect_images_if_unlocked, remove_image, space_for_image,
    stored_image_bytes,
};
pub use digest::Digest;
pub use host::{HostImage, create_host_skeleton, premade_usr_directories, remove_old_skeletons};
pub use host_programs::{HostProgram, HostPrograms, OsRelease};
pub use import::{ExistingImagePolicy, ImageImport, ImportBase, ImportedImage, UnpackMode, import_image};
pub use manifest::host_architecture;
pub use record::{ImageBase, ImageConfig, ImageRecord, LayerRecord};
pub use store::{LockedImages, find_image, list_images, list_layers, lock_images, touch_image};
pub use unpack::{ImportSource, UpperTree};

/// The image that needs no import.
pub const HOST_IMAGE: &str = "host";
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
    /// Set when this image is not the requested one.
    pub stand_in: Option<StandIn>,
}

/// An image that is used instead of a requested one that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandIn {
    /// The requested name.
    pub asked: String,
    pub used: String,
    /// The contents of the used image, such as `Python 3.11`, if known.
    pub has: Option<String>,
}

impl std::fmt::Display for StandIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "image `{}`", self.used)?;
        self.has.iter().try_for_each(|has| write!(f, " ({has})"))?;
        write!(f, " stands in for `{}`", self.asked)
    }
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
    #[error("image `{name}` not found, and no other stands in for it: {reason}")]
    NoStandIn { name: String, reason: String },
    #[error("image `{0}` not found, and `images.strict` allows no other to stand in for it")]
    Strict(String),
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
            Self::Unknown(_) | Self::NoStandIn { .. } => Some(backend::MISSING_IMAGE_HINT),
            Self::Strict(_) => Some(
                "`coracle image pull NAME` or `coracle image import NAME FILE` adds it; `coracle image ls` lists the available images",
            ),
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

/// Finds the image for `name`.
pub fn resolve_image(
    state: &Path,
    host: &HostImage,
    name: &str,
    aliases: &ImageAliases,
) -> Result<FoundImage, ImageError> {
    if let Some(found) = find_exact(state, host, name)? {
        return Ok(found);
    }
    if aliases.rule == AliasRule::Refuse {
        return Err(ImageError::Strict(name.to_owned()));
    }
    let alias = aliases.find_stand_in(name).map_err(|reason| match reason {
        Some(reason) => ImageError::NoStandIn { name: name.to_owned(), reason },
        None => ImageError::Unknown(name.to_owned()),
    })?;
    let absent = || {
        let reason = format!("`images.aliases` names `{}`, which does not exist either", alias.image);
        ImageError::NoStandIn { name: name.to_owned(), reason }
    };
    let found = find_exact(state, host, &alias.image)?.ok_or_else(absent)?;
    let stand_in = StandIn { asked: name.to_owned(), used: found.name.clone(), has: alias.has };
    Ok(FoundImage { stand_in: Some(stand_in), ..found })
}

fn find_exact(state: &Path, host: &HostImage, name: &str) -> Result<Option<FoundImage>, ImageError> {
    if name == HOST_IMAGE {
        let env = merge_environment(&[]);
        let (name, trees) = (name.to_owned(), host.trees.clone());
        return Ok(Some(FoundImage { name, trees, env, record: None, stand_in: None }));
    }
    let Some(record) = store::find_image(state, name)? else { return Ok(None) };
    let trees = trees_of(state, host, &record)?;
    let env = merge_environment(&record.config.env);
    Ok(Some(FoundImage { name: record.name.clone(), trees, env, record: Some(record), stand_in: None }))
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
