//! Edits of text files, and taking them back. The agent edits and keeps the history; here its reports are checked.

use bytes::{Bytes, BytesMut};
use wire::file_edits::{ContentLengths, EditReport, UndoReport};
use wire::files::FileOperation;
use wire::{Frame, FrameError};

use super::{FileAttributes, FileCaller, SandboxFiles, begin_operation, file_request};
use crate::agent::client::{
    AgentClient, AgentError, OperationConnection, STALL_TIMEOUT, parse_answer, with_timeout,
};
use crate::agent::{faults, translate};
use crate::{FileWriter, ServiceError};

/// The longest old or new content that is returned, whatever the caller allows; both are held in memory.
pub const MAX_RETURNED_CONTENT: u64 = 4 << 20;

/// How many lines with matches are passed on.
const MAX_MATCH_LINES: usize = 64;

/// A change of a text file, or a new file. The text itself is a separate argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextEdit {
    /// Puts the text in the place of `old`, which must not be empty.
    Replace { old: String, occurrence: TextOccurrence, line_ends: LineEnds },
    /// Inserts the text as lines after this line; 0 is before the first line.
    Insert { after_line: u64, line_ends: LineEnds },
    /// Makes a file with this text, and its parents. It fails if the name is taken.
    Create { attributes: FileAttributes, new_file_mode: Option<u32> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextOccurrence {
    /// Nothing is changed unless there is exactly one match.
    Only,
    First,
    Last,
    All,
}

/// The meaning of line ends in the texts of an edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineEnds {
    /// Texts are used as they are.
    Exact,
    /// LF stands for CRLF in a file whose first line ends with CRLF.
    AsInFile,
}

/// Whether an edit is undone if the file is not as the edit left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UndoPolicy {
    /// Later changes are lost.
    Overwrite,
    Refuse,
}

/// The result of an edit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditedFile {
    /// False if the file was left as it was: the text was not found as often as required, the line does not exist, or the
    /// new content is the old one.
    pub changed: bool,
    /// How often the old text was found.
    pub matches: u64,
    /// The lines in which the first matches begin; the first line is 1.
    pub match_lines: Vec<u64>,
    /// The number of lines of the old content.
    pub lines: u64,
    /// Whether the edit can be undone.
    pub undoable: bool,
    pub contents: EditContents,
}

/// The result of an undo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndoneEdit {
    pub outcome: UndoOutcome,
    /// Whether the file was not as the edit left it.
    pub changed_since: bool,
    /// How many further edits of the file can be undone.
    pub steps_left: u64,
    /// The contents before and after the undo.
    pub contents: EditContents,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The contents of a file before and after a change. Each is `None` if there was no file, if it is longer than
/// requested, or if nothing was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EditContents {
    pub old: Option<Bytes>,
    pub new: Option<Bytes>,
}

impl SandboxFiles<'_> {
    /// Changes a text file as a whole or not at all. The old and the new content are returned, each if it is not longer than
    /// `max_content` and [`MAX_RETURNED_CONTENT`].
    pub async fn edit_file(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        edit: TextEdit,
        text: Bytes,
        max_content: u64,
    ) -> Result<EditedFile, ServiceError> {
        let max_content = max_content.min(MAX_RETURNED_CONTENT);
        let operation =
            FileOperation::Edit { path: path.to_owned(), edit: translate::wire_text_edit(edit), max_content };
        let (handle, activity) = self.0.begin_use()?;
        let agent = handle.agent.clone();
        let connection = agent.open_request(file_request(actor, operation)).await?;
        let mut writer = FileWriter::new(agent.clone(), connection, activity);
        writer.send_bytes(text).await?;
        let mut report: EditReport = writer.finish_with().await?;
        let contents = read_contents(&agent, &mut writer.connection, report.contents, max_content).await?;
        report.match_lines.truncate(MAX_MATCH_LINES);
        Ok(EditedFile {
            changed: report.changed,
            matches: report.matches,
            match_lines: report.match_lines,
            lines: report.lines,
            undoable: report.undoable,
            contents,
        })
    }

    /// Takes back the last edit of a file by this user that was not taken back yet.
    pub async fn undo_edit(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        if_changed: UndoPolicy,
        max_content: u64,
    ) -> Result<UndoneEdit, ServiceError> {
        let max_content = max_content.min(MAX_RETURNED_CONTENT);
        let if_changed = translate::wire_undo_policy(if_changed);
        let operation = FileOperation::UndoEdit { path: path.to_owned(), if_changed, max_content };
        let (handle, _activity) = self.0.begin_use()?;
        let agent = &handle.agent;
        let (mut connection, report): (_, UndoReport) = begin_operation(agent, actor, operation).await?;
        Ok(UndoneEdit {
            outcome: translate::undo_outcome(report.outcome),
            changed_since: report.changed_since,
            steps_left: report.steps_left,
            contents: read_contents(agent, &mut connection, report.contents, max_content).await?,
        })
    }
}

/// Reads the contents that a report announces, and their end.
async fn read_contents(
    agent: &AgentClient,
    connection: &mut OperationConnection,
    lengths: ContentLengths,
    max_content: u64,
) -> Result<EditContents, ServiceError> {
    let broken = |source| agent.agent_error("send the contents of a file", source);
    let length = |length: Option<u64>| match length.unwrap_or(0) {
        allowed if allowed <= max_content => usize::try_from(allowed).ok(),
        _ => None,
    };
    let (Some(old_length), Some(new_length)) = (length(lengths.old), length(lengths.new)) else {
        return Err(broken(AgentError::Impossible("a longer content than was requested")));
    };
    // Memory is reserved as bytes arrive, not as they are announced.
    let mut contents = BytesMut::new();
    loop {
        let frame =
            with_timeout(STALL_TIMEOUT, "receive the contents of a file", connection.next_frame()).await;
        match frame.and_then(|frame| frame.ok_or(AgentError::EndedEarly)).map_err(broken)? {
            Frame::Data(bytes)
                if bytes.is_empty() || contents.len() + bytes.len() > old_length + new_length =>
            {
                return Err(broken(AgentError::Impossible("other contents than were announced")));
            }
            Frame::Data(bytes) => contents.extend_from_slice(&bytes),
            Frame::End if contents.len() == old_length + new_length => break,
            Frame::End | Frame::Output { .. } => {
                return Err(broken(AgentError::Frame(FrameError::Unexpected)));
            }
            frame @ Frame::Control(_) => {
                return Err(match parse_answer(&frame).map_err(broken)? {
                    Err(fault) => faults::file_error(agent, fault),
                    Ok(_) => agent.unexpected_reply(),
                });
            }
        }
    }
    let mut contents = contents.freeze();
    let old = contents.split_to(old_length);
    Ok(EditContents { old: lengths.old.map(|_| old), new: lengths.new.map(|_| contents) })
}
