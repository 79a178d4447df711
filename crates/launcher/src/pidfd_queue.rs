//! The descriptors of running sandboxes on their way to the server that asked for a list.
//!
//! ```text
//! launcher ──► PidfdQueue { sender, receiver }        receiver ──► server, as descriptor of the response
//!                 └─ all packets are in it before the response is sent
//! ```
//!
//! One packet takes only a few descriptors, so there are many, and they wait in a socket of their own. The kernel does
//! not limit the descriptors that a privileged process has sent and nobody has received. A server that does not read
//! its responses could make the launcher fill the host's table of open files, so only a few lists may be unread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use domain::SandboxId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};

use crate::protocol::{OpError, OpErrorKind, WatchedIds};
use linux::packet;

/// A server asks for a list when it starts, and once more when a launcher was restarted.
const MAX_UNREAD_LISTS: usize = 8;

/// Room for the packets of 4,000 sandboxes and more; the kernel lowers it to `net.core.wmem_max`.
const QUEUE_BYTES: usize = 1 << 20;

/// A socket with packets of ids and descriptors, and the end at which they are received.
pub(crate) struct PidfdQueue {
    sender: OwnedFd,
    receiver: OwnedFd,
}

impl PidfdQueue {
    pub(crate) fn new() -> io::Result<Self> {
        let (sender, receiver) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // The only reader gets its end with the response. A full socket must fail, since waiting would last for ever.
        rustix::io::ioctl_fionbio(&sender, true)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&sender, QUEUE_BYTES)?;
        Ok(Self { sender, receiver })
    }

    pub(crate) fn push(&mut self, ids: Vec<SandboxId>, pidfds: &[OwnedFd]) -> io::Result<()> {
        let borrowed: Vec<BorrowedFd<'_>> = pidfds.iter().map(AsFd::as_fd).collect();
        packet::send_with_descriptors(self.sender.as_fd(), &WatchedIds { ids }, &borrowed)
    }

    /// Ends the queue. Returns its receiving end, and the sender, by which the queue can be watched.
    fn finish(self) -> io::Result<(OwnedFd, OwnedFd)> {
        rustix::net::shutdown(&self.sender, Shutdown::Write)?;
        Ok((self.receiver, self.sender))
    }
}

/// The queues whose receiving end is still open, by their senders.
#[derive(Default)]
pub(crate) struct UnreadLists(Vec<OwnedFd>);

impl UnreadLists {
    /// Refuses another list if too many are unread.
    pub(crate) fn check_room(&mut self) -> Result<(), OpError> {
        self.0.retain(is_unread);
        if self.0.len() < MAX_UNREAD_LISTS {
            return Ok(());
        }
        let message = format!("limit of unread lists of sandboxes reached ({MAX_UNREAD_LISTS})");
        Err(OpError { kind: OpErrorKind::Exhausted, message, hint: None })
    }

    /// Counts a queue until its receiving end, which is returned, is closed by all who have it.
    pub(crate) fn add(&mut self, queue: PidfdQueue) -> io::Result<OwnedFd> {
        let (receiver, sender) = queue.finish()?;
        self.0.push(sender);
        Ok(receiver)
    }
}

fn is_unread(sender: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut watched = [PollFd::new(sender, PollFlags::empty())];
    poll(&mut watched, Some(&now)).is_ok() && !watched[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue_of(sandboxes: usize) -> io::Result<PidfdQueue> {
        let mut queue = PidfdQueue::new()?;
        let all = vec![SandboxId::from_entropy([7; 20]); sandboxes];
        let (file, _other) = rustix::pipe::pipe()?;
        for ids in all.chunks(packet::MAX_DESCRIPTORS) {
            let pidfds = ids.iter().map(|_| file.try_clone()).collect::<io::Result<Vec<_>>>()?;
            queue.push(ids.to_vec(), &pidfds)?;
        }
        Ok(queue)
    }

    fn count_received(receiver: &OwnedFd) -> usize {
        let mut count = 0;
        while let Some((WatchedIds { ids }, descriptors)) =
            packet::receive_with_descriptors(receiver.as_fd()).expect("a packet or the end")
        {
            assert_eq!(ids.len(), descriptors.len());
            count += ids.len();
        }
        count
    }

    #[test]
    fn queue_takes_all_sandboxes_before_it_is_read() {
        // An ordinary user may have no more descriptors in messages than open files.
        if !testkit::needs_root() {
            return;
        }
        let mut lists = UnreadLists::default();
        let receiver = lists.add(queue_of(4000).expect("all fit")).expect("it ends");
        assert_eq!(count_received(&receiver), 4000);
    }

    #[test]
    fn full_queue_fails_instead_of_waiting() {
        // An ordinary user may have no more descriptors in messages than open files.
        if !testkit::needs_root() {
            return;
        }
        assert_eq!(queue_of(100_000).err().map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn lists_that_are_not_read_are_bounded() {
        let mut lists = UnreadLists::default();
        let mut receivers = Vec::new();
        for _ in 0..MAX_UNREAD_LISTS {
            lists.check_room().expect("there is room");
            receivers.push(lists.add(queue_of(2).expect("they fit")).expect("it ends"));
        }
        let refused = lists.check_room().expect_err("too many are unread");
        assert_eq!(refused.kind, OpErrorKind::Exhausted);
        drop(receivers.pop());
        lists.check_room().expect("one was closed");
    }
}
