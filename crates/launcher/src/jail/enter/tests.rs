//! The target of a mount is always within the sandbox's root, whatever the image contains.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// Only a few names, so that targets and links often refer to something that exists.
const NAMES: [&str; 3] = ["a", "b", "c"];

fn any_path() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        5 => prop::sample::select(&NAMES[..]).prop_map(str::to_owned),
        2 => Just("..".to_owned()),
        1 => Just(".".to_owned()),
    ];
    (any::<bool>(), prop::collection::vec(part, 1..5))
        .prop_map(|(absolute, parts)| format!("{}{}", if absolute { "/" } else { "" }, parts.join("/")))
}

fn open_path(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn mount_target_is_always_within_the_root(
        links in prop::collection::vec((prop::collection::vec(prop::sample::select(&NAMES[..]), 1..3), any_path()), 0..8),
        target in any_path(),
        file in any::<bool>(),
    ) {
        let place = TempDir::new().unwrap();
        let root = place.path().join("root");
        fs::create_dir(&root).unwrap();
        for (parts, link) in &links {
            let path = parts.iter().fold(root.clone(), |path, part| path.join(part));
            let above = path.parent().unwrap();
            if !above.is_symlink() && fs::create_dir_all(above).is_ok() {
                symlink(link, &path).unwrap_or_default();
            }
        }
        let source = place.path().join("source");
        if file { fs::write(&source, "").unwrap() } else { fs::create_dir(&source).unwrap() }
        let made = make_mount_target(open_path(&root).as_fd(), &target, open_path(&source).as_fd(), ResolveFlags::IN_ROOT);
        if let Ok(made) = made {
            let name = |fd: &OwnedFd| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
            let (shown, real) = (name(&made), name(&open_path(&root)));
            prop_assert!(shown.starts_with(&real), "`{target}` is {}", shown.display());
        }
        let mut names: Vec<_> = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        prop_assert_eq!(names, ["root", "source"], "something was made outside");
    }
}

#[test]
fn a_link_in_place_of_a_mount_point_is_refused() {
    let place = TempDir::new().unwrap();
    let root = place.path().join("root");
    fs::create_dir_all(root.join("real")).unwrap();
    fs::create_dir_all(root.join("proc")).unwrap();
    check_mount_points(&root, &["proc"]).unwrap();
    fs::write(root.join("file"), "").unwrap();
    for (name, target) in [("inside", "real"), ("outside", "/etc"), ("up", "../..")] {
        symlink(target, root.join(name)).unwrap();
    }
    for name in ["inside", "outside", "up", "file", "missing"] {
        assert!(check_mount_points(&root, &[name]).is_err(), "{name}");
    }
}
