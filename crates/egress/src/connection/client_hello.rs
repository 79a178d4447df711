//! Reads the server name from a TLS ClientHello, from the bytes that have arrived so far.
//!
//! ```text
//! records: type 22 │ version 3.x │ length u16 │ a part of the handshake message, cut anywhere
//! message: type 1 │ length u24 │ version │ random 32 │ session │ ciphers │ compressions │ extensions
//! extension 0: length u16 │ type 0 │ length u16 │ name
//! ```
//!
//! A hello with an encrypted inner hello shows the outer name, which cannot be told apart from GREASE; so the outer name
//! decides.

use domain::DomainName;

/// The largest ClientHello with the headers of its records.
pub(crate) const MAX_HELLO_BYTES: usize = 16 << 10;

const RECORD_HEADER_BYTES: usize = 5;
const MAX_RECORD_BYTES: usize = 1 << 14;
const HANDSHAKE_RECORD: u8 = 22;
/// The types of records, and the largest first byte of a version that servers accept.
const FIRST_RECORD: u8 = 20;
const LAST_RECORD: u8 = 24;
const MAX_RECORD_VERSION: u8 = 0x0f;
const CLIENT_HELLO: u8 = 1;
const MESSAGE_HEADER_BYTES: usize = 4;
const SERVER_NAME: u16 = 0;

/// What the first bytes of a client are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HelloBytes {
    /// The beginning of a ClientHello.
    Incomplete,
    /// Not TLS.
    Other,
    /// TLS that no client sends.
    Invalid,
    Complete {
        /// The server name; `None` if there is none, or an address instead.
        name: Option<DomainName>,
    },
}

/// Reads the first bytes of a client.
pub(crate) fn parse_client_hello(bytes: &[u8]) -> HelloBytes {
    match bytes {
        [] | [HANDSHAKE_RECORD] => return HelloBytes::Incomplete,
        [HANDSHAKE_RECORD, 3, ..] => {}
        // Some servers accept other versions of a record, and skip alerts that precede the ClientHello.
        [FIRST_RECORD..=LAST_RECORD] => return HelloBytes::Incomplete,
        [FIRST_RECORD..=LAST_RECORD, 0..=MAX_RECORD_VERSION, ..] => return HelloBytes::Invalid,
        _ => return HelloBytes::Other,
    }
    let message = match join_records(bytes) {
        Ok(Some(message)) => message,
        Ok(None) if bytes.len() >= MAX_HELLO_BYTES => return HelloBytes::Invalid,
        Ok(None) => return HelloBytes::Incomplete,
        Err(NotHello) => return HelloBytes::Invalid,
    };
    match find_server_name(&message) {
        Some(name) => HelloBytes::Complete { name },
        None => HelloBytes::Invalid,
    }
}

struct NotHello;

/// Joins the records of the message; `None` if it is incomplete.
fn join_records(mut bytes: &[u8]) -> Result<Option<Vec<u8>>, NotHello> {
    let mut message = Vec::new();
    loop {
        let length = message_length(&message)?;
        if let Some(length) = length.filter(|length| message.len() >= *length) {
            message.truncate(length);
            message.drain(..MESSAGE_HEADER_BYTES);
            return Ok(Some(message));
        }
        let Some((header, rest)) = bytes.split_at_checked(RECORD_HEADER_BYTES) else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[0] != HANDSHAKE_RECORD || header[1] != 3 || length == 0 || length > MAX_RECORD_BYTES {
            return Err(NotHello);
        }
        message.extend_from_slice(&rest[..length.min(rest.len())]);
        bytes = rest.get(length..).unwrap_or_default();
    }
}

/// Returns the length of the message with its header; `None` if the header is incomplete.
fn message_length(message: &[u8]) -> Result<Option<usize>, NotHello> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(NotHello);
    }
    let [_, a, b, c, ..] = message else { return Ok(None) };
    let length = [a, b, c].into_iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    if length > MAX_HELLO_BYTES { Err(NotHello) } else { Ok(Some(length + MESSAGE_HEADER_BYTES)) }
}

/// Returns the server name of a message without its header; the outer `None` if the message is malformed.
fn find_server_name(message: &[u8]) -> Option<Option<DomainName>> {
    const VERSION_AND_RANDOM: usize = 34;
    let mut rest = Fields(message);
    rest.take(VERSION_AND_RANDOM)?;
    let session = rest.number(1)?;
    rest.take(session)?;
    let ciphers = rest.number(2)?;
    rest.take(ciphers)?;
    let compressions = rest.number(1)?;
    rest.take(compressions)?;
    if rest.0.is_empty() {
        return Some(None);
    }
    let length = rest.number(2)?;
    if length != rest.0.len() {
        return None;
    }
    let mut found = None;
    while !rest.0.is_empty() {
        let (kind, length) = (rest.number(2)?, rest.number(2)?);
        let value = rest.take(length)?;
        if kind == usize::from(SERVER_NAME) {
            if found.is_some() {
                return None;
            }
            found = Some(parse_name_list(value)?);
        }
    }
    Some(found.flatten())
}

/// Returns the one name of the extension; the inner `None` if it is an address, which is no name.
fn parse_name_list(value: &[u8]) -> Option<Option<DomainName>> {
    const HOST_NAME: usize = 0;
    let mut rest = Fields(value);
    let is_whole = rest.number(2)? == rest.0.len();
    let kind = rest.number(1)?;
    let length = rest.number(2)?;
    if !is_whole || kind != HOST_NAME || length != rest.0.len() {
        return None;
    }
    let text = std::str::from_utf8(rest.0).ok()?;
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Some(None);
    }
    text.parse().ok().map(Some)
}

/// Fields that are still to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// Reads a number of so many bytes.
    fn number(&mut self, bytes: usize) -> Option<usize> {
        Some(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;

    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    /// The first bytes of a real client that connects to `server`.
    pub(crate) fn real_hello(server: &str, alpn: &[&[u8]]) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has them")
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let server = ServerName::try_from(server.to_owned()).expect("a name");
        let mut client = ClientConnection::new(Arc::new(config), server).expect("a valid setup");
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).expect("memory takes everything");
        bytes
    }

    fn complete(name: &str) -> HelloBytes {
        HelloBytes::Complete { name: Some(name.parse().expect("a name")) }
    }

    /// The same message in records of `size` bytes.
    fn in_records(hello: &[u8], size: usize) -> Vec<u8> {
        let message = &hello[RECORD_HEADER_BYTES..];
        let record = |part: &[u8]| {
            let length = u16::try_from(part.len()).expect("small").to_be_bytes();
            [&[HANDSHAKE_RECORD, 3, 1], &length[..], part].concat()
        };
        message.chunks(size).flat_map(record).collect()
    }

    /// A ClientHello with these extensions.
    fn hello_with(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        let extensions: Vec<u8> = extensions
            .iter()
            .flat_map(|(kind, value)| {
                let length = u16::try_from(value.len()).expect("small").to_be_bytes();
                [&kind.to_be_bytes()[..], &length, value].concat()
            })
            .collect();
        body.extend(u16::try_from(extensions.len()).expect("small").to_be_bytes());
        body.extend(extensions);
        let length = u32::try_from(body.len()).expect("small").to_be_bytes();
        let message = [&[CLIENT_HELLO], &length[1..], &body].concat();
        let record = u16::try_from(message.len()).expect("small").to_be_bytes();
        [&[HANDSHAKE_RECORD, 3, 1], &record[..], &message].concat()
    }

    fn name_extension(name: &str) -> (u16, Vec<u8>) {
        let length = |more: usize| u16::try_from(name.len() + more).expect("small").to_be_bytes();
        (SERVER_NAME, [&length(3)[..], &[0], &length(0), name.as_bytes()].concat())
    }

    #[test]
    fn real_hello_shows_its_name_in_any_pieces() {
        let hello = real_hello("Api.Example.org", &[b"h2", b"http/1.1"]);
        assert_eq!(parse_client_hello(&hello), complete("api.example.org"));
        for end in 0..hello.len() {
            assert_eq!(parse_client_hello(&hello[..end]), HelloBytes::Incomplete, "{end} bytes");
        }
        for size in [1, 2, 10, 100, 1000] {
            assert_eq!(parse_client_hello(&in_records(&hello, size)), complete("api.example.org"), "{size}");
        }
        let with_more = [&hello[..], b"early data"].concat();
        assert_eq!(parse_client_hello(&with_more), complete("api.example.org"));
    }

    #[test]
    fn hello_to_an_address_has_no_name() {
        assert_eq!(parse_client_hello(&real_hello("192.0.2.1", &[])), HelloBytes::Complete { name: None });
        let literal = hello_with(&[name_extension("192.0.2.1")]);
        assert_eq!(parse_client_hello(&literal), HelloBytes::Complete { name: None });
        assert_eq!(parse_client_hello(&hello_with(&[])), HelloBytes::Complete { name: None });
    }

    #[test]
    fn encrypted_hello_shows_its_outer_name() {
        const ENCRYPTED_HELLO: u16 = 0xfe0d;
        for extensions in [
            [name_extension("outer.org"), (ENCRYPTED_HELLO, vec![9; 200])],
            [(ENCRYPTED_HELLO, vec![9; 200]), name_extension("outer.org")],
        ] {
            assert_eq!(parse_client_hello(&hello_with(&extensions)), complete("outer.org"));
        }
    }

    #[test]
    fn ambiguous_names_are_invalid() {
        let two = hello_with(&[name_extension("a.org"), name_extension("b.org")]);
        assert_eq!(parse_client_hello(&two), HelloBytes::Invalid);
        for name in ["", "a..org", "a b.org", "a.org\0.b.org", "bücher.de", "2130706433", "0x7f.1", "*.org"]
        {
            assert_eq!(
                parse_client_hello(&hello_with(&[name_extension(name)])),
                HelloBytes::Invalid,
                "{name}"
            );
        }
        let (kind, mut value) = name_extension("a.org");
        value.push(0);
        assert_eq!(parse_client_hello(&hello_with(&[(kind, value)])), HelloBytes::Invalid);
    }

    #[test]
    fn other_protocols_are_recognised() {
        for bytes in
            [&b"GET / HTTP/1.1\r\n"[..], b"SSH-2.0-x", b"PRI * HTTP/2.0", &[0x80, 46, 1], &[22, 0x20]]
        {
            assert_eq!(parse_client_hello(bytes), HelloBytes::Other, "{bytes:?}");
        }
        // Records that some servers read as the beginning of a handshake.
        for bytes in [&[22, 2, 1][..], &[21, 3, 1, 0, 2, 1, 100, 22, 3, 1], &[20, 3, 3, 0, 1, 1]] {
            assert_eq!(parse_client_hello(bytes), HelloBytes::Invalid, "{bytes:?}");
        }
        assert_eq!(parse_client_hello(&[22, 3, 1, 0, 4, 2, 0, 0, 0]), HelloBytes::Invalid);
        assert_eq!(parse_client_hello(&[22, 3, 1, 0, 0]), HelloBytes::Invalid);
        assert_eq!(parse_client_hello(&[22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff]), HelloBytes::Invalid);
    }

    #[test]
    fn oversized_hello_is_invalid_before_it_has_arrived() {
        let large = hello_with(&[(0x1234, vec![0; MAX_HELLO_BYTES - 200]), name_extension("a.org")]);
        assert_eq!(parse_client_hello(&large), complete("a.org"));
        let slow = in_records(&real_hello("a.org", &[]), 1);
        assert!(slow.len() < MAX_HELLO_BYTES);
        let mut endless = vec![HANDSHAKE_RECORD, 3, 1, 0x40, 0, CLIENT_HELLO, 0, 0x40, 0];
        endless.resize(MAX_HELLO_BYTES - 1, 0);
        assert_eq!(parse_client_hello(&endless), HelloBytes::Incomplete);
        endless.push(0);
        assert_eq!(parse_client_hello(&endless), HelloBytes::Invalid);
    }

    #[test]
    fn every_flipped_bit_is_handled() {
        let hello = real_hello("example.org", &[b"h2"]);
        for at in 0..hello.len() * 8 {
            let mut flipped = hello.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            if let HelloBytes::Complete { name: Some(name) } = parse_client_hello(&flipped) {
                assert!(name.as_str().bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_handled(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..2000)) {
            parse_client_hello(&bytes);
            parse_client_hello(&[&[HANDSHAKE_RECORD, 3, 1], &bytes[..]].concat());
        }
    }
}
