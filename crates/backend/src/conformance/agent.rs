//! A minimal `wire` client that checks that an agent replies and runs commands.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wire::process::{Command, Exit, Identity, Retention, Start};
use wire::{Call, Decoder, Frame, Greeting, Reply, Request, VERSION};

use super::Made;
use crate::AgentStream;

/// A connection on which one request was sent and the greeting received.
pub(super) struct Connection {
    stream: AgentStream,
    decoder: Decoder,
}

/// The result of a command.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) exit: Exit,
    pub(super) output: String,
}

impl Made {
    async fn ask(&self, request: Request) -> Connection {
        let stream = self.backend.dial(&self.id).await.expect("the agent can be dialled");
        let mut connection = Connection { stream, decoder: Decoder::new() };
        let mut bytes = Vec::new();
        Frame::message(&Call { version: VERSION, request }).encode(&mut bytes);
        connection.stream.write_all(&bytes).await.expect("the agent listens");
        let greeting: Greeting = connection.frame().await.read().expect("the agent sends a greeting");
        assert!(greeting.version <= VERSION, "the agent's protocol is newer than ours");
        connection
    }

    /// Checks that the agent's event loop runs.
    pub(super) async fn ping(&self) {
        let reply = self.ask(Request::Ping).await.reply().await;
        assert_eq!(reply, Reply::Ok);
    }

    /// Runs a shell script to its end.
    pub(super) async fn run(&self, text: &str) -> Ran {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let process = format!("c0ffee{:026x}", NUMBER.fetch_add(1, Ordering::Relaxed));
        self.start(&process, text).await.rest().await
    }

    /// Starts a shell script and follows it.
    pub(super) async fn start(&self, process: &str, text: &str) -> Connection {
        let start = Start {
            process: process.to_owned(),
            command: Command::Shell { text: text.to_owned(), login: false },
            identity: Identity::Default,
            directory: None,
            env: BTreeMap::new(),
            terminal: None,
            stdin: false,
            tag: None,
            deadline_ms: None,
            retention: Retention { first: 0, last: 1 << 20, hold: false, stall_ms: None },
            follow: true,
        };
        let mut connection = self.ask(Request::Start(start)).await;
        let reply = connection.reply().await;
        assert!(matches!(reply, Reply::Started { .. }), "`{text}` could not be started: {reply:?}");
        connection
    }

    /// Follows a process from an offset.
    pub(super) async fn follow(&self, process: &str, from: u64) -> Connection {
        let mut connection = self.ask(Request::Follow { process: process.to_owned(), from }).await;
        let reply = connection.reply().await;
        assert!(matches!(reply, Reply::Status(_)), "`{process}` cannot be followed: {reply:?}");
        connection
    }

    /// Returns the number of bytes a process has printed.
    pub(super) async fn written(&self, process: &str) -> u64 {
        let reply = self.ask(Request::Status { process: process.to_owned() }).await.reply().await;
        let Reply::Status(status) = reply else { panic!("no status of `{process}`: {reply:?}") };
        status.written
    }
}

impl Connection {
    async fn frame(&mut self) -> Frame {
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

    async fn reply(&mut self) -> Reply {
        self.frame().await.read().expect("the agent replies")
    }

    /// Returns the next bytes that the process printed.
    pub(super) async fn output(&mut self) -> Vec<u8> {
        loop {
            if let Frame::Output { bytes, .. } = self.frame().await {
                return bytes.into();
            }
        }
    }

    /// Collects everything until the process ends.
    async fn rest(mut self) -> Ran {
        let mut output = Vec::new();
        loop {
            match self.frame().await {
                Frame::Output { bytes, .. } => output.extend(bytes),
                frame => match frame.read().expect("the agent replies") {
                    Reply::Ended(ended) => {
                        let output = String::from_utf8_lossy(&output).into_owned();
                        return Ran { exit: ended.exit, output };
                    }
                    Reply::Gap { .. } => {}
                    other => panic!("`{other:?}` instead of an end"),
                },
            }
        }
    }
}
