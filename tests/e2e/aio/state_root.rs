//! Links below DeerFlow's directory are swapped while sandboxes with mounts from it are created: a mount never leads
//! outside of the directory, and nothing is created there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use e2e::aio::{self, AioSandbox, StateRoot};
use serde_json::json;

const ROUNDS: usize = 25;

/// The parts of the path that are exchanged.
const SWAPPED: [&str; 3] = ["users/ann", "users/ann/threads/t", "users/ann/threads/t/user-data/workspace"];
/// How long everything is in place before the next part is exchanged. A create needs some of this time.
const REST: Duration = Duration::from_millis(2);

/// Exchanges one directory after the other for a link to another one, and back, until it is told to end. Returns how
/// often.
fn swap_until(done: &AtomicBool, root: &Path, outside: &Path) -> usize {
    let mut swaps = 0;
    while !done.load(Ordering::Relaxed) {
        let directory = root.join(SWAPPED[swaps % SWAPPED.len()]);
        let (hidden, link) = (directory.with_extension("hidden"), directory.with_extension("link"));
        symlink(outside, &link).expect("our own directory");
        fs::rename(&directory, &hidden).expect("our own directory");
        // The server may make the directory between the two steps.
        if fs::rename(&link, &directory).is_err() {
            fs::remove_file(&link).expect("our own link");
        }
        std::thread::yield_now();
        match fs::symlink_metadata(&directory) {
            Ok(found) if found.is_symlink() => fs::remove_file(&directory).expect("our own link"),
            _ => fs::remove_dir_all(&directory).unwrap_or_default(),
        }
        if fs::rename(&hidden, &directory).is_err() {
            fs::remove_dir_all(&directory).expect("our own directory");
            fs::rename(&hidden, &directory).expect("our own directory");
        }
        swaps += 1;
        std::thread::park_timeout(REST);
    }
    swaps
}

#[test]
fn links_swapped_while_mounts_are_created_lead_nowhere() {
    if !testkit::needs_root() {
        return;
    }
    let state_root = StateRoot::make();
    let (root, outside) = (state_root.path(), state_root.parent().join("outside"));
    for directory in
        ["users/ann/threads/t/user-data/workspace", "users/ann/skills_view/custom", "skills_view/public"]
    {
        fs::create_dir_all(root.join(directory)).expect("our own directory");
        fs::create_dir_all(outside.join(directory)).expect("our own directory");
    }
    for directory in ["", "workspace", "user-data/workspace", "threads/t/user-data/workspace"] {
        fs::create_dir_all(outside.join(directory)).expect("our own directory");
        fs::write(outside.join(directory).join("secret"), "secret of the host").expect("our own directory");
    }
    let before = tree(&outside);
    let server = state_root.server().start();
    let done = AtomicBool::new(false);
    let (mut made, mut refused) = (0, 0);
    let swaps = std::thread::scope(|scope| {
        let swapping = scope.spawn(|| swap_until(&done, &root, &outside));
        for round in 0..ROUNDS {
            let fields = json!({"user_id": "ann", "thread_id": "t"});
            let answer = aio::try_provision(server.address(), &format!("swapped-{round}"), &fields);
            let answer = answer.expect("the server answers");
            if answer.status != 200 {
                assert!(matches!(answer.status, 400 | 500), "{} {}", answer.status, answer.text());
                let text = answer.text();
                assert!(!text.contains("secret"), "{text}");
                refused += 1;
                continue;
            }
            made += 1;
            let mut sandbox = AioSandbox::from_response(server.address(), &answer.json());
            let seen = sandbox.run("cat /mnt/user-data/*/secret /mnt/user-data/secret 2>/dev/null; true");
            assert!(!seen.contains("secret of the host"), "a mount leads outside of the directory");
            sandbox.run("touch /mnt/user-data/workspace/made-inside 2>/dev/null; true");
            aio::keyed_client(server.address())
                .delete(&format!("/api/sandboxes/swapped-{round}"))
                .expect("the server answers");
        }
        done.store(true, Ordering::Relaxed);
        swapping.join().expect("swapping does not panic")
    });
    testkit::print_note(&format!("{swaps} swaps: {made} sandboxes were made, {refused} refused"));
    assert!(swaps > ROUNDS, "the links were not swapped");
    assert_eq!(tree(&outside), before, "something was created outside of the directory");
}

/// Every path below a directory.
fn tree(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        found.push(entry.path().display().to_string());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(tree(&entry.path()));
        }
    }
    found.sort();
    found
}
