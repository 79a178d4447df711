//! Relays bytes both ways after an upgrade, until one side ends.
//!
//! WebSocket frames are delimited but not interpreted: text, binary, pings and extensions of any size
//! pass unchanged. Only close frames are inspected. A code that no endpoint may send is replaced, and
//! a client whose service vanished gets a close frame (1011) instead of a broken connection.

use std::io;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, header};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional, split};
use tokio::time::timeout;

/// How long one side may take to end after the other.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_READ_BYTES: usize = 64 << 10;
const CLOSE_OPCODE: u8 = 8;
const FINAL_BIT: u8 = 0x80;
const MASK_BIT: u8 = 0x80;
/// The maximum payload of a control frame.
const MAX_CONTROL_PAYLOAD: u64 = 125;

/// Close code: the service failed.
const CLOSE_CODE_FAILED: u16 = 1011;
/// Close code: protocol error.
const CLOSE_CODE_PROTOCOL_ERROR: u16 = 1002;
/// "No code was present", a value that APIs report but no frame may contain.
const CLOSE_CODE_ABSENT: u16 = 1005;

/// Completes the upgrade, then relays bytes both ways.
pub(super) fn relay_upgrade(client: OnUpgrade, mut response: Response, protocol: HeaderValue) -> Response {
    let service = hyper::upgrade::on(&mut response);
    let is_websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    tokio::spawn(async move {
        let joined = async {
            let (client, service) = tokio::try_join!(client, service).map_err(io::Error::other)?;
            let (client, service) = (TokioIo::new(client), TokioIo::new(service));
            if is_websocket {
                relay_websocket(client, service).await
            } else {
                copy_both_ways(client, service).await
            }
        };
        if let Err(error) = joined.await {
            tracing::debug!(%error, "upgraded connection failed");
        }
    });
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, protocol);
    response.map(|_| Body::empty())
}

async fn copy_both_ways(mut client: TokioIo<Upgraded>, mut service: TokioIo<Upgraded>) -> io::Result<()> {
    copy_bidirectional(&mut client, &mut service).await.map(|_| ())
}

/// Relays a WebSocket until both sides have closed it, or shortly after one has.
async fn relay_websocket(
    client: impl AsyncRead + AsyncWrite,
    service: impl AsyncRead + AsyncWrite,
) -> io::Result<()> {
    let (mut client_reads, mut client_writes) = split(client);
    let (mut service_reads, mut service_writes) = split(service);
    let mut inward =
        std::pin::pin!(relay_frames(&mut client_reads, &mut service_writes, FrameSender::Client));
    let mut outward =
        std::pin::pin!(relay_frames(&mut service_reads, &mut client_writes, FrameSender::Service));
    let parted = tokio::select! {
        ended = &mut inward => { ended?; timeout(CLOSE_TIMEOUT, outward).await }
        ended = &mut outward => { ended?; timeout(CLOSE_TIMEOUT, inward).await }
    };
    parted.unwrap_or(Ok(()))
}

/// The sender of the frames of one direction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FrameSender {
    Client,
    Service,
}

/// Passes frames on until a close frame, then shuts down the direction.
async fn relay_frames(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    sender: FrameSender,
) -> io::Result<()> {
    let mut frames = FrameScanner::default();
    let mut buffer = Vec::with_capacity(MAX_READ_BYTES);
    loop {
        let seen = frames.scan(&buffer);
        to.write_all(&buffer[..seen.pass]).await?;
        buffer.drain(..seen.pass);
        match seen.then {
            ScanStop::More => {}
            ScanStop::Close(length) => {
                to.write_all(&valid_close_frame(&buffer[..length], sender)).await?;
                break;
            }
            ScanStop::Wrong => {
                to.write_all(&build_close_frame(sender, Some(sender.error_close_code()))).await?;
                break;
            }
        }
        let read = from.take(MAX_READ_BYTES as u64).read_buf(&mut buffer).await;
        if matches!(read, Ok(0) | Err(_)) {
            if sender == FrameSender::Service && frames.left == 0 && buffer.is_empty() {
                to.write_all(&build_close_frame(sender, Some(CLOSE_CODE_FAILED))).await?;
            }
            break;
        }
    }
    to.shutdown().await
}

impl FrameSender {
    /// The close code for malformed frames from this sender.
    fn error_close_code(self) -> u16 {
        match self {
            Self::Client => CLOSE_CODE_PROTOCOL_ERROR,
            Self::Service => CLOSE_CODE_FAILED,
        }
    }
}

/// Tracks frame boundaries.
#[derive(Default)]
struct FrameScanner {
    /// Remaining bytes of the current frame.
    left: u64,
}

/// The result of scanning a buffer.
#[derive(Debug, PartialEq, Eq)]
struct ScanResult {
    /// How many bytes may pass.
    pass: usize,
    then: ScanStop,
}

#[derive(Debug, PartialEq, Eq)]
enum ScanStop {
    /// The rest is an incomplete frame.
    More,
    /// A complete close frame of this length.
    Close(usize),
    Wrong,
}

impl FrameScanner {
    /// Scans a buffer; the bytes before [`ScanResult::pass`] are then consumed.
    fn scan(&mut self, buffer: &[u8]) -> ScanResult {
        let mut at = 0;
        loop {
            let rest = &buffer[at..];
            let skipped = usize::try_from(self.left).unwrap_or(usize::MAX).min(rest.len());
            self.left -= skipped as u64;
            at += skipped;
            let seen = |then| ScanResult { pass: at, then };
            if self.left > 0 {
                return seen(ScanStop::More);
            }
            let Some(head) = FrameHead::parse(&buffer[at..]) else { return seen(ScanStop::More) };
            if head.payload > i64::MAX.unsigned_abs() {
                return seen(ScanStop::Wrong);
            }
            if head.opcode != CLOSE_OPCODE {
                at += head.length;
                self.left = head.payload;
                continue;
            }
            let whole = head.length + usize::try_from(head.payload).unwrap_or(usize::MAX).min(MAX_READ_BYTES);
            return seen(match (head.payload <= MAX_CONTROL_PAYLOAD, buffer.len() - at >= whole) {
                (false, _) => ScanStop::Wrong,
                (true, false) => ScanStop::More,
                (true, true) => ScanStop::Close(whole),
            });
        }
    }
}

/// The header of a frame. See RFC 6455, section 5.2.
struct FrameHead {
    opcode: u8,
    masked: bool,
    payload: u64,
    /// The length of the header, including the mask.
    length: usize,
}

impl FrameHead {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (first, second) = (*bytes.first()?, *bytes.get(1)?);
        let (payload, extended) = match second & !MASK_BIT {
            126 => (u64::from(u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?)), 2),
            127 => (u64::from_be_bytes(bytes.get(2..10)?.try_into().ok()?), 8),
            short => (u64::from(short), 0),
        };
        let masked = second & MASK_BIT != 0;
        let length = 2 + extended + if masked { 4 } else { 0 };
        (bytes.len() >= length).then_some(Self { opcode: first & 0x0f, masked, payload, length })
    }
}

/// Returns a close frame to pass on: the same bytes, unless its code must not be sent.
fn valid_close_frame(frame: &[u8], sender: FrameSender) -> Vec<u8> {
    let Some(head) = FrameHead::parse(frame) else {
        return build_close_frame(sender, Some(sender.error_close_code()));
    };
    let payload = &frame[head.length..];
    let mask = if head.masked { &frame[head.length - 4..head.length] } else { &[0; 4] };
    match payload {
        [] => frame.to_vec(),
        [first, second, ..] => match u16::from_be_bytes([first ^ mask[0], second ^ mask[1]]) {
            1000..=1003 | 1007..=1014 | 3000..=4999 => frame.to_vec(),
            CLOSE_CODE_ABSENT => build_close_frame(sender, None),
            _ => build_close_frame(sender, Some(sender.error_close_code())),
        },
        [_] => build_close_frame(sender, Some(sender.error_close_code())),
    }
}

/// Builds a close frame. Frames to a service are masked, like all frames from clients; the mask may be
/// zero, since the payload is not secret.
fn build_close_frame(sender: FrameSender, code: Option<u16>) -> Vec<u8> {
    let payload = code.map(u16::to_be_bytes).unwrap_or_default();
    let payload = if code.is_some() { &payload[..] } else { &[] };
    let length = u8::try_from(payload.len()).expect("a close code has two bytes");
    let mut frame = vec![FINAL_BIT | CLOSE_OPCODE];
    match sender {
        FrameSender::Service => frame.push(length),
        FrameSender::Client => frame.extend([MASK_BIT | length, 0, 0, 0, 0]),
    }
    frame.extend(payload);
    frame
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    /// Returns what is passed on when `speaker` sends these chunks and disconnects.
    async fn passed(pieces: &[&[u8]], sender: FrameSender) -> Vec<u8> {
        let ((mut sends, mut from), (mut to, mut receives)) = (duplex(1 << 20), duplex(1 << 20));
        for piece in pieces {
            sends.write_all(piece).await.unwrap();
        }
        drop(sends);
        relay_frames(&mut from, &mut to, sender).await.unwrap();
        drop(to);
        let mut out = Vec::new();
        receives.read_to_end(&mut out).await.unwrap();
        out
    }

    const TEXT: &[u8] = &[0x81, 2, b'h', b'i'];
    const GONE: &[u8] = &[0x88, 2, 0x03, 0xf3];

    #[tokio::test]
    async fn frames_pass_unchanged_with_any_chunk_boundaries() {
        let mut long = vec![0x82, 127, 0, 0, 0, 0, 0, 3, 0, 0];
        long.resize(long.len() + (3 << 16), 7);
        let good_bye: &[u8] = &[0x88, 4, 0x03, 0xe8, b'o', b'k'];
        let whole = [TEXT, &[0x89, 0], &long, good_bye].concat();
        assert_eq!(passed(&[&whole], FrameSender::Service).await, whole);
        let pieces: Vec<&[u8]> = whole.chunks(1).collect();
        assert_eq!(passed(&pieces, FrameSender::Service).await, whole);
    }

    #[tokio::test]
    async fn nothing_follows_a_close() {
        assert_eq!(passed(&[&[0x88, 0], TEXT], FrameSender::Service).await, [0x88, 0]);
    }

    #[tokio::test]
    async fn client_gets_a_close_frame_when_the_service_vanishes() {
        assert_eq!(passed(&[TEXT], FrameSender::Service).await, [TEXT, GONE].concat());
        // In the middle of a frame no close can be sent, and a service gets none.
        assert_eq!(passed(&[&TEXT[..3]], FrameSender::Service).await, TEXT[..3]);
        assert_eq!(passed(&[TEXT], FrameSender::Client).await, TEXT);
    }

    #[tokio::test]
    async fn reserved_close_codes_are_replaced() {
        for (code, expected) in [
            (1000u16, Some(1000u16)),
            (1001, Some(1001)),
            (1004, Some(CLOSE_CODE_FAILED)),
            (1005, None),
            (1006, Some(CLOSE_CODE_FAILED)),
            (1011, Some(1011)),
            (1015, Some(CLOSE_CODE_FAILED)),
            (2999, Some(CLOSE_CODE_FAILED)),
            (999, Some(CLOSE_CODE_FAILED)),
            (3000, Some(3000)),
            (4999, Some(4999)),
            (5000, Some(CLOSE_CODE_FAILED)),
        ] {
            let sent = build_close_frame(FrameSender::Service, Some(code));
            assert_eq!(
                passed(&[&sent], FrameSender::Service).await,
                build_close_frame(FrameSender::Service, expected),
                "{code}"
            );
        }
        let mask = [9, 8, 7, 6];
        let masked = |code: u16| {
            let [first, second] = code.to_be_bytes();
            vec![0x88, 0x82, mask[0], mask[1], mask[2], mask[3], first ^ mask[0], second ^ mask[1]]
        };
        assert_eq!(passed(&[&masked(4000)], FrameSender::Client).await, masked(4000));
        assert_eq!(
            passed(&[&masked(1006)], FrameSender::Client).await,
            build_close_frame(FrameSender::Client, Some(CLOSE_CODE_PROTOCOL_ERROR))
        );
    }

    #[tokio::test]
    async fn malformed_frames_end_the_connection() {
        for wrong in [&[0x88, 126, 0, 126][..], &[0x88, 1, 3], &[0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(passed(&[wrong], FrameSender::Service).await, GONE, "{wrong:?}");
        }
    }
}
