//! One connection from a server: bytes in, frames out.

use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::Serialize;
use wire::frame::{self, MAX_PAYLOAD};
use wire::{FaultKind, Frame, FrameDecoder, Greeting};

use crate::event_loop::agent::Agent;
use crate::event_loop::connection_table::AcceptOutcome;
use crate::event_loop::handles::{ConnectionId, ProcessHandle, RunningHandle};
use crate::event_loop::poll::RegisteredFd;
use crate::event_loop::requests;
use crate::fault;
use crate::process::journal::JournalCursor;

/// The maximum number of connections accepted in one turn of the event loop.
const MAX_ACCEPTS_PER_TURN: usize = 32;

#[derive(Debug)]
pub(crate) struct IncomingConnection {
    source: RegisteredFd,
    pub(crate) decoder: FrameDecoder,
    /// Encoded frames; the first `sent` bytes have been sent already.
    pub(crate) out: Vec<u8>,
    sent: usize,
    pub(crate) stage: ConnectionStage,
    greeted: bool,
    reading: bool,
    finished_sending: bool,
}

/// The state of a connection's operation.
#[derive(Debug)]
pub(crate) enum ConnectionStage {
    /// The request has not arrived yet.
    Asking,
    /// Another part of the agent will reply: an exec, a shell, a free worker.
    Waiting,
    Following {
        process: ProcessHandle,
        cursor: JournalCursor,
    },
    /// Input for a running process.
    Feeding(RunningHandle),
    /// All input has arrived, but the process has not taken it yet.
    Fed(RunningHandle),
    /// The last reply is queued; the connection closes when it has been sent.
    Leaving,
}

impl IncomingConnection {
    pub(crate) fn new(source: RegisteredFd) -> Self {
        Self {
            source,
            decoder: FrameDecoder::new(),
            out: Vec::new(),
            sent: 0,
            stage: ConnectionStage::Asking,
            greeted: false,
            reading: true,
            finished_sending: false,
        }
    }

    /// Queues a message. The greeting is sent before the first one. A message that is too long for one
    /// frame is sent as data.
    pub(crate) fn queue_message(&mut self, reply: &impl Serialize) {
        if !self.greeted {
            self.greeted = true;
            Frame::from_message(&Greeting { version: wire::VERSION }).encode(&mut self.out);
        }
        match Frame::from_message(reply) {
            Frame::Control(json) if json.len() > MAX_PAYLOAD => {
                json.chunks(MAX_PAYLOAD).for_each(|piece| frame::encode_data(&mut self.out, piece));
                Frame::End.encode(&mut self.out);
            }
            frame => frame.encode(&mut self.out),
        }
    }

    /// How many bytes wait to be sent.
    pub(crate) fn unsent_bytes(&self) -> usize {
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

    pub(crate) fn resume_reading(&mut self) {
        self.reading = true;
        self.set_interest(false);
    }

    /// Waits for the events that matter in this stage; `more` means that there is more to send than
    /// the buffer holds now.
    pub(crate) fn set_interest(&mut self, more: bool) {
        let mut interest = EventFlags::empty();
        if self.reading && matches!(self.stage, ConnectionStage::Asking | ConnectionStage::Feeding(_)) {
            interest |= EventFlags::IN;
        }
        if more || self.unsent_bytes() > 0 {
            interest |= EventFlags::OUT;
        }
        self.source.set_interest(interest);
    }

    /// Sends as much as the socket takes and returns the number of bytes. An error means that the
    /// peer is gone.
    pub(crate) fn flush(&mut self) -> rustix::io::Result<usize> {
        let before = self.unsent_bytes();
        while self.unsent_bytes() > 0 {
            match rustix::net::send(self.source.as_fd(), &self.out[self.sent..], SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => return Ok(before - self.unsent_bytes()),
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
    pub(crate) fn into_parts(self) -> (RegisteredFd, FrameDecoder) {
        (self.source, self.decoder)
    }
}

impl Agent {
    pub(crate) fn accept_connections(&mut self) {
        for _ in 0..MAX_ACCEPTS_PER_TURN {
            match self.connections.accept_next(&self.context, &mut self.events) {
                // The request usually came along with the connection.
                AcceptOutcome::Accepted(number) => self.on_readable(number),
                AcceptOutcome::Dropped => {}
                AcceptOutcome::NoneWaiting => return,
            }
        }
    }

    pub(crate) fn on_connection(&mut self, number: ConnectionId, flags: EventFlags) {
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

    fn on_readable(&mut self, number: ConnectionId) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        match connection.receive(&mut self.buffers.scratch) {
            Ok(_) => self.handle_received(number),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.close_connection(number),
        }
    }

    /// Handles the bytes that have arrived.
    fn handle_received(&mut self, number: ConnectionId) {
        let crowded = self.connections.is_crowded();
        let Some(connection) = self.connections.get_mut(number) else { return };
        match connection.stage {
            ConnectionStage::Asking => match connection.decoder.next_frame() {
                Ok(Some(_)) if crowded => {
                    self.connections.refuse_request(
                        number,
                        fault::from_kind(FaultKind::Busy, "connect", "too many connections"),
                    );
                }
                Ok(Some(frame)) => self.on_request(number, &frame),
                Ok(None) if connection.finished_sending => self.close_connection(number),
                Ok(None) => {}
                Err(_) => self.connections.refuse_request(number, requests::malformed_fault()),
            },
            ConnectionStage::Feeding(running) => self.feed_input(running),
            ConnectionStage::Waiting
            | ConnectionStage::Following { .. }
            | ConnectionStage::Fed(_)
            | ConnectionStage::Leaving => {}
        }
    }

    fn on_writable(&mut self, number: ConnectionId) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        match connection.stage {
            ConnectionStage::Following { .. } => self.pump_follower(number),
            _ => self.connections.flush(number),
        }
    }

    /// The server has closed the connection. Data it sent before is still handled, and operations
    /// it requested continue.
    fn on_hang_up(&mut self, number: ConnectionId) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        if !matches!(connection.stage, ConnectionStage::Asking | ConnectionStage::Feeding(_)) {
            self.close_connection(number);
            return;
        }
        while matches!(connection.receive(&mut self.buffers.scratch), Ok(1..)) {}
        connection.finished_sending = true;
        // The poll would report the hang-up again and again while we wait for a process to read.
        connection.source.deregister();
        self.handle_received(number);
    }

    pub(crate) fn close_connection(&mut self, number: ConnectionId) {
        let Some(connection) = self.connections.remove(number) else { return };
        if let ConnectionStage::Following { process, .. } = connection.stage {
            self.stop_following(process, number);
        }
    }
}
