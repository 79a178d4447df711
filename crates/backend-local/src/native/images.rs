//! The image interface for the service: images are fetched here, without privileges, and unpacked by
//! the launcher.
//!
//! ```text
//! service ─► Native ─► registry      downloads into a directory that only the server uses
//!              └─────► launcher      gets that directory's descriptor, unpacks and stores the image
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, UNIX_EPOCH};

use backend::{ArchiveStream, BackendError, Freed, Here, ImageInfo, Images, Progress, Pull, Registry};

use domain::SnapshotId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use super::{Native, unexpected};
use crate::images::{Collected, Digest, ImageBase, Record};
use crate::launcher::images::{ImageAnswer, ImageQuestion};
use crate::launcher::protocol::{Answer, Question};

/// The registry that images are fetched from, and the directory that holds them until they are unpacked.
pub struct Fetching {
    /// Replaced as a whole by a reload.
    registry: RwLock<Arc<dyn Registry>>,
    /// A directory that only this process uses.
    downloads: PathBuf,
    /// Limits the number of archives that are uploaded at once.
    imports: Semaphore,
}

const MAX_IMPORTS: usize = 4;
/// The disk space that must stay free while an archive is uploaded.
const MIN_FREE: u64 = 256 << 20;
/// The free disk space is checked each time this many bytes were written.
const CHECK_EVERY: u64 = 16 << 20;
/// How long a client may pause while it sends an archive.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

impl Fetching {
    /// Removes the downloads that a killed predecessor left, and makes an empty directory.
    pub fn open(registry: Arc<dyn Registry>, downloads: PathBuf) -> io::Result<Self> {
        remove(&downloads)?;
        std::fs::create_dir(&downloads)?;
        Ok(Self { registry: RwLock::new(registry), downloads, imports: Semaphore::new(MAX_IMPORTS) })
    }

    fn registry(&self) -> Arc<dyn Registry> {
        Arc::clone(&self.registry.read().expect("replacing the registry does not panic"))
    }
}

/// The directory with the files of one pull; it is removed when this value is dropped.
struct Download(PathBuf);

impl Download {
    fn new(downloads: &Path) -> io::Result<Self> {
        let mut name = [0; 16];
        rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = downloads.join(name);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            tracing::warn!(%error, "failed to remove downloaded files; the next start removes them");
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    linux::fs::Root::open(parent)?.remove_tree(Path::new(name))
}

impl Native {
    /// Enables fetching of images.
    pub fn fetching(self, fetching: Fetching) -> Self {
        Self { fetching: Some(fetching), ..self }
    }

    /// Replaces the registry; pulls that have begun continue with the former one.
    pub fn set_registry(&self, registry: Arc<dyn Registry>) {
        if let Some(fetching) = &self.fetching {
            *fetching.registry.write().expect("replacing the registry does not panic") = registry;
        }
    }

    async fn ask_images(
        &self,
        question: ImageQuestion,
        directory: Option<OwnedFd>,
    ) -> Result<ImageAnswer, BackendError> {
        match self.link.ask_with(Question::Image(question), directory).await? {
            (Answer::Image(answer), _) => Ok(answer),
            _ => Err(unexpected()),
        }
    }

    /// Asks the launcher to make an image; an error keeps the message of the refusal.
    async fn taken_in(
        &self,
        question: ImageQuestion,
        source: Option<OwnedFd>,
    ) -> Result<ImageInfo, BackendError> {
        match self.ask_images(question, source).await {
            Ok(ImageAnswer::Taken(record)) => Ok(info(record)),
            Ok(_) => Err(unexpected()),
            Err(BackendError::Pull { message, hint, .. }) => Err(BackendError::TooMuch { message, hint }),
            Err(error) => Err(error),
        }
    }

    /// Returns the layers that are already present and the free space for an image of that name.
    async fn here(&self, name: &str) -> Result<Here, BackendError> {
        match self.ask_images(ImageQuestion::Layers { name: name.to_owned() }, None).await? {
            ImageAnswer::Layers { layers, room } => {
                Ok(Here { layers: layers.iter().map(ToString::to_string).collect(), room })
            }
            _ => Err(unexpected()),
        }
    }
}

#[async_trait::async_trait]
impl Images for Native {
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError> {
        let ImageAnswer::Images(images) = self.ask_images(ImageQuestion::List, None).await? else {
            return Err(unexpected());
        };
        let info = |(record, used): (Record, u64)| ImageInfo {
            last_used: UNIX_EPOCH.checked_add(Duration::from_secs(used)),
            ..info(record)
        };
        Ok(images.into_iter().map(info).collect())
    }

    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError> {
        match self.ask_images(ImageQuestion::Find { name: name.to_owned() }, None).await? {
            ImageAnswer::Found(found) => Ok(found.map(info)),
            _ => Err(unexpected()),
        }
    }

    fn may_fetch(&self, name: &str) -> bool {
        self.fetching.as_ref().is_some_and(|fetching| fetching.registry().allows(name))
    }

    async fn pull(&self, pull: Pull<'_>) -> Result<ImageInfo, BackendError> {
        let failed =
            |message: String, hint| BackendError::Pull { image: pull.name.to_owned(), message, hint };
        let Some(fetching) = &self.fetching else {
            return Err(failed("this server does not fetch images".to_owned(), None));
        };
        let no_room =
            |error: io::Error| failed(format!("could not use the download directory: {error}"), None);
        let download = Download::new(&fetching.downloads).map_err(no_room)?;
        let here = self.here(pull.name).await?;
        let digest = fetching.registry().fetch(pull, &here, &download.0).await?;
        let wanted = Digest::parse(&digest).map_err(|error| failed(error.to_string(), None))?;
        (pull.progress)(Progress::Unpacking);
        let directory = std::fs::File::open(&download.0).map_err(no_room)?;
        let question = ImageQuestion::Import { name: pull.name.to_owned(), wanted };
        match self.ask_images(question, Some(directory.into())).await {
            Ok(ImageAnswer::Taken(record)) => Ok(info(record)),
            Ok(_) => Err(unexpected()),
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
        let download = Download::new(&fetching.downloads).map_err(no_room)?;
        let room = self.here(name).await?.room.unwrap_or(u64::MAX);
        let path = download.0.join("archive");
        spool(archive, &path, room).await?;
        let file = std::fs::File::open(&path).map_err(no_room)?;
        let question = ImageQuestion::ImportArchive { name: name.to_owned() };
        self.taken_in(question, Some(file.into())).await
    }

    async fn commit(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError> {
        let (snapshot, name) = (snapshot.as_str().to_owned(), name.to_owned());
        self.taken_in(ImageQuestion::Commit { snapshot, name }, None).await
    }

    async fn remove(&self, name: &str) -> Result<Freed, BackendError> {
        match self.ask_images(ImageQuestion::Remove { name: name.to_owned() }, None).await? {
            ImageAnswer::Freed(collected) => Ok(freed(collected)),
            _ => Err(unexpected()),
        }
    }

    async fn collect(&self) -> Result<Freed, BackendError> {
        match self.ask_images(ImageQuestion::Collect, None).await? {
            ImageAnswer::Freed(collected) => Ok(freed(collected)),
            _ => Err(unexpected()),
        }
    }
}

/// Writes an archive to `path` as it arrives, up to `room` bytes.
async fn spool(mut archive: ArchiveStream<'_>, path: &Path, room: u64) -> Result<(), BackendError> {
    let failed = |source| BackendError::Io { action: "write the archive", source };
    let too_large = |message: &str| BackendError::TooMuch {
        message: message.to_owned(),
        hint: Some("remove images with `coracle image rm` or `coracle image gc`".to_owned()),
    };
    let mut file = tokio::fs::File::create(path).await.map_err(failed)?;
    let mut buffer = vec![0; 256 << 10];
    let (mut written, mut unchecked) = (0_u64, CHECK_EVERY);
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
        if unchecked >= CHECK_EVERY {
            unchecked = 0;
            let free = rustix::fs::statvfs(path).map_err(io::Error::from).map_err(failed)?;
            if free.f_bavail.saturating_mul(free.f_frsize) < MIN_FREE {
                return Err(too_large("the disk has too little free space for the archive"));
            }
        }
        file.write_all(&buffer[..read]).await.map_err(failed)?;
    }
}

fn info(record: Record) -> ImageInfo {
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

fn freed(collected: Collected) -> Freed {
    Freed { images: collected.images, layers: collected.layers, bytes: collected.bytes }
}
