//! The addresses of sandboxes as clients use them.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use http::request::Parts;

use super::ProvisionerState;
use crate::aio::address::SandboxAddress;
use crate::kit::headers::{header_text, request_host};
use crate::server::connection::ClientPeer;
use crate::settings::{GatewayMode, HttpSettings};

/// How the client of a request reaches this server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::aio) struct UrlOrigin {
    scheme: &'static str,
    /// `host[:port]`
    authority: String,
    gateway_domain: Option<String>,
}

impl UrlOrigin {
    /// The address of the sandbox's API, without a slash at its end.
    pub(in crate::aio) fn sandbox_url(&self, address: &SandboxAddress) -> String {
        match &self.gateway_domain {
            Some(domain) => format!("{}://{}.{domain}", self.scheme, address.to_label(None)),
            None => format!("{}://{}{}", self.scheme, self.authority, address.to_path()),
        }
    }

    pub(in crate::aio) fn of_request(settings: &HttpSettings, parts: &Parts) -> Self {
        // The host that the client used is the one name known to work for it. A client of a socket used none.
        let by_network = matches!(parts.extensions.get(), Some(ClientPeer::Network(_)));
        let authority = settings.public_address.clone();
        let authority = authority.or_else(|| request_host(&parts.uri, &parts.headers).filter(|_| by_network));
        let forwarded = header_text(&parts.headers, "x-forwarded-proto");
        let is_https = forwarded.is_some_and(|scheme| scheme.trim().eq_ignore_ascii_case("https"));
        Self {
            scheme: if is_https && settings.trusts_proxy(&parts.extensions) { "https" } else { "http" },
            authority: authority.unwrap_or_else(|| settings.listen.to_string()),
            gateway_domain: match &settings.gateway.mode {
                GatewayMode::Wildcard { domain } => Some(domain.clone()),
                GatewayMode::Off | GatewayMode::Header => None,
            },
        }
    }
}

impl FromRequestParts<ProvisionerState> for UrlOrigin {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &ProvisionerState) -> Result<Self, Infallible> {
        Ok(Self::of_request(&state.settings, parts))
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::settings::GatewaySettings;

    fn origin_of(peer: &str, headers: &[(&str, &str)], change: impl FnOnce(&mut HttpSettings)) -> UrlOrigin {
        let mut settings = HttpSettings::new("127.0.0.1:8080".parse().unwrap());
        change(&mut settings);
        let mut request = Request::builder().uri("/api/sandboxes");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        parts.extensions.insert(ClientPeer::Network(peer.parse().unwrap()));
        UrlOrigin::of_request(&settings, &parts)
    }

    #[track_caller]
    fn check(origin: &UrlOrigin, expected: &str) {
        let address = SandboxAddress::parse("abcdefghij0123456789.0123456789abcdef0123456789abcdef").unwrap();
        assert_eq!(origin.sandbox_url(&address), expected);
    }

    const PATH: &str = "/aio/abcdefghij0123456789.0123456789abcdef0123456789abcdef";

    #[test]
    fn n123_url_names_the_host_that_the_client_used() {
        check(&origin_of("10.0.0.1:5", &[], |_| {}), &format!("http://127.0.0.1:8080{PATH}"));
        let origin = origin_of("10.0.0.1:5", &[("host", "box:81")], |_| {});
        check(&origin, &format!("http://box:81{PATH}"));
        let public =
            |settings: &mut HttpSettings| settings.public_address = Some("public.example".to_owned());
        let origin = origin_of("10.0.0.1:5", &[("host", "box:81")], public);
        check(&origin, &format!("http://public.example{PATH}"));
    }

    #[test]
    fn n123_url_has_a_host_of_its_own_behind_a_wildcard_gateway() {
        let origin = origin_of("10.0.0.1:5", &[("host", "box:81")], |settings| {
            let mode = GatewayMode::Wildcard { domain: "box.example:81".to_owned() };
            settings.gateway = GatewaySettings { mode, ..GatewaySettings::default() };
        });
        let label = "aio-abcdefghij0123456789-0123456789abcdef0123456789abcdef";
        check(&origin, &format!("http://{label}.box.example:81"));
    }

    #[test]
    fn only_trusted_proxies_change_the_scheme() {
        let headers = [("host", "box"), ("x-forwarded-proto", "https")];
        check(&origin_of("10.0.0.1:5", &headers, |_| {}), &format!("http://box{PATH}"));
        let trusting =
            |settings: &mut HttpSettings| settings.trusted_proxies = vec!["10.0.0.0/8".parse().unwrap()];
        check(&origin_of("10.0.0.1:5", &headers, trusting), &format!("https://box{PATH}"));
        check(&origin_of("127.0.0.1:5", &headers, |_| {}), &format!("https://box{PATH}"));
        let plain = [("host", "box"), ("x-forwarded-proto", "ftp")];
        check(&origin_of("127.0.0.1:5", &plain, |_| {}), &format!("http://box{PATH}"));
    }
}
