//! A connection as a worker uses it: the worker is its only owner and may block on it.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use wire::frame::{self, CHUNK_SIZE, FrameHeader, FrameKind, MAX_PAYLOAD};
use wire::{AgentReply, Fault, FaultKind, Frame, FrameDecoder, Greeting};

use crate::fault;

/// How much is received at once. It is written as it arrives, and large writes are faster on a
/// filesystem that keeps checksums and quotas.
const RECEIVE_BUFFER_BYTES: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct WorkerConnection {
    connection: OwnedFd,
    /// Received bytes; `waiting` is the part that has not been consumed.
    buffer: Vec<u8>,
    waiting: Range<usize>,
    /// How much of a data frame has not arrived yet.
    data_left: usize,
    out: Vec<u8>,
    greeted: bool,
}

/// The peer is gone or does not speak the protocol, so there is no one to reply to.
#[derive(Debug)]
pub(crate) struct BrokenConnection;

impl From<BrokenConnection> for Fault {
    /// The fault is never delivered, but lets a worker return all its errors as one type.
    fn from(_: BrokenConnection) -> Self {
        fault::from_kind(FaultKind::Other, "talk", "a broken connection")
    }
}

impl WorkerConnection {
    /// Continues where the agent has stopped reading.
    pub(crate) fn new(connection: OwnedFd, decoder: FrameDecoder) -> Self {
        let mut buffer = Vec::from(decoder.into_rest());
        let waiting = 0..buffer.len();
        buffer.resize(waiting.end.max(RECEIVE_BUFFER_BYTES), 0);
        Self { connection, buffer, waiting, data_left: 0, out: Vec::new(), greeted: false }
    }

    pub(crate) fn send_reply(&mut self, reply: &AgentReply) -> Result<(), BrokenConnection> {
        self.queue_greeting();
        Frame::from_message(reply).encode(&mut self.out);
        self.flush()
    }

    /// Like [`WorkerConnection::send_reply`], for a message that may be too long to be sent.
    pub(crate) fn send_bounded_reply(&mut self, reply: &AgentReply, subject: &str) -> Result<(), Fault> {
        match Frame::from_message(reply) {
            Frame::Control(json) if json.len() > MAX_PAYLOAD => {
                Err(fault::from_kind(FaultKind::Invalid, "answer", subject))
            }
            frame => {
                self.queue_greeting();
                frame.encode(&mut self.out);
                Ok(self.flush()?)
            }
        }
    }

    /// Sends the last message. It does not matter whether it arrives.
    pub(crate) fn send_fault(&mut self, fault: Fault) {
        self.send_reply(&AgentReply::Fault(fault)).ok();
    }

    pub(crate) fn send_data(&mut self, bytes: &[u8]) -> Result<(), BrokenConnection> {
        self.queue_greeting();
        frame::encode_data(&mut self.out, bytes);
        self.flush()
    }

    /// Sends `length` bytes from the file's position without copying them. If the file has become
    /// shorter the connection is closed, because the frame header already contains the length.
    pub(crate) fn send_file(&mut self, file: &mut File, length: usize) -> Result<(), BrokenConnection> {
        self.queue_greeting();
        self.out.extend_from_slice(&FrameHeader { kind: FrameKind::Data, length }.to_bytes());
        self.flush()?;
        let mut left = length;
        while left > 0 {
            match rustix::fs::sendfile(&self.connection, &*file, None, left) {
                Ok(count @ 1..) => left -= count,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOSYS) => return self.copy_file(file, left),
                Ok(_) | Err(_) => return Err(BrokenConnection),
            }
        }
        Ok(())
    }

    /// For filesystems that do not support sendfile(2).
    fn copy_file(&mut self, file: &mut File, mut left: usize) -> Result<(), BrokenConnection> {
        while left > 0 {
            self.out.resize(left.min(CHUNK_SIZE), 0);
            let count = file.read(&mut self.out).ok().filter(|count| *count > 0).ok_or(BrokenConnection)?;
            self.out.truncate(count);
            self.flush()?;
            left -= count;
        }
        Ok(())
    }

    pub(crate) fn send_end(&mut self) -> Result<(), BrokenConnection> {
        self.queue_greeting();
        Frame::End.encode(&mut self.out);
        self.flush()
    }

    /// The next piece of data from the server, as it arrives; `None` at its end.
    pub(crate) fn receive_data(&mut self) -> Result<Option<&[u8]>, BrokenConnection> {
        while self.data_left == 0 {
            match self.receive_header()? {
                FrameHeader { kind: FrameKind::Data, length } => self.data_left = length,
                FrameHeader { kind: FrameKind::End, .. } => return Ok(None),
                FrameHeader { kind: FrameKind::Control | FrameKind::Output, .. } => {
                    return Err(BrokenConnection);
                }
            }
        }
        if self.waiting.is_empty() {
            self.receive_bytes()?;
        }
        let length = self.waiting.len().min(self.data_left);
        self.data_left -= length;
        Ok(Some(self.consume_bytes(length)))
    }

    fn receive_header(&mut self) -> Result<FrameHeader, BrokenConnection> {
        loop {
            match FrameHeader::parse(&self.buffer[self.waiting.clone()]) {
                Ok(Some(header)) => {
                    self.consume_bytes(FrameHeader::LENGTH);
                    return Ok(header);
                }
                Ok(None) => self.receive_bytes()?,
                Err(_) => return Err(BrokenConnection),
            }
        }
    }

    fn consume_bytes(&mut self, length: usize) -> &[u8] {
        let begin = self.waiting.start;
        self.waiting.start += length;
        &self.buffer[begin..self.waiting.start]
    }

    /// Receives more bytes. At most a part of a header is waiting when this is called.
    fn receive_bytes(&mut self) -> Result<(), BrokenConnection> {
        self.buffer.copy_within(self.waiting.clone(), 0);
        self.waiting = 0..self.waiting.len();
        match rustix::net::recv(&self.connection, &mut self.buffer[self.waiting.end..], RecvFlags::empty()) {
            Ok((count @ 1.., _)) => self.waiting.end += count,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return Err(BrokenConnection),
        }
        Ok(())
    }

    fn queue_greeting(&mut self) {
        if !self.greeted {
            self.greeted = true;
            Frame::from_message(&Greeting { version: wire::VERSION }).encode(&mut self.out);
        }
    }

    fn flush(&mut self) -> Result<(), BrokenConnection> {
        let mut sent = 0;
        while sent < self.out.len() {
            match rustix::net::send(&self.connection, &self.out[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(_) => return Err(BrokenConnection),
            }
        }
        self.out.clear();
        Ok(())
    }
}

impl AsFd for WorkerConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
