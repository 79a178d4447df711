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
use linux::fs::RootDirectory;
use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces::{self, IdMapExtent, NamespaceSet, SetgroupsPolicy};
use linux::seccomp::SeccompProgram;
use linux::spawn::{self, ForkResult, SingleThread};
use rustix::pipe::PipeFlags;
use rustix::process::Resource;
use serde::{Deserialize, Serialize};

use super::unpack::{self, ImportSource, UnpackTask, UnpackedImage};
use super::{ImageError, ImageErrorContext};
use crate::jail::filters::SeccompFilters;

/// The capabilities needed to set owners and modes of files.
const WORKER_CAPABILITIES: CapSet =
    CapSet::of(&[caps::CHOWN, caps::DAC_OVERRIDE, caps::FOWNER, caps::FSETID]);
/// The directory where the worker assembles its root. The mounts there are invisible to other
/// processes.
const SCRATCH_DIRECTORY: &str = "/tmp";
/// The memory limit for unpacking.
const MAX_MEMORY: u64 = 2 << 30;
/// The maximum length of a line from the worker; a result has a few hundred bytes per layer.
const MAX_LINE_LENGTH: u64 = 4 << 20;

/// The messages of the worker, one per line.
#[derive(Serialize, Deserialize)]
enum WorkerMessage {
    Progress(String),
    Done(UnpackedImage),
    Failed { message: String, hint: Option<String> },
}

/// Unpacks `source` into `draft` in a worker, and waits for it.
pub(super) fn unpack_in_worker(
    thread: &SingleThread,
    source: ImportSource,
    draft: &Path,
    task: &UnpackTask,
    progress: &mut dyn FnMut(&str),
) -> Result<UnpackedImage, ImageError> {
    let filters =
        SeccompFilters::compile().map_err(io::Error::other).during("compile the filter of", draft)?;
    let (lines, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .map_err(io::Error::from)
        .during("prepare unpacking into", draft)?;
    let (waiting, go) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .map_err(io::Error::from)
        .during("prepare unpacking into", draft)?;
    match thread.fork(worker_namespaces(), None).during("fork a worker for", draft)? {
        ForkResult::Child => {
            drop((lines, go));
            run_worker(source, draft, task, waiting, report, &filters.standard.command)
        }
        ForkResult::Parent { pid, pidfd } => {
            drop((waiting, report));
            let mapped = if task.may_give_away { Ok(()) } else { map_own_id(pid) };
            // Closing the pipe without writing ends the worker.
            let started = mapped.and_then(|()| File::from(go).write_all(b"g"));
            let outcome = started
                .during("start a worker for", draft)
                .and_then(|()| read_messages(lines, draft, progress));
            let end = spawn::wait_for_child(pidfd.as_fd()).during("wait for the worker of", draft)?;
            outcome.map_err(|error| match error {
                ImageError::WorkerDied(_) => ImageError::WorkerDied(format!("{end:?}")),
                error => error,
            })
        }
    }
}

/// Only root can work without a user namespace, and only without one are the owners of files kept.
fn worker_namespaces() -> NamespaceSet {
    let all = NamespaceSet::MOUNT
        .and(NamespaceSet::NET)
        .and(NamespaceSet::PID)
        .and(NamespaceSet::IPC)
        .and(NamespaceSet::UTS);
    if linux::privileges::is_host_root() { all } else { all.and(NamespaceSet::USER) }
}

fn map_own_id(pid: rustix::process::Pid) -> io::Result<()> {
    let map = |id: u32| [IdMapExtent { inside: 0, outside: id, count: 1 }];
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    namespaces::write_id_maps(pid, &map(uid), &map(gid), SetgroupsPolicy::Deny)
}

/// Reads the worker's messages until it has finished.
fn read_messages(
    lines: OwnedFd,
    draft: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<UnpackedImage, ImageError> {
    let mut lines = BufReader::new(File::from(lines));
    loop {
        let mut text = String::new();
        (&mut lines)
            .take(MAX_LINE_LENGTH)
            .read_line(&mut text)
            .during("read the report of the worker of", draft)?;
        match serde_json::from_str(&text) {
            Ok(WorkerMessage::Progress(detail)) => progress(&detail),
            Ok(WorkerMessage::Done(unpacked)) => return Ok(unpacked),
            Ok(WorkerMessage::Failed { message, hint }) => return Err(ImageError::Refused { message, hint }),
            Err(_) => return Err(ImageError::WorkerDied(String::new())),
        }
    }
}

fn run_worker(
    source: ImportSource,
    draft: &Path,
    task: &UnpackTask,
    waiting: OwnedFd,
    report: OwnedFd,
    filter: &SeccompProgram,
) -> ! {
    let mut go = [0];
    if !matches!(File::from(waiting).read(&mut go), Ok(1)) {
        spawn::exit_now(2);
    }
    let mut report = File::from(report);
    let confined = confine_worker(source, draft, &report, filter);
    let outcome = confined.during("confine the worker of", draft).and_then(|(source, draft)| {
        let mut send = |detail: &str| {
            // A parent that stops reading ends this process by other means.
            send_message(&mut report, &WorkerMessage::Progress(detail.to_owned())).unwrap_or_default();
        };
        unpack::unpack_source(source, &draft, task, &mut send)
    });
    let line = match outcome {
        Ok(unpacked) => WorkerMessage::Done(unpacked),
        Err(error) => {
            WorkerMessage::Failed { message: with_causes(&error), hint: error.hint().map(str::to_owned) }
        }
    };
    let sent = send_message(&mut report, &line).is_ok();
    spawn::exit_now(if sent { 0 } else { 2 })
}

fn send_message(report: &mut File, line: &WorkerMessage) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    report.write_all(&text)
}

/// Drops all access that unpacking does not need. The order is that of the jail: the root changes
/// while capabilities still allow it, and the filter comes last.
fn confine_worker(
    source: ImportSource,
    draft: &Path,
    report: &File,
    filter: &SeccompProgram,
) -> io::Result<(ImportSource, RootDirectory)> {
    if !rustix::process::geteuid().is_root() {
        namespaces::switch_ids(0, 0, SetgroupsPolicy::Deny)?;
    }
    namespaces::die_with_parent()?;
    mounts::make_private()?;
    let plain = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
    let place = clone_mount(draft, plain)?;
    let tree = match &source {
        ImportSource::Tree(path) | ImportSource::Uppers { disk: path, .. } => {
            Some(clone_mount(path, plain.and(MountAttrs::READ_ONLY))?)
        }
        ImportSource::Archive(_) | ImportSource::Layout(_) => None,
    };
    let scratch = Path::new(SCRATCH_DIRECTORY);
    mounts::mount_filesystem("tmpfs", scratch, plain, "mode=0755,size=1m,nr_inodes=64")?;
    for (name, mount) in [("draft", Some(&place)), ("source", tree.as_ref())] {
        let target = scratch.join(name);
        fs::create_dir(&target)?;
        if let Some(mount) = mount {
            mounts::attach_mount(mount.as_fd(), &target)?;
        }
    }
    drop((place, tree));
    mounts::pivot_root(scratch)?;
    let source = match source {
        ImportSource::Tree(_) => ImportSource::Tree(PathBuf::from("/source")),
        ImportSource::Uppers { trees, .. } => ImportSource::Uppers { disk: PathBuf::from("/source"), trees },
        other => other,
    };
    let kept: Vec<_> = match &source {
        ImportSource::Archive(file) => vec![file.as_fd()],
        ImportSource::Layout(files) => files.values().map(AsFd::as_fd).collect(),
        ImportSource::Tree(_) | ImportSource::Uppers { .. } => Vec::new(),
    };
    linux::descriptors::close_all_except_these(kept.into_iter().chain([report.as_fd()]))?;
    let draft = RootDirectory::open(Path::new("/draft"))?;
    namespaces::set_resource_limit(Resource::Core, 0)?;
    namespaces::set_resource_limit(Resource::As, MAX_MEMORY)?;
    caps::limit_bounding_set(WORKER_CAPABILITIES)?;
    caps::set_capabilities(WORKER_CAPABILITIES)?;
    linux::set_no_new_privs()?;
    linux::landlock::forbid_mounts()?;
    filter.install()?;
    Ok((source, draft))
}

fn clone_mount(path: &Path, attributes: MountAttrs) -> io::Result<OwnedFd> {
    let tree = mounts::clone_tree(path, MountDepth::Single)?;
    mounts::set_attributes(tree.as_fd(), attributes, None, MountDepth::Single)?;
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
