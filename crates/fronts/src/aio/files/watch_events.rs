//! Events of a watch: which are reported, in which form, and the latest of them.

use std::collections::VecDeque;
use std::time::SystemTime;

use globset::{Glob, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};
use service::{FileChange, FileKind, WatchEvent};

use super::base_name;
use crate::kit::time::format_rfc3339;

/// The beginning of the names under which the sandbox writes a file before it takes its place.
const DRAFT_PREFIX: &str = ".coracle-";
/// How many events are kept for clients that poll, and how many bytes of paths in them.
const MAX_KEPT_EVENTS: usize = 4096;
const MAX_KEPT_BYTES: usize = 1 << 20;

/// A change of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum EventType {
    Create,
    Write,
    Remove,
    Rename,
    Chmod,
}

/// An event as clients see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct FileEventBody {
    pub(super) seq: u64,
    #[serde(rename = "type")]
    pub(super) kind: EventType,
    pub(super) path: String,
    relative_path: String,
    old_path: Option<String>,
    is_dir: bool,
    timestamp: String,
    mtime: Option<String>,
    size: Option<u64>,
    inode: Option<u64>,
    /// Whether a complete file has taken this name. Whether there was a file before is not known.
    #[serde(skip)]
    is_replacement: bool,
}

impl FileEventBody {
    /// `None` for an event that only says that others are missing, or that is about a file which is being written.
    pub(super) fn from_event(event: WatchEvent, root: &str) -> Option<Self> {
        let is_draft = base_name(&event.path).starts_with(DRAFT_PREFIX);
        let is_replacement = is_draft && event.change == FileChange::Renamed;
        let (kind, path, old_path) = match (event.change, event.new_path) {
            (FileChange::Overflow, _) => return None,
            (FileChange::Renamed, Some(new)) if is_draft => (EventType::Write, new, None),
            _ if is_draft => return None,
            (FileChange::Created, _) => (EventType::Create, event.path, None),
            (FileChange::Written, _) => (EventType::Write, event.path, None),
            (FileChange::Attributes, _) => (EventType::Chmod, event.path, None),
            (FileChange::Renamed, Some(new)) => (EventType::Rename, new, Some(event.path)),
            // The file has left the watched tree.
            (FileChange::Removed | FileChange::Renamed, _) => (EventType::Remove, event.path, None),
        };
        Some(Self {
            seq: event.sequence,
            kind,
            relative_path: relative_path(&path, root).to_owned(),
            path,
            old_path,
            is_dir: event.kind == Some(FileKind::Directory),
            timestamp: format_rfc3339(SystemTime::now()),
            mtime: event.modified.map(format_rfc3339),
            size: event.size,
            inode: event.inode,
            is_replacement,
        })
    }

    /// Whether a client that waits for these types is told of it.
    pub(super) fn is_one_of(&self, types: &[EventType]) -> bool {
        types.contains(&self.kind) || (self.is_replacement && types.contains(&EventType::Create))
    }

    /// The length of its paths, which take most of its memory.
    pub(super) fn path_bytes(&self) -> usize {
        self.path.len() + self.relative_path.len() + self.old_path.as_ref().map_or(0, String::len)
    }

    /// Whether this event makes a pending one unnecessary.
    pub(super) fn repeats(&self, pending: &Self) -> bool {
        let is_repeatable = matches!(self.kind, EventType::Write | EventType::Chmod);
        is_repeatable && self.path == pending.path && self.kind == pending.kind
    }
}

fn relative_path<'a>(path: &'a str, root: &str) -> &'a str {
    let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or(path);
    match below.trim_start_matches('/') {
        "" => ".",
        below => below,
    }
}

/// The patterns of a watch.
pub(super) struct EventFilter {
    include: GlobSet,
    exclude: GlobSet,
}

impl EventFilter {
    /// Fails with the pattern that is wrong.
    pub(super) fn new(include: &[String], exclude: &[String]) -> Result<Self, String> {
        Ok(Self { include: glob_set(include)?, exclude: glob_set(exclude)? })
    }

    pub(super) fn accepts(&self, event: &FileEventBody) -> bool {
        let path = event.relative_path.as_str();
        let name = path.rsplit('/').next().unwrap_or_default();
        let is_included =
            self.include.is_empty() || self.include.is_match(name) || self.include.is_match(path);
        // A pattern that names a directory excludes everything below it.
        let mut ancestors = path.match_indices('/').map(|(at, _)| &path[..at]).chain([path]);
        is_included
            && !ancestors.any(|path| {
                let name = path.rsplit('/').next().unwrap_or_default();
                self.exclude.is_match(name) || self.exclude.is_match(path)
            })
    }
}

fn glob_set(patterns: &[String]) -> Result<GlobSet, String> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(Glob::new(pattern).map_err(|error| error.to_string())?);
    }
    set.build().map_err(|error| error.to_string())
}

/// The latest events.
#[derive(Default)]
pub(super) struct EventHistory {
    events: VecDeque<FileEventBody>,
    /// The length of the paths in them.
    path_bytes: usize,
    /// The number of the last event.
    last: u64,
    /// The number of the last event before which others are missing.
    missing_before: u64,
}

/// The events behind a cursor.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct EventPage {
    pub(super) events: Vec<FileEventBody>,
    pub(super) cursor: u64,
    /// Whether events behind the cursor are missing; the client should look at the files again.
    pub(super) overflow: bool,
}

impl EventHistory {
    pub(super) fn add_event(&mut self, event: FileEventBody) {
        self.last += 1;
        self.path_bytes += event.path_bytes();
        self.events.push_back(FileEventBody { seq: self.last, ..event });
        while self.events.len() > MAX_KEPT_EVENTS || self.path_bytes > MAX_KEPT_BYTES {
            let Some(dropped) = self.events.pop_front() else { break };
            self.path_bytes -= dropped.path_bytes();
            self.missing_before = self.missing_before.max(dropped.seq);
        }
    }

    /// Records that the sandbox could not report everything.
    pub(super) fn add_overflow(&mut self) {
        self.last += 1;
        self.missing_before = self.last;
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn read_page(&self, cursor: u64, limit: usize) -> EventPage {
        let behind = self.events.iter().filter(|event| event.seq > cursor);
        let events: Vec<FileEventBody> = behind.take(limit).cloned().collect();
        let is_full = events.len() == limit;
        let reached = if is_full { events.last().map(|event| event.seq) } else { None };
        let reached = reached.unwrap_or(self.last);
        EventPage { events, cursor: reached, overflow: cursor < self.missing_before }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch_event(path: &str, change: FileChange) -> WatchEvent {
        WatchEvent {
            sequence: 1,
            path: path.to_owned(),
            change,
            new_path: None,
            kind: None,
            size: None,
            modified: None,
            inode: None,
        }
    }

    fn event(path: &str) -> FileEventBody {
        FileEventBody::from_event(watch_event(path, FileChange::Written), "/root/").unwrap()
    }

    #[test]
    fn long_paths_are_bounded_together() {
        let mut history = EventHistory::default();
        let long = format!("/root/{}", "x".repeat(4000));
        for _ in 0..1000 {
            history.add_event(event(&long));
        }
        let page = history.read_page(0, 2000);
        assert!(page.overflow && page.events.len() < 300, "{}", page.events.len());
        assert_eq!(page.cursor, 1000);
    }

    #[test]
    fn files_that_are_being_written_are_not_reported() {
        let renamed = |from: &str, to: &str| {
            let event = WatchEvent {
                path: from.to_owned(),
                change: FileChange::Renamed,
                new_path: Some(to.to_owned()),
                ..watch_event("/root/x", FileChange::Written)
            };
            FileEventBody::from_event(event, "/root").unwrap()
        };
        let draft = watch_event("/root/.coracle-12", FileChange::Created);
        assert_eq!(FileEventBody::from_event(draft, "/root"), None);
        let written = renamed("/root/.coracle-12", "/root/a");
        assert_eq!((written.kind, written.old_path.as_deref()), (EventType::Write, None));
        assert!(written.is_one_of(&[EventType::Create]) && !written.is_one_of(&[EventType::Rename]));
        let moved = renamed("/root/b", "/root/a");
        assert_eq!((moved.kind, moved.old_path.as_deref()), (EventType::Rename, Some("/root/b")));
    }

    #[test]
    fn excluded_directories_hide_everything_below() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let filter = EventFilter::new(&[], &texts(&[".git", "*.pyc", "a/b"])).unwrap();
        for (path, accepted) in [
            ("/root/x.py", true),
            ("/root/.git/config", false),
            ("/root/x/.git/a/b", false),
            ("/root/a/x.pyc", false),
            ("/root/a/b/c", false),
            ("/root/a/c", true),
        ] {
            assert_eq!(filter.accepts(&event(path)), accepted, "{path}");
        }
        let only = EventFilter::new(&texts(&["*.py"]), &[]).unwrap();
        assert!(only.accepts(&event("/root/a/x.py")) && !only.accepts(&event("/root/a/x.rs")));
        assert!(EventFilter::new(&texts(&["["]), &[]).is_err());
    }

    #[test]
    fn pages_follow_the_cursor_and_report_missing_events() {
        let mut history = EventHistory::default();
        for number in 0..3 {
            history.add_event(event(&format!("/root/{number}")));
        }
        let page = history.read_page(0, 2);
        assert_eq!((page.events.len(), page.cursor, page.overflow), (2, 2, false));
        let page = history.read_page(2, 2);
        assert_eq!((page.events[0].seq, page.cursor), (3, 3));
        assert_eq!(history.read_page(3, 2).events, []);
        history.add_overflow();
        let page = history.read_page(3, 2);
        assert_eq!((page.cursor, page.overflow), (4, true));
        assert!(!history.read_page(4, 2).overflow);
        for _ in 0..=MAX_KEPT_EVENTS {
            history.add_event(event("/root/x"));
        }
        assert!(history.read_page(4, 1).overflow && !history.read_page(5, 1).overflow);
    }
}
