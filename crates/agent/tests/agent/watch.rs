//! Watching files.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use wire::files::{FileChange, FileKind, FileOperation, WatchEvent};
use wire::{AgentReply, FaultKind};

use crate::client::TestConnection;
use crate::harness::{TestAgent, TreeMode};

fn watch(agent: &TestAgent, path: &str, recursive: bool) -> TestConnection {
    let mut talk = agent.file(FileOperation::Watch { path: path.to_owned(), recursive, details: false });
    assert_eq!(talk.reply(), AgentReply::Ok);
    talk
}

fn next(talk: &mut TestConnection, agent: &TestAgent) -> (String, FileChange) {
    match talk.reply() {
        AgentReply::Watched(event) => {
            let home = agent.home().to_str().unwrap().to_owned();
            (event.path[home.len()..].to_owned(), event.change)
        }
        other => panic!("expected an event, got {other:?}"),
    }
}

#[test]
fn changes_are_reported_in_order() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    let mut talk = watch(&agent, home.to_str().unwrap(), false);
    std::fs::write(home.join("file"), "x").unwrap();
    std::fs::set_permissions(home.join("file"), PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::rename(home.join("file"), home.join("other")).unwrap();
    std::fs::remove_file(home.join("other")).unwrap();
    for expected in [
        ("/file", FileChange::Created),
        ("/file", FileChange::Written),
        ("/file", FileChange::Attributes),
        ("/file", FileChange::Renamed),
        ("/other", FileChange::Created),
        ("/other", FileChange::Removed),
    ] {
        let (path, change) = next(&mut talk, &agent);
        assert_eq!((path.as_str(), change), expected);
    }
}

#[test]
fn recursive_watch_follows_new_directories() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    std::fs::create_dir_all(home.join("old/deep")).unwrap();
    let mut talk = watch(&agent, home.to_str().unwrap(), true);
    std::fs::write(home.join("old/deep/file"), "").unwrap();
    assert_eq!(next(&mut talk, &agent), ("/old/deep/file".to_owned(), FileChange::Created));
    std::fs::create_dir_all(home.join("new/sub")).unwrap();
    assert_eq!(next(&mut talk, &agent), ("/new".to_owned(), FileChange::Created));
    assert_eq!(next(&mut talk, &agent), ("/new/sub".to_owned(), FileChange::Created));
    std::fs::write(home.join("new/sub/late"), "").unwrap();
    assert_eq!(next(&mut talk, &agent), ("/new/sub/late".to_owned(), FileChange::Created));
}

/// Watches the home directory with everything below it and with details.
fn watch_details(agent: &TestAgent) -> TestConnection {
    let path = agent.home().to_str().unwrap().to_owned();
    let mut talk = agent.file(FileOperation::Watch { path, recursive: true, details: true });
    assert_eq!(talk.reply(), AgentReply::Ok);
    talk
}

fn next_event(talk: &mut TestConnection) -> WatchEvent {
    match talk.reply() {
        AgentReply::Watched(event) => event,
        other => panic!("expected an event, got {other:?}"),
    }
}

#[test]
fn rename_is_one_event_with_both_paths() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    let path = |name: &str| home.join(name).to_str().unwrap().to_owned();
    std::fs::create_dir_all(home.join("a/deep")).unwrap();
    std::fs::create_dir(home.join("b")).unwrap();
    std::fs::write(home.join("a/file"), "12345").unwrap();
    let mut talk = watch_details(&agent);
    std::fs::rename(home.join("a/file"), home.join("b/other")).unwrap();
    let event = next_event(&mut talk);
    let metadata = home.join("b/other").metadata().unwrap();
    assert_eq!(
        (event.path, event.new_path, event.change),
        (path("a/file"), Some(path("b/other")), FileChange::Renamed)
    );
    assert_eq!((event.kind, event.size, event.sequence), (Some(FileKind::File), Some(5), Some(1)));
    assert_eq!(event.inode, Some(metadata.ino()));
    assert_eq!(event.modified_ms, Some(metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000));

    // The directories below a renamed one are known by their new paths.
    std::fs::rename(home.join("a"), home.join("c")).unwrap();
    let event = next_event(&mut talk);
    assert_eq!(
        (event.path, event.new_path, event.kind),
        (path("a"), Some(path("c")), Some(FileKind::Directory))
    );
    std::fs::write(home.join("c/deep/new"), "").unwrap();
    let event = next_event(&mut talk);
    assert_eq!(
        (event.path, event.change, event.sequence),
        (path("c/deep/new"), FileChange::Created, Some(3))
    );
}

#[test]
fn file_that_leaves_or_enters_the_tree_is_not_paired() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    let outside = tempfile::tempdir_in("/tmp").unwrap();
    let path = |name: &str| home.join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(home.join("a")).unwrap();
    let mut talk = watch_details(&agent);
    std::fs::rename(home.join("a"), outside.path().join("a")).unwrap();
    let event = next_event(&mut talk);
    assert_eq!((event.path, event.new_path, event.change), (path("a"), None, FileChange::Renamed));
    assert_eq!((event.kind, event.inode), (Some(FileKind::Directory), None));
    // A directory outside is no longer watched.
    std::fs::write(outside.path().join("a/unseen"), "").unwrap();
    std::fs::rename(outside.path().join("a"), home.join("b")).unwrap();
    let event = next_event(&mut talk);
    assert_eq!((event.path, event.new_path, event.change), (path("b"), None, FileChange::Created));
    let event = next_event(&mut talk);
    assert_eq!((event.path, event.change), (path("b/unseen"), FileChange::Created));
    std::fs::remove_dir_all(home.join("b")).unwrap();
    for name in ["b/unseen", "b"] {
        let event = next_event(&mut talk);
        assert_eq!((event.path, event.change, event.size), (path(name), FileChange::Removed, None), "{name}");
    }
}

#[test]
fn missing_path_cannot_be_watched() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let mut talk =
        agent.file(FileOperation::Watch { path: "/no/such".to_owned(), recursive: true, details: true });
    let AgentReply::Fault(fault) = talk.reply() else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::NotFound);
}
