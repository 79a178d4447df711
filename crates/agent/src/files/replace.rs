//! Replacing text in files.

use std::io::Read;

use memchr::memmem;
use wire::files::{FileAttributes, FileEdit};
use wire::{AgentReply, Fault, FaultKind};

use super::attributes::ResolvedAttributes;
use super::draft::DraftFile;
use super::transfer::{follow_links, open_regular};
use super::{ErrorContext, FileWorker};
use crate::fault;

/// The largest file in which text is replaced; it is held in memory twice.
const MAX_FILE_BYTES: u64 = 256 << 20;

impl FileWorker<'_> {
    /// Each file is replaced as a whole or not at all; if one fails, the files before it stay
    /// replaced.
    pub(super) fn replace_text(&mut self, edits: &[FileEdit]) -> Result<(), Fault> {
        if edits.iter().any(|edit| edit.old.is_empty()) {
            return Err(fault::from_kind(FaultKind::Invalid, "replace", "an empty text"));
        }
        let counts = edits.iter().map(|edit| self.replace_in_file(edit)).collect::<Result<_, _>>()?;
        self.connection.send_bounded_reply(&AgentReply::Replaced(counts), "too many files")
    }

    fn replace_in_file(&self, edit: &FileEdit) -> Result<u64, Fault> {
        let path = follow_links(&self.resolve_path(&edit.path)?)?;
        let file = open_regular(&path)?;
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).or_fault("read", &path)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(fault::from_kind(
                FaultKind::Invalid,
                "replace",
                &format!("{}: too large", path.display()),
            ));
        }
        let (replaced, count) = replace_all(&text, edit.old.as_bytes(), edit.new.as_bytes());
        if count > 0 {
            let mut draft = DraftFile::new(&path)?;
            draft.append_bytes(&replaced)?;
            draft.put_in_place(&ResolvedAttributes::new(&FileAttributes::default())?)?;
        }
        Ok(count)
    }
}

fn replace_all(text: &[u8], old: &[u8], new: &[u8]) -> (Vec<u8>, u64) {
    let mut out = Vec::with_capacity(text.len());
    let (mut last, mut count) = (0, 0);
    for start in memmem::find_iter(text, old) {
        out.extend_from_slice(&text[last..start]);
        out.extend_from_slice(new);
        last = start + old.len();
        count += 1;
    }
    out.extend_from_slice(&text[last..]);
    (out, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, old: &str, new: &str, expected: &str, count: u64) {
        let (out, counted) = replace_all(text.as_bytes(), old.as_bytes(), new.as_bytes());
        assert_eq!((out.as_slice(), counted), (expected.as_bytes(), count), "{text}");
    }

    #[test]
    fn every_occurrence_is_replaced_once() {
        check("a-a-a", "a", "bb", "bb-bb-bb", 3);
        check("aaa", "aa", "a", "aa", 1);
        check("none", "x", "y", "none", 0);
        check("x", "x", "", "", 1);
    }
}
