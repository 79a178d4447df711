//! Frames: a length, a kind, and that many bytes.
//!
//! ```text
//! | payload length: u32 LE | kind: u8 | payload … |
//! Output payload: | stream: u8 | overall offset: u64 LE | bytes … |
//! ```

use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::unknown_variant;

/// The largest payload of a frame. Bulk data is cut into smaller pieces.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// The usual payload of a frame of bulk data that is collected before it is sent.
pub const CHUNK_SIZE: usize = 128 << 10;

const OUTPUT_HEADER_LENGTH: usize = 9;

/// One frame. Its bytes are a slice of the received buffer, not a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A JSON message.
    Control(Bytes),
    /// Raw bytes of a file, of input, or of a reply too large for one message.
    Data(Bytes),
    /// The raw bytes are complete.
    End,
    /// Output of a process; `offset` is the overall offset of the first byte.
    Output { stream: StreamTag, offset: u64, bytes: Bytes },
}

/// The fixed part of a frame before its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: FrameKind,
    /// The length of the payload; [`FrameHeader::parse`] accepts at most [`MAX_PAYLOAD`].
    pub length: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    Control = 0,
    Data = 1,
    End = 2,
    Output = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamTag {
    Stdout = 1,
    Stderr = 2,
    Terminal = 3,
    /// Events of a kernel about a run, one JSON object per line.
    KernelEvent = 4,
}

/// The peer does not follow the protocol.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("frame length {0} exceeds the maximum payload")]
    TooLong(usize),
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    #[error("malformed output frame")]
    MalformedOutput,
    #[error("failed to parse the message of a control frame")]
    Message(#[source] serde_json::Error),
    #[error("unexpected frame kind")]
    Unexpected,
}

impl StreamTag {
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Stdout),
            2 => Some(Self::Stderr),
            3 => Some(Self::Terminal),
            4 => Some(Self::KernelEvent),
            _ => None,
        }
    }
}

impl Frame {
    pub fn from_message(message: &impl Serialize) -> Self {
        Self::Control(serde_json::to_vec(message).expect("our messages have string keys only").into())
    }

    /// Parses the message of a control frame; any other frame is an error.
    pub fn parse_message<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        match self {
            Self::Control(json) => serde_json::from_slice(json).map_err(FrameError::Message),
            Self::Data(_) | Self::End | Self::Output { .. } => Err(FrameError::Unexpected),
        }
    }

    /// Whether the message of a control frame is no `T` because it names a variant that this version does not know.
    pub fn has_unknown_variant<T: DeserializeOwned>(&self) -> bool {
        match self {
            Self::Control(json) => unknown_variant::has_unknown_variant::<T>(json),
            Self::Data(_) | Self::End | Self::Output { .. } => false,
        }
    }

    /// Appends the encoded frame to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Control(bytes) => encode_parts(out, FrameKind::Control, &[bytes]),
            Self::Data(bytes) => encode_parts(out, FrameKind::Data, &[bytes]),
            Self::End => encode_parts(out, FrameKind::End, &[]),
            Self::Output { stream, offset, bytes } => encode_output(out, *stream, *offset, bytes),
        }
    }
}

impl FrameHeader {
    pub const LENGTH: usize = 5;

    /// Parses the header at the beginning of `bytes`; `None` until all of it has arrived.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, FrameError> {
        let Some((header, _)) = bytes.split_first_chunk::<{ Self::LENGTH }>() else { return Ok(None) };
        let [a, b, c, d, kind] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > MAX_PAYLOAD {
            return Err(FrameError::TooLong(length));
        }
        let kind = FrameKind::from_byte(kind).ok_or(FrameError::UnknownKind(kind))?;
        Ok(Some(Self { kind, length }))
    }

    pub fn to_bytes(self) -> [u8; Self::LENGTH] {
        let length = u32::try_from(self.length).expect("a sender keeps to MAX_PAYLOAD");
        let [a, b, c, d] = length.to_le_bytes();
        [a, b, c, d, self.kind as u8]
    }
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Control),
            1 => Some(Self::Data),
            2 => Some(Self::End),
            3 => Some(Self::Output),
            _ => None,
        }
    }
}

/// Appends a data frame without taking ownership of the bytes.
pub fn encode_data(out: &mut Vec<u8>, bytes: &[u8]) {
    encode_parts(out, FrameKind::Data, &[bytes]);
}

/// Appends an output frame without taking ownership of the bytes.
pub fn encode_output(out: &mut Vec<u8>, stream: StreamTag, offset: u64, bytes: &[u8]) {
    encode_parts(out, FrameKind::Output, &[&[stream as u8], &offset.to_le_bytes(), bytes]);
}

fn encode_parts(out: &mut Vec<u8>, kind: FrameKind, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.reserve(FrameHeader::LENGTH + length);
    out.extend_from_slice(&FrameHeader { kind, length }.to_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Splits received bytes into frames.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: BytesMut,
    /// How many bytes are missing from a data frame that [`FrameDecoder::next_piece`] has begun.
    data_left: usize,
}

impl FrameDecoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes from the connection.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The buffer to which bytes from the connection can be appended, with space for at least
    /// `room`.
    pub fn reserve_space(&mut self, room: usize) -> &mut BytesMut {
        self.buffer.reserve(room);
        &mut self.buffer
    }

    /// Returns the next complete frame, or `None` until more bytes are fed.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.data_left > 0 {
            return Ok(self.take_data(self.data_left).map(Frame::Data));
        }
        let Some(header) = FrameHeader::parse(&self.buffer)? else { return Ok(None) };
        if self.buffer.len() < FrameHeader::LENGTH + header.length {
            return Ok(None);
        }
        self.buffer.advance(FrameHeader::LENGTH);
        let payload = self.buffer.split_to(header.length).freeze();
        Ok(Some(match header.kind {
            FrameKind::Control => Frame::Control(payload),
            FrameKind::Data => Frame::Data(payload),
            FrameKind::End => Frame::End,
            FrameKind::Output => decode_output(payload)?,
        }))
    }

    /// Like [`FrameDecoder::next_frame`], but returns raw bytes as they arrive: a reader of raw bytes
    /// does not need the boundaries of data frames, and waiting for a frame's end costs a copy.
    pub fn next_piece(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.data_left == 0 {
            match FrameHeader::parse(&self.buffer)? {
                Some(FrameHeader { kind: FrameKind::Data, length: length @ 1.. }) => {
                    self.buffer.advance(FrameHeader::LENGTH);
                    self.data_left = length;
                }
                _ => return self.next_frame(),
            }
        }
        let length = self.data_left.min(self.buffer.len());
        Ok(if length == 0 { None } else { self.take_data(length).map(Frame::Data) })
    }

    /// The next bytes of a data frame that has begun.
    fn take_data(&mut self, length: usize) -> Option<Bytes> {
        if self.buffer.len() < length {
            return None;
        }
        self.data_left -= length;
        Some(self.buffer.split_to(length).freeze())
    }

    /// The bytes that were fed but not returned as frames: the first bytes of a tunnel.
    pub fn into_rest(self) -> Bytes {
        self.buffer.freeze()
    }
}

fn decode_output(mut payload: Bytes) -> Result<Frame, FrameError> {
    if payload.len() < OUTPUT_HEADER_LENGTH {
        return Err(FrameError::MalformedOutput);
    }
    let stream = StreamTag::from_byte(payload.get_u8()).ok_or(FrameError::MalformedOutput)?;
    let offset = payload.get_u64_le();
    Ok(Frame::Output { stream, offset, bytes: payload })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_frame() -> impl Strategy<Value = Frame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
        prop_oneof![
            bytes().prop_map(Frame::Control),
            bytes().prop_map(Frame::Data),
            Just(Frame::End),
            (1u8..=3, any::<u64>(), bytes()).prop_map(|(stream, offset, bytes)| Frame::Output {
                stream: StreamTag::from_byte(stream).expect("the range is the three tags"),
                offset,
                bytes
            }),
        ]
    }

    fn decode(
        bytes: &[u8],
        cut: usize,
        next: fn(&mut FrameDecoder) -> Result<Option<Frame>, FrameError>,
    ) -> (Vec<Frame>, Bytes) {
        let mut decoder = FrameDecoder::new();
        let mut seen = Vec::new();
        for piece in bytes.chunks(cut) {
            decoder.feed(piece);
            while let Some(frame) = next(&mut decoder).expect("these frames are well formed") {
                seen.push(frame);
            }
        }
        (seen, decoder.into_rest())
    }

    /// The frames with adjacent data frames merged.
    fn joined(frames: Vec<Frame>) -> Vec<Frame> {
        let mut all = Vec::new();
        for frame in frames {
            match (all.last_mut(), frame) {
                (Some(Frame::Data(before)), Frame::Data(more)) => {
                    *before = [before.as_ref(), more.as_ref()].concat().into();
                }
                (_, frame) => all.push(frame),
            }
        }
        all
    }

    proptest! {
        #[test]
        fn frames_survive_any_chunking(frames in proptest::collection::vec(any_frame(), 0..12), cut in 1usize..40) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut bytes));
            let (seen, rest) = decode(&bytes, cut, FrameDecoder::next_frame);
            prop_assert_eq!(seen, frames);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn pieces_add_up_to_the_frames(frames in proptest::collection::vec(any_frame(), 0..12), cut in 1usize..400) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut bytes));
            let (seen, rest) = decode(&bytes, cut, FrameDecoder::next_piece);
            prop_assert_eq!(joined(seen), joined(frames));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn garbage_never_panics_and_never_grows_the_buffer(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let mut decoder = FrameDecoder::new();
            decoder.feed(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
            prop_assert!(decoder.into_rest().len() <= bytes.len());
        }
    }

    #[test]
    fn oversized_frame_is_rejected_before_it_arrives() {
        let mut decoder = FrameDecoder::new();
        decoder.feed(&[0xff, 0xff, 0xff, 0x7f, 1]);
        assert!(matches!(decoder.next_frame(), Err(FrameError::TooLong(_))));
    }
}
