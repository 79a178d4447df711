//! Finds paths by a glob.
//!
//! Links are followed only where the pattern names them without wildcards, so the walk ends in any tree. The
//! whole tree is visited to count what matches, but no more entries are kept than are returned, and they are sent
//! during the walk if it has the requested order.

use std::cmp::Ordering;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use globset::GlobSet;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, Statx, StatxFlags};
use wire::files::FileKind;
use wire::frame::MAX_PAYLOAD;
use wire::search::{GlobEntry, GlobOrder, GlobRequest, GlobSummary};
use wire::{AgentReply, Fault, FaultKind};

use super::info::{file_kind, to_milliseconds};
use super::path_pattern::{MAX_SHOWN_CHARS, NameMatching, PathPattern, PatternPositions, parse_globs};
use super::{ErrorContext, FileWorker};
use crate::fault;

/// The size at which a page is sent; the frame has space for the entry that exceeds it.
const PAGE_BYTES: usize = MAX_PAYLOAD / 4;

/// The most entries that are returned.
const MAX_RESULTS: usize = 50_000;

/// The most entries that are visited.
const MAX_VISITED: u64 = 5_000_000;

/// The maximum depth of a walk.
const MAX_DEPTH: u32 = 1000;

/// How much of a directory is read at once.
const READ_BYTES: usize = 32 << 10;

/// The most globs of entries to leave out.
const MAX_EXCLUDES: usize = 256;

/// How long a search may take. The server waits a little longer for an answer.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(100);

/// How many entries are visited between two checks of the time and the connection.
const CHECK_INTERVAL: u64 = 1024;

/// One walk over a tree.
struct GlobWalk<'a, 'b> {
    work: &'a mut FileWorker<'b>,
    request: &'a GlobRequest,
    pattern: PathPattern,
    excludes: GlobSet,
    root: &'a Path,
    found: GlobResults,
    /// Unused space for a part of a directory.
    buffer: Vec<u8>,
    /// Empty lists: memory that is freed and allocated for each directory costs much of the time of a walk.
    spare_names: Vec<Vec<ListedName>>,
    visited: u64,
    begun: Instant,
}

/// The entries that will be returned, as far as they are known.
#[derive(Debug)]
struct GlobResults {
    kept: Vec<GlobEntry>,
    /// The size of those that were kept since the last page was taken.
    kept_bytes: usize,
    /// How many were sent during the walk.
    sent: usize,
    order: GlobOrder,
    descending: bool,
    metadata: bool,
    limit: usize,
    total: u64,
}

/// A name in a directory.
struct ListedName {
    name: OsString,
    kind: FileKind,
}

/// Whether a walk goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WalkState {
    Continues,
    /// The limit of visited entries is reached.
    Stopped,
}

impl FileWorker<'_> {
    pub(super) fn find_paths(&mut self, request: &GlobRequest) -> Result<(), Fault> {
        let path = self.resolve_path(&request.path)?;
        let pattern = PathPattern::parse(&request.pattern)
            .map_err(|reason| pattern_fault(&request.pattern, &reason))?;
        if request.exclude.len() > MAX_EXCLUDES {
            return Err(pattern_fault("exclude", &format!("more than {MAX_EXCLUDES} globs")));
        }
        let excludes = parse_globs(request.exclude.iter().map(String::as_str))
            .map_err(|reason| pattern_fault("exclude", &reason))?;
        let mut buffer = Vec::with_capacity(READ_BYTES);
        let names = list_names(&path, &mut buffer, Vec::new()).or_fault("search", &path)?;
        let (begun, found) = (Instant::now(), GlobResults::new(request));
        let mut walk = GlobWalk {
            work: self,
            request,
            pattern,
            excludes,
            root: &path,
            found,
            buffer,
            spare_names: Vec::new(),
            visited: 0,
            begun,
        };
        let start = walk.pattern.start();
        let state = walk.visit_names(&path, names, start, MAX_DEPTH)?;
        let found = walk.found;
        self.send_results(found, state)
    }

    /// Sends what the walk has not sent yet.
    fn send_results(&mut self, found: GlobResults, state: WalkState) -> Result<(), Fault> {
        let (metadata, total, sent) = (found.metadata, found.total, found.sent);
        let entries = found.into_sorted();
        let truncated = state == WalkState::Stopped || total > (sent + entries.len()) as u64;
        let (mut page, mut page_size) = (Vec::new(), 0);
        for entry in entries {
            page_size += entry_size(&entry);
            page.push(entry);
            if page_size >= PAGE_BYTES {
                self.send_paths(std::mem::take(&mut page), metadata)?;
                page_size = 0;
            }
        }
        if !page.is_empty() {
            self.send_paths(page, metadata)?;
        }
        Ok(self.connection.send_reply(&AgentReply::GlobEnd(GlobSummary { total, truncated }))?)
    }

    fn send_paths(&mut self, mut page: Vec<GlobEntry>, metadata: bool) -> Result<(), Fault> {
        if !metadata {
            page.iter_mut().for_each(|entry| (entry.size, entry.modified_ms) = (None, None));
        }
        self.connection.send_bounded_reply(&AgentReply::GlobEntries(page), "a page of paths")
    }

    /// Whether the server has closed the connection, so that no one waits for the rest of a search.
    pub(super) fn is_abandoned(&self) -> bool {
        let mut fds = [PollFd::new(&self.connection, PollFlags::empty())];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}

impl GlobWalk<'_, '_> {
    fn visit_names(
        &mut self,
        directory: &Path,
        mut names: Vec<ListedName>,
        positions: PatternPositions,
        depth: u32,
    ) -> Result<WalkState, Fault> {
        for entry in names.drain(..) {
            if self.visited >= MAX_VISITED {
                return Ok(WalkState::Stopped);
            }
            self.visited += 1;
            if self.visited.is_multiple_of(CHECK_INTERVAL) {
                self.check_time()?;
            }
            if self.visit_entry(directory, entry, positions, depth)? == WalkState::Stopped {
                return Ok(WalkState::Stopped);
            }
        }
        self.spare_names.push(names);
        Ok(WalkState::Continues)
    }

    fn visit_entry(
        &mut self,
        directory: &Path,
        entry: ListedName,
        positions: PatternPositions,
        depth: u32,
    ) -> Result<WalkState, Fault> {
        let ListedName { name, kind } = entry;
        let hidden = self.request.hidden;
        let reached = self.pattern.step(positions, &name, hidden, NameMatching::All);
        let inside = match kind {
            FileKind::Directory => reached,
            FileKind::Symlink => self.pattern.step(positions, &name, hidden, NameMatching::LiteralOnly),
            FileKind::File | FileKind::Other => PatternPositions::default(),
        };
        let (matches, continues) = (self.pattern.is_match(reached), self.pattern.can_continue(inside));
        if !matches && !continues {
            return Ok(WalkState::Continues);
        }
        let path = directory.join(&name);
        if self.is_excluded(&name, &path) {
            return Ok(WalkState::Continues);
        }
        if !continues {
            return self.add_match(path, kind).map(|()| WalkState::Continues);
        }
        if matches {
            self.add_match(path.clone(), kind)?;
        }
        // A directory that cannot be read is left out.
        if depth > 1
            && let Ok(names) = list_names(&path, &mut self.buffer, self.spare_names.pop().unwrap_or_default())
        {
            return self.visit_names(&path, names, inside, depth - 1);
        }
        Ok(WalkState::Continues)
    }

    fn is_excluded(&self, name: &OsString, path: &Path) -> bool {
        if self.excludes.is_empty() {
            return false;
        }
        let relative = path.strip_prefix(self.root).unwrap_or(path);
        self.excludes.is_match(name) || self.excludes.is_match(relative)
    }

    fn add_match(&mut self, path: PathBuf, kind: FileKind) -> Result<(), Fault> {
        let sorted_by_metadata = matches!(self.request.order, GlobOrder::Size | GlobOrder::Modified);
        let metadata = self.request.metadata || sorted_by_metadata;
        let stat = (metadata || kind == FileKind::Symlink).then(|| read_metadata(&path)).flatten();
        let kind = stat.as_ref().map_or(kind, file_kind);
        let wanted = match kind {
            FileKind::Directory => self.request.directories,
            FileKind::File => !self.pattern.directories_only,
            FileKind::Symlink | FileKind::Other => self.request.directories && !self.pattern.directories_only,
        };
        if !wanted {
            return Ok(());
        }
        self.found.add(GlobEntry {
            path: path
                .into_os_string()
                .into_string()
                .unwrap_or_else(|path| path.to_string_lossy().into_owned()),
            kind,
            size: stat.as_ref().map(|stat| stat.stx_size),
            modified_ms: stat.as_ref().map(|stat| to_milliseconds(stat.stx_mtime)),
        });
        match self.found.take_page() {
            Some(page) => self.work.send_paths(page, self.request.metadata),
            None => Ok(()),
        }
    }

    fn check_time(&self) -> Result<(), Fault> {
        let path = self.root.display();
        if self.begun.elapsed() > SEARCH_TIMEOUT {
            let seconds = SEARCH_TIMEOUT.as_secs();
            let subject = format!("{path}: the search took longer than {seconds} s");
            return Err(fault::from_kind(FaultKind::Other, "search", &subject));
        }
        if self.work.is_abandoned() {
            return Err(fault::from_kind(FaultKind::Other, "search", &format!("{path}: abandoned")));
        }
        Ok(())
    }
}

impl GlobResults {
    fn new(request: &GlobRequest) -> Self {
        let limit = usize::try_from(request.limit).unwrap_or(MAX_RESULTS).min(MAX_RESULTS);
        let (order, descending) = (request.order, request.descending);
        let metadata = request.metadata;
        Self { kept: Vec::new(), kept_bytes: 0, sent: 0, order, descending, metadata, limit, total: 0 }
    }

    fn add(&mut self, entry: GlobEntry) {
        self.total += 1;
        if self.is_walk_order() {
            // Later entries cannot come before these.
            if self.sent + self.kept.len() >= self.limit {
                return;
            }
            self.kept_bytes += entry_size(&entry);
            self.kept.push(entry);
        } else {
            self.kept.push(entry);
            if self.kept.len() > self.limit * 2 {
                self.sort_and_cut();
            }
        }
    }

    /// A page of entries that come before all later ones, if there are enough.
    fn take_page(&mut self) -> Option<Vec<GlobEntry>> {
        if self.kept_bytes < PAGE_BYTES {
            return None;
        }
        self.kept_bytes = 0;
        self.sent += self.kept.len();
        Some(std::mem::take(&mut self.kept))
    }

    /// Whether the walk itself has the requested order.
    fn is_walk_order(&self) -> bool {
        self.order == GlobOrder::Path && !self.descending
    }

    fn sort_and_cut(&mut self) {
        let (order, descending) = (self.order, self.descending);
        self.kept.sort_by(|a, b| compare_entries(a, b, order, descending));
        self.kept.truncate(self.limit);
    }

    fn into_sorted(mut self) -> Vec<GlobEntry> {
        if !self.is_walk_order() {
            self.sort_and_cut();
        }
        self.kept
    }
}

/// How long an entry can be in a page.
fn entry_size(entry: &GlobEntry) -> usize {
    // JSON may encode one byte as six.
    entry.path.len() * 6 + 128
}

fn compare_entries(a: &GlobEntry, b: &GlobEntry, order: GlobOrder, descending: bool) -> Ordering {
    let by_path = || compare_paths(&a.path, &b.path);
    let ordering = match order {
        GlobOrder::Path => by_path(),
        GlobOrder::Name => last_component(&a.path).cmp(last_component(&b.path)),
        GlobOrder::Size => a.size.cmp(&b.size),
        GlobOrder::Modified => a.modified_ms.cmp(&b.modified_ms),
    };
    if descending { ordering.reverse() } else { ordering }.then_with(by_path)
}

/// Compares component by component, as the walk does.
fn compare_paths(a: &str, b: &str) -> Ordering {
    a.split('/').cmp(b.split('/'))
}

fn last_component(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Follows links; `None` if nothing is there.
fn read_metadata(path: &Path) -> Option<Statx> {
    let stat = |flags| rustix::fs::statx(CWD, path, flags, StatxFlags::BASIC_STATS);
    stat(AtFlags::empty()).or_else(|_| stat(AtFlags::SYMLINK_NOFOLLOW)).ok()
}

/// Adds the names in a directory to an empty list, sorted, with the kind of each, which for a link is `Symlink`.
///
/// The C library of the agent would read directories in pieces of 2 KiB, and allocate each buffer anew.
fn list_names(
    directory: &Path,
    buffer: &mut Vec<u8>,
    mut names: Vec<ListedName>,
) -> rustix::io::Result<Vec<ListedName>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty())?;
    let mut entries = RawDir::new(&opened, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            // Not every filesystem reports it.
            FileType::Unknown => match rustix::fs::statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                // An entry that vanishes meanwhile is left out.
                Err(_) => continue,
            },
            known => known,
        };
        names.push(ListedName {
            name: OsStr::from_bytes(name.to_bytes()).to_owned(),
            kind: listed_kind(kind),
        });
    }
    names.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(names)
}

fn listed_kind(kind: FileType) -> FileKind {
    match kind {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

fn pattern_fault(pattern: &str, reason: &str) -> Fault {
    let shown: String = pattern.chars().take(MAX_SHOWN_CHARS).collect();
    fault::from_kind(FaultKind::Invalid, "read pattern", &format!("{shown}: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, size: u64, modified_ms: i64) -> GlobEntry {
        let (size, modified_ms) = (Some(size), Some(modified_ms));
        GlobEntry { path: path.to_owned(), kind: FileKind::File, size, modified_ms }
    }

    fn check(order: GlobOrder, descending: bool, limit: usize, expected: &[&str]) {
        let mut found = GlobResults {
            kept: Vec::new(),
            kept_bytes: 0,
            sent: 0,
            order,
            descending,
            metadata: true,
            limit,
            total: 0,
        };
        for entry in [entry("/a/z", 1, 5), entry("/a-b", 3, 5), entry("/b/a", 2, 9), entry("/c", 1, 7)] {
            found.add(entry);
        }
        let total = found.total;
        let entries = found.into_sorted();
        let paths: Vec<&str> = entries.iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!((paths.as_slice(), total), (expected, 4), "{order:?} {descending} {limit}");
    }

    #[test]
    fn entries_are_the_first_in_the_requested_order() {
        check(GlobOrder::Path, false, 9, &["/a/z", "/a-b", "/b/a", "/c"]);
        check(GlobOrder::Path, false, 2, &["/a/z", "/a-b"]);
        check(GlobOrder::Path, true, 3, &["/c", "/b/a", "/a-b"]);
        check(GlobOrder::Name, false, 9, &["/b/a", "/a-b", "/c", "/a/z"]);
        check(GlobOrder::Size, false, 3, &["/a/z", "/c", "/b/a"]);
        check(GlobOrder::Size, true, 1, &["/a-b"]);
        check(GlobOrder::Modified, true, 9, &["/b/a", "/c", "/a/z", "/a-b"]);
        check(GlobOrder::Modified, false, 0, &[]);
    }
}
