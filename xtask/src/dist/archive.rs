//! Packs files into a `.tar.gz` whose bytes depend only on the files and the time.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// Files by their path in the archive, sorted.
pub(super) type ArchiveFiles = BTreeMap<String, (ArchiveEntryKind, Vec<u8>)>;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ArchiveEntryKind {
    Program,
    Plain,
}

/// Packs all files below a directory named `root`.
pub(super) fn pack_archive(root: &str, files: &ArchiveFiles, time: u64) -> Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for (path, (kind, bytes)) in files {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(if *kind == ArchiveEntryKind::Program { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(time);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, format!("{root}/{path}"), bytes.as_slice())?;
    }
    Ok(tar.into_inner()?)
}

/// Compresses an archive, with no name and no time in the header of gzip.
pub(super) fn compress_archive(archive: &[u8]) -> Result<Vec<u8>> {
    let mut compressed = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
    compressed.write_all(archive)?;
    Ok(compressed.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_of_the_same_files_are_equal() {
        let files = |names: [&str; 2]| -> ArchiveFiles {
            names
                .iter()
                .map(|name| ((*name).to_owned(), (ArchiveEntryKind::Plain, name.as_bytes().to_vec())))
                .collect()
        };
        let first = pack_archive("root", &files(["b", "a"]), 5).expect("memory can be written");
        assert_eq!(first, pack_archive("root", &files(["a", "b"]), 5).expect("memory can be written"));
        assert_ne!(first, pack_archive("root", &files(["a", "b"]), 6).expect("memory can be written"));
    }
}
