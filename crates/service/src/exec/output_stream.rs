//! Reading the output of a process, and writing to its input.

use std::sync::Arc;

use bytes::Bytes;
use domain::{JournalOffset, ProcessId, StreamKind};
use wire::{AgentReply, Frame, FrameError};

use crate::agent::client::{
    AgentClient, AgentError, FIRST_ANSWER_TIMEOUT, OperationConnection, parse_answer, with_timeout,
};
use crate::agent::{faults, translate};
use crate::exec::command_slots::CommandSlots;
use crate::sandboxes::activity::ActivityGuard;
use crate::{ProcessEnd, ServiceError};

/// The output of a process. Dropping it does not end the process.
pub struct OutputStream {
    pub process: ProcessId,
    agent: AgentClient,
    connection: OperationConnection,
    position: ReadPosition,
    commands: Arc<CommandSlots>,
    _use: ActivityGuard,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// `at` is the overall offset of the first byte.
    Output { stream: StreamKind, at: JournalOffset, bytes: Bytes },
    /// The bytes from `from` up to, not including, `to` are no longer kept. Of the bytes before `to`, `stderr_before` were
    /// errors; an agent of an older server does not count them.
    Gap { from: JournalOffset, to: JournalOffset, stderr_before: Option<u64> },
    /// The last event.
    Ended(ProcessEnd),
}

/// The open input of a process. Dropping it leaves the input open.
pub struct ProcessInput {
    process: ProcessId,
    agent: AgentClient,
    connection: OperationConnection,
    _use: ActivityGuard,
}

/// The position of a reader in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadPosition {
    /// The next byte has exactly this offset.
    At(u64),
    /// The reader asked for bytes that were not printed yet; the first byte may have any offset from here on.
    NotBefore(u64),
    Over,
}

impl OutputStream {
    pub(crate) fn new(
        process: ProcessId,
        agent: AgentClient,
        connection: OperationConnection,
        place: ReadPosition,
        commands: Arc<CommandSlots>,
        activity: ActivityGuard,
    ) -> Self {
        Self { process, agent, connection, position: place, commands, _use: activity }
    }

    /// Waits for the next event. The future may be dropped and called again without losing an event; calling it after
    /// [`OutputEvent::Ended`] is an error.
    pub async fn next(&mut self) -> Result<OutputEvent, ServiceError> {
        let event = self.read_event().await.map_err(|source| {
            self.position = ReadPosition::Over;
            self.agent.agent_error("send the output of a process", source)
        })??;
        if matches!(event, OutputEvent::Ended(_)) {
            self.commands.free_slot(&self.process);
        }
        Ok(event)
    }

    async fn read_event(&mut self) -> Result<Result<OutputEvent, ServiceError>, AgentError> {
        if self.position == ReadPosition::Over {
            return Err(AgentError::EndedEarly);
        }
        let event = match self.connection.next_frame().await?.ok_or(AgentError::EndedEarly)? {
            Frame::Output { stream, offset, bytes } => {
                self.position = self.position.after_output(offset, bytes.len())?;
                let stream = translate::stream_kind(stream);
                OutputEvent::Output { stream, at: JournalOffset(offset), bytes }
            }
            frame => match parse_answer(&frame)? {
                Ok(AgentReply::Gap { from, to, stderr_before }) => {
                    self.position = self.position.after_gap(from, to)?;
                    if stderr_before.is_some_and(|stderr| stderr > to) {
                        return Err(AgentError::Impossible("more errors than output"));
                    }
                    OutputEvent::Gap { from: JournalOffset(from), to: JournalOffset(to), stderr_before }
                }
                Ok(AgentReply::Ended(ended)) => {
                    self.position = self.position.after_end(ended.written)?;
                    OutputEvent::Ended(translate::process_end(&ended))
                }
                Ok(_) => return Err(AgentError::Frame(FrameError::Unexpected)),
                Err(fault) => {
                    self.position = ReadPosition::Over;
                    return Ok(Err(faults::process_error(&self.agent, &self.process, fault)));
                }
            },
        };
        Ok(Ok(event))
    }
}

impl ReadPosition {
    /// The position of a reader that asks for `from` when `written` bytes were printed so far.
    pub(crate) fn starting_at(from: u64, written: u64) -> Self {
        if from <= written { Self::At(from) } else { Self::NotBefore(written) }
    }

    fn accepts_offset(self, offset: u64) -> bool {
        match self {
            Self::At(expected) => offset == expected,
            Self::NotBefore(earliest) => offset >= earliest,
            Self::Over => false,
        }
    }

    fn after_output(self, offset: u64, length: usize) -> Result<Self, AgentError> {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        let end = offset.checked_add(length).filter(|_| length > 0 && self.accepts_offset(offset));
        end.map(Self::At).ok_or(AgentError::Impossible("output at an unexpected offset"))
    }

    fn after_gap(self, from: u64, to: u64) -> Result<Self, AgentError> {
        if self.accepts_offset(from) && to > from {
            Ok(Self::At(to))
        } else {
            Err(AgentError::Impossible("a gap at an unexpected offset"))
        }
    }

    fn after_end(self, written: u64) -> Result<Self, AgentError> {
        match self {
            Self::At(next) if written < next => {
                Err(AgentError::Impossible("an end before output that was already sent"))
            }
            Self::At(_) | Self::NotBefore(_) | Self::Over => Ok(Self::Over),
        }
    }
}

impl ProcessInput {
    pub(crate) fn new(
        process: ProcessId,
        agent: AgentClient,
        connection: OperationConnection,
        activity: ActivityGuard,
    ) -> Self {
        Self { process, agent, connection, _use: activity }
    }

    /// Returns when the bytes are sent; it waits while the process does not read.
    pub async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), ServiceError> {
        for piece in bytes.chunks(wire::frame::CHUNK_SIZE) {
            self.connection.queue_data(Bytes::copy_from_slice(piece));
            let sent = std::future::poll_fn(|context| self.connection.poll_flush(context)).await;
            sent.map_err(|source| self.input_error(source))?;
        }
        Ok(())
    }

    /// Closes the input: the process reads end of file.
    pub async fn close(mut self) -> Result<(), ServiceError> {
        let closed = async {
            self.connection.send_frame(&Frame::End).await?;
            self.connection.shut_down().await
        };
        let closed = with_timeout(FIRST_ANSWER_TIMEOUT, "close the input", closed).await;
        closed.map_err(|source| self.input_error(source))
    }

    /// The agent hangs up when the process has closed its input or has ended.
    fn input_error(&self, source: AgentError) -> ServiceError {
        match source {
            AgentError::Broken(_) => ServiceError::NoProcess(self.process.clone()),
            source => self.agent.agent_error("accept input", source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_must_follow_exactly() {
        let place = ReadPosition::starting_at(0, 0);
        let place = place.after_output(0, 5).expect("output begins at offset 0");
        assert_eq!(place, ReadPosition::At(5));
        assert!(place.after_output(4, 1).is_err(), "the offset goes back");
        assert!(place.after_output(6, 1).is_err(), "bytes are missing");
        assert!(place.after_output(5, 0).is_err(), "the output is empty");
        assert!(ReadPosition::At(u64::MAX).after_output(u64::MAX, 1).is_err(), "the offset overflows");
    }

    #[test]
    fn gap_must_go_forward() {
        let place = ReadPosition::At(10);
        assert_eq!(place.after_gap(10, 30).ok(), Some(ReadPosition::At(30)));
        for (from, to) in [(10, 10), (10, 9), (9, 30), (11, 30)] {
            assert!(place.after_gap(from, to).is_err(), "{from}..{to}");
        }
    }

    #[test]
    fn reader_ahead_of_the_output_accepts_the_first_byte() {
        let place = ReadPosition::starting_at(100, 7);
        assert!(place.after_output(6, 1).is_err());
        assert_eq!(place.after_output(7, 1).ok(), Some(ReadPosition::At(8)));
        assert_eq!(place.after_output(100, 1).ok(), Some(ReadPosition::At(101)));
    }
}
