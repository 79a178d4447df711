//! What is written about an image: which layers it has and how its processes are started.

use serde::{Deserialize, Serialize};

use super::Digest;

/// An image as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub name: String,
    /// The digest of its manifest, where it came with one.
    pub manifest: Option<Digest>,
    pub config: ImageConfig,
    /// From the bottom up.
    pub layers: Vec<LayerRecord>,
}

/// A layer of an image, by the digest of its uncompressed archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    pub digest: Digest,
    /// What it takes up: the content of its files, their attributes, and 4 KiB for each entry.
    pub bytes: u64,
}

/// How an image wants its processes to be started. Everything may be left open.
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
    /// What is started where a caller names nothing.
    pub fn command(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

impl Record {
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes).sum()
    }
}
