//! Runs a search: files are searched in batches by several threads, and their matches are sent in the order of the
//! files, so the reply is the same each time.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use wire::search::{GrepMatch, GrepRequest, GrepSummary};
use wire::{AgentReply, Fault};

use crate::file_search::{self, CollectLimits, FileMatches, FileSearchError};
use crate::pattern::{SearchPattern, refuse_pattern};
use crate::reply_sender::ReplySender;
use crate::tree_walk::FileWalk;

/// The most matches that are returned.
const MAX_MATCHES: u32 = 10_000;

/// The most bytes of text that are returned.
const MAX_RESULT_BYTES: usize = 16 << 20;

/// The most files that are searched.
const MAX_FILES: usize = 1_000_000;

/// The number of files that are searched before matches are sent.
const BATCH_FILES: usize = 128;

/// The most bytes of text that are held of each file of a batch. A file with more is searched again when it is its
/// turn.
const MAX_FILE_RESULT_BYTES: usize = 256 << 10;

/// The most threads. Further ones would wait for the disk, or for the sandbox's processor limit.
const MAX_THREADS: usize = 4;

/// The estimated size at which a page is sent. A match that does not fit is sent alone.
const PAGE_BYTES: usize = 512 << 10;

/// A search, and how much of its limits is left.
struct TextSearch<'a> {
    request: &'a GrepRequest,
    pattern: SearchPattern,
    sender: &'a ReplySender,
    skip_left: u64,
    matches_left: u64,
    bytes_left: usize,
    summary: GrepSummary,
    page: Vec<GrepMatch>,
    page_size: usize,
}

/// What became of one file of a batch; `None` if it was left out.
type FileOutcome = Result<Option<FileMatches>, FileSearchError>;

pub(crate) fn search_text(request: &GrepRequest, sender: &ReplySender) -> Result<(), Fault> {
    let pattern = SearchPattern::compile(request)?;
    let mut files = FileWalk::start(request)?;
    let mut search = TextSearch {
        request,
        pattern,
        sender,
        skip_left: request.offset,
        matches_left: request.limit.min(MAX_MATCHES).into(),
        bytes_left: MAX_RESULT_BYTES,
        summary: GrepSummary { files_searched: 0, files_matched: 0, truncated: false },
        page: Vec::new(),
        page_size: 0,
    };
    let mut visited = 0;
    while !search.summary.truncated {
        let batch = files.next_files(BATCH_FILES);
        if batch.is_empty() {
            break;
        }
        search.search_batch(&batch)?;
        visited += batch.len();
        search.summary.truncated |= visited >= MAX_FILES;
    }
    search.send_page()?;
    sender.send(&AgentReply::GrepEnd(search.summary))
}

impl TextSearch<'_> {
    /// Searches the files in parallel, and then adds their matches in order.
    fn search_batch(&mut self, files: &[PathBuf]) -> Result<(), Fault> {
        let limits = CollectLimits {
            skip: 0,
            matches: self.skip_left.saturating_add(self.matches_left),
            bytes: MAX_FILE_RESULT_BYTES,
        };
        let outcomes = search_files(self.request, &self.pattern, files, limits);
        for (path, outcome) in files.iter().zip(outcomes) {
            if let Some(outcome) = outcome {
                self.add_file(path, outcome)?;
            }
            if self.summary.truncated {
                break;
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path, outcome: FileOutcome) -> Result<(), Fault> {
        let mut found = match self.accept_outcome(path, outcome)? {
            Some(found) if found.too_long => {
                let limits = CollectLimits {
                    skip: self.skip_left,
                    matches: self.matches_left,
                    bytes: self.bytes_left,
                };
                let mut searcher = file_search::build_searcher(self.request);
                let outcome =
                    file_search::search_file(&mut searcher, &self.pattern, self.request, path, limits);
                self.accept_outcome(path, outcome)?
            }
            found => found,
        };
        let Some(found) = &mut found else { return Ok(()) };
        self.summary.files_searched += 1;
        self.skip_left -= found.skipped;
        let skipped = usize::try_from(self.skip_left).unwrap_or(usize::MAX).min(found.matches.len());
        self.skip_left -= skipped as u64;
        let matched = found.skipped > 0 || skipped > 0;
        let mut returned = false;
        for found in found.matches.drain(..).skip(skipped) {
            let size = text_size(&found);
            if self.matches_left == 0 || size > self.bytes_left {
                self.summary.truncated = true;
                break;
            }
            self.matches_left -= 1;
            self.bytes_left -= size;
            self.add_match(found, size)?;
            returned = true;
        }
        self.summary.truncated |= found.more;
        self.summary.files_matched += u64::from(matched || returned);
        Ok(())
    }

    /// A file that cannot be read is left out, unless it is the only one.
    fn accept_outcome(&self, path: &Path, outcome: FileOutcome) -> Result<Option<FileMatches>, Fault> {
        match outcome {
            Ok(found) => Ok(found),
            Err(FileSearchError::Pattern(reason)) => {
                let reason = format!("{reason} (in {})", path.display());
                Err(refuse_pattern(&self.request.pattern, &reason))
            }
            Err(FileSearchError::Io(error)) if path == Path::new(&self.request.path) => {
                Err(crate::io_fault(&error, "search", &format!("{}: {error}", path.display())))
            }
            Err(FileSearchError::Io(_)) => Ok(None),
        }
    }

    fn add_match(&mut self, found: GrepMatch, size: usize) -> Result<(), Fault> {
        // JSON may encode one byte as six.
        let size = size * 6 + 256;
        if self.page_size + size > PAGE_BYTES {
            self.send_page()?;
        }
        self.page_size += size;
        self.page.push(found);
        Ok(())
    }

    fn send_page(&mut self) -> Result<(), Fault> {
        if self.page.is_empty() {
            return Ok(());
        }
        self.page_size = 0;
        self.sender.send(&AgentReply::GrepMatches(std::mem::take(&mut self.page)))
    }
}

/// Searches files in several threads, as far as they can be started. The outcomes are in the order of the files.
fn search_files(
    request: &GrepRequest,
    pattern: &SearchPattern,
    files: &[PathBuf],
    limits: CollectLimits,
) -> Vec<Option<FileOutcome>> {
    let outcomes: Vec<OnceLock<FileOutcome>> = files.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        // Threads that share a pattern would wait for each other.
        let (mut searcher, pattern) = (file_search::build_searcher(request), pattern.clone());
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((path, outcome)) = files.get(index).zip(outcomes.get(index)) else { break };
            outcome.get_or_init(|| file_search::search_file(&mut searcher, &pattern, request, path, limits));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..thread_count(files.len()) {
            // A sandbox may allow no further thread; this one then searches alone.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    outcomes.into_iter().map(OnceLock::into_inner).collect()
}

fn thread_count(files: usize) -> usize {
    const MIN_FILES_PER_THREAD: usize = 8;
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    processors.min(MAX_THREADS).min(files / MIN_FILES_PER_THREAD).max(1)
}

fn text_size(found: &GrepMatch) -> usize {
    let context = found.before.iter().chain(&found.after).map(|line| line.len() + 8).sum::<usize>();
    found.path.len() + found.text.len() + context
}

/// A request for a pattern below a path, with nothing else set.
#[cfg(test)]
pub(crate) fn plain_request(path: &str, pattern: &str) -> GrepRequest {
    GrepRequest {
        path: path.to_owned(),
        pattern: pattern.to_owned(),
        literal: false,
        ignore_case: false,
        multiline: false,
        before: 0,
        after: 0,
        include: Vec::new(),
        exclude: Vec::new(),
        file_type: None,
        recursive: true,
        max_file_bytes: None,
        offset: 0,
        limit: MAX_MATCHES,
    }
}
