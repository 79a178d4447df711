//! A connection as a worker sees it: it owns it alone, and may wait.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use wire::frame::{self, CHUNK, MAX_PAYLOAD};
use wire::{Decoder, Fault, FaultKind, Frame, Greeting, Reply};

use crate::fault;

#[derive(Debug)]
pub(crate) struct Line {
    connection: OwnedFd,
    decoder: Decoder,
    buffer: Vec<u8>,
    out: Vec<u8>,
    greeted: bool,
}

/// The other side is gone, or does not speak the protocol; there is nobody to answer.
#[derive(Debug)]
pub(crate) struct Broken;

impl From<Broken> for Fault {
    /// It is sent into the void, but the way out of a worker is the same.
    fn from(_: Broken) -> Self {
        fault::plain(FaultKind::Other, "talk", "a broken connection")
    }
}

impl Line {
    /// Goes on where the agent has stopped reading.
    pub(crate) fn new(connection: OwnedFd, decoder: Decoder) -> Self {
        Self { connection, decoder, buffer: vec![0; CHUNK], out: Vec::new(), greeted: false }
    }

    pub(crate) fn say(&mut self, reply: &Reply) -> Result<(), Broken> {
        self.greet();
        Frame::message(reply).encode(&mut self.out);
        self.flush()
    }

    /// As [`Line::say`], for a message that may be too long to be sent.
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

    /// The last word. Whether it arrives cannot matter any more.
    pub(crate) fn fail(&mut self, fault: Fault) {
        self.say(&Reply::Fault(fault)).ok();
    }

    pub(crate) fn send_data(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.greet();
        frame::encode_data(&mut self.out, bytes);
        self.flush()
    }

    pub(crate) fn send_end(&mut self) -> Result<(), Broken> {
        self.greet();
        Frame::End.encode(&mut self.out);
        self.flush()
    }

    /// The next piece of what the server sends; `None` at its end.
    pub(crate) fn receive_data(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(Frame::Data(bytes))) => return Ok(Some(bytes)),
                Ok(Some(Frame::End)) => return Ok(None),
                Ok(Some(Frame::Control(_) | Frame::Output { .. })) | Err(_) => return Err(Broken),
                Ok(None) => self.receive()?,
            }
        }
    }

    fn receive(&mut self) -> Result<(), Broken> {
        match rustix::net::recv(&self.connection, self.buffer.as_mut_slice(), RecvFlags::empty()) {
            Ok((count @ 1.., _)) => self.decoder.feed(&self.buffer[..count]),
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
