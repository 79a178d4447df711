//! Edits of text files, and taking them back.
//!
//! The worker first changes to the directory of the file and from then on uses only the file's name. So the file that is
//! read is the one that is replaced, even if someone meanwhile puts a link into its path. The history knows the file by
//! the path of that directory without links: an undo never writes through a link that appeared after the edit.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use wire::file_edits::{ContentLengths, EditReport, TextEdit, UndoOutcome, UndoPolicy, UndoReport};
use wire::files::FileAttributes;
use wire::frame::MAX_PAYLOAD;
use wire::{AgentReply, Fault, FaultKind};

use super::attributes::ResolvedAttributes;
use super::draft::DraftFile;
use super::edit_history::{ContentDigest, EditHistory, EditStep, FormerFile};
use super::text_edit::{self, EditedText};
use super::transfer::{check_regular, follow_links};
use super::{ErrorContext, FileWorker, make_parents};
use crate::fault;

/// The longest text, and the largest file before and after an edit; both are held in memory.
const MAX_EDITED_BYTES: usize = 64 << 20;

/// The file that is edited. Its directory is the worker's current directory.
struct EditTarget {
    /// The path that faults name.
    path: PathBuf,
    name: OsString,
    /// How the history knows the file.
    key: Vec<u8>,
}

/// A file as an edit found it.
struct CurrentFile {
    content: Vec<u8>,
    /// Permission bits without set-id.
    mode: u32,
    owner: u32,
}

/// What an undo finds in the place of the file.
enum FoundContent {
    Missing,
    TooLong,
    Content(Vec<u8>),
}

impl FileWorker<'_> {
    pub(super) fn edit_file(&mut self, path: &str, edit: &TextEdit, max_content: u64) -> Result<(), Fault> {
        let text = self.receive_text(path)?;
        if matches!(edit, TextEdit::Replace { old, .. } if old.is_empty()) {
            return Err(fault::from_kind(FaultKind::Invalid, "edit", "an empty text"));
        }
        let path = self.resolve_path(path)?;
        let target = match edit {
            TextEdit::Create { .. } => {
                // A link of this name is not followed. It is no new file.
                if path.symlink_metadata().is_ok() {
                    return Err(fault::from_errno(Errno::EXIST, "create", &path.to_string_lossy()));
                }
                make_parents(&path)?;
                self.enter_directory(path)?
            }
            TextEdit::Replace { .. } | TextEdit::Insert { .. } => {
                self.enter_directory(follow_links(&path)?)?
            }
        };
        let history = self.lock_history(&target)?;
        let done = match edit {
            TextEdit::Create { attributes } => create_file(&target, text, attributes, history),
            TextEdit::Replace { .. } | TextEdit::Insert { .. } => change_file(&target, edit, &text, history),
        };
        let (mut report, old, new) = done.map_err(|fault| target.name_in_fault(fault))?;
        let (old, new) = (bounded(old, max_content), bounded(new, max_content));
        report.contents = content_lengths(old.as_ref(), new.as_ref());
        // The lock of the history is released: the server may take its time to read.
        self.connection.send_reply(&AgentReply::Edited(report))?;
        self.send_contents(old, new)
    }

    pub(super) fn undo_edit(
        &mut self,
        path: &str,
        if_changed: UndoPolicy,
        max_content: u64,
    ) -> Result<(), Fault> {
        let target = self.enter_directory(follow_links(&self.resolve_path(path)?)?)?;
        let history = self.lock_history(&target)?;
        let done = undo_last_step(&target, if_changed, history);
        let (mut report, old, new) = done.map_err(|fault| target.name_in_fault(fault))?;
        let (old, new) = (bounded(old, max_content), bounded(new, max_content));
        report.contents = content_lengths(old.as_ref(), new.as_ref());
        self.connection.send_reply(&AgentReply::Undone(report))?;
        self.send_contents(old, new)
    }

    fn receive_text(&mut self, path: &str) -> Result<Vec<u8>, Fault> {
        let mut text = Vec::new();
        while let Some(bytes) = self.connection.receive_data()? {
            if text.len() + bytes.len() > MAX_EDITED_BYTES {
                return Err(too_large_fault(Path::new(path)));
            }
            text.extend_from_slice(bytes);
        }
        Ok(text)
    }

    /// Makes the directory of a file the current directory.
    fn enter_directory(&self, path: PathBuf) -> Result<EditTarget, Fault> {
        let Some((directory, name)) = path.parent().zip(path.file_name()) else {
            return Err(fault::from_errno(Errno::ISDIR, "open", &path.to_string_lossy()));
        };
        let name = name.to_owned();
        std::env::set_current_dir(directory).or_fault("open", &path)?;
        let directory = std::env::current_dir().or_fault("open", &path)?;
        let mut key = self.isolated_session.map_or(Vec::new(), |session| session.as_bytes().to_owned());
        key.push(0);
        key.extend_from_slice(directory.join(&name).as_os_str().as_bytes());
        Ok(EditTarget { path, name, key })
    }

    fn lock_history(&mut self, target: &EditTarget) -> Result<EditHistory, Fault> {
        let missing = || fault::from_kind(FaultKind::Other, "open", "the history of edits");
        let file = self.history.take().ok_or_else(missing)?;
        self.lock_file(&file, &target.path)?;
        EditHistory::load(file, self.user.uid.as_raw()).or_fault("read the history of", &target.path)
    }

    fn send_contents(&mut self, old: Option<Vec<u8>>, new: Option<Vec<u8>>) -> Result<(), Fault> {
        for content in [old, new].into_iter().flatten() {
            for piece in content.chunks(MAX_PAYLOAD) {
                self.connection.send_data(piece)?;
            }
        }
        Ok(self.connection.send_end()?)
    }
}

/// A report, and the old and the new content.
type EditDone<R> = Result<(R, Option<Vec<u8>>, Option<Vec<u8>>), Fault>;

fn change_file(
    target: &EditTarget,
    edit: &TextEdit,
    text: &[u8],
    mut history: EditHistory,
) -> EditDone<EditReport> {
    let CurrentFile { content: old, mode, owner } = target.read_current()?;
    let edited = match edit {
        TextEdit::Replace { old: wanted, occurrence, adapt_line_ends } => text_edit::replace_text(
            &old,
            wanted.as_bytes(),
            text,
            *occurrence,
            *adapt_line_ends,
            MAX_EDITED_BYTES,
        ),
        TextEdit::Insert { after_line, adapt_line_ends } => {
            text_edit::insert_lines(&old, *after_line, text, *adapt_line_ends, MAX_EDITED_BYTES)
        }
        TextEdit::Create { .. } => Ok(EditedText::default()),
    };
    let edited = edited.map_err(|_too_long| too_large_fault(&target.path))?;
    let mut report = EditReport {
        changed: edited.content.is_some(),
        matches: edited.matches,
        match_lines: edited.match_lines,
        lines: text_edit::count_lines(&old),
        undoable: false,
        contents: ContentLengths::default(),
    };
    let Some(new) = edited.content else { return Ok((report, None, None)) };
    let former = FormerFile { content: old, mode, owner };
    let step = EditStep { before: Some(former), after: ContentDigest::of(&new) };
    report.undoable =
        keep_step(&mut history, target, &step, || target.write_content(&new, &FileAttributes::default()))?;
    Ok((report, step.before.map(|before| before.content), Some(new)))
}

fn create_file(
    target: &EditTarget,
    text: Vec<u8>,
    attributes: &FileAttributes,
    mut history: EditHistory,
) -> EditDone<EditReport> {
    let wanted = ResolvedAttributes::new(attributes)?;
    let step = EditStep { before: None, after: ContentDigest::of(&text) };
    let undoable = keep_step(&mut history, target, &step, || {
        let mut draft = DraftFile::new(target.name.as_ref())?;
        draft.append_bytes(&text)?;
        draft.put_in_place_if_new(&wanted)
    })?;
    let report = EditReport {
        changed: true,
        matches: 0,
        match_lines: Vec::new(),
        lines: 0,
        undoable,
        contents: ContentLengths::default(),
    };
    Ok((report, None, Some(text)))
}

/// Adds a step to the history and then changes the file. Returns whether the step was kept: an edit does not
/// fail because the history has no space. If the change fails, the step stays only if it is needed: a file in a
/// directory that may not be changed is written in place.
fn keep_step(
    history: &mut EditHistory,
    target: &EditTarget,
    step: &EditStep,
    change: impl Fn() -> Result<(), Fault>,
) -> Result<bool, Fault> {
    let in_history = |done: io::Result<()>| done.or_fault("write the history of", &target.path);
    let kept = history.add_step(&target.key, step).ok().flatten();
    let mut changed = change();
    if let (Some(index), Err(fault)) = (kept, &changed)
        && target.is_unchanged(step)
    {
        let no_space = fault.kind == FaultKind::NoSpace;
        in_history(history.remove_step(index))?;
        // The history may be on the same disk.
        changed = if no_space { change() } else { changed };
    } else if changed.is_ok() && kept.is_some() {
        return Ok(true);
    }
    if changed.is_ok() {
        // Without this step the earlier ones would undo more than one edit.
        in_history(history.forget_file(&target.key))?;
    }
    changed.map(|()| false)
}

fn undo_last_step(
    target: &EditTarget,
    if_changed: UndoPolicy,
    mut history: EditHistory,
) -> EditDone<UndoReport> {
    let count_left = |history: &EditHistory| {
        history.count_steps(&target.key).or_fault("read the history of", &target.path)
    };
    let mut report = UndoReport {
        outcome: UndoOutcome::NoHistory,
        changed_since: false,
        steps_left: 0,
        contents: ContentLengths::default(),
    };
    let Some((index, step)) = history.last_step(&target.key).or_fault("read the history of", &target.path)?
    else {
        return Ok((report, None, None));
    };
    let found = target.find_current()?;
    report.changed_since =
        !matches!(&found, FoundContent::Content(content) if ContentDigest::of(content) == step.after);
    // A content that others could not read is not given to another owner.
    let own = rustix::process::getuid().as_raw();
    let other_owner = match &step.before {
        Some(before) if before.mode & 0o004 == 0 => {
            target.current_owner()?.is_some_and(|owner| owner != before.owner && owner != own)
        }
        Some(_) | None => false,
    };
    report.changed_since |= other_owner;
    if report.changed_since && (if_changed == UndoPolicy::Refuse || other_owner) {
        report.outcome = UndoOutcome::ChangedSince;
        report.steps_left = count_left(&history)?;
        return Ok((report, None, None));
    }
    let new = match step.before {
        Some(FormerFile { content, mode, .. }) => {
            let attributes = FileAttributes { new_mode: Some(mode), ..FileAttributes::default() };
            target.write_content(&content, &attributes)?;
            report.outcome = UndoOutcome::Restored;
            Some(content)
        }
        None => {
            target.remove_file()?;
            report.outcome = UndoOutcome::Removed;
            None
        }
    };
    history.remove_step(index).or_fault("write the history of", &target.path)?;
    report.steps_left = count_left(&history)?;
    let old = match found {
        FoundContent::Content(content) => Some(content),
        FoundContent::Missing | FoundContent::TooLong => None,
    };
    Ok((report, old, new))
}

impl EditTarget {
    /// Reads the file, which must be a regular one and not too large.
    fn read_current(&self) -> Result<CurrentFile, Fault> {
        let file = self.open_file().or_fault("open", self.name.as_ref())?;
        let (mode, owner) = check_metadata(&file, &self.name)?;
        match read_content(file, &self.name)? {
            Some(content) => Ok(CurrentFile { content, mode, owner }),
            None => Err(too_large_fault(&self.path)),
        }
    }

    /// The user to whom the file belongs now; `None` if there is none.
    fn current_owner(&self) -> Result<Option<u32>, Fault> {
        match rustix::fs::lstat(&self.name) {
            Err(Errno::NOENT) => Ok(None),
            found => Ok(Some(found.or_fault("stat", self.name.as_ref())?.st_uid)),
        }
    }

    fn find_current(&self) -> Result<FoundContent, Fault> {
        let file = match self.open_file() {
            Err(Errno::NOENT) => return Ok(FoundContent::Missing),
            opened => opened.or_fault("open", self.name.as_ref())?,
        };
        check_regular(&file, self.name.as_ref())?;
        Ok(read_content(file, &self.name)?.map_or(FoundContent::TooLong, FoundContent::Content))
    }

    /// Whether the file is as it was before an edit that failed.
    fn is_unchanged(&self, step: &EditStep) -> bool {
        match (self.find_current(), &step.before) {
            (Ok(FoundContent::Content(content)), Some(before)) => content == before.content,
            (Ok(FoundContent::Content(_) | FoundContent::TooLong) | Err(_), _) => false,
            (Ok(FoundContent::Missing), before) => before.is_none(),
        }
    }

    /// Links were followed before; one that is there now is refused. A pipe is not waited for.
    fn open_file(&self) -> rustix::io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::open(&self.name, flags, Mode::empty()).map(File::from)
    }

    fn write_content(&self, content: &[u8], attributes: &FileAttributes) -> Result<(), Fault> {
        let mut draft = DraftFile::new(self.name.as_ref())?;
        draft.append_bytes(content)?;
        draft.put_in_place(&ResolvedAttributes::new(attributes)?)
    }

    /// It is no error if the file is gone already.
    fn remove_file(&self) -> Result<(), Fault> {
        match rustix::fs::unlink(&self.name) {
            Err(Errno::NOENT) => Ok(()),
            removed => removed.or_fault("remove", self.name.as_ref()),
        }
    }

    /// Faults of operations in the current directory name only the file; the caller knows its path.
    fn name_in_fault(&self, mut fault: Fault) -> Fault {
        if let Some(rest) = fault.subject.strip_prefix(&*self.name.to_string_lossy())
            && (rest.is_empty() || rest.starts_with(": "))
        {
            fault.subject = format!("{}{rest}", self.path.display());
        }
        fault
    }
}

/// Refuses anything but a regular file, and returns its permission bits and its owner.
fn check_metadata(file: &File, name: &OsStr) -> Result<(u32, u32), Fault> {
    check_regular(file, name.as_ref())?;
    let metadata = file.metadata().or_fault("stat", name.as_ref())?;
    Ok((metadata.mode() & 0o777, metadata.uid()))
}

/// `None` if the file is too large.
fn read_content(file: File, name: &OsStr) -> Result<Option<Vec<u8>>, Fault> {
    let mut content = Vec::new();
    file.take(MAX_EDITED_BYTES as u64 + 1).read_to_end(&mut content).or_fault("read", name.as_ref())?;
    Ok(Some(content).filter(|content| content.len() <= MAX_EDITED_BYTES))
}

fn bounded(content: Option<Vec<u8>>, most: u64) -> Option<Vec<u8>> {
    // A limit of zero means that no content is wanted, not even an empty one.
    content.filter(|content| most > 0 && content.len() as u64 <= most)
}

fn content_lengths(old: Option<&Vec<u8>>, new: Option<&Vec<u8>>) -> ContentLengths {
    let length = |content: &Vec<u8>| content.len() as u64;
    ContentLengths { old: old.map(length), new: new.map(length) }
}

fn too_large_fault(path: &Path) -> Fault {
    fault::from_kind(FaultKind::Invalid, "edit", &format!("{}: too large", path.display()))
}
