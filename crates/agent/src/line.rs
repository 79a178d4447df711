//! A connection as a worker uses it: the worker is its only owner and may block on it.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use wire::frame::{self, CHUNK, Header, Kind, MAX_PAYLOAD};
use wire::{Decoder, Fault, FaultKind, Frame, Greeting, Reply};

use crate::fault;

/// How much is received at once. It is written as it arrives, and large writes are faster on a
/// filesystem that keeps checksums and quotas.
const RECEIVED_AT_ONCE: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Line {
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
pub(crate) struct Broken;

impl From<Broken> for Fault {
    /// The fault is never delivered, but lets a worker return all its errors as one type.
    fn from(_: Broken) -> Self {
        fault::plain(FaultKind::Other, "talk", "a broken connection")
    }
}

impl Line {
    /// Continues where the agent has stopped reading.
    pub(crate) fn new(connection: OwnedFd, decoder: Decoder) -> Self {
        let mut buffer = Vec::from(decoder.into_rest());
        let waiting = 0..buffer.len();
        buffer.resize(waiting.end.max(RECEIVED_AT_ONCE), 0);
        Self { connection, buffer, waiting, data_left: 0, out: Vec::new(), greeted: false }
    }

    pub(crate) fn say(&mut self, reply: &Reply) -> Result<(), Broken> {
        self.greet();
        Frame::message(reply).encode(&mut self.out);
        self.flush()
    }

    /// Like [`Line::say`], for a message that may be too long to be sent.
    pub(crate) fn say_bounded(&mut self, reply: &Reply, subject: &str) -> Result<(), Fault> {
        match Frame::message(reply) {
            Frame::Control(json) if json.len() > MAX_PAYLOAD => {
                Err(fault::plain(FaultKind::Invalid, "answer", subject))
            }
            frame => {
                self.greet();
                frame.encode(&mut self.out);
                Ok(self.flush()?)
            }
        }
    }

    /// Sends the last message. It does not matter whether it arrives.
    pub(crate) fn fail(&mut self, fault: Fault) {
        self.say(&Reply::Fault(fault)).ok();
    }

    pub(crate) fn send_data(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.greet();
        frame::encode_data(&mut self.out, bytes);
        self.flush()
    }

    /// Sends `length` bytes from the file's position without copying them. If the file has become
    /// shorter the connection is closed, because the frame header already contains the length.
    pub(crate) fn send_file(&mut self, file: &mut File, length: usize) -> Result<(), Broken> {
        self.greet();
        self.out.extend_from_slice(&Header { kind: Kind::Data, length }.encoded());
        self.flush()?;
        let mut left = length;
        while left > 0 {
            match rustix::fs::sendfile(&self.connection, &*file, None, left) {
                Ok(count @ 1..) => left -= count,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOSYS) => return self.copy_file(file, left),
                Ok(_) | Err(_) => return Err(Broken),
            }
        }
        Ok(())
    }

    /// For filesystems that do not support sendfile(2).
    fn copy_file(&mut self, file: &mut File, mut left: usize) -> Result<(), Broken> {
        while left > 0 {
            self.out.resize(left.min(CHUNK), 0);
            let count = file.read(&mut self.out).ok().filter(|count| *count > 0).ok_or(Broken)?;
            self.out.truncate(count);
            self.flush()?;
            left -= count;
        }
        Ok(())
    }

    pub(crate) fn send_end(&mut self) -> Result<(), Broken> {
        self.greet();
        Frame::End.encode(&mut self.out);
        self.flush()
    }

    /// The next piece of data from the server, as it arrives; `None` at its end.
    pub(crate) fn receive_data(&mut self) -> Result<Option<&[u8]>, Broken> {
        while self.data_left == 0 {
            match self.receive_header()? {
                Header { kind: Kind::Data, length } => self.data_left = length,
                Header { kind: Kind::End, .. } => return Ok(None),
                Header { kind: Kind::Control | Kind::Output, .. } => return Err(Broken),
            }
        }
        if self.waiting.is_empty() {
            self.receive()?;
        }
        let length = self.waiting.len().min(self.data_left);
        self.data_left -= length;
        Ok(Some(self.take(length)))
    }

    fn receive_header(&mut self) -> Result<Header, Broken> {
        loop {
            match Header::read(&self.buffer[self.waiting.clone()]) {
                Ok(Some(header)) => {
                    self.take(Header::LENGTH);
                    return Ok(header);
                }
                Ok(None) => self.receive()?,
                Err(_) => return Err(Broken),
            }
        }
    }

    fn take(&mut self, length: usize) -> &[u8] {
        let begin = self.waiting.start;
        self.waiting.start += length;
        &self.buffer[begin..self.waiting.start]
    }

    /// Receives more bytes. At most a part of a header is waiting when this is called.
    fn receive(&mut self) -> Result<(), Broken> {
        self.buffer.copy_within(self.waiting.clone(), 0);
        self.waiting = 0..self.waiting.len();
        match rustix::net::recv(&self.connection, &mut self.buffer[self.waiting.end..], RecvFlags::empty()) {
            Ok((count @ 1.., _)) => self.waiting.end += count,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return Err(Broken),
        }
        Ok(())
    }

    fn greet(&mut self) {
        if !self.greeted {
            self.greeted = true;
            Frame::message(&Greeting { version: wire::VERSION }).encode(&mut self.out);
        }
    }

    fn flush(&mut self) -> Result<(), Broken> {
        let mut sent = 0;
        while sent < self.out.len() {
            match rustix::net::send(&self.connection, &self.out[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(_) => return Err(Broken),
            }
        }
        self.out.clear();
        Ok(())
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
