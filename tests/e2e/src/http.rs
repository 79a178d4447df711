//! A small HTTP/1.1 client on one kept connection. It does only what talking to the server needs, so that
//! it hides nothing of the responses.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How long a server may send nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(150);

/// One response.
#[derive(Debug)]
pub struct HttpResponse {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpResponse {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; it panics with the body if that is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("status {}, no JSON ({error}): {}", self.status, self.text()))
    }
}

/// A connection that is kept between requests and reopened if the server closed it.
pub struct HttpClient {
    address: String,
    /// The value of the `Host` header.
    host: String,
    headers: Vec<(String, String)>,
    connection: Option<BufReader<TcpStream>>,
}

impl HttpClient {
    pub fn new(address: &str) -> Self {
        let (address, host) = (address.to_owned(), address.to_owned());
        Self { address, host, headers: Vec::new(), connection: None }
    }

    /// Uses another `Host` than the server's address.
    pub fn with_host(mut self, host: &str) -> Self {
        self.host = host.to_owned();
        self
    }

    /// Sends these headers with every request from now on.
    pub fn set_headers(&mut self, headers: &[(String, String)]) {
        self.headers = headers.to_vec();
    }

    pub fn get(&mut self, path: &str) -> io::Result<HttpResponse> {
        self.request("GET", path, "", &[])
    }

    /// What the operator sees of a sandbox.
    pub fn inspect_sandbox(&mut self, id: &str) -> serde_json::Value {
        self.get(&format!("/coracle/v1/sandboxes/{id}")).expect("the server answers").json()
    }

    pub fn delete(&mut self, path: &str) -> io::Result<HttpResponse> {
        self.request("DELETE", path, "", &[])
    }

    pub fn post(&mut self, path: &str, body: &serde_json::Value) -> io::Result<HttpResponse> {
        self.request("POST", path, "application/json", body.to_string().as_bytes())
    }

    /// Sends a request and reads the whole response.
    pub fn request(&mut self, method: &str, path: &str, kind: &str, body: &[u8]) -> io::Result<HttpResponse> {
        let mut response = self.start_request(method, path, kind, body)?;
        let mut bytes = Vec::new();
        response.body.read_to_end(&mut bytes)?;
        let (status, headers) = (response.status, std::mem::take(&mut response.headers));
        let connection = response.body.connection;
        let closing = headers.iter().any(|(name, value)| {
            name.eq_ignore_ascii_case("connection") && value.eq_ignore_ascii_case("close")
        });
        if !closing {
            self.connection = Some(connection);
        }
        Ok(HttpResponse { status, headers, body: bytes })
    }

    /// Sends a whole request as it is, and reads the whole response.
    pub fn send_bytes(&mut self, message: &[u8]) -> io::Result<HttpResponse> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.write_all(message)?;
        read_response(stream)
    }

    /// Sends a request and returns as soon as the head of the response has arrived.
    pub fn start_request(
        &mut self,
        method: &str,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> io::Result<StreamingResponse> {
        // A kept connection may have been closed meanwhile; a new one is tried once.
        if let Some(connection) = self.connection.take() {
            match self.exchange(connection, method, path, kind, body) {
                Err(error) if !is_timeout(&error) => {}
                answered => return answered,
            }
        }
        let stream = TcpStream::connect(&self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        self.exchange(BufReader::new(stream), method, path, kind, body)
    }

    /// Sends a body of this length from a reader, calling back for each piece, and reads the whole response.
    pub fn send_streamed(
        &mut self,
        path: &str,
        kind: &str,
        length: u64,
        body: &mut impl Read,
        mut sent: impl FnMut(),
    ) -> io::Result<HttpResponse> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.write_all(self.request_head("POST", path, kind, length).as_bytes())?;
        let mut piece = vec![0; 128 << 10];
        loop {
            match body.read(&mut piece)? {
                0 => break,
                count => stream.write_all(&piece[..count])?,
            }
            sent();
        }
        read_response(stream)
    }

    fn request_head(&self, method: &str, path: &str, kind: &str, length: u64) -> String {
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {length}\r\n", self.host);
        if !kind.is_empty() {
            head.push_str(&format!("Content-Type: {kind}\r\n"));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        head
    }

    fn exchange(
        &self,
        mut connection: BufReader<TcpStream>,
        method: &str,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> io::Result<StreamingResponse> {
        let mut message = self.request_head(method, path, kind, body.len() as u64).into_bytes();
        message.extend_from_slice(body);
        connection.get_mut().write_all(&message)?;
        let (status, headers) = read_head(&mut connection)?;
        let framing = BodyFraming::of_response(status, &headers);
        Ok(StreamingResponse { status, headers, body: ResponseBody { connection, framing } })
    }
}

/// A response whose body is still arriving.
pub struct StreamingResponse {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: ResponseBody,
}

/// The bytes of a body, without their framing.
pub struct ResponseBody {
    connection: BufReader<TcpStream>,
    framing: BodyFraming,
}

#[derive(Clone, Copy)]
enum BodyFraming {
    /// This many bytes are left.
    Length(u64),
    /// This many bytes are left in this chunk; zero means that the head of a chunk comes next.
    Chunk(u64),
    UntilClosed,
    Ended,
}

impl BodyFraming {
    fn of_response(status: u16, headers: &[(String, String)]) -> Self {
        let value = |name: &str| {
            headers
                .iter()
                .find(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.as_str())
        };
        if status == 204 || status == 304 {
            return Self::Ended;
        }
        if value("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
            return Self::Chunk(0);
        }
        value("content-length").and_then(|length| length.parse().ok()).map_or(Self::UntilClosed, Self::Length)
    }
}

impl Read for ResponseBody {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.framing {
                BodyFraming::Ended | BodyFraming::Length(0) => return Ok(0),
                BodyFraming::UntilClosed => return self.connection.read(buffer),
                BodyFraming::Length(left) => {
                    let taken = read_at_most(&mut self.connection, buffer, left)?;
                    self.framing = BodyFraming::Length(left - taken as u64);
                    return Ok(taken);
                }
                BodyFraming::Chunk(0) => self.framing = next_chunk(&mut self.connection)?,
                BodyFraming::Chunk(left) => {
                    let taken = read_at_most(&mut self.connection, buffer, left)?;
                    let left = left - taken as u64;
                    self.framing = BodyFraming::Chunk(left);
                    if left == 0 {
                        read_line(&mut self.connection)?;
                    }
                    return Ok(taken);
                }
            }
        }
    }
}

/// Reads the head of a chunk; the last one is empty and followed by an empty line.
fn next_chunk(connection: &mut BufReader<TcpStream>) -> io::Result<BodyFraming> {
    let line = read_line(connection)?;
    let size = line.split(';').next().unwrap_or_default().trim();
    let size = u64::from_str_radix(size, 16).map_err(io::Error::other)?;
    if size > 0 {
        return Ok(BodyFraming::Chunk(size));
    }
    while !read_line(connection)?.is_empty() {}
    Ok(BodyFraming::Ended)
}

fn read_at_most(connection: &mut impl Read, buffer: &mut [u8], left: u64) -> io::Result<usize> {
    let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
    match connection.read(&mut buffer[..most])? {
        0 if most > 0 => Err(io::ErrorKind::UnexpectedEof.into()),
        taken => Ok(taken),
    }
}

/// Reads a response to its end.
fn read_response(stream: TcpStream) -> io::Result<HttpResponse> {
    let mut connection = BufReader::new(stream);
    let (status, headers) = read_head(&mut connection)?;
    let framing = BodyFraming::of_response(status, &headers);
    let mut bytes = Vec::new();
    ResponseBody { connection, framing }.read_to_end(&mut bytes)?;
    Ok(HttpResponse { status, headers, body: bytes })
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn read_head(connection: &mut impl BufRead) -> io::Result<(u16, Vec<(String, String)>)> {
    let line = read_line(connection)?;
    let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("no status line: `{line}`")))?;
    let mut headers = Vec::new();
    loop {
        let line = read_line(connection)?;
        match line.split_once(':') {
            Some((name, value)) => headers.push((name.trim().to_owned(), value.trim().to_owned())),
            None => return Ok((status, headers)),
        }
    }
}

fn read_line(connection: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if connection.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}
