//! The client of the agent in a sandbox, over the `wire` protocol.
//!
//! The agent is not trusted. Everything it sends is bounded in length (by the decoder), in number and in time (here),
//! and a message that cannot be true ends the connection with an error. One connection carries one operation, so
//! operations share nothing and do not wait for each other.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use backend::{AgentStream, SharedBackend};
use bytes::{Buf, Bytes};
use domain::{SandboxId, Spec};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio_util::io::poll_read_buf;
use wire::frame::{Header, Kind, MAX_PAYLOAD};
use wire::{Call, Decoder, Fault, Frame, FrameError, Greeting, Reply, Request};

use crate::ErrorKind;
use crate::error::ServiceError;

/// How long connecting to the agent may take.
const DIAL: Duration = Duration::from_secs(5);

/// How long the agent may take for its first answer.
pub(crate) const FIRST_ANSWER: Duration = Duration::from_secs(30);

/// How long a transfer of bulk bytes or a long listing may make no progress.
pub(crate) const STALL: Duration = Duration::from_secs(120);

/// How much is read from the connection at once: little at first, since most answers are short and many connections are
/// idle, and more as long as the agent fills the buffer.
const LEAST_READ: usize = 4 << 10;
const MOST_READ: usize = 256 << 10;

/// The most bytes that an answer spread over several frames may have.
const LONG_ANSWER: usize = 16 << 20;

/// How many long answers are held in memory at once, for all agents together. Each agent has one at a time, so a single
/// malicious agent delays only itself.
static LONG_ANSWERS: Semaphore = Semaphore::const_new(32);

/// A failed exchange with an agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("waited too long to {0}")]
    TooSlow(&'static str),
    #[error("the connection broke")]
    Broken(#[source] io::Error),
    #[error("the connection ended too early")]
    EndedEarly,
    #[error("malformed message")]
    Frame(#[source] FrameError),
    #[error("protocol version {0} is not supported by this server")]
    Version(u32),
    #[error("protocol violation: {0}")]
    Impossible(&'static str),
    #[error("`{operation}` of `{subject}` failed{}", errno_text(*errno))]
    Fault { operation: String, subject: String, errno: Option<i32> },
    #[error("the request is not supported by this agent")]
    Unsupported,
}

impl AgentError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Unsupported => ErrorKind::Unsupported,
            Self::TooSlow(_)
            | Self::Broken(_)
            | Self::EndedEarly
            | Self::Frame(_)
            | Self::Version(_)
            | Self::Impossible(_)
            | Self::Fault { .. } => ErrorKind::Internal,
        }
    }
}

fn errno_text(errno: Option<i32>) -> String {
    errno.map(|errno| format!(": {}", io::Error::from_raw_os_error(errno))).unwrap_or_default()
}

/// The client of one sandbox's agent.
#[derive(Clone)]
pub(crate) struct Agent {
    backend: SharedBackend,
    id: SandboxId,
    /// Held while a long answer is read.
    long: Arc<Semaphore>,
}

impl Agent {
    pub(crate) fn new(backend: SharedBackend, id: SandboxId) -> Self {
        Self { backend, id, long: Arc::new(Semaphore::new(1)) }
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Connects and sends the request; the caller reads the answer.
    pub(crate) async fn call(&self, request: Request) -> Result<Connection, ServiceError> {
        let call = Frame::message(&Call { version: wire::VERSION, request });
        if matches!(&call, Frame::Control(json) if json.len() > MAX_PAYLOAD) {
            return Err(ServiceError::Invalid(format!("the request is longer than {MAX_PAYLOAD} bytes")));
        }
        let dialled = tokio::time::timeout(DIAL, self.backend.dial(&self.id)).await;
        let stream = match dialled {
            Ok(Ok(stream)) => stream,
            Ok(Err(source)) => {
                let (backend, id, source) = (self.backend.name(), self.id.clone(), Box::new(source));
                return Err(ServiceError::Backend { backend, action: "reach", id, source });
            }
            Err(_elapsed) => return Err(self.failed("be connected to", AgentError::TooSlow("connect"))),
        };
        let mut connection = Connection::of(stream, Arc::clone(&self.long));
        let sent = connection.send(&call);
        let sent = tokio::time::timeout(FIRST_ANSWER, sent).await;
        sent.unwrap_or(Err(AgentError::TooSlow("send the request")))
            .map_err(|source| self.failed("receive the request", source))?;
        Ok(connection)
    }

    /// Sends one request and reads one answer.
    pub(crate) async fn ask(&self, request: Request) -> Result<Answer, ServiceError> {
        let mut connection = self.call(request).await?;
        self.first_answer(&mut connection).await
    }

    pub(crate) async fn first_answer(&self, connection: &mut Connection) -> Result<Answer, ServiceError> {
        let answer = within(FIRST_ANSWER, "receive an answer", connection.answer()).await;
        answer.map_err(|source| self.failed("answer", source))
    }

    /// Checks that the agent answers, so that a command could be run.
    pub(crate) async fn ping(&self) -> Result<(), ServiceError> {
        match self.ask(Request::Ping).await? {
            Ok(Reply::Ok) => Ok(()),
            Ok(_) => Err(self.unexpected()),
            Err(fault) => Err(self.refused(fault)),
        }
    }

    /// Gives environment variables to the agent of a warm sandbox, which also shows that it is alive.
    pub(crate) async fn adopt(&self, spec: &Spec) -> Result<(), ServiceError> {
        let adopt = Request::Adopt { env: spec.environment(&self.id), env_file: spec.env_file.clone() };
        match self.ask(adopt).await? {
            Ok(Reply::Ok) => Ok(()),
            Ok(_) => Err(self.unexpected()),
            Err(fault) => Err(self.refused(fault)),
        }
    }

    pub(crate) fn failed(&self, action: &'static str, source: AgentError) -> ServiceError {
        ServiceError::Agent { id: self.id.clone(), action, source }
    }

    /// The error for an answer that does not match the request.
    pub(crate) fn unexpected(&self) -> ServiceError {
        self.failed("answer", AgentError::Impossible("an answer that does not match the request"))
    }

    /// The error for a fault that no caller can act on.
    pub(crate) fn refused(&self, fault: Fault) -> ServiceError {
        let source = match fault.kind {
            wire::FaultKind::Unsupported => AgentError::Unsupported,
            _ => AgentError::Fault { operation: fault.operation, subject: fault.subject, errno: fault.errno },
        };
        self.failed("carry out the request", source)
    }
}

/// An agent's answer: a reply or a fault.
pub(crate) type Answer = Result<Reply, Fault>;

/// Waits for `work` for a limited time.
pub(crate) async fn within<T>(
    limit: Duration,
    waiting_to: &'static str,
    work: impl Future<Output = Result<T, AgentError>>,
) -> Result<T, AgentError> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(AgentError::TooSlow(waiting_to)))
}

/// A connection with one operation in progress.
pub(crate) struct Connection {
    stream: AgentStream,
    decoder: Decoder,
    greeted: bool,
    /// How many bytes are read at once now.
    appetite: usize,
    /// Encoded bytes that are not sent yet, in order.
    outgoing: VecDeque<Bytes>,
    long: Arc<Semaphore>,
}

impl Connection {
    /// A connection that shares `long` with the other connections to the same agent.
    pub(crate) fn of(stream: AgentStream, long: Arc<Semaphore>) -> Self {
        let (decoder, outgoing) = (Decoder::new(), VecDeque::new());
        Self { stream, decoder, greeted: false, appetite: LEAST_READ, outgoing, long }
    }

    /// Encodes a frame and hands it to the kernel.
    pub(crate) async fn send(&mut self, frame: &Frame) -> Result<(), AgentError> {
        self.queue(frame);
        poll_fn(|context| self.poll_flush(context)).await
    }

    fn queue(&mut self, frame: &Frame) {
        let mut encoded = Vec::new();
        frame.encode(&mut encoded);
        self.outgoing.push_back(encoded.into());
    }

    /// Queues raw bytes as they are, in as few frames as possible; [`Connection::poll_flush`] sends them.
    pub(crate) fn queue_data(&mut self, mut bytes: Bytes) {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(MAX_PAYLOAD));
            let header = Header { kind: Kind::Data, length: piece.len() };
            self.outgoing.push_back(Bytes::copy_from_slice(&header.encoded()));
            self.outgoing.push_back(piece);
        }
    }

    pub(crate) fn queue_end(&mut self) {
        self.queue(&Frame::End);
    }

    /// Nothing is lost if the caller does not poll to the end: the next call sends the rest.
    pub(crate) fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<Result<(), AgentError>> {
        while let Some(first) = self.outgoing.front() {
            let second = self.outgoing.get(1).map_or(&[][..], |bytes| bytes);
            let slices = [IoSlice::new(first), IoSlice::new(second)];
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, &slices));
            match written.map_err(AgentError::Broken)? {
                0 => return Poll::Ready(Err(AgentError::Broken(io::ErrorKind::WriteZero.into()))),
                count => self.sent(count),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Removes bytes that were sent from the queue.
    fn sent(&mut self, mut count: usize) {
        while let Some(first) = self.outgoing.front_mut() {
            let now = count.min(first.len());
            first.advance(now);
            count -= now;
            if !first.is_empty() {
                return;
            }
            self.outgoing.pop_front();
        }
    }

    /// The next frame after the greeting; `None` when the agent closed its side.
    pub(crate) async fn frame(&mut self) -> Result<Option<Frame>, AgentError> {
        poll_fn(|context| self.poll_frame(context)).await
    }

    /// Like [`Connection::frame`].
    pub(crate) fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Frame>, AgentError>> {
        self.poll_next(context, Decoder::next_frame)
    }

    /// Like [`Connection::poll_frame`], but raw bytes are returned before their frame is complete.
    pub(crate) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Frame>, AgentError>> {
        self.poll_next(context, Decoder::next_piece)
    }

    /// Bytes are read from the connection only when the decoder has no complete frame left, so it never holds more than
    /// one frame and one read.
    fn poll_next(
        &mut self,
        context: &mut Context<'_>,
        next: fn(&mut Decoder) -> Result<Option<Frame>, FrameError>,
    ) -> Poll<Result<Option<Frame>, AgentError>> {
        loop {
            match next(&mut self.decoder).map_err(AgentError::Frame)? {
                Some(frame) if self.greeted => return Poll::Ready(Ok(Some(frame))),
                Some(frame) => self.greet(&frame)?,
                None => {
                    if ready!(self.poll_fill(context))? == 0 {
                        return Poll::Ready(Ok(None));
                    }
                }
            }
        }
    }

    fn greet(&mut self, frame: &Frame) -> Result<(), AgentError> {
        let greeting: Greeting = frame.read().map_err(AgentError::Frame)?;
        if !(1..=wire::VERSION).contains(&greeting.version) {
            return Err(AgentError::Version(greeting.version));
        }
        self.greeted = true;
        Ok(())
    }

    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<usize, AgentError>> {
        let space = self.decoder.space(self.appetite);
        let room = space.capacity() - space.len();
        let stream = Pin::new(&mut self.stream);
        let count = ready!(poll_read_buf(stream, context, space)).map_err(AgentError::Broken)?;
        if count == room {
            self.appetite = (self.appetite * 2).min(MOST_READ);
        }
        Poll::Ready(Ok(count))
    }

    /// The next message. A message too large for one frame arrives as data, which is read up to a limit and under the
    /// semaphores for long answers.
    pub(crate) async fn answer(&mut self) -> Result<Answer, AgentError> {
        match self.frame().await?.ok_or(AgentError::EndedEarly)? {
            Frame::Data(bytes) => {
                let long = Arc::clone(&self.long);
                let _own = long.acquire().await.expect("the semaphore is never closed");
                let _of_all = LONG_ANSWERS.acquire().await.expect("the semaphore is never closed");
                read_answer(&Frame::Control(self.rest_of_answer(bytes).await?))
            }
            frame => read_answer(&frame),
        }
    }

    async fn rest_of_answer(&mut self, first: Bytes) -> Result<Bytes, AgentError> {
        let mut json = first.to_vec();
        loop {
            match self.frame().await?.ok_or(AgentError::EndedEarly)? {
                Frame::Data(bytes) if bytes.is_empty() => {
                    return Err(AgentError::Impossible("an empty piece of an answer"));
                }
                Frame::Data(bytes) if json.len() + bytes.len() <= LONG_ANSWER => json.extend(bytes),
                Frame::Data(_) => return Err(AgentError::Impossible("an answer that exceeds the limit")),
                Frame::End => return Ok(json.into()),
                Frame::Control(_) | Frame::Output { .. } => {
                    return Err(AgentError::Frame(FrameError::Unexpected));
                }
            }
        }
    }

    /// Leaves framing: returns the stream itself, and the bytes of it that were already read.
    pub(crate) fn into_stream(self) -> (AgentStream, Bytes) {
        (self.stream, self.decoder.into_rest())
    }

    pub(crate) async fn shut_down(&mut self) -> Result<(), AgentError> {
        self.stream.shutdown().await.map_err(AgentError::Broken)
    }
}

/// Reads a message, truncating the texts of a fault.
pub(crate) fn read_answer(frame: &Frame) -> Result<Answer, AgentError> {
    Ok(match frame.read().map_err(AgentError::Frame)? {
        Reply::Fault(mut fault) => {
            cut(&mut fault.operation, 64);
            cut(&mut fault.subject, 4096);
            Err(fault)
        }
        reply => Ok(reply),
    })
}

fn cut(text: &mut String, most: usize) {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}
