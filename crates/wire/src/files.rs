//! Messages about files. Paths are absolute, or begin with `~/`, or are relative to the
//! default directory; they are text, and names that are not UTF-8 are listed with
//! replacement characters.

use serde::{Deserialize, Serialize};

use crate::file_edits::{TextEdit, UndoPolicy};
use crate::process::UserIdentity;
use crate::search::{GlobRequest, GrepRequest};

/// A file operation and the user that it runs as.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRequest {
    pub identity: UserIdentity,
    /// The isolated session whose file tree the operation sees.
    #[serde(default, rename = "nest", skip_serializing_if = "Option::is_none")]
    pub isolated_session: Option<String>,
    pub operation: FileOperation,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileOperation {
    /// Answered `Info`, one for each path in order; a missing path yields a fault that names it.
    Stat {
        paths: Vec<String>,
    },
    /// Answered `Reading`, `Data` …, `End`. `length` counts from `offset`; both are clamped.
    Read {
        path: String,
        #[serde(default)]
        offset: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        length: Option<u64>,
    },
    /// Answered as `Read`: the lines from `start`, counted from zero, up to `end`, with their line endings. A file that
    /// is not UTF-8 up to there is `NotText`.
    ReadLines {
        path: String,
        #[serde(default)]
        start: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        end: Option<u64>,
    },
    /// The server sends `Data` …, `End`; answered `Ok` when the file is in place under its name. If
    /// the connection breaks before `End` the old file is unchanged, unless the directory is not
    /// writable: then the file is overwritten in place. Missing parents are created.
    Write {
        path: String,
        attributes: FileAttributes,
    },
    /// Like `Write`, but the data is appended; concurrent appends lose nothing.
    Append {
        path: String,
        attributes: FileAttributes,
    },
    /// Answered `Entries` …, `End`, depth first in the order of names.
    List {
        path: String,
        depth: u32,
    },
    /// Like `List`: files (not directories) below `path` whose base name matches the glob.
    Search {
        path: String,
        pattern: String,
    },
    /// Answered `GlobEntries` …, `GlobEnd`.
    Glob(GlobRequest),
    /// Answered `GrepMatches` …, `GrepEnd`.
    Grep(GrepRequest),
    Move {
        from: String,
        to: String,
        overwrite: bool,
    },
    /// Also answered `Ok` if the path does not exist.
    Remove {
        path: String,
        recursive: bool,
    },
    /// Creates parents too; the attributes apply to the directory itself, if it is new.
    MakeDirectory {
        path: String,
        attributes: FileAttributes,
    },
    /// Makes a symbolic link, with parents; a file or link of its name is replaced. `target` is only
    /// text, and nothing need be there.
    MakeLink {
        path: String,
        target: String,
    },
    SetAttributes {
        path: String,
        attributes: FileAttributes,
    },
    /// Replaces each occurrence in each file; answered `Replaced`.
    Replace {
        edits: Vec<FileEdit>,
    },
    /// Answered `Ok`, then `Watched` until the connection ends.
    Watch {
        path: String,
        recursive: bool,
        /// Events have the optional fields, and a rename within the watched tree is one event. An older
        /// agent ignores this.
        #[serde(default, skip_serializing_if = "is_false")]
        details: bool,
    },
    /// Changes a text file, or creates one. The server sends the new text as `Data` …, `End`; answered
    /// `Edited`, then the contents that it announces as `Data` …, then `End`. The file is replaced as a
    /// whole; its other bytes, its mode and its owner stay.
    Edit {
        path: String,
        edit: TextEdit,
        /// The old and the new content are returned, each if it is not longer than this.
        #[serde(default)]
        max_content: u64,
    },
    /// Takes back the last edit of this file by this user that was not taken back yet. Answered `Undone`,
    /// then the contents that it announces as `Data` …, then `End`.
    UndoEdit {
        path: String,
        if_changed: UndoPolicy,
        #[serde(default)]
        max_content: u64,
    },
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A field that is left out keeps its value, or its default on a new file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileAttributes {
    /// Permission bits, such as `0o644`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Permission bits for a new file if `mode` is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_mode: Option<u32>,
    /// The name of an account or a decimal uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEdit {
    pub path: String,
    pub old: String,
    pub new: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// The absolute path.
    pub path: String,
    pub kind: FileKind,
    pub size: u64,
    /// Permission bits with set-id and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// The account's name in the sandbox, or the decimal id.
    pub owner: String,
    pub group: String,
    pub modified_ms: i64,
    pub created_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Other,
}

/// One entry of a listing.
pub type DirectoryEntry = FileInfo;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub path: String,
    pub change: FileChange,
    /// The position of the event in its watch, from 1 on. This and the following fields are only present if
    /// the watch requested details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The path that a renamed file has now, if that is in the watched tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_path: Option<String>,
    /// What the file is. Of a file that is gone it is only known if it was a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<FileKind>,
    /// Attributes of the file when the event was reported, if it still existed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_ms: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
}

impl WatchEvent {
    /// An event without details.
    pub fn new(path: String, change: FileChange) -> Self {
        Self {
            path,
            change,
            sequence: None,
            new_path: None,
            kind: None,
            size: None,
            modified_ms: None,
            inode: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
    Created,
    Written,
    Removed,
    Renamed,
    Attributes,
    /// The kernel dropped events; the watcher should list the directory again.
    Overflow,
}
