//! Filters and rewrites headers between a client and a service.

use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::target::{AddressForm, AddressGrant, PortTarget};
use crate::kit::headers::header_text;
use crate::registry;

/// Headers that belong to one connection, not to the message. `Trailer` is not one of them: the fields
/// it names follow the body end to end.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Headers about the way to this server. Those that fronts use are in the registry.
const OUTER_HEADERS: [&str; 2] = ["forwarded", "host"];

/// Headers that a browser sends to every sandbox at the server's own address, so that one sandbox
/// could act as the client of another. A sandbox with its own address may receive them.
const BROWSER_CREDENTIAL_HEADERS: [&str; 2] = ["authorization", "cookie"];

/// Headers with which a page of one sandbox could affect everything at this address or next to it:
/// intercept its requests, clear what the browser stored for it, move it elsewhere, or receive reports
/// about it.
const UNSAFE_RESPONSE_HEADERS: [&str; 6] =
    ["service-worker-allowed", "clear-site-data", "strict-transport-security", "alt-svc", "nel", "report-to"];

/// Converts the headers of a request to those that the service gets.
pub(super) fn rewrite_request_headers(
    target: &PortTarget,
    headers: &mut HeaderMap,
    is_our_key: impl Fn(&str) -> bool,
) {
    let trailers = accepts_trailers(headers);
    strip_hop_by_hop(headers);
    for name in registry::stripped_headers().chain(OUTER_HEADERS) {
        headers.remove(name);
    }
    if target.form == AddressForm::Path {
        for name in BROWSER_CREDENTIAL_HEADERS {
            headers.remove(name);
        }
    }
    drop_foreign_referer(target, headers);
    drop_our_keys(headers, is_our_key);
    let forwarded: Vec<_> =
        headers.keys().filter(|name| name.as_str().starts_with("x-forwarded-")).cloned().collect();
    for name in forwarded {
        headers.remove(name);
    }
    // Trailers pass through this server, so a client that accepts them gets them.
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
}

/// Converts the headers of a response to those that the client gets. `host` is the name the client
/// used for this server.
pub(super) fn rewrite_response_headers(target: &PortTarget, host: Option<&str>, headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    for name in UNSAFE_RESPONSE_HEADERS {
        headers.remove(name);
    }
    rewrite_location(target, host, headers);
    strip_cookie_domains(headers);
    set_referrer_policy(target, headers);
}

/// Keeps the browser from sending an address that opens something to other sites, or to other
/// sandboxes that share the address. A service may decide otherwise only about an address that opens
/// nothing else.
fn set_referrer_policy(target: &PortTarget, headers: &mut HeaderMap) {
    let policy = match target.form {
        AddressForm::Path => "no-referrer",
        AddressForm::Gateway => "same-origin",
    };
    let is_set = match target.grant {
        AddressGrant::Nothing => false,
        AddressGrant::Port => !headers.contains_key(header::REFERRER_POLICY),
        AddressGrant::Sandbox => true,
    };
    if is_set {
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static(policy));
    }
}

/// Drops a `Referer` from another sandbox. By path, a page of another sandbox may have linked here,
/// and its address, which may be signed, must not leak to this one.
fn drop_foreign_referer(target: &PortTarget, headers: &mut HeaderMap) {
    let Some(referer) = headers.get(header::REFERER) else { return };
    let own = target.form == AddressForm::Gateway
        || referer.to_str().is_ok_and(|referer| is_below(target, referer));
    if !own {
        headers.remove(header::REFERER);
    }
}

/// Whether an address belongs to the port, under any name of this server.
fn is_below(target: &PortTarget, address: &str) -> bool {
    let path = address.split_once("://").and_then(|(_, rest)| Some(&rest[rest.find('/')?..]));
    let rest = path.and_then(|path| path.strip_prefix(&target.mount));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?']))
}

/// Returns the protocol that a request wants to upgrade to.
pub(super) fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = named_by_connection(headers).any(|name| name == header::UPGRADE);
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

/// Removes hop-by-hop headers, including those that `Connection` names.
pub(super) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = named_by_connection(headers).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn named_by_connection(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).filter_map(|name| HeaderName::try_from(name.trim()).ok())
}

fn accepts_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case("trailers"))
}

/// Removes keys of this server from headers such as `X-API-Key`, wherever they occur among the values.
/// Such a header may be the service's own, so other values pass.
fn drop_our_keys(headers: &mut HeaderMap, is_ours: impl Fn(&str) -> bool) {
    for name in registry::shared_key_headers() {
        let header::Entry::Occupied(entry) = headers.entry(name) else { continue };
        let (name, values) = entry.remove_entry_mult();
        let theirs: Vec<_> = values.filter(|value| !value.to_str().is_ok_and(&is_ours)).collect();
        for value in theirs {
            headers.append(name.clone(), value);
        }
    }
}

/// Keeps a redirect to the service's own root below the address by which it is reached. The service
/// may identify itself by the name it listens on, or by the one the client used.
fn rewrite_location(target: &PortTarget, host: Option<&str>, headers: &mut HeaderMap) {
    let Some(location) = header_text(headers, "location") else { return };
    let port = target.port;
    let names = [format!("localhost:{port}"), format!("127.0.0.1:{port}"), format!("[::1]:{port}")];
    let path = names.iter().map(String::as_str).chain(host).find_map(|name| path_below(location, name));
    let path =
        path.or_else(|| (location.starts_with('/') && !location.starts_with("//")).then_some(location));
    let Some(path) = path else { return };
    let path = if path.is_empty() && target.mount.is_empty() { "/" } else { path };
    let is_below = |mount: &str| path.strip_prefix(mount).is_some_and(|rest| rest.starts_with(['/', '?']));
    let mount = if is_below(&target.mount) { "" } else { &target.mount };
    if let Ok(value) = HeaderValue::try_from(format!("{mount}{path}")) {
        headers.insert(header::LOCATION, value);
    }
}

/// Returns what follows `scheme://name` in a location, if it names exactly that.
fn path_below<'a>(location: &'a str, name: &str) -> Option<&'a str> {
    let rest = ["http://", "https://"].iter().find_map(|scheme| location.strip_prefix(scheme))?;
    let (authority, path) = rest.split_at_checked(name.len())?;
    let whole = path.is_empty() || path.starts_with(['/', '?', '#']);
    (authority.eq_ignore_ascii_case(name) && whole).then_some(path)
}

/// Removes `Domain` from cookies. A cookie for the whole domain would be sent to everything next to
/// this address: to other sandboxes behind the gateway, or to anything else below the server's domain.
fn strip_cookie_domains(headers: &mut HeaderMap) {
    let header::Entry::Occupied(entry) = headers.entry(header::SET_COOKIE) else { return };
    let (name, values) = entry.remove_entry_mult();
    let values: Vec<_> = values.filter_map(|value| without_domain(&value)).collect();
    for value in values {
        headers.append(name.clone(), value);
    }
}

/// Returns a cookie without its `Domain`; `None` if it is not text and cannot be checked.
fn without_domain(cookie: &HeaderValue) -> Option<HeaderValue> {
    let is_domain = |part: &&str| {
        let name = part.split('=').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case("domain")
    };
    let mut parts = cookie.to_str().ok()?.split(';');
    let first = parts.next()?;
    let kept: Vec<&str> = std::iter::once(first).chain(parts.filter(|part| !is_domain(part))).collect();
    HeaderValue::try_from(kept.join(";")).ok()
}

#[cfg(test)]
mod tests {
    use domain::SandboxId;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    fn target(mount: &str) -> PortTarget {
        let form = if mount.is_empty() { AddressForm::Gateway } else { AddressForm::Path };
        let id = SandboxId::from_entropy([1; 20]);
        let grant = AddressGrant::Nothing;
        PortTarget { id, port: 3000, mount: mount.to_owned(), path: String::new(), form, grant }
    }

    #[test]
    fn hop_by_hop_headers_are_removed_with_those_named() {
        let mut headers = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("x-public", "2"),
            ("trailer", "x-sum"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["x-public", "trailer"]);
    }

    #[test]
    fn trailers_are_requested_if_the_client_accepts_them() {
        for (te, expected) in [("gzip, Trailers", true), ("gzip", false)] {
            let mut headers = headers(&[("te", te), ("connection", "TE")]);
            rewrite_request_headers(&target("/m"), &mut headers, |_| false);
            assert_eq!(header_text(&headers, "te"), expected.then_some("trailers"), "{te}");
        }
    }

    #[test]
    fn browser_credentials_reach_only_sandboxes_with_their_own_address() {
        for (mount, expected) in [("/m", false), ("", true)] {
            let mut headers = headers(&[("cookie", "a=1"), ("authorization", "Bearer x")]);
            rewrite_request_headers(&target(mount), &mut headers, |_| false);
            assert_eq!(headers.contains_key("cookie") && headers.contains_key("authorization"), expected);
            assert_eq!(headers.is_empty(), !expected);
        }
    }

    #[test]
    fn server_keys_are_dropped_at_any_position() {
        let name = "x-api-key";
        let mut headers = headers(&[(name, "theirs"), (name, "ours"), (name, "other"), (name, "ours")]);
        drop_our_keys(&mut headers, |key| key == "ours");
        assert_eq!(headers.get_all(name).iter().collect::<Vec<_>>(), ["theirs", "other"]);
        drop_our_keys(&mut headers, |_| true);
        assert!(!headers.contains_key(name));
    }

    #[test]
    fn upgrade_needs_both_headers() {
        let asked = |pairs: &[_]| upgrade_of(&headers(pairs)).is_some();
        assert!(asked(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]));
        assert!(!asked(&[("upgrade", "websocket")]));
        assert!(!asked(&[("connection", "upgrade")]));
    }

    #[test]
    fn redirects_stay_below_the_port() {
        for (location, expected, alone) in [
            ("/login?x=1", "/m/login?x=1", "/login?x=1"),
            ("http://localhost:3000/login", "/m/login", "/login"),
            ("http://LOCALHOST:3000/login", "/m/login", "/login"),
            ("https://[::1]:3000?a", "/m?a", "?a"),
            ("http://127.0.0.1:3000", "/m", "/"),
            ("http://box.example:8080/a#b", "/m/a#b", "/a#b"),
            ("/m/login", "/m/login", "/m/login"),
            ("/mm", "/m/mm", "/mm"),
            ("//evil.example/x", "//evil.example/x", "//evil.example/x"),
            ("http://localhost:30001/x", "http://localhost:30001/x", "http://localhost:30001/x"),
            ("http://localhost:3000@evil.example", "http://localhost:3000@evil.example", ""),
            ("https://example.com/x", "https://example.com/x", "https://example.com/x"),
            ("relative", "relative", "relative"),
        ] {
            for (mount, expected) in
                [("/m", expected), ("", alone)].into_iter().filter(|pair| !pair.1.is_empty())
            {
                let mut headers = headers(&[("location", location)]);
                rewrite_location(&target(mount), Some("box.example:8080"), &mut headers);
                assert_eq!(headers[header::LOCATION], expected, "{location} below {mount}");
            }
        }
    }

    #[test]
    fn cookies_stay_with_their_sandbox() {
        for mount in ["", "/m"] {
            let mut headers =
                headers(&[("set-cookie", "a=1; DOMAIN=.example; Path=/"), ("set-cookie", "b=domain=2")]);
            rewrite_response_headers(&target(mount), None, &mut headers);
            let kept: Vec<_> = headers.get_all("set-cookie").iter().collect();
            assert_eq!(kept, ["a=1; Path=/", "b=domain=2"], "{mount}");
        }
    }

    #[test]
    fn addresses_that_open_something_are_not_sent_as_referrer() {
        for (mount, policy) in [("", "same-origin"), ("/m", "no-referrer")] {
            for (grant, written, expected) in [
                (AddressGrant::Nothing, None, None),
                (AddressGrant::Port, None, Some(policy)),
                (AddressGrant::Port, Some("unsafe-url"), Some("unsafe-url")),
                (AddressGrant::Sandbox, None, Some(policy)),
                (AddressGrant::Sandbox, Some("unsafe-url"), Some(policy)),
            ] {
                let target = PortTarget { grant, ..target(mount) };
                let mut headers: HeaderMap = written
                    .map(|policy| (header::REFERRER_POLICY, HeaderValue::from_static(policy)))
                    .into_iter()
                    .collect();
                rewrite_response_headers(&target, None, &mut headers);
                assert_eq!(header_text(&headers, "referrer-policy"), expected, "{grant:?} {written:?}");
            }
        }
    }

    #[test]
    fn referers_of_other_sandboxes_are_dropped() {
        for (referer, expected) in [
            ("http://box.example/m/page?x", true),
            ("https://box.example:8080/m", true),
            ("http://box.example/m?x", true),
            ("http://box.example/mm/page", false),
            ("http://box.example/other/m/", false),
            ("http://box.example/", false),
            ("http://box.example", false),
            ("http://box.example?://x/m/", false),
            ("/m/page", false),
            ("", false),
        ] {
            for (mount, expected) in [("/m", expected), ("", true)] {
                let mut headers = headers(&[("referer", referer)]);
                rewrite_request_headers(&target(mount), &mut headers, |_| false);
                assert_eq!(headers.contains_key("referer"), expected, "{referer} at {mount:?}");
            }
        }
    }
}
