//! Identifies the caller. Every rule ends in an [`Owner`] or a refusal.
//!
//! With keys, the caller is the owner of the presented key. Without keys, every client that can
//! connect acts as the server's single owner, so only this machine may connect, and no web page: a
//! browser on this machine would carry requests from any site here. Hence the three rules of
//! [`guard_keyless_server`], and the one of [`authenticate_caller`] that excludes web pages from the API altogether, including
//! pages that a sandbox itself serves on the server's address.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use domain::Owner;
use http::{HeaderMap, StatusCode, header};
use service::Service;

use crate::hosts::{self, names_port};
use crate::kit::headers::{header_text, request_host, without_port};
use crate::registry;
use crate::server::connection::ClientPeer;
use crate::settings::HttpSettings;

/// Why a caller was not recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthError {
    NoKey,
    WrongKey,
    /// The server has no key, and the request comes from a web page that may not make it.
    Page,
}

/// Finds the owner of a key presented in any of the headers `names`.
pub(crate) fn authenticate_caller(
    service: &Service,
    headers: &HeaderMap,
    names: &[&str],
) -> Result<Owner, AuthError> {
    if service.has_no_keys() {
        return if comes_from_a_page(headers) { Err(AuthError::Page) } else { Ok(Owner::operator()) };
    }
    let mut presented = names.iter().filter_map(|name| header_text(headers, name)).peekable();
    if presented.peek().is_none() {
        return Err(AuthError::NoKey);
    }
    presented.find_map(|key| service.owner_by_key(key)).ok_or(AuthError::WrongKey)
}

/// Whether a browser sent this on behalf of a page, rather than for an address the user typed.
fn comes_from_a_page(headers: &HeaderMap) -> bool {
    let site = header_text(headers, "sec-fetch-site");
    headers.contains_key(header::ORIGIN) || site.is_some_and(|site| site != "none")
}

/// Whether a browser sent this on behalf of a page of another site. Such a page may link to a port,
/// but not load anything from it: requests without `Origin`, as for images or scripts, have effects
/// too.
pub(crate) fn comes_from_another_site(headers: &HeaderMap) -> bool {
    let foreign = matches!(header_text(headers, "sec-fetch-site"), Some("cross-site" | "same-site"));
    foreign && header_text(headers, "sec-fetch-mode") != Some("navigate")
}

#[derive(Clone)]
pub(crate) struct KeylessGuard {
    pub(crate) service: Service,
    pub(crate) settings: Arc<HttpSettings>,
}

/// Without a key, accepts requests only from this machine, only under its own names, and never
/// across sites.
pub(crate) async fn guard_keyless_server(
    State(guard): State<KeylessGuard>,
    request: Request,
    next: Next,
) -> Response {
    let open = registry::is_open_path(request.uri().path()) && !names_port(&request);
    if guard.service.has_no_keys() && !open {
        let peer = match request.extensions().get::<ClientPeer>() {
            Some(ClientPeer::Network(peer)) => Some(*peer),
            Some(ClientPeer::Operator | ClientPeer::SameUser) | None => None,
        };
        let host = request_host(request.uri(), request.headers());
        let origin = request.headers().get(header::ORIGIN).map(|value| value.to_str().unwrap_or("?"));
        if let Err(why) = check_keyless_request(&guard.settings, peer, host.as_deref(), origin) {
            let format = registry::error_format_of(&request);
            return format.build_error(StatusCode::FORBIDDEN, "FORBIDDEN", why);
        }
    }
    next.run(request).await
}

/// Like [`guard_keyless_server`], for a server of one sandbox that asks for no credentials. None of its paths is open to
/// others, and nothing at its address may be loaded by pages of other sites.
pub(crate) async fn guard_open_root(
    State(settings): State<Arc<HttpSettings>>,
    request: Request,
    next: Next,
) -> Response {
    let checked = match request.extensions().get::<ClientPeer>() {
        // No page can open a socket file.
        Some(ClientPeer::SameUser) => Ok(()),
        Some(ClientPeer::Network(peer)) => check_root_request(&settings, *peer, &request),
        Some(ClientPeer::Operator) | None => Err("the caller is unknown"),
    };
    match checked {
        Ok(()) => next.run(request).await,
        Err(why) => {
            let format = registry::error_format_of(&request);
            format.build_error(StatusCode::FORBIDDEN, "FORBIDDEN", why)
        }
    }
}

fn check_root_request(
    settings: &HttpSettings,
    peer: SocketAddr,
    request: &Request,
) -> Result<(), &'static str> {
    let headers = request.headers();
    let host = request_host(request.uri(), headers);
    let origin = headers.get(header::ORIGIN).map(|value| value.to_str().unwrap_or("?"));
    check_keyless_request(settings, Some(peer), host.as_deref(), origin)?;
    match comes_from_another_site(headers) {
        true => Err("a server without an API key refuses requests from other sites"),
        false => Ok(()),
    }
}

fn check_keyless_request(
    settings: &HttpSettings,
    peer: Option<SocketAddr>,
    host: Option<&str>,
    origin: Option<&str>,
) -> Result<(), &'static str> {
    if !peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback()) {
        return Err("a server without an API key accepts requests only from its own machine");
    }
    let Some(host) = host.filter(|host| is_own_host(settings, host)) else {
        return Err("a server without an API key accepts only a loopback name in `Host`");
    };
    match origin {
        Some(origin) if !is_same_origin(origin, host) => {
            Err("a server without an API key refuses requests from other sites")
        }
        _ => Ok(()),
    }
}

fn is_own_host(settings: &HttpSettings, host: &str) -> bool {
    if hosts::port_label_of_host(settings, host).is_some() {
        return true;
    }
    let name = without_port(host);
    let public = settings.public_address.as_deref();
    match name.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || address == settings.listen.ip() || public == Some(host),
        Err(_) => name.eq_ignore_ascii_case("localhost") || public.is_some_and(|p| p == host || p == name),
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
        let mut settings = HttpSettings::new("127.0.0.1:8080".parse().unwrap());
        settings.public_address = Some("box.example:80".to_owned());
        check_keyless_request(&settings, Some(peer.parse().unwrap()), Some(host), origin).is_ok()
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
