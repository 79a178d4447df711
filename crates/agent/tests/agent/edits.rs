//! Edits of text files, and taking them back.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use wire::file_edits::{EditReport, TextEdit, TextOccurrence, UndoOutcome, UndoPolicy, UndoReport};
use wire::files::{FileAttributes, FileOperation, FileRequest};
use wire::frame::MAX_PAYLOAD;
use wire::process::UserIdentity;
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame};

use crate::client::TestConnection;
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

/// The longest content that these tests ask for.
const MAX_CONTENT: u64 = 1 << 20;

type Contents = (Option<String>, Option<String>);

fn replace(old: &str, occurrence: TextOccurrence) -> TextEdit {
    TextEdit::Replace { old: old.to_owned(), occurrence, adapt_line_ends: false }
}

fn insert(after_line: u64) -> TextEdit {
    TextEdit::Insert { after_line, adapt_line_ends: false }
}

fn create() -> TextEdit {
    TextEdit::Create { attributes: FileAttributes::default() }
}

fn user(uid: u32) -> UserIdentity {
    UserIdentity::Ids { uid, gid: uid }
}

impl TestAgent {
    fn file_as(&self, identity: UserIdentity, operation: FileOperation) -> TestConnection {
        self.send_request(AgentRequest::File(FileRequest { identity, isolated_session: None, operation }))
    }

    fn edit_as(&self, identity: UserIdentity, path: &str, edit: TextEdit, text: &str) -> AgentReply {
        let operation = FileOperation::Edit { path: path.to_owned(), edit, max_content: 0 };
        send_text(&mut self.file_as(identity, operation), text)
    }

    fn edit(&self, path: &str, edit: TextEdit, text: &str) -> EditReport {
        match self.edit_as(UserIdentity::Default, path, edit, text) {
            AgentReply::Edited(report) => report,
            other => panic!("expected Edited, got {other:?}"),
        }
    }

    fn edit_fault(&self, path: &str, edit: TextEdit) -> Fault {
        match self.edit_as(UserIdentity::Default, path, edit, "x") {
            AgentReply::Fault(fault) => fault,
            other => panic!("expected a fault, got {other:?}"),
        }
    }

    fn undo_as(&self, identity: UserIdentity, path: &str, if_changed: UndoPolicy) -> (UndoReport, Contents) {
        let operation =
            FileOperation::UndoEdit { path: path.to_owned(), if_changed, max_content: MAX_CONTENT };
        let mut talk = self.file_as(identity, operation);
        match talk.reply() {
            AgentReply::Undone(report) => {
                let contents = read_contents(&mut talk, report.contents);
                (report, contents)
            }
            other => panic!("expected Undone, got {other:?}"),
        }
    }

    fn undo(&self, path: &str) -> UndoReport {
        self.undo_as(UserIdentity::Default, path, UndoPolicy::Overwrite).0
    }

    fn text(&self, path: &str) -> String {
        std::fs::read_to_string(self.home().join(path)).unwrap()
    }

    fn put(&self, path: &str, text: &str) {
        std::fs::write(self.home().join(path), text).unwrap();
    }
}

fn send_text(talk: &mut TestConnection, text: &str) -> AgentReply {
    for piece in text.as_bytes().chunks(MAX_PAYLOAD) {
        talk.send(&Frame::Data(piece.to_vec().into()));
    }
    talk.send(&Frame::End);
    talk.reply()
}

fn read_contents(talk: &mut TestConnection, lengths: wire::file_edits::ContentLengths) -> Contents {
    let mut bytes = Vec::new();
    loop {
        match talk.frame().expect("the contents have an end") {
            Frame::Data(piece) => bytes.extend(piece),
            Frame::End => break,
            other => panic!("unexpected {other:?}"),
        }
    }
    let size = |length: Option<u64>| usize::try_from(length.unwrap_or(0)).unwrap();
    let new = bytes.split_off(size(lengths.old));
    assert_eq!(new.len(), size(lengths.new));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (lengths.old.map(|_| text(bytes)), lengths.new.map(|_| text(new)))
}

#[test]
fn edit_changes_only_its_part_of_the_file() {
    with_both_tree_modes(|agent| {
        let path = agent.home().join("file");
        agent.put("file", "\u{feff}one\r\ntwo\r\nend");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o4751)).unwrap();
        if testkit::is_root() {
            std::os::unix::fs::chown(&path, Some(1000), Some(7)).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o4751)).unwrap();
        }
        let before = path.metadata().unwrap();
        let report = agent.edit("file", replace("two", TextOccurrence::Only), "2");
        assert_eq!((report.changed, report.matches, report.match_lines), (true, 1, vec![2]));
        assert!(report.undoable);
        assert_eq!(agent.text("file"), "\u{feff}one\r\n2\r\nend");
        let after = path.metadata().unwrap();
        assert_eq!(
            (after.mode(), after.uid(), after.gid()),
            (before.mode(), before.uid(), before.gid()),
            "mode and owner stay"
        );
        assert_eq!(agent.edit("file", insert(0), "zero\r\n").lines, 3);
        agent.edit("file", insert(4), "last");
        assert_eq!(agent.text("file"), "\u{feff}zero\r\none\r\n2\r\nend\r\nlast");
        let names: Vec<_> = std::fs::read_dir(agent.home()).unwrap().collect();
        assert_eq!(names.len(), 1, "no draft is left");
    });
}

#[test]
fn text_that_is_not_unique_or_missing_is_counted() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.put("file", "a\nb\na\n");
    let inode = || agent.home().join("file").metadata().unwrap().ino();
    let before = inode();
    let report = agent.edit("file", replace("a", TextOccurrence::Only), "x");
    assert_eq!((report.changed, report.matches, report.match_lines), (false, 2, vec![1, 3]));
    assert!(!report.undoable);
    for occurrence in [TextOccurrence::Only, TextOccurrence::First, TextOccurrence::Last, TextOccurrence::All]
    {
        let report = agent.edit("file", replace("c", occurrence), "x");
        assert_eq!((report.changed, report.matches, report.lines), (false, 0, 3));
    }
    let report = agent.edit("file", insert(4), "x");
    assert_eq!((report.changed, report.lines), (false, 3), "the line does not exist");
    assert_eq!((inode(), agent.text("file").as_str()), (before, "a\nb\na\n"));
    assert_eq!(agent.undo("file").outcome, UndoOutcome::NoHistory, "nothing was edited");
    agent.edit("file", replace("a", TextOccurrence::Last), "x");
    agent.edit("file", replace("\n", TextOccurrence::All), "");
    assert_eq!(agent.text("file"), "abx");
}

#[test]
fn only_a_new_file_is_created() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let attributes = FileAttributes { new_mode: Some(0o640), ..FileAttributes::default() };
    let report = agent.edit("deep/er/file", TextEdit::Create { attributes }, "text");
    assert!(report.changed && report.undoable);
    let path = agent.home().join("deep/er/file");
    assert_eq!(
        (agent.text("deep/er/file").as_str(), path.metadata().unwrap().mode() & 0o7777),
        ("text", 0o640)
    );
    symlink("nowhere", agent.home().join("dangling")).unwrap();
    for name in ["deep/er/file", "deep/er", "dangling"] {
        let fault = agent.edit_fault(name, create());
        assert_eq!((fault.kind, fault.errno), (FaultKind::AlreadyExists, Some(17)), "{name}");
        assert_eq!(fault.subject, agent.home().join(name).to_str().unwrap());
    }
    assert!(!agent.home().join("nowhere").exists());
    let report = agent.undo("deep/er/file");
    assert_eq!((report.outcome, report.changed_since), (UndoOutcome::Removed, false));
    assert!(!path.exists() && path.parent().unwrap().exists());
    assert_eq!(agent.undo("deep/er/file").outcome, UndoOutcome::NoHistory);
}

#[test]
fn edits_are_taken_back_step_by_step() {
    with_both_tree_modes(|agent| {
        agent.edit("file", create(), "one\r\n");
        agent.edit("file", insert(1), "two");
        agent.edit("other", create(), "other");
        // A path through a link leads to the same file and the same history.
        symlink("file", agent.home().join("link")).unwrap();
        agent.edit("link", replace("one", TextOccurrence::Only), "1");
        assert_eq!(agent.text("file"), "1\r\ntwo\r\n");
        let (report, contents) = agent.undo_as(UserIdentity::Default, "file", UndoPolicy::Refuse);
        assert_eq!((report.outcome, report.steps_left), (UndoOutcome::Restored, 2));
        assert_eq!(contents, (Some("1\r\ntwo\r\n".to_owned()), Some("one\r\ntwo\r\n".to_owned())));
        assert_eq!(agent.text("file"), "one\r\ntwo\r\n");
        assert_eq!(agent.undo("./file").steps_left, 1);
        assert_eq!(agent.text("file"), "one\r\n");
        assert!(agent.home().join("link").symlink_metadata().unwrap().is_symlink());
        assert_eq!(agent.undo("file").outcome, UndoOutcome::Removed);
        assert!(!agent.home().join("file").exists());
        assert_eq!(agent.undo("file").outcome, UndoOutcome::NoHistory);
        assert_eq!(agent.text("other"), "other");
    });
}

#[test]
fn later_changes_are_refused_or_overwritten() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let path = agent.home().join("file");
    agent.put("file", "old");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
    let edit = || assert!(agent.edit("file", replace("old", TextOccurrence::Only), "new").undoable);
    edit();
    agent.put("file", "own");
    let (report, contents) = agent.undo_as(UserIdentity::Default, "file", UndoPolicy::Refuse);
    assert_eq!((report.outcome, report.changed_since), (UndoOutcome::ChangedSince, true));
    assert_eq!((report.steps_left, contents), (1, (None, None)));
    assert_eq!(agent.text("file"), "own");
    let report = agent.undo("file");
    assert_eq!((report.outcome, report.changed_since), (UndoOutcome::Restored, true));
    assert_eq!(agent.text("file"), "old");
    edit();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(agent.undo("file").outcome, UndoOutcome::Restored);
    assert_eq!((agent.text("file").as_str(), path.metadata().unwrap().mode() & 0o7777), ("old", 0o640));
    edit();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let operation = FileOperation::UndoEdit {
        path: "file".to_owned(),
        if_changed: UndoPolicy::Overwrite,
        max_content: 0,
    };
    let AgentReply::Fault(fault) = agent.file(operation).reply() else {
        panic!("a directory is not replaced")
    };
    assert_eq!(fault.kind, FaultKind::IsADirectory);
}

/// The history must not carry a content to another place than where it was edited.
#[test]
fn undo_does_not_follow_a_link_that_appeared_after_the_edit() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    for name in ["mine", "theirs"] {
        std::fs::create_dir(home.join(name)).unwrap();
        std::fs::write(home.join(name).join("file"), name).unwrap();
    }
    agent.edit("mine/file", replace("mine", TextOccurrence::Only), "edited");
    agent.edit("mine/new", create(), "");
    std::fs::write(home.join("theirs/new"), "theirs").unwrap();
    std::fs::rename(home.join("mine"), home.join("aside")).unwrap();
    symlink("theirs", home.join("mine")).unwrap();
    for name in ["file", "new"] {
        assert_eq!(agent.undo(&format!("mine/{name}")).outcome, UndoOutcome::NoHistory, "{name}");
        assert_eq!(agent.text(&format!("theirs/{name}")), "theirs");
    }
    // The file itself may have become a link, too.
    std::fs::remove_file(home.join("mine")).unwrap();
    std::fs::rename(home.join("aside"), home.join("mine")).unwrap();
    std::fs::remove_file(home.join("mine/file")).unwrap();
    symlink("../theirs/file", home.join("mine/file")).unwrap();
    assert_eq!(agent.undo("mine/file").outcome, UndoOutcome::NoHistory);
    assert_eq!(agent.text("theirs/file"), "theirs");
}

/// A user who may change the directory has put a file of their own in the place of a private one.
#[test]
fn private_content_is_not_restored_into_a_file_of_another_user() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let file = agent.home().join("file");
    agent.put("file", "secret");
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let path = file.to_str().unwrap();
    agent.edit_as(UserIdentity::Default, path, replace("secret", TextOccurrence::Only), "other");
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, "theirs").unwrap();
    std::os::unix::fs::chown(&file, Some(1000), Some(1000)).unwrap();
    let (report, _) = agent.undo_as(UserIdentity::Default, path, UndoPolicy::Overwrite);
    assert_eq!(report.outcome, UndoOutcome::ChangedSince);
    assert_eq!(agent.text("file"), "theirs");
}

#[test]
fn each_user_undoes_only_own_edits() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let path = agent.home().join("shared/file").to_str().unwrap().to_owned();
    let reachable = [agent.home(), agent.home().join("shared")];
    std::fs::create_dir(&reachable[1]).unwrap();
    for directory in
        agent.home().ancestors().take_while(|path| *path != Path::new("/tmp")).chain([&*reachable[1]])
    {
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).unwrap();
    }
    agent.put("shared/file", "secret");
    let edited =
        agent.edit_as(UserIdentity::Default, &path, replace("secret", TextOccurrence::Only), "public");
    assert!(matches!(edited, AgentReply::Edited(_)));
    let (report, contents) = agent.undo_as(user(1000), &path, UndoPolicy::Overwrite);
    assert_eq!((report.outcome, contents), (UndoOutcome::NoHistory, (None, None)));
    let edited = agent.edit_as(user(1000), &path, replace("public", TextOccurrence::Only), "theirs");
    assert!(matches!(edited, AgentReply::Edited(EditReport { undoable: true, .. })), "{edited:?}");
    assert_eq!(agent.undo_as(user(1000), &path, UndoPolicy::Refuse).0.outcome, UndoOutcome::Restored);
    assert_eq!(
        agent.undo_as(UserIdentity::Default, &path, UndoPolicy::Refuse).0.outcome,
        UndoOutcome::Restored
    );
    assert_eq!(agent.text("shared/file"), "secret");
    // A user who may not write the file cannot undo it either.
    agent.edit_as(user(1000), &path, replace("secret", TextOccurrence::Only), "x");
    for (name, mode) in [("shared", 0o755), ("shared/file", 0o600)] {
        std::fs::set_permissions(agent.home().join(name), PermissionsExt::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(agent.home().join(name), Some(0), Some(0)).unwrap();
    }
    let operation =
        FileOperation::UndoEdit { path, if_changed: UndoPolicy::Overwrite, max_content: MAX_CONTENT };
    let AgentReply::Fault(fault) = agent.file_as(user(1000), operation).reply() else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::Permission);
    assert_eq!(agent.text("shared/file"), "x");
}

#[test]
fn concurrent_edits_lose_nothing() {
    with_both_tree_modes(|agent| {
        agent.put("file", "begin\n");
        std::thread::scope(|scope| {
            for writer in 0..8 {
                scope.spawn(move || {
                    for number in 0..5 {
                        assert!(agent.edit("file", insert(1), &format!("{writer}-{number}")).changed);
                    }
                });
            }
        });
        let text = agent.text("file");
        for line in (0..8).flat_map(|writer| (0..5).map(move |number| format!("{writer}-{number}"))) {
            assert!(text.lines().any(|found| found == line), "{line} is lost");
        }
        // The first edits are no longer kept; every kept one can be undone.
        let left = agent.undo("file").steps_left;
        assert_eq!(left, 31);
        for left in (0..left).rev() {
            let (report, _) = agent.undo_as(UserIdentity::Default, "file", UndoPolicy::Refuse);
            assert_eq!((report.outcome, report.steps_left), (UndoOutcome::Restored, left));
        }
        assert_eq!(agent.text("file").lines().count(), 41 - 32);
    });
}

#[test]
fn contents_are_returned_up_to_the_requested_length() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.put("file", "a");
    let edit = |old: &str, new: &str, max_content| {
        let edit = replace(old, TextOccurrence::Only);
        let mut talk = agent.file(FileOperation::Edit { path: "file".to_owned(), edit, max_content });
        let AgentReply::Edited(report) = send_text(&mut talk, new) else { panic!("Edited") };
        read_contents(&mut talk, report.contents)
    };
    let long = "b".repeat(3 << 20);
    assert_eq!(edit("a", &long, MAX_CONTENT), (Some("a".to_owned()), None));
    assert_eq!(edit(&long[..9], "c", u64::MAX).0, None, "nothing was changed");
    assert_eq!(agent.undo("file").outcome, UndoOutcome::Restored);
    assert_eq!(edit("a", &long, u64::MAX), (Some("a".to_owned()), Some(long.clone())));
    agent.put("file", "a");
    assert_eq!(edit("a", "", MAX_CONTENT), (Some("a".to_owned()), Some(String::new())));
    agent.put("file", "a");
    assert_eq!(edit("a", "b", 0), (None, None));
}

#[test]
fn content_that_is_too_long_is_edited_but_not_kept() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.put("file", "x");
    assert!(agent.edit("file", insert(0), "first").undoable);
    agent.put("file", &format!("x{}", "y".repeat(9 << 20)));
    let report = agent.edit("file", replace("x", TextOccurrence::Only), "z");
    assert_eq!((report.changed, report.undoable), (true, false));
    assert_eq!(agent.undo("file").outcome, UndoOutcome::NoHistory);
}

#[test]
fn edit_succeeds_though_the_history_has_no_space() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_small_journals(TreeMode::Runners, "size=256k");
    agent.put("file", &format!("x{}", "y".repeat(300_000)));
    let report = agent.edit("file", replace("x", TextOccurrence::Only), "short");
    assert_eq!((report.changed, report.undoable), (true, false));
    assert!(agent.text("file").starts_with("shorty"));
    assert_eq!(agent.undo("file").outcome, UndoOutcome::NoHistory);
    agent.put("file", "x");
    assert!(agent.edit("file", replace("x", TextOccurrence::Only), "z").undoable, "a short one has space");
    assert_eq!(agent.undo("file").outcome, UndoOutcome::Restored);
}

#[test]
fn history_leaves_space_for_the_edit_on_the_same_disk() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_small_journals(TreeMode::Runners, "size=1m");
    let path = agent.home().with_file_name("journals").join("a file");
    std::fs::write(&path, format!("x{}", "y".repeat(400_000))).unwrap();
    let report = agent.edit(path.to_str().unwrap(), replace("x", TextOccurrence::Only), "z");
    assert_eq!((report.changed, report.undoable), (true, false));
    std::fs::write(&path, format!("x{}", "y".repeat(600_000))).unwrap();
    let fault = agent.edit_fault(path.to_str().unwrap(), replace("xy", TextOccurrence::Only));
    assert_eq!(fault.kind, FaultKind::NoSpace);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 600_001, "the old file stays");
}

/// A file whose directory may not be changed is written in place.
#[test]
fn file_in_a_directory_that_may_not_be_changed_is_edited_and_restored() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Runners);
    for directory in agent.home().ancestors().take_while(|path| *path != Path::new("/tmp")) {
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
    }
    agent.put("file", "old\r\n");
    let path = agent.home().join("file");
    std::os::unix::fs::chown(&path, Some(1000), Some(1000)).unwrap();
    let inode = path.metadata().unwrap().ino();
    let name = path.to_str().unwrap();
    let edited = agent.edit_as(user(1000), name, replace("old", TextOccurrence::Only), "newer");
    assert!(matches!(edited, AgentReply::Edited(EditReport { undoable: true, .. })), "{edited:?}");
    assert_eq!(agent.text("file"), "newer\r\n");
    let (report, _) = agent.undo_as(user(1000), name, UndoPolicy::Refuse);
    assert_eq!((report.outcome, agent.text("file").as_str()), (UndoOutcome::Restored, "old\r\n"));
    assert_eq!(path.metadata().unwrap().ino(), inode);
    let created = agent.edit_as(user(1000), agent.home().join("new").to_str().unwrap(), create(), "");
    assert!(matches!(created, AgentReply::Fault(fault) if fault.kind == FaultKind::Permission));
}

#[test]
fn only_text_files_are_edited() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let fifo = agent.home().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::fs::create_dir(agent.home().join("directory")).unwrap();
    for (path, kind) in [
        ("fifo", FaultKind::Invalid),
        ("/dev/zero", FaultKind::Invalid),
        ("directory", FaultKind::IsADirectory),
        ("/", FaultKind::IsADirectory),
        ("missing", FaultKind::NotFound),
        ("missing/file", FaultKind::NotFound),
        ("", FaultKind::Invalid),
    ] {
        let fault = agent.edit_fault(path, replace("a", TextOccurrence::All));
        assert_eq!(fault.kind, kind, "{path}: {fault:?}");
    }
    let fault = agent.edit_fault("missing", insert(0));
    assert_eq!(fault.subject, agent.home().join("missing").to_str().unwrap());
    agent.put("file", "a");
    assert_eq!(agent.edit_fault("file", replace("", TextOccurrence::All)).kind, FaultKind::Invalid);
    let sparse = std::fs::File::create(agent.home().join("large")).unwrap();
    sparse.set_len(65 << 20).unwrap();
    assert_eq!(agent.edit_fault("large", insert(0)).kind, FaultKind::Invalid);
}

#[test]
fn edit_without_an_end_changes_nothing() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.put("file", "a");
    let edit = replace("a", TextOccurrence::All);
    let mut talk = agent.file(FileOperation::Edit { path: "file".to_owned(), edit, max_content: 0 });
    talk.send(&Frame::Data(b"half"[..].into()));
    talk.stream().shutdown(std::net::Shutdown::Write).unwrap();
    // The worker notices the end and closes the connection.
    while talk.frame().is_some() {}
    assert_eq!(agent.text("file"), "a");
    assert_eq!(agent.undo("file").outcome, UndoOutcome::NoHistory);
}
