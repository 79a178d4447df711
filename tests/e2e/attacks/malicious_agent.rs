//! An agent that sends false messages.
//!
//! It replaces a subverted agent, finds the socket on which that agent listened, and answers every
//! connection with the same false message, for as long as the server listens to it.

use std::io;
use std::time::Duration;

use crate::call::{call, constant, pointer, pointer_mut};
use crate::verdict::Attempt;

const CONTROL: u8 = 0;
const DATA: u8 = 1;
const OUTPUT: u8 = 3;

/// The message sent on each connection, and whether it is repeated.
struct FalseMessage {
    first: Vec<u8>,
    repeated: Option<Vec<u8>>,
    afterwards: AfterMessage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterMessage {
    HangUp,
    /// The connection stays open and silent.
    Silence,
}

/// Sends false messages to every server that connects, until this process is ended.
pub(crate) fn send_false_messages(kind: &str) -> Attempt {
    let lie = false_message_of(kind)?;
    let listener = find_listener().ok_or("no descriptor is a listening socket")?;
    // The agent polls before it accepts; this program blocks instead.
    call(libc::SYS_fcntl, &[listener, constant(libc::F_SETFL), 0]).map_err(|error| error.to_string())?;
    loop {
        match call(libc::SYS_accept4, &[listener, 0, 0, 0]) {
            Ok(connection) => send_message(connection, &lie),
            // Settings of the replaced agent disappear soon.
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn send_message(connection: u64, lie: &FalseMessage) {
    let reported = write_all(connection, &lie.first).and_then(|()| {
        let Some(repeated) = &lie.repeated else { return Ok(()) };
        loop {
            write_all(connection, repeated)?;
        }
    });
    // A server that has read enough closes the connection; this is the normal end.
    if reported.is_err() || lie.afterwards == AfterMessage::HangUp {
        call(libc::SYS_close, &[connection]).ok();
    }
}

fn false_message_of(kind: &str) -> Result<FalseMessage, String> {
    use AfterMessage::{HangUp, Silence};
    let greeting = frame(CONTROL, br#"{"version":1}"#);
    let greeted = |rest: &[u8]| [greeting.as_slice(), rest].concat();
    let started = frame(CONTROL, br#"{"started":{"pid":7}}"#);
    let (first, repeated, afterwards) = match kind {
        "hang-up" => (Vec::new(), None, HangUp),
        "silence" => (Vec::new(), None, Silence),
        "half-a-frame" => (greeted(&[200, 0, 0, 0, CONTROL, b'{']), None, Silence),
        "a-length-of-4-gib" => (greeted(&[0xff, 0xff, 0xff, 0xff, DATA]), Some(vec![b'x'; 1 << 16]), HangUp),
        "an-unknown-kind" => (greeted(&frame(77, b"?")), None, Silence),
        "a-message-of-the-wrong-type" => {
            (greeted(&frame(CONTROL, br#"{"started":{"pid":"seven"}}"#)), None, Silence)
        }
        "bytes-that-are-no-frames" => (Vec::new(), Some((0..=255).rev().collect()), HangUp),
        "a-later-version" => (frame(CONTROL, br#"{"version":4294967295}"#), None, Silence),
        "endless-messages" => (greeting, Some(frame(CONTROL, br#"{"replaced":[7]}"#)), HangUp),
        "an-endless-answer" => (greeting, Some(frame(DATA, &vec![b'['; 1 << 20])), HangUp),
        "output-at-forged-offsets" => {
            let far = [&[1][..], &u64::MAX.to_le_bytes(), b"forged"].concat();
            (greeted(&[started, frame(OUTPUT, &far)].concat()), None, Silence)
        }
        _ => return Err(format!("no such lie: {kind}")),
    };
    Ok(FalseMessage { first, repeated, afterwards })
}

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("our own payloads are short");
    [&length.to_le_bytes()[..], &[kind], payload].concat()
}

/// The descriptor on which the replaced agent listened.
fn find_listener() -> Option<u64> {
    (0..1024).find(|descriptor| {
        let (mut listens, mut length) = (0_i32, 4_u32);
        let name = [constant(libc::SOL_SOCKET), constant(libc::SO_ACCEPTCONN)];
        let asked = [*descriptor, name[0], name[1], pointer_mut(&mut listens), pointer_mut(&mut length)];
        call(libc::SYS_getsockopt, &asked).is_ok() && listens == 1
    })
}

fn write_all(descriptor: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = call(libc::SYS_write, &[descriptor, pointer(bytes), bytes.len() as u64])?;
        bytes = &bytes[usize::try_from(written).map_err(io::Error::other)?..];
    }
    Ok(())
}
