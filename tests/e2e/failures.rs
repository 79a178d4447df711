//! Sandboxes that cannot be made: what is said about it, and that nothing stays.

use std::fs;
use std::path::{Path, PathBuf};

use e2e::run::{ORDINARY, Run, User, is_root};

fn users() -> Vec<User> {
    if is_root() { vec![User::Same, ORDINARY] } else { vec![User::Same] }
}

#[test]
fn a_mount_that_is_not_there_is_named_with_a_hint() {
    for user in users() {
        let ended = Run::new(user).mount(Path::new("/nonexistent/source"), "/x", "ro").argv(&["true"]);
        assert_eq!(ended.code, Some(125), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("`/nonexistent/source`: No such file"), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("hint: it must exist on this host"), "{user:?}: {ended:?}");
    }
}

#[test]
fn a_place_for_a_mount_that_cannot_be_made_is_named_with_a_hint() {
    for user in users() {
        let run = Run::new(user);
        let ended = run.mount(Path::new("/usr"), "/etc/passwd/below", "ro").argv(&["true"]);
        assert_eq!(ended.code, Some(125), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("`/etc/passwd/below`: "), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("hint: choose another place"), "{user:?}: {ended:?}");
    }
}

#[test]
fn a_run_that_failed_to_begin_leaves_nothing_behind() {
    for (place, user) in users().into_iter().enumerate() {
        let home = user.home();
        let state = home.path().join("state");
        let instance = format!("failing-{}-{place}", std::process::id());
        let run = Run::new(user).state(&state).switch("--keep").mount(Path::new("/nonexistent"), "/x", "ro");
        let output = run.command(&["true"]).env("CORACLE_INSTANCE", &instance).output();
        assert_eq!(output.expect("the binary can be run").status.code(), Some(125));
        assert_eq!(groups_of(&instance), Vec::<PathBuf>::new(), "{user:?}");
        for directory in ["alive", "boxes", "kept", "run"] {
            let entries = fs::read_dir(state.join("oneshot").join(directory)).into_iter().flatten();
            assert_eq!(entries.count(), 0, "{user:?}: {directory}");
        }
    }
}

/// The groups of an instance's runs, in whichever hierarchy.
fn groups_of(instance: &str) -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    let roots = hierarchies.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
    roots
        .map(|root| root.join("coracle").join(format!("{instance}-run")))
        .filter(|group| group.exists())
        .collect()
}
