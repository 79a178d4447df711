//! Frames: a length, a kind, and that many bytes.
//!
//! ```text
//! | payload length: u32 LE | kind: u8 | payload … |
//! Output payload: | stream: u8 | overall offset: u64 LE | bytes … |
//! ```

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest payload anybody may send. Bulk data is cut into pieces below it.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// How much bulk data one frame usually carries.
pub const CHUNK: usize = 128 << 10;

const HEADER: usize = 5;
const OUTPUT_HEADER: usize = 9;

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A JSON message.
    Control(Vec<u8>),
    /// Raw bytes of a file, of input, or of an answer too large for one message.
    Data(Vec<u8>),
    /// The raw bytes are complete.
    End,
    /// What a process printed; `offset` is the overall offset of the first byte.
    Output { stream: StreamTag, offset: u64, bytes: Vec<u8> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamTag {
    Stdout = 1,
    Stderr = 2,
    Terminal = 3,
}

/// The other side does not speak this protocol.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("a frame claims {0} bytes, more than any frame may have")]
    TooLong(usize),
    #[error("a frame is of the unknown kind {0}")]
    UnknownKind(u8),
    #[error("an output frame is malformed")]
    MalformedOutput,
    #[error("a message is not what was expected here")]
    Message(#[source] serde_json::Error),
    #[error("a frame of this kind does not belong here")]
    Unexpected,
}

impl StreamTag {
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Stdout),
            2 => Some(Self::Stderr),
            3 => Some(Self::Terminal),
            _ => None,
        }
    }
}

impl Frame {
    pub fn message(message: &impl Serialize) -> Self {
        Self::Control(serde_json::to_vec(message).expect("our messages have string keys only"))
    }

    /// Reads the message of a control frame; anything else does not belong there.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        match self {
            Self::Control(json) => serde_json::from_slice(json).map_err(FrameError::Message),
            Self::Data(_) | Self::End | Self::Output { .. } => Err(FrameError::Unexpected),
        }
    }

    /// Appends the encoded frame to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Control(bytes) => encode_parts(out, 0, &[bytes]),
            Self::Data(bytes) => encode_parts(out, 1, &[bytes]),
            Self::End => encode_parts(out, 2, &[]),
            Self::Output { stream, offset, bytes } => encode_output(out, *stream, *offset, bytes),
        }
    }
}

/// Appends a data frame without taking ownership of the bytes.
pub fn encode_data(out: &mut Vec<u8>, bytes: &[u8]) {
    encode_parts(out, 1, &[bytes]);
}

/// Appends an output frame without taking ownership of the bytes.
pub fn encode_output(out: &mut Vec<u8>, stream: StreamTag, offset: u64, bytes: &[u8]) {
    encode_parts(out, 3, &[&[stream as u8], &offset.to_le_bytes(), bytes]);
}

fn encode_parts(out: &mut Vec<u8>, kind: u8, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let length = u32::try_from(length).expect("a sender keeps to MAX_PAYLOAD");
    out.reserve(HEADER + length as usize);
    out.extend_from_slice(&length.to_le_bytes());
    out.push(kind);
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Turns bytes, as they arrive, into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in bytes from the connection.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.start > 0 && self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        } else if self.start > MAX_PAYLOAD {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Gives the next complete frame, or `None` until more bytes are fed.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let pending = &self.buffer[self.start..];
        let Some((header, rest)) = pending.split_at_checked(HEADER) else { return Ok(None) };
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        if length > MAX_PAYLOAD {
            return Err(FrameError::TooLong(length));
        }
        let kind = header[4];
        if kind > 3 {
            return Err(FrameError::UnknownKind(kind));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let frame = match kind {
            0 => Frame::Control(payload.to_vec()),
            1 => Frame::Data(payload.to_vec()),
            2 => Frame::End,
            _ => decode_output(payload)?,
        };
        self.start += HEADER + length;
        Ok(Some(frame))
    }

    /// What was fed but is not part of a frame that was taken: the first bytes of a tunnel.
    pub fn into_rest(mut self) -> Vec<u8> {
        self.buffer.split_off(self.start)
    }
}

fn decode_output(payload: &[u8]) -> Result<Frame, FrameError> {
    let (header, bytes) = payload.split_at_checked(OUTPUT_HEADER).ok_or(FrameError::MalformedOutput)?;
    let stream = StreamTag::from_byte(header[0]).ok_or(FrameError::MalformedOutput)?;
    let offset = header[1..].try_into().map(u64::from_le_bytes).expect("the header has eight more bytes");
    Ok(Frame::Output { stream, offset, bytes: bytes.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_frame() -> impl Strategy<Value = Frame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..300);
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

    proptest! {
        #[test]
        fn frames_survive_any_cutting(frames in proptest::collection::vec(any_frame(), 0..12), cut in 1usize..40) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut bytes));
            let mut decoder = Decoder::new();
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next_frame().expect("these frames are well formed") {
                    seen.push(frame);
                }
            }
            prop_assert_eq!(seen, frames);
            prop_assert!(decoder.into_rest().is_empty());
        }

        #[test]
        fn garbage_never_panics_and_never_grows_the_buffer(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let mut decoder = Decoder::new();
            decoder.feed(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
            prop_assert!(decoder.into_rest().len() <= bytes.len());
        }
    }

    #[test]
    fn a_frame_that_claims_too_much_is_refused_before_it_arrives() {
        let mut decoder = Decoder::new();
        decoder.feed(&[0xff, 0xff, 0xff, 0x7f, 1]);
        assert!(matches!(decoder.next_frame(), Err(FrameError::TooLong(_))));
    }
}
