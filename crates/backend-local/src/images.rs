//! The image interface for the service: images are fetched by a process that the launcher starts, received here,
//! without privileges, and unpacked by the launcher.
//!
//! ```text
//! service ─► LocalBackend ─► registry ─► puller   sends the image, which is written to a directory that only the server uses
//!                └─────────► launcher             starts the puller; gets that directory's descriptor, unpacks and stores the image
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, UNIX_EPOCH};

use backend::{
    ArchiveStream, BackendError, FreedSpace, HostSoftware, ImageInfo, ImagePull, ImageRegistry, Images,
    LocalLayers, PullProgress,
};
use domain::{HOST_IMAGE, SnapshotId};
use launcher::images::{CollectionResult, Digest, ImageBase, ImageRecord};
use launcher::protocol::{ImageOp, ImageOpResult, LauncherOp, OpResult};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::{LocalBackend, unexpected_response};

/// The registry that images are fetched from, and the directory that holds them until they are unpacked.
pub struct ImageFetcher {
    /// Replaced as a whole by a reload.
    registry: RwLock<Arc<dyn ImageRegistry>>,
    /// A directory that only this process uses.
    downloads: PathBuf,
    /// Limits the number of archives that are uploaded at once.
    imports: Semaphore,
}

const MAX_IMPORTS: usize = 4;
/// The disk space that must stay free while an archive is uploaded.
const MIN_FREE_SPACE: u64 = 256 << 20;
/// The free disk space is checked each time this many bytes were written.
const CHECK_INTERVAL_BYTES: u64 = 16 << 20;
/// How long a client may pause while it sends an archive.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

impl ImageFetcher {
    /// Removes the downloads that a killed predecessor left, and makes an empty directory.
    pub fn open(registry: Arc<dyn ImageRegistry>, downloads: PathBuf) -> io::Result<Self> {
        remove_directory(&downloads)?;
        std::fs::create_dir(&downloads)?;
        Ok(Self { registry: RwLock::new(registry), downloads, imports: Semaphore::new(MAX_IMPORTS) })
    }

    fn registry(&self) -> Arc<dyn ImageRegistry> {
        Arc::clone(&self.registry.read().expect("replacing the registry does not panic"))
    }
}

/// The directory with the files of one pull; it is removed when this value is dropped.
struct DownloadDirectory(PathBuf);

impl DownloadDirectory {
    fn new(downloads: &Path) -> io::Result<Self> {
        let mut name = [0; 16];
        rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = downloads.join(name);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for DownloadDirectory {
    fn drop(&mut self) {
        if let Err(error) = remove_directory(&self.0) {
            tracing::warn!(%error, "failed to remove downloaded files; the next start removes them");
        }
    }
}

fn remove_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    linux::fs::RootDirectory::open(parent)?.remove_tree(Path::new(name))
}

impl LocalBackend {
    /// Enables fetching of images.
    pub fn with_fetcher(self, fetching: ImageFetcher) -> Self {
        Self { fetching: Some(fetching), ..self }
    }

    /// Replaces the registry; pulls that have begun continue with the former one.
    pub fn set_registry(&self, registry: Arc<dyn ImageRegistry>) {
        if let Some(fetching) = &self.fetching {
            *fetching.registry.write().expect("replacing the registry does not panic") = registry;
        }
    }

    async fn request_images(
        &self,
        op: ImageOp,
        directory: Option<OwnedFd>,
    ) -> Result<ImageOpResult, BackendError> {
        match self.link.request_with_descriptor(LauncherOp::Image(op), directory).await? {
            (OpResult::Image(answer), _) => Ok(answer),
            _ => Err(unexpected_response()),
        }
    }

    /// Asks the launcher to make an image; an error keeps the message of the refusal.
    async fn make_image(&self, op: ImageOp, source: Option<OwnedFd>) -> Result<ImageInfo, BackendError> {
        match self.request_images(op, source).await {
            Ok(ImageOpResult::Taken(record)) => Ok(image_info(record)),
            Ok(_) => Err(unexpected_response()),
            Err(BackendError::Pull { message, hint, .. }) => Err(BackendError::TooMuch { message, hint }),
            Err(error) => Err(error),
        }
    }

    /// Has the launcher start a process that fetches one image, and returns the connection to it.
    async fn start_puller(&self) -> Result<OwnedFd, BackendError> {
        let failed = |source| BackendError::Io { action: "connect to a puller", source };
        let (own, other) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
        match self.link.request_with_descriptor(LauncherOp::StartPull, Some(other.into())).await? {
            (OpResult::Done, _) => Ok(own.into()),
            _ => Err(unexpected_response()),
        }
    }

    /// Returns the layers that are already present and the free space for an image of that name.
    async fn local_layers(&self, name: &str) -> Result<LocalLayers, BackendError> {
        match self.request_images(ImageOp::Layers { name: name.to_owned() }, None).await? {
            ImageOpResult::Layers { layers, room } => {
                Ok(LocalLayers { layers: layers.iter().map(ToString::to_string).collect(), room })
            }
            _ => Err(unexpected_response()),
        }
    }
}

#[async_trait::async_trait]
impl Images for LocalBackend {
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError> {
        let ImageOpResult::Images(images) = self.request_images(ImageOp::List, None).await? else {
            return Err(unexpected_response());
        };
        let info = |(record, used): (ImageRecord, u64)| ImageInfo {
            last_used: UNIX_EPOCH.checked_add(Duration::from_secs(used)),
            ..image_info(record)
        };
        Ok(images.into_iter().map(info).collect())
    }

    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError> {
        if name == HOST_IMAGE {
            // It always exists, and most sandboxes use it, so the launcher is not asked.
            let name = name.to_owned();
            return Ok(Some(ImageInfo { name, above_host: true, ..ImageInfo::default() }));
        }
        match self.request_images(ImageOp::Find { name: name.to_owned() }, None).await? {
            ImageOpResult::Found(found) => Ok(found.map(image_info)),
            _ => Err(unexpected_response()),
        }
    }

    async fn host_software(&self) -> Result<HostSoftware, BackendError> {
        match self.request_images(ImageOp::HostSoftware, None).await? {
            ImageOpResult::HostSoftware(report) => Ok(report.into()),
            _ => Err(unexpected_response()),
        }
    }

    fn may_pull(&self, name: &str) -> bool {
        self.fetching.as_ref().is_some_and(|fetching| fetching.registry().allows_pull(name))
    }

    async fn pull(&self, pull: ImagePull<'_>) -> Result<ImageInfo, BackendError> {
        let failed =
            |message: String, hint| BackendError::Pull { image: pull.name.to_owned(), message, hint };
        let Some(fetching) = &self.fetching else {
            return Err(failed("this server does not fetch images".to_owned(), None));
        };
        let no_room =
            |error: io::Error| failed(format!("could not use the download directory: {error}"), None);
        let download = DownloadDirectory::new(&fetching.downloads).map_err(no_room)?;
        let here = self.local_layers(pull.name).await?;
        let puller = self.start_puller().await?;
        let digest = fetching.registry().fetch_image(pull, &here, &download.0, puller).await?;
        let wanted = Digest::parse(&digest).map_err(|error| failed(error.to_string(), None))?;
        (pull.progress)(PullProgress::Unpacking);
        let directory = std::fs::File::open(&download.0).map_err(no_room)?;
        let question = ImageOp::Import { name: pull.name.to_owned(), wanted };
        match self.request_images(question, Some(directory.into())).await {
            Ok(ImageOpResult::Taken(record)) => Ok(image_info(record)),
            Ok(_) => Err(unexpected_response()),
            Err(BackendError::Unsupported { message, hint } | BackendError::Pull { message, hint, .. }) => {
                Err(failed(message, hint))
            }
            Err(error) => Err(error),
        }
    }

    async fn import(&self, name: &str, archive: ArchiveStream<'_>) -> Result<ImageInfo, BackendError> {
        let refused = |message: &str| BackendError::Unsupported { message: message.to_owned(), hint: None };
        let Some(fetching) = &self.fetching else {
            return Err(refused("this server does not import images"));
        };
        let _permit = fetching.imports.try_acquire().map_err(|_full| {
            BackendError::Exhausted(format!("limit of concurrent image imports reached ({MAX_IMPORTS})"))
        })?;
        let no_room = |source| BackendError::Io { action: "use the download directory", source };
        let download = DownloadDirectory::new(&fetching.downloads).map_err(no_room)?;
        let room = self.local_layers(name).await?.room.unwrap_or(u64::MAX);
        let path = download.0.join("archive");
        spool_archive(archive, &path, room).await?;
        let file = std::fs::File::open(&path).map_err(no_room)?;
        let question = ImageOp::ImportArchive { name: name.to_owned() };
        self.make_image(question, Some(file.into())).await
    }

    async fn commit_snapshot(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError> {
        let (snapshot, name) = (snapshot.clone(), name.to_owned());
        self.make_image(ImageOp::Commit { snapshot, name }, None).await
    }

    async fn remove(&self, name: &str) -> Result<FreedSpace, BackendError> {
        match self.request_images(ImageOp::Remove { name: name.to_owned() }, None).await? {
            ImageOpResult::Freed(collected) => Ok(freed_space(collected)),
            _ => Err(unexpected_response()),
        }
    }

    async fn collect_unused(&self) -> Result<FreedSpace, BackendError> {
        match self.request_images(ImageOp::Collect, None).await? {
            ImageOpResult::Freed(collected) => Ok(freed_space(collected)),
            _ => Err(unexpected_response()),
        }
    }
}

/// Writes an archive to `path` as it arrives, up to `room` bytes.
async fn spool_archive(mut archive: ArchiveStream<'_>, path: &Path, room: u64) -> Result<(), BackendError> {
    let failed = |source| BackendError::Io { action: "write the archive", source };
    let too_large = |message: &str| BackendError::TooMuch {
        message: message.to_owned(),
        hint: Some("remove images with `coracle image rm` or `coracle image gc`".to_owned()),
    };
    let mut file = tokio::fs::File::create(path).await.map_err(failed)?;
    let mut buffer = vec![0; 256 << 10];
    let (mut written, mut unchecked) = (0_u64, CHECK_INTERVAL_BYTES);
    loop {
        let read = tokio::time::timeout(STALL_TIMEOUT, archive.read(&mut buffer)).await;
        let stalled = |_elapsed| io::Error::from(io::ErrorKind::TimedOut);
        let read = read.map_err(stalled).flatten().map_err(BackendError::Upload)?;
        if read == 0 {
            return file.flush().await.map_err(failed);
        }
        let length = u64::try_from(read).unwrap_or(u64::MAX);
        (written, unchecked) = (written.saturating_add(length), unchecked.saturating_add(length));
        if written > room {
            return Err(too_large("the archive is larger than the space that `images.max_bytes` leaves"));
        }
        if unchecked >= CHECK_INTERVAL_BYTES {
            unchecked = 0;
            let free = rustix::fs::statvfs(path).map_err(io::Error::from).map_err(failed)?;
            if free.f_bavail.saturating_mul(free.f_frsize) < MIN_FREE_SPACE {
                return Err(too_large("the disk has too little free space for the archive"));
            }
        }
        file.write_all(&buffer[..read]).await.map_err(failed)?;
    }
}

fn image_info(record: ImageRecord) -> ImageInfo {
    let bytes = record.bytes();
    let above_host = record.base == ImageBase::Host;
    let config = record.config;
    ImageInfo {
        name: record.name,
        digest: record.manifest.map(|digest| digest.to_string()),
        bytes,
        layers: record.layers.iter().map(|layer| layer.digest.to_string()).collect(),
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        env: config.env,
        user: config.user,
        workdir: config.workdir,
        last_used: None,
        above_host,
    }
}

fn freed_space(collected: CollectionResult) -> FreedSpace {
    FreedSpace { images: collected.images, layers: collected.layers, bytes: collected.bytes }
}
