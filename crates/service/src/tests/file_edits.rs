//! Edits and watches of files, with a real agent without a jail.

use bytes::Bytes;
use domain::UserIdentity;
use testkit::fake_backend::FakeBackend;
use testkit::unjailed_agent::example_program;

use super::TestBench;
use crate::clock::Clock;
use crate::{
    ErrorKind, FileAttributes, FileChange, FileFault, FileKind, LineEnds, SandboxRef, TextEdit,
    TextOccurrence, UndoOutcome, UndoPolicy,
};

async fn bench_with_agents() -> TestBench {
    let backend = FakeBackend::with_agents(example_program("service-bare-agent"));
    TestBench::with(backend, tempfile::tempdir().unwrap(), Clock::from_host()).await
}

fn create() -> TextEdit {
    TextEdit::Create { attributes: FileAttributes::default(), new_file_mode: Some(0o640) }
}

fn replace(old: &str) -> TextEdit {
    let (old, line_ends) = (old.to_owned(), LineEnds::AsInFile);
    TextEdit::Replace { old, occurrence: TextOccurrence::Only, line_ends }
}

async fn edit(sandbox: &SandboxRef, edit: TextEdit, text: &'static str) -> crate::EditedFile {
    let text = Bytes::from_static(text.as_bytes());
    sandbox.files().edit_file(&UserIdentity::Default, "file", edit, text, 100).await.unwrap()
}

async fn undo(sandbox: &SandboxRef) -> crate::UndoneEdit {
    sandbox.files().undo_edit(&UserIdentity::Default, "file", UndoPolicy::Refuse, 100).await.unwrap()
}

#[tokio::test]
async fn edits_are_undone_after_a_restart_of_the_server() {
    let bench = bench_with_agents().await;
    let id = bench.create().await.id;
    let file = bench.backend.home(&id).join("file");
    let sandbox = bench.sandbox(&id);
    let created = edit(&sandbox, create(), "one\r\ntwo\r\n").await;
    assert!(created.changed && created.undoable);
    assert_eq!((created.contents.old, created.contents.new.unwrap().len()), (None, 10));
    let missed = edit(&sandbox, replace("three"), "3").await;
    assert_eq!((missed.changed, missed.matches, missed.lines), (false, 0, 2));
    let changed = edit(&sandbox, replace("one\ntwo"), "1\n2\n3").await;
    assert_eq!((changed.changed, changed.matches, changed.match_lines), (true, 1, vec![1]));
    assert_eq!(std::fs::read(&file).unwrap(), b"1\r\n2\r\n3\r\n");
    let exists = sandbox.files().edit_file(&UserIdentity::Default, "file", create(), Bytes::new(), 0).await;
    assert_eq!(exists.unwrap_err().kind(), ErrorKind::File(FileFault::AlreadyExists));
    drop(sandbox);
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    let sandbox = bench.sandbox(&id);
    let undone = undo(&sandbox).await;
    assert_eq!((undone.outcome, undone.steps_left), (UndoOutcome::Restored, 1));
    assert_eq!(undone.contents.old.unwrap(), "1\r\n2\r\n3\r\n");
    assert_eq!(undone.contents.new.unwrap(), "one\r\ntwo\r\n");
    std::fs::write(&file, "changed").unwrap();
    assert_eq!(undo(&sandbox).await.outcome, UndoOutcome::ChangedSince);
    std::fs::write(&file, "one\r\ntwo\r\n").unwrap();
    assert_eq!(undo(&sandbox).await.outcome, UndoOutcome::Removed);
    assert!(!file.exists());
    assert_eq!(undo(&sandbox).await.outcome, UndoOutcome::NoHistory);
}

#[tokio::test]
async fn rename_is_one_event_of_a_watch() {
    let bench = bench_with_agents().await;
    let id = bench.create().await.id;
    let home = bench.backend.home(&id);
    std::fs::write(home.join("a"), "12345").unwrap();
    let sandbox = bench.sandbox(&id);
    let mut watch = sandbox.files().watch_files(&UserIdentity::Default, ".", true).await.unwrap();
    std::fs::rename(home.join("a"), home.join("b")).unwrap();
    let event = watch.next().await.unwrap().unwrap();
    assert_eq!((event.sequence, event.change, event.kind), (1, FileChange::Renamed, Some(FileKind::File)));
    assert!(event.path.ends_with("/a") && event.new_path.unwrap().ends_with("/b"));
    let metadata = home.join("b").metadata().unwrap();
    assert_eq!(event.size, Some(5));
    assert_eq!(event.inode, Some(std::os::unix::fs::MetadataExt::ino(&metadata)));
    let elapsed = metadata.modified().unwrap().duration_since(event.modified.unwrap()).unwrap();
    assert!(elapsed.as_millis() == 0, "{elapsed:?}");
}
