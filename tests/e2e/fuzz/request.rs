//! Requests as bytes: well-formed ones with odd contents, and malformed ones.

use super::document::DocumentedOperation;
use super::random_source::RandomSource;
use super::values::{any_json, malformed_body, nasty_text, plausible_value, value_of_schema};

const BOUNDARY: &str = "border";

/// One request.
pub(super) struct FuzzRequest {
    pub(super) bytes: Vec<u8>,
    /// The name of the request in a complaint.
    pub(super) title: String,
    /// Whether HTTP allows the request, so that its response must be as documented.
    pub(super) form: RequestForm,
    /// Whether it is the method that the document describes.
    pub(super) described: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestForm {
    Good,
    /// Every response is acceptable except a server failure.
    Broken,
}

/// The targets for the requests of one visitor.
pub(super) struct RequestTargets<'a> {
    pub(super) host: &'a str,
    pub(super) key: &'a str,
    /// Sandboxes that exist or existed.
    pub(super) sandboxes: &'a [String],
    /// Addresses of sandboxes that the provisioner made, without their slash: `{handle}.{mac}`.
    pub(super) addresses: &'a [String],
    /// The ids that the provisioner knows.
    pub(super) provisioned: &'a [&'a str],
    /// Names of commands, sessions and terminals that were seen in responses.
    pub(super) names: &'a [String],
}

pub(super) fn make_request(
    operation: &DocumentedOperation,
    aim: &RequestTargets,
    dice: &mut RandomSource,
) -> FuzzRequest {
    let other = dice.chance(4);
    let method = if other {
        dice.pick(&["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "x"])
    } else {
        &operation.method
    };
    let path = path(operation, aim, dice);
    // A second, undocumented path may follow it.
    let astray = if dice.chance(2) { dice.pick(&["/..", "/x", "/%2e", "/%00", "//"]) } else { "" };
    let target = format!("{path}{astray}{}", query(operation, dice));
    let (kind, body) = body(operation, dice);
    let mut head = format!("{method} {target} HTTP/1.1\r\nHost: {}\r\n", aim.host);
    for (name, value) in headers(operation, aim, dice) {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() {
        head.push_str(&format!("Content-Type: {kind}\r\n"));
    }
    let title = format!("{method} {target}").chars().take(300).collect();
    let (bytes, form) = if dice.chance(10) {
        (broken_bytes(&head, &body, dice), RequestForm::Broken)
    } else if dice.chance(20) {
        (
            [head.as_bytes(), b"Transfer-Encoding: chunked\r\n\r\n", &chunks(&body, dice)].concat(),
            RequestForm::Good,
        )
    } else {
        let length = format!("Content-Length: {}\r\n\r\n", body.len());
        ([head.as_bytes(), length.as_bytes(), &body].concat(), RequestForm::Good)
    };
    FuzzRequest { bytes, title, form, described: method == operation.method && astray.is_empty() }
}

/// Encodes a text for a path or a query.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect()
}

fn path(operation: &DocumentedOperation, aim: &RequestTargets, dice: &mut RandomSource) -> String {
    let mut parts: Vec<String> = Vec::new();
    for part in operation.path.split('/') {
        parts.push(match part {
            "{address}" if dice.chance(95) && !aim.addresses.is_empty() => {
                aim.addresses[dice.below(aim.addresses.len())].clone()
            }
            "{id}" if dice.chance(85) && operation.path.starts_with("/api/") => {
                dice.pick(aim.provisioned).to_owned()
            }
            "{id}"
                if dice.chance(85) && !aim.sandboxes.is_empty() && operation.path.contains("/sandboxes/") =>
            {
                aim.sandboxes[dice.below(aim.sandboxes.len())].clone()
            }
            "{port}" if dice.chance(90) => {
                dice.pick(&["7000", "9", "44772", "18080", "80", "65535"]).to_owned()
            }
            "{uid}" | "{gid}" if dice.chance(90) => {
                dice.pick(&["0", "1000", "65534", "4294967295"]).to_owned()
            }
            "{kind}" if dice.chance(90) => dice.pick(&["logs", "events", "inspect", "summary"]).to_owned(),
            "{name}" | "{id}" | "{session_id}" if dice.chance(50) && !aim.names.is_empty() => {
                encoded(&aim.names[dice.below(aim.names.len())])
            }
            part if part.starts_with('{') => {
                let name = part.trim_matches(['{', '}']);
                let text = if dice.chance(40) { plausible_value(name, dice) } else { nasty_text(dice) };
                encoded(&text.chars().take(2_000).collect::<String>())
            }
            part => part.to_owned(),
        });
    }
    parts.join("/")
}

fn query(operation: &DocumentedOperation, dice: &mut RandomSource) -> String {
    let mut pairs = Vec::new();
    for parameter in &operation.query {
        let times = if parameter.kind == "array" { dice.below(3) } else { usize::from(dice.chance(60)) };
        for _ in 0..times {
            let value = match parameter.kind.as_str() {
                _ if dice.chance(25) => nasty_text(dice).chars().take(3_000).collect(),
                "integer" => dice.pick(&["0", "1", "5", "100", "-1", "99999999999999999999"]).to_owned(),
                "boolean" => dice.pick(&["true", "false", "1", "x"]).to_owned(),
                _ => plausible_value(&parameter.name, dice),
            };
            pairs.push(format!("{}={}", parameter.name, encoded(&value)));
        }
    }
    if dice.chance(4) {
        pairs.push(format!("{}={}", encoded(&nasty_text(dice)[..]), "%ff%00"));
        pairs.retain(|pair| pair.len() < 20_000);
    }
    if pairs.is_empty() { String::new() } else { format!("?{}", pairs.join("&")) }
}

fn headers(
    operation: &DocumentedOperation,
    aim: &RequestTargets,
    dice: &mut RandomSource,
) -> Vec<(String, String)> {
    let mut headers = Vec::new();
    let of_provisioner = operation.path.starts_with("/api/");
    let name = if of_provisioner { "X-API-Key" } else { "OPEN-SANDBOX-API-KEY" };
    match dice.below(25) {
        0 => {}
        1 => headers.push((name.to_owned(), "wrong".to_owned())),
        _ => headers.push((name.to_owned(), aim.key.to_owned())),
    }
    const ODD: &[&str] = &[
        "X-Request-ID: \t",
        "Idempotency-Key: same",
        "Range: bytes=0-0",
        "Range: bytes=-0",
        "Range: bytes=9-1,5-6",
        "Range: bytes=18446744073709551615-",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Connection: close, X-API-Key",
        "Sec-WebSocket-Key: x",
        "Sec-WebSocket-Version: 13",
        "OpenSandbox-Ingress-To: x",
        "OpenSandbox-Secure-Access: x",
        "OpenSandbox-Access-Renew: skip",
        "X-EXECD-ACCESS-TOKEN: x",
        "Origin: http://evil.example",
        "X-Forwarded-Proto: https",
        "X-Forwarded-Host: evil.example/\"",
        "X-Forwarded-Prefix: //evil.example",
        "X-AIO-Proxy-Port: 9",
        "Last-Event-ID: -1",
        "Accept-Encoding: gzip, br",
        "Content-Encoding: gzip",
        "If-None-Match: *",
        "TE: trailers",
        "Trailer: X-Sum",
    ];
    for _ in 0..if dice.chance(25) { 1 + dice.below(4) } else { 0 } {
        if let Some((name, value)) = dice.pick(ODD).split_once(": ") {
            headers.push((name.to_owned(), value.to_owned()));
        }
    }
    headers
}

fn body(operation: &DocumentedOperation, dice: &mut RandomSource) -> (String, Vec<u8>) {
    if operation.multipart {
        return (format!("multipart/form-data; boundary={BOUNDARY}"), multipart(dice));
    }
    let kind = if dice.chance(90) { "application/json" } else { "text/plain; charset=\"" };
    let bytes = match &operation.body {
        _ if dice.chance(6) => malformed_body(dice),
        Some(_) if dice.chance(5) && operation.path != "/coracle/v1/images" => {
            any_json(dice, 4).to_string().into_bytes()
        }
        Some(schema) => {
            let mut body = value_of_schema("body", schema, dice);
            // Images are requested only from this host itself, where no registry answers.
            if operation.path == "/coracle/v1/images" && body["name"].is_string() {
                body["name"] = format!("127.0.0.1:1/{}", plausible_value("name", dice)).into();
            }
            body.to_string().into_bytes()
        }
        None => Vec::new(),
    };
    (kind.to_owned(), bytes)
}

/// Parts in an order that is usually right.
fn multipart(dice: &mut RandomSource) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..dice.below(4) {
        let path = if dice.chance(70) { plausible_value("path", dice) } else { nasty_text(dice) };
        let metadata = serde_json::json!({"path": path, "mode": if dice.chance(80) { 644 } else { -1 }});
        let metadata = if dice.chance(90) { metadata } else { any_json(dice, 2) };
        for (name, content) in [("metadata", metadata.to_string().into_bytes()), ("file", dice.bytes(3_000))]
        {
            if dice.chance(4) {
                continue;
            }
            let head = format!(
                "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"x\"\r\n\r\n"
            );
            out.extend([head.as_bytes(), &content, b"\r\n"].concat());
        }
    }
    if dice.chance(90) {
        out.extend(format!("--{BOUNDARY}--\r\n").as_bytes());
    }
    out
}

/// A body as chunks of odd sizes.
fn chunks(body: &[u8], dice: &mut RandomSource) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in body.chunks(1 + dice.below(1_000)) {
        out.extend([format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
    }
    out.extend(b"0\r\n\r\n");
    out
}

/// Bytes that no client should send.
fn broken_bytes(head: &str, body: &[u8], dice: &mut RandomSource) -> Vec<u8> {
    let plain = format!("{head}Content-Length: {}\r\n\r\n", body.len());
    let whole = [plain.as_bytes(), body].concat();
    match dice.below(12) {
        // A body that is shorter or longer than its announced length.
        0 => [format!("{head}Content-Length: {}\r\n\r\n", body.len() + 10).as_bytes(), body].concat(),
        1 => [format!("{head}Content-Length: 0\r\n\r\n").as_bytes(), body, b"rubbish\r\n\r\n"].concat(),
        2 => [head.as_bytes(), b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"].concat(),
        3 => [head.as_bytes(), b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nab\r\n0\r\n\r\n"]
            .concat(),
        4 => [head.as_bytes(), b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"].concat(),
        5 => [head.as_bytes(), b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"].concat(),
        // Several requests at once, without waiting for responses.
        6 => whole.repeat(5),
        7 => whole[..dice.below(whole.len())].to_vec(),
        8 => [format!("{head}X-Long: {}\r\n", "x".repeat(80_000)).as_bytes(), b"\r\n"].concat(),
        9 => [head.as_bytes(), "X-Many: 1\r\n".repeat(300).as_bytes(), b"\r\n"].concat(),
        10 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        _ => dice.bytes(2_000),
    }
}
