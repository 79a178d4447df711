//! A hostile tree must not lead out of its root.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};

use tempfile::TempDir;

use super::*;

/// A root with a secret beside it and links that point there.
fn hostile() -> (TempDir, Root) {
    let place = TempDir::new().unwrap();
    fs::create_dir(place.path().join("root")).unwrap();
    fs::create_dir(place.path().join("outside")).unwrap();
    fs::write(place.path().join("outside/secret"), "secret").unwrap();
    symlink("../outside", place.path().join("root/relative")).unwrap();
    symlink(place.path().join("outside"), place.path().join("root/absolute")).unwrap();
    symlink("../outside/secret", place.path().join("root/file")).unwrap();
    symlink("/proc/self/root", place.path().join("root/magic")).unwrap();
    let root = Root::open(&place.path().join("root")).unwrap();
    (place, root)
}

const WAYS_OUT: [&str; 9] = [
    "relative/secret",
    "absolute/secret",
    "../outside/secret",
    "./../outside/secret",
    "relative/../../outside/secret",
    "file",
    "magic/etc/passwd",
    "/etc/passwd",
    "..",
];

#[test]
fn nothing_outside_is_opened() {
    let (_place, root) = hostile();
    for path in WAYS_OUT {
        assert!(root.read(Path::new(path)).is_err(), "{path}");
        assert!(root.directory(Path::new(path)).is_err(), "{path}");
        assert!(root.create(Path::new(path), 0o600).is_err(), "{path}");
    }
    assert!(root.set_mode(Path::new("relative/secret"), 0o777).is_err());
}

#[test]
fn nothing_outside_is_made_moved_or_removed() {
    let (place, root) = hostile();
    for parent in ["relative", "absolute", "../outside", "relative/../relative"] {
        let new = Path::new(parent).join("new");
        let secret = Path::new(parent).join("secret");
        assert!(root.make_directory(&new, 0o755).is_err(), "{parent}");
        assert!(root.make_directories(&new.join("x"), 0o755).is_err(), "{parent}");
        assert!(root.symlink(Path::new("/"), &new).is_err(), "{parent}");
        assert!(root.hard_link(&secret, Path::new("stolen")).is_err(), "{parent}");
        assert!(root.rename(&secret, Path::new("stolen")).is_err(), "{parent}");
        assert!(root.rename(Path::new("file"), &new).is_err(), "{parent}");
        assert!(root.remove_file(&secret).is_err(), "{parent}");
        assert!(root.remove_tree(&secret).is_err(), "{parent}");
        assert!(root.set_owner(&secret, 1, 1).is_err(), "{parent}");
    }
    let left: Vec<_> = fs::read_dir(place.path().join("outside")).unwrap().collect();
    assert_eq!(left.len(), 1);
}

#[test]
fn files_and_directories_beneath_are_made_and_read() {
    let (_place, root) = hostile();
    root.make_directories(Path::new("a/b/c"), 0o750).unwrap();
    root.create(Path::new("a/b/c/f"), 0o640).unwrap().write_all(b"text").unwrap();
    root.rename_new(Path::new("a/b/c/f"), Path::new("a/g")).unwrap();
    root.hard_link(Path::new("a/g"), Path::new("h")).unwrap();
    assert!(root.rename_new(Path::new("h"), Path::new("a/g")).is_err(), "it exists");
    let mut text = String::new();
    root.directory(Path::new("a")).unwrap().read(Path::new("g")).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "text");
}

#[test]
fn removing_a_tree_removes_links_and_not_what_they_point_to() {
    let (place, root) = hostile();
    root.make_directories(Path::new("t/deep"), 0o755).unwrap();
    root.symlink(Path::new("../../outside"), Path::new("t/deep/link")).unwrap();
    root.make_fifo(Path::new("t/pipe"), 0o600).unwrap();
    root.remove_tree(Path::new("t")).unwrap();
    root.remove_tree(Path::new("t")).unwrap();
    root.remove_tree(Path::new("relative")).unwrap();
    assert!(root.stat(Path::new("relative")).is_err());
    assert!(place.path().join("outside/secret").exists());
}

#[test]
fn a_tree_deeper_than_any_path_is_removed() {
    let (_place, root) = hostile();
    root.make_directory(Path::new("t"), 0o755).unwrap();
    let mut below = root.directory(Path::new("t")).unwrap();
    let name = "d".repeat(200);
    for file in 0..3000 {
        below.create(Path::new(&file.to_string()), 0o600).unwrap();
    }
    for _ in 0..500 {
        below.make_directory(Path::new(&name), 0o755).unwrap();
        below.create(Path::new("f"), 0o600).unwrap();
        below = below.directory(Path::new(&name)).unwrap();
    }
    root.remove_tree(Path::new("t")).unwrap();
    assert!(root.stat(Path::new("t")).is_err());
}

#[test]
fn a_directory_without_permissions_is_removed() {
    let (place, root) = hostile();
    root.make_directories(Path::new("t/work/work"), 0o755).unwrap();
    let closed = place.path().join("root/t/work");
    fs::set_permissions(closed, fs::Permissions::from_mode(0o000)).unwrap();
    root.remove_tree(Path::new("t")).unwrap();
}

#[test]
fn a_pipe_does_not_make_the_reader_wait() {
    let (_place, root) = hostile();
    root.make_fifo(Path::new("pipe"), 0o600).unwrap();
    root.read(Path::new("pipe")).unwrap();
}
