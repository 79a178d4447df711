//! Reading the output of a process, and writing to its input.

use std::sync::Arc;

use bytes::Bytes;
use domain::{Position, ProcessId, Stream};
use wire::{Frame, FrameError, Reply};

use crate::activity::Use;
use crate::agent_client::{Agent, AgentError, Connection, FIRST_ANSWER, read_answer, within};
use crate::commands::Commands;
use crate::{Ended, ServiceError, faults, translate};

/// The output of a process. Dropping it does not end the process.
pub struct Following {
    pub process: ProcessId,
    agent: Agent,
    connection: Connection,
    place: Place,
    commands: Arc<Commands>,
    _use: Use,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `at` is the overall offset of the first byte.
    Output { stream: Stream, at: Position, bytes: Bytes },
    /// The bytes from `from` up to, not including, `to` are no longer kept.
    Gap { from: Position, to: Position },
    /// The last event.
    Ended(Ended),
}

/// The open input of a process. Dropping it leaves the input open.
pub struct Input {
    process: ProcessId,
    agent: Agent,
    connection: Connection,
    _use: Use,
}

/// The position of a reader in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The next byte has exactly this offset.
    At(u64),
    /// The reader asked for bytes that were not printed yet; the first byte may have any offset from here on.
    NotBefore(u64),
    Over,
}

impl Following {
    pub(crate) fn new(
        process: ProcessId,
        agent: Agent,
        connection: Connection,
        place: Place,
        commands: Arc<Commands>,
        activity: Use,
    ) -> Self {
        Self { process, agent, connection, place, commands, _use: activity }
    }

    /// Waits for the next event. The future may be dropped and called again without losing an event; calling it after
    /// [`Event::Ended`] is an error.
    pub async fn next(&mut self) -> Result<Event, ServiceError> {
        let event = self.read_event().await.map_err(|source| {
            self.place = Place::Over;
            self.agent.failed("send the output of a process", source)
        })??;
        if matches!(event, Event::Ended(_)) {
            self.commands.ended(&self.process);
        }
        Ok(event)
    }

    async fn read_event(&mut self) -> Result<Result<Event, ServiceError>, AgentError> {
        if self.place == Place::Over {
            return Err(AgentError::EndedEarly);
        }
        let event = match self.connection.frame().await?.ok_or(AgentError::EndedEarly)? {
            Frame::Output { stream, offset, bytes } => {
                self.place = self.place.after_output(offset, bytes.len())?;
                let stream = translate::stream(stream);
                Event::Output { stream, at: Position(offset), bytes }
            }
            frame => match read_answer(&frame)? {
                Ok(Reply::Gap { from, to }) => {
                    self.place = self.place.after_gap(from, to)?;
                    Event::Gap { from: Position(from), to: Position(to) }
                }
                Ok(Reply::Ended(ended)) => {
                    self.place = self.place.after_end(ended.written)?;
                    Event::Ended(translate::ended(&ended))
                }
                Ok(_) => return Err(AgentError::Frame(FrameError::Unexpected)),
                Err(fault) => {
                    self.place = Place::Over;
                    return Ok(Err(faults::of_process(&self.agent, &self.process, fault)));
                }
            },
        };
        Ok(Ok(event))
    }
}

impl Place {
    /// The position of a reader that asks for `from` when `written` bytes were printed so far.
    pub(crate) fn starting(from: u64, written: u64) -> Self {
        if from <= written { Self::At(from) } else { Self::NotBefore(written) }
    }

    fn accepts(self, offset: u64) -> bool {
        match self {
            Self::At(expected) => offset == expected,
            Self::NotBefore(earliest) => offset >= earliest,
            Self::Over => false,
        }
    }

    fn after_output(self, offset: u64, length: usize) -> Result<Self, AgentError> {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        let end = offset.checked_add(length).filter(|_| length > 0 && self.accepts(offset));
        end.map(Self::At).ok_or(AgentError::Impossible("output at an unexpected offset"))
    }

    fn after_gap(self, from: u64, to: u64) -> Result<Self, AgentError> {
        if self.accepts(from) && to > from {
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

impl Input {
    pub(crate) fn new(process: ProcessId, agent: Agent, connection: Connection, activity: Use) -> Self {
        Self { process, agent, connection, _use: activity }
    }

    /// Returns when the bytes are sent; it waits while the process does not read.
    pub async fn send(&mut self, bytes: &[u8]) -> Result<(), ServiceError> {
        for piece in bytes.chunks(wire::frame::CHUNK) {
            self.connection.queue_data(Bytes::copy_from_slice(piece));
            let sent = std::future::poll_fn(|context| self.connection.poll_flush(context)).await;
            sent.map_err(|source| self.gone(source))?;
        }
        Ok(())
    }

    /// Closes the input: the process reads end of file.
    pub async fn close(mut self) -> Result<(), ServiceError> {
        let closed = async {
            self.connection.send(&Frame::End).await?;
            self.connection.shut_down().await
        };
        let closed = within(FIRST_ANSWER, "close the input", closed).await;
        closed.map_err(|source| self.gone(source))
    }

    /// The agent hangs up when the process has closed its input or has ended.
    fn gone(&self, source: AgentError) -> ServiceError {
        match source {
            AgentError::Broken(_) => ServiceError::NoProcess(self.process.clone()),
            source => self.agent.failed("accept input", source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_must_follow_exactly() {
        let place = Place::starting(0, 0);
        let place = place.after_output(0, 5).expect("output begins at offset 0");
        assert_eq!(place, Place::At(5));
        assert!(place.after_output(4, 1).is_err(), "the offset goes back");
        assert!(place.after_output(6, 1).is_err(), "bytes are missing");
        assert!(place.after_output(5, 0).is_err(), "the output is empty");
        assert!(Place::At(u64::MAX).after_output(u64::MAX, 1).is_err(), "the offset overflows");
    }

    #[test]
    fn gap_must_go_forward() {
        let place = Place::At(10);
        assert_eq!(place.after_gap(10, 30).ok(), Some(Place::At(30)));
        for (from, to) in [(10, 10), (10, 9), (9, 30), (11, 30)] {
            assert!(place.after_gap(from, to).is_err(), "{from}..{to}");
        }
    }

    #[test]
    fn reader_ahead_of_the_output_accepts_the_first_byte() {
        let place = Place::starting(100, 7);
        assert!(place.after_output(6, 1).is_err());
        assert_eq!(place.after_output(7, 1).ok(), Some(Place::At(8)));
        assert_eq!(place.after_output(100, 1).ok(), Some(Place::At(101)));
    }
}
