//! The messages between the process that fetches an image and the process that wants it.
//!
//! ```text
//! receiver ── PullRequest ─────────────► puller
//!          ◄─ Blob, data, data, … ─────    documents and layers, interleaved
//!          ◄─ Layers ──────────────────    once, before the layers
//!          ◄─ Done or Failed ──────────
//! ```
//!
//! A frame is a kind, a length of 32 bits, and the content. The receiver trusts nothing that it reads.

use std::collections::BTreeSet;
use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The largest piece of a blob in one frame.
pub(crate) const MAX_PIECE_BYTES: usize = 256 << 10;
/// The largest message; a request lists the layers that are stored already.
const MAX_MESSAGE_BYTES: u32 = 16 << 20;

const MESSAGE_FRAME: u8 = 1;
const DATA_FRAME: u8 = 2;

/// What to fetch. It is the only thing that a puller gets.
#[derive(Serialize, Deserialize)]
pub(crate) struct PullRequest {
    pub(crate) name: String,
    pub(crate) credentials: Option<PullCredentials>,
    /// Registries that are contacted without TLS.
    pub(crate) plain: Vec<String>,
    /// The digests of the uncompressed layers that are already stored.
    pub(crate) stored_layers: BTreeSet<String>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct PullCredentials {
    pub(crate) username: String,
    pub(crate) password: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PullMessage {
    /// A blob begins; its data follows in frames with the same index.
    Blob {
        index: u32,
        digest: String,
        size: u64,
    },
    /// The size of all layers that will be sent.
    Layers {
        bytes: u64,
    },
    /// Everything was sent; the digest is that of the manifest.
    Done {
        digest: String,
    },
    Failed {
        message: String,
        hint: Option<String>,
    },
}

/// One frame as the receiver sees it.
#[derive(Debug)]
pub(crate) enum ReceivedFrame {
    Message(PullMessage),
    Data { index: u32, piece: Vec<u8> },
}

pub(crate) async fn write_message(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    stream.write_all(&frame_head(MESSAGE_FRAME, text.len())?).await?;
    stream.write_all(&text).await
}

pub(crate) async fn write_data(
    stream: &mut (impl AsyncWrite + Unpin),
    index: u32,
    piece: &[u8],
) -> io::Result<()> {
    let mut head = frame_head(DATA_FRAME, piece.len() + 4)?.to_vec();
    head.extend_from_slice(&index.to_be_bytes());
    stream.write_all(&head).await?;
    stream.write_all(piece).await
}

fn frame_head(kind: u8, length: usize) -> io::Result<[u8; 5]> {
    let [a, b, c, d] = u32::try_from(length).map_err(io::Error::other)?.to_be_bytes();
    Ok([kind, a, b, c, d])
}

/// Reads the next frame, of a bounded length.
pub(crate) async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<ReceivedFrame> {
    let (kind, length) = read_head(stream).await?;
    match kind {
        MESSAGE_FRAME => Ok(ReceivedFrame::Message(read_text(stream, length).await?)),
        DATA_FRAME => {
            let length = usize::try_from(length).map_err(io::Error::other)?;
            if !(4..=MAX_PIECE_BYTES + 4).contains(&length) {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            let index = stream.read_u32().await?;
            let mut piece = vec![0; length - 4];
            stream.read_exact(&mut piece).await?;
            Ok(ReceivedFrame::Data { index, piece })
        }
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}

/// Reads a frame that must be a message.
pub(crate) async fn read_message<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<T> {
    match read_head(stream).await? {
        (MESSAGE_FRAME, length) => read_text(stream, length).await,
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}

async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(u8, u32)> {
    Ok((stream.read_u8().await?, stream.read_u32().await?))
}

async fn read_text<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin), length: u32) -> io::Result<T> {
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    }
    let mut text = Vec::new();
    stream.take(length.into()).read_to_end(&mut text).await?;
    serde_json::from_slice(&text).map_err(Into::into)
}
