//! Images: what a sandbox's files are before it writes any.
//!
//! An image is a list of trees, each with a mount point and the layers below it; a sandbox adds
//! one upper layer per tree. `host` is made of the host's own `/usr` and a small skeleton; named
//! images are imported into `<state>/images`. Names that clients send by habit resolve through an
//! alias table.
//!
//! ```text
//!  <state>/images/<name>/rootfs       an imported tree, ids as in the image
//!  <state>/images/<name>/image.json   its summary; without it the import was not finished
//!  <state>/host/<version>             skeletons of `host`, one per content
//! ```

mod aliases;
mod directory;
mod essentials;
mod host;
mod layer;
mod skeleton;
mod store;
mod tarball;

use std::io;
use std::path::{Path, PathBuf};

pub use aliases::{Aliases, Unlisted};
pub use host::{HostImage, host_skeleton, premade_in_usr, remove_old_skeletons};
pub use store::{ImageSummary, import, list, remove};

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
    /// The name that was asked for, when an alias stood in for it.
    pub alias_of: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("`{0}` is not the name of an image")]
    BadName(String),
    #[error("there is no such image as `{0}`")]
    Unknown(String),
    #[error("`{name}` is only an alias of `{target}`, and aliases are refused here")]
    OnlyAlias { name: String, target: String },
    #[error("`{0}` is made from this host and cannot be imported or removed")]
    Reserved(String),
    #[error("there is an image `{0}` already")]
    Exists(String),
    #[error("the entry `{entry}` is refused: {reason}")]
    Hostile { entry: String, reason: &'static str },
    #[error("it holds more than {0}")]
    TooLarge(&'static str),
    #[error("`{0}` is neither a directory nor a tar archive (plain, gzip or zstd)")]
    NotAnArchive(PathBuf),
    #[error("`{0}` holds no root file system: it has neither `bin` nor `usr`")]
    NotARoot(PathBuf),
}

impl ImageError {
    /// What somebody could do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::BadName(_) => Some("lower-case letters, digits and `._/-`, then a `:tag` if you like"),
            Self::Unknown(_) => Some("`coracle image ls` lists the images"),
            Self::OnlyAlias { .. } => Some("import it, name the target itself, or allow aliases"),
            Self::Exists(_) => Some("remove it first with `coracle image rm`"),
            Self::NotARoot(_) => Some("an archive of `docker save` holds layers; use `docker export`"),
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
    let target = aliases.target(name).ok_or_else(|| ImageError::Unknown(name.to_owned()))?;
    if aliases.unlisted == Unlisted::Refuse {
        return Err(ImageError::OnlyAlias { name: name.to_owned(), target: target.to_owned() });
    }
    let found = exact(state, host, target)?.ok_or_else(|| ImageError::Unknown(target.to_owned()))?;
    Ok(Resolved { alias_of: Some(name.to_owned()), ..found })
}

fn exact(state: &Path, host: &HostImage, name: &str) -> Result<Option<Resolved>, ImageError> {
    let trees = if name == HOST {
        host.trees.clone()
    } else {
        match store::find(state, name)? {
            Some(rootfs) => vec![Tree { mount_point: "/".to_owned(), lowers: vec![rootfs] }],
            None => return Ok(None),
        }
    };
    Ok(Some(Resolved { name: name.to_owned(), trees, env: default_env(), alias_of: None }))
}

fn default_env() -> Vec<(String, String)> {
    [("PATH", PATH), ("HOME", "/root"), ("LANG", "C.UTF-8")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
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
