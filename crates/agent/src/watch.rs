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
use wire::files::{Change, WatchEvent};
use wire::{Fault, Reply};

use crate::files::{Named, Work};

/// The maximum depth to which new directories are watched.
const DEEPEST: usize = 1000;

struct Watcher {
    events: OwnedFd,
    directories: HashMap<i32, PathBuf>,
    /// Paths found in a new directory and already reported; the kernel may report them as well.
    told: HashSet<PathBuf>,
    recursive: bool,
}

impl Work<'_> {
    pub(crate) fn watch(&mut self, path: &Path, recursive: bool) -> Result<(), Fault> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).named("watch", path)?;
        let mut watcher = Watcher { events, directories: HashMap::new(), told: HashSet::new(), recursive };
        watcher.add(path).named("watch", path)?;
        if recursive {
            // Directories that vanish meanwhile or are unreadable are not watched.
            watcher.add_below(path, DEEPEST, &mut |_| {});
        }
        self.line.say(&Reply::Ok)?;
        loop {
            let mut fds =
                [PollFd::new(&watcher.events, PollFlags::IN), PollFd::new(&self.line, PollFlags::empty())];
            rustix::event::poll(&mut fds, None).named("wait", path)?;
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            let mut last = None;
            for event in watcher.read(path).named("watch", path)? {
                // A program that writes in small pieces causes one event for each.
                if last.as_ref() != Some(&event) {
                    self.line.say(&Reply::Watched(event.clone()))?;
                }
                last = Some(event);
            }
        }
    }
}

impl Watcher {
    fn add(&mut self, path: &Path) -> rustix::io::Result<()> {
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
    fn add_below(&mut self, directory: &Path, depth: usize, found: &mut dyn FnMut(PathBuf)) {
        let Ok(entries) = std::fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) && self.add(&path).is_ok() {
                self.add_below(&path, depth - 1, found);
            }
            found(path);
        }
    }

    /// The events since the last call.
    fn read(&mut self, root: &Path) -> rustix::io::Result<Vec<WatchEvent>> {
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
                events.push(told(root, Change::Overflow));
            } else if let Some(directory) = self.directories.get(&number) {
                let path = name.map_or_else(|| directory.clone(), |name| directory.join(name));
                self.take_in(&path, flags, &mut events);
            }
            if flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&number);
            }
        }
        Ok(events)
    }

    fn take_in(&mut self, path: &Path, flags: ReadFlags, events: &mut Vec<WatchEvent>) {
        let Some(change) = change_of(flags) else { return };
        let known = match change {
            Change::Created | Change::Removed | Change::Renamed => self.told.remove(path),
            _ => false,
        };
        if known && change == Change::Created {
            return;
        }
        events.push(told(path, change));
        let new_directory = change == Change::Created && flags.contains(ReadFlags::ISDIR);
        if self.recursive && new_directory && self.add(path).is_ok() {
            // Files created before the directory was watched caused no event.
            let mut found = Vec::new();
            self.add_below(path, DEEPEST, &mut |path| found.push(path));
            events.extend(found.iter().map(|path| told(path, Change::Created)));
            self.told.extend(found);
        }
    }
}

fn told(path: &Path, change: Change) -> WatchEvent {
    WatchEvent { path: path.to_string_lossy().into_owned(), change }
}

fn change_of(flags: ReadFlags) -> Option<Change> {
    [
        (ReadFlags::CREATE | ReadFlags::MOVED_TO, Change::Created),
        (ReadFlags::MODIFY, Change::Written),
        (ReadFlags::DELETE | ReadFlags::DELETE_SELF, Change::Removed),
        (ReadFlags::MOVED_FROM, Change::Renamed),
        (ReadFlags::ATTRIB, Change::Attributes),
    ]
    .into_iter()
    .find(|(bits, _)| flags.intersects(*bits))
    .map(|(_, change)| change)
}
