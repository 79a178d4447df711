//! Images as the service sees them: fetched here, without privileges, and unpacked elsewhere.
//!
//! ```text
//! service ─► Native ─► registry      into a directory of the server's own
//!              └─────► launcher      gets that directory's descriptor, unpacks and keeps it
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, UNIX_EPOCH};

use backend::{BackendError, Freed, Here, ImageInfo, Images, Progress, Pull, Registry};

use super::{Native, unexpected};
use crate::images::{Collected, Digest, Record};
use crate::launcher::images::{ImageAnswer, ImageQuestion};
use crate::launcher::protocol::{Answer, Question};

/// Where images come from, and where they lie until they are unpacked.
pub struct Fetching {
    /// Replaced as a whole by a reload.
    registry: RwLock<Arc<dyn Registry>>,
    /// A directory that this process alone uses.
    downloads: PathBuf,
}

impl Fetching {
    /// Clears what a killed predecessor left.
    pub fn open(registry: Arc<dyn Registry>, downloads: PathBuf) -> io::Result<Self> {
        remove(&downloads)?;
        std::fs::create_dir(&downloads)?;
        Ok(Self { registry: RwLock::new(registry), downloads })
    }

    fn registry(&self) -> Arc<dyn Registry> {
        Arc::clone(&self.registry.read().expect("replacing the registry does not panic"))
    }
}

/// What is fetched for one pull; it goes with this value.
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
            tracing::warn!(%error, "what was fetched stays until the next start");
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    linux::fs::Root::open(parent)?.remove_tree(Path::new(name))
}

impl Native {
    /// Lets images be fetched.
    pub fn fetching(self, fetching: Fetching) -> Self {
        Self { fetching: Some(fetching), ..self }
    }

    /// Replaces the registry; pulls that have begun go on with the former one.
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

    /// What is here before an image of that name is fetched.
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
            return Err(failed("this server fetches no images".to_owned(), None));
        };
        let no_room = |error: io::Error| failed(format!("could not make room for it: {error}"), None);
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

fn info(record: Record) -> ImageInfo {
    let bytes = record.bytes();
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
    }
}

fn freed(collected: Collected) -> Freed {
    Freed { images: collected.images, layers: collected.layers, bytes: collected.bytes }
}
