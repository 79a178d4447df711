//! Images: what a sandbox's files are before it writes any.
//!
//! An image is a list of trees, each with a mount point and the layers below it; a sandbox adds
//! one upper layer per tree. `host` is made of the host's own `/usr` and a small skeleton. Named
//! images are kept in `<state>/images` as layers, each once, by the digest of its content; they
//! come from directories, archives, OCI layouts and registries. Names that clients send by habit
//! resolve through an alias table.
//!
//! ```text
//! import ─► worker (a fork without rights) ─► unpack ─► manifest, blobs, stream
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

pub use aliases::{AliasRule, Aliases};
pub use collect::{Collected, collect, collect_if_free, remove, room, stored_bytes};
pub use digest::Digest;
pub use host::{HostImage, host_skeleton, premade_in_usr, remove_old_skeletons};
pub use host_programs::{HostProgram, HostPrograms, OsRelease};
pub use import::{Below, Existing, Import, Imported, Unpacker, import};
pub use manifest::architecture;
pub use record::{ImageBase, ImageConfig, LayerRecord, Record};
pub use store::{HeldImages, find, hold, layers, records, touch};
pub use unpack::{Source, UpperTree};

/// The image that needs no import.
pub const HOST: &str = "host";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A part of the file system: where it is mounted and what lies below, topmost layer first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    pub mount_point: String,
    pub lowers: Vec<PathBuf>,
}

/// An image that exists, found by the name a client used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    pub name: String,
    /// In the order in which they must be mounted.
    pub trees: Vec<Tree>,
    /// Set for every process, not inherited from the host.
    pub env: Vec<(String, String)>,
    /// What the store knows of it, if it is kept there.
    pub record: Option<Record>,
    /// Set when this image is not the one that was named.
    pub stand_in: Option<StandIn>,
}

/// An image is used in the place of another that is not here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandIn {
    /// The name that was asked for.
    pub asked: String,
    pub used: String,
    /// What the used image has, such as `Python 3.11`, where that is known.
    pub has: Option<String>,
}

impl std::fmt::Display for StandIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "image `{}`", self.used)?;
        self.has.iter().try_for_each(|has| write!(f, " ({has})"))?;
        write!(f, " stands in for `{}`", self.asked)
    }
}

impl Resolved {
    /// The layers that must not be removed while a sandbox of this image exists.
    pub fn layers(&self) -> Vec<Digest> {
        let layers = self.record.iter().flat_map(|record| &record.layers);
        layers.map(|layer| layer.digest.clone()).collect()
    }

    /// Whether all layers are there; somebody may have removed the image a moment ago.
    pub fn is_whole(&self) -> bool {
        self.trees.iter().flat_map(|tree| &tree.lowers).all(|lower| lower.is_dir())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("`{0}` is not the name of an image")]
    BadName(String),
    #[error("there is no image `{0}` here")]
    Unknown(String),
    #[error("there is no image `{name}` here, and no other stands in for it: {reason}")]
    NoStandIn { name: String, reason: String },
    #[error("there is no image `{0}` here, and `images.strict` allows no other to stand in for it")]
    Strict(String),
    #[error(
        "image `{name}` lies on this host's files and changes `{mount_point}`, which was a file system of its own \
         when the image was made and is not any more"
    )]
    HostChanged { name: String, mount_point: String },
    #[error("`{0}` is made from this host and cannot be imported or removed")]
    Reserved(String),
    #[error("there is an image `{0}` already")]
    Exists(String),
    #[error("the entry `{entry}` is refused: {reason}")]
    Hostile { entry: String, reason: &'static str },
    #[error("it holds more than {0}")]
    TooLarge(&'static str),
    #[error("it is neither a directory nor a tar archive (plain, gzip or zstd)")]
    NotAnArchive,
    #[error("it holds no root file system: it has neither `bin` nor `usr`")]
    NotARoot,
    #[error("it is no image that could be understood: {0}")]
    Malformed(String),
    #[error("it has nothing for linux/{0}")]
    NoPlatform(&'static str),
    #[error("the content of `{0}` is not what its digest says")]
    Mismatch(String),
    /// What a worker said.
    #[error("{message}")]
    Refused { message: String, hint: Option<String> },
    #[error("the process that unpacked it died ({0})")]
    WorkerDied(String),
}

impl ImageError {
    /// What somebody could do about it.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::BadName(_) => Some("lower-case letters, digits and `._/-`, then a `:tag` if you like"),
            Self::Unknown(_) | Self::NoStandIn { .. } => Some(backend::WAYS_TO_AN_IMAGE),
            Self::Strict(_) => Some(
                "`coracle image pull NAME` or `coracle image import NAME FILE` provides it; `coracle image ls` lists what is here",
            ),
            Self::Exists(_) => Some("remove it first with `coracle image rm`"),
            Self::TooLarge(budget::BESIDE_USED) => {
                Some("end sandboxes or delete snapshots, or allow images more room")
            }
            Self::NotARoot => Some("it takes a whole system, as `docker export` writes it, or an image"),
            Self::Mismatch(_) => {
                Some("fetch or save it again; if that does not help, do not trust its source")
            }
            Self::Refused { hint, .. } => hint.as_deref(),
            _ => None,
        }
    }
}

/// Finds the image that `name` stands for.
pub fn resolve(
    state: &Path,
    host: &HostImage,
    name: &str,
    aliases: &Aliases,
) -> Result<Resolved, ImageError> {
    if let Some(found) = exact(state, host, name)? {
        return Ok(found);
    }
    if aliases.rule == AliasRule::Refuse {
        return Err(ImageError::Strict(name.to_owned()));
    }
    let alias = aliases.stand_in(name).map_err(|reason| match reason {
        Some(reason) => ImageError::NoStandIn { name: name.to_owned(), reason },
        None => ImageError::Unknown(name.to_owned()),
    })?;
    let absent = || {
        let reason = format!("`images.aliases` names `{}`, which is not here either", alias.image);
        ImageError::NoStandIn { name: name.to_owned(), reason }
    };
    let found = exact(state, host, &alias.image)?.ok_or_else(absent)?;
    let stand_in = StandIn { asked: name.to_owned(), used: found.name.clone(), has: alias.has };
    Ok(Resolved { stand_in: Some(stand_in), ..found })
}

fn exact(state: &Path, host: &HostImage, name: &str) -> Result<Option<Resolved>, ImageError> {
    if name == HOST {
        let env = environment(&[]);
        let (name, trees) = (name.to_owned(), host.trees.clone());
        return Ok(Some(Resolved { name, trees, env, record: None, stand_in: None }));
    }
    let Some(record) = store::find(state, name)? else { return Ok(None) };
    let trees = trees_of(state, host, &record)?;
    let env = environment(&record.config.env);
    Ok(Some(Resolved { name: record.name.clone(), trees, env, record: Some(record), stand_in: None }))
}

/// The trees of an image that the store keeps, over those of the host as they are now if it lies
/// on them. Records name layers by their digests, which stay the same when the directory is renamed
/// or copied.
pub fn trees_of(state: &Path, host: &HostImage, record: &Record) -> Result<Vec<Tree>, ImageError> {
    if record.base == ImageBase::Own {
        return Ok(vec![Tree { mount_point: "/".to_owned(), lowers: store::trees(state, record) }]);
    }
    let tree_of = |layer: &LayerRecord| host.trees.iter().any(|tree| tree.mount_point == layer.mount_point);
    if let Some(layer) = record.layers.iter().find(|layer| !tree_of(layer)) {
        let (name, mount_point) = (record.name.clone(), layer.mount_point.clone());
        return Err(ImageError::HostChanged { name, mount_point });
    }
    let over = |tree: &Tree| {
        let mut lowers = store::layers_at(state, record, &tree.mount_point);
        lowers.extend(tree.lowers.iter().cloned());
        Tree { mount_point: tree.mount_point.clone(), lowers }
    };
    Ok(host.trees.iter().map(over).collect())
}

/// What every process finds in its environment: the image's own words over the usual ones. There
/// is no usual `HOME`, since that depends on the user.
fn environment(own: &[(String, String)]) -> Vec<(String, String)> {
    let usual = [("PATH", PATH), ("LANG", "C.UTF-8")];
    let mut env: BTreeMap<String, String> =
        usual.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    env.extend(own.iter().cloned());
    env.into_iter().collect()
}

/// Says what was attempted on which path when something failed.
trait During<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, ImageError>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, ImageError> {
        self.map_err(|source| ImageError::Io { action, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
