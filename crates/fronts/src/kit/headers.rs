//! Values of headers, and the headers that report what happened to a sandbox.

use http::{HeaderMap, HeaderName, HeaderValue};
use service::SandboxRevival;

/// Response header: the sandbox had died, and this was done: `restart`, `replace` or `files-lost`.
const RESTARTED_HEADER: HeaderName = HeaderName::from_static("coracle-restarted");
/// Response header: why the sandbox had died.
const RESTART_CAUSE_HEADER: HeaderName = HeaderName::from_static("coracle-restart-cause");
/// The header of a create response that reports a substituted image.
const STAND_IN_HEADER: HeaderName = HeaderName::from_static("coracle-image-stand-in");

/// Returns a header's value, if present and plain text.
pub(crate) fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Returns `host[:port]` as the client wrote it.
pub(crate) fn request_host(request_uri: &http::Uri, headers: &HeaderMap) -> Option<String> {
    let authority = request_uri.authority().map(|authority| authority.as_str().to_owned());
    authority.or_else(|| header_text(headers, "host").map(str::to_owned))
}

/// Returns the host without its port; an IPv6 address without its brackets.
pub(crate) fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// Returns the headers that report the restart of a dead sandbox.
pub(crate) fn restart_headers(revival: Option<SandboxRevival>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(revival) = revival {
        headers.insert(RESTARTED_HEADER, HeaderValue::from_static(revival.how.name()));
        headers.insert(RESTART_CAUSE_HEADER, HeaderValue::from_static(revival.cause.name()));
    }
    headers
}

/// Builds the header that reports a substituted image. Image names come from clients, so characters
/// that a header cannot hold are replaced.
pub(crate) fn stand_in_headers(sentence: Option<&str>) -> HeaderMap {
    let plain = |letter: char| if letter == ' ' || letter.is_ascii_graphic() { letter } else { '?' };
    let value = sentence.map(|sentence| sentence.chars().map(plain).collect::<String>());
    let value = value.and_then(|value| HeaderValue::try_from(value).ok());
    value.into_iter().map(|value| (STAND_IN_HEADER, value)).collect()
}
