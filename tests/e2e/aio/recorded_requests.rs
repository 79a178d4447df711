//! The requests of DeerFlow 2.1's client, and those expected of 2.2, sent again byte for byte.
//!
//! `tests/deerflow/record_requests.py` writes the recordings. What a server decides has a name in braces there, and a line
//! before each request says what its client must find in the response.

use e2e::aio::AioSandbox;
use e2e::http::HttpResponse;
use serde_json::{Value, json};

const RELEASED_CLIENT: &str = include_str!("recordings/deerflow-2.1.http");
const NEXT_CLIENT: &str = include_str!("recordings/deerflow-2.2.http");

/// A request as it was recorded, and the response that it had.
struct RecordedRequest<'a> {
    expected: Value,
    head: &'a str,
    body: &'a str,
}

fn parse_recording(text: &str) -> Vec<RecordedRequest<'_>> {
    let exchanges = text.split("### ").skip(1).map(|exchange| {
        let (expected, request) = exchange.split_once('\n').expect("a request follows");
        let (head, body) = request.split_once("\n\n").expect("a head ends with an empty line");
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().expect("a number"))
        });
        let (body, rest) = body.split_at(length.unwrap_or(0));
        assert_eq!(rest.trim(), "", "the body of `{head}` is longer than it says");
        RecordedRequest { expected: serde_json::from_str(expected).expect("it is JSON"), head, body }
    });
    exchanges.collect()
}

impl RecordedRequest<'_> {
    /// The bytes that go to a server.
    fn to_bytes(&self, host: &str, sandbox: &str) -> Vec<u8> {
        let head = self.head.replace("{host}", host).replace("{key}", e2e::aio::KEY);
        let head = head.replace("{sandbox}", sandbox).replace('\n', "\r\n");
        assert!(!head.contains('{'), "something was not replaced: {head}");
        [head.as_bytes(), b"\r\n\r\n", self.body.as_bytes()].concat()
    }

    fn check(&self, response: &HttpResponse) {
        let (request, text) = (self.head.lines().next().unwrap_or_default(), response.text());
        assert_eq!(json!(response.status), self.expected["status"], "{request}: {text}");
        assert!(!text.contains("ErrorObservation"), "{request}: {text}");
        match &self.expected["json"] {
            Value::Null => assert_eq!(json!(text), self.expected["body"], "{request}"),
            expected => {
                let found = response.json();
                assert!(has_all(&found, expected), "{request}: {found} lacks something of {expected}");
            }
        }
    }
}

/// Whether a value has every field of another one, and the same in lists.
fn has_all(found: &Value, expected: &Value) -> bool {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            expected.iter().all(|(name, value)| found.get(name).is_some_and(|found| has_all(found, value)))
        }
        (Value::Array(found), Value::Array(expected)) => {
            found.len() == expected.len()
                && found.iter().zip(expected).all(|(one, other)| has_all(one, other))
        }
        (found, expected) => found == expected,
    }
}

/// Sends one request after the other to a new server, and returns how many there were.
fn replay(recording: &str) -> usize {
    let server = super::start_server();
    let mut client = server.client();
    let mut sandbox = String::new();
    let requests = parse_recording(recording);
    for request in &requests {
        let response =
            client.send_bytes(&request.to_bytes(server.address(), &sandbox)).expect("the server answers");
        request.check(&response);
        if request.head.starts_with("POST /api/sandboxes ") {
            let created = AioSandbox::from_response(server.address(), &response.json());
            server.add_secret(created.mac());
            sandbox = created.path;
        }
    }
    let left = e2e::aio::keyed_client(server.address()).get("/api/sandboxes").expect("the server answers");
    assert_eq!(left.json()["count"], 0, "the client removes its sandbox");
    requests.len()
}

#[test]
fn j24_recorded_requests_of_deerflow_2_1_are_served() {
    assert!(replay(RELEASED_CLIENT) > 20);
}

#[test]
fn j24_recorded_requests_of_deerflow_2_2_are_served() {
    assert!(replay(NEXT_CLIENT) > 25);
}
