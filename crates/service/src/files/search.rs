//! Searches in the files of a sandbox: for paths by a glob, and for text by a regular expression.
//!
//! The agent sends pages and then a summary. It never sends more than was requested, so anything else is an error of
//! the agent.

use std::time::{Duration, SystemTime};

use domain::Bytes;
use wire::files::FileOperation;
use wire::search::{GlobEntry, GlobRequest, GlobSummary, GrepRequest, GrepSummary};
use wire::{AgentReply, AgentRequest, Frame, FrameError};

use super::{FileCaller, SandboxFiles, file_request};
use crate::agent::client::{
    AgentClient, AgentError, OperationConnection, STALL_TIMEOUT, parse_answer, with_timeout,
};
use crate::agent::{faults, translate};
use crate::{FileKind, ServiceError};

/// The most bytes of all pages of one search together.
const MAX_SEARCH_BYTES: usize = 64 << 20;

/// The least that a page counts, so that endless empty pages reach the limit too.
const MIN_PAGE_BYTES: usize = 1 << 10;

/// A search for paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobQuery {
    /// Components are matched one by one from the directory on: `**` is any number of directories, and no wildcard
    /// matches a leading dot unless `hidden` is set.
    pub pattern: String,
    /// Globs of entries that are left out with everything below them, by their name or by their relative path.
    pub exclude: Vec<String>,
    pub hidden: bool,
    pub kinds: GlobKinds,
    /// Whether matches have a size and a time.
    pub metadata: bool,
    pub order: GlobOrder,
    pub descending: bool,
    /// The number of paths to return; those beyond it are only counted.
    pub limit: u32,
}

/// Which files a glob returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GlobKinds {
    /// Regular files, and links to them.
    Files,
    All,
}

/// Paths that are equal in this order are sorted by path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GlobOrder {
    /// By the components of the path.
    Path,
    /// By the last component.
    Name,
    Size,
    Modified,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobMatches {
    pub paths: Vec<GlobMatch>,
    /// How many paths match, whether or not they were returned.
    pub total: u64,
    pub truncated: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobMatch {
    /// The absolute path.
    pub path: String,
    /// Of the file that a link leads to; `Symlink` if it leads nowhere.
    pub kind: FileKind,
    /// Only if metadata was requested, and the file still existed.
    pub size: Option<u64>,
    pub modified: Option<SystemTime>,
}

/// A search for text in a file, or in the files below a directory. As in ripgrep, hidden files, binary files and those
/// that a `.gitignore` or `.ignore` names are left out below a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrepQuery {
    /// A regular expression, which may have look-around and back-references, or the text itself.
    pub pattern: GrepPattern,
    pub ignore_case: bool,
    /// Whether a match may span lines, and `.` matches a line feed.
    pub multiline: bool,
    /// The numbers of lines of context, at most 20.
    pub before: u32,
    pub after: u32,
    /// Globs of files to search, as in ripgrep's `--glob`; all files if there are none.
    pub include: Vec<String>,
    /// Globs of files and directories to leave out.
    pub exclude: Vec<String>,
    /// The name of one of ripgrep's file types, such as `py`.
    pub file_type: Option<String>,
    /// Whether directories below the path are searched too.
    pub recursive: bool,
    /// Larger files are left out.
    pub max_file_size: Option<Bytes>,
    /// The number of matches to skip.
    pub offset: u64,
    /// The number of matches to return.
    pub limit: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrepPattern {
    Regex(String),
    Literal(String),
}

/// The matches of a search, sorted by path and line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrepMatches {
    pub matches: Vec<GrepMatch>,
    pub files_searched: u64,
    pub files_matched: u64,
    /// Whether there are more matches than were returned.
    pub truncated: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrepMatch {
    /// The absolute path.
    pub path: String,
    /// The number of the first line, counted from 1.
    pub line: u64,
    /// The whole line, or lines, without the last line ending.
    pub text: String,
    /// Whether the text was too long and its end is missing.
    pub cut: bool,
    pub before: Vec<String>,
    pub after: Vec<String>,
}

/// One message of a search.
enum SearchStep<T, S> {
    Page(Vec<T>),
    End(S),
}

impl SandboxFiles<'_> {
    /// The paths below the directory `path` that match a glob.
    pub async fn find_paths(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        query: GlobQuery,
    ) -> Result<GlobMatches, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let limit = query.limit;
        let request = file_request(actor, FileOperation::Glob(wire_glob(path, query)));
        let (entries, summary) = run_search(&handle.agent, request, limit.min(MAX_PATHS), glob_step).await?;
        let GlobSummary { total, truncated } = summary;
        let paths = entries.into_iter().map(glob_match).collect();
        Ok(GlobMatches { paths, total, truncated })
    }

    /// The lines that match a pattern, in a file or in the files below a directory.
    pub async fn search_text(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        query: GrepQuery,
    ) -> Result<GrepMatches, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let limit = query.limit;
        let request = file_request(actor, FileOperation::Grep(wire_grep(path, query)));
        let (matches, summary) =
            run_search(&handle.agent, request, limit.min(MAX_MATCHES), grep_step).await?;
        let GrepSummary { files_searched, files_matched, truncated } = summary;
        let matches = matches.into_iter().map(grep_match).collect();
        Ok(GrepMatches { matches, files_searched, files_matched, truncated })
    }
}

/// The maximum number of paths and of matches that an agent returns.
const MAX_PATHS: u32 = 50_000;
const MAX_MATCHES: u32 = 10_000;

/// The maximum number of lines before or after a match.
const MAX_CONTEXT_LINES: usize = 20;

/// How long all results of a search may take. The agent ends one earlier.
const RESULTS_TIMEOUT: Duration = Duration::from_secs(150);

/// Sends a search, and reads its pages up to the summary. At most `limit` items are accepted.
async fn run_search<T, S>(
    agent: &AgentClient,
    request: AgentRequest,
    limit: u32,
    step: impl Fn(AgentReply) -> Option<SearchStep<T, S>>,
) -> Result<(Vec<T>, S), ServiceError> {
    let mut connection = agent.open_request(request).await?;
    let results = read_results(agent, &mut connection, limit, step);
    match tokio::time::timeout(RESULTS_TIMEOUT, results).await {
        Ok(results) => results,
        Err(_elapsed) => {
            let source = AgentError::Impossible("a search that does not end");
            Err(agent.agent_error("search", source))
        }
    }
}

async fn read_results<T, S>(
    agent: &AgentClient,
    connection: &mut OperationConnection,
    limit: u32,
    step: impl Fn(AgentReply) -> Option<SearchStep<T, S>>,
) -> Result<(Vec<T>, S), ServiceError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let (mut items, mut bytes) = (Vec::new(), 0);
    loop {
        let (reply, size) = read_reply(agent, connection).await?;
        bytes += size.max(MIN_PAGE_BYTES);
        match step(reply) {
            Some(SearchStep::End(summary)) => return Ok((items, summary)),
            Some(SearchStep::Page(page))
                if bytes <= MAX_SEARCH_BYTES && page.len() <= limit - items.len() =>
            {
                items.extend(page);
            }
            Some(SearchStep::Page(_)) => {
                let source = AgentError::Impossible("more results than were requested");
                return Err(agent.agent_error("search", source));
            }
            None => return Err(agent.unexpected_reply()),
        }
    }
}

fn glob_step(reply: AgentReply) -> Option<SearchStep<GlobEntry, GlobSummary>> {
    match reply {
        AgentReply::GlobEntries(page) => Some(SearchStep::Page(page)),
        AgentReply::GlobEnd(summary) => Some(SearchStep::End(summary)),
        _ => None,
    }
}

fn grep_step(reply: AgentReply) -> Option<SearchStep<wire::search::GrepMatch, GrepSummary>> {
    match reply {
        // Empty lines cost more in memory than on the wire.
        AgentReply::GrepMatches(page)
            if page.iter().all(|found| found.before.len().max(found.after.len()) <= MAX_CONTEXT_LINES) =>
        {
            Some(SearchStep::Page(page))
        }
        AgentReply::GrepEnd(summary) => Some(SearchStep::End(summary)),
        _ => None,
    }
}

/// The next message and its size in bytes.
async fn read_reply(
    agent: &AgentClient,
    connection: &mut OperationConnection,
) -> Result<(AgentReply, usize), ServiceError> {
    let broken = |source| agent.agent_error("search", source);
    let frame = with_timeout(STALL_TIMEOUT, "receive more results", connection.next_frame()).await;
    let frame = frame.and_then(|frame| frame.ok_or(AgentError::EndedEarly)).map_err(broken)?;
    let Frame::Control(json) = &frame else { return Err(broken(AgentError::Frame(FrameError::Unexpected))) };
    let size = json.len();
    match parse_answer(&frame).map_err(broken)? {
        Ok(reply) => Ok((reply, size)),
        Err(fault) => Err(faults::file_error(agent, fault)),
    }
}

fn wire_glob(path: &str, query: GlobQuery) -> GlobRequest {
    GlobRequest {
        path: path.to_owned(),
        pattern: query.pattern,
        exclude: query.exclude,
        hidden: query.hidden,
        directories: query.kinds == GlobKinds::All,
        metadata: query.metadata,
        order: match query.order {
            GlobOrder::Path => wire::search::GlobOrder::Path,
            GlobOrder::Name => wire::search::GlobOrder::Name,
            GlobOrder::Size => wire::search::GlobOrder::Size,
            GlobOrder::Modified => wire::search::GlobOrder::Modified,
        },
        descending: query.descending,
        limit: query.limit,
    }
}

fn wire_grep(path: &str, query: GrepQuery) -> GrepRequest {
    let (pattern, literal) = match query.pattern {
        GrepPattern::Regex(pattern) => (pattern, false),
        GrepPattern::Literal(text) => (text, true),
    };
    GrepRequest {
        path: path.to_owned(),
        pattern,
        literal,
        ignore_case: query.ignore_case,
        multiline: query.multiline,
        before: query.before,
        after: query.after,
        include: query.include,
        exclude: query.exclude,
        file_type: query.file_type,
        recursive: query.recursive,
        max_file_bytes: query.max_file_size.map(|size| size.0),
        offset: query.offset,
        limit: query.limit,
    }
}

fn grep_match(found: wire::search::GrepMatch) -> GrepMatch {
    let wire::search::GrepMatch { path, line, text, cut, before, after } = found;
    GrepMatch { path, line, text, cut, before, after }
}

fn glob_match(entry: GlobEntry) -> GlobMatch {
    GlobMatch {
        path: entry.path,
        kind: translate::file_kind(entry.kind),
        size: entry.size,
        modified: entry.modified_ms.map(translate::clamped_time),
    }
}
