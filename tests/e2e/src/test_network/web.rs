//! The HTTP servers of the test internet: they describe each request in a JSON body.
//!
//! `GET /bytes/N` sends N bytes, `GET /endless` sends until the client is gone, `CONNECT` opens a tunnel, and
//! `/dns-query` of the resolver answers a DNS message. Every other request gets a description of itself.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

use serde_json::{Value, json};
use sha2::Digest;

use super::hosts::{self, RESOLVER, RecordData, ZoneAnswer, names_at, record_type};
use super::resolver::WorldResolver;

/// How a connection reached the server.
pub(super) struct Reached {
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    /// The name in the ClientHello.
    pub(super) server_name: Option<String>,
}

/// A request without its body.
struct RequestHead {
    method: String,
    target: String,
    headers: Vec<(String, String)>,
}

impl RequestHead {
    fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

const PIECE: [u8; 16 << 10] = [b'x'; 16 << 10];

/// Answers all requests of a connection, pipelined ones too.
pub(super) fn serve_http<S: Read + Write>(stream: S, reached: &Reached, resolver: &WorldResolver) {
    let mut stream = BufReader::new(stream);
    while let Ok(Some(head)) = read_head(&mut stream) {
        let length = head.header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).is_err()
            || respond(&mut stream, &head, &body, reached, resolver).is_err()
        {
            return;
        }
    }
}

fn respond<S: Read + Write>(
    stream: &mut BufReader<S>,
    head: &RequestHead,
    body: &[u8],
    reached: &Reached,
    resolver: &WorldResolver,
) -> io::Result<()> {
    let out = stream.get_mut();
    let path = head.target.split('?').next().unwrap_or_default();
    if head.method == "CONNECT" {
        return open_tunnel(stream, &head.target);
    }
    if path == "/dns-query" && names_at(reached.local.ip())[0] == RESOLVER.name() {
        let answer = resolver.answer(body).unwrap_or_default();
        return write_response(out, "application/dns-message", &answer);
    }
    if path == "/endless" {
        out.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        loop {
            out.write_all(&PIECE)?;
        }
    }
    if let Some(count) = path.strip_prefix("/bytes/").and_then(|text| text.parse().ok()) {
        return write_response(out, "application/octet-stream", &vec![b'x'; count]);
    }
    if let Some(found) = super::packages::find_page(path) {
        return write_response(out, found.0, &found.1);
    }
    let text = describe(head, body, reached).to_string();
    write_response(out, "application/json", text.as_bytes())
}

fn describe(head: &RequestHead, body: &[u8], reached: &Reached) -> Value {
    json!({
        "at": names_at(reached.local.ip())[0],
        "address": reached.local.ip().to_string(),
        "port": reached.local.port(),
        "peer": reached.peer.ip().to_string(),
        "sni": reached.server_name,
        "method": head.method,
        "target": head.target,
        "headers": head.headers,
        "digests": header_digests(head),
        "body": String::from_utf8_lossy(body),
    })
}

/// The values of headers as digests, which pass where a secret itself is replaced.
fn header_digests(head: &RequestHead) -> Value {
    let hexadecimal = |text: &str| -> String {
        sha2::Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
    };
    head.headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), hexadecimal(value))).collect()
}

fn write_response(out: &mut impl Write, kind: &str, body: &[u8]) -> io::Result<()> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    out.write_all(&[head.as_bytes(), body].concat())?;
    out.flush()
}

/// Carries bytes between a client and another host of the test internet, for one answer of each side at a time.
fn open_tunnel<S: Read + Write>(stream: &mut BufReader<S>, target: &str) -> io::Result<()> {
    let target = connect_to(target)?;
    stream.get_mut().write_all(b"HTTP/1.1 200 Connected\r\n\r\n")?;
    carry_exchange(stream, target)
}

/// Sends what the client has written so far, then returns what the target sends until it is silent.
pub(super) fn carry_exchange<S: Read + Write>(
    stream: &mut BufReader<S>,
    mut target: TcpStream,
) -> io::Result<()> {
    const SILENCE: std::time::Duration = std::time::Duration::from_millis(300);
    let request = stream.fill_buf()?.to_vec();
    stream.consume(request.len());
    target.write_all(&request)?;
    target.set_read_timeout(Some(SILENCE))?;
    let mut answer = [0; 4096];
    while let Ok(length @ 1..) = target.read(&mut answer) {
        stream.get_mut().write_all(&answer[..length])?;
    }
    Err(io::ErrorKind::ConnectionAborted.into())
}

/// Connects to `NAME:PORT` or `ADDRESS:PORT` from inside the world.
pub(super) fn connect_to(target: &str) -> io::Result<TcpStream> {
    let (host, port) = target.rsplit_once(':').ok_or(io::ErrorKind::InvalidInput)?;
    let port: u16 = port.parse().map_err(io::Error::other)?;
    let address = match host.trim_matches(['[', ']']).parse() {
        Ok(address) => address,
        Err(_) => first_address(host).ok_or(io::ErrorKind::NotFound)?,
    };
    TcpStream::connect((address, port))
}

fn first_address(name: &str) -> Option<IpAddr> {
    let ZoneAnswer::Records(records) = hosts::look_up(name, record_type::A, 0) else { return None };
    records.into_iter().find_map(|record| match record.data {
        RecordData::Address(address) => Some(address),
        RecordData::Alias(_) | RecordData::Text(_) | RecordData::EchKeys => None,
    })
}

/// Reads the head of the next request; `None` at the end of the connection.
fn read_head(stream: &mut impl BufRead) -> io::Result<Option<RequestHead>> {
    let Some(first) = read_line(stream)? else { return Ok(None) };
    let mut words = first.split(' ');
    let mut word = || words.next().unwrap_or_default().to_owned();
    let mut head = RequestHead { method: word(), target: word(), headers: Vec::new() };
    while let Some(line) = read_line(stream)?.filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').unwrap_or((&line, ""));
        head.headers.push((name.to_owned(), value.trim().to_owned()));
    }
    Ok(Some(head))
}

fn read_line(stream: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let length = stream.take(64 << 10).read_until(b'\n', &mut line)?;
    Ok((length > 0).then(|| String::from_utf8_lossy(&line).trim_end().to_owned()))
}
