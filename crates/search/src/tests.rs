//! Searches in real files, with the replies as the server receives them.

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode};
use tempfile::TempDir;
use wire::search::{GrepMatch, GrepRequest, GrepSummary};
use wire::{AgentReply, Fault, FaultKind, FrameDecoder, Greeting};

use crate::grep::{plain_request, search_text};
use crate::reply_sender::ReplySender;

/// A directory with these files.
fn make_tree(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (name, text) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("it is below the directory"))
            .expect("directories can be made");
        fs::write(path, text).expect("files can be written");
    }
    directory
}

fn path_text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn request(tree: &TempDir, pattern: &str) -> GrepRequest {
    plain_request(path_text(tree.path()), pattern)
}

fn search(request: &GrepRequest) -> Result<(Vec<GrepMatch>, GrepSummary), Fault> {
    let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).expect("the search can be read");
        bytes
    });
    let sender = ReplySender::new(ours.into());
    let done = search_text(request, &sender);
    drop(sender);
    let bytes = reader.join().expect("the reader does not panic");
    done?;
    let mut decoder = FrameDecoder::new();
    decoder.feed(&bytes);
    let mut next = || decoder.next_frame().expect("frames are valid");
    let greeting: Greeting = next().expect("a greeting").parse_message().expect("it is valid");
    assert_eq!(greeting.version, wire::VERSION);
    let mut matches = Vec::new();
    loop {
        match next().expect("a summary is last").parse_message().expect("replies are valid") {
            AgentReply::GrepMatches(page) => matches.extend(page),
            AgentReply::GrepEnd(summary) => {
                assert_eq!(next(), None);
                return Ok((matches, summary));
            }
            other => panic!("unexpected {other:?}"),
        }
    }
}

/// The matches as `path:line:text`, with paths relative to that of the request.
fn found(request: &GrepRequest) -> Vec<String> {
    let (matches, _) = search(request).expect("the search succeeds");
    let shown = |found: &GrepMatch| {
        let path = found.path.strip_prefix(&request.path).expect("paths are below that of the request");
        format!("{}:{}:{}", path.trim_start_matches('/'), found.line, found.text)
    };
    matches.iter().map(shown).collect()
}

fn fault(request: &GrepRequest) -> Fault {
    search(request).expect_err("the search fails")
}

fn globs(globs: &[&str]) -> Vec<String> {
    globs.iter().map(|glob| (*glob).to_owned()).collect()
}

#[test]
fn matches_are_sorted_by_path_and_line() {
    let tree =
        make_tree(&[("b.txt", "one\ntwo one\r\n"), ("a/z", "one"), ("a-b", "x\none\n"), ("c", "two\n")]);
    assert_eq!(found(&request(&tree, "one")), ["a/z:1:one", "a-b:2:one", "b.txt:1:one", "b.txt:2:two one"]);
    let (_, summary) = search(&request(&tree, "one")).expect("it succeeds");
    assert_eq!(summary, GrepSummary { files_searched: 4, files_matched: 3, truncated: false });
    assert_eq!(found(&request(&tree, "none")), Vec::<String>::new());
}

#[test]
fn patterns_are_regular_expressions_with_look_around_or_literal() {
    let tree = make_tree(&[("f", "foobar\nfoobaz\nFOO\na.b\naxb\nabab\nÉté\n")]);
    let lines = |pattern: &str| found(&request(&tree, pattern));
    assert_eq!(lines(r"foo(?=baz)"), ["f:2:foobaz"]);
    assert_eq!(lines(r"(?<!foo)bar|^(ab)\1$"), ["f:6:abab"]);
    assert_eq!(lines(r"^foo(?!bar)\w+$"), ["f:2:foobaz"]);
    assert_eq!(lines("a.b"), ["f:4:a.b", "f:5:axb"]);
    let literal = GrepRequest { literal: true, ..request(&tree, "a.b") };
    assert_eq!(found(&literal), ["f:4:a.b"]);
    let any_case = |pattern: &str| found(&GrepRequest { ignore_case: true, ..request(&tree, pattern) });
    assert_eq!(any_case("foo$"), ["f:3:FOO"]);
    assert_eq!(any_case("foo(?!b)"), ["f:3:FOO"]);
    assert_eq!(any_case("éTÉ"), ["f:7:Été"]);
}

#[test]
fn multiline_matches_span_lines() {
    let tree = make_tree(&[("f", "start\nmiddle\nend\nx\nstart\nend\n")]);
    let across = |pattern: &str| found(&GrepRequest { multiline: true, ..request(&tree, pattern) });
    assert_eq!(across("start.*?end"), ["f:1:start\nmiddle\nend", "f:5:start\nend"]);
    assert_eq!(across(r"start\n(?=end)"), ["f:5:start"]);
    assert_eq!(across(r"^x$"), ["f:4:x"]);
    assert_eq!(found(&request(&tree, "start.*end")), Vec::<String>::new());
    assert_eq!(found(&request(&tree, r"start\s*(?=e)")), Vec::<String>::new());
}

#[test]
fn context_is_complete_for_each_match() {
    let tree = make_tree(&[("f", "1\n2\nx3\nx4\n5\n6\n7\nx8\n")]);
    let with = |before, after| {
        let request = GrepRequest { before, after, ..request(&tree, "x") };
        let (matches, _) = search(&request).expect("it succeeds");
        matches.iter().map(|found| (found.before.join(","), found.after.join(","))).collect::<Vec<_>>()
    };
    let expected = |contexts: [(&str, &str); 3]| contexts.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
    assert_eq!(with(2, 2), expected([("1,2", "x4,5"), ("2,x3", "5,6"), ("6,7", "")]));
    assert_eq!(with(1, 0), expected([("2", ""), ("x3", ""), ("7", "")]));
    assert_eq!(with(0, 1), expected([("", "x4"), ("", "5"), ("", "")]));
    assert_eq!(with(99, 99)[2].0, "1,2,x3,x4,5,6,7");
    let one = GrepRequest { limit: 1, after: 2, ..request(&tree, "x") };
    let (matches, summary) = search(&one).expect("it succeeds");
    assert_eq!((matches[0].after.as_slice(), summary.truncated), (globs(&["x4", "5"]).as_slice(), true));
}

#[test]
fn offset_and_limit_cut_the_matches() {
    let tree = make_tree(&[("a", "x\nx\nx\n"), ("b", "x\n"), ("c", "y\n"), ("d", "x\n")]);
    let part = |offset, limit| {
        let request = GrepRequest { offset, limit, ..request(&tree, "x") };
        let (_, summary) = search(&request).expect("it succeeds");
        (found(&request).iter().map(|text| text[..3].to_owned()).collect::<Vec<_>>(), summary.truncated)
    };
    assert_eq!(part(0, 5), (globs(&["a:1", "a:2", "a:3", "b:1", "d:1"]), false));
    assert_eq!(part(0, 4), (globs(&["a:1", "a:2", "a:3", "b:1"]), true));
    assert_eq!(part(2, 2), (globs(&["a:3", "b:1"]), true));
    assert_eq!(part(4, 9), (globs(&["d:1"]), false));
    assert_eq!(part(9, 9), (Vec::new(), false));
    assert_eq!(part(0, 0), (Vec::new(), true));
}

#[test]
fn files_are_chosen_as_ripgrep_does() {
    let tree = make_tree(&[
        ("a.py", "x"),
        ("a.rs", "x"),
        (".hidden", "x"),
        ("ignored.py", "x"),
        ("binary", "a\0x\n"),
        ("wide", ""),
        ("sub/b.py", "x"),
        ("sub/deep/c.py", "x"),
        ("sub/.ignore", "deep\n"),
        (".gitignore", "ignored.py\n"),
        (".git/HEAD", "x"),
    ]);
    let wide: Vec<u8> =
        std::iter::once(0xfeff).chain("x\n".encode_utf16()).flat_map(u16::to_le_bytes).collect();
    fs::write(tree.path().join("wide"), wide).expect("it can be written");
    symlink("a.py", tree.path().join("link.py")).expect("links can be made");
    symlink("..", tree.path().join("sub/loop")).expect("links can be made");
    rustix::fs::mknodat(CWD, tree.path().join("pipe"), FileType::Fifo, Mode::RUSR, 0)
        .expect("pipes can be made");
    let plain = request(&tree, "x");
    assert_eq!(found(&plain), ["a.py:1:x", "a.rs:1:x", "sub/b.py:1:x", "wide:1:x"]);
    let shallow = GrepRequest { recursive: false, ..plain.clone() };
    assert_eq!(found(&shallow), ["a.py:1:x", "a.rs:1:x", "wide:1:x"]);
    let typed = GrepRequest { file_type: Some("py".to_owned()), ..plain.clone() };
    assert_eq!(found(&typed), ["a.py:1:x", "sub/b.py:1:x"]);
    let chosen = GrepRequest { include: globs(&["*.py", "*.rs"]), exclude: globs(&["sub"]), ..plain.clone() };
    // A file that is named by a glob is searched though it is ignored, but not below an ignored directory.
    assert_eq!(found(&chosen), ["a.py:1:x", "a.rs:1:x", "ignored.py:1:x"]);
    let chosen = GrepRequest { include: globs(&["*.py"]), ..plain.clone() };
    assert_eq!(found(&chosen), ["a.py:1:x", "ignored.py:1:x", "sub/b.py:1:x"]);
    // The rules of the parents apply below, and none of them to a file that is named.
    let below = GrepRequest { path: format!("{}/sub", plain.path), ..plain.clone() };
    assert_eq!(found(&below), ["b.py:1:x"]);
    for name in ["ignored.py", ".hidden", "link.py"] {
        let named = GrepRequest { path: format!("{}/{name}", plain.path), ..plain.clone() };
        assert_eq!(found(&named), [":1:x"], "{name}");
    }
}

#[test]
fn large_files_and_long_lines_are_bounded() {
    let long = format!("x{}\nshort x\n", "ü".repeat(100_000));
    let tree = make_tree(&[("long", &long), ("small", "x\n")]);
    let (matches, _) =
        search(&GrepRequest { after: 1, before: 1, ..request(&tree, "x") }).expect("it succeeds");
    assert!(matches[0].cut && matches[0].text.len() > 60_000 && matches[0].text.len() <= 64 << 10);
    assert!(matches[0].text.ends_with('ü') && !matches[1].cut);
    assert!(matches[1].before[0].len() <= 2 << 10);
    let small = GrepRequest { max_file_bytes: Some(2), ..request(&tree, "x") };
    assert_eq!(found(&small), ["small:1:x"]);
    let (_, summary) = search(&small).expect("it succeeds");
    assert_eq!((summary.files_searched, summary.files_matched), (1, 1));
    // Control characters are the longest in JSON.
    let worst = format!("{}\n", "\u{1}".repeat(200_000)).repeat(50);
    let tree = make_tree(&[("worst", &worst)]);
    let (matches, summary) = search(&GrepRequest { before: 20, after: 20, ..request(&tree, "\u{1}") })
        .expect("it fits the frames");
    assert_eq!((matches.len(), summary.truncated), (50, false));
}

#[test]
fn many_matches_of_many_files_are_returned_in_order_or_cut() {
    let line = format!("{}x\n", "y".repeat(100));
    let text = line.repeat(5000);
    let names: Vec<String> = (0..40).map(|number| format!("{number:02}")).collect();
    let files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), text.as_str())).collect();
    let tree = make_tree(&files);
    let (matches, summary) =
        search(&GrepRequest { offset: 7000, ..request(&tree, "x") }).expect("it succeeds");
    assert_eq!((matches.len(), summary.truncated), (10_000, true));
    let first = (matches[0].path.rsplit('/').next(), matches[0].line);
    assert_eq!(first, (Some("01"), 2001));
    assert!(matches.is_sorted_by_key(|found| (found.path.clone(), found.line)));
    assert_eq!(summary.files_matched, 4);
    // The text of the results is limited too.
    let (matches, summary) =
        search(&GrepRequest { before: 20, after: 20, ..request(&tree, "x") }).expect("it succeeds");
    let bytes: usize = matches.iter().map(|found| found.text.len() * 41).sum();
    assert!(summary.truncated && bytes > 8 << 20 && bytes <= 18 << 20, "{bytes}");
}

#[test]
fn invalid_requests_are_refused_with_the_reason() {
    let tree = make_tree(&[("f", &"a".repeat(200))]);
    let plain = request(&tree, "x");
    let at = |name: &str| GrepRequest { path: format!("{}/{name}", plain.path), ..plain.clone() };
    assert_eq!(fault(&at("none")).kind, FaultKind::NotFound);
    rustix::fs::mknodat(CWD, tree.path().join("pipe"), FileType::Fifo, Mode::RUSR, 0)
        .expect("pipes can be made");
    let pipe = fault(&at("pipe"));
    assert!(pipe.kind == FaultKind::Invalid && pipe.subject.ends_with("not a regular file"), "{pipe:?}");
    let glob = fault(&GrepRequest { include: globs(&["[a"]), ..plain.clone() });
    assert!(glob.kind == FaultKind::Invalid && glob.subject.starts_with("[a: "), "{glob:?}");
    let many = fault(&GrepRequest { exclude: globs(&["a"; 300]), ..plain.clone() });
    assert_eq!(many.kind, FaultKind::Invalid);
    let unknown = fault(&GrepRequest { file_type: Some("cobolt".to_owned()), ..plain.clone() });
    assert!(unknown.kind == FaultKind::Invalid && unknown.subject.starts_with("cobolt: "), "{unknown:?}");
    let slow = fault(&request(&tree, "^(a|aa)+(?=x)$"));
    assert!(slow.kind == FaultKind::Invalid && slow.subject.contains("/f"), "{slow:?}");
}
