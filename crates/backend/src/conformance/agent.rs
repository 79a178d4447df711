//! A minimal `wire` client that checks that an agent replies and runs commands.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wire::process::{CommandLine, ExitReason, OutputRetention, StartProcess, UserIdentity};
use wire::{AgentReply, AgentRequest, Frame, FrameDecoder, Greeting, VERSION, VersionedRequest};

use super::TestSandbox;
use crate::AgentStream;

/// A connection on which one request was sent and the greeting received.
pub(super) struct ConformanceConnection {
    stream: AgentStream,
    decoder: FrameDecoder,
}

/// The result of a command.
#[derive(Debug)]
pub(super) struct CommandResult {
    pub(super) exit: ExitReason,
    pub(super) output: String,
}

impl TestSandbox {
    async fn send_request(&self, request: AgentRequest) -> ConformanceConnection {
        self.send_frames(request, &[]).await
    }

    pub(super) async fn read_first_reply(&self, request: AgentRequest) -> AgentReply {
        self.send_request(request).await.read_reply().await
    }

    /// Sends a request and the text that belongs to it, and returns the first reply.
    pub(super) async fn send_request_with_text(&self, request: AgentRequest, text: &str) -> AgentReply {
        let text = Frame::Data(text.as_bytes().to_vec().into());
        self.send_frames(request, &[text, Frame::End]).await.read_reply().await
    }

    async fn send_frames(&self, request: AgentRequest, frames: &[Frame]) -> ConformanceConnection {
        let stream = self.backend.dial_agent(&self.id).await.expect("the agent can be dialled");
        let mut connection = ConformanceConnection { stream, decoder: FrameDecoder::new() };
        let mut bytes = Vec::new();
        Frame::from_message(&VersionedRequest { version: VERSION, request }).encode(&mut bytes);
        for frame in frames {
            frame.encode(&mut bytes);
        }
        connection.stream.write_all(&bytes).await.expect("the agent listens");
        let greeting: Greeting =
            connection.next_frame().await.parse_message().expect("the agent sends a greeting");
        assert!(greeting.version <= VERSION, "the agent's protocol is newer than ours");
        connection
    }

    /// Checks that the agent's event loop runs.
    pub(super) async fn ping(&self) {
        let reply = self.send_request(AgentRequest::Ping).await.read_reply().await;
        assert_eq!(reply, AgentReply::Ok);
    }

    /// Runs a shell script to its end.
    pub(super) async fn run_script(&self, text: &str) -> CommandResult {
        static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);
        let process = format!("c0ffee{:026x}", NEXT_NUMBER.fetch_add(1, Ordering::Relaxed));
        self.start_script(&process, text).await.collect_output().await
    }

    /// Starts a shell script and follows it.
    pub(super) async fn start_script(&self, process: &str, text: &str) -> ConformanceConnection {
        let start = StartProcess {
            process: process.to_owned(),
            command: CommandLine::Shell { text: text.to_owned(), login: false },
            identity: UserIdentity::Default,
            directory: None,
            env: BTreeMap::new(),
            terminal: None,
            stdin: false,
            tag: None,
            deadline_ms: None,
            retention: OutputRetention { first: 0, last: 1 << 20, lossless: false, stall_ms: None },
            follow: true,
        };
        let mut connection = self.send_request(AgentRequest::Start(start)).await;
        let reply = connection.read_reply().await;
        assert!(matches!(reply, AgentReply::Started { .. }), "`{text}` could not be started: {reply:?}");
        connection
    }

    /// Follows a process from an offset.
    pub(super) async fn follow_process(&self, process: &str, from: u64) -> ConformanceConnection {
        let mut connection =
            self.send_request(AgentRequest::Follow { process: process.to_owned(), from }).await;
        let reply = connection.read_reply().await;
        assert!(matches!(reply, AgentReply::Status(_)), "`{process}` cannot be followed: {reply:?}");
        connection
    }

    /// Returns the number of bytes a process has printed.
    pub(super) async fn output_length(&self, process: &str) -> u64 {
        let reply =
            self.send_request(AgentRequest::Status { process: process.to_owned() }).await.read_reply().await;
        let AgentReply::Status(status) = reply else { panic!("no status of `{process}`: {reply:?}") };
        status.written
    }
}

impl ConformanceConnection {
    async fn next_frame(&mut self) -> Frame {
        let mut buffer = [0; 16 << 10];
        loop {
            if let Some(frame) = self.decoder.next_frame().expect("the agent sends valid frames") {
                return frame;
            }
            let length = self.stream.read(&mut buffer).await.expect("the connection can be read");
            assert_ne!(length, 0, "the agent ended the connection too early");
            self.decoder.feed(&buffer[..length]);
        }
    }

    async fn read_reply(&mut self) -> AgentReply {
        self.next_frame().await.parse_message().expect("the agent replies")
    }

    /// Returns the next bytes that the process printed.
    pub(super) async fn next_output(&mut self) -> Vec<u8> {
        loop {
            if let Frame::Output { bytes, .. } = self.next_frame().await {
                return bytes.into();
            }
        }
    }

    /// Collects everything until the process ends.
    async fn collect_output(mut self) -> CommandResult {
        let mut output = Vec::new();
        loop {
            match self.next_frame().await {
                Frame::Output { bytes, .. } => output.extend(bytes),
                frame => match frame.parse_message().expect("the agent replies") {
                    AgentReply::Ended(ended) => {
                        let output = String::from_utf8_lossy(&output).into_owned();
                        return CommandResult { exit: ended.exit, output };
                    }
                    AgentReply::Gap { .. } => {}
                    other => panic!("`{other:?}` instead of an end"),
                },
            }
        }
    }
}
