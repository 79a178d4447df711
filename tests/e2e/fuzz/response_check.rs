//! Checks whether a response is one that the server documents.

use serde_json::Value;

use super::document::DocumentedOperation;
use super::request::{FuzzRequest, RequestForm};

/// The part of a response that was read.
pub(super) struct FuzzResponse {
    pub(super) status: u16,
    head: String,
    body: Vec<u8>,
    /// Whether the response is complete.
    pub(super) whole: bool,
}

impl FuzzResponse {
    /// Returns `None` until the head is complete.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let status = head.split(' ').nth(1)?.parse().ok()?;
        // An interim response that invites the body, which was already sent.
        if status == 100 {
            return Self::parse(&bytes[end + 4..]);
        }
        let mut answer = Self { status, head, body: bytes[end + 4..].to_vec(), whole: false };
        let length = answer.header("content-length").and_then(|length| length.parse().ok());
        answer.whole = match length {
            Some(length) => {
                // Bytes after it belong to another response.
                let whole = answer.body.len() >= length;
                answer.body.truncate(length);
                whole
            }
            None => status == 204 || status == 304 || answer.body.ends_with(b"0\r\n\r\n"),
        };
        Some(answer)
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.split("\r\n").skip(1);
        let mut pairs = lines.filter_map(|line| line.split_once(':'));
        pairs.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    /// The body, or its first event.
    pub(super) fn json(&self) -> Option<Value> {
        let text = String::from_utf8_lossy(&self.body);
        let first = text.lines().find(|line| line.starts_with('{'))?;
        serde_json::from_str(first).ok()
    }
}

/// Returns a complaint about a wrong response.
pub(super) fn check_response(
    operation: &DocumentedOperation,
    request: &FuzzRequest,
    answer: &FuzzResponse,
) -> Result<(), String> {
    let complain = |why: &str| {
        let body: String = String::from_utf8_lossy(&answer.body).chars().take(400).collect();
        let sent = request.bytes.escape_ascii().to_string();
        let sent: String = sent.chars().take(1_500).collect();
        Err(format!("{}: {why}: {} {body}\n    sent: {sent}", request.title, answer.status))
    };
    if answer.status == 500 && !is_a_file_error(operation, answer) {
        return complain("the server failed");
    }
    // A malformed request may be interpreted in any way, but its error has a message like any other.
    let broken = request.form == RequestForm::Broken;
    if request.described && !broken {
        // For a port, the service answers, or its absence does.
        let unknown = !operation.statuses.contains(&answer.status);
        if unknown && !is_common_status(answer.status) {
            return complain("this status is not described");
        }
    } else if answer.status >= 500 && !matches!(answer.status, 501..=504) && !broken {
        return complain("an undescribed method fails");
    }
    if answer.header("x-request-id").is_none() {
        return complain("there is no request id");
    }
    if answer.status >= 400 && !request.title.starts_with("HEAD") {
        return check_error_shape(operation, answer).or_else(|why| complain(&why));
    }
    Ok(())
}

/// Statuses that any path may return: the path is normalised to another one, or not found.
fn is_common_status(status: u16) -> bool {
    matches!(status, 400 | 401 | 404 | 405 | 408 | 413)
}

/// The kernel's own file errors are 500 in this API, as in the reference.
fn is_a_file_error(operation: &DocumentedOperation, answer: &FuzzResponse) -> bool {
    let Some(body) = answer.json() else { return false };
    let message = body["message"].as_str().unwrap_or_default();
    // A directory in which a session shall start is made, for which the disk may be too full by then.
    let of_files = operation.tag.starts_with("files") || message.starts_with("could not change directory ");
    of_files && body["code"] == "RUNTIME_ERROR" && !message.contains("the agent")
}

/// Whether an error says what went wrong, in the format of its API.
fn check_error_shape(operation: &DocumentedOperation, answer: &FuzzResponse) -> Result<(), String> {
    let text = String::from_utf8_lossy(&answer.body);
    if text.trim().is_empty() {
        return Err("an error without a word".to_owned());
    }
    if answer.header("content-type").is_some_and(|kind| kind.starts_with("text/plain")) {
        // The provisioner refuses a missing key in plain text, as its reference does.
        let keyless = operation.tag == "deerflow" && answer.status == 401;
        return if operation.tag == "egress" || keyless || operation.path.contains("{port}") {
            Ok(())
        } else {
            Err("an error as plain text".to_owned())
        };
    }
    let body = answer.json().ok_or("an error that is no object")?;
    let says = |field: &str| body[field].as_str().is_some_and(|text| !text.is_empty());
    let refusal = says("error") && answer.status == 401;
    // Requests that are malformed, or that a header sends elsewhere, are not answered by the API of their path.
    let is_common = says("code") && says("message");
    let is_fitting = match operation.path.split('/').nth(1) {
        Some("aio") if operation.path.ends_with("/mcp") && body["jsonrpc"] == "2.0" => {
            body["error"]["message"].as_str().is_some_and(|text| !text.is_empty())
        }
        Some("aio") => (body["success"] == false && says("message")) || body["detail"].is_array(),
        Some("api") => says("detail") || body["detail"].is_array(),
        _ => refusal,
    };
    if is_common || is_fitting { Ok(()) } else { Err("an error of another shape".to_owned()) }
}
