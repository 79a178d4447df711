//! Transfers bulk bytes to and from a sandbox, at the speed of the slower side.
//!
//! At most one piece is held in memory in either direction, whatever the size of the file, and the bytes of a piece are
//! never copied: the buffer that was read from one connection is written to the other.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use wire::{AgentReply, Frame, FrameError};

use crate::agent::client::{
    AgentClient, AgentError, OperationConnection, STALL_TIMEOUT, parse_answer, with_timeout,
};
use crate::agent::reply::ExpectedReply;
use crate::agent::{faults, translate};
use crate::sandboxes::activity::ActivityGuard;
use crate::{AgentStream, ServiceError, WatchEvent};

/// The content of a file, as a stream of pieces.
pub struct FileReader {
    /// The size of the whole file, whatever part of it is read.
    pub size: u64,
    agent: AgentClient,
    connection: OperationConnection,
    /// How many bytes may still arrive.
    left: u64,
    over: bool,
    /// Set while we wait for the agent (not for the reader), and expires after [`STALL_TIMEOUT`].
    stall: Option<Pin<Box<Sleep>>>,
    _use: ActivityGuard,
}

/// A file being written. Dropping it before `finish` leaves the old file.
pub struct FileWriter {
    agent: AgentClient,
    pub(super) connection: OperationConnection,
    _use: ActivityGuard,
}

/// File events as they happen.
pub struct FileWatch {
    agent: AgentClient,
    connection: OperationConnection,
    /// The number of the last event.
    sequence: u64,
    _use: ActivityGuard,
}

/// A tunnel into the sandbox: first the bytes that were read with the answer, then the stream.
pub(crate) struct TunnelStream {
    stream: AgentStream,
    early: Bytes,
    _use: ActivityGuard,
}

impl FileReader {
    pub(crate) fn new(
        agent: AgentClient,
        connection: OperationConnection,
        size: u64,
        most: Option<u64>,
        activity: ActivityGuard,
    ) -> Self {
        let left = most.unwrap_or(u64::MAX);
        Self { size, agent, connection, left, over: false, stall: None, _use: activity }
    }

    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ServiceError> {
        poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await.transpose()
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ServiceError>> {
        let Poll::Ready(frame) = self.connection.poll_piece(context) else {
            let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALL_TIMEOUT)));
            ready!(stall.as_mut().poll(context));
            let slow = AgentError::TooSlow("read more of the file");
            return Poll::Ready(Err(self.agent.agent_error("send a file", slow)));
        };
        self.stall = None;
        Poll::Ready(self.accept_frame(frame))
    }

    fn accept_frame(
        &mut self,
        frame: Result<Option<Frame>, AgentError>,
    ) -> Result<Option<Bytes>, ServiceError> {
        let broken = |source| self.agent.agent_error("send a file", source);
        match frame.and_then(|frame| frame.ok_or(AgentError::EndedEarly)).map_err(broken)? {
            Frame::Data(bytes) => {
                let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                self.left = self.left.checked_sub(length).filter(|_| length > 0).ok_or_else(|| {
                    broken(AgentError::Impossible("more of the file than was requested, or an empty piece"))
                })?;
                Ok(Some(bytes))
            }
            Frame::End => Ok(None),
            frame => Err(match parse_answer(&frame).map_err(broken)? {
                Err(fault) => faults::file_error(&self.agent, fault),
                Ok(_) => self.agent.unexpected_reply(),
            }),
        }
    }
}

impl Stream for FileReader {
    type Item = Result<Bytes, ServiceError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        let piece = ready!(self.poll_piece(context)).transpose();
        self.over = !matches!(piece, Some(Ok(_)));
        Poll::Ready(piece)
    }
}

impl FileWriter {
    pub(crate) fn new(agent: AgentClient, connection: OperationConnection, activity: ActivityGuard) -> Self {
        Self { agent, connection, _use: activity }
    }

    /// Returns when the bytes are sent to the agent.
    pub async fn send_bytes(&mut self, bytes: Bytes) -> Result<(), ServiceError> {
        self.connection.queue_data(bytes);
        self.flush().await
    }

    /// Returns when the file is in place under its name.
    pub async fn finish(mut self) -> Result<(), ServiceError> {
        self.finish_with().await
    }

    /// Like [`FileWriter::finish`], for an operation that is answered with more than success.
    pub(crate) async fn finish_with<R: ExpectedReply>(&mut self) -> Result<R, ServiceError> {
        self.connection.queue_end();
        self.flush().await?;
        let answer = with_timeout(STALL_TIMEOUT, "write the file", self.connection.next_answer()).await;
        let answer = answer.map_err(|source| self.agent.agent_error("write the file", source))?;
        self.agent.expect_reply(answer)?.map_err(|fault| faults::file_error(&self.agent, fault))
    }

    /// Sends the queued bytes. An agent that cannot continue sends a fault before it hangs up, so its side is polled
    /// meanwhile, and read once more when the connection breaks.
    async fn flush(&mut self) -> Result<(), ServiceError> {
        let connection = &mut self.connection;
        let sent = poll_fn(|context| match connection.poll_frame(context) {
            Poll::Ready(Ok(None)) | Poll::Pending => connection.poll_flush(context).map_ok(|()| None),
            early => early,
        });
        match with_timeout(STALL_TIMEOUT, "send more of the file", sent).await {
            Ok(None) => Ok(()),
            Ok(Some(frame)) => Err(self.early_answer_error(frame)),
            Err(AgentError::Broken(error)) => match self.connection.next_frame().await {
                Ok(Some(frame)) => Err(self.early_answer_error(frame)),
                _ => Err(self.agent.agent_error("write the file", AgentError::Broken(error))),
            },
            Err(source) => Err(self.agent.agent_error("write the file", source)),
        }
    }

    fn early_answer_error(&self, frame: Frame) -> ServiceError {
        match parse_answer(&frame) {
            Ok(Err(fault)) => faults::file_error(&self.agent, fault),
            Ok(Ok(_)) => self.agent.unexpected_reply(),
            Err(source) => self.agent.agent_error("write the file", source),
        }
    }
}

impl FileWatch {
    pub(crate) fn new(agent: AgentClient, connection: OperationConnection, activity: ActivityGuard) -> Self {
        Self { agent, connection, sequence: 0, _use: activity }
    }

    /// The next event; `None` when the sandbox ended the watch.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, ServiceError> {
        let broken = |source| self.agent.agent_error("watch", source);
        let Some(frame) = self.connection.next_frame().await.map_err(broken)? else { return Ok(None) };
        match parse_answer(&frame).map_err(broken)? {
            Ok(AgentReply::Watched(event)) => {
                // An older agent does not number its events.
                let sequence = event.sequence.or_else(|| self.sequence.checked_add(1));
                let sequence = sequence.filter(|sequence| *sequence > self.sequence);
                self.sequence =
                    sequence.ok_or_else(|| broken(AgentError::Impossible("events that are not in order")))?;
                Ok(Some(translate::watch_event(event, self.sequence)))
            }
            Ok(_) => Err(broken(AgentError::Frame(FrameError::Unexpected))),
            Err(fault) => Err(faults::file_error(&self.agent, fault)),
        }
    }
}

impl TunnelStream {
    pub(crate) fn new(connection: OperationConnection, activity: ActivityGuard) -> Self {
        let (stream, early) = connection.into_stream();
        Self { stream, early, _use: activity }
    }
}

impl AsyncRead for TunnelStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.early.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let length = self.early.len().min(buffer.remaining());
        buffer.put_slice(&self.early.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TunnelStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
