//! Searches one file, and collects what is returned of it.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use grep_searcher::{
    BinaryDetection, MmapChoice, Searcher, SearcherBuilder, Sink, SinkContext, SinkError, SinkMatch,
};
use rustix::fs::{Mode, OFlags};
use wire::search::{GrepMatch, GrepRequest};

use crate::pattern::SearchPattern;

/// The longest text of a match that is returned. Together with its context it must fit one frame, in which one byte
/// may be encoded as six.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// The longest line of context that is returned.
const MAX_CONTEXT_BYTES: usize = 2 << 10;

/// The most lines of context on either side.
pub(crate) const MAX_CONTEXT_LINES: u32 = 20;

/// The most memory for the line that is searched, or for the file if matches may span lines. A file that needs more is
/// left out.
const MAX_BUFFER_BYTES: usize = 64 << 20;

/// How much of one file is collected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectLimits {
    /// The number of matches that are only counted.
    pub(crate) skip: u64,
    pub(crate) matches: u64,
    pub(crate) bytes: usize,
}

/// What was found in one file.
#[derive(Debug, Default)]
pub(crate) struct FileMatches {
    pub(crate) matches: Vec<GrepMatch>,
    pub(crate) skipped: u64,
    /// Whether there are more matches than were collected.
    pub(crate) more: bool,
    /// Whether the limit of bytes is the reason for that.
    pub(crate) too_long: bool,
}

#[derive(Debug)]
pub(crate) enum FileSearchError {
    Io(io::Error),
    /// The pattern needs more steps than are allowed.
    Pattern(String),
}

/// Collects the matches of one file with their context.
struct MatchCollector<'a> {
    path: &'a str,
    before: usize,
    after: usize,
    limits: CollectLimits,
    bytes: usize,
    /// The last lines, without gaps.
    recent: VecDeque<String>,
    found: FileMatches,
}

/// A searcher with the options of a request. It can be used for one file after the other.
pub(crate) fn build_searcher(request: &GrepRequest) -> Searcher {
    SearcherBuilder::new()
        .line_number(true)
        .multi_line(request.multiline)
        .before_context(context_lines(request.before))
        .after_context(context_lines(request.after))
        .binary_detection(BinaryDetection::quit(0))
        // A mapped file that is truncated meanwhile would kill this process.
        .memory_map(MmapChoice::never())
        .heap_limit(Some(MAX_BUFFER_BYTES))
        .build()
}

fn context_lines(count: u32) -> usize {
    count.min(MAX_CONTEXT_LINES) as usize
}

/// Returns `None` if the file is left out because of its size.
pub(crate) fn search_file(
    searcher: &mut Searcher,
    pattern: &SearchPattern,
    request: &GrepRequest,
    path: &Path,
    limits: CollectLimits,
) -> Result<Option<FileMatches>, FileSearchError> {
    let file = open_regular(path)?;
    let size = file.metadata().map_err(FileSearchError::Io)?.len();
    if request.max_file_bytes.is_some_and(|most| size > most) {
        return Ok(None);
    }
    let shown = path.to_string_lossy();
    let mut collector = MatchCollector {
        path: &shown,
        before: context_lines(request.before),
        after: context_lines(request.after),
        limits,
        bytes: 0,
        recent: VecDeque::new(),
        found: FileMatches::default(),
    };
    match pattern {
        SearchPattern::Fast(matcher) => searcher.search_file(matcher, &file, &mut collector)?,
        SearchPattern::Backtracking(matcher) => searcher.search_file(matcher, &file, &mut collector)?,
    }
    Ok(Some(collector.found))
}

/// Opens a file for reading, without waiting for the other end of a pipe.
pub(crate) fn open_regular(path: &Path) -> Result<File, FileSearchError> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = || {
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let regular = file.metadata()?.is_file();
        if regular { Ok(file) } else { Err(io::Error::other("not a regular file")) }
    };
    open().map_err(FileSearchError::Io)
}

impl MatchCollector<'_> {
    /// Adds a line to the context of the matches before it, and keeps it for those after it.
    fn add_line(&mut self, line: &[u8]) {
        if self.before == 0 && self.after == 0 {
            return;
        }
        let text = line_text(line, MAX_CONTEXT_BYTES).0;
        // Only the last matches can lack lines, since each line is added to all that do.
        for found in self.found.matches.iter_mut().rev().take(self.after) {
            if found.after.len() < self.after {
                self.bytes += text.len();
                found.after.push(text.clone());
            }
        }
        if self.before > 0 {
            if self.recent.len() == self.before {
                self.recent.pop_front();
            }
            self.recent.push_back(text);
        }
    }

    /// Whether the last match lacks lines of context.
    fn lacks_lines(&self) -> bool {
        self.found.matches.last().is_some_and(|found| found.after.len() < self.after)
    }

    fn add_match(&mut self, found: &SinkMatch<'_>) {
        if self.found.skipped < self.limits.skip {
            self.found.skipped += 1;
            return;
        }
        if self.found.matches.len() as u64 >= self.limits.matches {
            self.found.more = true;
            return;
        }
        let (text, cut) = line_text(found.bytes(), MAX_TEXT_BYTES);
        let before: Vec<String> = self.recent.iter().cloned().collect();
        let size = self.path.len() + text.len() + before.iter().map(String::len).sum::<usize>();
        if self.bytes + size > self.limits.bytes {
            (self.found.more, self.found.too_long) = (true, true);
            return;
        }
        self.bytes += size;
        let line = found.line_number().unwrap_or(0);
        let (path, after) = (self.path.to_owned(), Vec::new());
        self.found.matches.push(GrepMatch { path, line, text, cut, before, after });
    }
}

impl Sink for MatchCollector<'_> {
    type Error = FileSearchError;

    fn matched(&mut self, _searcher: &Searcher, found: &SinkMatch<'_>) -> Result<bool, FileSearchError> {
        // The lines of this match follow the earlier matches, and precede later ones, but not itself.
        let earlier = self.found.matches.len();
        self.add_match(found);
        let own = self.found.matches.split_off(earlier);
        found.lines().for_each(|line| self.add_line(line));
        self.found.matches.extend(own);
        Ok(!self.found.more || self.lacks_lines())
    }

    fn context(&mut self, _searcher: &Searcher, line: &SinkContext<'_>) -> Result<bool, FileSearchError> {
        self.add_line(line.bytes());
        Ok(!self.found.more || self.lacks_lines())
    }

    fn context_break(&mut self, _searcher: &Searcher) -> Result<bool, FileSearchError> {
        self.recent.clear();
        Ok(true)
    }
}

/// The text of a line or of several, without the last line ending, and whether it was cut.
fn line_text(bytes: &[u8], most: usize) -> (String, bool) {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(most)]);
    if bytes.len() <= most {
        return (text.into_owned(), false);
    }
    // The cut may have gone through a character, which was then replaced.
    (text.trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned(), true)
}

impl SinkError for FileSearchError {
    fn error_message<T: fmt::Display>(message: T) -> Self {
        Self::Pattern(message.to_string())
    }

    fn error_io(error: io::Error) -> Self {
        Self::Io(error)
    }
}
