//! One connection from a server: bytes in, frames out.

use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::Serialize;
use wire::{Decoder, Fault, FaultKind, Frame, Greeting, Reply};

use crate::agent::Agent;
use crate::journal::Cursor;
use crate::poll::{Source, Token};
use crate::{fault, requests};

/// The maximum number of connections open at once.
const MOST_CONNECTIONS: usize = 512;

/// How many more connections are accepted only to answer that there are too many.
const SURPLUS: usize = 64;

/// The maximum number of connections accepted in one turn of the event loop.
const ACCEPTS: usize = 32;

#[derive(Debug)]
pub(crate) struct Connection {
    source: Source,
    pub(crate) decoder: Decoder,
    /// Encoded frames; the first `sent` bytes have been sent already.
    pub(crate) out: Vec<u8>,
    sent: usize,
    pub(crate) stage: Stage,
    greeted: bool,
    reading: bool,
    finished_sending: bool,
}

/// The state of a connection's operation.
#[derive(Debug)]
pub(crate) enum Stage {
    /// The request has not arrived yet.
    Asking,
    /// Another part of the agent will reply: an exec, a shell, a free worker.
    Waiting,
    Following {
        process: u64,
        cursor: Cursor,
    },
    /// Input for a body.
    Feeding(u64),
    /// All input has arrived, but the body has not taken it yet.
    Fed(u64),
    /// The last reply is queued; the connection closes when it has been sent.
    Leaving,
}

impl Connection {
    pub(crate) fn new(source: Source) -> Self {
        Self {
            source,
            decoder: Decoder::new(),
            out: Vec::new(),
            sent: 0,
            stage: Stage::Asking,
            greeted: false,
            reading: true,
            finished_sending: false,
        }
    }

    /// Queues a message. The greeting is sent before the first one.
    pub(crate) fn say(&mut self, reply: &impl Serialize) {
        if !self.greeted {
            self.greeted = true;
            Frame::message(&Greeting { version: wire::VERSION }).encode(&mut self.out);
        }
        Frame::message(reply).encode(&mut self.out);
    }

    /// How many bytes wait to be sent.
    pub(crate) fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Whether the server has closed its side and everything it sent was read.
    pub(crate) fn finished_sending(&self) -> bool {
        self.finished_sending
    }

    pub(crate) fn pause_reading(&mut self) {
        self.reading = false;
        self.set_interest(false);
    }

    pub(crate) fn go_on_reading(&mut self) {
        self.reading = true;
        self.set_interest(false);
    }

    /// Waits for the events that matter in this stage; `more` means that there is more to send than
    /// the buffer holds now.
    pub(crate) fn set_interest(&mut self, more: bool) {
        let mut interest = EventFlags::empty();
        if self.reading && matches!(self.stage, Stage::Asking | Stage::Feeding(_)) {
            interest |= EventFlags::IN;
        }
        if more || self.unsent() > 0 {
            interest |= EventFlags::OUT;
        }
        self.source.want(interest);
    }

    /// Sends as much as the socket takes and returns the number of bytes. An error means that the
    /// peer is gone.
    pub(crate) fn flush(&mut self) -> rustix::io::Result<usize> {
        let before = self.unsent();
        while self.unsent() > 0 {
            match rustix::net::send(self.source.as_fd(), &self.out[self.sent..], SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => return Ok(before - self.unsent()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(before)
    }

    /// Reads once. `Ok(0)` is the end.
    fn receive(&mut self, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        let (count, _) = rustix::net::recv(self.source.as_fd(), &mut *buffer, RecvFlags::empty())?;
        self.decoder.feed(&buffer[..count]);
        self.finished_sending = count == 0;
        Ok(count)
    }

    /// Reads once more, without waiting. Returns false if there is nothing to read now.
    pub(crate) fn receive_more(&mut self, buffer: &mut [u8]) -> bool {
        match self.receive(buffer) {
            Ok(_) => true,
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => {
                self.finished_sending = true;
                true
            }
        }
    }

    /// Takes the unsent bytes, for a process that sends them instead.
    pub(crate) fn take_unsent(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out).split_off(std::mem::take(&mut self.sent))
    }

    /// Splits the connection for a process that takes it over; the greeting has not been sent yet.
    pub(crate) fn into_parts(self) -> (Source, Decoder) {
        (self.source, self.decoder)
    }
}

impl Agent {
    pub(crate) fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let fd = match self.place.accept() {
                Ok(fd) => fd,
                Err(Errno::MFILE | Errno::NFILE) => return self.turn_away(),
                Err(_) => return,
            };
            let number = self.next_number();
            let Ok(source) = self.poll.watch(fd, Token::Connection(number), EventFlags::IN) else { return };
            if self.connections.len() >= MOST_CONNECTIONS + SURPLUS {
                continue;
            }
            self.connections.insert(number, Connection::new(source));
            // The request usually came along with the connection.
            self.on_readable(number);
        }
    }

    /// Handles running out of descriptors. The poll reports the connection again and again until it
    /// is accepted, so the spare descriptor is used to accept and close it.
    fn turn_away(&mut self) {
        self.reserve = None;
        drop(self.place.accept());
        self.reserve = rustix::io::fcntl_dupfd_cloexec(&self.place.null, 3).ok();
    }

    pub(crate) fn on_connection(&mut self, number: u64, flags: EventFlags) {
        if flags.contains(EventFlags::IN) {
            self.on_readable(number);
        }
        if flags.contains(EventFlags::OUT) {
            self.on_writable(number);
        }
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            self.on_hang_up(number);
        }
    }

    fn on_readable(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match connection.receive(&mut self.scratch) {
            Ok(_) => self.go_on(number),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.close(number),
        }
    }

    /// Handles the bytes that have arrived.
    fn go_on(&mut self, number: u64) {
        let crowded = self.connections.len() > MOST_CONNECTIONS;
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match connection.stage {
            Stage::Asking => match connection.decoder.next_frame() {
                Ok(Some(_)) if crowded => {
                    self.refuse(number, fault::plain(FaultKind::Busy, "connect", "too many connections"));
                }
                Ok(Some(frame)) => self.on_call(number, &frame),
                Ok(None) if connection.finished_sending => self.close(number),
                Ok(None) => {}
                Err(_) => self.refuse(number, requests::malformed()),
            },
            Stage::Feeding(body) => self.feed(body),
            Stage::Waiting | Stage::Following { .. } | Stage::Fed(_) | Stage::Leaving => {}
        }
    }

    fn on_writable(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match connection.stage {
            Stage::Following { .. } => self.pump(number),
            _ => self.push(number),
        }
    }

    /// The server has closed the connection. Data it sent before is still handled, and operations
    /// it requested continue.
    fn on_hang_up(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if !matches!(connection.stage, Stage::Asking | Stage::Feeding(_)) {
            self.close(number);
            return;
        }
        while matches!(connection.receive(&mut self.scratch), Ok(1..)) {}
        connection.finished_sending = true;
        // The poll would report the hang-up again and again while we wait for a process to read.
        connection.source.mute();
        self.go_on(number);
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, number: u64, reply: &Reply) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.say(reply);
            self.push(number);
        }
    }

    /// Sends the last message and closes the connection once it has been sent.
    pub(crate) fn answer(&mut self, number: u64, reply: &Reply) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.say(reply);
            connection.stage = Stage::Leaving;
            self.push(number);
        }
    }

    pub(crate) fn refuse(&mut self, number: u64, fault: Fault) {
        self.answer(number, &Reply::Fault(fault));
    }

    /// Sends as much as the socket takes, and closes a connection that has nothing more to send.
    pub(crate) fn push(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let gone = connection.flush().is_err();
        let done = connection.unsent() == 0 && matches!(connection.stage, Stage::Leaving);
        if gone || done {
            self.close(number);
        } else {
            connection.set_interest(false);
        }
    }

    pub(crate) fn close(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        if let Stage::Following { process, .. } = connection.stage {
            self.unfollow(process, number);
        }
    }
}
