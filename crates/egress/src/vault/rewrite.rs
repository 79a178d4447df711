//! Changes of one request on its way out: framing headers, substitutions, the headers of the binding.

use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use domain::{DomainName, UrlScheme};
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_TYPE, EXPECT, HOST, HeaderName,
    HeaderValue, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, StatusCode, Uri};
use zeroize::Zeroizing;

use super::host_plan::{BodyReplacements, Injection};
use super::replace::Replacements;

/// Headers about one connection and not about the message. See RFC 9110, section 7.6.1.
const HOP_BY_HOP: [&str; 6] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "transfer-encoding",
];

/// Why a request is answered here and not sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) message: &'static str,
}

/// Whether a message asks to change the protocol of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProtocolChange {
    None,
    Upgrade,
}

const WRONG_HOST: Refusal = Refusal {
    status: StatusCode::MISDIRECTED_REQUEST,
    message: "this connection is for another host than the request names",
};
const ONE_HOST: Refusal =
    Refusal { status: StatusCode::BAD_REQUEST, message: "the request must name its host exactly once" };
const NO_CONNECT: Refusal =
    Refusal { status: StatusCode::METHOD_NOT_ALLOWED, message: "CONNECT is not possible on this connection" };
const TOO_LONG: Refusal =
    Refusal { status: StatusCode::URI_TOO_LONG, message: "the address of the request is too long" };

/// Checks that a request is for the host of its connection, wherever it names one.
pub(super) fn check_host(parts: &Parts, scheme: UrlScheme, host: &DomainName) -> Result<(), Refusal> {
    if parts.method == http::Method::CONNECT {
        return Err(NO_CONNECT);
    }
    let mut headers = parts.headers.get_all(HOST).iter();
    let header = headers.next();
    if headers.next().is_some() || (header.is_none() && parts.uri.authority().is_none()) {
        return Err(ONE_HOST);
    }
    let header = header.map(|value| Authority::try_from(value.as_bytes()).map_err(|_error| WRONG_HOST));
    let named = header.transpose()?;
    for authority in named.iter().chain(parts.uri.authority()) {
        let same_host = authority.host().parse::<DomainName>().is_ok_and(|name| name == *host);
        let same_port = match authority.port() {
            Some(port) => port.as_u16() == scheme.default_port(),
            None => !authority.as_str().ends_with(':'),
        };
        if !same_host || !same_port || authority.as_str().contains('@') {
            return Err(WRONG_HOST);
        }
    }
    Ok(())
}

/// Removes the headers that concern one connection alone; keeps those of an upgrade if there is one.
pub(super) fn remove_hop_headers(headers: &mut HeaderMap) -> ProtocolChange {
    let options: Vec<String> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|option| option.trim().to_ascii_lowercase())
        .collect();
    let upgrade = headers.get(UPGRADE).cloned().filter(|protocol| {
        // h2c would let requests pass that nobody looks at.
        let is_h2c = protocol.as_bytes().to_ascii_lowercase().windows(3).any(|part| part == b"h2c");
        options.iter().any(|option| option == "upgrade") && !is_h2c
    });
    let trailers = headers.get_all(TE).iter().any(|value| {
        value
            .to_str()
            .is_ok_and(|value| value.split(',').any(|one| one.trim().eq_ignore_ascii_case("trailers")))
    });
    let framed_by_chunks = headers.contains_key(TRANSFER_ENCODING);
    let listed = options.iter().filter_map(|option| HeaderName::from_bytes(option.as_bytes()).ok());
    // What frames the message or names its target is not the client's to remove.
    for name in listed.filter(|name| *name != HOST && *name != http::header::CONTENT_LENGTH) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    headers.remove(TE);
    headers.remove(UPGRADE);
    if framed_by_chunks {
        headers.remove(http::header::CONTENT_LENGTH);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    match upgrade {
        Some(protocol) => {
            headers.insert(UPGRADE, protocol);
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            ProtocolChange::Upgrade
        }
        None => ProtocolChange::None,
    }
}

/// Applies a binding to all of a request but its body.
pub(super) fn inject(parts: &mut Parts, injection: &Injection) -> Result<(), Refusal> {
    replace_in_uri(&mut parts.uri, injection)?;
    if !injection.header.is_empty() {
        for (name, value) in &mut parts.headers {
            replace_in_header(name, value, &injection.header);
        }
    }
    for (name, value) in &injection.headers {
        parts.headers.insert(name, value.clone());
    }
    // The server shall not wait for a decision that has been made, and secrets cannot be found in a compressed response.
    parts.headers.remove(EXPECT);
    parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    Ok(())
}

fn replace_in_uri(uri: &mut Uri, injection: &Injection) -> Result<(), Refusal> {
    let path = injection.path.replace(uri.path().as_bytes());
    let query = uri.query().and_then(|query| injection.query.replace(query.as_bytes()));
    if path.is_none() && query.is_none() {
        return Ok(());
    }
    let mut text = Zeroizing::new(Vec::new());
    text.extend_from_slice(path.as_ref().map_or(uri.path().as_bytes(), |path| path));
    if let Some(old) = uri.query() {
        text.push(b'?');
        text.extend_from_slice(query.as_ref().map_or(old.as_bytes(), |query| query));
    }
    let mut changed = uri.clone().into_parts();
    changed.path_and_query = Some(PathAndQuery::try_from(text.as_slice()).map_err(|_error| TOO_LONG)?);
    *uri = Uri::from_parts(changed).map_err(|_error| TOO_LONG)?;
    Ok(())
}

fn replace_in_header(name: &HeaderName, value: &mut HeaderValue, replacements: &Replacements) {
    let replaced = match replacements.replace(value.as_bytes()) {
        Some(replaced) => Some(replaced),
        None if name == AUTHORIZATION => replace_in_basic(value.as_bytes(), replacements),
        None => None,
    };
    let Some(Ok(mut replaced)) = replaced.map(|bytes| HeaderValue::from_bytes(&bytes)) else { return };
    replaced.set_sensitive(true);
    *value = replaced;
}

/// Replaces placeholders in the user name or password of basic authentication, which clients encode.
fn replace_in_basic(value: &[u8], replacements: &Replacements) -> Option<Zeroizing<Vec<u8>>> {
    let (scheme, encoded) = value.split_at_checked(6)?;
    let pair = scheme.eq_ignore_ascii_case(b"basic ").then(|| BASE64_STANDARD.decode(encoded).ok())??;
    let replaced = replacements.replace(&pair)?;
    Some(Zeroizing::new(format!("Basic {}", BASE64_STANDARD.encode(&*replaced)).into_bytes()))
}

/// The replacements for a body with these headers; `None` if it passes as it is.
pub(super) fn body_replacements(headers: &HeaderMap, bodies: &BodyReplacements) -> Option<Arc<Replacements>> {
    if bodies.raw.is_empty() || is_encoded(headers) {
        return None;
    }
    let content_type = headers.get(CONTENT_TYPE).map(|value| value.as_bytes().to_ascii_lowercase());
    let content_type = String::from_utf8(content_type.unwrap_or_default()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    let is_json =
        media_type.ends_with("/json") || media_type.ends_with("+json") || media_type.ends_with("json-seq");
    if media_type.starts_with("multipart/") {
        None
    } else if is_json || media_type.ends_with("ndjson") {
        Some(Arc::clone(&bodies.json))
    } else if media_type == "application/x-www-form-urlencoded" {
        Some(Arc::clone(&bodies.form))
    } else {
        Some(Arc::clone(&bodies.raw))
    }
}

/// Whether the bytes of a body are another form of its content, in which no text can be found.
pub(super) fn is_encoded(headers: &HeaderMap) -> bool {
    let is_identity = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    headers.get_all(CONTENT_ENCODING).iter().any(|value| !is_identity(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::get(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn host() -> DomainName {
        "api.example.org".parse().expect("a name")
    }

    #[test]
    fn request_must_name_the_host_of_its_connection() {
        let check = |uri: &str, hosts: &[&str]| {
            let headers: Vec<(&str, &str)> = hosts.iter().map(|host| ("host", *host)).collect();
            check_host(&parts(uri, &headers), UrlScheme::Https, &host())
                .map_err(|refusal| refusal.status.as_u16())
        };
        assert_eq!(check("/x", &["api.example.org"]), Ok(()));
        assert_eq!(check("/x", &["API.example.org.:443"]), Ok(()));
        assert_eq!(check("https://api.example.org/x", &[]), Ok(()));
        assert_eq!(check("https://api.example.org/x", &["api.example.org"]), Ok(()));
        assert_eq!(check("/x", &[]), Err(400));
        assert_eq!(check("/x", &["api.example.org", "api.example.org"]), Err(400));
        for wrong in [
            "other.example.org",
            "api.example.org:80",
            "192.0.2.1",
            "",
            "api.example.org:",
            "x@api.example.org",
        ] {
            assert_eq!(check("/x", &[wrong]), Err(421), "{wrong}");
        }
        assert_eq!(check("https://other.example.org/x", &["api.example.org"]), Err(421));
        assert_eq!(check("https://api.example.org/x", &["other.example.org"]), Err(421));
        assert_eq!(check("https://api.example.org:8443/x", &[]), Err(421));
    }

    #[test]
    fn headers_of_the_connection_are_removed() {
        let remove = |headers: &[(&str, &str)]| {
            let mut parts = parts("/", headers);
            let change = remove_hop_headers(&mut parts.headers);
            let mut names: Vec<String> = parts.headers.keys().map(ToString::to_string).collect();
            names.sort();
            (change, names.join(" "))
        };
        let (none, upgrade) = (ProtocolChange::None, ProtocolChange::Upgrade);
        for (headers, change, left) in [
            (&[("connection", "close, X-Own"), ("x-own", "1"), ("x-other", "1")][..], none, "x-other"),
            (
                &[("connection", "host, content-length"), ("host", "a"), ("content-length", "1")],
                none,
                "content-length host",
            ),
            (&[("transfer-encoding", "chunked"), ("content-length", "5"), ("a", "b")], none, "a"),
            (&[("proxy-authorization", "x"), ("keep-alive", "x"), ("te", "gzip")], none, ""),
            (&[("te", "gzip, trailers")], none, "te"),
            (&[("connection", "Upgrade"), ("upgrade", "websocket")], upgrade, "connection upgrade"),
            (&[("upgrade", "websocket")], none, ""),
            (
                &[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "x")],
                none,
                "",
            ),
        ] {
            assert_eq!(remove(headers), (change, left.to_owned()), "{headers:?}");
        }
    }

    #[test]
    fn placeholders_are_replaced_in_their_surfaces() {
        let replacements = |value: &str| {
            let mut replacements = Replacements::default();
            replacements.add("__KEY__", Zeroizing::new(value.as_bytes().to_vec()));
            replacements
        };
        let injection = Injection {
            headers: vec![(AUTHORIZATION, HeaderValue::from_static("Bearer t"))],
            path: replacements("p%2F"),
            query: replacements("q%26"),
            header: replacements("header"),
            ..Injection::default()
        };
        let sent =
            [("x-key", "a __KEY__"), ("authorization", "Bearer of-the-client"), ("accept-encoding", "br")];
        let mut parts = parts("https://api.example.org/a/__KEY__/b?k=__KEY__&l=1", &sent);
        inject(&mut parts, &injection).expect("a short address");
        assert_eq!(parts.uri, "https://api.example.org/a/p%2F/b?k=q%26&l=1");
        assert_eq!(parts.headers["x-key"], "a header");
        assert_eq!(parts.headers.get_all(AUTHORIZATION).iter().collect::<Vec<_>>(), ["Bearer t"]);
        assert_eq!(parts.headers[ACCEPT_ENCODING], "identity");
    }

    #[test]
    fn placeholder_in_basic_authentication_is_replaced() {
        let mut replacements = Replacements::default();
        replacements.add("__KEY__", Zeroizing::new(b"secret".to_vec()));
        let mut value =
            HeaderValue::from_str(&format!("Basic {}", BASE64_STANDARD.encode("me:__KEY__"))).expect("valid");
        replace_in_header(&AUTHORIZATION, &mut value, &replacements);
        assert_eq!(value, format!("Basic {}", BASE64_STANDARD.encode("me:secret")).as_str());
        let mut other = HeaderValue::from_static("Basic");
        replace_in_header(&AUTHORIZATION, &mut other, &replacements);
        assert_eq!(other, "Basic");
    }

    #[test]
    fn body_is_replaced_as_its_type_needs() {
        let set = |value: &str| {
            let mut replacements = Replacements::default();
            replacements.add("__KEY__", Zeroizing::new(value.as_bytes().to_vec()));
            Arc::new(replacements)
        };
        let bodies = BodyReplacements { raw: set("raw"), json: set("json"), form: set("form") };
        for (headers, expected) in [
            (&[("content-type", "application/json; charset=utf-8")][..], Some("json")),
            (&[("content-type", "application/vnd.api+JSON")], Some("json")),
            (&[("content-type", "application/x-www-form-urlencoded")], Some("form")),
            (&[("content-type", "text/plain")], Some("raw")),
            (&[], Some("raw")),
            (&[("content-type", "multipart/form-data; boundary=x")], None),
            (&[("content-type", "text/plain"), ("content-encoding", "gzip")], None),
            (&[("content-type", "text/plain"), ("content-encoding", "identity")], Some("raw")),
        ] {
            let replaced = body_replacements(&parts("/", headers).headers, &bodies)
                .map(|set| set.replace(b"__KEY__").expect("a placeholder"));
            assert_eq!(
                replaced.as_ref().map(|text| text.as_slice()),
                expected.map(str::as_bytes),
                "{headers:?}"
            );
        }
    }
}
