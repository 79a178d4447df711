//! Images as the service sees them, and the registry they are pulled from.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::time::SystemTime;

use domain::SnapshotId;
use tokio::io::AsyncRead;

use crate::{BackendError, HostSoftware};

/// The images that a backend stores. A backend without its own images has nothing to list or pull.
#[async_trait::async_trait]
pub trait Images: Send + Sync {
    /// Lists images by name; images made from the host itself are not included.
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError>;
    /// Returns the image with exactly this name, or with the default tag if the name has none.
    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError>;
    /// Returns the current software of the image that is made from the host itself.
    async fn host_software(&self) -> Result<HostSoftware, BackendError>;
    /// Whether an image of this name may be pulled when a sandbox needs it.
    fn may_pull(&self, name: &str) -> bool;
    /// Pulls an image and replaces an existing one with the same name.
    async fn pull(&self, pull: ImagePull<'_>) -> Result<ImageInfo, BackendError>;
    /// Imports an archive: a root file system, an OCI layout or the output of `docker save`. Fails
    /// if the name already exists.
    async fn import(&self, name: &str, archive: ArchiveStream<'_>) -> Result<ImageInfo, BackendError>;
    /// Creates an image from the files of a snapshot, on top of the image that the snapshot was
    /// taken on. Fails if the name already exists.
    async fn commit_snapshot(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError>;
    async fn remove(&self, name: &str) -> Result<FreedSpace, BackendError>;
    /// Removes unused layers, and images beyond the total size limit.
    async fn collect_unused(&self) -> Result<FreedSpace, BackendError>;
}

/// An archive that is being uploaded.
pub type ArchiveStream<'a> = Pin<Box<dyn AsyncRead + Send + 'a>>;

/// The description of an image.
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
    /// Whether its layers are stacked on the files of this host, as they are when a sandbox is
    /// created.
    pub above_host: bool,
}

/// The storage that was freed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreedSpace {
    /// Images that were removed to free space.
    pub images: Vec<String>,
    pub layers: usize,
    pub bytes: u64,
}

/// A request to pull an image.
#[derive(Clone, Copy)]
pub struct ImagePull<'a> {
    pub name: &'a str,
    pub credentials: Option<&'a RegistryCredentials>,
    pub progress: &'a (dyn Fn(PullProgress) + Send + Sync),
}

/// The progress of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullProgress {
    Fetching { bytes: u64, of: u64 },
    Unpacking,
}

/// The credentials for a registry. They are never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryCredentials {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for RegistryCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The local state that a pull takes into account.
#[derive(Clone, Debug, Default)]
pub struct LocalLayers {
    /// The digests of the uncompressed layers that are already stored.
    pub layers: BTreeSet<String>,
    /// The space available for the image if everything removable were removed.
    pub room: Option<u64>,
}

/// The source of pulled images. The trait is defined here so that backends need no HTTP code.
#[async_trait::async_trait]
pub trait ImageRegistry: Send + Sync {
    /// Whether an image of this name may be pulled when a sandbox needs it.
    fn allows_pull(&self, name: &str) -> bool;
    /// Writes the image as an OCI layout into the empty directory `into`, without the layers that
    /// are already stored. Returns the digest of its manifest. An image that cannot fit is not
    /// downloaded. `puller` is a connection to a process that was started for this pull; that process
    /// alone talks to the registry.
    async fn fetch_image(
        &self,
        pull: ImagePull<'_>,
        here: &LocalLayers,
        into: &Path,
        puller: OwnedFd,
    ) -> Result<String, BackendError>;
}
