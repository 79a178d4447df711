//! A malicious agent: whatever it sends ends in an error or in harmless data, never in a panic, an endless wait or
//! unbounded memory.

use std::sync::Arc;
use std::time::Duration;

use backend::FoundCondition;
use domain::hook::HookCommand;
use domain::process::ProcessSpec;
use domain::{JournalOffset, ProcessId, SandboxId, UserIdentity};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;
use wire::file_edits::{ContentLengths, EditReport, UndoReport};
use wire::files::{FileInfo, FileKind, FileOperation, WatchEvent};
use wire::frame::MAX_PAYLOAD;
use wire::process::{ExitReason, ProcessEnd};
use wire::{AgentReply, AgentRequest, Frame, Greeting, StreamTag};

use super::TestBench;
use crate::agent::client::{AgentClient, OperationConnection};
use crate::clock::Clock;
use crate::exec::command_slots::CommandSlots;
use crate::exec::output_stream::{OutputStream, ReadPosition};
use crate::files::transfer::FileReader;
use crate::sandboxes::activity::SandboxActivity;
use crate::sandboxes::hooks;
use crate::{ErrorKind, FileFault, OutputEvent, ServiceError};
use testkit::fake_backend::{FakeBackend, encoded, ended};

fn output(offset: u64, bytes: &[u8]) -> Frame {
    Frame::Output { stream: StreamTag::Stdout, offset, bytes: bytes.to_vec().into() }
}

fn started() -> Frame {
    Frame::from_message(&AgentReply::Started { pid: 1 })
}

fn end(written: u64) -> Frame {
    Frame::from_message(&AgentReply::Ended(ProcessEnd { written, ..ended(ExitReason::Code(0)) }))
}

/// Launches a process in a sandbox whose agent answers with these bytes, and reads to the end.
async fn launched(bytes: Vec<u8>) -> Result<Vec<OutputEvent>, ServiceError> {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(move |request| matches!(request, AgentRequest::Start(_)).then(|| bytes.clone()));
    let mut following =
        bench.sandbox(&made.id).processes().launch_process(ProcessSpec::from_shell_text("true")).await?;
    let mut events = Vec::new();
    loop {
        events.push(following.next().await?);
        if matches!(events.last(), Some(OutputEvent::Ended(_))) {
            following.next().await.expect_err("nothing comes after the end");
            return Ok(events);
        }
    }
}

#[tokio::test]
async fn valid_output_is_accepted() {
    let frames = [
        started(),
        output(0, b"ab"),
        Frame::from_message(&AgentReply::Gap { from: 2, to: 9, stderr_before: None }),
        output(9, b"c"),
        end(10),
    ];
    assert_eq!(launched(encoded(&frames)).await.unwrap().len(), 4);
}

#[tokio::test]
async fn offsets_that_go_back_or_skip_bytes_are_refused() {
    for frames in [
        vec![output(0, b"abc"), output(1, b"b")],
        vec![output(1, b"b")],
        vec![output(0, b"abc"), output(7, b"b")],
        vec![output(0, b"")],
        vec![
            output(0, b"abc"),
            Frame::from_message(&AgentReply::Gap { from: 3, to: 3, stderr_before: None }),
        ],
        vec![
            output(0, b"abc"),
            Frame::from_message(&AgentReply::Gap { from: 0, to: 9, stderr_before: None }),
        ],
        vec![
            Frame::from_message(&AgentReply::Gap { from: 0, to: u64::MAX, stderr_before: None }),
            output(u64::MAX, b"ab"),
        ],
        vec![output(0, b"abc"), end(2)],
    ] {
        let frames: Vec<Frame> = [vec![started()], frames, vec![end(3)]].concat();
        let error = launched(encoded(&frames)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{frames:?}");
    }
}

#[tokio::test]
async fn frames_of_the_wrong_kind_or_length_are_refused() {
    let mut endless = encoded(&[started()]);
    endless.extend([0xff, 0xff, 0xff, 0xff, 3]);
    let mut unknown = encoded(&[started()]);
    unknown.extend([0, 0, 0, 0, 77]);
    for bytes in [
        endless,
        unknown,
        Vec::new(),
        encoded(&[Frame::Control(b"not json"[..].into())]),
        encoded(&[Frame::Control(b"{\"unheard_of\":1}"[..].into())]),
        encoded(&[Frame::from_message(&AgentReply::Ok)]),
        encoded(&[output(0, b"early")]),
        encoded(&[started(), Frame::Data(vec![1].into())]),
        encoded(&[started(), Frame::End]),
        encoded(&[started(), Frame::from_message(&AgentReply::Ok)]),
        encoded(&[started(), output(0, b"and then nothing")]),
    ] {
        let error = launched(bytes.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{bytes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn wait_for_a_silent_agent_is_limited() {
    let (ours, _theirs) = tokio::io::duplex(4096);
    let agent = AgentClient::new(FakeBackend::new(), SandboxId::from_entropy([1; 20]));
    let error = agent.first_answer::<AgentReply>(&mut alone(ours)).await.unwrap_err();
    assert!(error.to_string().contains("could not answer"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn wait_for_a_hook_is_little_longer_than_its_timeout() {
    let (backend, id) = (FakeBackend::new(), SandboxId::from_entropy([1; 20]));
    backend.put_sandbox(&id, FoundCondition::Alive);
    let agent = AgentClient::new(backend, id);
    let hook = HookCommand { command: vec!["sleep".to_owned()], timeout: Duration::from_secs(60) };
    let began = tokio::time::Instant::now();
    let error = hooks::run_before_hook(&agent, &hook).await.unwrap_err();
    assert!(
        matches!(&error, ServiceError::Hook { source: Some(source), .. } if
        source.to_string().contains("output of a process")),
        "{error:?}"
    );
    assert!(began.elapsed() > hook.timeout && began.elapsed() < hook.timeout * 2);
}

#[tokio::test]
async fn endless_answer_is_cut_off() {
    let (ours, mut theirs) = tokio::io::duplex(64 << 10);
    let sending = tokio::spawn(async move {
        let mut bytes = encoded(&[Frame::from_message(&Greeting { version: 1 })]);
        loop {
            theirs.write_all(&bytes).await?;
            bytes = encoded(&[Frame::Data(vec![b'['; MAX_PAYLOAD].into())]);
        }
        #[expect(unreachable_code, reason = "this names the type of the error above")]
        Ok::<(), std::io::Error>(())
    });
    let mut connection = alone(ours);
    let error = connection.next_answer().await.unwrap_err();
    assert!(error.to_string().contains("exceeds the limit"), "{error}");
    drop(connection);
    sending.await.unwrap().expect_err("the connection is closed");
}

/// The only connection to its agent.
fn alone(stream: tokio::io::DuplexStream) -> OperationConnection {
    OperationConnection::from_stream(Box::new(stream), Arc::new(Semaphore::new(1)))
}

#[tokio::test]
async fn one_long_answer_per_agent_is_held_at_a_time() {
    let turn = Arc::new(Semaphore::new(1));
    let connect = |bytes: Vec<u8>| {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let connection = OperationConnection::from_stream(Box::new(ours), Arc::clone(&turn));
        async move {
            theirs.write_all(&bytes).await.unwrap();
            (connection, theirs)
        }
    };
    let greeting = Frame::from_message(&Greeting { version: 1 });
    let endless = encoded(&[greeting.clone(), Frame::Data(bytes::Bytes::from_static(b"["))]);
    let whole = encoded(&[greeting, Frame::Data(bytes::Bytes::from_static(br#""ok""#)), Frame::End]);
    let (mut first, _stalling) = connect(endless).await;
    let first = tokio::spawn(async move { first.next_answer().await });
    while turn.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    let (mut second, _done) = connect(whole).await;
    let second = tokio::spawn(async move { second.next_answer().await });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!second.is_finished(), "the second answer did not wait for its turn");
    first.abort();
    assert_eq!(second.await.unwrap().unwrap(), Ok(AgentReply::Ok));
}

#[tokio::test]
async fn unknown_protocol_version_is_refused() {
    for version in [0, wire::VERSION + 1, u32::MAX] {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let frames = [Frame::from_message(&Greeting { version }), Frame::from_message(&AgentReply::Ok)];
        theirs.write_all(&encoded(&frames)).await.unwrap();
        assert!(alone(ours).next_answer().await.is_err(), "{version}");
    }
}

fn entry(path: String) -> FileInfo {
    FileInfo {
        path,
        kind: FileKind::File,
        size: 1,
        mode: 0o644,
        uid: 0,
        gid: 0,
        owner: "root".to_owned(),
        group: "root".to_owned(),
        modified_ms: i64::MAX,
        created_ms: i64::MIN,
        link_target: None,
    }
}

#[tokio::test]
async fn too_large_listing_is_refused() {
    let few_but_long = vec![entry("n".repeat(MAX_PAYLOAD - 1000))];
    let many = vec![entry("n".to_owned()); 5000];
    for page in [few_but_long, many, Vec::new()] {
        let bench = TestBench::new().await;
        let made = bench.create().await;
        let page = encoded(&[Frame::from_message(&AgentReply::Entries(page))]);
        let pages = page.repeat((80 << 20) / page.len());
        bench
            .backend
            .set_script(move |request| matches!(request, AgentRequest::File(_)).then(|| pages.clone()));
        let listed = bench.sandbox(&made.id).files().list_directory(&UserIdentity::Default, "/", 9).await;
        assert_eq!(listed.unwrap_err().kind(), ErrorKind::File(FileFault::TooLarge));
    }
}

#[tokio::test]
async fn paged_listing_has_times_within_the_calendar() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let page =
        Frame::from_message(&AgentReply::Entries(vec![entry("/a".to_owned()), entry("/b".to_owned())]));
    let pages = encoded(&[page.clone(), page, Frame::End]);
    bench.backend.set_script(move |request| matches!(request, AgentRequest::File(_)).then(|| pages.clone()));
    let identity = UserIdentity::User("root".to_owned());
    let listed = bench.sandbox(&made.id).files().search_files(&identity, "/", "*").await.unwrap();
    assert_eq!(listed.len(), 4);
    assert!(listed[0].created < listed[0].modified);
}

#[tokio::test]
async fn more_file_bytes_than_requested_are_refused() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| match request {
        AgentRequest::File(request) if matches!(request.operation, FileOperation::Read { .. }) => {
            Some(encoded(&[
                Frame::from_message(&AgentReply::Reading { size: 100 }),
                Frame::Data(vec![0; 6].into()),
                Frame::Data(vec![0; 6].into()),
                Frame::End,
            ]))
        }
        _ => None,
    });
    let sandbox = bench.sandbox(&made.id);
    let read = |length| sandbox.files().read_file(&UserIdentity::Default, "/a", 0, length);
    let mut reading = read(Some(10)).await.unwrap();
    assert_eq!(reading.size, 100);
    assert_eq!(reading.next().await.unwrap().unwrap().len(), 6);
    reading.next().await.unwrap_err();
    assert!(reading.next().await.unwrap().is_none(), "after an error there is nothing more");
    let mut reading = read(Some(12)).await.unwrap();
    while reading.next().await.unwrap().is_some() {}
}

#[tokio::test]
async fn cause_of_a_failed_write_is_reported_even_if_the_agent_hangs_up() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| {
        let mut full = testkit::fake_backend::fault(wire::FaultKind::NoSpace);
        full.errno = Some(28);
        let full = encoded(&[Frame::from_message(&AgentReply::Fault(full))]);
        matches!(request, AgentRequest::File(_)).then(|| full)
    });
    let (identity, attributes) = (UserIdentity::Default, crate::FileAttributes::default());
    let request = crate::WriteFileRequest { mode: crate::WriteMode::Append, attributes, new_file_mode: None };
    let sandbox = bench.sandbox(&made.id);
    let write = sandbox.files().write_file(&identity, "/a", request);
    let mut writing = write.await.unwrap();
    let error = loop {
        if let Err(error) = writing.send_bytes(bytes::Bytes::from(vec![0; 1 << 20])).await {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::File(FileFault::NoSpace));
}

#[tokio::test]
async fn text_of_a_fault_is_bounded() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| {
        let mut fault = testkit::fake_backend::fault(wire::FaultKind::Other);
        fault.subject = "ü".repeat(100_000);
        matches!(request, AgentRequest::File(_))
            .then(|| encoded(&[Frame::from_message(&AgentReply::Fault(fault))]))
    });
    let error = bench
        .sandbox(&made.id)
        .files()
        .stat_files(&UserIdentity::Default, &["/".to_owned()])
        .await
        .unwrap_err();
    assert!(error.to_string().len() < 5000);
}

#[tokio::test]
async fn a_request_too_long_for_a_frame_is_refused_before_it_is_sent() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let long = ProcessSpec::from_shell_text("x".repeat(MAX_PAYLOAD));
    let error = bench.sandbox(&made.id).processes().launch_process(long).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn tunnel_returns_bytes_received_with_the_answer_first() {
    use tokio::io::AsyncReadExt;
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| {
        let mut bytes = encoded(&[Frame::from_message(&AgentReply::Ok)]);
        bytes.extend(b"hello from inside");
        matches!(request, AgentRequest::Tunnel { .. }).then_some(bytes)
    });
    let mut tunnel = bench.sandbox(&made.id).ports().open_tunnel(80).await.unwrap();
    let mut text = String::new();
    tunnel.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "hello from inside");
}

fn edited(contents: ContentLengths) -> Frame {
    Frame::from_message(&AgentReply::Edited(EditReport {
        changed: true,
        matches: u64::MAX,
        match_lines: vec![u64::MAX; 5000],
        lines: 0,
        undoable: true,
        contents,
    }))
}

fn undone(contents: ContentLengths) -> Frame {
    Frame::from_message(&AgentReply::Undone(UndoReport {
        outcome: wire::file_edits::UndoOutcome::Restored,
        changed_since: true,
        steps_left: u64::MAX,
        contents,
    }))
}

/// Edits and undoes an edit, each answered with its own first frame and then these.
async fn edit_and_undo(
    contents: ContentLengths,
    rest: &[Frame],
) -> (Result<crate::EditedFile, ServiceError>, Result<crate::UndoneEdit, ServiceError>) {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let answer = |first: Frame| encoded(&[&[first][..], rest].concat());
    let (edited, undone) = (answer(edited(contents)), answer(undone(contents)));
    bench.backend.set_script(move |request| match request {
        AgentRequest::File(request) => match request.operation {
            FileOperation::Edit { .. } => Some(edited.clone()),
            FileOperation::UndoEdit { .. } => Some(undone.clone()),
            _ => None,
        },
        _ => None,
    });
    let sandbox = bench.sandbox(&made.id);
    let edit = crate::TextEdit::Insert { after_line: 0, line_ends: crate::LineEnds::Exact };
    let text = bytes::Bytes::from_static(b"text");
    let edited = sandbox.files().edit_file(&UserIdentity::Default, "/a", edit, text, 10).await;
    let policy = crate::UndoPolicy::Overwrite;
    (edited, sandbox.files().undo_edit(&UserIdentity::Default, "/a", policy, 10).await)
}

fn data(length: usize) -> Frame {
    Frame::Data(vec![b'x'; length].into())
}

#[tokio::test]
async fn contents_of_an_edit_are_those_that_were_announced() {
    let contents = ContentLengths { old: Some(3), new: Some(2) };
    let (edited, undone) = edit_and_undo(contents, &[data(1), data(4), Frame::End]).await;
    let edited = edited.unwrap();
    assert!(edited.match_lines.len() < 1000);
    for contents in [edited.contents, undone.unwrap().contents] {
        assert_eq!((contents.old.unwrap().len(), contents.new.unwrap().len()), (3, 2));
    }
}

#[tokio::test]
async fn contents_of_an_edit_are_bounded() {
    let lengths = |old, new| ContentLengths { old: Some(old), new: Some(new) };
    for (contents, rest) in [
        (lengths(11, 0), vec![data(11), Frame::End]),
        (lengths(0, u64::MAX), vec![data(1), Frame::End]),
        (lengths(u64::MAX, u64::MAX), vec![Frame::End]),
        (lengths(3, 2), vec![data(6), Frame::End]),
        (lengths(3, 2), vec![data(4), Frame::End]),
        (lengths(3, 2), vec![data(0); 3]),
        (lengths(3, 2), vec![output(0, b"x")]),
        (lengths(3, 2), vec![undone(ContentLengths::default())]),
        (lengths(3, 2), vec![Frame::Control(b"{"[..].into())]),
        (ContentLengths::default(), vec![data(1), Frame::End]),
    ] {
        let (edited, undone) = edit_and_undo(contents, &rest).await;
        assert_eq!(edited.unwrap_err().kind(), ErrorKind::Internal, "{contents:?}");
        assert_eq!(undone.unwrap_err().kind(), ErrorKind::Internal, "{contents:?}");
    }
}

#[tokio::test]
async fn agent_that_does_not_know_edits_is_reported_as_such() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    bench.backend.set_script(|request| {
        let unsupported = testkit::fake_backend::fault(wire::FaultKind::Unsupported);
        matches!(request, AgentRequest::File(_))
            .then(|| encoded(&[Frame::from_message(&AgentReply::Fault(unsupported))]))
    });
    let sandbox = bench.sandbox(&made.id);
    let edit = crate::TextEdit::Insert { after_line: 0, line_ends: crate::LineEnds::AsInFile };
    let text = bytes::Bytes::from(vec![b'x'; 3 << 20]);
    let error = sandbox.files().edit_file(&UserIdentity::Default, "/a", edit, text, 0).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let policy = crate::UndoPolicy::Refuse;
    let error = sandbox.files().undo_edit(&UserIdentity::Default, "/a", policy, 0).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn events_of_a_watch_are_in_order() {
    let watched = |sequence| {
        let event = WatchEvent::new("/a".to_owned(), wire::files::FileChange::Written);
        let (modified_ms, inode) = (Some(i64::MAX), Some(u64::MAX));
        Frame::from_message(&AgentReply::Watched(WatchEvent { sequence, modified_ms, inode, ..event }))
    };
    let events = async |sequences: &[Option<u64>]| {
        let bench = TestBench::new().await;
        let made = bench.create().await;
        let frames = sequences.iter().map(|sequence| watched(*sequence));
        let bytes: Vec<Frame> = std::iter::once(Frame::from_message(&AgentReply::Ok)).chain(frames).collect();
        let bytes = encoded(&bytes);
        bench
            .backend
            .set_script(move |request| matches!(request, AgentRequest::File(_)).then(|| bytes.clone()));
        let sandbox = bench.sandbox(&made.id);
        let mut watch = sandbox.files().watch_files(&UserIdentity::Default, "/", true).await.unwrap();
        let mut numbers = Vec::new();
        for _ in sequences {
            numbers.push(watch.next().await.map(|event| event.unwrap().sequence));
        }
        numbers
    };
    let numbers: Vec<_> =
        events(&[None, None, Some(7), None]).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(numbers, [1, 2, 7, 8], "an older agent does not number its events");
    for wrong in [[Some(1), Some(1)], [Some(2), Some(1)], [Some(u64::MAX), None]] {
        let mut numbers = events(&wrong).await;
        assert_eq!(numbers.pop().unwrap().unwrap_err().kind(), ErrorKind::Internal);
    }
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..60);
    let number = || prop_oneof![0u64..20, any::<u64>()];
    let message = prop_oneof![
        (number(), number(), proptest::option::of(number()))
            .prop_map(|(from, to, stderr_before)| AgentReply::Gap { from, to, stderr_before }),
        number().prop_map(|written| AgentReply::Ended(ProcessEnd { written, ..ended(ExitReason::Lost) })),
        number().prop_map(|size| AgentReply::Reading { size }),
        Just(AgentReply::Ok),
        Just(AgentReply::Statuses(vec![testkit::fake_backend::running("../etc")])),
    ];
    prop_oneof![
        message.prop_map(|reply| Frame::from_message(&reply)),
        bytes().prop_map(|bytes| Frame::Control(bytes.into())),
        bytes().prop_map(|bytes| Frame::Data(bytes.into())),
        Just(Frame::End),
        (number(), bytes()).prop_map(|(offset, bytes)| output(offset, &bytes)),
    ]
}

/// Reads these bytes in every way in which the service reads from an agent.
async fn read_everything(bytes: &[u8]) {
    let agent = AgentClient::new(FakeBackend::new(), SandboxId::from_entropy([1; 20]));
    let activity = SandboxActivity::new(Clock::from_host());
    let connection = async || {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        theirs.write_all(bytes).await.unwrap();
        alone(ours)
    };
    let mut answers = connection().await;
    while answers.next_answer().await.is_ok() {}
    let process = ProcessId::from_entropy([1; 16]);
    let mut following = OutputStream::new(
        process,
        agent.clone(),
        connection().await,
        ReadPosition::starting_at(JournalOffset(3).0, 5),
        CommandSlots::new(1),
        activity.start_use(),
    );
    while following.next().await.is_ok() {}
    let mut reading = FileReader::new(agent.clone(), connection().await, 10, Some(100), activity.start_use());
    while let Ok(Some(_)) = reading.next().await {}
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_bytes_never_panic_and_always_end(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
        let reading = async { tokio::time::timeout(Duration::from_secs(20), read_everything(&bytes)).await };
        prop_assert!(runtime().block_on(reading).is_ok());
    }

    #[test]
    fn random_frames_never_panic_and_always_end(frames in proptest::collection::vec(any_frame(), 0..12)) {
        let mut all = vec![Frame::from_message(&Greeting { version: 1 })];
        all.extend(frames);
        let bytes = encoded(&all);
        let reading = async { tokio::time::timeout(Duration::from_secs(20), read_everything(&bytes)).await };
        prop_assert!(runtime().block_on(reading).is_ok());
    }
}
