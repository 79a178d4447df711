//! An agent of an older server, which outlives it: this server reads its answers as they were meant.
//!
//! The answers are those of the first version of the protocol, recorded in `crates/agent/tests/recorded`. Each is given
//! to the request that it was recorded for, as this server sends it today.

use std::fmt::Debug;

use domain::process::{CommandLine, ProcessSpec};
use domain::{Backpressure, JournalOffset, OutputRetention, ProcessId, SessionId, UserIdentity};
use serde_json::Value;
use testkit::recorded_exchange::RecordedExchange;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use wire::{Frame, FrameDecoder};

use super::TestBench;
use crate::{
    BusyPolicy, FileAttributes, FileEdit, OpenSessionRequest, OutputEvent, OutputStream, RunShell,
    SandboxRef, ServiceError, SessionRunRequest, SignalTarget, WriteFileRequest, WriteMode,
};

/// The request that no server can send on purpose; its answer is given to another one.
const UNKNOWN_REQUEST: &str = "02-unknown-request";

/// An agent that answers one request as it was recorded.
#[derive(Clone)]
struct RecordedAgent {
    name: String,
    request: Vec<Frame>,
    /// The bytes of the agent, from its greeting on.
    answer: Vec<u8>,
}

impl RecordedAgent {
    fn new(recorded: RecordedExchange) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.feed(&recorded.sent);
        let request = std::iter::from_fn(|| decoder.next_frame().unwrap()).collect();
        Self { name: recorded.name, request, answer: recorded.answered }
    }

    /// Receives a request of the same kind and answers it; a file is received to its end before.
    async fn play(self, mut stream: DuplexStream) {
        let (mut decoder, mut buffer) = (FrameDecoder::new(), [0; 4096]);
        let mut received = Vec::new();
        let is_complete = |received: &[Frame]| match self.request.last() {
            Some(Frame::End) => received.last() == Some(&Frame::End),
            _ => !received.is_empty(),
        };
        while !is_complete(&received) {
            match decoder.next_frame().unwrap() {
                Some(frame) => received.push(frame),
                None => match stream.read(&mut buffer).await {
                    Ok(count) if count > 0 => decoder.feed(&buffer[..count]),
                    _ => return,
                },
            }
        }
        if self.name != UNKNOWN_REQUEST {
            assert_eq!(request_kind(&received[0]), request_kind(&self.request[0]), "{}", self.name);
        }
        stream.write_all(&self.answer).await.unwrap();
    }
}

/// The name of a request, and of its operation if it is about files.
fn request_kind(frame: &Frame) -> [Option<String>; 2] {
    let name = |value: &Value| {
        let object = value.as_object().and_then(|object| object.keys().next().cloned());
        object.or_else(|| value.as_str().map(str::to_owned))
    };
    let request = frame.parse_message::<Value>().unwrap()["request"].take();
    [name(&request), name(&request["file"]["operation"])]
}

/// Shows a result, an error by its kind.
fn show<T: Debug>(result: Result<T, ServiceError>) -> String {
    format!("{:?}", result.map_err(|error| error.kind()))
}

/// The output of a process, and how it ended.
async fn read_output(started: Result<OutputStream, ServiceError>) -> Result<String, ServiceError> {
    let (mut stream, mut text) = (started?, String::new());
    loop {
        match stream.next().await? {
            OutputEvent::Output { bytes, .. } => text.push_str(std::str::from_utf8(&bytes).unwrap()),
            OutputEvent::Gap { .. } => text.push_str("[gap]"),
            OutputEvent::Ended(end) => {
                let usage = (end.duration.as_millis(), end.user.as_millis(), end.max_rss.0 >> 10);
                return Ok(format!("{text:?} {:?} {usage:?}", end.exit));
            }
        }
    }
}

async fn read_file(sandbox: &SandboxRef, offset: u64, length: Option<u64>) -> Result<String, ServiceError> {
    let mut reader =
        sandbox.files().read_file(&UserIdentity::Default, "deep/er/file", offset, length).await?;
    let mut bytes = Vec::new();
    while let Some(piece) = reader.next().await? {
        bytes.extend(piece);
    }
    Ok(format!("{:?} of {}", String::from_utf8(bytes).unwrap(), reader.size))
}

async fn write_file(sandbox: &SandboxRef, mode: WriteMode) -> Result<(), ServiceError> {
    let attributes = FileAttributes { mode: Some(0o640), ..FileAttributes::default() };
    let request = WriteFileRequest { mode, attributes, new_file_mode: None };
    let mut writer = sandbox.files().write_file(&UserIdentity::Default, "deep/er/file", request).await?;
    writer.send_bytes("hello ".into()).await?;
    writer.send_bytes("wörld\n".into()).await?;
    writer.finish().await
}

/// Sends the request of a recording about processes or ports. Returns what this server made of the answer, and what it
/// should.
async fn ask_processes(sandbox: &SandboxRef, name: &str) -> Option<(String, &'static str)> {
    let processes = sandbox.processes();
    let id = ProcessId::parse("00000000000000000000000000000003").unwrap();
    let launch =
        |command| async move { read_output(processes.launch_process(ProcessSpec::new(command)).await).await };
    let shell = |text: &str| CommandLine::Shell { text: text.to_owned(), login: false };
    Some(match name {
        "01-ping" => (show(sandbox.handle.agent.ping().await), "Ok(())"),
        UNKNOWN_REQUEST => (show(sandbox.handle.agent.ping().await), "Err(Unsupported)"),
        "03-malformed-request" => (show(launch(shell("true")).await), "Err(File(Invalid))"),
        "04-no-processes" => (show(processes.list_processes().await), "Ok([])"),
        "06-status-unknown-process" => (show(processes.process_status(&id).await), "Err(NoProcess)"),
        "07-start-missing-program" => {
            let command = CommandLine::Argv(vec!["no-such-program".to_owned(), "x".to_owned()]);
            (show(launch(command).await), "Err(File(NotFound))")
        }
        "08-signal-unknown-process" => {
            (show(processes.signal_process(&id, 15, SignalTarget::Tree).await), "Err(NoProcess)")
        }
        "23-tunnel-refused" => (show(sandbox.ports().open_tunnel(1).await.map(drop)), "Err(Refused)"),
        "24-start-and-follow" => {
            let output = launch(shell("printf one; exit 3")).await;
            (output.unwrap(), r#""one" Code(3) (3, 1, 2744)"#)
        }
        "25-follow-from-offset" => {
            let followed = processes.follow_output_with_status(&id, JournalOffset(1)).await.unwrap();
            let status = followed.status;
            assert_eq!((&status.process, status.tag.as_deref(), status.written), (&id, Some("t"), 3));
            assert_eq!(status.command, "printf one; exit 3");
            (read_output(Ok(followed.output)).await.unwrap(), r#""ne" Code(3) (3, 1, 2744)"#)
        }
        "26-forget" => (show(processes.forget_process(&id).await), "Ok(())"),
        _ => return None,
    })
}

/// Like [`ask_processes`], for recordings about files.
async fn ask_files(sandbox: &SandboxRef, name: &str) -> Option<(String, &'static str)> {
    let (files, user) = (sandbox.files(), &UserIdentity::Default);
    Some(match name {
        "09-write-file" => (show(write_file(sandbox, WriteMode::Replace).await), "Ok(())"),
        "10-append-file" => (show(write_file(sandbox, WriteMode::Append).await), "Ok(())"),
        "11-read-file" => (read_file(sandbox, 0, None).await.unwrap(), r#""hello wörld\nand more\n" of 22"#),
        "12-read-range" => (read_file(sandbox, 6, Some(5)).await.unwrap(), r#""wörl" of 22"#),
        "13-replace-text" => {
            let (path, old, new) = ("deep/er/file".to_owned(), "o".to_owned(), "0".to_owned());
            (show(files.replace_text(user, vec![FileEdit { path, old, new }]).await), "Ok([2])")
        }
        "14-move-file" => (show(files.move_file(user, "deep/er/file", "other/place", false).await), "Ok(())"),
        "15-read-moved" => (read_file(sandbox, 0, None).await.unwrap(), r#""hell0 wörld\nand m0re\n" of 22"#),
        "16-list-nothing" => (show(files.list_directory(user, "deep", 0).await), "Ok([])"),
        "17-search-nothing" => (show(files.search_files(user, "deep", "*.none").await), "Ok([])"),
        "18-make-directory" => {
            (show(files.make_directory(user, "a/b/c", FileAttributes::default()).await), "Ok(())")
        }
        "19-remove-tree" | "20-remove-again" => (show(files.remove_file(user, "deep", true).await), "Ok(())"),
        "21-unknown-user" => {
            let unknown = UserIdentity::User("no-such-user".to_owned());
            (show(files.stat_files(&unknown, &["/".to_owned()]).await), "Err(File(NotFound))")
        }
        "22-stat-missing" => {
            (show(files.stat_files(user, &["/no/such/path".to_owned()]).await), "Err(File(NotFound))")
        }
        _ => return None,
    })
}

/// Like [`ask_processes`], for recordings about sessions.
async fn ask_sessions(sandbox: &SandboxRef, name: &str) -> Option<(String, &'static str)> {
    let (sessions, id) = (sandbox.sessions(), SessionId::from_entropy([7; 16]));
    Some(match name {
        "05-no-sessions" => (show(sessions.list_sessions().await), "Ok([])"),
        "27-open-session" => {
            let request = OpenSessionRequest {
                identity: UserIdentity::Default,
                directory: None,
                env: Default::default(),
                terminal: None,
                isolation: None,
            };
            (show(sessions.open_session(request).await.map(drop)), "Ok(())")
        }
        "28-run-in-session" => {
            let run = SessionRunRequest {
                text: "pwd; exit 5".to_owned(),
                directory: None,
                deadline: None,
                retention: OutputRetention::default(),
                backpressure: Backpressure::Off,
                busy: BusyPolicy::Refuse,
                env: Default::default(),
                shell: RunShell::Shell,
            };
            let output = read_output(sessions.run_in_session(&id, run).await).await;
            (output.unwrap(), r#""/usr\n" Code(5) (7, 1, 2844)"#)
        }
        "29-close-session" => (show(sessions.close_session(&id).await), "Ok(())"),
        "30-close-unknown-session" => (show(sessions.close_session(&id).await), "Err(NoSession)"),
        _ => return None,
    })
}

#[tokio::test]
async fn recorded_answers_of_the_first_version_are_understood() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let sandbox = bench.sandbox(&made.id);
    for recorded in RecordedExchange::load_all() {
        let agent = RecordedAgent::new(recorded);
        let name = agent.name.clone();
        bench.backend.set_agent(move |stream| agent.clone().play(stream));
        let understood = match ask_processes(&sandbox, &name).await {
            Some(asked) => Some(asked),
            None => match ask_files(&sandbox, &name).await {
                Some(asked) => Some(asked),
                None => ask_sessions(&sandbox, &name).await,
            },
        };
        let (understood, expected) = understood.unwrap_or_else(|| panic!("no request for `{name}`"));
        assert_eq!(understood, expected, "{name}");
    }
}
