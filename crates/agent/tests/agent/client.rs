//! A blocking client of the protocol, as a server would use it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use wire::process::{
    CommandLine, ExitReason, OutputRetention, ProcessEnd, SignalProcess, SignalTarget, StartProcess,
    UserIdentity,
};
use wire::{AgentReply, AgentRequest, Fault, Frame, FrameDecoder, Greeting, StreamTag, VersionedRequest};

use crate::harness::TestAgent;

/// No reply in these tests takes this long unless something hangs.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// One connection.
pub(crate) struct TestConnection {
    stream: UnixStream,
    decoder: FrameDecoder,
    greeted: bool,
}

/// Everything received from a followed process.
#[derive(Debug)]
pub(crate) struct ProcessOutput {
    pub(crate) pieces: Vec<(StreamTag, u64, Vec<u8>)>,
    pub(crate) gaps: Vec<(u64, u64)>,
    pub(crate) ended: ProcessEnd,
}

pub(crate) fn shell(name: &str, text: &str) -> StartProcess {
    command(name, CommandLine::Shell { text: text.to_owned(), login: false })
}

pub(crate) fn argv(name: &str, words: &[&str]) -> StartProcess {
    command(name, CommandLine::Argv(words.iter().map(|word| (*word).to_owned()).collect()))
}

fn command(name: &str, command: CommandLine) -> StartProcess {
    StartProcess {
        process: name.to_owned(),
        command,
        identity: UserIdentity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        stdin: false,
        tag: None,
        deadline_ms: None,
        retention: OutputRetention { first: 1 << 20, last: 15 << 20, lossless: false, stall_ms: None },
        follow: true,
    }
}

impl TestAgent {
    pub(crate) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(REPLY_TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(REPLY_TIMEOUT)).unwrap();
        stream
    }

    /// Sends a request. The greeting is read with the first reply.
    pub(crate) fn send_request(&self, request: AgentRequest) -> TestConnection {
        let mut talk =
            TestConnection { stream: self.connect(), decoder: FrameDecoder::new(), greeted: false };
        talk.send(&Frame::from_message(&VersionedRequest { version: wire::VERSION, request }));
        talk
    }

    pub(crate) fn reply(&self, request: AgentRequest) -> AgentReply {
        self.send_request(request).reply()
    }

    pub(crate) fn start(&self, start: StartProcess) -> TestConnection {
        let mut talk = self.send_request(AgentRequest::Start(start));
        match talk.reply() {
            AgentReply::Started { pid } => assert!(pid > 0),
            other => panic!("expected Started, got {other:?}"),
        }
        talk
    }

    pub(crate) fn run(&self, start: StartProcess) -> ProcessOutput {
        self.start(start).output()
    }

    pub(crate) fn follow(&self, process: &str, from: u64) -> TestConnection {
        let mut talk = self.send_request(AgentRequest::Follow { process: process.to_owned(), from });
        match talk.reply() {
            AgentReply::Status(status) => assert_eq!(status.process, process),
            other => panic!("expected Status, got {other:?}"),
        }
        talk
    }

    pub(crate) fn fault(&self, request: AgentRequest) -> Fault {
        match self.reply(request) {
            AgentReply::Fault(fault) => fault,
            other => panic!("expected a fault, got {other:?}"),
        }
    }

    pub(crate) fn signal(&self, process: &str, signal: i32, reach: SignalTarget) -> AgentReply {
        self.reply(AgentRequest::Signal(SignalProcess { process: process.to_owned(), signal, reach }))
    }
}

impl TestConnection {
    pub(crate) fn send(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.stream.write_all(&bytes).unwrap();
    }

    /// The next frame; `None` if the agent has closed the connection.
    pub(crate) fn frame(&mut self) -> Option<Frame> {
        if !self.greeted {
            let greeting: Greeting = self.next_frame()?.parse_message().unwrap();
            assert_eq!(greeting.version, wire::VERSION);
            self.greeted = true;
        }
        self.next_frame()
    }

    fn next_frame(&mut self) -> Option<Frame> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return Some(frame);
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.decoder.feed(&buffer[..count]),
                // A socket with a timeout is interrupted also by signals that nobody handles.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("could not read from the agent: {error}"),
            }
        }
    }

    pub(crate) fn reply(&mut self) -> AgentReply {
        self.frame().expect("a reply comes before the end").parse_message().unwrap()
    }

    /// Reads output until this many bytes have arrived.
    pub(crate) fn read_text(&mut self, length: usize) -> String {
        let mut text = Vec::new();
        while text.len() < length {
            match self.frame().expect("the process has not ended") {
                Frame::Output { bytes, .. } => text.extend(bytes),
                other => panic!("expected output, got {other:?}"),
            }
        }
        String::from_utf8(text).unwrap()
    }

    /// Reads to the end, after which nothing may follow.
    pub(crate) fn output(mut self) -> ProcessOutput {
        let (mut pieces, mut gaps) = (Vec::new(), Vec::new());
        loop {
            match self.frame().expect("a process ends before its stream") {
                Frame::Output { stream, offset, bytes } => pieces.push((stream, offset, bytes.to_vec())),
                control => match control.parse_message().unwrap() {
                    AgentReply::Gap { from, to, .. } => gaps.push((from, to)),
                    AgentReply::Ended(ended) => {
                        assert_eq!(self.frame(), None);
                        return ProcessOutput { pieces, gaps, ended };
                    }
                    other => panic!("unexpected {other:?}"),
                },
            }
        }
    }

    pub(crate) fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }
}

impl ProcessOutput {
    pub(crate) fn exit(&self) -> ExitReason {
        self.ended.exit
    }

    /// All bytes of one stream.
    pub(crate) fn of(&self, stream: StreamTag) -> String {
        let bytes = self.pieces.iter().filter(|(tag, _, _)| *tag == stream).flat_map(|(_, _, bytes)| bytes);
        String::from_utf8(bytes.copied().collect()).unwrap()
    }

    pub(crate) fn stdout(&self) -> String {
        self.of(StreamTag::Stdout)
    }

    /// All bytes in their order, after checking that offsets and gaps omit and repeat nothing from
    /// `start` on.
    pub(crate) fn bytes_from(&self, start: u64) -> Vec<u8> {
        let mut parts: Vec<(u64, u64, &[u8])> = Vec::new();
        for (_, offset, bytes) in &self.pieces {
            parts.push((*offset, *offset + bytes.len() as u64, bytes));
        }
        parts.extend(self.gaps.iter().map(|(from, to)| (*from, *to, [].as_slice())));
        parts.sort_by_key(|(from, _, _)| *from);
        let mut next = start;
        let mut all = Vec::new();
        for (from, to, bytes) in parts {
            assert_eq!(from, next, "a byte is missing or duplicated");
            next = to;
            all.extend_from_slice(bytes);
        }
        assert_eq!(next, self.ended.written);
        all
    }
}
