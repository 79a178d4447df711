//! Searches from the service through the real agent, outside of any jail, to this program.
#![expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use domain::{Owner, SandboxSpec, UserIdentity};
use rustix::fs::{CWD, FileType, Mode};
use service::{
    CreateSandboxRequest, ErrorKind, FileFault, GlobKinds, GlobOrder, GlobQuery, GrepMatches, GrepPattern,
    GrepQuery, ImageSource, SandboxRef, ServiceError,
};
use testkit::fake_backend::FakeBackend;
use testkit::test_server::TestServer;
use testkit::unjailed_agent::{AgentSetup, example_program};
use wire::files::{FileOperation, FileRequest};
use wire::search::GrepRequest;
use wire::{AgentRequest, Frame, VersionedRequest};

/// No search in these tests takes this long unless something hangs.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(30);

/// A sandbox with a real agent, and its home directory.
async fn start() -> (TestServer, SandboxRef, PathBuf) {
    let backend = FakeBackend::with_agents(example_program("searching-agent"));
    let server = TestServer::start(backend, |_| {}, |_, _| std::future::pending()).await;
    let request = CreateSandboxRequest {
        origin: "test",
        source: ImageSource::from_name("host"),
        spec: SandboxSpec::with_defaults(),
        labels: Default::default(),
        notes: Vec::new(),
        timeout: None,
        idle_timeout: None,
        defaulted: Vec::new(),
        merge_notes: |own, _| own.to_vec(),
    };
    let owner = Owner::operator();
    let made = server.service.create_sandbox(&owner, request).await.unwrap();
    let sandbox = server.service.sandbox(&owner, &made.id).unwrap();
    let home = server.backend.home(&made.id);
    (server, sandbox, home)
}

fn query(pattern: &str) -> GrepQuery {
    GrepQuery {
        pattern: GrepPattern::Regex(pattern.to_owned()),
        ignore_case: false,
        multiline: false,
        before: 0,
        after: 0,
        include: Vec::new(),
        exclude: Vec::new(),
        file_type: None,
        recursive: true,
        max_file_size: None,
        offset: 0,
        limit: 100,
    }
}

async fn grep(
    sandbox: &SandboxRef,
    identity: &UserIdentity,
    path: &Path,
    query: GrepQuery,
) -> Result<GrepMatches, ServiceError> {
    let files = sandbox.files();
    let found = files.search_text(identity, path.to_str().unwrap(), query);
    tokio::time::timeout(SEARCH_TIMEOUT, found).await.unwrap()
}

#[tokio::test]
async fn text_is_found_through_the_agent() {
    let (_server, sandbox, home) = start().await;
    std::fs::create_dir(home.join("src")).unwrap();
    for number in 0..300 {
        std::fs::write(home.join(format!("src/{number:03}.txt")), "one\r\nabab\n").unwrap();
    }
    let root = UserIdentity::Default;
    let part = GrepQuery { limit: 250, before: 1, ..query(r"(ab)\1") };
    let found = grep(&sandbox, &root, &home, part).await.unwrap();
    assert_eq!((found.matches.len(), found.truncated), (250, true));
    let last = &found.matches[249];
    assert_eq!(last.path, format!("{}/src/249.txt", home.display()));
    assert_eq!((last.line, last.text.as_str()), (2, "abab"));
    assert_eq!(last.before, ["one"]);
    let literal = GrepQuery { pattern: GrepPattern::Literal("(ab)".to_owned()), ..query("") };
    assert_eq!(grep(&sandbox, &root, &home, literal).await.unwrap().matches, []);
    let error = grep(&sandbox, &root, &home, query("(")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File(FileFault::Invalid));
    assert!(error.to_string().starts_with("could not read pattern `(: "), "{error}");
    let error = grep(&sandbox, &root, &home.join("none"), query("x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File(FileFault::NotFound));
}

#[tokio::test]
async fn paths_are_found_through_the_agent() {
    let (_server, sandbox, home) = start().await;
    std::fs::write(home.join("a.txt"), "one\r\ntwo\n").unwrap();
    std::fs::write(home.join("b.bin"), b"\xff\n").unwrap();
    let glob = GlobQuery {
        pattern: "*".to_owned(),
        exclude: vec!["*.bin".to_owned()],
        hidden: false,
        kinds: GlobKinds::All,
        metadata: true,
        order: GlobOrder::Size,
        descending: true,
        limit: 1,
    };
    let found =
        sandbox.files().find_paths(&UserIdentity::Default, home.to_str().unwrap(), glob).await.unwrap();
    let first = &found.paths[0];
    assert_eq!((found.total, found.truncated, first.size), (1, false, Some(9)));
    assert_eq!(first.path, home.join("a.txt").to_str().unwrap());
    assert!(first.modified.is_some());
}

#[tokio::test]
async fn lines_are_read_through_the_agent() {
    let (_server, sandbox, home) = start().await;
    std::fs::write(home.join("a.txt"), "one\r\ntwo\n").unwrap();
    std::fs::write(home.join("b.bin"), b"\xff\n").unwrap();
    let read = async |path: &str, start, end| {
        let mut lines = sandbox.files().read_lines(&UserIdentity::Default, path, start, end).await?;
        let mut text = Vec::new();
        while let Some(bytes) = lines.next().await? {
            text.extend_from_slice(&bytes);
        }
        Ok::<_, ServiceError>(String::from_utf8(text).unwrap())
    };
    assert_eq!(read("a.txt", 0, Some(1)).await.unwrap(), "one\r\n");
    assert_eq!(read("a.txt", 1, None).await.unwrap(), "two\n");
    assert_eq!(read("a.txt", 2, None).await.unwrap(), "");
    let error = read("b.bin", 0, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File(FileFault::NotText));
}

#[tokio::test]
async fn text_is_found_only_where_the_user_may_read() {
    if !testkit::is_root() {
        return testkit::skip_test("only root can search as another user");
    }
    let (_server, sandbox, home) = start().await;
    for (name, mode) in [("open", 0o644), ("closed", 0o600)] {
        std::fs::write(home.join(name), "x\n").unwrap();
        std::fs::set_permissions(home.join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    for directory in [home.parent().unwrap(), &home] {
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let found = grep(&sandbox, &UserIdentity::Default, &home, query("x")).await.unwrap();
    assert_eq!((found.matches.len(), found.files_searched), (2, 2));
    let nobody = UserIdentity::User("nobody".to_owned());
    let found = grep(&sandbox, &nobody, &home, query("x")).await.unwrap();
    assert_eq!((found.matches.len(), found.files_searched), (1, 1));
    let error = grep(&sandbox, &nobody, &home.join("closed"), query("x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File(FileFault::Permission));
}

/// A pipe in place of an ignore file blocks the search, because the library does not expect one.
#[test]
fn search_that_hangs_ends_with_its_connection() {
    let agent = AgentSetup::new().start(&example_program("searching-agent"));
    let home = agent.home();
    rustix::fs::mknodat(CWD, home.join(".ignore"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    let request = GrepRequest {
        path: home.to_str().unwrap().to_owned(),
        pattern: "x".to_owned(),
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
        limit: 1,
    };
    let identity = wire::process::UserIdentity::Default;
    let request = FileRequest { identity, isolated_session: None, operation: FileOperation::Grep(request) };
    let request = VersionedRequest { version: wire::VERSION, request: AgentRequest::File(request) };
    let mut bytes = Vec::new();
    Frame::from_message(&request).encode(&mut bytes);
    let mut connection = UnixStream::connect(agent.socket()).unwrap();
    connection.write_all(&bytes).unwrap();
    let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.pid())).unwrap();
    let is_search = |pid: &str| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(8).any(|word| word == b"__search")
    };
    let begun = Instant::now();
    while !children().split_whitespace().any(is_search) {
        assert!(begun.elapsed() < Duration::from_secs(30), "the search did not start");
        std::thread::yield_now();
    }
    drop(connection);
    while !children().trim().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the search did not end");
        std::thread::yield_now();
    }
}
