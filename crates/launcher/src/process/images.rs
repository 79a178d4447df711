//! Requests about images: reads are answered directly, and each change is made by a separate process, so
//! that the loop is not blocked.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use backend::HostSoftware;
use domain::SnapshotId;
use linux::namespaces::{self, NamespaceSet};
use linux::spawn::{self, ForkResult, SingleThread};
use rustix::fs::MemfdFlags;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::host_report::HostSoftwareReport;
use super::{Launcher, record};
use crate::images::{
    self, CollectionResult, Digest, ExistingImagePolicy, FoundImage, HOST_IMAGE, HostImage, HostPrograms,
    ImageError, ImageImport, ImageRecord, ImportBase, ImportSource, UnpackMode,
};
use crate::protocol::{OpError, OpErrorKind, OpResult};
use crate::settings::{LauncherSettings, LifetimePolicy};

/// A request about images.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageOp {
    List,
    /// Asks for the image of this name.
    Find {
        name: String,
    },
    /// Asks for the digests of all layers, and for the free space for an image of that name.
    Layers {
        name: String,
    },
    /// Asks for the software in the image `host`.
    HostSoftware,
    /// Imports the OCI layout in the directory whose descriptor is sent along.
    Import {
        name: String,
        wanted: Digest,
    },
    /// Imports the archive whose descriptor is sent along.
    ImportArchive {
        name: String,
    },
    /// Makes an image from the files of a snapshot.
    Commit {
        #[serde(with = "crate::ids")]
        snapshot: SnapshotId,
        name: String,
    },
    Remove {
        name: String,
    },
    Collect,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageOpResult {
    /// Each image with the time of its last use, in seconds.
    Images(Vec<(ImageRecord, u64)>),
    Found(Option<ImageRecord>),
    Layers {
        layers: Vec<Digest>,
        room: Option<u64>,
    },
    HostSoftware(HostSoftwareReport),
    Taken(ImageRecord),
    Freed(CollectionResult),
}

/// A change that is being made. When `pidfd` is readable, [`PendingImageChange::conclude`] returns the outcome.
#[derive(Debug)]
pub struct PendingImageChange {
    pub pidfd: OwnedFd,
    result: OwnedFd,
}

/// The largest number of concurrent changes; they wait for each other.
pub(crate) const MAX_IMAGE_CHANGES: usize = 16;
/// The largest result; a record has a few kilobytes.
const MAX_RESULT_BYTES: u64 = 16 << 20;

/// The images of one state directory.
pub(super) struct LauncherImages {
    /// The state directory that holds the images.
    pub(super) state_dir: PathBuf,
    pub(super) host: HostImage,
    programs: HostPrograms,
    /// The largest total size of all layers.
    max_bytes: Option<u64>,
}

/// Makes the image `host`, with files hidden that not everyone may read.
fn open_host_image(settings: &LauncherSettings) -> Result<HostImage, ImageError> {
    let image = images::create_host_skeleton(&settings.state_dir.join("host"))?;
    let server = match settings.lifetime {
        LifetimePolicy::Own => Some(record::parent_identity()),
        LifetimePolicy::Ours => None,
    };
    images::hide_unreadable_files(image, &settings.state_dir.join("hidden"), server)
}

impl LauncherImages {
    pub(super) fn open(settings: &LauncherSettings) -> Result<Self, ImageError> {
        Ok(Self {
            state_dir: settings.image_state.clone(),
            host: open_host_image(settings)?,
            programs: HostPrograms::of_this_host(),
            max_bytes: settings.image_bytes,
        })
    }

    /// Applies the settings of images, which can change while sandboxes run.
    pub(super) fn apply_settings(&mut self, settings: &LauncherSettings) {
        self.max_bytes = settings.image_bytes;
    }

    pub(super) fn resolve(&self, name: &str) -> Result<FoundImage, OpError> {
        images::resolve_image(&self.state_dir, &self.host, name).map_err(image_op_error)
    }

    /// Records the use of an image: the least recently used one is removed first when space is needed.
    pub(super) fn record_use(&self, image: &FoundImage) {
        let Some(record) = &image.record else { return };
        if let Err(error) = images::touch_image(&self.state_dir, record) {
            tracing::debug!(%error, "failed to record the use of an image");
        }
    }

    /// Answers a request that only reads; `None` for a change.
    pub(super) fn answer_query(&self, op: &ImageOp) -> Option<Result<OpResult, OpError>> {
        let state = &self.state_dir;
        let answer = match op {
            ImageOp::List => images::list_images(state).map(|found| {
                let seconds = |time: SystemTime| {
                    time.duration_since(UNIX_EPOCH).map_or(0, |since: Duration| since.as_secs())
                };
                let images = found.into_iter().map(|(record, used)| (record, seconds(used)));
                ImageOpResult::Images(images.collect())
            }),
            ImageOp::Find { name } => self.find_image(name).map(ImageOpResult::Found),
            ImageOp::Layers { name } => self.layers_and_room(name),
            ImageOp::HostSoftware => Ok(ImageOpResult::HostSoftware(self.programs.read_software().into())),
            ImageOp::Import { .. }
            | ImageOp::ImportArchive { .. }
            | ImageOp::Commit { .. }
            | ImageOp::Remove { .. }
            | ImageOp::Collect => {
                return None;
            }
        };
        Some(answer.map(OpResult::Image).map_err(image_change_error))
    }

    fn find_image(&self, name: &str) -> Result<Option<ImageRecord>, ImageError> {
        if name == HOST_IMAGE {
            return Ok(Some(ImageRecord {
                name: HOST_IMAGE.to_owned(),
                manifest: None,
                config: images::ImageConfig::default(),
                layers: Vec::new(),
                base: images::ImageBase::Host,
            }));
        }
        images::find_image(&self.state_dir, name)
    }

    fn layers_and_room(&self, name: &str) -> Result<ImageOpResult, ImageError> {
        let state = &self.state_dir;
        let room = images::space_for_image(state, self.max_bytes, name)?;
        Ok(ImageOpResult::Layers { layers: images::list_layers(state)?, room })
    }

    fn import_image(
        &self,
        thread: &SingleThread,
        name: &str,
        source: ImportSource,
        wanted: Option<Digest>,
        existing: ExistingImagePolicy,
        below: ImportBase,
    ) -> Result<ImageOpResult, ImageError> {
        let import = ImageImport { name, source, wanted, existing, most: self.max_bytes, below };
        let unpacker = UnpackMode::Worker(thread);
        let made = images::import_image(&self.state_dir, import, unpacker, &mut |_| {})?;
        Ok(ImageOpResult::Taken(made.record))
    }
}

impl Launcher {
    /// Returns the full name of an image, if it exists, for a caller in this process.
    pub fn find_image_name(&self, name: &str) -> Result<Option<String>, OpError> {
        let found = self.images.find_image(name).map_err(image_op_error)?;
        Ok(found.map(|record| record.name))
    }

    /// Returns the software in the image `host`, for a caller in this process.
    pub fn host_software(&self) -> HostSoftware {
        self.images.programs.read_software()
    }

    /// Begins a change. The process that makes it ends with this process.
    pub fn begin_image_change(&self, op: ImageOp, layout: Option<OwnedFd>) -> io::Result<PendingImageChange> {
        let result = rustix::fs::memfd_create("result", MemfdFlags::CLOEXEC)?;
        let parent = rustix::process::getpid();
        match self.thread.fork(NamespaceSet::NONE, None)? {
            ForkResult::Parent { pidfd, .. } => Ok(PendingImageChange { pidfd, result }),
            ForkResult::Child => {
                let made = self.run_image_change(parent, op, layout, result).is_ok();
                spawn::exit_now(i32::from(!made))
            }
        }
    }

    fn run_image_change(
        &self,
        parent: Pid,
        op: ImageOp,
        layout: Option<OwnedFd>,
        result: OwnedFd,
    ) -> io::Result<()> {
        namespaces::die_with_parent()?;
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::other("the launcher is gone"));
        }
        // Clients wait for the end of connections that the launcher closes, and this process has copies
        // of their descriptors.
        let kept = layout.iter().map(AsFd::as_fd).chain([result.as_fd()]);
        linux::descriptors::close_all_except_these(kept)?;
        let outcome = self.apply_image_change(op, layout).map_err(image_change_error);
        let text = serde_json::to_vec(&outcome)?;
        std::fs::File::from(result).write_all(&text)
    }

    fn apply_image_change(&self, op: ImageOp, layout: Option<OwnedFd>) -> Result<ImageOpResult, ImageError> {
        let Self { thread, images: store, .. } = self;
        let state = &store.state_dir;
        match op {
            ImageOp::Import { name, wanted } => {
                let none = || ImageError::Malformed("the request has no directory".to_owned());
                let root = linux::fs::RootDirectory::from_descriptor(layout.ok_or_else(none)?);
                // A compromised server must not be able to read files through the launcher.
                let source = ImportSource::from_layout(&root, self.settings.server_uid)?;
                store.import_image(
                    thread,
                    &name,
                    source,
                    Some(wanted),
                    ExistingImagePolicy::Replace,
                    ImportBase::Nothing,
                )
            }
            ImageOp::ImportArchive { name } => {
                let none = || ImageError::Malformed("the request has no file".to_owned());
                let archive = std::fs::File::from(layout.ok_or_else(none)?);
                let source = ImportSource::from_archive(archive, self.settings.server_uid)?;
                store.import_image(
                    thread,
                    &name,
                    source,
                    None,
                    ExistingImagePolicy::Refuse,
                    ImportBase::Nothing,
                )
            }
            ImageOp::Commit { snapshot, name } => {
                let (source, below) = self.rights.commit_source(&snapshot)?;
                store.import_image(thread, &name, source, None, ExistingImagePolicy::Refuse, below)
            }
            ImageOp::Remove { name } => images::remove_image(state, &name).map(ImageOpResult::Freed),
            ImageOp::Collect => images::collect_images(state, store.max_bytes).map(ImageOpResult::Freed),
            ImageOp::List | ImageOp::Find { .. } | ImageOp::Layers { .. } | ImageOp::HostSoftware => {
                Err(ImageError::Malformed("the request is not a change".to_owned()))
            }
        }
    }
}

impl PendingImageChange {
    /// Returns the outcome. The process has ended, so this does not wait.
    pub fn conclude(self) -> Result<OpResult, OpError> {
        let died = |error: io::Error| image_change_error(ImageError::WorkerDied(error.to_string()));
        spawn::wait_for_child(self.pidfd.as_fd()).map_err(died)?;
        let mut result = std::fs::File::from(self.result);
        let mut text = Vec::new();
        result.seek(SeekFrom::Start(0)).map_err(died)?;
        result.take(MAX_RESULT_BYTES).read_to_end(&mut text).map_err(died)?;
        let outcome: Result<ImageOpResult, OpError> =
            serde_json::from_slice(&text).map_err(|error| died(error.into()))?;
        outcome.map(OpResult::Image)
    }
}

fn image_change_error(error: ImageError) -> OpError {
    match error {
        ImageError::Unknown(_) | ImageError::BadName(_) | ImageError::Reserved(_) => image_op_error(error),
        error => {
            let hint = error.hint().map(str::to_owned);
            let mut message = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                message = format!("{message}: {error}");
                cause = error.source();
            }
            OpError { kind: OpErrorKind::Image, message, hint }
        }
    }
}

pub(super) fn image_op_error(error: ImageError) -> OpError {
    let hint = error.hint().map(str::to_owned);
    match error {
        ImageError::Unknown(_) => OpError { kind: OpErrorKind::NoImage, message: error.to_string(), hint },
        error => OpError { kind: OpErrorKind::Unsupported, message: error.to_string(), hint },
    }
}
