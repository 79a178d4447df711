//! Watches files with inotify(7), in a worker that lasts as long as its connection.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use wire::files::{FileChange, WatchEvent};
use wire::{AgentReply, Fault};

use crate::files::{ErrorContext, FileWorker};

/// The maximum depth to which new directories are watched.
const MAX_DEPTH: usize = 1000;

struct FileWatcher {
    events: OwnedFd,
    directories: HashMap<i32, PathBuf>,
    /// Paths found in a new directory and already reported; the kernel may report them as well.
    reported: HashSet<PathBuf>,
    recursive: bool,
}

impl FileWorker<'_> {
    pub(crate) fn watch_path(&mut self, path: &Path, recursive: bool) -> Result<(), Fault> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).or_fault("watch", path)?;
        let mut watcher =
            FileWatcher { events, directories: HashMap::new(), reported: HashSet::new(), recursive };
        watcher.add_watch(path).or_fault("watch", path)?;
        if recursive {
            // Directories that vanish meanwhile or are unreadable are not watched.
            watcher.add_watches_below(path, MAX_DEPTH, &mut |_| {});
        }
        self.connection.send_reply(&AgentReply::Ok)?;
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
            for event in watcher.read_events(path).or_fault("watch", path)? {
                // A program that writes in small pieces causes one event for each.
                if last.as_ref() != Some(&event) {
                    self.connection.send_reply(&AgentReply::Watched(event.clone()))?;
                }
                last = Some(event);
            }
        }
    }
}

impl FileWatcher {
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

    /// Watches the directories below one, and passes every path found there to `found`.
    fn add_watches_below(&mut self, directory: &Path, depth: usize, found: &mut dyn FnMut(PathBuf)) {
        let Ok(entries) = std::fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) && self.add_watch(&path).is_ok()
            {
                self.add_watches_below(&path, depth - 1, found);
            }
            found(path);
        }
    }

    /// The events since the last call.
    fn read_events(&mut self, root: &Path) -> rustix::io::Result<Vec<WatchEvent>> {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = Reader::new(&self.events, &mut buffer);
        let mut came = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned());
                    came.push((event.wd(), event.events(), name));
                }
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno),
            }
        }
        let mut events = Vec::new();
        for (number, flags, name) in came {
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                events.push(watch_event(root, FileChange::Overflow));
            } else if let Some(directory) = self.directories.get(&number) {
                let path = name.map_or_else(|| directory.clone(), |name| directory.join(name));
                self.handle_event(&path, flags, &mut events);
            }
            if flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&number);
            }
        }
        Ok(events)
    }

    fn handle_event(&mut self, path: &Path, flags: ReadFlags, events: &mut Vec<WatchEvent>) {
        let Some(change) = file_change(flags) else { return };
        let known = match change {
            FileChange::Created | FileChange::Removed | FileChange::Renamed => self.reported.remove(path),
            _ => false,
        };
        if known && change == FileChange::Created {
            return;
        }
        events.push(watch_event(path, change));
        let new_directory = change == FileChange::Created && flags.contains(ReadFlags::ISDIR);
        if self.recursive && new_directory && self.add_watch(path).is_ok() {
            // Files created before the directory was watched caused no event.
            let mut found = Vec::new();
            self.add_watches_below(path, MAX_DEPTH, &mut |path| found.push(path));
            events.extend(found.iter().map(|path| watch_event(path, FileChange::Created)));
            self.reported.extend(found);
        }
    }
}

fn watch_event(path: &Path, change: FileChange) -> WatchEvent {
    WatchEvent { path: path.to_string_lossy().into_owned(), change }
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
