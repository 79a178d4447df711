//! Messages about edits of text files and about taking them back.

use serde::{Deserialize, Serialize};

use crate::files::FileAttributes;

/// What an edit does with the text that is sent after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextEdit {
    /// Puts the text in the place of `old`.
    Replace {
        old: String,
        occurrence: TextOccurrence,
        /// In a file whose first line ends with CRLF, line ends of the text become CRLF, and so do those
        /// of `old` if it has no match as it is.
        #[serde(default)]
        adapt_line_ends: bool,
    },
    /// Inserts the text as lines after this line; 0 is before the first line. A line end that is missing
    /// between them is added.
    Insert {
        after_line: u64,
        /// In a file whose first line ends with CRLF, line ends of the text become CRLF.
        #[serde(default)]
        adapt_line_ends: bool,
    },
    /// Makes a file with this text, with parents. A file or link of that name is `already_exists`.
    Create { attributes: FileAttributes },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextOccurrence {
    /// Nothing is changed unless there is exactly one match.
    Only,
    First,
    Last,
    All,
}

/// Whether an edit is taken back if the file is not as the edit left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UndoPolicy {
    /// Later changes are lost.
    Overwrite,
    Refuse,
}

/// The result of an edit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditReport {
    /// False if the file was left as it was: the text was not found as often as required, the line does not
    /// exist, or the new content is the old one.
    pub changed: bool,
    /// How often the old text was found; overlapping matches count once.
    #[serde(default)]
    pub matches: u64,
    /// The lines in which the first matches begin; the first line is 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub match_lines: Vec<u64>,
    /// The number of lines of the old content.
    #[serde(default)]
    pub lines: u64,
    /// Whether the edit can be taken back. A content that is too long is not kept.
    #[serde(default)]
    pub undoable: bool,
    /// The contents that follow.
    #[serde(default)]
    pub contents: ContentLengths,
}

/// The result of an undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoReport {
    pub outcome: UndoOutcome,
    /// Whether the file was not as the edit left it.
    #[serde(default)]
    pub changed_since: bool,
    /// How many further edits can be taken back.
    #[serde(default)]
    pub steps_left: u64,
    /// The contents that follow: before the undo, and after it.
    #[serde(default)]
    pub contents: ContentLengths,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UndoOutcome {
    /// The file has its content from before the edit.
    Restored,
    /// The edit had created the file, which was removed.
    Removed,
    /// No edit of this file by this user is kept.
    NoHistory,
    /// The file is not as the edit left it, and [`UndoPolicy::Refuse`] was requested.
    ChangedSince,
}

/// The lengths of an old and a new content, which follow in this order. A content is left out if the file
/// did not exist, the content is too long, or nothing was changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentLengths {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<u64>,
}
