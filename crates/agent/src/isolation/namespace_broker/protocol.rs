//! The protocol between the agent and its namespace broker.
//!
//! One packet in each direction. The text of a request is in a memfd sent with the packet, whatever
//! its length, followed by the descriptors that the request refers to.

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
use wire::isolated_session::{EnvFilter, IsolatedSessionSpec};
use wire::process::{UserIdentity, WorkingDirectory};

use crate::context::CpuShare;

/// The maximum number of descriptors of one request, including the memfd.
const MAX_DESCRIPTORS: usize = 10;

/// The longest request.
const MAX_REQUEST_BYTES: usize = 16 << 20;

/// How often, and at most how long each time, the agent waits for an answer. A sandbox that is
/// frozen in between loses only one of these waits.
const MAX_REPLY_WAITS: usize = 40;
const REPLY_WAIT_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum BrokerRequest {
    /// Creates the namespaces of a session. Sent with the report pipe and the group.
    Make { session: String, spec: IsolatedSessionSpec, identity: UserIdentity, share: CpuShare },
    /// Starts a program in them. Sent with standard input, output and error, the report pipe, the
    /// group, and the private pipes of a shell.
    Start(Box<StartProgramRequest>),
    /// Performs a file operation there. Sent with the connection for the reply and, for an edit, the undo history.
    Work { session: String, request: FileRequest, rest: Vec<u8>, config: ConfigUpdate },
    /// Sends a signal to the process group of a program there, which Landlock forbids the agent
    /// itself.
    Signal { group: i32, signal: i32 },
    /// The namespaces are gone; their stored changes can be removed.
    Forget { session: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StartProgramRequest {
    pub(crate) session: String,
    pub(crate) identity: UserIdentity,
    pub(crate) directory: Option<WorkingDirectory>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) screen: EnvFilter,
    pub(crate) program: SessionProgram,
    pub(crate) share: CpuShare,
    pub(crate) terminal: bool,
    pub(crate) config: ConfigUpdate,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SessionProgram {
    /// A shell that reads what to run from a pipe.
    Shell,
    Text(String),
}

/// The parts of the agent's configuration that may have changed since the broker was forked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ConfigUpdate {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) env_file: Option<String>,
}

/// The result of a request: the pid of a process that it started, or an error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BrokerReply(pub(crate) Result<Option<Pid>, Errno>);

impl BrokerReply {
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

pub(crate) fn create_channel() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends a request and waits a short time for its answer. A broker that does not answer is not used
/// any more, because the event loop must not be blocked for long. A request that is too long is not
/// sent, and fails as it would in the broker.
pub(crate) fn send_request(
    channel: &OwnedFd,
    request: &BrokerRequest,
    with: &[BorrowedFd<'_>],
) -> io::Result<BrokerReply> {
    let text = serde_json::to_vec(request)?;
    if text.len() > MAX_REQUEST_BYTES {
        return Ok(BrokerReply(Err(Errno::MSGSIZE)));
    }
    let mut file = File::from(rustix::fs::memfd_create("request", MemfdFlags::CLOEXEC)?);
    file.write_all(&text)?;
    let all: Vec<BorrowedFd<'_>> = std::iter::once(file.as_fd()).chain(with.iter().copied()).collect();
    send_descriptors(channel, &all)?;
    let answered = || -> io::Result<bool> {
        let mut fds = [PollFd::new(channel, PollFlags::IN)];
        Ok(rustix::event::poll(&mut fds, Some(&REPLY_WAIT_TIMEOUT))? > 0)
    };
    for _ in 0..MAX_REPLY_WAITS {
        if answered()? {
            let mut bytes = [0; BrokerReply::LENGTH];
            return match rustix::net::recv(channel, &mut bytes, RecvFlags::empty())? {
                (BrokerReply::LENGTH, _) => Ok(BrokerReply::from_bytes(bytes)),
                _ => Err(io::Error::other("the namespace broker has exited")),
            };
        }
    }
    Err(io::Error::other("the namespace broker did not answer in time"))
}

/// Waits for the descriptors of the next request; `None` when the agent is gone.
pub(crate) fn receive_request(channel: &OwnedFd) -> io::Result<Option<Vec<OwnedFd>>> {
    receive_descriptors(channel, RecvFlags::empty())
}

/// Parses a request. If it is invalid, only that request fails.
pub(crate) fn parse_request(mut descriptors: Vec<OwnedFd>) -> io::Result<(BrokerRequest, Vec<OwnedFd>)> {
    if descriptors.is_empty() {
        return Err(io::Error::other("a request has no text descriptor"));
    }
    let mut file = File::from(descriptors.remove(0));
    // Only a file in memory can be read without blocking.
    rustix::fs::fcntl_get_seals(&file)?;
    file.rewind()?;
    let mut json = Vec::new();
    file.take(MAX_REQUEST_BYTES as u64).read_to_end(&mut json)?;
    Ok((serde_json::from_slice(&json)?, descriptors))
}

/// Sends descriptors without blocking.
pub(super) fn send_descriptors(channel: &OwnedFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one packet"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(channel, &[IoSlice::new(b"o")], &mut control, flags)?;
    Ok(())
}

/// Receives descriptors; `None` when the other end is closed.
pub(super) fn receive_descriptors(channel: &OwnedFd, flags: RecvFlags) -> io::Result<Option<Vec<OwnedFd>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
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

pub(crate) fn send_reply(channel: &OwnedFd, answer: BrokerReply) -> rustix::io::Result<()> {
    rustix::net::send(channel, &answer.to_bytes(), SendFlags::NOSIGNAL).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_carry_descriptors_and_get_answers() {
        let (ours, theirs) = create_channel().expect("a pair");
        let request = BrokerRequest::Forget { session: "s".repeat(3 << 20) };
        for expected in
            [BrokerReply(Ok(None)), BrokerReply(Ok(Pid::from_raw(7))), BrokerReply(Err(Errno::PERM))]
        {
            let ours = rustix::io::fcntl_dupfd_cloexec(&ours, 3).expect("a copy");
            let with = rustix::io::fcntl_dupfd_cloexec(&theirs, 3).expect("a copy");
            let request = serde_json::to_string(&request).expect("it is JSON");
            let asking = std::thread::spawn(move || {
                let request: BrokerRequest = serde_json::from_str(&request).expect("it is a request");
                send_request(&ours, &request, &[with.as_fd(), with.as_fd()])
            });
            let heard = receive_request(&theirs).expect("a request").expect("the channel is open");
            let (heard, descriptors) = parse_request(heard).expect("the request is valid");
            assert!(matches!(heard, BrokerRequest::Forget { session } if session.len() == 3 << 20));
            assert_eq!(descriptors.len(), 2);
            send_reply(&theirs, expected).expect("the channel is open");
            assert_eq!(asking.join().expect("it did not panic").expect("an answer"), expected);
        }
        drop(ours);
        assert!(receive_request(&theirs).expect("an end").is_none());
    }

    #[test]
    fn too_long_order_is_refused_and_the_next_is_read() {
        let (ours, theirs) = create_channel().expect("a pair");
        // Each of these characters takes six bytes of JSON.
        let long = BrokerRequest::Forget { session: "\u{1}".repeat(3 << 20) };
        assert_eq!(send_request(&ours, &long, &[]).expect("an answer"), BrokerReply(Err(Errno::MSGSIZE)));
        let rubbish = rustix::fs::memfd_create("request", MemfdFlags::CLOEXEC).expect("a file");
        rustix::io::write(&rubbish, b"{\"Forget\":").expect("it has room");
        send_descriptors(&ours, &[rubbish.as_fd()]).expect("the channel is open");
        let heard = receive_request(&theirs).expect("a request").expect("the channel is open");
        parse_request(heard).expect_err("the JSON is incomplete");
        drop(ours);
        assert!(receive_request(&theirs).expect("the long one was not sent").is_none());
    }
}
