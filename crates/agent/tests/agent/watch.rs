//! Watching files.

use std::os::unix::fs::PermissionsExt;

use wire::files::{FileChange, FileOperation};
use wire::{AgentReply, FaultKind};

use crate::client::TestConnection;
use crate::harness::{TestAgent, TreeMode};

fn watch(agent: &TestAgent, path: &str, recursive: bool) -> TestConnection {
    let mut talk = agent.file(FileOperation::Watch { path: path.to_owned(), recursive });
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

#[test]
fn missing_path_cannot_be_watched() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let mut talk = agent.file(FileOperation::Watch { path: "/no/such".to_owned(), recursive: true });
    let AgentReply::Fault(fault) = talk.reply() else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::NotFound);
}
