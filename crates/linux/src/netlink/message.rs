//! One netlink message: encoding and decoding.
//!
//! ```text
//! length u32 │ type u16 │ flags u16 │ sequence u32 │ port u32 │ body │ attributes …
//! an attribute: length u16 │ type u16 │ value, padded to 4 bytes; the value may be attributes
//! ```

use std::io;

const HEADER_BYTES: usize = 16;
const NESTED_FLAG: u16 = 1 << 15;

/// A message under construction.
#[derive(Clone, Debug)]
pub(super) struct NetlinkMessage {
    bytes: Vec<u8>,
    flags: u16,
}

impl NetlinkMessage {
    /// Starts a message with its fixed part.
    pub(super) fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(fixed);
        let mut message = Self { bytes, flags };
        message.pad();
        message
    }

    pub(super) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).expect("messages are short");
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// A NUL-terminated string.
    pub(super) fn text(self, kind: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// A number in host byte order.
    pub(super) fn native_endian(self, kind: u16, number: u32) -> Self {
        self.attribute(kind, &number.to_ne_bytes())
    }

    /// A number in network byte order, as the packet filter uses.
    pub(super) fn big_endian(self, kind: u16, number: u32) -> Self {
        self.attribute(kind, &number.to_be_bytes())
    }

    /// An attribute that contains attributes.
    pub(super) fn nested(mut self, kind: u16, write: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NESTED_FLAG).to_ne_bytes());
        let mut done = write(self);
        let length = u16::try_from(done.bytes.len() - start).expect("messages are short");
        done.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        done
    }

    /// Adds a further fixed part, within an attribute.
    pub(super) fn append_fixed(mut self, fixed: &[u8]) -> Self {
        self.bytes.extend_from_slice(fixed);
        self.pad();
        self
    }

    pub(super) fn finish(mut self, flags: u16, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).expect("messages are short");
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[6..8].copy_from_slice(&(flags | self.flags).to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// A received message.
pub(super) struct ReceivedMessage<'a> {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    pub(super) body: &'a [u8],
}

impl ReceivedMessage<'_> {
    /// The result in an acknowledgement: an error number, or zero.
    pub(super) fn outcome(&self) -> io::Result<()> {
        match read_u32(self.body, 0).map(u32::cast_signed) {
            Some(0) => Ok(()),
            Some(number) => Err(io::Error::from_raw_os_error(number.saturating_neg())),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Iterates over the messages in a packet.
pub(super) fn parse_messages(mut packet: &[u8]) -> impl Iterator<Item = ReceivedMessage<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(read_u32(packet, 0)?).ok()?;
        let body = packet.get(HEADER_BYTES..length)?;
        let received = ReceivedMessage {
            kind: read_u16(packet, 4)?,
            flags: read_u16(packet, 6)?,
            sequence: read_u32(packet, 8)?,
            body,
        };
        packet = packet.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(received)
    })
}

/// Iterates over the attributes behind a fixed part of this length.
pub(super) fn parse_attributes(body: &[u8], fixed: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = body.get(fixed.next_multiple_of(4)..).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = usize::from(read_u16(rest, 0)?);
        let value = rest.get(4..length)?;
        let kind = read_u16(rest, 2)? & !NESTED_FLAG;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

pub(super) fn read_u16(bytes: &[u8], place: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(place..place + 2)?.try_into().ok()?))
}

pub(super) fn read_u32(bytes: &[u8], place: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(place..place + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_message_decodes_again() {
        let message = NetlinkMessage::new(7, 0, &[1, 2, 3, 4])
            .text(3, "eth0")
            .nested(5, |inner| inner.native_endian(1, 9).attribute(2, &[8]))
            .finish(1, 42);
        let received: Vec<ReceivedMessage<'_>> = parse_messages(&message).collect();
        let [only] = received.as_slice() else { panic!("one message") };
        assert_eq!((only.kind, only.flags, only.sequence), (7, 1, 42));
        let found: Vec<(u16, &[u8])> = parse_attributes(only.body, 4).collect();
        assert_eq!(found[0], (3, &b"eth0\0"[..]));
        let inner: Vec<(u16, &[u8])> = parse_attributes(found[1].1, 0).collect();
        assert_eq!(inner, [(1, &9u32.to_ne_bytes()[..]), (2, &[8][..])]);
    }

    #[test]
    fn truncated_packet_yields_no_message() {
        let message = NetlinkMessage::new(7, 0, &[]).text(3, "eth0").finish(1, 42);
        assert_eq!(parse_messages(&message[..message.len() - 5]).count(), 0);
        assert_eq!(parse_messages(&[0; 16]).count(), 0);
        assert_eq!(parse_attributes(&[3, 0, 1, 0], 0).count(), 0);
    }
}
