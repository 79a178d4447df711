//! The records of snapshots: `<state>/snapshots/<id>.json` for a complete one, and `<id>.new` while one
//! is being taken.
//!
//! The removal of image layers reads all of these files, so the directory contains nothing else.
//!
//! The first file is written when the files are durable, so a snapshot without it was never completed.
//! The second names the sandbox that is frozen for the snapshot, so that a later launcher can thaw it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use domain::SnapshotId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::record::MadeOf;

const WHOLE: &str = "json";
const DRAFT: &str = "new";
/// A record that is being written.
const HALF: &str = "half";

/// The record of a complete snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptRecord {
    /// The sandbox that the snapshot was taken of.
    pub sandbox: String,
    pub made_of: MadeOf,
    /// The size of the files above the image, in bytes.
    pub size: u64,
    /// The limit on the disk of the sandbox.
    pub disk: u64,
}

/// A snapshot that is being taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    pub sandbox: String,
    /// Whether a client had paused the sandbox before.
    pub paused: bool,
}

/// The snapshot records of one state directory.
#[derive(Clone, Debug)]
pub struct KeptRecords {
    directory: PathBuf,
}

impl KeptRecords {
    pub fn at(state_dir: &Path) -> Self {
        Self { directory: state_dir.join("snapshots") }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Writes a record so that it survives a power loss.
    pub fn keep(&self, snapshot: &str, record: &KeptRecord) -> io::Result<()> {
        let half = self.path(snapshot, HALF)?;
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&half)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(&half, self.path(snapshot, WHOLE)?)?;
        File::open(&self.directory)?.sync_all()
    }

    pub fn begin(&self, snapshot: &str, draft: &Draft) -> io::Result<()> {
        fs::write(self.path(snapshot, DRAFT)?, serde_json::to_vec(draft)?)
    }

    pub fn read(&self, snapshot: &str) -> Option<KeptRecord> {
        self.parse(snapshot, WHOLE)
    }

    pub fn draft(&self, snapshot: &str) -> Option<Draft> {
        self.parse(snapshot, DRAFT)
    }

    /// Returns the ids of complete snapshots.
    pub fn list(&self) -> io::Result<BTreeSet<String>> {
        self.with(WHOLE)
    }

    /// Returns the ids of unfinished snapshots.
    pub fn drafts(&self) -> io::Result<BTreeSet<String>> {
        self.with(DRAFT)
    }

    pub fn remove(&self, snapshot: &str) -> io::Result<()> {
        remove(&self.path(snapshot, WHOLE)?)
    }

    pub fn end(&self, snapshot: &str) -> io::Result<()> {
        remove(&self.path(snapshot, HALF)?)?;
        remove(&self.path(snapshot, DRAFT)?)
    }

    fn parse<T: DeserializeOwned>(&self, snapshot: &str, kind: &str) -> Option<T> {
        serde_json::from_slice(&fs::read(self.path(snapshot, kind).ok()?).ok()?).ok()
    }

    fn with(&self, kind: &str) -> io::Result<BTreeSet<String>> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if let Some((id, extension)) = name.split_once('.')
                && extension == kind
                && SnapshotId::parse(id).is_ok()
            {
                found.insert(id.to_owned());
            }
        }
        Ok(found)
    }

    /// Where the record of a snapshot lies. An id that is a path would lead out of the directory.
    fn path(&self, snapshot: &str, kind: &str) -> io::Result<PathBuf> {
        let id = SnapshotId::parse(snapshot).map_err(io::Error::other)?;
        Ok(self.directory.join(format!("{id}.{kind}")))
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "ffffffff-ffff-4fff-bfff-ffffffffffff";

    #[test]
    fn snapshot_exists_once_its_record_is_complete() {
        let state = tempfile::tempdir().expect("a directory");
        let records = KeptRecords::at(state.path());
        fs::create_dir(records.directory()).expect("made");
        let draft = Draft { sandbox: "s".to_owned(), paused: false };
        records.begin(ID, &draft).expect("begun");
        assert_eq!((records.draft(ID), records.read(ID)), (Some(draft), None));
        let made_of =
            MadeOf { image: "i".to_owned(), trees: Vec::new(), env: Vec::new(), record: None, restored: 0 };
        let record = KeptRecord { sandbox: "s".to_owned(), made_of, size: 1, disk: 2 };
        records.keep(ID, &record).expect("kept");
        records.end(ID).expect("ended");
        assert_eq!(records.read(ID), Some(record));
        assert_eq!(records.drafts().expect("listed"), BTreeSet::new());
        records.remove(ID).expect("removed");
        assert_eq!(records.list().expect("listed"), BTreeSet::new());
    }

    #[test]
    fn an_id_that_is_a_path_has_no_record() {
        let state = tempfile::tempdir().expect("a directory");
        let records = KeptRecords::at(state.path());
        fs::create_dir(records.directory()).expect("made");
        let made_of =
            MadeOf { image: "i".to_owned(), trees: Vec::new(), env: Vec::new(), record: None, restored: 0 };
        let record = KeptRecord { sandbox: "s".to_owned(), made_of, size: 1, disk: 2 };
        let planted = state.path().join("planted");
        fs::write(planted.with_extension("json"), serde_json::to_vec(&record).expect("text")).expect("made");
        for id in ["../planted", planted.to_str().expect("text")] {
            assert_eq!(records.read(id), None, "{id}");
            assert!(records.keep(id, &record).is_err() && records.remove(id).is_err(), "{id}");
        }
        assert!(planted.with_extension("json").exists());
    }
}
