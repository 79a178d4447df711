//! The process that unpacks: an unprivileged fork with its own root.
//!
//! ```text
//! importer                               worker
//!   fork into new namespaces ──────────► its root: the draft, and a source that is a directory
//!   ◄── lines of progress ────────────── four capabilities, no other descriptors, filters
//!   ◄── the result, or an error ──────── unpacks
//! ```
//!
//! A source that exploits the unpacker gets a process that can write below the draft and nothing
//! else: no network, no other file, no mount, no process to signal.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use linux::caps::{self, CapSet};
use linux::fs::Root;
use linux::mounts::{self, Attributes, Depth};
use linux::namespaces::{self, Extent, Namespaces, Setgroups};
use linux::seccomp::Program;
use linux::spawn::{self, Forked, SingleThread};
use rustix::pipe::PipeFlags;
use rustix::process::Resource;
use serde::{Deserialize, Serialize};

use super::unpack::{self, Source, Task, Unpacked};
use super::{During, ImageError};
use crate::jail::filters::Filters;

/// The capabilities needed to set owners and modes of files.
const CAPABILITIES: CapSet = CapSet::of(&[caps::CHOWN, caps::DAC_OVERRIDE, caps::FOWNER, caps::FSETID]);
/// The directory where the worker assembles its root. The mounts there are invisible to other
/// processes.
const SCRATCH: &str = "/tmp";
/// The memory limit for unpacking.
const MEMORY: u64 = 2 << 30;
/// The maximum length of a line from the worker; a result has a few hundred bytes per layer.
const LONGEST_LINE: u64 = 4 << 20;

/// The messages of the worker, one per line.
#[derive(Serialize, Deserialize)]
enum Line {
    Progress(String),
    Done(Unpacked),
    Failed { message: String, hint: Option<String> },
}

/// Unpacks `source` into `draft` in a worker, and waits for it.
pub(super) fn unpack_apart(
    thread: &SingleThread,
    source: Source,
    draft: &Path,
    task: &Task,
    progress: &mut dyn FnMut(&str),
) -> Result<Unpacked, ImageError> {
    let filters = Filters::compile().map_err(io::Error::other).during("compile the filter of", draft)?;
    let (lines, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .map_err(io::Error::from)
        .during("prepare unpacking into", draft)?;
    let (waiting, go) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .map_err(io::Error::from)
        .during("prepare unpacking into", draft)?;
    match thread.fork(fresh_namespaces(), None).during("fork a worker for", draft)? {
        Forked::Child => {
            drop((lines, go));
            work(source, draft, task, waiting, report, &filters.usual.command)
        }
        Forked::Parent { pid, pidfd } => {
            drop((waiting, report));
            let mapped = if task.may_give_away { Ok(()) } else { map_own_id(pid) };
            // Closing the pipe without writing ends the worker.
            let started = mapped.and_then(|()| File::from(go).write_all(b"g"));
            let outcome =
                started.during("start a worker for", draft).and_then(|()| follow(lines, draft, progress));
            let end = spawn::wait(pidfd.as_fd()).during("wait for the worker of", draft)?;
            outcome.map_err(|error| match error {
                ImageError::WorkerDied(_) => ImageError::WorkerDied(format!("{end:?}")),
                error => error,
            })
        }
    }
}

/// Only root can work without a user namespace, and only without one are the owners of files kept.
fn fresh_namespaces() -> Namespaces {
    let all =
        Namespaces::MOUNT.and(Namespaces::NET).and(Namespaces::PID).and(Namespaces::IPC).and(Namespaces::UTS);
    if rustix::process::geteuid().is_root() { all } else { all.and(Namespaces::USER) }
}

fn map_own_id(pid: rustix::process::Pid) -> io::Result<()> {
    let map = |id: u32| [Extent { inside: 0, outside: id, count: 1 }];
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    namespaces::write_maps(pid, &map(uid), &map(gid), Setgroups::Deny)
}

/// Reads the worker's messages until it has finished.
fn follow(lines: OwnedFd, draft: &Path, progress: &mut dyn FnMut(&str)) -> Result<Unpacked, ImageError> {
    let mut lines = BufReader::new(File::from(lines));
    loop {
        let mut text = String::new();
        (&mut lines)
            .take(LONGEST_LINE)
            .read_line(&mut text)
            .during("read the report of the worker of", draft)?;
        match serde_json::from_str(&text) {
            Ok(Line::Progress(detail)) => progress(&detail),
            Ok(Line::Done(unpacked)) => return Ok(unpacked),
            Ok(Line::Failed { message, hint }) => return Err(ImageError::Refused { message, hint }),
            Err(_) => return Err(ImageError::WorkerDied(String::new())),
        }
    }
}

fn work(source: Source, draft: &Path, task: &Task, waiting: OwnedFd, report: OwnedFd, filter: &Program) -> ! {
    let mut go = [0];
    if !matches!(File::from(waiting).read(&mut go), Ok(1)) {
        spawn::exit_now(2);
    }
    let mut report = File::from(report);
    let confined = confine(source, draft, &report, filter);
    let outcome = confined.during("confine the worker of", draft).and_then(|(source, draft)| {
        let mut send = |detail: &str| {
            // A parent that stops reading ends this process by other means.
            say(&mut report, &Line::Progress(detail.to_owned())).unwrap_or_default();
        };
        unpack::unpack(source, &draft, task, &mut send)
    });
    let line = match outcome {
        Ok(unpacked) => Line::Done(unpacked),
        Err(error) => Line::Failed { message: with_causes(&error), hint: error.hint().map(str::to_owned) },
    };
    let sent = say(&mut report, &line).is_ok();
    spawn::exit_now(if sent { 0 } else { 2 })
}

fn say(report: &mut File, line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    report.write_all(&text)
}

/// Drops all access that unpacking does not need. The order is that of the jail: the root changes
/// while capabilities still allow it, and the filter comes last.
fn confine(source: Source, draft: &Path, report: &File, filter: &Program) -> io::Result<(Source, Root)> {
    if !rustix::process::geteuid().is_root() {
        namespaces::become_ids(0, 0, Setgroups::Deny)?;
    }
    namespaces::die_with_parent()?;
    mounts::make_private()?;
    let plain = Attributes::NO_SUID.and(Attributes::NO_DEV).and(Attributes::NO_EXEC);
    let place = clone(draft, plain)?;
    let tree = match &source {
        Source::Tree(path) | Source::Uppers { disk: path, .. } => {
            Some(clone(path, plain.and(Attributes::READ_ONLY))?)
        }
        Source::Archive(_) | Source::Layout(_) => None,
    };
    let scratch = Path::new(SCRATCH);
    mounts::mount("tmpfs", scratch, plain, "mode=0755,size=1m,nr_inodes=64")?;
    for (name, mount) in [("draft", Some(&place)), ("source", tree.as_ref())] {
        let target = scratch.join(name);
        fs::create_dir(&target)?;
        if let Some(mount) = mount {
            mounts::attach(mount.as_fd(), &target)?;
        }
    }
    drop((place, tree));
    mounts::pivot(scratch)?;
    let source = match source {
        Source::Tree(_) => Source::Tree(PathBuf::from("/source")),
        Source::Uppers { trees, .. } => Source::Uppers { disk: PathBuf::from("/source"), trees },
        other => other,
    };
    let kept: Vec<_> = match &source {
        Source::Archive(file) => vec![file.as_fd()],
        Source::Layout(files) => files.values().map(AsFd::as_fd).collect(),
        Source::Tree(_) | Source::Uppers { .. } => Vec::new(),
    };
    linux::descriptors::keep_only_these(kept.into_iter().chain([report.as_fd()]))?;
    let draft = Root::open(Path::new("/draft"))?;
    namespaces::limit(Resource::Core, 0)?;
    namespaces::limit(Resource::As, MEMORY)?;
    caps::bound_to(CAPABILITIES)?;
    caps::set(CAPABILITIES)?;
    linux::set_no_new_privs()?;
    linux::landlock::forbid_mounts()?;
    filter.install()?;
    Ok((source, draft))
}

fn clone(path: &Path, attributes: Attributes) -> io::Result<OwnedFd> {
    let tree = mounts::clone_tree(path, Depth::Single)?;
    mounts::set_attributes(tree.as_fd(), attributes, None, Depth::Single)?;
    Ok(tree)
}

fn with_causes(error: &ImageError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text.chars().take(1000).collect()
}
