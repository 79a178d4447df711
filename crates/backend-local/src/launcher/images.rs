//! Images behind the launcher: what there is, and changes, each made by a process of its own so
//! that the loop goes on meanwhile.

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

/// What is asked about images.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageQuestion {
    List,
    /// The image that a name leads to, habits of clients left aside.
    Find {
        name: String,
    },
    /// The digests of all layers, and how much room there is for an image of that name.
    Layers {
        name: String,
    },
    /// Takes in the OCI layout in the directory whose descriptor comes along.
    Import {
        name: String,
        wanted: Digest,
    },
    /// Takes in the archive whose descriptor comes along.
    ImportArchive {
        name: String,
    },
    /// Makes an image of the files of a snapshot.
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
    /// Each with the second in which it was last used.
    Images(Vec<(Record, u64)>),
    Found(Option<Record>),
    Layers {
        layers: Vec<Digest>,
        room: Option<u64>,
    },
    Taken(Record),
    Freed(Collected),
}

/// A change on its way. When `pidfd` is readable, [`Change::conclude`] says what became of it.
#[derive(Debug)]
pub struct Change {
    pub pidfd: OwnedFd,
    result: OwnedFd,
}

/// How many changes may wait for each other.
pub const MOST_CHANGES: usize = 16;
/// The longest result; a record has a few kilobytes.
const LONGEST_RESULT: u64 = 16 << 20;

impl Launcher {
    /// Answers at once what can be read; `None` for a change.
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
        // What `host` may stand in for is fetched first, where that is allowed.
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

    /// Begins a change. The process that makes it ends with this one.
    pub fn change_images(&self, question: ImageQuestion, layout: Option<OwnedFd>) -> io::Result<Change> {
        let result = rustix::fs::memfd_create("result", MemfdFlags::CLOEXEC)?;
        let parent = rustix::process::getpid();
        match self.thread.fork(Namespaces::NONE, None)? {
            Forked::Parent { pidfd, .. } => Ok(Change { pidfd, result }),
            Forked::Child => {
                let told = self.make_change(parent, question, layout, result).is_ok();
                spawn::exit_now(i32::from(!told))
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
        // Others wait for the end of connections that the launcher closes, and this is a copy.
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
                let none = || ImageError::Malformed("no directory came with it".to_owned());
                let root = linux::fs::Root::from_descriptor(layout.ok_or_else(none)?);
                // Whoever took over the server must not learn from us what it cannot read.
                let source = Source::layout(&root, self.settings.server_uid)?;
                self.take_in(&name, source, Some(wanted), Existing::Replace, Below::Nothing)
            }
            ImageQuestion::ImportArchive { name } => {
                let none = || ImageError::Malformed("no file came with it".to_owned());
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
                Err(ImageError::Malformed("this changes nothing".to_owned()))
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
    /// What became of it. The process has ended, so nothing is waited for.
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
