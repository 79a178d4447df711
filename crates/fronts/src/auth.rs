//! Identifies the caller. Every rule ends in an [`Owner`] or a refusal.
//!
//! With keys, the caller is the owner of the presented key. Without keys, every client that can
//! connect acts as the server's single owner, so only this machine may connect, and no web page: a
//! browser on this machine would carry requests from any site here. Hence the three rules of
//! [`guard`], and the one of [`caller`] that excludes web pages from the API altogether, including
//! pages that a sandbox itself serves on the server's address.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use domain::Owner;
use http::{HeaderMap, StatusCode, header};
use service::Service;

use crate::answer;
use crate::hosts::{self, is_named};
use crate::serve::Peer;
use crate::settings::Settings;

/// The headers in which a client may present an API key.
pub(crate) const KEY_HEADERS: [&str; 2] = ["open-sandbox-api-key", "x-api-key"];

/// Why a caller was not recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NoKey,
    WrongKey,
    /// The server has no key, and the request comes from a web page that may not make it.
    Page,
}

/// Finds the owner of a key presented in any of the headers `names`.
pub(crate) fn caller(service: &Service, headers: &HeaderMap, names: &[&str]) -> Result<Owner, Refusal> {
    if service.keyless() {
        return if comes_from_a_page(headers) { Err(Refusal::Page) } else { Ok(Owner::single()) };
    }
    let mut presented = names.iter().filter_map(|name| text(headers, name)).peekable();
    if presented.peek().is_none() {
        return Err(Refusal::NoKey);
    }
    presented.find_map(|key| service.owner_by_key(key)).ok_or(Refusal::WrongKey)
}

/// Whether a browser sent this on behalf of a page, rather than for an address the user typed.
fn comes_from_a_page(headers: &HeaderMap) -> bool {
    let site = text(headers, "sec-fetch-site");
    headers.contains_key(header::ORIGIN) || site.is_some_and(|site| site != "none")
}

/// Whether a browser sent this on behalf of a page of another site. Such a page may link to a port,
/// but not load anything from it: requests without `Origin`, as for images or scripts, have effects
/// too.
pub(crate) fn comes_from_another_site(headers: &HeaderMap) -> bool {
    let foreign = matches!(text(headers, "sec-fetch-site"), Some("cross-site" | "same-site"));
    foreign && text(headers, "sec-fetch-mode") != Some("navigate")
}

/// Returns a header's value, if present and plain text.
pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Returns `host[:port]` as the client wrote it.
pub(crate) fn host(request_uri: &http::Uri, headers: &HeaderMap) -> Option<String> {
    let authority = request_uri.authority().map(|authority| authority.as_str().to_owned());
    authority.or_else(|| text(headers, "host").map(str::to_owned))
}

#[derive(Clone)]
pub(crate) struct Guard {
    pub(crate) service: Service,
    pub(crate) settings: Arc<Settings>,
}

/// Without a key, accepts requests only from this machine, only under its own names, and never
/// across sites.
pub(crate) async fn guard(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/health" | "/version" | "/openapi.json" | "/docs")
        && !is_named(&request);
    if guard.service.keyless() && !open {
        let peer = match request.extensions().get::<Peer>() {
            Some(Peer::Network(peer)) => Some(*peer),
            Some(Peer::Operator) | None => None,
        };
        let host = host(request.uri(), request.headers());
        let origin = request.headers().get(header::ORIGIN).map(|value| value.to_str().unwrap_or("?"));
        if let Err(why) = judge(&guard.settings, peer, host.as_deref(), origin) {
            return answer::error(StatusCode::FORBIDDEN, "FORBIDDEN", why);
        }
    }
    next.run(request).await
}

fn judge(
    settings: &Settings,
    peer: Option<SocketAddr>,
    host: Option<&str>,
    origin: Option<&str>,
) -> Result<(), &'static str> {
    if !peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback()) {
        return Err("a server without an API key accepts requests only from its own machine");
    }
    let Some(host) = host.filter(|host| is_ours(settings, host)) else {
        return Err("a server without an API key accepts only a loopback name in `Host`");
    };
    match origin {
        Some(origin) if !is_same_origin(origin, host) => {
            Err("a server without an API key refuses requests from other sites")
        }
        _ => Ok(()),
    }
}

fn is_ours(settings: &Settings, host: &str) -> bool {
    if hosts::label(settings, host).is_some() {
        return true;
    }
    let name = without_port(host);
    let public = settings.public_address.as_deref();
    match name.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || address == settings.listen.ip() || public == Some(host),
        Err(_) => name.eq_ignore_ascii_case("localhost") || public.is_some_and(|p| p == host || p == name),
    }
}

/// Returns the host without its port; an IPv6 address without its brackets.
pub(crate) fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

fn is_same_origin(origin: &str, host: &str) -> bool {
    let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(peer: &str, host: &str, origin: Option<&str>) -> bool {
        let mut settings = Settings::new("127.0.0.1:8080".parse().unwrap());
        settings.public_address = Some("box.example:80".to_owned());
        judge(&settings, Some(peer.parse().unwrap()), Some(host), origin).is_ok()
    }

    #[test]
    fn only_loopback_peers_and_own_host_names_are_accepted() {
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "box.example:80"]
        {
            assert!(check("127.0.0.1:5", host, None), "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example", "10.0.0.1:8080", "", "127.0.0.1.nip.io", "[::2]"]
        {
            assert!(!check("127.0.0.1:5", host, None), "{host}");
        }
        assert!(!check("10.0.0.9:5", "localhost", None));
        assert!(check("[::ffff:127.0.0.1]:5", "localhost", None));
    }

    #[test]
    fn another_site_is_refused() {
        assert!(check("127.0.0.1:5", "localhost:8080", Some("http://localhost:8080")));
        for origin in
            ["http://evil.example", "null", "http://localhost:3000", "http://localhost:8080.evil.example"]
        {
            assert!(!check("127.0.0.1:5", "localhost:8080", Some(origin)), "{origin}");
        }
    }

    #[test]
    fn another_site_may_link_to_a_port_but_not_load_from_it() {
        let foreign = |site: &'static str, mode: &'static str| {
            comes_from_another_site(&HeaderMap::from_iter([
                (http::HeaderName::from_static("sec-fetch-site"), http::HeaderValue::from_static(site)),
                (http::HeaderName::from_static("sec-fetch-mode"), http::HeaderValue::from_static(mode)),
            ]))
        };
        assert!(foreign("cross-site", "no-cors") && foreign("same-site", "cors"));
        assert!(foreign("cross-site", "websocket"));
        assert!(!foreign("cross-site", "navigate") && !foreign("same-origin", "cors"));
        assert!(!foreign("none", "navigate") && !comes_from_another_site(&HeaderMap::new()));
    }

    #[test]
    fn pages_are_recognised_by_browser_headers() {
        let page = |name: &'static str, value: &'static str| {
            comes_from_a_page(&HeaderMap::from_iter([(
                http::HeaderName::from_static(name),
                http::HeaderValue::from_static(value),
            )]))
        };
        assert!(page("origin", "http://localhost:8080"));
        assert!(page("sec-fetch-site", "same-origin"));
        assert!(!page("sec-fetch-site", "none"));
        assert!(!page("accept", "*/*"));
    }
}
