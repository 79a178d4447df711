//! Passing our standard input to the command, without ever waiting for the command to read it.
//!
//! The one thread of `coracle run` also passes output and signals. If it waited here, a command that
//! prints before it reads its input would never end, and no signal would reach it.

use std::io::{self, Read, Stdin};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags};
use wire::Frame;

use super::agent_connection::AgentConnection;

/// How much is read at a time. More is read only when all of it has been sent.
const CHUNK_SIZE: usize = 32 << 10;

pub(super) struct InputForwarder {
    link: AgentConnection,
    /// An encoded frame, of which the first `sent` bytes are sent.
    pending: Vec<u8>,
    sent: usize,
    has_ended: bool,
}

impl InputForwarder {
    /// The link must be one on which the agent expects input.
    pub(super) fn new(connection: AgentConnection) -> Result<Self> {
        connection.set_nonblocking()?;
        Ok(Self { link: connection, pending: Vec::new(), sent: 0, has_ended: false })
    }

    /// The descriptor to wait for before the next [`InputForwarder::forward`]: our standard input, or
    /// the agent while it has not taken everything.
    pub(super) fn poll_fd<'a>(&'a self, stdin: &'a Stdin) -> PollFd<'a> {
        if self.pending.is_empty() {
            PollFd::new(stdin, PollFlags::IN)
        } else {
            PollFd::new(&self.link, PollFlags::OUT)
        }
    }

    /// Reads a piece of input, or sends more of the last one. Returns `false` when there will be no more.
    pub(super) fn forward(&mut self) -> Result<bool> {
        if self.pending.is_empty() {
            self.read_chunk()?;
        }
        match self.link.send_some(&self.pending[self.sent..]) {
            Ok(count) => self.sent += count,
            // The command has closed its input or has ended.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                return Ok(false);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        if self.sent == self.pending.len() {
            self.pending.clear();
            self.sent = 0;
        }
        Ok(!(self.has_ended && self.pending.is_empty()))
    }

    fn read_chunk(&mut self) -> io::Result<()> {
        let mut buffer = [0; CHUNK_SIZE];
        let length = io::stdin().lock().read(&mut buffer)?;
        self.has_ended = length == 0;
        let frame = if self.has_ended { Frame::End } else { Frame::Data(buffer[..length].to_vec().into()) };
        frame.encode(&mut self.pending);
        Ok(())
    }
}
