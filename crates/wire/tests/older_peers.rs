//! Messages as older servers and agents write them. Agents outlive the server that created them, so
//! today's types must read and write the same bytes under the same names.
//!
//! `recorded/*.jsonl` was written before the types got their present names, one message per line. A
//! new message or field gets a new line; lines that exist do not change.
#![expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]

use std::collections::BTreeMap;
use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use testkit::recorded_exchange::RecordedExchange;
use wire::config::{LimitViewConfig, MemoryFiles, NamespaceBrokerConfig};
use wire::file_edits::{
    ContentLengths, EditReport, TextEdit, TextOccurrence, UndoOutcome, UndoPolicy, UndoReport,
};
use wire::files::{
    FileAttributes, FileChange, FileEdit, FileInfo, FileKind, FileOperation, FileRequest, WatchEvent,
};
use wire::isolated_session::{
    EnvFilter, IsolatedMount, IsolatedSessionSpec, IsolatedSessionStatus, MountView,
};
use wire::process::{
    CommandLine, ExitReason, KernelProgram, KernelSpec, MissingDirectory, OpenKernel, OpenSession,
    OutputRetention, ProcessEnd, ProcessStatus, RunInSession, SessionSharing, SessionStatus,
    SharedSessionStatus, SignalProcess, SignalTarget, StartProcess, TerminalSize, TreeKind, TreeStatus,
    TreeUsage, UserIdentity, WorkingDirectory,
};
use wire::search::{GlobEntry, GlobOrder, GlobRequest, GlobSummary, GrepMatch, GrepRequest, GrepSummary};
use wire::shared_session::{IdleLimit, OpenAndRun, OpenCommands, SharedSessionKind, UpdateSession};
use wire::{
    AgentConfig, AgentReply, AgentRequest, Fault, FaultKind, Frame, FrameDecoder, Greeting, VersionedRequest,
};

fn text(text: &str) -> String {
    text.to_owned()
}

fn variables() -> BTreeMap<String, String> {
    BTreeMap::from([(text("A"), text("b"))])
}

fn lossless() -> OutputRetention {
    OutputRetention { first: 1024, last: 4096, lossless: true, stall_ms: Some(5000) }
}

fn lossy() -> OutputRetention {
    OutputRetention { first: 0, last: 1, lossless: false, stall_ms: None }
}

fn directory(missing: MissingDirectory) -> WorkingDirectory {
    WorkingDirectory { path: text("/srv"), missing, expand: true }
}

fn start() -> StartProcess {
    StartProcess {
        process: text("p1"),
        command: CommandLine::Argv(vec![text("ls"), text("-l")]),
        identity: UserIdentity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        stdin: false,
        tag: None,
        deadline_ms: None,
        retention: lossy(),
        follow: false,
    }
}

fn full_start() -> StartProcess {
    StartProcess {
        command: CommandLine::Shell { text: text("exit 3"), login: true },
        identity: UserIdentity::Ids { uid: 1000, gid: 100 },
        directory: Some(directory(MissingDirectory::Create)),
        env: variables(),
        terminal: Some(TerminalSize { columns: 80, rows: 24 }),
        stdin: true,
        tag: Some(text("t")),
        deadline_ms: Some(60_000),
        retention: lossless(),
        follow: true,
        ..start()
    }
}

fn session() -> OpenSession {
    OpenSession {
        session: text("s1"),
        identity: UserIdentity::User(text("alice")),
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        text_terminal: false,
        isolation: None,
        sharing: None,
    }
}

fn mount(view: MountView) -> IsolatedMount {
    IsolatedMount { source: text("/data"), target: text("/mnt"), view, without_links: true }
}

fn isolated_session() -> OpenSession {
    OpenSession {
        directory: Some(directory(MissingDirectory::Fail)),
        env: variables(),
        terminal: Some(TerminalSize { columns: 120, rows: 40 }),
        isolation: Some(IsolatedSessionSpec {
            mounts: vec![
                mount(MountView::ReadWrite),
                mount(MountView::ReadOnly),
                mount(MountView::Overlay { kept: true }),
            ],
            share_temporary: true,
            share_network: true,
            screen: EnvFilter { only: Some(vec![text("LANG*")]), without: vec![text("*_KEY")] },
            idle_ms: Some(9000),
            note: text("a note"),
        }),
        ..session()
    }
}

fn run() -> RunInSession {
    RunInSession {
        session: text("s1"),
        process: text("p2"),
        text: text("cd /"),
        directory: None,
        deadline_ms: None,
        retention: lossy(),
        follow: false,
        queue: false,
        detached: false,
        env: BTreeMap::new(),
        beside: false,
    }
}

fn full_run() -> RunInSession {
    RunInSession {
        directory: Some(directory(MissingDirectory::Ignore)),
        deadline_ms: Some(1),
        retention: lossless(),
        follow: true,
        queue: true,
        env: variables(),
        beside: true,
        ..run()
    }
}

fn kernel(program: KernelProgram) -> AgentRequest {
    AgentRequest::OpenKernel(OpenKernel {
        open: session(),
        kernel: KernelSpec { language: text("python"), program },
    })
}

fn attributes() -> FileAttributes {
    FileAttributes {
        mode: Some(0o644),
        new_mode: Some(0o600),
        owner: Some(text("alice")),
        group: Some(text("100")),
    }
}

fn file(operation: FileOperation) -> AgentRequest {
    AgentRequest::File(FileRequest { identity: UserIdentity::Default, isolated_session: None, operation })
}

fn process_requests() -> Vec<AgentRequest> {
    let process = || text("p1");
    vec![
        AgentRequest::Ping,
        AgentRequest::Adopt { env: variables(), env_file: None },
        AgentRequest::Adopt { env: BTreeMap::new(), env_file: Some(text("/etc/env")) },
        AgentRequest::Start(start()),
        AgentRequest::Start(full_start()),
        AgentRequest::Follow { process: process(), from: 7 },
        AgentRequest::OutputTimes { process: process(), from: 7 },
        AgentRequest::Status { process: process() },
        AgentRequest::Processes,
        AgentRequest::Trees { ended: true },
        AgentRequest::Signal(SignalProcess { process: process(), signal: 2, reach: SignalTarget::Group }),
        AgentRequest::Signal(SignalProcess { process: process(), signal: 9, reach: SignalTarget::Tree }),
        AgentRequest::Input { process: process() },
        AgentRequest::Resize { process: process(), columns: 80, rows: 24 },
        AgentRequest::KillLargest,
        AgentRequest::Forget { process: process() },
        AgentRequest::Tunnel { port: 8080 },
        AgentRequest::Occupy { port: 44772 },
    ]
}

fn session_requests() -> Vec<AgentRequest> {
    vec![
        AgentRequest::OpenSession(session()),
        AgentRequest::OpenSession(isolated_session()),
        kernel(KernelProgram::Argv(vec![text("python3")])),
        kernel(KernelProgram::Own(vec![text("__kernel")])),
        kernel(KernelProgram::Shell),
        AgentRequest::Run(run()),
        AgentRequest::Run(full_run()),
        AgentRequest::Sessions,
        AgentRequest::CloseSession { session: text("s1"), requested_ns: None, grace_ms: None },
        AgentRequest::RestartSession { session: text("s1") },
        AgentRequest::IsolatedSessions,
        AgentRequest::Note { session: text("s1") },
    ]
}

fn file_requests() -> Vec<AgentRequest> {
    let path = || text("/a");
    vec![
        file(FileOperation::Stat { paths: vec![path()] }),
        file(FileOperation::Read { path: path(), offset: 0, length: None }),
        file(FileOperation::Read { path: path(), offset: 2, length: Some(3) }),
        file(FileOperation::Write { path: path(), attributes: attributes() }),
        file(FileOperation::Append { path: path(), attributes: FileAttributes::default() }),
        file(FileOperation::List { path: path(), depth: 2 }),
        file(FileOperation::Search { path: path(), pattern: text("*.rs") }),
        file(FileOperation::Move { from: path(), to: text("/b"), overwrite: true }),
        file(FileOperation::Remove { path: path(), recursive: true }),
        file(FileOperation::MakeDirectory { path: path(), attributes: attributes() }),
        file(FileOperation::MakeLink { path: path(), target: text("b") }),
        file(FileOperation::SetAttributes { path: path(), attributes: attributes() }),
        file(FileOperation::Replace {
            edits: vec![FileEdit { path: path(), old: text("x"), new: text("y") }],
        }),
        file(FileOperation::Watch { path: path(), recursive: true, details: false }),
        AgentRequest::File(FileRequest {
            identity: UserIdentity::User(text("alice")),
            isolated_session: Some(text("s1")),
            operation: FileOperation::List { path: path(), depth: 1 },
        }),
    ]
}

fn calls() -> Vec<VersionedRequest> {
    let requests = [process_requests(), session_requests(), file_requests()].into_iter().flatten();
    requests.map(|request| VersionedRequest { version: 1, request }).collect()
}

fn edit(edit: TextEdit, max_content: u64) -> AgentRequest {
    file(FileOperation::Edit { path: text("/a"), edit, max_content })
}

fn replacement(occurrence: TextOccurrence, adapt_line_ends: bool) -> TextEdit {
    TextEdit::Replace { old: text("x"), occurrence, adapt_line_ends }
}

fn undo(if_changed: UndoPolicy, max_content: u64) -> AgentRequest {
    file(FileOperation::UndoEdit { path: text("/a"), if_changed, max_content })
}

fn edit_requests() -> Vec<AgentRequest> {
    vec![
        edit(replacement(TextOccurrence::Only, true), 4096),
        edit(replacement(TextOccurrence::First, false), 0),
        edit(replacement(TextOccurrence::Last, false), 0),
        edit(replacement(TextOccurrence::All, false), 0),
        edit(TextEdit::Insert { after_line: 3, adapt_line_ends: true }, 0),
        edit(TextEdit::Create { attributes: attributes() }, 0),
        undo(UndoPolicy::Overwrite, 4096),
        undo(UndoPolicy::Refuse, 0),
        file(FileOperation::Watch { path: text("/a"), recursive: false, details: true }),
    ]
}

fn edit_replies() -> Vec<AgentReply> {
    let undone = |outcome| UndoReport {
        outcome,
        changed_since: false,
        steps_left: 0,
        contents: ContentLengths::default(),
    };
    vec![
        AgentReply::Edited(EditReport {
            changed: false,
            matches: 0,
            match_lines: Vec::new(),
            lines: 7,
            undoable: false,
            contents: ContentLengths::default(),
        }),
        AgentReply::Edited(EditReport {
            changed: true,
            matches: 2,
            match_lines: vec![1, 3],
            lines: 7,
            undoable: true,
            contents: ContentLengths { old: Some(5), new: Some(0) },
        }),
        AgentReply::Undone(UndoReport {
            changed_since: true,
            steps_left: 3,
            contents: ContentLengths { old: Some(5), new: None },
            ..undone(UndoOutcome::Restored)
        }),
        AgentReply::Undone(undone(UndoOutcome::Removed)),
        AgentReply::Undone(undone(UndoOutcome::NoHistory)),
        AgentReply::Undone(undone(UndoOutcome::ChangedSince)),
        AgentReply::Watched(WatchEvent {
            sequence: Some(1),
            new_path: Some(text("/b")),
            kind: Some(FileKind::File),
            size: Some(5),
            modified_ms: Some(-1),
            inode: Some(12),
            ..WatchEvent::new(text("/a"), FileChange::Renamed)
        }),
    ]
}

fn ended(exit: ExitReason) -> ProcessEnd {
    ProcessEnd {
        exit,
        written: 12,
        ended_ms: 2000,
        duration_ms: 1000,
        user_ms: 3,
        system_ms: 4,
        max_rss_kib: 2744,
        interrupted: false,
        signalled: None,
    }
}

fn status() -> ProcessStatus {
    ProcessStatus {
        process: text("p1"),
        pid: 42,
        tag: None,
        session: None,
        command: text("ls -l"),
        started_ms: 1000,
        written: 12,
        first: 1024,
        ended: None,
        left: false,
        stderr_before: None,
    }
}

fn full_status() -> ProcessStatus {
    ProcessStatus {
        tag: Some(text("t")),
        session: Some(text("s1")),
        ended: Some(ended(ExitReason::Code(3))),
        left: true,
        ..status()
    }
}

fn session_status() -> SessionStatus {
    SessionStatus {
        session: text("s1"),
        busy: false,
        terminal: false,
        pid: None,
        kernel: None,
        isolation: None,
        left: false,
        shared: None,
    }
}

fn full_session_status() -> SessionStatus {
    SessionStatus {
        busy: true,
        terminal: true,
        pid: Some(43),
        kernel: Some(text("python")),
        isolation: Some(IsolatedSessionStatus {
            created_ms: 1,
            used_ms: 2,
            idle_left_ms: Some(3),
            alive: true,
        }),
        left: true,
        ..session_status()
    }
}

fn shared_session(sharing: SessionSharing) -> OpenSession {
    OpenSession { sharing: Some(sharing), ..session() }
}

fn full_sharing() -> SessionSharing {
    SessionSharing {
        name: Some(text("a name")),
        requested_ns: 7,
        max_sessions: Some(8),
        idle_ms: Some(9000),
        note: Some(text("a note")),
    }
}

fn shared_session_requests() -> Vec<VersionedRequest> {
    let commands = |open, script| AgentRequest::OpenCommands(OpenCommands { open, script });
    let update = |note, idle| AgentRequest::UpdateSession(UpdateSession { session: text("s1"), note, idle });
    let requests = [
        AgentRequest::OpenSession(shared_session(SessionSharing::default())),
        AgentRequest::OpenSession(OpenSession { text_terminal: true, ..shared_session(full_sharing()) }),
        commands(shared_session(SessionSharing::default()), None),
        commands(shared_session(full_sharing()), Some(text("/etc/profile"))),
        AgentRequest::Run(RunInSession { detached: true, ..run() }),
        AgentRequest::CloseSession { session: text("s1"), requested_ns: Some(7), grace_ms: None },
        AgentRequest::SessionStatus { session: text("s1") },
        update(None, None),
        update(Some(text("a note")), Some(IdleLimit::Never)),
        update(None, Some(IdleLimit::Milliseconds(9000))),
        AgentRequest::SessionRuns { session: text("s1") },
        AgentRequest::CloseSession { session: text("s1"), requested_ns: Some(7), grace_ms: Some(5000) },
        AgentRequest::OpenAndRun(OpenAndRun { open: shared_session(SessionSharing::default()), run: run() }),
    ];
    requests.into_iter().map(|request| VersionedRequest { version: 1, request }).collect()
}

fn shared_status(kind: Option<SharedSessionKind>) -> SharedSessionStatus {
    SharedSessionStatus {
        name: None,
        opened_ms: 1,
        used_ms: 2,
        directory: None,
        run: None,
        command: None,
        exit: None,
        last_run: None,
        kind,
        runs: 0,
        idle_ms: None,
        note: None,
    }
}

fn shared_session_replies() -> Vec<AgentReply> {
    let reply = |shared| AgentReply::Session(SessionStatus { shared: Some(shared), ..session_status() });
    vec![
        reply(shared_status(None)),
        reply(shared_status(Some(SharedSessionKind::Terminal))),
        reply(shared_status(Some(SharedSessionKind::Pipes))),
        reply(SharedSessionStatus {
            name: Some(text("a name")),
            directory: Some(text("/srv")),
            run: Some(text("p2")),
            command: Some(text("ls -l")),
            exit: Some(ExitReason::Code(3)),
            last_run: Some(text("p1")),
            runs: 5,
            idle_ms: Some(9000),
            note: Some(text("a note")),
            ..shared_status(Some(SharedSessionKind::Commands))
        }),
        AgentReply::Gap { from: 1024, to: 4096, stderr_before: Some(7) },
        AgentReply::Status(ProcessStatus { stderr_before: Some(3), ..status() }),
        AgentReply::Ended(ProcessEnd { signalled: Some(15), ..ended(ExitReason::Signal(15)) }),
    ]
}

fn tree(kind: TreeKind) -> TreeStatus {
    TreeStatus {
        id: text("p1"),
        kind,
        session: None,
        tag: None,
        text: text("ls -l"),
        pid: None,
        busy: true,
        started_ms: 1000,
        ended: None,
        left: false,
        usage: None,
    }
}

fn full_tree() -> TreeStatus {
    TreeStatus {
        session: Some(text("s1")),
        tag: Some(text("t")),
        pid: Some(42),
        ended: Some(ended(ExitReason::Signal(9))),
        left: true,
        usage: Some(TreeUsage { cpu_ms: 5, memory_bytes: 4096, processes: 2 }),
        ..tree(TreeKind::Run)
    }
}

fn info(kind: FileKind, link_target: Option<String>) -> FileInfo {
    FileInfo {
        path: text("/a"),
        kind,
        size: 5,
        mode: 0o4755,
        uid: 1000,
        gid: 100,
        owner: text("alice"),
        group: text("100"),
        modified_ms: -1,
        created_ms: 1000,
        link_target,
    }
}

fn faults() -> Vec<AgentReply> {
    let kinds = [
        FaultKind::NotFound,
        FaultKind::AlreadyExists,
        FaultKind::NotADirectory,
        FaultKind::IsADirectory,
        FaultKind::Permission,
        FaultKind::NoSpace,
        FaultKind::Invalid,
        FaultKind::Busy,
        FaultKind::Refused,
        FaultKind::Unsupported,
        FaultKind::Other,
    ];
    let fault = |(errno, kind): (i32, FaultKind)| {
        let errno = Some(errno).filter(|errno| *errno > 0);
        AgentReply::Fault(Fault { kind, errno, operation: "open".into(), subject: text("/a") })
    };
    (0..).zip(kinds).map(fault).collect()
}

fn ends() -> Vec<AgentReply> {
    let exits = [
        ExitReason::Code(0),
        ExitReason::Signal(15),
        ExitReason::Oom,
        ExitReason::Deadline,
        ExitReason::Lost,
    ];
    exits.into_iter().map(|exit| AgentReply::Ended(ended(exit))).collect()
}

fn watched() -> Vec<AgentReply> {
    let changes = [
        FileChange::Created,
        FileChange::Written,
        FileChange::Removed,
        FileChange::Renamed,
        FileChange::Attributes,
        FileChange::Overflow,
    ];
    changes.into_iter().map(|change| AgentReply::Watched(WatchEvent::new(text("/a"), change))).collect()
}

fn single_replies() -> Vec<AgentReply> {
    vec![
        AgentReply::Ok,
        AgentReply::Started { pid: 42 },
        AgentReply::Status(status()),
        AgentReply::Statuses(vec![status(), full_status()]),
        AgentReply::Sessions(vec![session_status(), full_session_status()]),
        AgentReply::Trees(vec![
            tree(TreeKind::Command),
            tree(TreeKind::Session),
            tree(TreeKind::Context),
            full_tree(),
        ]),
        AgentReply::Note(text("a note")),
        AgentReply::Gap { from: 1024, to: 4096, stderr_before: None },
        AgentReply::OutputTimes(vec![(0, 1000), (1024, 2000)]),
        AgentReply::Info(vec![info(FileKind::File, None)]),
        AgentReply::Entries(vec![
            info(FileKind::Directory, None),
            info(FileKind::Symlink, Some(text("b"))),
            info(FileKind::Other, None),
        ]),
        AgentReply::Reading { size: 5 },
        AgentReply::Replaced(vec![0, 2]),
    ]
}

fn replies() -> Vec<AgentReply> {
    [single_replies(), faults(), ends(), watched()].into_iter().flatten().collect()
}

fn config() -> AgentConfig {
    AgentConfig {
        version: 1,
        listen_fd: 4,
        ready_fd: 5,
        journal_fd: 6,
        commands_fd: None,
        tasks_fds: Vec::new(),
        shares_fds: Vec::new(),
        oom_fd: None,
        command_filter: vec![1, 2],
        command_capabilities: 3,
        process_rlimit: None,
        single_user: false,
        default_user: text("root"),
        default_directory: text("/"),
        env: variables(),
        env_file: None,
        namespace_broker: None,
        max_processes: 8,
        limit_view: None,
        threads: None,
        kernels_fd: None,
    }
}

fn full_config() -> AgentConfig {
    AgentConfig {
        commands_fd: Some(7),
        tasks_fds: vec![8],
        shares_fds: vec![9],
        oom_fd: Some(10),
        process_rlimit: Some(64),
        single_user: true,
        env_file: Some(text("/etc/env")),
        namespace_broker: Some(NamespaceBrokerConfig {
            agent_filter: vec![1],
            broker_filter: vec![2],
            agent_capabilities: 3,
            disk_fd: Some(11),
        }),
        limit_view: Some(LimitViewConfig {
            files_fd: 12,
            stat_fd: 13,
            cpuinfo_fd: 14,
            memory: Some(MemoryFiles { limit_fd: 15, usage_fd: 16, stat_fd: 17 }),
            cpu_fd: Some(18),
        }),
        threads: Some(2),
        ..config()
    }
}

fn search_requests() -> Vec<VersionedRequest> {
    let glob = GlobRequest {
        path: text("/a"),
        pattern: text("**/*.rs"),
        exclude: Vec::new(),
        hidden: false,
        directories: false,
        metadata: false,
        order: GlobOrder::Path,
        descending: false,
        limit: 10,
    };
    let full_glob = GlobRequest {
        exclude: vec![text("target")],
        hidden: true,
        directories: true,
        metadata: true,
        order: GlobOrder::Modified,
        descending: true,
        ..glob.clone()
    };
    let grep = GrepRequest {
        path: text("/a"),
        pattern: text("x"),
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
        limit: 10,
    };
    let full_grep = GrepRequest {
        literal: true,
        ignore_case: true,
        multiline: true,
        before: 1,
        after: 2,
        include: vec![text("*.rs")],
        exclude: vec![text("target")],
        file_type: Some(text("rust")),
        recursive: false,
        max_file_bytes: Some(1024),
        offset: 3,
        ..grep.clone()
    };
    let ordered = |order| GlobRequest { order, ..glob.clone() };
    let requests = [
        FileOperation::Glob(glob.clone()),
        FileOperation::Glob(full_glob),
        FileOperation::Glob(ordered(GlobOrder::Name)),
        FileOperation::Glob(ordered(GlobOrder::Size)),
        FileOperation::Grep(grep),
        FileOperation::Grep(full_grep),
        FileOperation::ReadLines { path: text("/a"), start: 0, end: None },
        FileOperation::ReadLines { path: text("/a"), start: 2, end: Some(5) },
    ];
    let call = |operation| VersionedRequest { version: 1, request: file(operation) };
    requests.into_iter().map(call).collect()
}

fn search_replies() -> Vec<AgentReply> {
    let entry = GlobEntry { path: text("/a"), kind: FileKind::File, size: None, modified_ms: None };
    let found = GrepMatch {
        path: text("/a"),
        line: 7,
        text: text("x"),
        cut: false,
        before: Vec::new(),
        after: Vec::new(),
    };
    let full_match =
        GrepMatch { cut: true, before: vec![text("b")], after: vec![text("c")], ..found.clone() };
    let not_text =
        Fault { kind: FaultKind::NotText, errno: None, operation: "read".into(), subject: text("/a") };
    let full_entry = GlobEntry { size: Some(5), modified_ms: Some(-1), ..entry.clone() };
    vec![
        AgentReply::GlobEntries(vec![entry, full_entry]),
        AgentReply::GlobEnd(GlobSummary { total: 7, truncated: true }),
        AgentReply::GrepMatches(vec![found, full_match]),
        AgentReply::GrepEnd(GrepSummary { files_searched: 5, files_matched: 2, truncated: false }),
        AgentReply::Fault(not_text),
    ]
}

/// Checks that each recorded line means the value at its place, and that the value is still written
/// as that line.
fn check_recorded<T: Serialize + DeserializeOwned + PartialEq + Debug>(recorded: &str, values: &[T]) {
    let lines: Vec<&str> = recorded.lines().collect();
    assert_eq!(lines.len(), values.len(), "each value has a recorded line");
    for (line, value) in lines.into_iter().zip(values) {
        assert_eq!(serde_json::from_str::<T>(line).expect("it can be read"), *value, "{line}");
        assert_eq!(serde_json::to_string(value).expect("it can be written"), line);
    }
}

#[test]
fn replies_of_an_older_agent_have_kept_their_meaning() {
    check_recorded(include_str!("recorded/replies.jsonl"), &replies());
    check_recorded(include_str!("recorded/search_replies.jsonl"), &search_replies());
    check_recorded(include_str!("recorded/greetings.jsonl"), &[Greeting { version: 1 }]);
}

#[test]
fn requests_are_written_as_older_agents_read_them() {
    check_recorded(include_str!("recorded/requests.jsonl"), &calls());
    check_recorded(include_str!("recorded/search_requests.jsonl"), &search_requests());
}

#[test]
fn messages_about_edits_are_written_as_recorded() {
    let calls: Vec<_> =
        edit_requests().into_iter().map(|request| VersionedRequest { version: 1, request }).collect();
    check_recorded(include_str!("recorded/edit_requests.jsonl"), &calls);
    check_recorded(include_str!("recorded/edit_replies.jsonl"), &edit_replies());
}

#[test]
fn messages_about_shared_sessions_are_written_as_recorded() {
    check_recorded(include_str!("recorded/shared_session_requests.jsonl"), &shared_session_requests());
    check_recorded(include_str!("recorded/shared_session_replies.jsonl"), &shared_session_replies());
}

/// The first agents with shared sessions did not say what kind they are and how many runs they had.
#[test]
fn shared_session_of_an_older_agent_is_read() {
    let line =
        r#"{"session":{"session":"s1","busy":false,"terminal":false,"shared":{"opened_ms":1,"used_ms":2}}}"#;
    assert_eq!(serde_json::from_str::<AgentReply>(line).unwrap(), shared_session_replies()[0]);
}

#[test]
fn agent_configurations_are_written_as_before() {
    check_recorded(include_str!("recorded/configurations.jsonl"), &[config(), full_config()]);
}

/// Fields that the first agents did not send have the values that these agents meant.
#[test]
fn replies_without_later_fields_get_their_defaults() {
    let line = r#"{"status":{"process":"p1","pid":42,"command":"ls -l","started_ms":1000,"written":12}}"#;
    let expected = AgentReply::Status(ProcessStatus { first: 1 << 20, ..status() });
    assert_eq!(serde_json::from_str::<AgentReply>(line).unwrap(), expected);
}

/// The exchanges that `agent` plays to itself, as the server sees them.
#[test]
fn recorded_exchanges_are_read_by_the_server() {
    let mut replies = 0;
    for recorded in RecordedExchange::load_all() {
        let mut decoder = FrameDecoder::new();
        decoder.feed(&recorded.answered);
        let greeting = decoder.next_frame().unwrap().unwrap();
        assert_eq!(greeting.parse_message::<Greeting>().unwrap(), Greeting { version: 1 });
        while let Some(frame) = decoder.next_frame().unwrap() {
            if matches!(frame, Frame::Control(_)) {
                let reply = frame.parse_message::<AgentReply>();
                assert!(reply.is_ok(), "{}: {reply:?}", recorded.name);
                replies += 1;
            }
        }
    }
    assert!(replies >= 30, "the recordings contain replies");
}
