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
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use backend::{AgentStream, SharedBackend};
use bytes::{Buf, Bytes};
use domain::{SandboxId, SandboxSpec};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio_util::io::poll_read_buf;
use wire::frame::{FrameHeader, FrameKind, MAX_PAYLOAD};
use wire::{
    AgentReply, AgentRequest, Fault, FaultOperation, Frame, FrameDecoder, FrameError, Greeting,
    VersionedRequest,
};

use crate::ErrorKind;
use crate::agent::reply::ExpectedReply;
use crate::error::ServiceError;

/// How long connecting to the agent may take.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the agent may take for its first answer.
pub(crate) const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a transfer of bulk bytes or a long listing may make no progress.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(120);

/// How much is read from the connection at once: little at first, since most answers are short and many connections are
/// idle, and more as long as the agent fills the buffer.
const MIN_READ_BYTES: usize = 4 << 10;
const MAX_READ_BYTES: usize = 256 << 10;

/// The most bytes that an answer spread over several frames may have.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// How many long answers are held in memory at once, for all agents together. Each agent has one at a time, so a single
/// malicious agent delays only itself.
static LONG_ANSWER_PERMITS: Semaphore = Semaphore::const_new(32);

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
pub(crate) struct AgentClient {
    backend: SharedBackend,
    id: SandboxId,
    /// Held while a long answer is read.
    long: Arc<Semaphore>,
    /// Whether the agent has answered that it does not know `open_and_run`: it belongs to an older server.
    lacks_open_and_run: Arc<AtomicBool>,
}

impl AgentClient {
    pub(crate) fn new(backend: SharedBackend, id: SandboxId) -> Self {
        Self { backend, id, long: Arc::new(Semaphore::new(1)), lacks_open_and_run: Arc::default() }
    }

    /// Whether a session can be opened and used by one request, as far as it is known.
    pub(crate) fn may_open_and_run(&self) -> bool {
        !self.lacks_open_and_run.load(Ordering::Relaxed)
    }

    /// Records that the agent does not know this request, so that it is not sent in vain for each command.
    pub(crate) fn set_lacks_open_and_run(&self) {
        self.lacks_open_and_run.store(true, Ordering::Relaxed);
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Connects and sends the request; the caller reads the answer.
    pub(crate) async fn open_request(
        &self,
        request: AgentRequest,
    ) -> Result<OperationConnection, ServiceError> {
        let call = Frame::from_message(&VersionedRequest { version: wire::VERSION, request });
        if matches!(&call, Frame::Control(json) if json.len() > MAX_PAYLOAD) {
            return Err(ServiceError::Invalid(format!("the request is longer than {MAX_PAYLOAD} bytes")));
        }
        let dialled = tokio::time::timeout(DIAL_TIMEOUT, self.backend.dial_agent(&self.id)).await;
        let stream = match dialled {
            Ok(Ok(stream)) => stream,
            Ok(Err(source)) => {
                let (backend, id, source) = (self.backend.name(), self.id.clone(), Box::new(source));
                return Err(ServiceError::Backend { backend, action: "reach", id, source });
            }
            Err(_elapsed) => return Err(self.agent_error("be connected to", AgentError::TooSlow("connect"))),
        };
        let mut connection = OperationConnection::from_stream(stream, Arc::clone(&self.long));
        let sent = connection.send_frame(&call);
        let sent = tokio::time::timeout(FIRST_ANSWER_TIMEOUT, sent).await;
        sent.unwrap_or(Err(AgentError::TooSlow("send the request")))
            .map_err(|source| self.agent_error("receive the request", source))?;
        Ok(connection)
    }

    /// Sends one request and reads one answer. A fault is returned for the caller to judge; a reply that does not fit
    /// the request is an error.
    pub(crate) async fn request<R: ExpectedReply>(
        &self,
        request: AgentRequest,
    ) -> Result<Result<R, Fault>, ServiceError> {
        let mut connection = self.open_request(request).await?;
        self.first_answer(&mut connection).await
    }

    /// Reads the first answer to a request that was sent with [`AgentClient::open_request`].
    pub(crate) async fn first_answer<R: ExpectedReply>(
        &self,
        connection: &mut OperationConnection,
    ) -> Result<Result<R, Fault>, ServiceError> {
        let answer = with_timeout(FIRST_ANSWER_TIMEOUT, "receive an answer", connection.next_answer()).await;
        self.expect_reply(answer.map_err(|source| self.agent_error("answer", source))?)
    }

    /// Like [`AgentClient::first_answer`], however long the answer takes.
    pub(crate) async fn late_answer<R: ExpectedReply>(
        &self,
        connection: &mut OperationConnection,
    ) -> Result<Result<R, Fault>, ServiceError> {
        let answer = connection.next_answer().await;
        self.expect_reply(answer.map_err(|source| self.agent_error("answer", source))?)
    }

    /// Refuses a reply that does not fit the request.
    pub(crate) fn expect_reply<R: ExpectedReply>(
        &self,
        answer: AgentAnswer,
    ) -> Result<Result<R, Fault>, ServiceError> {
        match answer {
            Ok(reply) => R::from_reply(reply).map(Ok).ok_or_else(|| self.unexpected_reply()),
            Err(fault) => Ok(Err(fault)),
        }
    }

    /// Checks that the agent answers, so that a command could be run.
    pub(crate) async fn ping(&self) -> Result<(), ServiceError> {
        self.request::<()>(AgentRequest::Ping).await?.map_err(|fault| self.fault_error(fault))
    }

    /// Gives environment variables to the agent of a warm sandbox, which also shows that it is alive.
    pub(crate) async fn set_environment(&self, spec: &SandboxSpec) -> Result<(), ServiceError> {
        let adopt =
            AgentRequest::Adopt { env: spec.process_environment(&self.id), env_file: spec.env_file.clone() };
        self.request::<()>(adopt).await?.map_err(|fault| self.fault_error(fault))
    }

    pub(crate) fn agent_error(&self, action: &'static str, source: AgentError) -> ServiceError {
        ServiceError::Agent { id: self.id.clone(), action, source }
    }

    /// The error for an answer that does not match the request.
    pub(crate) fn unexpected_reply(&self) -> ServiceError {
        self.agent_error("answer", AgentError::Impossible("an answer that does not match the request"))
    }

    /// The error for a fault that no caller can act on.
    pub(crate) fn fault_error(&self, fault: Fault) -> ServiceError {
        let source = match fault.kind {
            wire::FaultKind::Unsupported => AgentError::Unsupported,
            _ => AgentError::Fault {
                operation: fault.operation.into(),
                subject: fault.subject,
                errno: fault.errno,
            },
        };
        self.agent_error("carry out the request", source)
    }
}

/// An agent's answer: a reply or a fault.
pub(crate) type AgentAnswer = Result<AgentReply, Fault>;

/// Waits for `work` for a limited time.
pub(crate) async fn with_timeout<T>(
    limit: Duration,
    waiting_to: &'static str,
    work: impl Future<Output = Result<T, AgentError>>,
) -> Result<T, AgentError> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(AgentError::TooSlow(waiting_to)))
}

/// A connection with one operation in progress.
pub(crate) struct OperationConnection {
    stream: AgentStream,
    decoder: FrameDecoder,
    greeted: bool,
    /// How many bytes are read at once now.
    read_size: usize,
    /// Encoded bytes that are not sent yet, in order.
    outgoing: VecDeque<Bytes>,
    long: Arc<Semaphore>,
}

impl OperationConnection {
    /// A connection that shares `long` with the other connections to the same agent.
    pub(crate) fn from_stream(stream: AgentStream, long: Arc<Semaphore>) -> Self {
        let (decoder, outgoing) = (FrameDecoder::new(), VecDeque::new());
        Self { stream, decoder, greeted: false, read_size: MIN_READ_BYTES, outgoing, long }
    }

    /// Encodes a frame and hands it to the kernel.
    pub(crate) async fn send_frame(&mut self, frame: &Frame) -> Result<(), AgentError> {
        self.queue_frame(frame);
        poll_fn(|context| self.poll_flush(context)).await
    }

    fn queue_frame(&mut self, frame: &Frame) {
        let mut encoded = Vec::new();
        frame.encode(&mut encoded);
        self.outgoing.push_back(encoded.into());
    }

    /// Queues raw bytes as they are, in as few frames as possible; [`OperationConnection::poll_flush`] sends them.
    pub(crate) fn queue_data(&mut self, mut bytes: Bytes) {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(MAX_PAYLOAD));
            let header = FrameHeader { kind: FrameKind::Data, length: piece.len() };
            self.outgoing.push_back(Bytes::copy_from_slice(&header.to_bytes()));
            self.outgoing.push_back(piece);
        }
    }

    pub(crate) fn queue_end(&mut self) {
        self.queue_frame(&Frame::End);
    }

    /// Nothing is lost if the caller does not poll to the end: the next call sends the rest.
    pub(crate) fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<Result<(), AgentError>> {
        while let Some(first) = self.outgoing.front() {
            let second = self.outgoing.get(1).map_or(&[][..], |bytes| bytes);
            let slices = [IoSlice::new(first), IoSlice::new(second)];
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, &slices));
            match written.map_err(AgentError::Broken)? {
                0 => return Poll::Ready(Err(AgentError::Broken(io::ErrorKind::WriteZero.into()))),
                count => self.discard_sent(count),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Removes bytes that were sent from the queue.
    fn discard_sent(&mut self, mut count: usize) {
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
    pub(crate) async fn next_frame(&mut self) -> Result<Option<Frame>, AgentError> {
        poll_fn(|context| self.poll_frame(context)).await
    }

    /// Like [`OperationConnection::next_frame`].
    pub(crate) fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Frame>, AgentError>> {
        self.poll_decoded(context, FrameDecoder::next_frame)
    }

    /// Like [`OperationConnection::poll_frame`], but raw bytes are returned before their frame is complete.
    pub(crate) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Frame>, AgentError>> {
        self.poll_decoded(context, FrameDecoder::next_piece)
    }

    /// Bytes are read from the connection only when the decoder has no complete frame left, so it never holds more than
    /// one frame and one read.
    fn poll_decoded(
        &mut self,
        context: &mut Context<'_>,
        next: fn(&mut FrameDecoder) -> Result<Option<Frame>, FrameError>,
    ) -> Poll<Result<Option<Frame>, AgentError>> {
        loop {
            match next(&mut self.decoder).map_err(AgentError::Frame)? {
                Some(frame) if self.greeted => return Poll::Ready(Ok(Some(frame))),
                Some(frame) => self.check_greeting(&frame)?,
                None => {
                    if ready!(self.poll_fill(context))? == 0 {
                        return Poll::Ready(Ok(None));
                    }
                }
            }
        }
    }

    fn check_greeting(&mut self, frame: &Frame) -> Result<(), AgentError> {
        let greeting: Greeting = frame.parse_message().map_err(AgentError::Frame)?;
        if !(1..=wire::VERSION).contains(&greeting.version) {
            return Err(AgentError::Version(greeting.version));
        }
        self.greeted = true;
        Ok(())
    }

    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<usize, AgentError>> {
        let space = self.decoder.reserve_space(self.read_size);
        let room = space.capacity() - space.len();
        let stream = Pin::new(&mut self.stream);
        let count = ready!(poll_read_buf(stream, context, space)).map_err(AgentError::Broken)?;
        if count == room {
            self.read_size = (self.read_size * 2).min(MAX_READ_BYTES);
        }
        Poll::Ready(Ok(count))
    }

    /// The next message. A message too large for one frame arrives as data, which is read up to a limit and under the
    /// semaphores for long answers.
    pub(crate) async fn next_answer(&mut self) -> Result<AgentAnswer, AgentError> {
        match self.next_frame().await?.ok_or(AgentError::EndedEarly)? {
            Frame::Data(bytes) => {
                let long = Arc::clone(&self.long);
                let _own = long.acquire().await.expect("the semaphore is never closed");
                let _of_all = LONG_ANSWER_PERMITS.acquire().await.expect("the semaphore is never closed");
                parse_answer(&Frame::Control(self.rest_of_answer(bytes).await?))
            }
            frame => parse_answer(&frame),
        }
    }

    async fn rest_of_answer(&mut self, first: Bytes) -> Result<Bytes, AgentError> {
        let mut json = first.to_vec();
        loop {
            match self.next_frame().await?.ok_or(AgentError::EndedEarly)? {
                Frame::Data(bytes) if bytes.is_empty() => {
                    return Err(AgentError::Impossible("an empty piece of an answer"));
                }
                Frame::Data(bytes) if json.len() + bytes.len() <= MAX_ANSWER_BYTES => json.extend(bytes),
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
pub(crate) fn parse_answer(frame: &Frame) -> Result<AgentAnswer, AgentError> {
    Ok(match frame.parse_message().map_err(AgentError::Frame)? {
        AgentReply::Fault(mut fault) => {
            if let FaultOperation::Other(text) = &mut fault.operation {
                truncate_text(text, 64);
            }
            truncate_text(&mut fault.subject, 4096);
            Err(fault)
        }
        reply => Ok(reply),
    })
}

pub(crate) fn truncate_text(text: &mut String, most: usize) {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
}
