//! A small HTTP client for tests: one connection per request, and whole responses.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// A request that can be changed until it is sent.
#[must_use]
pub struct TestRequest {
    address: SocketAddr,
    builder: http::request::Builder,
    body: Bytes,
}

/// A whole response.
#[derive(Debug)]
pub struct TestResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl TestRequest {
    pub(crate) fn new(address: SocketAddr, method: &str, path: &str) -> Self {
        let builder = Request::builder().method(method).uri(path);
        Self { address, builder, body: Bytes::new() }
    }

    pub fn header(self, name: &str, value: &str) -> Self {
        Self { builder: self.builder.header(name, value), ..self }
    }

    pub fn json(self, value: &Value) -> Self {
        self.header("content-type", "application/json").body(value.to_string())
    }

    pub fn body(self, body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Sends it and reads the response to its end.
    pub async fn send(self) -> TestResponse {
        let (head, body) = self.send_and_stream().await.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        TestResponse { status: head.status, headers: head.headers, body }
    }

    /// Sends it and leaves the body of the response to be read.
    pub async fn send_and_stream(mut self) -> http::Response<Incoming> {
        let named = self.builder.headers_ref().is_some_and(|headers| headers.contains_key("host"));
        if !named {
            self.builder = self.builder.header("host", self.address.to_string());
        }
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(self.builder.body(Full::new(self.body)).unwrap()).await.unwrap()
    }
}

impl TestResponse {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {} {:?}", self.status, self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Returns the JSON of a response with this status; any other status fails the test.
    #[track_caller]
    pub fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        if self.body.is_empty() { Value::Null } else { self.json() }
    }
}
