//! A connection to an agent from a process without an event loop.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Result, bail};
use wire::{Call, Decoder, Frame, Greeting, Reply, Request, VERSION};

pub(super) struct Link {
    stream: UnixStream,
    decoder: Decoder,
}

impl Link {
    /// Asks one question. The greeting is read here, the answer by the caller.
    pub(super) fn ask(socket: &Path, request: Request) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let mut link = Self { stream, decoder: Decoder::new() };
        link.send(&Frame::message(&Call { version: VERSION, request }))?;
        let greeting: Greeting = link.frame()?.read()?;
        if greeting.version > VERSION {
            bail!("the agent speaks version {} of the protocol", greeting.version);
        }
        Ok(link)
    }

    pub(super) fn send(&mut self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.stream.write_all(&bytes)
    }

    /// The next frame, waiting for it.
    pub(super) fn frame(&mut self) -> Result<Frame> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(frame);
            }
            if self.fill()? == 0 {
                bail!("the sandbox ended by itself");
            }
        }
    }

    pub(super) fn reply(&mut self) -> Result<Reply> {
        match self.frame()?.read()? {
            Reply::Fault(fault) => Err(Faulty(fault).into()),
            reply => Ok(reply),
        }
    }

    /// A frame that has arrived already.
    pub(super) fn ready_frame(&mut self) -> Result<Option<Frame>> {
        Ok(self.decoder.next_frame()?)
    }

    /// Takes in what has arrived; 0 at the end.
    pub(super) fn fill(&mut self) -> io::Result<usize> {
        let mut buffer = [0; 64 << 10];
        let length = self.stream.read(&mut buffer)?;
        self.decoder.feed(&buffer[..length]);
        Ok(length)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// What the agent could not do for us.
#[derive(Debug)]
pub(super) struct Faulty(wire::Fault);

impl Faulty {
    /// The exit code that shells have for a program that cannot be started; `None` if it is
    /// something else that failed.
    pub(super) fn exit_code(&self) -> Option<u8> {
        const NOT_EXECUTABLE: u8 = 126;
        const NOT_FOUND: u8 = 127;
        let not_found = self.0.kind == wire::FaultKind::NotFound;
        (self.0.operation == "exec").then_some(if not_found { NOT_FOUND } else { NOT_EXECUTABLE })
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wire::Fault { operation, subject, errno, .. } = &self.0;
        write!(f, "could not {operation} `{subject}`")?;
        match errno {
            Some(errno) => write!(f, ": {}", io::Error::from_raw_os_error(*errno)),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Faulty {}
