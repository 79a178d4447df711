//! Packs files into a `.tar.gz` whose bytes depend only on the files and the time.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// Files by their path in the archive, sorted.
pub(super) type Files = BTreeMap<String, (Kind, Vec<u8>)>;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Program,
    Plain,
}

/// Packs all files below a directory named `root`.
pub(super) fn pack(root: &str, files: &Files, time: u64) -> Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for (path, (kind, bytes)) in files {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(if *kind == Kind::Program { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(time);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, format!("{root}/{path}"), bytes.as_slice())?;
    }
    Ok(tar.into_inner()?)
}

/// Compresses an archive, with no name and no time in the header of gzip.
pub(super) fn compress(archive: &[u8]) -> Result<Vec<u8>> {
    let mut compressed = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
    compressed.write_all(archive)?;
    Ok(compressed.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_of_the_same_files_are_equal() {
        let files = |names: [&str; 2]| -> Files {
            names.iter().map(|name| ((*name).to_owned(), (Kind::Plain, name.as_bytes().to_vec()))).collect()
        };
        let first = pack("root", &files(["b", "a"]), 5).expect("memory can be written");
        assert_eq!(first, pack("root", &files(["a", "b"]), 5).expect("memory can be written"));
        assert_ne!(first, pack("root", &files(["a", "b"]), 6).expect("memory can be written"));
    }
}
