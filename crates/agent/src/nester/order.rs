//! The protocol between the agent and its namespace broker.
//!
//! One packet in each direction. The text of an order is in a memfd sent with the packet, whatever
//! its length, followed by the descriptors that the order refers to.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use wire::files::FileRequest;
use wire::nest::{Nest, Screen};
use wire::process::{Directory, Identity};

/// The maximum number of descriptors of one order, including the memfd.
const MOST_DESCRIPTORS: usize = 10;

/// The longest order.
const LONGEST: usize = 16 << 20;

/// How often, and at most how long each time, the agent waits for an answer. A sandbox that is
/// frozen in between loses only one of these waits.
const LOOKS: usize = 40;
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Creates the namespaces of a session. Sent with the report pipe and the group.
    Make { session: String, nest: Nest, identity: Identity, share: usize },
    /// Starts a program in them. Sent with standard input, output and error, the report pipe, the
    /// group, and the private pipes of a shell.
    Start(Box<Begin>),
    /// Performs a file operation there. Sent with the connection for the reply.
    Work { session: String, request: FileRequest, rest: Vec<u8>, config: Given },
    /// Sends a signal to the process group of a program there, which Landlock forbids the agent
    /// itself.
    Signal { group: i32, signal: i32 },
    /// The namespaces are gone; their stored changes can be removed.
    Forget { session: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) session: String,
    pub(crate) identity: Identity,
    pub(crate) directory: Option<Directory>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) screen: Screen,
    pub(crate) program: Program,
    pub(crate) share: usize,
    pub(crate) terminal: bool,
    pub(crate) config: Given,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Program {
    /// A shell that obeys orders.
    Shell,
    Text(String),
}

/// The parts of the agent's configuration that may have changed since the broker was forked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Given {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) env_file: Option<String>,
}

/// The result of an order: the pid of a process that it started, or an error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer(pub(crate) Result<Option<Pid>, Errno>);

impl Answer {
    const LENGTH: usize = 8;

    fn to_bytes(self) -> [u8; Self::LENGTH] {
        let (pid, errno) = match self.0 {
            Ok(pid) => (pid.map_or(0, Pid::as_raw_pid), 0),
            Err(errno) => (0, errno.raw_os_error()),
        };
        let mut bytes = [0; Self::LENGTH];
        bytes[..4].copy_from_slice(&pid.to_le_bytes());
        bytes[4..].copy_from_slice(&errno.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        let number = |from: usize| {
            i32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]])
        };
        Self(match number(4) {
            0 => Ok(Pid::from_raw(number(0))),
            errno => Err(Errno::from_raw_os_error(errno)),
        })
    }
}

pub(crate) fn channel() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends an order and waits a short time for its answer. A broker that does not answer is not used
/// any more, because the event loop must not be blocked for long. An order that is too long is not
/// sent, and fails as it would in the broker.
pub(crate) fn ask(channel: &OwnedFd, order: &Order, with: &[BorrowedFd<'_>]) -> io::Result<Answer> {
    let text = serde_json::to_vec(order)?;
    if text.len() > LONGEST {
        return Ok(Answer(Err(Errno::MSGSIZE)));
    }
    let mut file = File::from(rustix::fs::memfd_create("order", MemfdFlags::CLOEXEC)?);
    file.write_all(&text)?;
    let all: Vec<BorrowedFd<'_>> = std::iter::once(file.as_fd()).chain(with.iter().copied()).collect();
    hand_over(channel, &all)?;
    let answered = || -> io::Result<bool> {
        let mut fds = [PollFd::new(channel, PollFlags::IN)];
        Ok(rustix::event::poll(&mut fds, Some(&LOOK))? > 0)
    };
    for _ in 0..LOOKS {
        if answered()? {
            let mut bytes = [0; Answer::LENGTH];
            return match rustix::net::recv(channel, &mut bytes, RecvFlags::empty())? {
                (Answer::LENGTH, _) => Ok(Answer::from_bytes(bytes)),
                _ => Err(io::Error::other("the namespace broker has exited")),
            };
        }
    }
    Err(io::Error::other("the namespace broker did not answer in time"))
}

/// Waits for the descriptors of the next order; `None` when the agent is gone.
pub(crate) fn next(channel: &OwnedFd) -> io::Result<Option<Vec<OwnedFd>>> {
    take_over(channel, RecvFlags::empty())
}

/// Parses an order. If it is invalid, only that order fails.
pub(crate) fn read(mut descriptors: Vec<OwnedFd>) -> io::Result<(Order, Vec<OwnedFd>)> {
    if descriptors.is_empty() {
        return Err(io::Error::other("an order has no text descriptor"));
    }
    let mut file = File::from(descriptors.remove(0));
    // Only a file in memory can be read without blocking.
    rustix::fs::fcntl_get_seals(&file)?;
    file.rewind()?;
    let mut json = Vec::new();
    file.take(LONGEST as u64).read_to_end(&mut json)?;
    Ok((serde_json::from_slice(&json)?, descriptors))
}

/// Sends descriptors without blocking.
pub(super) fn hand_over(channel: &OwnedFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one packet"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(channel, &[IoSlice::new(b"o")], &mut control, flags)?;
    Ok(())
}

/// Receives descriptors; `None` when the other end is closed.
pub(super) fn take_over(channel: &OwnedFd, flags: RecvFlags) -> io::Result<Option<Vec<OwnedFd>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut slices = [IoSliceMut::new(&mut byte)];
    let received = rustix::net::recvmsg(channel, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(Some(descriptors))
}

pub(crate) fn answer(channel: &OwnedFd, answer: Answer) -> rustix::io::Result<()> {
    rustix::net::send(channel, &answer.to_bytes(), SendFlags::NOSIGNAL).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_carry_descriptors_and_get_answers() {
        let (ours, theirs) = channel().expect("a pair");
        let order = Order::Forget { session: "s".repeat(3 << 20) };
        for expected in [Answer(Ok(None)), Answer(Ok(Pid::from_raw(7))), Answer(Err(Errno::PERM))] {
            let ours = rustix::io::fcntl_dupfd_cloexec(&ours, 3).expect("a copy");
            let with = rustix::io::fcntl_dupfd_cloexec(&theirs, 3).expect("a copy");
            let order = serde_json::to_string(&order).expect("it is JSON");
            let asking = std::thread::spawn(move || {
                let order: Order = serde_json::from_str(&order).expect("it is an order");
                ask(&ours, &order, &[with.as_fd(), with.as_fd()])
            });
            let heard = next(&theirs).expect("an order").expect("the channel is open");
            let (heard, descriptors) = read(heard).expect("the order is valid");
            assert!(matches!(heard, Order::Forget { session } if session.len() == 3 << 20));
            assert_eq!(descriptors.len(), 2);
            answer(&theirs, expected).expect("the channel is open");
            assert_eq!(asking.join().expect("it did not panic").expect("an answer"), expected);
        }
        drop(ours);
        assert!(next(&theirs).expect("an end").is_none());
    }

    #[test]
    fn too_long_order_is_refused_and_the_next_is_read() {
        let (ours, theirs) = channel().expect("a pair");
        // Each of these characters takes six bytes of JSON.
        let long = Order::Forget { session: "\u{1}".repeat(3 << 20) };
        assert_eq!(ask(&ours, &long, &[]).expect("an answer"), Answer(Err(Errno::MSGSIZE)));
        let rubbish = rustix::fs::memfd_create("order", MemfdFlags::CLOEXEC).expect("a file");
        rustix::io::write(&rubbish, b"{\"Forget\":").expect("it has room");
        hand_over(&ours, &[rubbish.as_fd()]).expect("the channel is open");
        let heard = next(&theirs).expect("an order").expect("the channel is open");
        read(heard).expect_err("the JSON is incomplete");
        drop(ours);
        assert!(next(&theirs).expect("the long one was not sent").is_none());
    }
}
