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
const PARTING: Duration = Duration::from_secs(10);
const PIECE: usize = 64 << 10;
const CLOSE: u8 = 8;
const FINAL: u8 = 0x80;
const MASKED: u8 = 0x80;
/// The maximum payload of a control frame.
const LONGEST_CONTROL: u64 = 125;

/// Close code: the service failed.
const FAILED: u16 = 1011;
/// Close code: protocol error.
const WRONG: u16 = 1002;
/// "No code was present", a value that APIs report but no frame may contain.
const NO_CODE: u16 = 1005;

/// Completes the upgrade, then relays bytes both ways.
pub(super) fn join(client: OnUpgrade, mut response: Response, protocol: HeaderValue) -> Response {
    let service = hyper::upgrade::on(&mut response);
    let is_websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    tokio::spawn(async move {
        let joined = async {
            let (client, service) = tokio::try_join!(client, service).map_err(io::Error::other)?;
            let (client, service) = (TokioIo::new(client), TokioIo::new(service));
            if is_websocket { converse(client, service).await } else { copy(client, service).await }
        };
        if let Err(error) = joined.await {
            tracing::debug!(%error, "upgraded connection failed");
        }
    });
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, protocol);
    response.map(|_| Body::empty())
}

async fn copy(mut client: TokioIo<Upgraded>, mut service: TokioIo<Upgraded>) -> io::Result<()> {
    copy_bidirectional(&mut client, &mut service).await.map(|_| ())
}

/// Relays a WebSocket until both sides have closed it, or shortly after one has.
async fn converse(
    client: impl AsyncRead + AsyncWrite,
    service: impl AsyncRead + AsyncWrite,
) -> io::Result<()> {
    let (mut client_reads, mut client_writes) = split(client);
    let (mut service_reads, mut service_writes) = split(service);
    let mut inward = std::pin::pin!(pass(&mut client_reads, &mut service_writes, Speaker::Client));
    let mut outward = std::pin::pin!(pass(&mut service_reads, &mut client_writes, Speaker::Service));
    let parted = tokio::select! {
        ended = &mut inward => { ended?; timeout(PARTING, outward).await }
        ended = &mut outward => { ended?; timeout(PARTING, inward).await }
    };
    parted.unwrap_or(Ok(()))
}

/// The sender of the frames of one direction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Speaker {
    Client,
    Service,
}

/// Passes frames on until a close frame, then shuts down the direction.
async fn pass(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    speaker: Speaker,
) -> io::Result<()> {
    let mut frames = Frames::default();
    let mut buffer = Vec::with_capacity(PIECE);
    loop {
        let seen = frames.scan(&buffer);
        to.write_all(&buffer[..seen.pass]).await?;
        buffer.drain(..seen.pass);
        match seen.then {
            Then::More => {}
            Then::Close(length) => {
                to.write_all(&close_as_sent(&buffer[..length], speaker)).await?;
                break;
            }
            Then::Wrong => {
                to.write_all(&close(speaker, Some(speaker.blame()))).await?;
                break;
            }
        }
        let read = from.take(PIECE as u64).read_buf(&mut buffer).await;
        if matches!(read, Ok(0) | Err(_)) {
            if speaker == Speaker::Service && frames.left == 0 && buffer.is_empty() {
                to.write_all(&close(speaker, Some(FAILED))).await?;
            }
            break;
        }
    }
    to.shutdown().await
}

impl Speaker {
    /// The close code for malformed frames from this sender.
    fn blame(self) -> u16 {
        match self {
            Self::Client => WRONG,
            Self::Service => FAILED,
        }
    }
}

/// Tracks frame boundaries.
#[derive(Default)]
struct Frames {
    /// Remaining bytes of the current frame.
    left: u64,
}

/// The result of scanning a buffer.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    /// How many bytes may pass.
    pass: usize,
    then: Then,
}

#[derive(Debug, PartialEq, Eq)]
enum Then {
    /// The rest is an incomplete frame.
    More,
    /// A complete close frame of this length.
    Close(usize),
    Wrong,
}

impl Frames {
    /// Scans a buffer; the bytes before [`Seen::pass`] are then consumed.
    fn scan(&mut self, buffer: &[u8]) -> Seen {
        let mut at = 0;
        loop {
            let rest = &buffer[at..];
            let skipped = usize::try_from(self.left).unwrap_or(usize::MAX).min(rest.len());
            self.left -= skipped as u64;
            at += skipped;
            let seen = |then| Seen { pass: at, then };
            if self.left > 0 {
                return seen(Then::More);
            }
            let Some(head) = Head::parse(&buffer[at..]) else { return seen(Then::More) };
            if head.payload > i64::MAX.unsigned_abs() {
                return seen(Then::Wrong);
            }
            if head.opcode != CLOSE {
                at += head.length;
                self.left = head.payload;
                continue;
            }
            let whole = head.length + usize::try_from(head.payload).unwrap_or(usize::MAX).min(PIECE);
            return seen(match (head.payload <= LONGEST_CONTROL, buffer.len() - at >= whole) {
                (false, _) => Then::Wrong,
                (true, false) => Then::More,
                (true, true) => Then::Close(whole),
            });
        }
    }
}

/// The header of a frame. See RFC 6455, section 5.2.
struct Head {
    opcode: u8,
    masked: bool,
    payload: u64,
    /// The length of the header, including the mask.
    length: usize,
}

impl Head {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (first, second) = (*bytes.first()?, *bytes.get(1)?);
        let (payload, extended) = match second & !MASKED {
            126 => (u64::from(u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?)), 2),
            127 => (u64::from_be_bytes(bytes.get(2..10)?.try_into().ok()?), 8),
            short => (u64::from(short), 0),
        };
        let masked = second & MASKED != 0;
        let length = 2 + extended + if masked { 4 } else { 0 };
        (bytes.len() >= length).then_some(Self { opcode: first & 0x0f, masked, payload, length })
    }
}

/// Returns a close frame to pass on: the same bytes, unless its code must not be sent.
fn close_as_sent(frame: &[u8], speaker: Speaker) -> Vec<u8> {
    let Some(head) = Head::parse(frame) else { return close(speaker, Some(speaker.blame())) };
    let payload = &frame[head.length..];
    let mask = if head.masked { &frame[head.length - 4..head.length] } else { &[0; 4] };
    match payload {
        [] => frame.to_vec(),
        [first, second, ..] => match u16::from_be_bytes([first ^ mask[0], second ^ mask[1]]) {
            1000..=1003 | 1007..=1014 | 3000..=4999 => frame.to_vec(),
            NO_CODE => close(speaker, None),
            _ => close(speaker, Some(speaker.blame())),
        },
        [_] => close(speaker, Some(speaker.blame())),
    }
}

/// Builds a close frame. Frames to a service are masked, like all frames from clients; the mask may be
/// zero, since the payload is not secret.
fn close(speaker: Speaker, code: Option<u16>) -> Vec<u8> {
    let payload = code.map(u16::to_be_bytes).unwrap_or_default();
    let payload = if code.is_some() { &payload[..] } else { &[] };
    let length = u8::try_from(payload.len()).expect("a close code has two bytes");
    let mut frame = vec![FINAL | CLOSE];
    match speaker {
        Speaker::Service => frame.push(length),
        Speaker::Client => frame.extend([MASKED | length, 0, 0, 0, 0]),
    }
    frame.extend(payload);
    frame
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    /// Returns what is passed on when `speaker` sends these chunks and disconnects.
    async fn passed(pieces: &[&[u8]], speaker: Speaker) -> Vec<u8> {
        let ((mut sends, mut from), (mut to, mut receives)) = (duplex(1 << 20), duplex(1 << 20));
        for piece in pieces {
            sends.write_all(piece).await.unwrap();
        }
        drop(sends);
        pass(&mut from, &mut to, speaker).await.unwrap();
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
        assert_eq!(passed(&[&whole], Speaker::Service).await, whole);
        let pieces: Vec<&[u8]> = whole.chunks(1).collect();
        assert_eq!(passed(&pieces, Speaker::Service).await, whole);
    }

    #[tokio::test]
    async fn nothing_follows_a_close() {
        assert_eq!(passed(&[&[0x88, 0], TEXT], Speaker::Service).await, [0x88, 0]);
    }

    #[tokio::test]
    async fn client_gets_a_close_frame_when_the_service_vanishes() {
        assert_eq!(passed(&[TEXT], Speaker::Service).await, [TEXT, GONE].concat());
        // In the middle of a frame no close can be sent, and a service gets none.
        assert_eq!(passed(&[&TEXT[..3]], Speaker::Service).await, TEXT[..3]);
        assert_eq!(passed(&[TEXT], Speaker::Client).await, TEXT);
    }

    #[tokio::test]
    async fn reserved_close_codes_are_replaced() {
        for (code, expected) in [
            (1000u16, Some(1000u16)),
            (1001, Some(1001)),
            (1004, Some(FAILED)),
            (1005, None),
            (1006, Some(FAILED)),
            (1011, Some(1011)),
            (1015, Some(FAILED)),
            (2999, Some(FAILED)),
            (999, Some(FAILED)),
            (3000, Some(3000)),
            (4999, Some(4999)),
            (5000, Some(FAILED)),
        ] {
            let sent = close(Speaker::Service, Some(code));
            assert_eq!(passed(&[&sent], Speaker::Service).await, close(Speaker::Service, expected), "{code}");
        }
        let mask = [9, 8, 7, 6];
        let masked = |code: u16| {
            let [first, second] = code.to_be_bytes();
            vec![0x88, 0x82, mask[0], mask[1], mask[2], mask[3], first ^ mask[0], second ^ mask[1]]
        };
        assert_eq!(passed(&[&masked(4000)], Speaker::Client).await, masked(4000));
        assert_eq!(passed(&[&masked(1006)], Speaker::Client).await, close(Speaker::Client, Some(WRONG)));
    }

    #[tokio::test]
    async fn malformed_frames_end_the_connection() {
        for wrong in [&[0x88, 126, 0, 126][..], &[0x88, 1, 3], &[0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(passed(&[wrong], Speaker::Service).await, GONE, "{wrong:?}");
        }
    }
}
