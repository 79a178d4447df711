//! File operations.

use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use wire::files::{FileAttributes, FileEdit, FileInfo, FileKind, FileOperation, FileRequest};
use wire::process::UserIdentity;
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame};

use crate::client::TestConnection;
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

/// Names that break code which treats them as text, words or options.
const ODD_NAMES: [&str; 8] =
    ["with space", "-rf", "new\nline", "quote'\"`$x", "ünï→文", "*?[a]", ".hidden", "back\\slash"];

impl TestAgent {
    pub(crate) fn file(&self, operation: FileOperation) -> TestConnection {
        self.send_request(AgentRequest::File(FileRequest {
            identity: UserIdentity::Default,
            isolated_session: None,
            operation,
        }))
    }

    fn file_reply(&self, operation: FileOperation) -> AgentReply {
        self.file(operation).reply()
    }

    fn file_fault(&self, operation: FileOperation) -> Fault {
        match self.file_reply(operation) {
            AgentReply::Fault(fault) => fault,
            other => panic!("expected a fault, got {other:?}"),
        }
    }

    fn write(&self, path: &str, pieces: &[&[u8]]) -> AgentReply {
        let attributes = FileAttributes::default();
        self.file(FileOperation::Write { path: path.to_owned(), attributes }).upload(pieces)
    }

    fn read(&self, path: &str, offset: u64, length: Option<u64>) -> (u64, Vec<u8>) {
        let mut talk = self.file(FileOperation::Read { path: path.to_owned(), offset, length });
        match talk.reply() {
            AgentReply::Reading { size } => (size, talk.download()),
            other => panic!("expected Reading, got {other:?}"),
        }
    }

    fn entries(&self, operation: FileOperation) -> Vec<FileInfo> {
        let mut talk = self.file(operation);
        let mut entries = Vec::new();
        loop {
            match talk.frame().expect("a listing has an end") {
                Frame::End => return entries,
                page => match page.parse_message().unwrap() {
                    AgentReply::Entries(page) => entries.extend(page),
                    other => panic!("expected Entries, got {other:?}"),
                },
            }
        }
    }

    fn stat(&self, path: &str) -> FileInfo {
        match self.file_reply(FileOperation::Stat { paths: vec![path.to_owned()] }) {
            AgentReply::Info(mut infos) => infos.remove(0),
            other => panic!("expected Info, got {other:?}"),
        }
    }
}

impl TestConnection {
    fn upload(&mut self, pieces: &[&[u8]]) -> AgentReply {
        for piece in pieces {
            self.send(&Frame::Data(piece.to_vec().into()));
        }
        self.send(&Frame::End);
        self.reply()
    }

    pub(crate) fn download(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        loop {
            match self.frame().expect("a download has an end") {
                Frame::Data(piece) => bytes.extend(piece),
                Frame::End => return bytes,
                other => panic!("unexpected {other:?}"),
            }
        }
    }
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn written_file_is_read_back_under_any_name() {
    with_both_tree_modes(|agent| {
        let bytes: Vec<u8> = (0..=255).cycle().take(1_000_003).collect();
        let (first, second) = bytes.split_at(123_456);
        for name in ODD_NAMES {
            let path = format!("deep/{name}/{name}");
            assert_eq!(agent.write(&path, &[first, second]), AgentReply::Ok, "{name}");
            assert_eq!(agent.read(&path, 0, None), (bytes.len() as u64, bytes.clone()), "{name}");
            let on_disk = agent.home().join("deep").join(name).join(name);
            assert_eq!(std::fs::metadata(&on_disk).unwrap().mode() & 0o7777, 0o644);
        }
        assert_eq!(names_in(&agent.home().join("deep")), ODD_NAMES.map(str::to_owned).into());
        assert_eq!(agent.write("empty", &[]), AgentReply::Ok);
        assert_eq!(agent.read("empty", 0, None), (0, Vec::new()));
    });
}

#[test]
fn ranges_are_clamped() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.write("digits", &[b"0123456789"]);
    for (offset, length, expected) in [
        (0, Some(3), "012"),
        (4, None, "456789"),
        (4, Some(2), "45"),
        (8, Some(100), "89"),
        (10, None, ""),
        (99, Some(1), ""),
        (0, Some(u64::MAX), "0123456789"),
        (u64::MAX, Some(u64::MAX), ""),
        (3, Some(0), ""),
    ] {
        let (size, bytes) = agent.read("digits", offset, length);
        assert_eq!((size, bytes.as_slice()), (10, expected.as_bytes()), "{offset} {length:?}");
    }
}

#[test]
fn interrupted_write_leaves_the_old_file() {
    with_both_tree_modes(|agent| {
        agent.write("file", &[b"old"]);
        let attributes = FileAttributes::default();
        let mut talk = agent.file(FileOperation::Write { path: "file".to_owned(), attributes });
        talk.send(&Frame::Data(b"half"[..].into()));
        drop(talk);
        // The worker notices, cleans up and ends; then only the old file exists.
        while names_in(&agent.home()).len() > 1 {
            std::thread::yield_now();
        }
        assert_eq!(std::fs::read(agent.home().join("file")).unwrap(), b"old");
    });
}

#[test]
fn attributes_are_the_requested_ones_or_those_of_the_old_file() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let path = agent.home().join("file");
    let attributes = FileAttributes { mode: Some(0o4750), ..FileAttributes::default() };
    let mut talk = agent.file(FileOperation::Write { path: "file".to_owned(), attributes });
    assert_eq!(talk.upload(&[b"x"]), AgentReply::Ok);
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o4750);
    assert_eq!(agent.write("file", &[b"y"]), AgentReply::Ok);
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o4750, "the old mode is kept");
    let nothing =
        FileOperation::SetAttributes { path: "file".to_owned(), attributes: FileAttributes::default() };
    assert_eq!(agent.file_reply(nothing), AgentReply::Ok);
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o4750, "an empty request changes nothing");
    let attributes = FileAttributes { owner: Some("no-such-user".to_owned()), ..FileAttributes::default() };
    let fault = agent.file_fault(FileOperation::Write { path: "file".to_owned(), attributes });
    assert_eq!((fault.kind, fault.operation.as_str()), (FaultKind::NotFound, "find user"));
    if testkit::is_root() {
        let attributes = FileAttributes {
            owner: Some("nobody".to_owned()),
            group: Some("7".to_owned()),
            mode: Some(0o600),
            new_mode: None,
        };
        let set = FileOperation::SetAttributes { path: "file".to_owned(), attributes };
        assert_eq!(agent.file_reply(set), AgentReply::Ok);
        let info = agent.stat("file");
        assert_eq!((info.owner.as_str(), info.gid, info.mode), ("nobody", 7, 0o600));
    } else {
        testkit::skip_test("only root can give a file away; the rest was tested");
    }
    let missing =
        FileOperation::SetAttributes { path: "none".to_owned(), attributes: FileAttributes::default() };
    assert_eq!(agent.file_fault(missing).kind, FaultKind::NotFound);
}

#[test]
fn mode_for_new_files_does_not_change_old_ones() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let mode = |path: &str, mode| {
        let attributes = FileAttributes { mode, new_mode: Some(0o755), ..FileAttributes::default() };
        let mut talk = agent.file(FileOperation::Write { path: path.to_owned(), attributes });
        assert_eq!(talk.upload(&[b"x"]), AgentReply::Ok);
        agent.stat(path).mode
    };
    assert_eq!(mode("new", None), 0o755);
    assert_eq!(mode("other", Some(0o640)), 0o640);
    assert_eq!(mode("other", None), 0o640);
    let attributes = FileAttributes { new_mode: Some(0o755), ..FileAttributes::default() };
    let mut talk = agent.file(FileOperation::Append { path: "log".to_owned(), attributes });
    assert_eq!(talk.upload(&[b"x"]), AgentReply::Ok);
    assert_eq!(agent.stat("log").mode, 0o755);
}

#[test]
fn writing_through_a_link_keeps_the_link() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.write("target", &[b"old"]);
    symlink("target", agent.home().join("link")).unwrap();
    assert_eq!(agent.write("link", &[b"new"]), AgentReply::Ok);
    assert_eq!(agent.stat("link").kind, FileKind::Symlink);
    assert_eq!(std::fs::read(agent.home().join("target")).unwrap(), b"new");
    symlink("loop", agent.home().join("loop")).unwrap();
    let attributes = FileAttributes::default();
    assert_eq!(
        agent.file_fault(FileOperation::Write { path: "loop".to_owned(), attributes }).kind,
        FaultKind::Invalid
    );
}

#[test]
fn pipes_and_devices_are_refused_instead_of_waited_for() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    rustix::fs::mkfifoat(rustix::fs::CWD, agent.home().join("pipe"), rustix::fs::Mode::RWXU).unwrap();
    for path in ["pipe", "/dev/zero", "/dev/null"] {
        let path = path.to_owned();
        let read = FileOperation::Read { path: path.clone(), offset: 0, length: None };
        assert_eq!(agent.file_fault(read).kind, FaultKind::Invalid, "{path}");
        let write = FileOperation::Write { path: path.clone(), attributes: FileAttributes::default() };
        assert_eq!(agent.file_fault(write).kind, FaultKind::Invalid, "{path}");
    }
    assert!(Path::new("/dev/null").metadata().unwrap().file_type().is_char_device());
}

#[test]
fn concurrent_appends_lose_nothing_and_stay_contiguous() {
    with_both_tree_modes(|agent| {
        let lines: Vec<String> = (0..10).map(|number| format!("{number}").repeat(50_000) + "\n").collect();
        std::thread::scope(|scope| {
            for line in &lines {
                scope.spawn(move || {
                    let operation = FileOperation::Append {
                        path: "log".to_owned(),
                        attributes: FileAttributes::default(),
                    };
                    let (one, two) = line.as_bytes().split_at(20_000);
                    assert_eq!(agent.file(operation).upload(&[one, two]), AgentReply::Ok);
                });
            }
        });
        let text = std::fs::read_to_string(agent.home().join("log")).unwrap();
        let mut found: Vec<String> = text.lines().map(|line| format!("{line}\n")).collect();
        found.sort_unstable();
        assert_eq!(found, lines);
    });
}

#[test]
fn interrupted_append_removes_its_bytes() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.write("log", &[b"old\n"]);
    let append = || FileOperation::Append { path: "log".to_owned(), attributes: FileAttributes::default() };
    let mut talk = agent.file(append());
    talk.send(&Frame::Data(b"half"[..].into()));
    drop(talk);
    // The first append holds the lock until it is done, so the next one comes after it.
    assert_eq!(agent.file(append()).upload(&[b"new\n"]), AgentReply::Ok);
    assert_eq!(std::fs::read(agent.home().join("log")).unwrap(), b"old\nnew\n");
}

#[test]
fn stat_returns_file_metadata() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.write("file", &[b"four"]);
    symlink("file", agent.home().join("link")).unwrap();
    let info = agent.stat("file");
    assert_eq!((info.kind, info.size, info.mode, info.owner.as_str()), (FileKind::File, 4, 0o644, "root"));
    assert_eq!(info.path, agent.home().join("file").to_str().unwrap());
    assert!((info.created_ms - info.modified_ms).abs() < 2000, "{info:?}");
    let link = agent.stat("link");
    assert_eq!((link.kind, link.link_target.as_deref()), (FileKind::Symlink, Some("file")));
    assert_eq!(agent.stat("~").kind, FileKind::Directory);
    let both = FileOperation::Stat { paths: vec!["file".to_owned(), "none".to_owned()] };
    let fault = agent.file_fault(both);
    assert_eq!((fault.kind, fault.errno), (FaultKind::NotFound, Some(2)));
    assert!(fault.subject.ends_with("/none"), "{}", fault.subject);
}

#[test]
fn links_are_made_with_their_parents_and_replace_all_but_directories() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let link = |path: &str, target: &str| {
        agent.file_reply(FileOperation::MakeLink { path: path.to_owned(), target: target.to_owned() })
    };
    let points_to = |path: &str| agent.stat(path).link_target.unwrap_or_default();
    assert_eq!(link("new/bin/tool", "../lib/tool.js"), AgentReply::Ok);
    assert_eq!(points_to("new/bin/tool"), "../lib/tool.js");
    assert_eq!(link("new/bin/tool", "/nowhere"), AgentReply::Ok);
    assert_eq!(points_to("new/bin/tool"), "/nowhere");
    agent.write("file", &[b"old"]);
    assert_eq!((link("file", "new"), points_to("file").as_str()), (AgentReply::Ok, "new"));
    for (path, target) in [("new", "file"), ("empty", "")] {
        assert!(matches!(link(path, target), AgentReply::Fault(_)), "{path}");
    }
    assert_eq!(agent.stat("new").kind, FileKind::Directory);
    let left = std::fs::read_dir(agent.home()).unwrap().filter_map(Result::ok);
    let drafts = left.filter(|entry| entry.file_name().to_string_lossy().starts_with(".coracle-"));
    assert_eq!(drafts.count(), 0, "a draft was left behind");
}

#[test]
fn home_in_a_path_is_that_of_the_sandbox() {
    let agent = TestAgent::with_config(TreeMode::Runners, |config| {
        let home = format!("{}/its own", config.default_directory);
        config.env.insert("HOME".to_owned(), home);
    });
    assert_eq!(agent.write("~/file", &[b"x"]), AgentReply::Ok);
    assert_eq!(std::fs::read(agent.home().join("its own/file")).unwrap(), b"x");
    assert_eq!(agent.stat("~").path, agent.home().join("its own").to_str().unwrap());
    let agent = TestAgent::with_config(TreeMode::Runners, |config| {
        config.env.insert("HOME".to_owned(), "part".to_owned());
    });
    assert_eq!(agent.write("~/file", &[]), AgentReply::Ok);
    assert!(agent.home().join("part/file").exists());
}

#[test]
fn listing_is_depth_first_in_the_order_of_names() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    for path in ["b/2/x", "b/1", "a", "c/deep/deeper/file"] {
        agent.write(path, &[]);
    }
    symlink("b", agent.home().join("d")).unwrap();
    let list = |depth| {
        let home = agent.home().to_str().unwrap().to_owned();
        let entries = agent.entries(FileOperation::List { path: home.clone(), depth });
        let shown = entries.iter().map(|entry| entry.path[home.len() + 1..].to_owned());
        shown.collect::<Vec<_>>()
    };
    assert_eq!(list(0), [""; 0]);
    assert_eq!(list(1), ["a", "b", "c", "d"]);
    assert_eq!(list(2), ["a", "b", "b/1", "b/2", "c", "c/deep", "d"]);
    assert_eq!(
        list(9),
        ["a", "b", "b/1", "b/2", "b/2/x", "c", "c/deep", "c/deep/deeper", "c/deep/deeper/file", "d"]
    );
    let list = |path: &str| agent.file_fault(FileOperation::List { path: path.to_owned(), depth: 1 }).kind;
    assert_eq!((list("a"), list("none")), (FaultKind::NotADirectory, FaultKind::NotFound));
}

#[test]
fn search_finds_files_by_their_base_name() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    for number in 0..250 {
        agent.write(&format!("many/{number:03}.txt"), &[]);
    }
    agent.write("src/a.py", &[]);
    agent.write("src/deep/b.py", &[]);
    std::fs::create_dir(agent.home().join("src/dir.py")).unwrap();
    let search = |pattern: &str| {
        let home = agent.home().to_str().unwrap().to_owned();
        let found = agent.entries(FileOperation::Search { path: home.clone(), pattern: pattern.to_owned() });
        found.iter().map(|entry| entry.path[home.len() + 1..].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(search("*.py"), ["src/a.py", "src/deep/b.py"]);
    assert_eq!(search("**/*.py"), ["src/a.py", "src/deep/b.py"]);
    assert_eq!(search("[ab].{py,rs}"), ["src/a.py", "src/deep/b.py"]);
    assert_eq!(search("**").len(), 252);
    assert_eq!(search("none"), [""; 0]);
    let wrong = FileOperation::Search { path: "~".to_owned(), pattern: "[".to_owned() };
    assert_eq!(agent.file_fault(wrong).kind, FaultKind::Invalid);
}

#[test]
fn moving_creates_parents_and_respects_existing_files() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let moved = |from: &str, to: &str, overwrite| {
        agent.file_reply(FileOperation::Move { from: from.to_owned(), to: to.to_owned(), overwrite })
    };
    agent.write("one", &[b"1"]);
    agent.write("two", &[b"2"]);
    assert_eq!(moved("one", "new/place/one", false), AgentReply::Ok);
    let AgentReply::Fault(fault) = moved("two", "new/place/one", false) else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::AlreadyExists);
    assert_eq!(agent.read("new/place/one", 0, None).1, b"1");
    assert_eq!(moved("two", "new/place/one", true), AgentReply::Ok);
    assert_eq!(agent.read("new/place/one", 0, None).1, b"2");
    let AgentReply::Fault(fault) = moved("none", "elsewhere/none", true) else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::NotFound);
    assert!(!agent.home().join("elsewhere").exists());
    assert_eq!(moved("new", "renamed", false), AgentReply::Ok);
    assert_eq!(agent.read("renamed/place/one", 0, None).1, b"2");
}

#[test]
fn moving_to_another_filesystem_copies_everything() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    assert_ne!(other.path().metadata().unwrap().dev(), agent.home().metadata().unwrap().dev());
    agent.write("tree/sub/file", &[b"bytes"]);
    symlink("file", agent.home().join("tree/sub/link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, agent.home().join("tree/pipe"), rustix::fs::Mode::RUSR).unwrap();
    std::fs::set_permissions(agent.home().join("tree/sub"), PermissionsExt::from_mode(0o711)).unwrap();
    let to = other.path().join("a/tree");
    let operation = FileOperation::Move {
        from: "tree".to_owned(),
        to: to.to_str().unwrap().to_owned(),
        overwrite: false,
    };
    assert_eq!(agent.file_reply(operation), AgentReply::Ok);
    assert!(!agent.home().join("tree").exists());
    assert_eq!(std::fs::read(to.join("sub/link")).unwrap(), b"bytes");
    assert_eq!(std::fs::read_link(to.join("sub/link")).unwrap(), Path::new("file"));
    assert_eq!(to.join("sub").metadata().unwrap().mode() & 0o7777, 0o711);
    assert_eq!(names_in(&to), BTreeSet::from(["pipe".to_owned(), "sub".to_owned()]));
    assert_eq!(names_in(to.parent().unwrap()), BTreeSet::from(["tree".to_owned()]));
}

#[test]
fn removing_never_follows_a_link() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.write("precious/file", &[b"x"]);
    agent.write("tree/sub/file", &[b"x"]);
    symlink("../precious", agent.home().join("tree/link")).unwrap();
    symlink("precious", agent.home().join("outer")).unwrap();
    let remove =
        |path: &str, recursive| agent.file_reply(FileOperation::Remove { path: path.to_owned(), recursive });
    let AgentReply::Fault(fault) = remove("tree", false) else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::IsADirectory);
    assert_eq!(remove("tree", true), AgentReply::Ok);
    assert_eq!(remove("outer", true), AgentReply::Ok);
    assert_eq!(remove("tree", true), AgentReply::Ok, "removing a missing path succeeds");
    assert_eq!(remove("precious/file", false), AgentReply::Ok);
    assert_eq!(names_in(&agent.home()), BTreeSet::from(["precious".to_owned()]));
}

#[test]
fn new_directory_has_exactly_the_requested_mode() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let make = |path: &str, mode| {
        let attributes = FileAttributes { mode, ..FileAttributes::default() };
        agent.file_reply(FileOperation::MakeDirectory { path: path.to_owned(), attributes })
    };
    assert_eq!(make("a/b", Some(0o2777)), AgentReply::Ok);
    assert_eq!(
        (agent.stat("a").mode, agent.stat("a/b").mode),
        (0o755, 0o2777),
        "parents get the default mode"
    );
    assert_eq!(make("a/b", Some(0o700)), AgentReply::Ok);
    assert_eq!(agent.stat("a/b").mode, 0o2777, "the existing directory is unchanged");
    assert_eq!(make("odd/deep", Some(0o644)), AgentReply::Ok);
    assert_eq!((agent.stat("odd").mode, agent.stat("odd/deep").mode), (0o755, 0o644));
    agent.write("file", &[]);
    let AgentReply::Fault(fault) = make("file", None) else { panic!("a fault") };
    assert_eq!(fault.kind, FaultKind::AlreadyExists);
}

#[test]
fn text_is_replaced_in_whole_files() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.write("one", &[b"a b a \xff a"]);
    agent.write("two", &[b"nothing"]);
    let edit = |path: &str, old: &str, new: &str| FileEdit {
        path: path.to_owned(),
        old: old.to_owned(),
        new: new.to_owned(),
    };
    let edits = vec![edit("one", "a", "xyz"), edit("two", "a", "b")];
    assert_eq!(agent.file_reply(FileOperation::Replace { edits }), AgentReply::Replaced(vec![3, 0]));
    assert_eq!(agent.read("one", 0, None).1, b"xyz b xyz \xff xyz");
    let edits = vec![edit("one", "", "x")];
    assert_eq!(agent.file_fault(FileOperation::Replace { edits }).kind, FaultKind::Invalid);
    let edits = vec![edit("none", "a", "x")];
    assert_eq!(agent.file_fault(FileOperation::Replace { edits }).kind, FaultKind::NotFound);
}

#[test]
fn ordinary_user_is_limited_to_its_permissions() {
    if !testkit::needs_root() {
        return;
    }
    with_both_tree_modes(|agent| {
        let as_nobody = |operation| {
            let identity = UserIdentity::User("nobody".to_owned());
            agent.reply(AgentRequest::File(FileRequest { identity, isolated_session: None, operation }))
        };
        std::fs::set_permissions(agent.home(), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::set_permissions(agent.home().parent().unwrap(), PermissionsExt::from_mode(0o755)).unwrap();
        agent.write("secret", &[b"x"]);
        std::fs::set_permissions(agent.home().join("secret"), PermissionsExt::from_mode(0o600)).unwrap();
        let read = FileOperation::Read { path: "secret".to_owned(), offset: 0, length: None };
        let AgentReply::Fault(fault) = as_nobody(read) else { panic!("a fault") };
        assert_eq!((fault.kind, fault.errno), (FaultKind::Permission, Some(13)));
        let write = FileOperation::Write { path: "mine".to_owned(), attributes: FileAttributes::default() };
        let AgentReply::Fault(fault) = as_nobody(write) else { panic!("a fault") };
        assert_eq!(fault.kind, FaultKind::Permission);
        std::fs::set_permissions(agent.home(), PermissionsExt::from_mode(0o777)).unwrap();
        let make =
            FileOperation::MakeDirectory { path: "mine".to_owned(), attributes: FileAttributes::default() };
        assert_eq!(as_nobody(make), AgentReply::Ok);
        assert_eq!(agent.stat("mine").owner, "nobody");
        assert_eq!(agent.read("secret", 0, None).1, b"x", "root reads everything");
    });
}

impl TestAgent {
    /// Makes the home directory readable for other users, who still may not change it.
    fn admit_others(&self) {
        for path in [self.home(), self.home().parent().unwrap().to_owned()] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        }
    }

    fn file_as_nobody(&self, operation: FileOperation) -> TestConnection {
        let identity = UserIdentity::User("nobody".to_owned());
        self.send_request(AgentRequest::File(FileRequest { identity, isolated_session: None, operation }))
    }

    fn write_as_nobody(&self, path: &str, mode: Option<u32>, pieces: &[&[u8]]) -> AgentReply {
        let attributes = FileAttributes { mode, ..FileAttributes::default() };
        self.file_as_nobody(FileOperation::Write { path: path.to_owned(), attributes }).upload(pieces)
    }
}

#[test]
fn file_in_an_unwritable_directory_is_written_in_place() {
    if !testkit::needs_root() {
        return;
    }
    with_both_tree_modes(|agent| {
        agent.admit_others();
        agent.write("shared", &[b"something long"]);
        let shared = agent.home().join("shared");
        std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(agent.write_as_nobody("shared", None, &[b"one ", b"two"]), AgentReply::Ok);
        assert_eq!(std::fs::read(&shared).unwrap(), b"one two");
        let edits = vec![FileEdit { path: "shared".to_owned(), old: "one ".to_owned(), new: String::new() }];
        let reply = agent.file_as_nobody(FileOperation::Replace { edits }).reply();
        assert_eq!(
            (reply, std::fs::read(&shared).unwrap().as_slice()),
            (AgentReply::Replaced(vec![1]), &b"two"[..])
        );
        assert_eq!(
            agent.write_as_nobody("shared", Some(0o666), &[]),
            AgentReply::Ok,
            "the mode does not change"
        );
        let info = agent.stat("shared");
        assert_eq!((info.size, info.mode, info.owner.as_str()), (0, 0o666, "root"));
        assert_eq!(names_in(&agent.home()), BTreeSet::from(["shared".to_owned()]));
    });
}

#[test]
fn file_of_another_user_in_a_sticky_directory_is_written_in_place() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.admit_others();
    agent.write("shared", &[b"something long"]);
    let shared = agent.home().join("shared");
    std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o666)).unwrap();
    std::fs::set_permissions(agent.home(), PermissionsExt::from_mode(0o1777)).unwrap();
    assert_eq!(agent.write_as_nobody("shared", None, &[b"short"]), AgentReply::Ok);
    assert_eq!(std::fs::read(&shared).unwrap(), b"short");
    assert_eq!(agent.stat("shared").owner, "root");
    assert_eq!(names_in(&agent.home()), BTreeSet::from(["shared".to_owned()]));
}

#[test]
fn file_without_write_permission_is_unchanged() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Runners);
    agent.admit_others();
    agent.write("theirs", &[b"old"]);
    let shared = agent.home().join("shared");
    std::fs::write(&shared, b"old").unwrap();
    std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o666)).unwrap();
    let write = |path: &str| {
        let (path, attributes) = (path.to_owned(), FileAttributes::default());
        agent.file_as_nobody(FileOperation::Write { path, attributes })
    };
    for path in ["theirs", "none"] {
        let AgentReply::Fault(fault) = write(path).reply() else { panic!("a fault") };
        assert_eq!((fault.kind, fault.errno), (FaultKind::Permission, Some(13)), "{path}");
    }
    assert_eq!(std::fs::read(agent.home().join("theirs")).unwrap(), b"old");
    let mut talk = write("shared");
    talk.send(&Frame::from_message(&AgentRequest::Ping));
    assert!(matches!(talk.reply(), AgentReply::Fault(_)), "a message instead of data is refused");
    assert_eq!(std::fs::read(&shared).unwrap(), b"old");
}

#[test]
fn operations_beyond_the_worker_limit_wait_and_delay_nothing_else() {
    with_both_tree_modes(|agent| {
        let append = || FileOperation::Write { path: "x".to_owned(), attributes: FileAttributes::default() };
        let stuck: Vec<TestConnection> = (0..80).map(|_| agent.file(append())).collect();
        assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
        let mut waiting = agent.file(FileOperation::Stat { paths: vec!["~".to_owned()] });
        drop(stuck);
        assert!(matches!(waiting.reply(), AgentReply::Info(_)));
        // The interrupted writes are cleaned up when their temporary files are gone.
        while !names_in(&agent.home()).is_empty() {
            std::thread::yield_now();
        }
    });
}

#[test]
fn file_of_unknown_length_is_read_to_its_end() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let (size, bytes) = agent.read("/proc/version", 0, None);
    assert_eq!((size, bytes), (0, std::fs::read("/proc/version").unwrap()));
    assert_eq!(agent.read("/proc/version", 0, Some(5)).1, b"Linux");
}
