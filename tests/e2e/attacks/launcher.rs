//! The launcher's socket. It is for the server only, and the launcher does not trust the server either.

use std::fs;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::verdict::{Attempt, Verdict, decide, refusal};

const LIST: &str = r#"{"version":1,"number":1,"question":"list"}"#;

/// How long the launcher may take; a create is the longest.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// Sends the launcher a request: `list`, or the contents of a file. It succeeds if the request is granted.
pub(crate) fn ask_launcher(socket: &str, question: &str) -> Attempt {
    let question = match question {
        "list" => LIST.to_owned(),
        file => fs::read_to_string(file).map_err(|error| format!("read {file}: {error}"))?,
    };
    let connection = match connect(socket) {
        Ok(connection) => connection,
        Err(error) => return Ok(Verdict::Stopped(refusal("connect", &error))),
    };
    rustix::net::send(&connection, question.as_bytes(), SendFlags::NOSIGNAL)
        .map_err(|error| format!("send: {error}"))?;
    match receive_reply(&connection) {
        Ok(answer) if answer.is_empty() => Ok(Verdict::Stopped("ask: it hung up".to_owned())),
        Ok(answer) if answer.contains(r#""Err":"#) => Ok(Verdict::Stopped(format!("ask: {answer}"))),
        Ok(answer) => Ok(Verdict::Succeeded(answer)),
        Err(error) => Err(format!("no answer: {error}")),
    }
}

/// Passes a pipe where a file with a long message is expected, and never writes to it. It succeeds if the
/// launcher then stops answering other clients.
pub(crate) fn send_stalled_pipe(socket: &str) -> Attempt {
    let broken = |error: io::Error| error.to_string();
    let (reader, _writer) = rustix::pipe::pipe().map_err(|error| error.to_string())?;
    let plugged = connect(socket).map_err(broken)?;
    let carried = [reader.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&carried));
    rustix::net::sendmsg(&plugged, &[IoSlice::new(b"@")], &mut control, SendFlags::NOSIGNAL)
        .map_err(|error| format!("sendmsg: {error}"))?;
    let other = connect(socket).map_err(broken)?;
    rustix::net::send(&other, LIST.as_bytes(), SendFlags::NOSIGNAL).map_err(|error| error.to_string())?;
    match decide("hear", receive_reply(&other))? {
        Verdict::Succeeded(_) => Ok(Verdict::Stopped("plug: others are answered".to_owned())),
        Verdict::Stopped(silence) => Ok(Verdict::Succeeded(silence)),
    }
}

fn connect(path: &str) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(REPLY_TIMEOUT))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn receive_reply(socket: &OwnedFd) -> io::Result<String> {
    let mut buffer = vec![0_u8; 1 << 16];
    let (length, _) = rustix::net::recv(socket, &mut buffer, RecvFlags::empty())?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
