//! Emptying the journal directory of a copied disk.
//!
//! The agent of the original sandbox decided what lies there, and it may have been taken over. So the launcher,
//! whose only thread serves all sandboxes, removes only a bounded number of files.

use std::fs;
use std::io;
use std::path::Path;

/// More files than an agent that works as intended leaves.
const MAX_JOURNAL_FILES: usize = 8192;

/// How many directories can be set aside on one disk: one for each copy of a copy.
const MAX_SET_ASIDE: usize = 1024;

/// Empties a directory of files. If it holds directories, or more files than an agent leaves, it is set aside
/// beside itself and replaced by an empty one: what it holds stays on the disk and counts against its limit,
/// and no process inside sees it.
pub(super) fn empty_journal(journal: &Path) -> io::Result<()> {
    let mut entries = fs::read_dir(journal)?;
    for entry in entries.by_ref().take(MAX_JOURNAL_FILES) {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            return set_aside(journal);
        }
        fs::remove_file(entry.path())?;
    }
    if entries.next().is_some() { set_aside(journal) } else { Ok(()) }
}

fn set_aside(journal: &Path) -> io::Result<()> {
    for number in 0..MAX_SET_ASIDE {
        let aside = journal.with_extension(format!("old{number}"));
        // The directory of an earlier copy is not empty, so it cannot be replaced.
        match fs::rename(journal, &aside) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            moved => {
                moved?;
                return super::super::make_directory(journal, 0o755).map_err(io::Error::other);
            }
        }
    }
    Err(io::Error::other("too many journals were set aside on this disk"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_removed_and_anything_larger_is_set_aside() {
        let dir = tempfile::tempdir().expect("a directory");
        let journal = dir.path().join("journal");
        let is_empty = || fs::read_dir(&journal).expect("it exists").next().is_none();
        fs::create_dir(&journal).expect("our own directory");
        for number in 0..20 {
            fs::write(journal.join(number.to_string()), "x").expect("our own directory");
        }
        empty_journal(&journal).expect("it can be emptied");
        assert!(is_empty() && fs::read_dir(dir.path()).expect("ours").count() == 1);

        fs::create_dir_all(journal.join("deep/deeper")).expect("our own directory");
        empty_journal(&journal).expect("it can be set aside");
        assert!(is_empty() && dir.path().join("journal.old0/deep/deeper").is_dir());

        for number in 0..=MAX_JOURNAL_FILES {
            fs::write(journal.join(number.to_string()), "").expect("our own directory");
        }
        empty_journal(&journal).expect("it can be set aside");
        assert!(is_empty() && dir.path().join("journal.old1").is_dir());
    }
}
