//! An untrusted archive must not write outside of the restored directory.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::os::unix::fs::MetadataExt;

use tar::Header;
use tempfile::TempDir;

use super::super::archive::{self, ArchiveWriter};
use super::*;

/// One entry of a made-up archive: its path, kind and content or link target.
type MadeEntry<'a> = (&'a str, EntryType, &'a str);

fn write_archive(file: &Path, entries: &[MadeEntry<'_>]) {
    let mut report = |_: u64| {};
    let mut writer = ArchiveWriter::new(File::create(file).unwrap(), None, &mut report).unwrap();
    writer.begin_part("records").unwrap();
    for (path, kind, content) in entries {
        let mut header: Header = archive::entry_header(*kind, 0o4777);
        header.set_uid(if linux::privileges::is_host_root() { 4711 } else { 0 });
        match kind {
            EntryType::Symlink | EntryType::Link => {
                writer.add_link(header, Path::new(path), Path::new(content)).unwrap();
            }
            _ => {
                header.set_size(content.len() as u64);
                writer.add_entry(header, Path::new(path), content.as_bytes()).unwrap();
            }
        }
    }
    writer.finish(manifest()).unwrap();
}

fn manifest() -> BackupManifest {
    BackupManifest {
        version: ARCHIVE_VERSION,
        of_root: linux::privileges::is_host_root(),
        with_secrets: false,
        parts: Vec::new(),
        checksum: String::new(),
        not_saved: Vec::new(),
    }
}

/// Unpacks a made-up archive to `draft` below a directory.
fn unpack_made(place: &TempDir, entries: &[MadeEntry<'_>]) -> Result<BackupManifest, BackupError> {
    let (file, draft) = (place.path().join("made"), place.path().join("draft"));
    write_archive(&file, entries);
    fs::create_dir(&draft).unwrap();
    unpack_archive(&File::open(&file).unwrap(), &file, &draft, &mut |_| {})
}

#[test]
fn links_and_devices_outside_of_layers_are_refused() {
    let bad: [&[MadeEntry<'_>]; 11] = [
        &[("server", EntryType::Symlink, "/etc")],
        &[("server/secret", EntryType::Symlink, "/etc/shadow")],
        &[("images", EntryType::Symlink, "/")],
        &[("images/layers", EntryType::Symlink, "/")],
        &[("images/layers/0", EntryType::Symlink, "/")],
        &[("images/layers/0/tree", EntryType::Symlink, "/")],
        &[("images/base-1", EntryType::Symlink, "/")],
        &[("disk", EntryType::Symlink, "/")],
        &[("boxes/1", EntryType::Fifo, "")],
        &[("identity", EntryType::Regular, "x"), ("images/layers/0/tree/x", EntryType::Link, "identity")],
        &[("images/names/x", EntryType::Char, "")],
    ];
    for entries in bad {
        let place = TempDir::new().unwrap();
        let refused = unpack_made(&place, entries);
        assert!(matches!(refused, Err(BackupError::Damaged { .. })), "{entries:?}: {refused:?}");
    }
}

#[test]
fn paths_with_dots_are_refused() {
    for path in ["images/layers/0/tree/../../../../server", "/images/base-1/x", "../images/base-1/x"] {
        assert!(EntryPlacement::of_path(Path::new(path)).is_err(), "{path}");
    }
}

#[test]
fn private_files_are_closed_and_layers_stay_as_they_are() {
    let place = TempDir::new().unwrap();
    unpack_made(
        &place,
        &[
            ("server/coracle.db", EntryType::Regular, "x"),
            ("boxes", EntryType::Directory, ""),
            ("images/layers/0/bytes", EntryType::Regular, "1"),
            ("images/layers/0/tree", EntryType::Directory, ""),
            ("images/layers/0/tree/tool", EntryType::Regular, "x"),
            ("images/layers/0/tree/link", EntryType::Symlink, "/etc"),
            ("images/layers/0/tree/again", EntryType::Link, "images/layers/0/tree/tool"),
        ],
    )
    .unwrap();
    let facts = |path: &str| {
        let facts = fs::symlink_metadata(place.path().join("draft").join(path)).unwrap();
        (facts.uid(), facts.mode() & 0o7777)
    };
    let own = rustix::process::geteuid().as_raw();
    let other = if own == 0 { 4711 } else { own };
    for (path, mode) in [
        ("server", 0o700),
        ("server/coracle.db", 0o600),
        ("boxes", 0o700),
        ("images/layers/0", 0o700),
        ("images/layers/0/bytes", 0o600),
    ] {
        assert_eq!(facts(path), (own, mode), "{path}");
    }
    for path in ["images/layers/0/tree", "images/layers/0/tree/tool", "images/layers/0/tree/again"] {
        assert_eq!(facts(path), (other, 0o4777), "{path}");
    }
}

/// Backs up the layer below `from`, restores it below `place`, and returns its directory there.
fn round_trip(from: &Path, place: &TempDir) -> PathBuf {
    let (file, draft) = (place.path().join("made"), place.path().join("draft"));
    let mut report = |_: u64| {};
    let mut writer = ArchiveWriter::new(File::create(&file).unwrap(), None, &mut report).unwrap();
    writer.begin_part("images").unwrap();
    super::super::tree::add_tree(&mut writer, &RootDirectory::open(from).unwrap(), "images/layers").unwrap();
    writer.finish(manifest()).unwrap();
    fs::create_dir(&draft).unwrap();
    unpack_archive(&File::open(&file).unwrap(), &file, &draft, &mut |_| {}).unwrap();
    draft.join("images/layers/0/tree")
}

#[test]
fn attributes_and_early_times_are_restored_as_they_were() {
    let (place, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = from.path().join("images/layers/0/tree");
    fs::create_dir_all(tree.join("directory")).unwrap();
    fs::write(tree.join("directory/file"), "x").unwrap();
    let attributes: [(&[u8], &[u8]); 5] = [
        (b"user.overlay.opaque", b"y"),
        (b"user.lines", b"one\ntwo\n\n"),
        (b"user.a=b", b"=\0\xff"),
        (b"user.c\nd\xfe", b"25 SCHILY.xattr.user.x=y\n"),
        (b"user.empty", b""),
    ];
    let long = vec![b'\n'; 1500];
    let early = Timespec { tv_sec: -86_400, tv_nsec: 0 };
    let times = Timestamps { last_access: early, last_modification: early };
    for path in ["directory/file", "directory"] {
        let file = File::open(tree.join(path)).unwrap();
        for (name, value) in attributes.iter().copied().chain([(b"user.long".as_slice(), long.as_slice())]) {
            rustix::fs::fsetxattr(&file, name, value, XattrFlags::empty()).unwrap();
        }
        rustix::fs::futimens(&file, &times).unwrap();
    }
    let restored = round_trip(from.path(), &place);
    for path in ["directory/file", "directory"] {
        let file = File::open(restored.join(path)).unwrap();
        for (name, value) in attributes.iter().copied().chain([(b"user.long".as_slice(), long.as_slice())]) {
            let mut found = vec![0; 64 << 10];
            let length = rustix::fs::fgetxattr(&file, name, found.as_mut_slice()).unwrap();
            assert_eq!(&found[..length], value, "{path}: {}", String::from_utf8_lossy(name));
        }
        assert_eq!(file.metadata().unwrap().mtime(), early.tv_sec, "{path}");
    }
}

#[test]
fn attributes_of_version_1_are_read() {
    let place = TempDir::new().unwrap();
    let (file, draft) = (place.path().join("made"), place.path().join("draft"));
    let mut report = |_: u64| {};
    let mut writer = ArchiveWriter::new(File::create(&file).unwrap(), None, &mut report).unwrap();
    writer.begin_part("images").unwrap();
    let attribute = (format!("{ATTRIBUTE_KEY_PREFIX_V1}user.overlay.opaque"), b"y".to_vec());
    writer.add_attributes(&[attribute]).unwrap();
    let path = Path::new("images/layers/0/tree/directory");
    writer.add_entry(archive::entry_header(EntryType::Directory, 0o755), path, io::empty()).unwrap();
    writer.finish(BackupManifest { version: 1, ..manifest() }).unwrap();
    fs::create_dir(&draft).unwrap();
    unpack_archive(&File::open(&file).unwrap(), &file, &draft, &mut |_| {}).unwrap();
    let directory = File::open(draft.join(path)).unwrap();
    let mut found = [0; 8];
    let length = rustix::fs::fgetxattr(&directory, "user.overlay.opaque", found.as_mut_slice()).unwrap();
    assert_eq!(&found[..length], b"y");
}
