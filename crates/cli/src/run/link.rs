//! A connection to an agent from a process without an event loop.

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
            Reply::Fault(fault) => bail!(describe(&fault)),
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

fn describe(fault: &wire::Fault) -> String {
    let cause =
        fault.errno.map(|errno| format!(": {}", io::Error::from_raw_os_error(errno))).unwrap_or_default();
    format!("could not {} `{}`{cause}", fault.operation, fault.subject)
}
