//! The connection to a server, and the responses that it has not taken yet.
//!
//! A socket takes some forty responses. A server that is busy while many creates finish takes longer to
//! read them, and the launcher must neither wait for it nor lose one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::event::PollFlags;
use rustix::net::Shutdown;

use crate::protocol::LauncherResponse;
use linux::packet;

/// The maximum number of responses that wait for a server. It has fewer requests in progress.
const MAX_UNSENT_RESPONSES: usize = 16 << 10;

/// A connection that several operations in progress may answer on.
pub(crate) type ClientSocket = Rc<ClientConnection>;

#[derive(Debug)]
pub(crate) struct ClientConnection {
    socket: OwnedFd,
    unsent: RefCell<VecDeque<(LauncherResponse, Option<OwnedFd>)>>,
}

impl ClientConnection {
    pub(crate) fn new(socket: OwnedFd) -> ClientSocket {
        Rc::new(Self { socket, unsent: RefCell::default() })
    }

    /// The events that the loop waits for.
    pub(crate) fn poll_flags(&self) -> PollFlags {
        if self.unsent.borrow().is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT }
    }

    /// Sends a response, now or when the server has read earlier ones.
    pub(crate) fn send(&self, response: LauncherResponse, descriptor: Option<&OwnedFd>) -> io::Result<()> {
        let mut unsent = self.unsent.borrow_mut();
        if unsent.is_empty() {
            match packet::send_message(self.as_fd(), &response, descriptor.map(AsFd::as_fd)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
        if unsent.len() >= MAX_UNSENT_RESPONSES {
            return Err(io::Error::other("too many responses wait for the server"));
        }
        unsent.push_back((response, descriptor.map(OwnedFd::try_clone).transpose()?));
        Ok(())
    }

    /// Gives up the waiting responses and ends the connection, also for operations in progress.
    pub(crate) fn close(&self) {
        self.unsent.borrow_mut().clear();
        // It fails if the server has closed it already.
        rustix::net::shutdown(&self.socket, Shutdown::Both).ok();
    }

    /// Sends as many of the waiting responses as the socket takes.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let mut unsent = self.unsent.borrow_mut();
        while let Some((response, descriptor)) = unsent.front() {
            match packet::send_message(self.as_fd(), response, descriptor.as_ref().map(AsFd::as_fd)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                sent => sent?,
            }
            unsent.pop_front();
        }
        Ok(())
    }
}

impl AsFd for ClientConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::protocol::OpResult;

    #[test]
    fn no_response_is_lost_while_the_server_does_not_read() {
        const RESPONSES: u64 = 2000;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair of sockets");
        let client = ClientConnection::new(ours);
        for number in 0..RESPONSES {
            let descriptor = (number % 2 == 0).then_some(&theirs);
            client
                .send(LauncherResponse { number, result: Ok(OpResult::Done) }, descriptor)
                .expect("it is kept");
        }
        assert_eq!(client.poll_flags(), PollFlags::IN | PollFlags::OUT);
        for number in 0..RESPONSES {
            client.flush().expect("the server is there");
            let received = packet::receive_message::<LauncherResponse>(theirs.as_fd()).expect("it was sent");
            let (response, descriptor) = received.expect("the connection is open");
            assert_eq!((response.number, descriptor.is_some()), (number, number % 2 == 0));
        }
        assert_eq!(client.poll_flags(), PollFlags::IN);
        // A server that reads no more.
        rustix::net::shutdown(&theirs, Shutdown::Read).expect("it is connected");
        for number in 0..2 {
            let response = LauncherResponse { number, result: Ok(OpResult::Done) };
            client.unsent.borrow_mut().push_back((response, None));
        }
        assert!(client.flush().is_err());
        client.close();
        assert_eq!(client.poll_flags(), PollFlags::IN);
        drop(theirs);
        let response = LauncherResponse { number: 0, result: Ok(OpResult::Done) };
        assert!(client.send(response, None).is_err(), "the server has gone");
    }
}
