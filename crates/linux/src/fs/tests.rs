//! A hostile tree must not lead out of its root.
#![expect(clippy::unwrap_used, reason = "a test may panic on any failure")]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// A root with a secret beside it and symlinks that point there.
fn hostile_tree() -> (TempDir, RootDirectory) {
    let place = TempDir::new().unwrap();
    fs::create_dir(place.path().join("root")).unwrap();
    fs::create_dir(place.path().join("outside")).unwrap();
    fs::write(place.path().join("outside/secret"), "secret").unwrap();
    symlink("../outside", place.path().join("root/relative")).unwrap();
    symlink(place.path().join("outside"), place.path().join("root/absolute")).unwrap();
    symlink("../outside/secret", place.path().join("root/file")).unwrap();
    symlink("/proc/self/root", place.path().join("root/magic")).unwrap();
    let root = RootDirectory::open(&place.path().join("root")).unwrap();
    (place, root)
}

const ESCAPING_PATHS: [&str; 9] = [
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
fn paths_outside_are_not_opened() {
    let (_place, root) = hostile_tree();
    for path in ESCAPING_PATHS {
        assert!(root.open_read(Path::new(path)).is_err(), "{path}");
        assert!(root.open_subdirectory(Path::new(path)).is_err(), "{path}");
        assert!(root.create_file(Path::new(path), 0o600).is_err(), "{path}");
    }
    assert!(root.set_mode(Path::new("relative/secret"), 0o777).is_err());
}

#[test]
fn paths_outside_are_not_created_moved_or_removed() {
    let (place, root) = hostile_tree();
    for parent in ["relative", "absolute", "../outside", "relative/../relative"] {
        let new = Path::new(parent).join("new");
        let secret = Path::new(parent).join("secret");
        assert!(root.make_directory(&new, 0o755).is_err(), "{parent}");
        assert!(root.make_directories(&new.join("x"), 0o755).is_err(), "{parent}");
        assert!(root.create_symlink(Path::new("/"), &new).is_err(), "{parent}");
        assert!(root.create_hard_link(&secret, Path::new("stolen")).is_err(), "{parent}");
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
fn files_and_directories_beneath_are_created_and_read() {
    let (_place, root) = hostile_tree();
    root.make_directories(Path::new("a/b/c"), 0o750).unwrap();
    root.create_file(Path::new("a/b/c/f"), 0o640).unwrap().write_all(b"text").unwrap();
    root.rename_without_replacing(Path::new("a/b/c/f"), Path::new("a/g")).unwrap();
    root.create_hard_link(Path::new("a/g"), Path::new("h")).unwrap();
    assert!(root.rename_without_replacing(Path::new("h"), Path::new("a/g")).is_err(), "the target exists");
    let mut text = String::new();
    root.open_subdirectory(Path::new("a"))
        .unwrap()
        .open_read(Path::new("g"))
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "text");
}

#[test]
fn removing_a_tree_removes_links_but_not_their_targets() {
    let (place, root) = hostile_tree();
    root.make_directories(Path::new("t/deep"), 0o755).unwrap();
    root.create_symlink(Path::new("../../outside"), Path::new("t/deep/link")).unwrap();
    root.make_fifo(Path::new("t/pipe"), 0o600).unwrap();
    root.remove_tree(Path::new("t")).unwrap();
    root.remove_tree(Path::new("t")).unwrap();
    root.remove_tree(Path::new("relative")).unwrap();
    assert!(root.stat(Path::new("relative")).is_err());
    assert!(place.path().join("outside/secret").exists());
}

/// The mounts are created in a separate mount namespace of one thread, invisible to other tests.
#[test]
fn removal_stops_at_a_mount() {
    if !testkit::needs_root() {
        return;
    }
    let (place, root) = hostile_tree();
    root.make_directories(Path::new("t/deep/mounted"), 0o755).unwrap();
    let inside = std::thread::spawn(move || {
        crate::namespaces::unshare_namespaces(crate::namespaces::NamespaceSet::MOUNT).unwrap();
        crate::mounts::make_private().unwrap();
        let root = RootDirectory::open(&place.path().join("root")).unwrap();
        let outside = place.path().join("outside");
        for target in ["t/deep/mounted", "t"] {
            // It is the same filesystem: only the mount differs.
            crate::mounts::bind_mount(&outside, &place.path().join("root").join(target)).unwrap();
            let error = root.remove_tree(Path::new("t")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::XDEV.raw_os_error()), "{target}: {error}");
            assert!(outside.join("secret").exists(), "{target}");
        }
        place
    });
    let place = inside.join().unwrap();
    // The tree without mounts is removed from a namespace where nothing is mounted.
    root.remove_tree(Path::new("t")).unwrap();
    assert!(place.path().join("outside/secret").exists());
}

#[test]
fn tree_deeper_than_any_path_is_removed() {
    let (_place, root) = hostile_tree();
    root.make_directory(Path::new("t"), 0o755).unwrap();
    let mut below = root.open_subdirectory(Path::new("t")).unwrap();
    let name = "d".repeat(200);
    for file in 0..3000 {
        below.create_file(Path::new(&file.to_string()), 0o600).unwrap();
    }
    for _ in 0..500 {
        below.make_directory(Path::new(&name), 0o755).unwrap();
        below.create_file(Path::new("f"), 0o600).unwrap();
        below = below.open_subdirectory(Path::new(&name)).unwrap();
    }
    root.remove_tree(Path::new("t")).unwrap();
    assert!(root.stat(Path::new("t")).is_err());
}

#[test]
fn directory_without_permissions_is_removed() {
    let (place, root) = hostile_tree();
    root.make_directories(Path::new("t/work/work"), 0o755).unwrap();
    let closed = place.path().join("root/t/work");
    fs::set_permissions(closed, fs::Permissions::from_mode(0o000)).unwrap();
    root.remove_tree(Path::new("t")).unwrap();
}

#[test]
fn opening_a_fifo_does_not_block() {
    let (_place, root) = hostile_tree();
    root.make_fifo(Path::new("pipe"), 0o600).unwrap();
    root.open_read(Path::new("pipe")).unwrap();
}

/// Names in random trees and paths; few, so that paths often match something.
const NAMES: [&str; 4] = ["a", "b", "c", "secret"];

/// An entry at a random path.
#[derive(Clone, Debug)]
enum TreeEntry {
    Directory,
    File,
    Link(String),
}

fn any_path() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        6 => prop::sample::select(&NAMES[..]).prop_map(str::to_owned),
        2 => Just("..".to_owned()),
        1 => Just(".".to_owned()),
        1 => Just(String::new()),
    ];
    let relative = prop::collection::vec(part, 0..6).prop_map(|parts| parts.join("/"));
    prop_oneof![
        8 => relative,
        1 => Just("/proc/self/root".to_owned()),
        1 => Just("/proc/self/cwd/..".to_owned()),
        1 => Just("/tmp".to_owned()),
    ]
}

fn any_tree() -> impl Strategy<Value = Vec<(Vec<&'static str>, TreeEntry)>> {
    let thing = prop_oneof![
        3 => Just(TreeEntry::Directory),
        2 => Just(TreeEntry::File),
        3 => any_path().prop_map(TreeEntry::Link),
    ];
    prop::collection::vec((prop::collection::vec(prop::sample::select(&NAMES[..]), 1..4), thing), 0..14)
}

/// Builds as much of a tree as possible, in `root`, with the same names outside of it.
fn build_tree(place: &Path, tree: &[(Vec<&'static str>, TreeEntry)]) {
    for top in ["root", "a", "b", "c"] {
        fs::create_dir_all(place.join(top)).unwrap();
    }
    fs::write(place.join("secret"), "outside").unwrap();
    for (parts, thing) in tree {
        let path = parts.iter().fold(place.join("root"), |path, part| path.join(part));
        // Through a symlink the tree would be built outside; only Root itself is tested with
        // symlinks.
        if path.ancestors().take(parts.len()).any(Path::is_symlink) {
            continue;
        }
        match thing {
            TreeEntry::Directory => fs::create_dir_all(&path).unwrap_or_default(),
            TreeEntry::File => fs::write(&path, "inside").unwrap_or_default(),
            TreeEntry::Link(target) => symlink(target, &path).unwrap_or_default(),
        }
    }
}

/// Returns device and inode number of everything at or below a directory, without following
/// symlinks.
fn inodes_below(directory: &Path) -> std::collections::BTreeSet<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let facts = fs::symlink_metadata(directory).unwrap();
    let mut found = std::collections::BTreeSet::from([(facts.dev(), facts.ino())]);
    if facts.is_dir() {
        for entry in fs::read_dir(directory).unwrap() {
            found.extend(inodes_below(&entry.unwrap().path()));
        }
    }
    found
}

/// Resolves the path as a model: by names alone, where any symlink and any step above the root is
/// an error.
fn model_lookup(root: &Path, path: &str) -> Option<std::path::PathBuf> {
    let mut here = Vec::new();
    for part in Path::new(path).components() {
        // Nothing can follow a file, not even a dot.
        if !here.iter().fold(root.to_owned(), |path, name| path.join(name)).is_dir() {
            return None;
        }
        match part {
            Component::Prefix(_) | Component::RootDir => return None,
            Component::CurDir => {}
            Component::ParentDir => drop(here.pop()?),
            Component::Normal(name) => here.push(name.to_owned()),
        }
        let so_far = here.iter().fold(root.to_owned(), |path, name| path.join(name));
        if so_far.is_symlink() || !so_far.exists() {
            return None;
        }
    }
    Some(here.iter().fold(root.to_owned(), |path, name| path.join(name)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_path_escapes_the_root(tree in any_tree(), paths in prop::collection::vec(any_path(), 1..12)) {
        use std::os::unix::fs::MetadataExt;
        let place = TempDir::new().unwrap();
        build_tree(place.path(), &tree);
        let top = place.path().join("root");
        let (root, inside) = (RootDirectory::open(&top).unwrap(), inodes_below(&top));
        for path in &paths {
            let opened = root.open_with(Path::new(path), OFlags::PATH, 0);
            if let Ok(file) = &opened {
                let facts = file.metadata().unwrap();
                prop_assert!(inside.contains(&(facts.dev(), facts.ino())), "`{path}` led out");
                if facts.file_type().is_symlink() {
                    // Only the last name of a path may be a symlink; it is opened itself, not
                    // followed.
                    continue;
                }
            }
            // The kernel rejects more than the model (a file with something behind it), never less.
            match (&opened, model_lookup(&top, path)) {
                (Ok(_), None) => prop_assert!(false, "`{path}` follows a link or leads out"),
                (Err(error), Some(place)) if place.is_dir() && !path.is_empty() => {
                    prop_assert!(false, "`{path}` is a directory inside and was rejected: {error}");
                }
                _ => {}
            }
        }
    }

    #[test]
    fn no_path_changes_files_outside(
        tree in any_tree(),
        paths in prop::collection::vec((any_path(), any_path()), 1..8),
    ) {
        let place = TempDir::new().unwrap();
        build_tree(place.path(), &tree);
        let root = RootDirectory::open(&place.path().join("root")).unwrap();
        for (one, other) in &paths {
            let (one, other) = (Path::new(one), Path::new(other));
            // Whether each call succeeds does not matter here, only whether it changed something
            // outside.
            drop(root.create_file(&one.join("new"), 0o600));
            drop(root.make_directories(&other.join("deep/er"), 0o755));
            drop(root.create_symlink(Path::new("/"), &one.join("link")));
            drop(root.create_hard_link(one, &other.join("second")));
            drop(root.rename(one, &other.join("moved")));
            drop(root.set_mode(one, 0o700));
            drop(root.remove_tree(other));
        }
        let mut outside: Vec<_> =
            fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        outside.sort();
        prop_assert_eq!(outside, ["a", "b", "c", "root", "secret"]);
        prop_assert_eq!(fs::read_to_string(place.path().join("secret")).unwrap(), "outside");
        for empty in ["a", "b", "c"] {
            prop_assert_eq!(fs::read_dir(place.path().join(empty)).unwrap().count(), 0, "{} was filled", empty);
        }
    }
}
