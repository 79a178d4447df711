//! Hostile layers.

use std::time::Duration;

use super::layouts::{as_directory, config, layout};
use super::*;

/// Imports an image whose second layer has these entries.
fn import_layer(layer: Vec<u8>) -> (TempDir, Result<ImageRecord, ImageError>) {
    let bottom = archive(&[
        (EntryType::Symlink, "link", "/etc", b""),
        (EntryType::Regular, "usr/bin/tool", "", b"tool"),
    ]);
    let layers = vec![bottom, layer];
    let (files, _) = layout(&layers, &config(&layers));
    let state = TempDir::new().unwrap();
    let result = import_path(state.path(), "test", as_directory(&files).path());
    (state, result)
}

fn refused(layer: Vec<u8>, because: &str) {
    let (state, result) = import_layer(layer);
    let error = result.expect_err(because);
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    assert!(text.contains(because), "{text} instead of {because}");
    assert!(is_empty(state.path()), "{because}");
}

const FILE: EntryType = EntryType::Regular;

/// Returns the header of a file that belongs to root.
fn header(size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(FILE);
    header.set_size(size);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

#[test]
fn entries_that_lead_out_or_are_ambiguous_are_rejected() {
    for (entries, because) in [
        (vec![(FILE, "../evil", "", &b"x"[..])], "leads out"),
        (vec![(FILE, "/evil", "", b"x")], "absolute"),
        (vec![(FILE, "a/../../evil", "", b"x")], "leads out"),
        (vec![(EntryType::Symlink, "out", "..", b""), (FILE, "out/evil", "", b"x")], "symbolic link"),
        (vec![(EntryType::Link, "evil", "/etc/passwd", b"")], "absolute"),
        (vec![(EntryType::Link, "evil", "../../names/x", b"")], "leads out"),
        (
            vec![(EntryType::Symlink, "out", "..", b""), (EntryType::Link, "evil", "out/names", b"")],
            "links to",
        ),
        (vec![(EntryType::Link, "evil", "usr/bin/tool", b"")], "links to nothing"),
        (vec![(FILE, "same", "", b"1"), (FILE, "same", "", b"2")], "twice"),
        (vec![(EntryType::Symlink, "same", "/etc/passwd", b""), (FILE, "same", "", b"2")], "twice"),
        (vec![(FILE, "same", "", b"1"), (EntryType::Directory, "same/", "", b"")], "twice"),
        (vec![(EntryType::Char, "evil", "", b"")], "device"),
        (vec![(EntryType::Block, "usr/evil", "", b"")], "device"),
        (vec![(EntryType::Fifo, "evil", "", b"")], "pipe"),
        (vec![(EntryType::GNUSparse, "evil", "", b"")], ""),
        (vec![(EntryType::new(b'Z'), "evil", "", b"")], "unknown"),
        (vec![(FILE, ".wh..wh..opq", "", b"")], "hides everything"),
        (vec![(FILE, "a/.wh.", "", b"")], "removes nothing"),
        (vec![(FILE, "a/.wh...", "", b"")], "removes nothing"),
        (vec![(FILE, ".wh.x/evil", "", b"x")], "below something that is removed"),
        (vec![(EntryType::Symlink, ".wh.x", "y", b"")], "plain file"),
        (vec![(FILE, "a/.wh.x", "", b""), (EntryType::Link, "evil", "a/x", b"")], "links to nothing"),
    ] {
        refused(archive(&entries), because);
    }
}

#[test]
fn name_or_path_that_is_too_long_is_rejected() {
    let deep = "a/".repeat(300);
    let long = format!("{}x", "abcdefghijklmnopqrst/".repeat(220));
    for (name, because) in [(deep, "too deep"), (long, "too"), ("x".repeat(300), "too long")] {
        let mut builder = Builder::new(Vec::new());
        builder.append_pax_extensions([("path", name.as_bytes())]).unwrap();
        builder.append_data(&mut header(0), "short", &b""[..]).unwrap();
        refused(builder.into_inner().unwrap(), because);
    }
}

#[test]
fn sparse_file_written_as_a_plain_one_is_rejected() {
    for keys in [["GNU.sparse.major", "1"], ["GNU.sparse.numblocks", "1"], ["GNU.sparse.map", "0,1"]] {
        let mut builder = Builder::new(Vec::new());
        builder.append_pax_extensions([(keys[0], keys[1].as_bytes())]).unwrap();
        builder.append_data(&mut header(5), "file", &b"1\n0\n1"[..]).unwrap();
        refused(builder.into_inner().unwrap(), "sparse");
    }
}

/// Creates a layer that begins with attributes for all of its entries.
fn with_global(attributes: &[u8]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    let mut global = header(attributes.len() as u64);
    global.set_entry_type(EntryType::XGlobalHeader);
    builder.append_data(&mut global, "global", attributes).unwrap();
    builder.append_data(&mut header(0), "file", &b""[..]).unwrap();
    builder.into_inner().unwrap()
}

#[test]
fn global_attributes_are_limited_and_cannot_make_files_sparse() {
    refused(with_global(b"22 GNU.sparse.major=1\n"), "sparse");
    let long = format!("{} comment={}\n", 2_000_018, "x".repeat(2_000_000));
    refused(with_global(long.as_bytes()), "too long");
    import_layer(with_global(b"13 comment=x\n")).1.unwrap();
}

#[test]
fn owners_that_no_sandbox_has_are_rejected() {
    let mut builder = Builder::new(Vec::new());
    let mut header = header(0);
    header.set_uid(65_536);
    builder.append_data(&mut header, "file", &b""[..]).unwrap();
    refused(builder.into_inner().unwrap(), "id above 65535");
}

/// Creates a layer with one file that has an attribute.
fn with_attribute(name: &str, value: &[u8]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    let key = format!("SCHILY.xattr.{name}");
    builder.append_pax_extensions([(key.as_str(), value)]).unwrap();
    builder.append_data(&mut header(4), "file", &b"text"[..]).unwrap();
    builder.into_inner().unwrap()
}

#[test]
fn attributes_that_steer_an_overlay_or_are_huge_are_rejected() {
    for name in ["user.overlay.opaque", "trusted.overlay.redirect", "user.overlay.whiteout"] {
        refused(with_attribute(name, b"y"), "steers an overlay");
    }
    refused(with_attribute("user.x", &vec![b'x'; 70_000]), "too large");
}

#[test]
fn user_attributes_are_kept_and_privileged_ones_omitted() {
    let read = |path: &Path, name: &str| {
        let mut value = [0; 64];
        rustix::fs::getxattr(path, name, &mut value).map(|length| value[..length].to_vec())
    };
    let (state, record) = import_layer(with_attribute("user.kind", b"tea"));
    let file = tree(state.path(), &record.unwrap(), 1).join("file");
    assert_eq!(read(&file, "user.kind").unwrap(), b"tea");
    let capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for name in ["security.capability", "trusted.x", "system.posix_acl_access"] {
        let (state, record) = import_layer(with_attribute(name, capability));
        let file = tree(state.path(), &record.unwrap(), 1).join("file");
        assert!(read(&file, name).is_err(), "{name}");
    }
}

#[test]
fn layer_that_expands_too_much_is_rejected() {
    let mut builder = Builder::new(Vec::new());
    let size = 100 << 20;
    builder.append_data(&mut header(size), "zeros", io::Read::take(io::repeat(0), size)).unwrap();
    refused(builder.into_inner().unwrap(), "swells");
}

#[test]
fn image_with_too_many_layers_is_rejected() {
    let layers: Vec<Vec<u8>> =
        (0..201).map(|place| archive(&[(FILE, &format!("file-{place}"), "", b"x")])).collect();
    let (files, _) = layout(&layers, &config(&layers));
    let state = TempDir::new().unwrap();
    let result = import_path(state.path(), "test", as_directory(&files).path());
    assert!(matches!(result, Err(ImageError::TooLarge("200 layers"))), "{result:?}");
}

#[test]
fn recreated_entry_hides_the_one_below() {
    let entries = [
        (FILE, "first/.wh.a", "", &b""[..]),
        (EntryType::Directory, "first/a/", "", b""),
        (EntryType::Directory, "second/a/", "", b""),
        (FILE, "second/.wh.a", "", b""),
        (FILE, "third/.wh.a", "", b""),
        (FILE, "third/a", "", b"new"),
    ];
    let (state, record) = import_layer(archive(&entries));
    let root = tree(state.path(), &record.unwrap(), 1);
    let mut value = [0; 8];
    for directory in ["first/a", "second/a"] {
        let opaque = rustix::fs::getxattr(root.join(directory), "user.overlay.opaque", &mut value);
        assert!(opaque.is_ok(), "{directory}");
    }
    assert_eq!(fs::read(root.join("third/a")).unwrap(), b"new");
}

/// Imports an image of `layers` layers of ten empty files each, with a limit of `most` bytes.
fn import_empty(state: &Path, layers: u32, most: u64) -> Result<ImageRecord, ImageError> {
    let layer = |number: u32| {
        let names: Vec<String> = (0..10).map(|file| format!("{number}-{file}")).collect();
        archive(&names.iter().map(|name| (FILE, name.as_str(), "", &b""[..])).collect::<Vec<_>>())
    };
    let layers: Vec<_> = (0..layers).map(layer).collect();
    let (files, _) = layout(&layers, &config(&layers));
    let source = ImportSource::open(as_directory(&files).path())?;
    let import = ImageImport {
        name: "test",
        source,
        wanted: None,
        existing: ExistingImagePolicy::Replace,
        most: Some(most),
        below: ImportBase::Nothing,
    };
    import_image(state, import, UnpackMode::InProcess, &mut |_| {}).map(|made| made.record)
}

#[test]
fn image_larger_than_the_limit_of_all_is_rejected() {
    let state = TempDir::new().unwrap();
    let result = import_empty(state.path(), 3, 29 * budget::ENTRY_SIZE);
    assert!(matches!(result, Err(ImageError::TooLarge(_))), "{result:?}");
    assert!(is_empty(state.path()));
    assert_eq!(
        import_empty(state.path(), 2, 29 * budget::ENTRY_SIZE).unwrap().bytes(),
        20 * budget::ENTRY_SIZE
    );
    let result = import_empty(state.path(), 3, 29 * budget::ENTRY_SIZE);
    assert!(matches!(result, Err(ImageError::TooLarge(_))), "stored layers count: {result:?}");
}

#[test]
fn implicit_parents_are_counted() {
    let deep = ["d/"; 40].concat() + "f";
    let (_state, result) = import_bytes(&archive(&[(FILE, "usr/f", "", b""), (FILE, &deep, "", b"")]));
    assert_eq!(result.unwrap().bytes(), 43 * budget::ENTRY_SIZE);
}

#[test]
fn huge_configuration_is_rejected() {
    let layers = vec![archive(&[(FILE, "usr/f", "", b"")])];
    for (field, value) in [
        ("Env", serde_json::json!([format!("A={}", "x".repeat(128 << 10))])),
        ("Entrypoint", serde_json::json!(["x".repeat(128 << 10)])),
        ("Cmd", serde_json::json!(vec![""; 128 << 10])),
    ] {
        let mut long = config(&layers);
        long["config"][field] = value;
        let (files, _) = layout(&layers, &long);
        let state = TempDir::new().unwrap();
        let result = import_path(state.path(), "test", as_directory(&files).path());
        assert!(matches!(result, Err(ImageError::TooLarge(_))), "{field} {result:?}");
    }
}

#[test]
fn layout_with_a_foreign_part_is_rejected() {
    if !testkit::needs_root() {
        return;
    }
    let layers = vec![archive(&[(FILE, "usr/f", "", b"")])];
    let (files, _) = layout(&layers, &config(&layers));
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(4711), None).unwrap();
    let blob = files.keys().find(|name| name.starts_with("blobs/")).unwrap();
    for foreign in ["", "index.json", "blobs/sha256", blob, "nothing"] {
        let directory = as_directory(&files);
        let names = ["", "blobs", "blobs/sha256"].into_iter().chain(files.keys().map(String::as_str));
        names.filter(|name| *name != foreign).for_each(|name| own(&directory.path().join(name)));
        let root = linux::fs::RootDirectory::open(directory.path()).unwrap();
        let opened = ImportSource::from_layout(&root, Some(4711));
        assert_eq!(opened.is_ok(), foreign == "nothing", "{foreign}: {opened:?}");
    }
}

#[test]
fn archive_descriptor_must_be_a_plain_file_of_the_sender() {
    let place = TempDir::new().unwrap();
    let path = place.path().join("archive");
    std::fs::write(&path, "x").unwrap();
    let open = || std::fs::File::open(&path).unwrap();
    let own = rustix::process::geteuid().as_raw();
    assert!(ImportSource::from_archive(open(), Some(own)).is_ok());
    assert!(ImportSource::from_archive(open(), None).is_ok());
    assert!(ImportSource::from_archive(open(), Some(own + 1)).is_err(), "it belongs to another user");
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert!(ImportSource::from_archive(reader.into(), Some(own)).is_err(), "a pipe has no end");
    let device = std::fs::File::open("/dev/zero").unwrap();
    assert!(ImportSource::from_archive(device, Some(0)).is_err(), "a device has no end");
}

#[test]
fn locking_images_waits_within_a_limit() {
    let state = TempDir::new().unwrap();
    let held = lock_images(state.path(), Duration::ZERO).unwrap();
    assert!(held.is_some());
    assert!(lock_images(state.path(), Duration::from_millis(10)).unwrap().is_none());
    drop(held);
    assert!(lock_images(state.path(), Duration::ZERO).unwrap().is_some());
}
