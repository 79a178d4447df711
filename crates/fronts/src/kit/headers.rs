//! Values of headers.

use http::HeaderMap;

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
