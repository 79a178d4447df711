//! The stored description of an image: its layers and how its processes are started.

use serde::{Deserialize, Serialize};

use super::Digest;

/// An image in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub name: String,
    /// The digest of its manifest, if it came with one.
    pub manifest: Option<Digest>,
    pub config: ImageConfig,
    /// From the bottom up.
    pub layers: Vec<LayerRecord>,
    /// Missing in records of older servers.
    #[serde(default)]
    pub base: ImageBase,
}

/// The base of an image's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageBase {
    /// Nothing: the layers contain all of its files.
    #[default]
    Own,
    /// The trees of the image `host`, as they are when a sandbox is created.
    Host,
}

/// A layer of an image, by the digest of its uncompressed archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    pub digest: Digest,
    /// Its size: the content of its files, their attributes, and 4 KiB for each entry.
    pub bytes: u64,
    /// The tree that it is part of; only the image `host` has others than `/`.
    #[serde(default = "root_tree", skip_serializing_if = "is_root_tree")]
    pub mount_point: String,
}

/// The mount point of the tree that every image has.
pub(super) fn root_tree() -> String {
    "/".to_owned()
}

fn is_root_tree(mount_point: &str) -> bool {
    mount_point == "/"
}

/// How the processes of an image are started. Every field may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub env: Vec<(String, String)>,
    /// `user`, `uid`, `user:group` or `uid:gid`.
    pub user: Option<String>,
    pub workdir: Option<String>,
}

impl ImageConfig {
    /// The command that is started if a caller names none.
    pub fn command(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

impl ImageRecord {
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes).sum()
    }
}
