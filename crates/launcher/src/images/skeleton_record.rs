//! A record of the skeleton that was made last, which saves planning it again.
//!
//! Planning a skeleton reads all of `/etc` that it copies. The record has the stamps of everything that was
//! read, so that comparing these is enough as long as nothing changes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::path_stamp::PathStamp;
use super::skeleton::{self, SkeletonPlan};
use super::{ImageError, ImageErrorContext};

/// The name of the record, beside the skeletons.
pub(super) const RECORD_NAME: &str = "record";

/// Files that a skeleton only asks about, and the directory of links such as `/bin`.
const EXAMINED_PATHS: [&str; 3] = ["/", "/bin/bash", "/usr/bin/apt-get"];

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SkeletonRecord {
    /// The version of Coracle, since another one may plan differently.
    made_by: String,
    format: u64,
    /// Links count as themselves.
    entries: Vec<PathStamp>,
    /// Copied files, which may be the targets of links.
    copied: Vec<PathStamp>,
    /// The name of the skeleton.
    pub(super) version: String,
    /// Which of the merged directories are not links on this host.
    pub(super) split: Vec<String>,
}

impl SkeletonRecord {
    /// Describes the skeleton of `plan`, made from the files as they are now.
    pub(super) fn of_plan(plan: &SkeletonPlan, split: &[String]) -> Self {
        let mut entries: BTreeSet<PathBuf> = EXAMINED_PATHS.map(PathBuf::from).into();
        entries.extend(plan.directories_of_etc());
        Self {
            made_by: own_version(),
            format: skeleton::FORMAT_VERSION,
            entries: entries.iter().map(|path| PathStamp::of(path)).collect(),
            copied: plan.copied_files().map(PathStamp::of_target).collect(),
            version: plan.version(),
            split: split.to_owned(),
        }
    }

    /// Reads the record, if it describes a skeleton that would be made now in the same way.
    pub(super) fn read_valid(dir: &Path) -> Option<Self> {
        let text = fs::read(dir.join(RECORD_NAME)).ok()?;
        let record: Self = serde_json::from_slice(&text).ok()?;
        let unchanged = record.made_by == own_version()
            && record.format == skeleton::FORMAT_VERSION
            && record.entries.iter().all(|stamp| *stamp == PathStamp::of(&stamp.path))
            && record.copied.iter().all(|stamp| *stamp == PathStamp::of_target(&stamp.path))
            && dir.join(&record.version).is_dir();
        unchanged.then_some(record)
    }

    pub(super) fn write(&self, dir: &Path) -> Result<(), ImageError> {
        let (draft, path) = (dir.join(".record"), dir.join(RECORD_NAME));
        let text = serde_json::to_vec(self).expect("a record can be written as JSON");
        fs::write(&draft, text).during("write", &draft)?;
        fs::rename(&draft, &path).during("write", &path)
    }
}

/// Identifies the running program, whose list of files decides what a skeleton has.
fn own_version() -> String {
    let own = PathStamp::of_target(Path::new("/proc/self/exe"));
    serde_json::to_string(&own).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record_in(dir: &Path, source: &Path) -> SkeletonRecord {
        let mut plan = SkeletonPlan::default();
        plan.add_copy(Path::new("etc/copied"), source, &fs::metadata(source).expect("it exists"));
        let record = SkeletonRecord::of_plan(&plan, &[]);
        fs::create_dir_all(dir.join(&record.version)).expect("a directory can be made");
        record.write(dir).expect("the record can be written");
        record
    }

    #[test]
    fn a_record_holds_until_a_copied_file_changes() {
        let dir = tempfile::tempdir().expect("a directory");
        let source = dir.path().join("source");
        fs::write(&source, "one").expect("a file can be written");
        let record = record_in(dir.path(), &source);
        let valid = SkeletonRecord::read_valid(dir.path()).expect("nothing has changed");
        assert_eq!(valid.version, record.version);
        fs::remove_file(&source).expect("it can be removed");
        assert!(SkeletonRecord::read_valid(dir.path()).is_none());
        fs::write(&source, "two").expect("a file can be written");
        assert!(SkeletonRecord::read_valid(dir.path()).is_none());
    }

    #[test]
    fn a_record_without_its_skeleton_is_not_used() {
        let dir = tempfile::tempdir().expect("a directory");
        let source = dir.path().join("source");
        fs::write(&source, "one").expect("a file can be written");
        let record = record_in(dir.path(), &source);
        fs::remove_dir(dir.path().join(record.version)).expect("it can be removed");
        assert!(SkeletonRecord::read_valid(dir.path()).is_none());
    }
}
