//! Searches for paths, how a search for text is started, and lines of a file.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use wire::files::{FileKind, FileOperation, FileRequest};
use wire::process::UserIdentity;
use wire::search::{GlobEntry, GlobOrder, GlobRequest, GlobSummary, GrepMatch, GrepRequest};
use wire::{AgentReply, AgentRequest, FaultKind};

use crate::client::TestConnection;
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

fn glob(path: &Path, pattern: &str) -> GlobRequest {
    GlobRequest {
        path: path.to_str().unwrap().to_owned(),
        pattern: pattern.to_owned(),
        exclude: Vec::new(),
        hidden: false,
        directories: false,
        metadata: false,
        order: GlobOrder::Path,
        descending: false,
        limit: 1000,
    }
}

/// Creates files with their directories.
fn make_files(root: &Path, names: &[&str]) {
    for name in names {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, name).unwrap();
    }
}

fn read_paths(mut talk: TestConnection) -> (Vec<GlobEntry>, GlobSummary) {
    let mut entries = Vec::new();
    loop {
        match talk.reply() {
            AgentReply::GlobEntries(page) => entries.extend(page),
            AgentReply::GlobEnd(summary) => {
                assert_eq!(talk.frame(), None);
                return (entries, summary);
            }
            other => panic!("expected paths, got {other:?}"),
        }
    }
}

impl TestAgent {
    fn find(&self, request: GlobRequest) -> (Vec<GlobEntry>, GlobSummary) {
        read_paths(self.file(FileOperation::Glob(request)))
    }

    /// The paths that are found, relative to the home directory.
    fn found_paths(&self, request: GlobRequest) -> Vec<String> {
        let home = format!("{}/", self.home().display());
        let (entries, summary) = self.find(request);
        assert_eq!((summary.total, summary.truncated), (entries.len() as u64, false));
        entries.iter().map(|entry| entry.path.strip_prefix(&home).unwrap().to_owned()).collect()
    }
}

#[test]
fn paths_are_found_by_a_glob_and_sorted() {
    with_both_tree_modes(|agent| {
        let home = agent.home();
        make_files(
            &home,
            &["b.py", "a.py", "src/z.ts", "src/a/b.ts", "src-x/q.ts", ".git/h.py", "src/.h.ts"],
        );
        let found = |pattern: &str| agent.found_paths(glob(&home, pattern));
        assert_eq!(found("*.py"), ["a.py", "b.py"]);
        assert_eq!(found("**/*.py"), ["a.py", "b.py"]);
        assert_eq!(found("**/*.ts"), ["src/a/b.ts", "src/z.ts", "src-x/q.ts"]);
        assert_eq!(found("src/**/*.ts"), ["src/a/b.ts", "src/z.ts"]);
        assert_eq!(found("src/a/b.ts"), ["src/a/b.ts"]);
        assert_eq!(found(".git/*"), [".git/h.py"]);
        assert_eq!(found("none*"), Vec::<String>::new());
        let hidden = GlobRequest { hidden: true, ..glob(&home, "**/*h*") };
        assert_eq!(agent.found_paths(hidden), [".git/h.py", "src/.h.ts"]);
        let all = GlobRequest { directories: true, ..glob(&home, "src*/**") };
        assert_eq!(agent.found_paths(all), ["src/a", "src/a/b.ts", "src/z.ts", "src-x/q.ts"]);
        let only = GlobRequest { directories: true, ..glob(&home, "*/") };
        assert_eq!(agent.found_paths(only), ["src", "src-x"]);
        let relative = GlobRequest { path: "src".to_owned(), ..glob(&home, "*.ts") };
        assert_eq!(agent.found_paths(relative), ["src/z.ts"]);
    });
}

#[test]
fn entries_are_left_out_by_name_or_relative_path() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    make_files(&home, &["a.py", "node_modules/m/b.py", "build/x/c.py", "src/build/d.py", "src/e.pyc"]);
    let without = |exclude: &[&str]| {
        let exclude = exclude.iter().map(|glob| (*glob).to_owned()).collect();
        agent.found_paths(GlobRequest { exclude, ..glob(&home, "**") })
    };
    assert_eq!(without(&["node_modules", "*.pyc"]), ["a.py", "build/x/c.py", "src/build/d.py"]);
    assert_eq!(without(&["build/*"]), ["a.py", "node_modules/m/b.py", "src/build/d.py", "src/e.pyc"]);
    assert_eq!(without(&["build", "node*", "src/*.pyc"]), ["a.py"]);
}

#[test]
fn sorted_entries_beyond_the_limit_are_only_counted() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    for (name, size, modified) in [("b", 3, 10), ("a", 1, 30), ("d/c", 2, 20)] {
        make_files(&home, &[name]);
        let file = std::fs::File::options().write(true).open(home.join(name)).unwrap();
        file.set_len(size).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(modified)).unwrap();
    }
    let first = |order, descending, limit| {
        let request = GlobRequest { order, descending, limit, metadata: true, ..glob(&home, "**") };
        let (entries, summary) = agent.find(request);
        assert_eq!((summary.total, summary.truncated), (3, limit < 3));
        let shown = |entry: &GlobEntry| (entry.size.unwrap(), entry.modified_ms.unwrap());
        entries.iter().map(shown).collect::<Vec<_>>()
    };
    let (a, b, c) = ((1, 30_000), (3, 10_000), (2, 20_000));
    assert_eq!(first(GlobOrder::Path, false, 9), [a, b, c]);
    assert_eq!(first(GlobOrder::Path, true, 2), [c, b]);
    assert_eq!(first(GlobOrder::Name, true, 1), [c]);
    assert_eq!(first(GlobOrder::Size, true, 2), [b, c]);
    assert_eq!(first(GlobOrder::Modified, false, 3), [b, c, a]);
    let (entries, _) = agent.find(GlobRequest { order: GlobOrder::Size, ..glob(&home, "**") });
    assert!(entries.iter().all(|entry| entry.size.is_none() && entry.modified_ms.is_none()));
}

#[test]
fn many_paths_are_sent_in_pages() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    let names: Vec<String> = (0..3000).map(|number| format!("{}{number:04}", "ü".repeat(40))).collect();
    make_files(&home, &names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(agent.found_paths(GlobRequest { limit: 5000, ..glob(&home, "*") }), names);
}

#[test]
fn links_are_followed_only_where_the_pattern_names_them() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    make_files(&home, &["real/a.py", "b.py"]);
    symlink(".", home.join("real/loop")).unwrap();
    symlink("real", home.join("link")).unwrap();
    symlink("b.py", home.join("c.py")).unwrap();
    symlink("nowhere", home.join("broken.py")).unwrap();
    assert_eq!(agent.found_paths(glob(&home, "**/*.py")), ["b.py", "c.py", "real/a.py"]);
    assert_eq!(agent.found_paths(glob(&home, "link/*.py")), ["link/a.py"]);
    assert_eq!(agent.found_paths(glob(&home, "l*/*.py")), Vec::<String>::new());
    let (entries, _) = agent.find(GlobRequest { directories: true, ..glob(&home, "*") });
    let kinds: Vec<_> =
        entries.iter().map(|entry| (entry.path.rsplit('/').next().unwrap(), entry.kind)).collect();
    assert_eq!(
        kinds,
        [
            ("b.py", FileKind::File),
            ("broken.py", FileKind::Symlink),
            ("c.py", FileKind::File),
            ("link", FileKind::Directory),
            ("real", FileKind::Directory),
        ]
    );
}

#[test]
fn invalid_globs_and_missing_directories_are_named() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    make_files(&home, &["file"]);
    let fault = |request| match agent.file(FileOperation::Glob(request)).reply() {
        AgentReply::Fault(fault) => fault,
        other => panic!("expected a fault, got {other:?}"),
    };
    let bad = fault(glob(&home, "a/[b"));
    assert_eq!((bad.kind, bad.operation.as_str()), (FaultKind::Invalid, "read pattern"));
    assert!(bad.subject.starts_with("a/[b: `[b`: unclosed"), "{}", bad.subject);
    let bad = fault(GlobRequest { exclude: vec!["{x".to_owned()], ..glob(&home, "*") });
    assert!(bad.kind == FaultKind::Invalid && bad.subject.contains("`{x`"), "{bad:?}");
    let many = fault(GlobRequest { exclude: vec!["x".to_owned(); 300], ..glob(&home, "*") });
    assert_eq!(many.kind, FaultKind::Invalid);
    assert_eq!(fault(glob(&home.join("none"), "*")).kind, FaultKind::NotFound);
    assert_eq!(fault(glob(&home.join("file"), "*")).kind, FaultKind::NotADirectory);
}

#[test]
fn search_has_the_rights_of_its_user() {
    if !testkit::is_root() {
        return testkit::skip_test("only root can search as another user");
    }
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    make_files(&home, &["open/a", "closed/b"]);
    // The directory of the agent itself is private.
    for directory in [home.parent().unwrap(), &home, &home.join("open")] {
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
    }
    std::fs::set_permissions(home.join("closed"), PermissionsExt::from_mode(0o700)).unwrap();
    let names = |identity| {
        let operation = FileOperation::Glob(glob(&home, "*/*"));
        let request = FileRequest { identity, isolated_session: None, operation };
        let (entries, _) = read_paths(agent.send_request(AgentRequest::File(request)));
        entries.iter().map(|entry| entry.path.rsplit('/').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(UserIdentity::Default), ["b", "a"]);
    assert_eq!(names(UserIdentity::User("nobody".to_owned())), ["a"]);
}

fn grep(path: &str) -> GrepRequest {
    GrepRequest {
        path: path.to_owned(),
        pattern: "(a)\\1".to_owned(),
        literal: false,
        ignore_case: false,
        multiline: false,
        before: 0,
        after: 0,
        include: Vec::new(),
        exclude: Vec::new(),
        file_type: None,
        recursive: true,
        max_file_bytes: None,
        offset: 0,
        limit: 9,
    }
}

/// The match by which the search program of these tests describes its process.
fn search_process(agent: &TestAgent, identity: UserIdentity, path: &str) -> GrepMatch {
    let operation = FileOperation::Grep(grep(path));
    let request = FileRequest { identity, isolated_session: None, operation };
    let mut talk = agent.send_request(AgentRequest::File(request));
    let AgentReply::GrepMatches(mut matches) = talk.reply() else { panic!("matches come first") };
    assert!(matches!(talk.reply(), AgentReply::GrepEnd(_)));
    assert_eq!(talk.frame(), None);
    matches.remove(0)
}

#[test]
fn search_for_text_is_a_confined_program_that_gets_the_request() {
    with_both_tree_modes(|agent| {
        let found = search_process(agent, UserIdentity::Default, "~/x");
        assert_eq!((found.path.as_str(), found.before[0].as_str()), ("/root/x", "(a)\\1"));
        assert_eq!(found.before[1], "/root");
        // The last one is the directory that lists them.
        assert_eq!(found.after, ["0", "1", "2", "3", "4", "5"]);
        if testkit::is_root() {
            let dac_override = "0000000000000002";
            let expected = format!("Uid:0 CapEff:{dac_override} CapBnd:{dac_override} NoNewPrivs:1");
            assert_eq!(found.text, expected);
            let found = search_process(agent, UserIdentity::User("nobody".to_owned()), "/x");
            let none = "0000000000000000";
            let uid = found.text.split_once(' ').unwrap().0.to_owned();
            assert_eq!(found.text, format!("{uid} CapEff:{none} CapBnd:{none} NoNewPrivs:1"));
            assert_ne!(uid, "Uid:0");
        } else {
            testkit::skip_test("only root can search as another user; the rest was tested");
        }
    });
}

#[test]
fn lines_are_sent_unchanged_and_only_as_text() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let home = agent.home();
    let long = "ü".repeat(400_000);
    std::fs::write(home.join("text"), format!("a\r\n{long}\n\nlast")).unwrap();
    std::fs::write(home.join("bytes"), b"a\nb\xff\n").unwrap();
    let read = |path: &str, start, end| {
        let mut talk = agent.file(FileOperation::ReadLines { path: path.to_owned(), start, end });
        match talk.reply() {
            AgentReply::Reading { .. } => Ok(String::from_utf8(talk.download()).unwrap()),
            AgentReply::Fault(fault) => Err(fault),
            other => panic!("expected Reading, got {other:?}"),
        }
    };
    assert_eq!(read("text", 0, Some(1)).unwrap(), "a\r\n");
    assert_eq!(read("text", 1, Some(3)).unwrap(), format!("{long}\n\n"));
    assert_eq!(read("text", 3, None).unwrap(), "last");
    assert_eq!(read("text", 4, Some(9)).unwrap(), "");
    assert_eq!(read("bytes", 0, Some(1)).unwrap(), "a\n");
    let fault = read("bytes", 0, None).unwrap_err();
    assert_eq!((fault.kind, fault.subject), (FaultKind::NotText, home.join("bytes").display().to_string()));
    assert_eq!(read(".", 0, None).unwrap_err().kind, FaultKind::IsADirectory);
    assert_eq!(read("none", 0, None).unwrap_err().kind, FaultKind::NotFound);
}
