//! Watches files with inotify(7), in a worker that lasts as long as its connection.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use wire::files::{FileChange, WatchEvent};
use wire::{AgentReply, Fault};

use super::watch_details::{KernelEvent, describe_file, has_open_rename, pair_renames};
use crate::files::{ErrorContext, FileWorker};

/// The maximum depth to which new directories are watched.
const MAX_DEPTH: usize = 1000;

/// How long to wait for the second event of a rename. Without it the file has left the watched tree.
const RENAME_PAIR_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

struct FileWatcher {
    events: OwnedFd,
    root: PathBuf,
    directories: HashMap<i32, PathBuf>,
    /// Paths found in a new directory and already reported; the kernel may report them as well.
    reported: HashSet<PathBuf>,
    recursive: bool,
    /// Whether renames are paired and files are described.
    details: bool,
}

/// A change of one path, as it will be reported.
#[derive(Clone, Debug)]
struct PathChange {
    path: PathBuf,
    change: FileChange,
    new_path: Option<PathBuf>,
    is_directory: bool,
}

impl FileWorker<'_> {
    pub(crate) fn watch_path(&mut self, path: &Path, recursive: bool, details: bool) -> Result<(), Fault> {
        let mut watcher = FileWatcher::new(path, recursive, details).or_fault("watch", path)?;
        self.connection.send_reply(&AgentReply::Ok)?;
        let mut sequence = 0;
        loop {
            let mut fds = [
                PollFd::new(&watcher.events, PollFlags::IN),
                PollFd::new(&self.connection, PollFlags::empty()),
            ];
            rustix::event::poll(&mut fds, None).or_fault("wait", path)?;
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            let mut last = None;
            for change in watcher.read_changes().or_fault("watch", path)? {
                // A program that writes in small pieces causes one event for each.
                if !last.as_ref().is_some_and(|last: &PathChange| last.repeats(&change)) {
                    sequence += 1;
                    let event = watcher.watch_event(&change, sequence);
                    self.connection.send_reply(&AgentReply::Watched(event))?;
                }
                last = Some(change);
            }
        }
    }
}

impl FileWatcher {
    fn new(path: &Path, recursive: bool, details: bool) -> rustix::io::Result<Self> {
        let mut watcher = Self {
            events: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            root: path.to_owned(),
            directories: HashMap::new(),
            reported: HashSet::new(),
            recursive,
            details,
        };
        watcher.add_watch(path)?;
        if recursive {
            // Directories that vanish meanwhile or are unreadable are not watched.
            watcher.add_watches_below(path, MAX_DEPTH, &mut |_, _| {});
        }
        Ok(watcher)
    }

    fn add_watch(&mut self, path: &Path) -> rustix::io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB;
        let number = inotify::add_watch(&self.events, path, flags)?;
        self.directories.insert(number, path.to_owned());
        Ok(())
    }

    /// Watches the directories below one, and passes every path found there to `found`, and whether it is a
    /// directory.
    fn add_watches_below(&mut self, directory: &Path, depth: usize, found: &mut dyn FnMut(PathBuf, bool)) {
        let Ok(entries) = std::fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if depth > 0 && is_directory && self.add_watch(&path).is_ok() {
                self.add_watches_below(&path, depth - 1, found);
            }
            found(path, is_directory);
        }
    }

    /// The changes since the last call.
    fn read_changes(&mut self) -> rustix::io::Result<Vec<PathChange>> {
        let mut events = Vec::new();
        self.read_events(&mut events)?;
        if self.details && has_open_rename(&events) {
            let mut fds = [PollFd::new(&self.events, PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&RENAME_PAIR_TIMEOUT))?;
            self.read_events(&mut events)?;
        }
        Ok(self.changes_of(&events))
    }

    fn read_events(&self, events: &mut Vec<KernelEvent>) -> rustix::io::Result<()> {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = Reader::new(&self.events, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => events.push(KernelEvent {
                    watch: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
                }),
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn changes_of(&mut self, events: &[KernelEvent]) -> Vec<PathChange> {
        let pairs = if self.details { pair_renames(events) } else { HashMap::new() };
        let seconds: HashSet<usize> = pairs.values().copied().collect();
        let mut changes = Vec::new();
        for (index, event) in events.iter().enumerate().filter(|(index, _)| !seconds.contains(index)) {
            if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                changes.push(PathChange::new(&self.root, FileChange::Overflow, false));
            } else if let Some(path) = self.path_of(event) {
                let new_path = pairs.get(&index).and_then(|second| self.path_of(&events[*second]));
                match new_path {
                    Some(new_path) => changes.push(self.rename_path(path, new_path, event.flags)),
                    None => self.handle_event(&path, event, &mut changes),
                }
            }
            if event.flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&event.watch);
            }
        }
        changes
    }

    fn path_of(&self, event: &KernelEvent) -> Option<PathBuf> {
        let directory = self.directories.get(&event.watch)?;
        Some(event.name.as_ref().map_or_else(|| directory.clone(), |name| directory.join(name)))
    }

    fn handle_event(&mut self, path: &Path, event: &KernelEvent, changes: &mut Vec<PathChange>) {
        let flags = event.flags;
        let Some(change) = file_change(flags) else { return };
        // The watch of the parent reports the same with the name.
        if self.details && flags.contains(ReadFlags::DELETE_SELF) && path != self.root {
            return;
        }
        let known = match change {
            FileChange::Created | FileChange::Removed | FileChange::Renamed => self.reported.remove(path),
            _ => false,
        };
        if known && change == FileChange::Created {
            return;
        }
        let is_directory = flags.contains(ReadFlags::ISDIR);
        changes.push(PathChange::new(path, change, is_directory));
        if self.recursive && is_directory && change == FileChange::Created && self.add_watch(path).is_ok() {
            // Files created before the directory was watched caused no event.
            let mut found = Vec::new();
            self.add_watches_below(path, MAX_DEPTH, &mut |path, directory| found.push((path, directory)));
            changes.extend(
                found.iter().map(|(path, directory)| PathChange::new(path, FileChange::Created, *directory)),
            );
            self.reported.extend(found.into_iter().map(|(path, _)| path));
        }
        if self.details && is_directory && change == FileChange::Renamed {
            self.drop_watches_below(path);
        }
    }

    /// A file got another name in the watched tree. The watches of a directory stay and get its new path.
    fn rename_path(&mut self, path: PathBuf, new_path: PathBuf, flags: ReadFlags) -> PathChange {
        self.reported.remove(&path);
        self.reported.remove(&new_path);
        let is_directory = flags.contains(ReadFlags::ISDIR);
        if is_directory {
            for directory in self.directories.values_mut() {
                if let Ok(rest) = directory.strip_prefix(&path) {
                    *directory =
                        if rest.as_os_str().is_empty() { new_path.clone() } else { new_path.join(rest) };
                }
            }
        }
        PathChange { path, change: FileChange::Renamed, new_path: Some(new_path), is_directory }
    }

    /// Ends the watches of a directory that has left the tree.
    fn drop_watches_below(&mut self, path: &Path) {
        let gone = self.directories.iter().filter(|(_, directory)| directory.starts_with(path));
        let gone: Vec<i32> = gone.map(|(watch, _)| *watch).collect();
        for watch in gone {
            // A directory that was removed meanwhile has no watch any more.
            inotify::remove_watch(&self.events, watch).ok();
            self.directories.remove(&watch);
        }
    }

    fn watch_event(&self, change: &PathChange, sequence: u64) -> WatchEvent {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut event = WatchEvent::new(text(&change.path), change.change);
        if self.details {
            event.sequence = Some(sequence);
            event.new_path = change.new_path.as_deref().map(text);
            describe_file(&mut event, change.present_path(), change.is_directory);
        }
        event
    }
}

impl PathChange {
    fn new(path: &Path, change: FileChange, is_directory: bool) -> Self {
        Self { path: path.to_owned(), change, new_path: None, is_directory }
    }

    fn repeats(&self, later: &Self) -> bool {
        (&self.path, self.change, &self.new_path) == (&later.path, later.change, &later.new_path)
    }

    /// Where the file is now; `None` if it is gone. Another file may have got its name since.
    fn present_path(&self) -> Option<&Path> {
        match self.change {
            FileChange::Created | FileChange::Written | FileChange::Attributes => Some(&self.path),
            FileChange::Renamed => self.new_path.as_deref(),
            FileChange::Removed | FileChange::Overflow => None,
        }
    }
}

fn file_change(flags: ReadFlags) -> Option<FileChange> {
    [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, FileChange::Created),
        (ReadFlags::MODIFY, FileChange::Written),
        (ReadFlags::DELETE | ReadFlags::DELETE_SELF, FileChange::Removed),
        (ReadFlags::MOVED_FROM, FileChange::Renamed),
        (ReadFlags::ATTRIB, FileChange::Attributes),
    ]
    .into_iter()
    .find(|(bits, _)| flags.intersects(*bits))
    .map(|(_, change)| change)
}
