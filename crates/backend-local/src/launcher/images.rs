//! Requests about images: reads are answered directly, and each change is made by a separate process, so
//! that the loop is not blocked.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use linux::namespaces::{self, Namespaces};
use linux::spawn::{self, Forked};
use rustix::fs::MemfdFlags;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::Launcher;
use super::create::refuse_image;
use super::protocol::{Answer, Refusal, RefusalKind};
use crate::images::{
    self, AliasRule, Below, Collected, Digest, Existing, HOST, ImageError, Import, Record, Source, Unpacker,
};

/// A request about images.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageQuestion {
    List,
    /// Asks for the image that a name refers to, without the stand-ins for well-known names.
    Find {
        name: String,
    },
    /// Asks for the digests of all layers, and for the free space for an image of that name.
    Layers {
        name: String,
    },
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
        snapshot: String,
        name: String,
    },
    Remove {
        name: String,
    },
    Collect,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageAnswer {
    /// Each image with the time of its last use, in seconds.
    Images(Vec<(Record, u64)>),
    Found(Option<Record>),
    Layers {
        layers: Vec<Digest>,
        room: Option<u64>,
    },
    Taken(Record),
    Freed(Collected),
}

/// A change that is being made. When `pidfd` is readable, [`Change::conclude`] returns the outcome.
#[derive(Debug)]
pub struct Change {
    pub pidfd: OwnedFd,
    result: OwnedFd,
}

/// The largest number of concurrent changes; they wait for each other.
pub const MOST_CHANGES: usize = 16;
/// The largest result; a record has a few kilobytes.
const LONGEST_RESULT: u64 = 16 << 20;

impl Launcher {
    /// Answers a request that only reads; `None` for a change.
    pub fn look_at_images(&self, question: &ImageQuestion) -> Option<Result<Answer, Refusal>> {
        let state = &self.settings.image_state;
        let answer = match question {
            ImageQuestion::List => images::records(state).map(|found| {
                let seconds = |time: SystemTime| {
                    time.duration_since(UNIX_EPOCH).map_or(0, |since: Duration| since.as_secs())
                };
                let images = found.into_iter().map(|(record, used)| (record, seconds(used)));
                ImageAnswer::Images(images.collect())
            }),
            ImageQuestion::Find { name } => self.find_image(name).map(ImageAnswer::Found),
            ImageQuestion::Layers { name } => self.layers_and_room(name),
            ImageQuestion::Import { .. }
            | ImageQuestion::ImportArchive { .. }
            | ImageQuestion::Commit { .. }
            | ImageQuestion::Remove { .. }
            | ImageQuestion::Collect => {
                return None;
            }
        };
        Some(answer.map(Answer::Image).map_err(refuse))
    }

    fn find_image(&self, name: &str) -> Result<Option<Record>, ImageError> {
        // An image that `host` may replace is fetched first, if that is allowed.
        let rule = if self.settings.strict_images { AliasRule::Refuse } else { AliasRule::OperatorOnly };
        let own = super::aliases(&self.settings, rule);
        let nothing = || Record {
            name: HOST.to_owned(),
            manifest: None,
            config: images::ImageConfig::default(),
            layers: Vec::new(),
            base: images::ImageBase::Host,
        };
        match images::resolve(&self.settings.image_state, &self.host, name, &own) {
            Ok(found) => Ok(Some(found.record.unwrap_or_else(nothing))),
            Err(ImageError::Unknown(_) | ImageError::NoStandIn { .. } | ImageError::Strict(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn layers_and_room(&self, name: &str) -> Result<ImageAnswer, ImageError> {
        let state = &self.settings.image_state;
        let room = images::room(state, self.settings.image_bytes, name)?;
        Ok(ImageAnswer::Layers { layers: images::layers(state)?, room })
    }

    /// Begins a change. The process that makes it ends with this process.
    pub fn change_images(&self, question: ImageQuestion, layout: Option<OwnedFd>) -> io::Result<Change> {
        let result = rustix::fs::memfd_create("result", MemfdFlags::CLOEXEC)?;
        let parent = rustix::process::getpid();
        match self.thread.fork(Namespaces::NONE, None)? {
            Forked::Parent { pidfd, .. } => Ok(Change { pidfd, result }),
            Forked::Child => {
                let made = self.make_change(parent, question, layout, result).is_ok();
                spawn::exit_now(i32::from(!made))
            }
        }
    }

    fn make_change(
        &self,
        parent: Pid,
        question: ImageQuestion,
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
        linux::descriptors::keep_only_these(kept)?;
        let outcome = self.change(question, layout).map_err(refuse);
        let text = serde_json::to_vec(&outcome)?;
        std::fs::File::from(result).write_all(&text)
    }

    fn change(&self, question: ImageQuestion, layout: Option<OwnedFd>) -> Result<ImageAnswer, ImageError> {
        let state = &self.settings.image_state;
        match question {
            ImageQuestion::Import { name, wanted } => {
                let none = || ImageError::Malformed("the request has no directory".to_owned());
                let root = linux::fs::Root::from_descriptor(layout.ok_or_else(none)?);
                // A compromised server must not be able to read files through the launcher.
                let source = Source::layout(&root, self.settings.server_uid)?;
                self.take_in(&name, source, Some(wanted), Existing::Replace, Below::Nothing)
            }
            ImageQuestion::ImportArchive { name } => {
                let none = || ImageError::Malformed("the request has no file".to_owned());
                let archive = std::fs::File::from(layout.ok_or_else(none)?);
                let source = Source::archive(archive, self.settings.server_uid)?;
                self.take_in(&name, source, None, Existing::Refuse, Below::Nothing)
            }
            ImageQuestion::Commit { snapshot, name } => {
                let (source, below) = self.source_of_commit(&snapshot)?;
                self.take_in(&name, source, None, Existing::Refuse, below)
            }
            ImageQuestion::Remove { name } => images::remove(state, &name).map(ImageAnswer::Freed),
            ImageQuestion::Collect => {
                images::collect(state, self.settings.image_bytes).map(ImageAnswer::Freed)
            }
            ImageQuestion::List | ImageQuestion::Find { .. } | ImageQuestion::Layers { .. } => {
                Err(ImageError::Malformed("the request is not a change".to_owned()))
            }
        }
    }
}

impl Launcher {
    fn take_in(
        &self,
        name: &str,
        source: Source,
        wanted: Option<Digest>,
        existing: Existing,
        below: Below,
    ) -> Result<ImageAnswer, ImageError> {
        let import = Import { name, source, wanted, existing, most: self.settings.image_bytes, below };
        let unpacker = Unpacker::Worker(&self.thread);
        let made = images::import(&self.settings.image_state, import, unpacker, &mut |_| {})?;
        Ok(ImageAnswer::Taken(made.record))
    }
}

impl Change {
    /// Returns the outcome. The process has ended, so this does not wait.
    pub fn conclude(self) -> Result<Answer, Refusal> {
        let died = |error: io::Error| refuse(ImageError::WorkerDied(error.to_string()));
        spawn::wait(self.pidfd.as_fd()).map_err(died)?;
        let mut result = std::fs::File::from(self.result);
        let mut text = Vec::new();
        result.seek(SeekFrom::Start(0)).map_err(died)?;
        result.take(LONGEST_RESULT).read_to_end(&mut text).map_err(died)?;
        let outcome: Result<ImageAnswer, Refusal> =
            serde_json::from_slice(&text).map_err(|error| died(error.into()))?;
        outcome.map(Answer::Image)
    }
}

fn refuse(error: ImageError) -> Refusal {
    match error {
        ImageError::Unknown(_) | ImageError::BadName(_) | ImageError::Reserved(_) => refuse_image(error),
        error => {
            let hint = error.hint().map(str::to_owned);
            let mut message = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                message = format!("{message}: {error}");
                cause = error.source();
            }
            Refusal { kind: RefusalKind::Image, message, hint }
        }
    }
}
