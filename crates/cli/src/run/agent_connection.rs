//! A connection to an agent from a process without an event loop.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use wire::{
    AgentReply, AgentRequest, FaultKind, FaultOperation, Frame, FrameDecoder, Greeting, VERSION,
    VersionedRequest,
};

use crate::commands::ProgramStartError;

pub(super) struct AgentConnection {
    stream: UnixStream,
    decoder: FrameDecoder,
}

impl AgentConnection {
    /// Sends one request. The greeting is read here, the reply by the caller.
    pub(super) fn send_request(socket: &Path, request: AgentRequest) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let mut link = Self { stream, decoder: FrameDecoder::new() };
        link.send_frame(&Frame::from_message(&VersionedRequest { version: VERSION, request }))?;
        let greeting: Greeting = link.next_frame()?.parse_message()?;
        if greeting.version > VERSION {
            bail!("the agent speaks version {} of the protocol", greeting.version);
        }
        Ok(link)
    }

    pub(super) fn send_frame(&mut self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.stream.write_all(&bytes)
    }

    /// Makes [`AgentConnection::send_some`] return instead of waiting for the agent.
    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        self.stream.set_nonblocking(true)
    }

    /// Sends as many of these bytes as the agent takes now, and returns how many that were.
    pub(super) fn send_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.stream.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }

    /// The next frame, waiting for it.
    pub(super) fn next_frame(&mut self) -> Result<Frame> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(frame);
            }
            if self.read_available()? == 0 {
                bail!("the sandbox ended by itself");
            }
        }
    }

    pub(super) fn read_reply(&mut self) -> Result<AgentReply> {
        match self.next_frame()?.parse_message()? {
            AgentReply::Fault(fault) => Err(fault_error(&fault)),
            reply => Ok(reply),
        }
    }

    /// The next frame, if it has already arrived.
    pub(super) fn ready_frame(&mut self) -> Result<Option<Frame>> {
        Ok(self.decoder.next_frame()?)
    }

    /// Reads the bytes that have arrived; returns 0 at the end.
    pub(super) fn read_available(&mut self) -> io::Result<usize> {
        let mut buffer = [0; 64 << 10];
        let length = self.stream.read(&mut buffer)?;
        self.decoder.feed(&buffer[..length]);
        Ok(length)
    }
}

impl AsFd for AgentConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The error for a fault from inside. Only a fault in the last step, the exec, is caused by the program.
fn fault_error(fault: &wire::Fault) -> anyhow::Error {
    let cause =
        fault.errno.map(|errno| format!(": {}", io::Error::from_raw_os_error(errno))).unwrap_or_default();
    let why = format!("could not {} `{}`{cause}", fault.operation, fault.subject);
    match (&fault.operation, fault.kind) {
        (FaultOperation::Exec, FaultKind::NotFound) => ProgramStartError::missing(why).into(),
        (FaultOperation::Exec, _) => ProgramStartError::not_executable(why).into(),
        // Without an errno, it was the agent of a sandbox with only one user that refused.
        (FaultOperation::BecomeUser, FaultKind::Permission) if fault.errno.is_none() => {
            anyhow!("{why}: this sandbox has no other user than root")
        }
        _ => anyhow!(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(operation: &str, kind: FaultKind) -> Option<u8> {
        let subject = "x".to_owned();
        let fault = wire::Fault { kind, errno: None, operation: operation.into(), subject };
        fault_error(&fault).downcast_ref::<ProgramStartError>().map(|failed| failed.code)
    }

    #[test]
    fn only_a_failed_exec_is_the_programs_fault() {
        assert_eq!(code("exec", FaultKind::NotFound), Some(127));
        assert_eq!(code("exec", FaultKind::Permission), Some(126));
        assert_eq!(code("exec", FaultKind::Other), Some(126));
        assert_eq!(code("change directory", FaultKind::NotFound), None);
    }

    #[test]
    fn missing_user_is_quoted_without_the_reason() {
        let fault = wire::Fault {
            kind: FaultKind::Permission,
            errno: None,
            operation: FaultOperation::BecomeUser,
            subject: "1000".to_owned(),
        };
        let said = fault_error(&fault).to_string();
        assert_eq!(said, "could not become user `1000`: this sandbox has no other user than root");
    }
}
