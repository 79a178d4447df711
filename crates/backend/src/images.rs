//! Images as the service sees them, and where they are fetched from.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::pin::Pin;
use std::time::SystemTime;

use domain::SnapshotId;
use tokio::io::AsyncRead;

use crate::BackendError;

/// The images that a backend keeps. One that keeps none of its own has nothing to list or pull.
#[async_trait::async_trait]
pub trait Images: Send + Sync {
    /// By name; what is made of the host itself is not among them.
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError>;
    /// The image that a sandbox would get by this name.
    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError>;
    /// Whether this name may be fetched because a sandbox needs it.
    fn may_fetch(&self, name: &str) -> bool;
    /// Fetches an image, in the place of one that has the name.
    async fn pull(&self, pull: Pull<'_>) -> Result<ImageInfo, BackendError>;
    /// Takes in an archive: of a root file system, an OCI layout or what `docker save` wrote. A
    /// name that is taken is refused.
    async fn import(&self, name: &str, archive: ArchiveStream<'_>) -> Result<ImageInfo, BackendError>;
    /// Makes an image of the files of a snapshot, above the image that the snapshot was taken on. A
    /// name that is taken is refused.
    async fn commit(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError>;
    async fn remove(&self, name: &str) -> Result<Freed, BackendError>;
    /// Removes what nobody needs, and images beyond the size that all may have together.
    async fn collect(&self) -> Result<Freed, BackendError>;
}

/// An archive that is on its way.
pub type ArchiveStream<'a> = Pin<Box<dyn AsyncRead + Send + 'a>>;

/// An image as it is told of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageInfo {
    pub name: String,
    /// The digest of its manifest.
    pub digest: Option<String>,
    pub bytes: u64,
    /// Digests, from the bottom up.
    pub layers: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub env: Vec<(String, String)>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub last_used: Option<SystemTime>,
    /// Whether its layers lie on the files of this host, as they are when a sandbox is made.
    pub above_host: bool,
}

/// What became free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Images that made room.
    pub images: Vec<String>,
    pub layers: usize,
    pub bytes: u64,
}

/// An image to be fetched.
#[derive(Clone, Copy)]
pub struct Pull<'a> {
    pub name: &'a str,
    pub credentials: Option<&'a Credentials>,
    pub progress: &'a (dyn Fn(Progress) + Send + Sync),
}

/// How far a pull has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Fetching { bytes: u64, of: u64 },
    Unpacking,
}

/// What opens a registry. It never appears in what is printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What is here already when an image is fetched.
#[derive(Clone, Debug, Default)]
pub struct Here {
    /// The digests of layers, of their uncompressed content.
    pub layers: BTreeSet<String>,
    /// How much more there is room for, with all gone that could go.
    pub room: Option<u64>,
}

/// Where images are fetched from. It is here so that backends need not know HTTP.
#[async_trait::async_trait]
pub trait Registry: Send + Sync {
    /// Whether this name may be fetched because a sandbox needs it.
    fn allows(&self, name: &str) -> bool;
    /// Writes the image as an OCI layout into the empty directory `into`, without the layers
    /// that are here. Answers the digest of its manifest. What can have no room is not fetched.
    async fn fetch(&self, pull: Pull<'_>, here: &Here, into: &Path) -> Result<String, BackendError>;
}
