//! The process that keeps the sockets of sandboxes without a link: the supervisor, or egress itself for `coracle run`.
//!
//! The launcher opens the sockets and hands them over. It does not wait for replies, except once at its start: what keeps
//! sockets only stores them, and refusals are logged when the next message is sent.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use domain::SandboxId;
use egress_protocol::{
    EgressReply, EgressReplyBody, EgressRequest, EgressRequestBody, ServeMode, ServedSandbox,
};
use linux::packet;
use linux::transparent::TransparentSockets;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long the other end may take to read or to reply. It does nothing else for long.
const KEEPER_TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The numbers of our requests begin here: `coracle run` sends requests of its own over the same connection.
const FIRST_NUMBER: u64 = 1 << 32;

/// A connection to the process that keeps the sockets.
#[derive(Debug)]
pub(super) struct EgressKeeper {
    socket: OwnedFd,
    number: u64,
    /// The sandboxes whose sockets it has.
    served: BTreeSet<SandboxId>,
}

impl EgressKeeper {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, number: FIRST_NUMBER, served: BTreeSet::new() }
    }

    /// Asks which sandboxes it has sockets of, and returns them.
    pub(super) fn load_served(&mut self) -> io::Result<&BTreeSet<SandboxId>> {
        let number = self.send(EgressRequestBody::ListServed, None)?;
        loop {
            wait_for(&self.socket, PollFlags::IN)?;
            match self.receive_reply()? {
                Some(EgressReply { number: replied, body: EgressReplyBody::Served { sandboxes } })
                    if replied == number =>
                {
                    self.served = sandboxes.iter().filter_map(|id| SandboxId::parse(id).ok()).collect();
                    return Ok(&self.served);
                }
                Some(EgressReply { number: replied, body }) if replied == number => {
                    return Err(io::Error::other(format!("unexpected reply: {body:?}")));
                }
                Some(_) | None => {}
            }
        }
    }

    /// Hands over the sockets of a sandbox, or replaces them.
    pub(super) fn serve(
        &mut self,
        id: &SandboxId,
        mode: ServeMode,
        own: &[IpAddr],
        sockets: &TransparentSockets,
    ) -> io::Result<()> {
        let served = ServedSandbox { sandbox: id.to_string(), mode, own: own.to_vec() };
        self.send(EgressRequestBody::Serve(served), Some(sockets))?;
        self.served.insert(id.clone());
        Ok(())
    }

    pub(super) fn serves(&self, id: &SandboxId) -> bool {
        self.served.contains(id)
    }

    /// Makes it close the sockets of a sandbox, if it has any.
    pub(super) fn forget(&mut self, id: &SandboxId) {
        if !self.served.remove(id) {
            return;
        }
        if let Err(error) = self.send(EgressRequestBody::Forget { sandbox: id.to_string() }, None) {
            tracing::warn!(%id, %error, "failed to close the sockets of an ended sandbox; the next start of the launcher retries");
        }
    }

    fn send(&mut self, body: EgressRequestBody, sockets: Option<&TransparentSockets>) -> io::Result<u64> {
        self.log_refusals()?;
        self.number += 1;
        let request = EgressRequest { number: self.number, body };
        let descriptors = sockets.map(|sockets| [sockets.tcp.as_fd(), sockets.udp.as_fd()]);
        let descriptors = descriptors.as_ref().map_or(&[][..], |pair| pair);
        loop {
            match packet::send_with_descriptors(self.socket.as_fd(), &request, descriptors) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_for(&self.socket, PollFlags::OUT)?;
                }
                sent => return sent.map(|()| request.number),
            }
        }
    }

    /// Reads the replies to earlier requests.
    fn log_refusals(&self) -> io::Result<()> {
        while let Some(EgressReply { number, body }) = self.receive_reply()? {
            if let EgressReplyBody::Refused { message } = body {
                tracing::error!(number, message, "sockets of a sandbox were refused; its connections fail");
            }
        }
        Ok(())
    }

    /// Returns the next reply, if there is one.
    fn receive_reply(&self) -> io::Result<Option<EgressReply>> {
        match packet::receive_with_descriptors(self.socket.as_fd()) {
            Ok(Some((reply, _))) => Ok(Some(reply)),
            Ok(None) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn wait_for(socket: &OwnedFd, flags: PollFlags) -> io::Result<()> {
    let mut watched = [PollFd::new(socket, flags)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&KEEPER_TIMEOUT)))?;
    if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}
