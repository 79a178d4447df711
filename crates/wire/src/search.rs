//! Messages about searches: for paths by a glob, and for text by a regular expression.
//!
//! The replies are sent in pages, and the last message says how much more there was.

use serde::{Deserialize, Serialize};

use crate::files::FileKind;

/// Finds paths below a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobRequest {
    /// The directory at which the pattern starts.
    pub path: String,
    /// Components are matched one by one: `**` is any number of directories, and no wildcard matches a
    /// leading dot unless `hidden` is set.
    pub pattern: String,
    /// Globs of entries that are left out with everything below them. Each is matched against the name
    /// and against the path relative to `path`, where `*` also matches `/`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    #[serde(default)]
    pub hidden: bool,
    /// Whether everything is returned, and not only regular files.
    #[serde(default)]
    pub directories: bool,
    /// Whether entries have a size and a time.
    #[serde(default)]
    pub metadata: bool,
    #[serde(default)]
    pub order: GlobOrder,
    #[serde(default)]
    pub descending: bool,
    /// The number of entries that are returned, of all those that match the first in the requested
    /// order.
    pub limit: u32,
}

/// Entries that are equal in this order are sorted by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GlobOrder {
    /// By the components of the path.
    #[default]
    Path,
    /// By the last component.
    Name,
    Size,
    Modified,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobEntry {
    /// The absolute path.
    pub path: String,
    /// Of the file that a link leads to; `Symlink` if it leads nowhere.
    pub kind: FileKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_ms: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobSummary {
    /// How many paths match, whether or not they were returned.
    pub total: u64,
    /// Whether some of them were not returned, or the search stopped at a limit of the agent.
    pub truncated: bool,
}

/// The command line by which the agent runs a search for text in a program of its own.
pub const SEARCH_SUBCOMMAND: &str = "__search";

/// The descriptor from which that program reads a [`GrepRequest`] as JSON.
pub const REQUEST_FD: i32 = 3;

/// The descriptor of the connection on which that program answers.
pub const CONNECTION_FD: i32 = 4;

/// Finds text in a file, or in the files below a directory. As in ripgrep, hidden files, binary files and those that
/// a `.gitignore` or `.ignore` names are left out below a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepRequest {
    pub path: String,
    /// A regular expression, which may have look-around and back-references.
    pub pattern: String,
    /// Whether the pattern is the text itself.
    #[serde(default)]
    pub literal: bool,
    #[serde(default)]
    pub ignore_case: bool,
    /// Whether a match may span lines, and `.` matches a line feed.
    #[serde(default)]
    pub multiline: bool,
    /// The number of lines before each match that are returned, at most 20.
    #[serde(default)]
    pub before: u32,
    #[serde(default)]
    pub after: u32,
    /// Globs of files to search, as in ripgrep's `--glob`; all files if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Globs of files and directories to leave out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// The name of one of ripgrep's file types, such as `py`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_type: Option<String>,
    /// Whether directories below `path` are searched too.
    pub recursive: bool,
    /// Larger files are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_file_bytes: Option<u64>,
    /// The number of matches to skip.
    #[serde(default)]
    pub offset: u64,
    /// The number of matches that are returned, sorted by path and line.
    pub limit: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepMatch {
    /// The absolute path.
    pub path: String,
    /// The number of the first line, counted from 1.
    pub line: u64,
    /// The whole line, or lines, without the last line ending.
    pub text: String,
    /// Whether the text was too long and its end is missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepSummary {
    pub files_searched: u64,
    pub files_matched: u64,
    /// Whether there are more matches than were returned, or the search stopped at a limit.
    pub truncated: bool,
}
