//! Images on the real file system: the host's skeleton, and hostile archives.
#![expect(clippy::unwrap_used, reason = "a test may panic on any failure")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::*;

mod commits;
mod hostile;
mod layouts;
mod unneeded;

/// Creates an archive of entries: type, name, link target, content.
fn archive(entries: &[(EntryType, &str, &str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, name, target, content) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(if kind.is_dir() { 0o755 } else { 0o4755 });
        header.set_uid(7);
        header.set_gid(8);
        header.set_mtime(1000);
        header.set_size(content.len() as u64);
        // Written without the builder's own checks, as an attacker would.
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        old.linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Imports in this process: a test has threads, so it cannot fork a worker.
fn import_path(state: &Path, name: &str, source: &Path) -> Result<ImageRecord, ImageError> {
    let source = ImportSource::open(source)?;
    let import = ImageImport {
        name,
        source,
        wanted: None,
        existing: ExistingImagePolicy::Refuse,
        most: None,
        below: ImportBase::Nothing,
    };
    import_image(state, import, UnpackMode::InProcess, &mut |_| {}).map(|made| made.record)
}

fn import_bytes(bytes: &[u8]) -> (TempDir, Result<ImageRecord, ImageError>) {
    let state = TempDir::new().unwrap();
    let source = state.path().join("source.tar");
    fs::write(&source, bytes).unwrap();
    let result = import_path(state.path(), "test", &source);
    (state, result)
}

/// Returns the tree of a layer, counted from the bottom.
fn tree(state: &Path, record: &ImageRecord, layer: usize) -> PathBuf {
    let hex = record.layers[layer].digest.hex();
    state.join("images/layers").join(hex).join("tree")
}

/// Whether the store is empty.
fn is_empty(state: &Path) -> bool {
    let count = |name: &str| fs::read_dir(state.join("images").join(name)).map_or(0, Iterator::count);
    count("names") + count("layers") + count("draft") == 0
}

const GOOD: &[(EntryType, &str, &str, &[u8])] = &[
    (EntryType::Directory, "./", "", b""),
    (EntryType::Directory, "usr/", "", b""),
    (EntryType::Regular, "usr/bin/tool", "", b"tool"),
    (EntryType::Symlink, "bin", "usr/bin", b""),
    (EntryType::Link, "usr/bin/other", "usr/bin/tool", b""),
    (EntryType::Char, "dev/null", "", b""),
    (EntryType::Symlink, "usr/escape", "/etc", b""),
];

#[test]
fn archive_is_imported_in_each_compression() {
    let plain = archive(GOOD);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let zstd = zstd::encode_all(plain.as_slice(), 1).unwrap();
    for bytes in [plain, gzip.finish().unwrap(), zstd] {
        let (state, result) = import_bytes(&bytes);
        let record = result.unwrap();
        assert_eq!(
            (record.name.as_str(), record.bytes()),
            ("test", 4 + 8 * budget::ENTRY_SIZE),
            "seven entries and a parent"
        );
        let rootfs = tree(state.path(), &record, 0);
        let tool = fs::metadata(rootfs.join("usr/bin/tool")).unwrap();
        assert_eq!((tool.mode() & 0o7777, tool.nlink(), tool.mtime()), (0o4755, 2, 1000));
        if testkit::is_root() {
            assert_eq!((tool.uid(), tool.gid()), (7, 8));
        }
        assert_eq!(fs::read_link(rootfs.join("usr/escape")).unwrap(), Path::new("/etc"));
        assert!(!rootfs.join("dev/null").exists(), "devices are left out");
        assert_eq!(list_images(state.path()).unwrap()[0].0, record);
    }
    if !testkit::is_root() {
        testkit::skip_test("only root can give a file away; the rest was tested");
    }
}

#[test]
fn directory_is_imported_with_user_attributes() {
    let (place, state) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let usr = place.path().join("usr");
    fs::create_dir(&usr).unwrap();
    fs::write(usr.join("file"), "x").unwrap();
    let set = |path: &Path, name: &str, value: &[u8]| {
        rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    let plain = import_path(state.path(), "plain", place.path()).unwrap();
    set(&usr, "user.color", b"blue");
    set(&usr.join("file"), "user.shape", b"round");
    let record = import_path(state.path(), "marked", place.path()).unwrap();
    assert_ne!(record.layers, plain.layers, "attributes are part of a layer's digest");
    for (path, name, expected) in [("usr", "user.color", &b"blue"[..]), ("usr/file", "user.shape", b"round")]
    {
        let mut value = [0; 16];
        let kept = tree(state.path(), &record, 0).join(path);
        let length = rustix::fs::getxattr(kept, name, &mut value).unwrap();
        assert_eq!(&value[..length], expected, "{path}");
    }
    set(&usr.join("file"), "user.overlay.opaque", b"y");
    let result = import_path(state.path(), "hostile", place.path());
    assert!(matches!(result, Err(ImageError::Hostile { .. })), "{result:?}");
}

#[test]
fn archive_that_leads_out_is_rejected_completely() {
    let directory = (EntryType::Directory, "usr/", "", &b""[..]);
    for hostile in [
        vec![(EntryType::Regular, "../evil", "", &b"x"[..])],
        vec![(EntryType::Regular, "usr/../../evil", "", &b"x"[..])],
        vec![(EntryType::Regular, "/evil", "", &b"x"[..])],
        vec![(EntryType::Symlink, "out", "..", &b""[..]), (EntryType::Regular, "out/evil", "", &b"x"[..])],
        vec![(EntryType::Symlink, "out", "/", &b""[..]), (EntryType::Directory, "out/evil", "", &b""[..])],
        vec![(EntryType::Symlink, "out", "..", &b""[..]), (EntryType::Symlink, "out/evil", "x", &b""[..])],
        vec![(EntryType::Link, "usr/evil", "../source.tar", &b""[..])],
        vec![(EntryType::Link, "usr/evil", "/etc/passwd", &b""[..])],
        vec![
            (EntryType::Symlink, "out", "..", &b""[..]),
            (EntryType::Link, "evil", "out/image.json", &b""[..]),
        ],
        vec![(EntryType::Char, "usr/evil", "", &b""[..])],
        vec![(EntryType::new(b'Z'), "usr/evil", "", &b""[..])],
    ] {
        let bytes = archive(&[vec![directory], hostile.clone()].concat());
        let (state, result) = import_bytes(&bytes);
        assert!(result.is_err(), "{hostile:?}");
        assert!(is_empty(state.path()), "{hostile:?}");
        assert!(!state.path().join("evil").exists() && !state.path().join("images/evil").exists());
    }
}

#[test]
fn header_that_would_fill_memory_is_rejected() {
    let name = vec![b'a'; 4 << 20];
    let bytes = archive(&[(EntryType::GNULongName, "././@LongLink", "", &name)]);
    let (_state, result) = import_bytes(&bytes);
    assert!(matches!(result, Err(ImageError::Io { .. })), "{result:?}");
}

#[test]
fn source_without_a_root_file_system_is_rejected() {
    let (_state, result) = import_bytes(b"not an archive");
    assert!(matches!(result, Err(ImageError::NotAnArchive)));
    let (_state, result) = import_bytes(&archive(&[(EntryType::Regular, "file", "", b"x")]));
    assert!(matches!(result, Err(ImageError::NotARoot)));
}

#[test]
fn directory_is_imported_without_following_links() {
    let state = TempDir::new().unwrap();
    let source = state.path().join("source");
    fs::create_dir_all(source.join("usr/bin")).unwrap();
    fs::write(state.path().join("secret"), "secret").unwrap();
    fs::write(source.join("usr/bin/tool"), "tool").unwrap();
    fs::hard_link(source.join("usr/bin/tool"), source.join("usr/bin/other")).unwrap();
    symlink("../../secret", source.join("usr/link")).unwrap();
    symlink("..", source.join("usr/up")).unwrap();
    fs::set_permissions(source.join("usr"), fs::Permissions::from_mode(0o555)).unwrap();
    let record = import_path(state.path(), "dir/a:1", &source).unwrap();
    assert_eq!(record.bytes(), 4 + 6 * budget::ENTRY_SIZE);
    let rootfs = tree(state.path(), &record, 0);
    assert!(fs::symlink_metadata(rootfs.join("usr/link")).unwrap().is_symlink());
    assert_eq!(fs::metadata(rootfs.join("usr/bin/other")).unwrap().nlink(), 2);
    assert_eq!(fs::metadata(rootfs.join("usr")).unwrap().mode() & 0o7777, 0o555);
}

#[test]
fn importing_a_directory_that_holds_the_state_ends() {
    let state = TempDir::new().unwrap();
    fs::create_dir_all(state.path().join("usr")).unwrap();
    import_path(state.path(), "self", state.path()).unwrap();
}

#[test]
fn image_is_removed_with_its_layers() {
    let (state, result) = import_bytes(&archive(GOOD));
    result.unwrap();
    assert!(matches!(
        import_path(state.path(), "test", &state.path().join("source.tar")),
        Err(ImageError::Exists(_))
    ));
    remove_image(state.path(), "test").unwrap();
    assert!(is_empty(state.path()));
    assert!(matches!(remove_image(state.path(), "test"), Err(ImageError::Unknown(_))));
    assert!(matches!(remove_image(state.path(), "../x"), Err(ImageError::BadName(_))));
    assert!(matches!(remove_image(state.path(), HOST_IMAGE), Err(ImageError::Reserved(_))));
}

#[test]
fn names_resolve_to_images() {
    let (state, result) = import_bytes(&archive(GOOD));
    result.unwrap();
    let host = create_host_skeleton(&state.path().join("host")).unwrap();
    let find = |name: &str| resolve_image(state.path(), &host, name);
    assert_eq!(find("host").unwrap().trees, host.trees);
    let named = find("test").unwrap();
    assert!(named.env.iter().all(|(name, _)| name != "HOME"), "HOME depends on the user");
    assert_eq!(named.trees.len(), 1);
    assert!(named.has_all_layers() && named.trees[0].lowers.len() == 2, "{named:?}");
    for missing in ["Python:3", "python:3", "../test"] {
        assert!(matches!(find(missing), Err(ImageError::Unknown(_))), "{missing}");
    }
}

#[test]
fn skeleton_is_the_same_until_the_host_changes() {
    let dir = TempDir::new().unwrap();
    let first = create_host_skeleton(dir.path()).unwrap();
    let second = create_host_skeleton(dir.path()).unwrap();
    assert_eq!(first, second);
    fs::create_dir(dir.path().join("old")).unwrap();
    remove_old_skeletons(dir.path(), &second, || Ok(true)).unwrap();
    assert!(dir.path().join("old").exists(), "a sandbox may use the old one");
    remove_old_skeletons(dir.path(), &second, || Ok(false)).unwrap();
    let left = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 2, "the skeleton and its record");
    assert_eq!(create_host_skeleton(dir.path()).unwrap(), first);
}

#[test]
fn skeleton_has_essentials_and_no_secret() {
    let dir = TempDir::new().unwrap();
    let image = create_host_skeleton(dir.path()).unwrap();
    assert_eq!(image.trees[0].mount_point, "/");
    assert_eq!(image.trees[1].mount_point, "/usr");
    let root = &image.trees[0].lowers[0];
    let mode = |path: &str| fs::metadata(root.join(path)).unwrap().mode() & 0o7777;
    assert_eq!((mode("root"), mode("tmp"), mode("etc"), mode("")), (0o700, 0o1777, 0o755, 0o755));
    for name in ["etc/passwd", "etc/ld.so.cache", "etc/hosts", "etc/nsswitch.conf"] {
        assert!(root.join(name).is_file(), "{name}");
    }
    assert!(fs::read_to_string(root.join("etc/shadow")).unwrap().starts_with("root:*:"));
    for name in ["etc/ssh", "etc/ssl/private", "etc/sudoers", "etc/hostname-of-host", "var/lib/dpkg"] {
        assert!(!root.join(name).exists(), "{name}");
    }
    assert!(fs::symlink_metadata(root.join("bin")).is_ok());
}

#[test]
fn files_readable_only_by_root_are_not_copied() {
    let dir = TempDir::new().unwrap();
    let image = create_host_skeleton(dir.path()).unwrap();
    let root = &image.trees[0].lowers[0];
    let mut unread = vec![root.join("etc")];
    while let Some(directory) = unread.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let original = Path::new("/").join(entry.path().strip_prefix(root).unwrap());
            if entry.file_type().unwrap().is_dir() {
                unread.push(entry.path());
            } else if let Ok(found) = fs::metadata(&original)
                && found.mode() & 0o004 == 0
            {
                assert_ne!(fs::read(entry.path()).unwrap(), fs::read(&original).unwrap(), "{original:?}");
            }
        }
    }
}
