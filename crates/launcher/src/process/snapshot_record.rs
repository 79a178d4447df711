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

use domain::{SandboxId, SnapshotId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::record::SandboxOrigin;

const COMPLETE_EXTENSION: &str = "json";
const DRAFT_EXTENSION: &str = "new";
/// A record that is being written.
const PARTIAL_EXTENSION: &str = "half";

/// The record of a complete snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// The sandbox that the snapshot was taken of.
    #[serde(with = "crate::ids")]
    pub sandbox: SandboxId,
    pub made_of: SandboxOrigin,
    /// The size of the files above the image, in bytes.
    pub size: u64,
    /// The limit on the disk of the sandbox.
    pub disk: u64,
}

/// A snapshot that is being taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDraft {
    #[serde(with = "crate::ids")]
    pub sandbox: SandboxId,
    /// Whether a client had paused the sandbox before.
    pub paused: bool,
}

/// The snapshot records of one state directory.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotRecords {
    directory: PathBuf,
}

impl SnapshotRecords {
    pub(crate) fn in_state_dir(state_dir: &Path) -> Self {
        Self { directory: state_dir.join("snapshots") }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Writes a record so that it survives a power loss.
    pub(crate) fn write(&self, snapshot: &SnapshotId, record: &SnapshotRecord) -> io::Result<()> {
        let half = self.path(snapshot, PARTIAL_EXTENSION);
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&half)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(&half, self.path(snapshot, COMPLETE_EXTENSION))?;
        File::open(&self.directory)?.sync_all()
    }

    pub(crate) fn write_draft(&self, snapshot: &SnapshotId, draft: &SnapshotDraft) -> io::Result<()> {
        fs::write(self.path(snapshot, DRAFT_EXTENSION), serde_json::to_vec(draft)?)
    }

    pub(crate) fn read(&self, snapshot: &SnapshotId) -> Option<SnapshotRecord> {
        self.read_json(snapshot, COMPLETE_EXTENSION)
    }

    pub(crate) fn read_draft(&self, snapshot: &SnapshotId) -> Option<SnapshotDraft> {
        self.read_json(snapshot, DRAFT_EXTENSION)
    }

    /// Returns the ids of complete snapshots.
    pub(crate) fn list(&self) -> io::Result<BTreeSet<SnapshotId>> {
        self.list_with_extension(COMPLETE_EXTENSION)
    }

    /// Returns the ids of unfinished snapshots.
    pub(crate) fn list_drafts(&self) -> io::Result<BTreeSet<SnapshotId>> {
        self.list_with_extension(DRAFT_EXTENSION)
    }

    pub(crate) fn remove(&self, snapshot: &SnapshotId) -> io::Result<()> {
        remove_if_present(&self.path(snapshot, COMPLETE_EXTENSION))
    }

    pub(crate) fn remove_draft(&self, snapshot: &SnapshotId) -> io::Result<()> {
        remove_if_present(&self.path(snapshot, PARTIAL_EXTENSION))?;
        remove_if_present(&self.path(snapshot, DRAFT_EXTENSION))
    }

    fn read_json<T: DeserializeOwned>(&self, snapshot: &SnapshotId, kind: &str) -> Option<T> {
        serde_json::from_slice(&fs::read(self.path(snapshot, kind)).ok()?).ok()
    }

    fn list_with_extension(&self, kind: &str) -> io::Result<BTreeSet<SnapshotId>> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if let Some((id, extension)) = name.split_once('.')
                && extension == kind
                && let Ok(id) = SnapshotId::parse(id)
            {
                found.insert(id);
            }
        }
        Ok(found)
    }

    fn path(&self, snapshot: &SnapshotId, kind: &str) -> PathBuf {
        self.directory.join(format!("{snapshot}.{kind}"))
    }
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SnapshotId {
        SnapshotId::from_entropy([0xff; 16])
    }

    fn sandbox() -> SandboxId {
        SandboxId::from_entropy([7; 20])
    }

    #[test]
    fn snapshot_exists_once_its_record_is_complete() {
        let state = tempfile::tempdir().expect("a directory");
        let records = SnapshotRecords::in_state_dir(state.path());
        fs::create_dir(records.directory()).expect("made");
        let draft = SnapshotDraft { sandbox: sandbox(), paused: false };
        records.write_draft(&id(), &draft).expect("begun");
        assert_eq!((records.read_draft(&id()), records.read(&id())), (Some(draft), None));
        let made_of = SandboxOrigin {
            image: "i".to_owned(),
            trees: Vec::new(),
            env: Vec::new(),
            record: None,
            restored: 0,
        };
        let record = SnapshotRecord { sandbox: sandbox(), made_of, size: 1, disk: 2 };
        records.write(&id(), &record).expect("kept");
        records.remove_draft(&id()).expect("ended");
        assert_eq!(records.read(&id()), Some(record));
        assert_eq!(records.list_drafts().expect("listed"), BTreeSet::new());
        records.remove(&id()).expect("removed");
        assert_eq!(records.list().expect("listed"), BTreeSet::new());
    }
}
