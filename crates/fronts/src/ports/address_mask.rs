//! Hides an address that opens more than one port from the service behind that port.
//!
//! The service gets `Host: localhost:{port}`. Where a request names its own address in `Referer` or `Origin`, it gets the
//! same name, so that checks of these headers against `Host` still pass. Another port of the same sandbox is shown as
//! `http://localhost:{that port}`, and any other host next to it as the opaque origin `null`.

use http::{HeaderMap, HeaderValue, header};

use super::target::{AddressForm, AddressGrant, PortTarget};
use crate::kit::headers::{header_text, without_port};

/// The origin of a page, and what the service got instead of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MaskedOrigin {
    original: HeaderValue,
    shown: String,
}

/// Whether the name by which the client reached the port must not be shown to the service.
pub(super) fn hides_host(target: &PortTarget) -> bool {
    target.grant == AddressGrant::Sandbox && target.form == AddressForm::Gateway
}

/// Replaces the address in the headers of a request. A `Referer` below a path was checked to be below the port's mount.
pub(super) fn mask_request_address(
    target: &PortTarget,
    own_host: Option<&str>,
    headers: &mut HeaderMap,
) -> Option<MaskedOrigin> {
    if target.grant != AddressGrant::Sandbox {
        return None;
    }
    mask_referer(target, own_host, headers);
    drop_headers_with_address(target, own_host, headers);
    if target.form == AddressForm::Path {
        // The origin is that of this server.
        return None;
    }
    let origin = headers.get(header::ORIGIN)?.clone();
    let shown = match origin.to_str() {
        Ok(origin) => shown_origin(target, own_host?, origin)?,
        Err(_not_text) => OPAQUE_ORIGIN.to_owned(),
    };
    headers.insert(header::ORIGIN, HeaderValue::try_from(&shown).ok()?);
    Some(MaskedOrigin { original: origin, shown })
}

/// An origin that stands for no address.
const OPAQUE_ORIGIN: &str = "null";

impl MaskedOrigin {
    /// Allows the page's real origin if the service has allowed the one that it got.
    pub(super) fn restore_allowed_origin(&self, headers: &mut HeaderMap) {
        let is_shown =
            header_text(headers, header::ACCESS_CONTROL_ALLOW_ORIGIN.as_str()) == Some(&self.shown);
        if is_shown && self.shown != OPAQUE_ORIGIN {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, self.original.clone());
        }
    }
}

/// Drops what a proxy in front of this server has added, such as the original path or host.
fn drop_headers_with_address(target: &PortTarget, own_host: Option<&str>, headers: &mut HeaderMap) {
    let own_label = own_host.and_then(|host| host.split('.').next()).map(str::to_ascii_lowercase);
    let address = match target.form {
        AddressForm::Path => Some(target.mount.clone()),
        AddressForm::Gateway => own_label,
    };
    let Some(address) = address.filter(|address| !address.is_empty()) else { return };
    let shows_address = |value: &HeaderValue| {
        String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase().contains(&address)
    };
    let kept_names = [header::HOST, header::ORIGIN, header::REFERER];
    let found: Vec<_> = headers
        .iter()
        .filter(|(name, value)| !kept_names.contains(name) && shows_address(value))
        .map(|(name, _)| name.clone())
        .collect();
    for name in found {
        headers.remove(name);
    }
}

fn mask_referer(target: &PortTarget, own_host: Option<&str>, headers: &mut HeaderMap) {
    let Some(referer) = headers.remove(header::REFERER) else { return };
    let Some((origin, path)) = referer.to_str().ok().and_then(split_origin) else { return };
    let shown = match target.form {
        AddressForm::Path => path
            .strip_prefix(&target.mount)
            .map(|rest| (format!("http://localhost:{}", target.port), rest.to_owned())),
        AddressForm::Gateway => match own_host.map(|host| shown_origin(target, host, origin)) {
            None => None,
            Some(None) => Some((origin.to_owned(), path.to_owned())),
            Some(Some(shown)) => (shown != OPAQUE_ORIGIN).then(|| (shown, path.to_owned())),
        },
    };
    let shown = shown.and_then(|(origin, path)| HeaderValue::try_from(format!("{origin}{path}")).ok());
    if let Some(shown) = shown {
        headers.insert(header::REFERER, shown);
    }
}

/// Splits `scheme://authority/path`.
fn split_origin(address: &str) -> Option<(&str, &str)> {
    let begin = address.find("://")? + 3;
    let end = address[begin..].find(['/', '?', '#']).map_or(address.len(), |end| begin + end);
    Some(address.split_at(end))
}

/// What the service gets instead of an origin; `None` if the origin may be shown.
fn shown_origin(target: &PortTarget, own_host: &str, origin: &str) -> Option<String> {
    let (_, authority) = origin.split_once("://")?;
    // A proxy in front of this server may write another port into `Host` than the browser into the origin.
    let name = |host: &str| without_port(host).trim_end_matches('.').to_ascii_lowercase();
    let (authority, own_host) = (name(authority), name(own_host));
    let local = |port: u16| Some(format!("http://localhost:{port}"));
    if authority == own_host {
        return local(target.port);
    }
    // The host of a port is that of its sandbox with the port's number before it.
    let sandbox_host = own_host.strip_prefix(&format!("{}-", target.port)).unwrap_or(&own_host);
    if let Some((port, host)) = authority.split_once('-')
        && host == sandbox_host
        && let Ok(port) = port.parse()
    {
        return local(port);
    }
    let is_next_to_it = match (authority.split_once('.'), own_host.split_once('.')) {
        (Some((_, above)), Some((_, own_above))) => above == own_above,
        _ => false,
    };
    is_next_to_it.then(|| OPAQUE_ORIGIN.to_owned())
}

#[cfg(test)]
mod tests {
    use domain::SandboxId;

    use super::*;

    const HOST: &str = "8080-aio-h-mac.boxes.example:9000";

    fn target(mount: &str) -> PortTarget {
        let form = if mount.is_empty() { AddressForm::Gateway } else { AddressForm::Path };
        let (id, grant) = (SandboxId::from_entropy([1; 20]), AddressGrant::Sandbox);
        PortTarget { id, port: 8080, mount: mount.to_owned(), path: String::new(), form, grant }
    }

    fn headers(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::try_from(value).unwrap())])
    }

    #[test]
    fn headers_of_proxies_show_no_address_of_a_sandbox() {
        for (mount, value, is_kept) in [
            ("", "/a", true),
            ("", "8080-AIO-h-mac.boxes.example", false),
            ("/aio/h.mac/proxy/8080", "/aio/h.mac/proxy/8080/a", false),
            ("/aio/h.mac/proxy/8080", "/aio/other/a", true),
        ] {
            let mut headers = headers(header::HeaderName::from_static("x-original-uri"), value);
            mask_request_address(&target(mount), Some(HOST), &mut headers);
            assert_eq!(headers.len() == 1, is_kept, "{mount} {value}");
        }
    }

    #[test]
    fn another_port_in_the_host_changes_nothing() {
        let mut headers = headers(header::ORIGIN, "https://8080-aio-h-mac.boxes.example");
        mask_request_address(&target(""), Some(HOST), &mut headers);
        assert_eq!(headers[header::ORIGIN], "http://localhost:8080");
    }

    #[test]
    fn referer_shows_no_address_of_a_sandbox() {
        for (mount, referer, expected) in [
            ("", "http://8080-aio-h-mac.boxes.example:9000/a?b", Some("http://localhost:8080/a?b")),
            ("", "http://3000-AIO-h-mac.boxes.example:9000/a", Some("http://localhost:3000/a")),
            ("", "http://aio-h-mac.boxes.example:9000/terminal", None),
            ("", "http://3000-aio-other-mac.boxes.example:9000/", None),
            ("", "https://example.org/a", Some("https://example.org/a")),
            ("", "nonsense", None),
            (
                "/aio/h.mac/proxy/8080",
                "http://server/aio/h.mac/proxy/8080/a",
                Some("http://localhost:8080/a"),
            ),
        ] {
            let mut headers = headers(header::REFERER, referer);
            assert_eq!(mask_request_address(&target(mount), Some(HOST), &mut headers), None);
            assert_eq!(header_text(&headers, "referer"), expected, "{referer}");
        }
    }

    #[test]
    fn origin_is_masked_and_allowed_again() {
        for (origin, shown, restored) in [
            ("http://8080-aio-h-mac.boxes.example:9000", "http://localhost:8080", true),
            ("https://3000-aio-h-mac.boxes.example:9000", "http://localhost:3000", true),
            ("http://3000-aio-other-mac.boxes.example:9000", "null", false),
            ("http://aio-h-mac.boxes.example:9000", "null", false),
            ("https://example.org", "https://example.org", false),
        ] {
            let mut request = headers(header::ORIGIN, origin);
            let masked = mask_request_address(&target(""), Some(HOST), &mut request);
            assert_eq!(request[header::ORIGIN], shown, "{origin}");
            let mut response = headers(header::ACCESS_CONTROL_ALLOW_ORIGIN, shown);
            if let Some(masked) = masked {
                masked.restore_allowed_origin(&mut response);
            }
            let expected = if restored { origin } else { shown };
            assert_eq!(response[header::ACCESS_CONTROL_ALLOW_ORIGIN], expected, "{origin}");
        }
    }

    #[test]
    fn addresses_that_open_only_their_port_are_shown() {
        let target = PortTarget { grant: AddressGrant::Port, ..target("") };
        let mut headers = headers(header::ORIGIN, "http://8080-aio-h-mac.boxes.example:9000");
        assert_eq!(mask_request_address(&target, Some(HOST), &mut headers), None);
        assert_eq!(headers[header::ORIGIN], "http://8080-aio-h-mac.boxes.example:9000");
        assert!(!hides_host(&target));
    }
}
