//! Which requests of plain HTTP are passed on, and with which headers.
//!
//! A request names its host once. Everything that one server could read as another host, or that would make the connection
//! something else than a series of requests to that host, is refused here, since the parser of the server behind may
//! differ from ours.

use domain::DomainName;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRANSFER_ENCODING,
    UPGRADE,
};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Response, StatusCode, Uri, Version};

const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP_PORT: u16 = 80;

/// Why a request is not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestProblem {
    #[error("a request must name its host exactly once")]
    HostCount,
    #[error("the host of a request is not a name or an address")]
    InvalidHost,
    #[error("the host in the request line is not that in the header")]
    DifferentHosts,
    #[error("the port of the host is not the port of the connection")]
    DifferentPort,
    #[error("only requests for `http` can be made here")]
    Scheme,
    #[error("CONNECT is not possible here")]
    Connect,
    #[error("a body must have one length or be chunked")]
    BodyLength,
}

impl RequestProblem {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Connect => StatusCode::FORBIDDEN,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// The host of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestHost {
    Name(DomainName),
    /// An address, or none in a request of HTTP/1.0.
    Unnamed,
}

/// Checks the head of a request, and returns the host that it is for.
pub(super) fn check_request<B>(request: &Request<B>) -> Result<RequestHost, RequestProblem> {
    if request.method() == Method::CONNECT {
        return Err(RequestProblem::Connect);
    }
    check_body_headers(request.headers())?;
    let header = match single_host(request.headers())? {
        Some(header) => Some(header.parse::<Authority>().ok().ok_or(RequestProblem::InvalidHost)?),
        None if request.version() >= Version::HTTP_11 => return Err(RequestProblem::HostCount),
        None => None,
    };
    if let Some(line) = request.uri().authority() {
        if request.uri().scheme() != Some(&Scheme::HTTP) {
            return Err(RequestProblem::Scheme);
        }
        if header.as_ref().is_none_or(|header| !is_same_host(header, line)) {
            return Err(RequestProblem::DifferentHosts);
        }
    }
    let Some(host) = header else { return Ok(RequestHost::Unnamed) };
    if host.as_str().contains('@') {
        return Err(RequestProblem::InvalidHost);
    }
    if port_of(&host)? != HTTP_PORT {
        return Err(RequestProblem::DifferentPort);
    }
    parse_host(host.host())
}

fn single_host(headers: &HeaderMap) -> Result<Option<&str>, RequestProblem> {
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => Ok(None),
        (Some(host), None) => host.to_str().ok().map(Some).ok_or(RequestProblem::InvalidHost),
        (Some(_), Some(_)) => Err(RequestProblem::HostCount),
    }
}

fn parse_host(host: &str) -> Result<RequestHost, RequestProblem> {
    let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if address.parse::<std::net::IpAddr>().is_ok() {
        return Ok(RequestHost::Unnamed);
    }
    host.parse().ok().map(RequestHost::Name).ok_or(RequestProblem::InvalidHost)
}

fn is_same_host(one: &Authority, other: &Authority) -> bool {
    one.host().eq_ignore_ascii_case(other.host())
        && port_of(one) == port_of(other)
        && !other.as_str().contains('@')
}

fn port_of(authority: &Authority) -> Result<u16, RequestProblem> {
    match (authority.port_u16(), authority.as_str().ends_with(']')) {
        (Some(port), _) => Ok(port),
        (None, true) => Ok(HTTP_PORT),
        // A colon without a valid number behind it.
        (None, false) if authority.as_str().len() != authority.host().len() => {
            Err(RequestProblem::InvalidHost)
        }
        (None, false) => Ok(HTTP_PORT),
    }
}

/// A body has the length that its header says, or is chunked; never both, and nothing else.
fn check_body_headers(headers: &HeaderMap) -> Result<(), RequestProblem> {
    let encodings: Vec<&HeaderValue> = headers.get_all(TRANSFER_ENCODING).iter().collect();
    let has_length = headers.contains_key(CONTENT_LENGTH);
    match encodings.as_slice() {
        [] => Ok(()),
        [one] if !has_length && one.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err(RequestProblem::BodyLength),
    }
}

/// Rewrites the head of a request for the connection to the server. It keeps an upgrade, which then leads to the same host,
/// but not one to HTTP/2, whose requests could not be checked.
pub(super) fn prepare_request<B>(request: &mut Request<B>) {
    let upgrade = wanted_upgrade(request.headers());
    let headers = request.headers_mut();
    for name in
        [CONNECTION, KEEP_ALIVE, PROXY_CONNECTION, TE, TRANSFER_ENCODING, UPGRADE, HTTP2_SETTINGS, EXPECT]
    {
        headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    if request.uri().authority().is_some() {
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    }
}

fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut connection = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let is_named =
        connection.any(|value| value.split(',').any(|option| option.trim().eq_ignore_ascii_case("upgrade")));
    let mut protocols = headers.get_all(UPGRADE).iter();
    match (is_named, protocols.next(), protocols.next()) {
        (true, Some(protocol), None) if !names_http2(protocol) => Some(protocol.clone()),
        _ => None,
    }
}

fn names_http2(protocol: &HeaderValue) -> bool {
    let Ok(text) = protocol.to_str() else { return true };
    text.split(',').any(|one| {
        let one = one.trim().to_ascii_lowercase();
        one == "h2" || one == "h2c" || one.starts_with("http/")
    })
}

/// Removes the headers of a response that only concern the connection to the server.
pub(super) fn prepare_response<B>(response: &mut Response<B>) {
    *response.version_mut() = Version::HTTP_11;
    let is_upgrade = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    for name in [KEEP_ALIVE, PROXY_CONNECTION, TRANSFER_ENCODING] {
        headers.remove(name);
    }
    if !is_upgrade {
        headers.remove(CONNECTION);
        headers.remove(UPGRADE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, uri: &str, headers: &[(&str, &str)]) -> Request<()> {
        let mut builder = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).expect("a request")
    }

    fn named(text: &str) -> Result<RequestHost, RequestProblem> {
        Ok(RequestHost::Name(text.parse().expect("a name")))
    }

    #[test]
    fn host_is_named_exactly_once() {
        let check = |uri: &str, hosts: &[&str]| {
            let headers: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            check_request(&request("GET", uri, &headers))
        };
        assert_eq!(check("/", &["A.org"]), named("a.org"));
        assert_eq!(check("/", &["a.org:80"]), named("a.org"));
        assert_eq!(check("/", &["a.org."]), named("a.org"));
        assert_eq!(check("http://a.org/x", &["a.org"]), named("a.org"));
        assert_eq!(check("http://A.org:80/x", &["a.org"]), named("a.org"));
        assert_eq!(check("/", &["192.0.2.1"]), Ok(RequestHost::Unnamed));
        assert_eq!(check("/", &["[2001:db8::1]:80"]), Ok(RequestHost::Unnamed));
        assert_eq!(check("/", &[]), Err(RequestProblem::HostCount));
        assert_eq!(check("/", &["a.org", "a.org"]), Err(RequestProblem::HostCount));
        assert_eq!(check("/", &["a.org", "b.org"]), Err(RequestProblem::HostCount));
        assert_eq!(check("http://b.org/", &["a.org"]), Err(RequestProblem::DifferentHosts));
        assert_eq!(check("http://u@a.org/", &["a.org"]), Err(RequestProblem::DifferentHosts));
        assert_eq!(check("http://a.org:8080/", &["a.org"]), Err(RequestProblem::DifferentHosts));
        assert_eq!(check("https://a.org/", &["a.org"]), Err(RequestProblem::Scheme));
        assert_eq!(check("/", &["a.org:8080"]), Err(RequestProblem::DifferentPort));
        for wrong in [
            "",
            "a.org, b.org",
            "a.org b.org",
            "a.org:x",
            "a.org:",
            "u@a.org",
            "2130706433",
            "a..org",
            "bücher.de",
        ] {
            assert_eq!(check("/", &[wrong]), Err(RequestProblem::InvalidHost), "{wrong}");
        }
    }

    #[test]
    fn only_old_requests_need_no_host() {
        let mut old = request("GET", "/", &[]);
        *old.version_mut() = Version::HTTP_10;
        assert_eq!(check_request(&old), Ok(RequestHost::Unnamed));
    }

    #[test]
    fn connect_and_ambiguous_bodies_are_refused() {
        let connect = request("CONNECT", "b.org:443", &[("host", "a.org")]);
        assert_eq!(check_request(&connect), Err(RequestProblem::Connect));
        for headers in [
            &[("transfer-encoding", "chunked"), ("content-length", "3")][..],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
        ] {
            let all = [&[("host", "a.org")], headers].concat();
            assert_eq!(check_request(&request("POST", "/", &all)), Err(RequestProblem::BodyLength));
        }
    }

    #[test]
    fn upgrades_are_kept_except_to_http2() {
        let upgrade = |protocol: &str| {
            let mut request = request(
                "GET",
                "/",
                &[("connection", "keep-alive, Upgrade"), ("upgrade", protocol), ("http2-settings", "x")],
            );
            prepare_request(&mut request);
            assert!(!request.headers().contains_key("http2-settings"));
            request.headers().get(UPGRADE).map(|value| value.to_str().expect("text").to_owned())
        };
        assert_eq!(upgrade("websocket"), Some("websocket".to_owned()));
        assert_eq!(upgrade("h2c"), None);
        assert_eq!(upgrade("websocket, H2C"), None);
        assert_eq!(upgrade("HTTP/2.0"), None);
    }

    #[test]
    fn absolute_form_becomes_the_path_alone() {
        let mut request = request("GET", "http://a.org/x?y", &[("host", "a.org"), ("connection", "close")]);
        prepare_request(&mut request);
        assert_eq!(request.uri(), "/x?y");
        assert!(!request.headers().contains_key(CONNECTION));
    }
}
