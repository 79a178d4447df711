//! Messages about files. Paths are absolute, or begin with `~/`, or are relative to the
//! default directory; they are text, and names that are not UTF-8 are listed with
//! replacement characters.

use serde::{Deserialize, Serialize};

use crate::process::UserIdentity;

/// A file operation and the user that it runs as.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRequest {
    pub identity: UserIdentity,
    /// The isolated session whose file tree the operation sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nest: Option<String>,
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
    },
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
