//! Messages with descriptors as packets on a Unix socket, for both ends.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest message that is sent in a packet; a larger one is sent in a memfd.
pub const MAX_PACKET_BYTES: usize = 64 << 10;

/// The content of a packet whose message is in the attached memfd.
const MEMFD_MARKER: &[u8] = b"@";
/// The largest message, in a packet or in a memfd.
const MAX_MESSAGE_BYTES: u64 = 16 << 20;
/// The space for the descriptors of a packet and the memfd of its message.
const CONTROL_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1));
/// The space for the memfd of a message and one descriptor. The kernel rounds it up, so one or two more may arrive; the
/// bound keeps the server from opening many descriptors in the launcher.
const SMALL_CONTROL_SPACE: usize = rustix::cmsg_space!(ScmRights(2));

/// The largest number of descriptors in one packet. The kernel allows 253, but all of them are open at once.
pub const MAX_DESCRIPTORS: usize = 64;

/// Sends a message and at most one descriptor, without waiting.
pub fn send_message(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send_with_descriptors(socket, message, descriptor.as_slice())
}

/// Sends a message and some descriptors, without waiting.
pub fn send_with_descriptors(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    let mut carried = Vec::new();
    let memfd = if json.len() > MAX_PACKET_BYTES { Some(write_to_memfd(&json)?) } else { None };
    if let Some(memfd) = &memfd {
        carried.push(memfd.as_fd());
    }
    carried.extend(descriptors);
    let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !carried.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&carried)) {
        return Err(io::Error::other("too many descriptors for one packet"));
    }
    let bytes = if memfd.is_some() { MEMFD_MARKER } else { &json };
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// Receives a message and its descriptor, if there is one; `None` when the connection is closed.
pub fn receive_message<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); SMALL_CONTROL_SPACE];
    let (received, _) = receive_packet(socket, &mut space)?;
    Ok(received.map(|(message, descriptors)| (message, descriptors.into_iter().next())))
}

/// Receives a message and its descriptors; `None` when the connection is closed. It is an error if the kernel
/// dropped descriptors because this process has too many open files.
pub fn receive_with_descriptors<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
    match receive_packet(socket, &mut space)? {
        (_, Truncation::Descriptors) => Err(io::Error::other("descriptors were lost: too many open files")),
        (received, Truncation::None) => Ok(received),
    }
}

/// Whether the kernel dropped descriptors of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Truncation {
    None,
    Descriptors,
}

/// A message with its descriptors; `None` when the connection is closed.
type ReceivedMessage<T> = Option<(T, Vec<OwnedFd>)>;

/// Receives one packet with as many descriptors as `space` holds. The kernel drops the others.
fn receive_packet<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    space: &mut [MaybeUninit<u8>],
) -> io::Result<(ReceivedMessage<T>, Truncation)> {
    let mut buffer = vec![0; MAX_PACKET_BYTES + 1];
    let mut control = RecvAncillaryBuffer::new(space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = {
        let mut slices = [IoSliceMut::new(&mut buffer)];
        rustix::net::recvmsg(socket, &mut slices, &mut control, flags)?
    };
    let truncated = received.flags.contains(ReturnFlags::CTRUNC);
    let truncation = if truncated { Truncation::Descriptors } else { Truncation::None };
    if received.bytes == 0 {
        return Ok((None, truncation));
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let mut descriptors = descriptors.into_iter();
    let json = match &buffer[..received.bytes] {
        MEMFD_MARKER => read_from_memfd(descriptors.next())?,
        bytes => bytes.to_vec(),
    };
    Ok((Some((serde_json::from_slice(&json)?, descriptors.collect())), truncation))
}

fn write_to_memfd(json: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create("message", MemfdFlags::CLOEXEC)?);
    file.write_all(json)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file.into())
}

fn read_from_memfd(memfd: Option<OwnedFd>) -> io::Result<Vec<u8>> {
    let memfd = memfd.ok_or_else(|| io::Error::other("a large message came without its memfd"))?;
    // Only a file in memory can be read without waiting; a pipe could block the launcher.
    if rustix::fs::fcntl_get_seals(&memfd).is_err() {
        return Err(io::Error::other("a large message came in a descriptor that is not a memfd"));
    }
    let mut json = Vec::new();
    File::from(memfd).take(MAX_MESSAGE_BYTES).read_to_end(&mut json)?;
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn one_request_opens_only_a_few_descriptors() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair of sockets");
        let many = [theirs.as_fd(); 20];
        send_with_descriptors(ours.as_fd(), &7, &many).expect("they fit into one packet");
        let mut space = [MaybeUninit::uninit(); SMALL_CONTROL_SPACE];
        let (received, truncation) =
            receive_packet::<u32>(theirs.as_fd(), &mut space).expect("a packet waits");
        let (message, descriptors) = received.expect("the connection is open");
        assert_eq!(message, 7);
        // The space is rounded up, so it takes one or two more.
        assert!((2..=4).contains(&descriptors.len()), "{}", descriptors.len());
        assert_eq!(truncation, Truncation::Descriptors);
        send_with_descriptors(ours.as_fd(), &8, &many).expect("they fit into one packet");
        let received = receive_with_descriptors::<u32>(theirs.as_fd()).expect("nothing was lost");
        assert_eq!(received.map(|(message, descriptors)| (message, descriptors.len())), Some((8, 20)));
    }

    #[test]
    fn small_and_large_messages_arrive_with_their_descriptor() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair");
        for size in [0, 10, MAX_PACKET_BYTES + 100, 3 << 20] {
            let text = "x".repeat(size);
            send_message(ours.as_fd(), &text, Some(ours.as_fd())).expect("sent");
            let (back, descriptor) =
                receive_message::<String>(theirs.as_fd()).expect("received").expect("a message");
            assert_eq!(back, text);
            assert!(descriptor.is_some());
        }
        drop(ours);
        assert!(receive_message::<String>(theirs.as_fd()).expect("an end").is_none());
    }

    #[test]
    fn many_descriptors_arrive_after_their_sender_is_gone() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair");
        let carried = vec![theirs.as_fd(); MAX_DESCRIPTORS];
        for part in 0..20 {
            send_with_descriptors(ours.as_fd(), &part, &carried).expect("sent");
        }
        let more = [carried.as_slice(), &carried].concat();
        assert!(send_with_descriptors(ours.as_fd(), &0, &more).is_err(), "more than a packet takes");
        drop(ours);
        for part in 0..20 {
            let (back, descriptors) =
                receive_with_descriptors::<i32>(theirs.as_fd()).expect("received").expect("a message");
            assert_eq!((back, descriptors.len()), (part, MAX_DESCRIPTORS));
        }
        assert!(receive_with_descriptors::<i32>(theirs.as_fd()).expect("an end").is_none());
    }

    #[test]
    fn pipe_instead_of_a_memfd_is_not_read() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair");
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let carried = [reader.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&carried)));
        rustix::net::sendmsg(&ours, &[IoSlice::new(MEMFD_MARKER)], &mut control, SendFlags::empty())
            .expect("sent");
        let error = receive_message::<String>(theirs.as_fd()).expect_err("a pipe could block for ever");
        assert!(error.to_string().contains("memfd"), "{error}");
    }
}
