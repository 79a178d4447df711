//! The client's side of a WebSocket (RFC 6455): the streams of commands and terminals.
//!
//! ```text
//!   0: fin, opcode | 1: mask bit, length | 0, 2 or 8 bytes: longer length | 4 bytes: mask, to the server only | payload
//! ```
//! This is written by hand because `exec` is measured in fractions of a millisecond: the usual library clears a buffer of
//! 128 KiB before every read. Here a small buffer grows only with what arrives, and nothing is cleared.

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use sha1::{Digest, Sha1};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// What every server appends to the key of a handshake.
const HANDSHAKE_SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const CONTINUATION: u8 = 0x0;
const TEXT: u8 = 0x1;
const BINARY: u8 = 0x2;
const CLOSE: u8 = 0x8;
const PING: u8 = 0x9;
const PONG: u8 = 0xA;

const FIN_BIT: u8 = 0x80;
const RESERVED_BITS: u8 = 0x70;
const MASK_BIT: u8 = 0x80;
/// Lengths that say how many bytes the real length has.
const TWO_BYTE_LENGTH: u8 = 126;
const EIGHT_BYTE_LENGTH: u8 = 127;
/// The longest payload of a ping, a pong or a close.
const MAX_CONTROL_BYTES: usize = 125;
/// The longest message that is accepted.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The size of the first read, and how far it grows while reads fill the buffer.
const MIN_READ_BYTES: usize = 4 << 10;
const MAX_READ_BYTES: usize = 128 << 10;

/// A message of the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ServerMessage {
    Text(String),
    Binary(Bytes),
    /// The server ends the connection.
    Close,
}

/// An open WebSocket.
#[derive(Debug)]
pub(super) struct ClientWebSocket<S> {
    stream: S,
    received: BytesMut,
    /// How much the next read may bring.
    read_size: usize,
    /// The opcode and the first frames of a message that is sent in several.
    partial_message: Option<(u8, BytesMut)>,
    /// The payload of a ping that is not answered yet.
    ping: Option<BytesMut>,
    /// Frames that are not written yet.
    outgoing: BytesMut,
}

/// The head of a frame.
#[derive(Debug, PartialEq, Eq)]
struct FrameHead {
    is_final: bool,
    opcode: u8,
    /// Where the payload begins, and its length.
    head_length: usize,
    payload_length: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ClientWebSocket<S> {
    /// Takes over a stream after its handshake.
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            received: BytesMut::new(),
            read_size: MIN_READ_BYTES,
            partial_message: None,
            ping: None,
            outgoing: BytesMut::new(),
        }
    }

    /// Adds a text message to those that [`Self::write_queued`] sends.
    pub(super) fn queue_text(&mut self, text: &str) -> Result<()> {
        self.queue_frame(TEXT, text.as_bytes())
    }

    /// Adds a binary message to those that [`Self::write_queued`] sends.
    pub(super) fn queue_binary(&mut self, bytes: &[u8]) -> Result<()> {
        self.queue_frame(BINARY, bytes)
    }

    /// The next message. Dropping the future loses nothing.
    pub(super) async fn next_message(&mut self) -> Result<ServerMessage> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(message);
            }
            if let Some(payload) = self.ping.take() {
                self.queue_frame(PONG, &payload)?;
            }
            if !self.outgoing.is_empty() {
                self.write_queued().await?;
            }
            self.read_more().await?;
        }
    }

    /// Sends what is queued. Dropping the future loses nothing: the next call continues at the byte that was reached.
    pub(super) async fn write_queued(&mut self) -> Result<()> {
        self.stream.write_all_buf(&mut self.outgoing).await?;
        Ok(self.stream.flush().await?)
    }

    async fn read_more(&mut self) -> Result<()> {
        let awaited = FrameHead::parse(&self.received)?
            .map_or(0, |head| (head.head_length + head.payload_length).saturating_sub(self.received.len()));
        // A head alone does not make the server worth much memory.
        self.received.reserve(self.read_size.max(awaited.min(MAX_READ_BYTES)));
        let room = self.received.capacity() - self.received.len();
        let count = self.stream.read_buf(&mut self.received).await?;
        ensure!(count > 0, "the server closed the connection");
        if count == room {
            self.read_size = (self.read_size * 4).min(MAX_READ_BYTES);
        }
        Ok(())
    }

    /// Removes the first complete message from what was received. A ping is answered with the next write.
    fn take_message(&mut self) -> Result<Option<ServerMessage>> {
        while let Some(head) = FrameHead::parse(&self.received)? {
            if self.received.len() < head.head_length + head.payload_length {
                return Ok(None);
            }
            self.received.advance(head.head_length);
            let payload = self.received.split_to(head.payload_length);
            match head.opcode {
                // Only the newest ping is answered, as the standard allows: nothing is queued for each of thousands.
                PING => self.ping = Some(payload),
                PONG => {}
                CLOSE => return Ok(Some(ServerMessage::Close)),
                opcode => {
                    if let Some(message) = self.take_data_frame(opcode, head.is_final, payload)? {
                        return Ok(Some(message));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Adds a frame to its message, and returns the message with its last frame.
    fn take_data_frame(
        &mut self,
        opcode: u8,
        is_final: bool,
        payload: BytesMut,
    ) -> Result<Option<ServerMessage>> {
        let (opcode, content) = match (opcode, self.partial_message.take()) {
            (CONTINUATION, Some((opcode, mut content))) => {
                ensure!(
                    content.len() + payload.len() <= MAX_MESSAGE_BYTES,
                    "the server sent a message that is too long"
                );
                content.extend_from_slice(&payload);
                (opcode, content)
            }
            (TEXT | BINARY, None) => (opcode, payload),
            _ => bail!("the server sent a frame that does not continue its message"),
        };
        if !is_final {
            self.partial_message = Some((opcode, content));
            return Ok(None);
        }
        if opcode == BINARY {
            return Ok(Some(ServerMessage::Binary(content.freeze())));
        }
        let text = String::from_utf8(content.into()).ok();
        let text = text.context("the server sent a text that is not UTF-8")?;
        Ok(Some(ServerMessage::Text(text)))
    }

    /// Adds a frame to those that are written next. A mask that others cannot predict keeps proxies from mistaking the
    /// payload for requests.
    fn queue_frame(&mut self, opcode: u8, payload: &[u8]) -> Result<()> {
        let mut mask = [0; 4];
        rustix::rand::getrandom(&mut mask, rustix::rand::GetRandomFlags::empty())?;
        self.outgoing.reserve(payload.len() + 14);
        self.outgoing.put_u8(FIN_BIT | opcode);
        put_length(&mut self.outgoing, MASK_BIT, payload.len());
        self.outgoing.put_slice(&mask);
        let start = self.outgoing.len();
        self.outgoing.put_slice(payload);
        apply_mask(&mut self.outgoing[start..], mask);
        Ok(())
    }
}

impl FrameHead {
    /// Parses the beginning of a frame of the server; `None` if it is incomplete.
    fn parse(bytes: &[u8]) -> Result<Option<Self>> {
        let [first, second, rest @ ..] = bytes else { return Ok(None) };
        ensure!(first & RESERVED_BITS == 0 && second & MASK_BIT == 0, "the server sent an invalid frame");
        let (head_length, payload_length) = match *second {
            TWO_BYTE_LENGTH => match rest.first_chunk() {
                None => return Ok(None),
                Some(length) => (4, u64::from(u16::from_be_bytes(*length))),
            },
            EIGHT_BYTE_LENGTH => match rest.first_chunk() {
                None => return Ok(None),
                Some(length) => (10, u64::from_be_bytes(*length)),
            },
            length => (2, u64::from(length)),
        };
        let payload_length = usize::try_from(payload_length).unwrap_or(usize::MAX);
        ensure!(payload_length <= MAX_MESSAGE_BYTES, "the server sent a frame that is too long");
        let head = Self { is_final: first & FIN_BIT != 0, opcode: first & 0xF, head_length, payload_length };
        let is_valid = match head.opcode {
            CONTINUATION | TEXT | BINARY => true,
            CLOSE | PING | PONG => head.is_final && payload_length <= MAX_CONTROL_BYTES,
            _ => false,
        };
        ensure!(is_valid, "the server sent an invalid frame");
        Ok(Some(head))
    }
}

fn put_length(frame: &mut BytesMut, mask_bit: u8, length: usize) {
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short), _) if short < TWO_BYTE_LENGTH => frame.put_u8(mask_bit | short),
        (_, Ok(medium)) => {
            frame.put_u8(mask_bit | TWO_BYTE_LENGTH);
            frame.put_u16(medium);
        }
        _ => {
            frame.put_u8(mask_bit | EIGHT_BYTE_LENGTH);
            frame.put_u64(length as u64);
        }
    }
}

fn apply_mask(payload: &mut [u8], mask: [u8; 4]) {
    let [a, b, c, d] = mask;
    let wide = u64::from_ne_bytes([a, b, c, d, a, b, c, d]);
    let (words, rest) = payload.as_chunks_mut::<8>();
    for word in words {
        *word = (u64::from_ne_bytes(*word) ^ wide).to_ne_bytes();
    }
    for (byte, mask) in rest.iter_mut().zip(mask.iter().cycle()) {
        *byte ^= mask;
    }
}

/// The value with which a server shows that it has understood a handshake with this key.
pub(super) fn accept_value(key: &str) -> String {
    STANDARD.encode(Sha1::new().chain_update(key).chain_update(HANDSHAKE_SUFFIX).finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = BytesMut::new();
        frame.put_u8(first);
        put_length(&mut frame, 0, payload.len());
        frame.put_slice(payload);
        frame.into()
    }

    /// Sends bytes in pieces of this size, and returns the messages that arrive and what the client has sent.
    async fn receive(bytes: &[u8], piece: usize) -> (Vec<ServerMessage>, Result<()>, Vec<u8>) {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let mut socket = ClientWebSocket::new(near);
        let mut messages = Vec::new();
        let end = async {
            loop {
                match socket.next_message().await {
                    Ok(message) => messages.push(message),
                    Err(error) => break Err(error),
                }
            }
        };
        let send = async {
            for piece in bytes.chunks(piece) {
                far.write_all(piece).await.expect("the client reads");
            }
            far.shutdown().await.expect("the client is there");
        };
        let (ended, ()) = tokio::join!(end, send);
        drop(socket);
        let mut answers = Vec::new();
        far.read_to_end(&mut answers).await.expect("the client has ended");
        (messages, ended, answers)
    }

    #[tokio::test]
    async fn messages_arrive_however_they_are_divided() {
        let long = vec![7; 70_000];
        let bytes = [
            frame(FIN_BIT | TEXT, "é".as_bytes()),
            frame(FIN_BIT | BINARY, &[1; 200]),
            frame(BINARY, b"ab"),
            frame(FIN_BIT | PING, b"now"),
            frame(CONTINUATION, b""),
            frame(FIN_BIT | CONTINUATION, b"c"),
            frame(FIN_BIT | BINARY, &long),
            frame(FIN_BIT | CLOSE, &[3, 232]),
        ]
        .concat();
        for piece in [1, 2, 3, 1000, bytes.len()] {
            let (messages, ended, answers) = receive(&bytes, piece).await;
            let expected = [
                ServerMessage::Text("é".to_owned()),
                ServerMessage::Binary(vec![1; 200].into()),
                ServerMessage::Binary(Bytes::from_static(b"abc")),
                ServerMessage::Binary(long.clone().into()),
                ServerMessage::Close,
            ];
            assert_eq!(messages, expected, "in pieces of {piece}");
            assert_eq!(ended.expect_err("it has ended").to_string(), "the server closed the connection");
            let [first, second, a, b, c, d, rest @ ..] = &answers[..] else {
                panic!("no answer to the ping")
            };
            assert_eq!((*first, *second), (FIN_BIT | PONG, MASK_BIT | 3));
            let mut payload = rest.to_vec();
            apply_mask(&mut payload, [*a, *b, *c, *d]);
            assert_eq!(payload, b"now");
        }
    }

    #[tokio::test]
    async fn invalid_frames_end_the_connection() {
        let mut too_long = vec![FIN_BIT | BINARY, EIGHT_BYTE_LENGTH];
        too_long.extend((MAX_MESSAGE_BYTES as u64 + 1).to_be_bytes());
        for bytes in [
            vec![FIN_BIT | 0x40 | TEXT, 0],
            vec![FIN_BIT | TEXT, MASK_BIT, 0, 0, 0, 0],
            vec![FIN_BIT | 0x3, 0],
            vec![PING, 0],
            frame(FIN_BIT | PING, &[0; 126]),
            frame(FIN_BIT | CONTINUATION, b"a"),
            [frame(TEXT, b"a"), frame(FIN_BIT | TEXT, b"b")].concat(),
            frame(FIN_BIT | TEXT, &[0xFF]),
            too_long,
        ] {
            let (messages, ended, _) = receive(&bytes, bytes.len()).await;
            assert_eq!(messages, [], "{bytes:?}");
            let error = ended.expect_err("it is refused").to_string();
            assert!(error.starts_with("the server sent a"), "{bytes:?}: {error}");
        }
    }

    #[test]
    fn handshake_is_that_of_the_standard() {
        assert_eq!(accept_value("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }
}
