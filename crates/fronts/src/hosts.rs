//! Requests that name a sandbox port by host or header. Checked before any path.
//!
//! ```text
//! Host: {id}-{port}.domain            wildcard     OpenSandbox
//! Host: {port}-{id}.domain            wildcard     left to fronts that use this form
//! OpenSandbox-Ingress-To: {id}-{port} header       OpenSandbox
//! ```
//! A host is recognised by its first label; any other name below the domain is an ordinary name
//! of this server. A recognised request is never answered by an API, regardless of its path.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;

use crate::auth;
use crate::settings::{GatewayMode, Settings};

/// The label with which a request named a port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named(String);

/// Records the port that a request names, for the layers below.
pub(crate) async fn recognise(
    State(settings): State<Arc<Settings>>,
    mut request: Request,
    next: Next,
) -> Response {
    if let Some(named) = named(&settings, &request) {
        request.extensions_mut().insert(named);
    }
    next.run(request).await
}

/// Whether a request names a port, so that its path is not one of this server's.
pub(crate) fn is_named(request: &Request) -> bool {
    request.extensions().get::<Named>().is_some()
}

/// Answers requests that name a port, and passes all others on.
#[cfg(feature = "opensandbox")]
pub(crate) async fn answer(
    State(ports): State<crate::opensandbox::Ports>,
    mut request: Request,
    next: Next,
) -> Response {
    match request.extensions_mut().remove::<Named>() {
        Some(Named(label)) => ports.reach(&label, request).await,
        None => next.run(request).await,
    }
}

fn named(settings: &Settings, request: &Request) -> Option<Named> {
    let host = auth::host(request.uri(), request.headers());
    if let Some(label) = host.as_deref().and_then(|host| label(settings, host)) {
        return Some(Named(label));
    }
    let by_header = || {
        let value = routing_headers().iter().find_map(|name| request.headers().get(*name))?;
        Some(Named(String::from_utf8_lossy(value.as_bytes()).trim().to_owned()))
    };
    if settings.gateway.mode == GatewayMode::Header { by_header() } else { None }
}

/// Returns the first label of a host below the gateway's domain, if it names a port. The host's own
/// port is ignored: there may be a proxy in front of this server.
pub(crate) fn label(settings: &Settings, host: &str) -> Option<String> {
    let GatewayMode::Wildcard { domain } = &settings.gateway.mode else { return None };
    let host = auth::without_port(host).trim_end_matches('.').to_ascii_lowercase();
    let above = auth::without_port(domain).to_ascii_lowercase();
    let label = host.strip_suffix(&above)?.strip_suffix('.')?;
    (!label.contains('.') && is_claimed(label)).then(|| label.to_owned())
}

#[cfg(feature = "opensandbox")]
fn is_claimed(label: &str) -> bool {
    crate::opensandbox::claims(label)
}

#[cfg(not(feature = "opensandbox"))]
fn is_claimed(_: &str) -> bool {
    false
}

#[cfg(feature = "opensandbox")]
fn routing_headers() -> &'static [&'static str] {
    &crate::opensandbox::ROUTING_HEADERS
}

#[cfg(not(feature = "opensandbox"))]
fn routing_headers() -> &'static [&'static str] {
    &[]
}

#[cfg(all(test, feature = "opensandbox"))]
mod tests {
    use axum::body::Body;

    use super::*;

    const PORT: &str = "abcdefghij0123456789-8080";

    fn settings(mode: GatewayMode) -> Settings {
        let mut settings = Settings::new("127.0.0.1:8080".parse().unwrap());
        settings.gateway.mode = mode;
        settings
    }

    fn wildcard() -> Settings {
        settings(GatewayMode::Wildcard { domain: "boxes.example:8080".to_owned() })
    }

    #[test]
    fn first_label_below_the_domain_names_a_port() {
        for host in [
            format!("{PORT}.boxes.example"),
            format!("{PORT}.BOXES.example:8080"),
            format!("{}.boxes.example:9", PORT.to_ascii_uppercase()),
            format!("{PORT}.boxes.example."),
        ] {
            assert_eq!(label(&wildcard(), &host).as_deref(), Some(PORT), "{host}");
        }
        for host in [
            "boxes.example".to_owned(),
            "api.boxes.example".to_owned(),
            PORT.to_owned(),
            format!("{PORT}.other.example"),
            format!("{PORT}.a.boxes.example"),
            format!("{PORT}xboxes.example"),
            format!("8080-{PORT}.boxes.example"),
        ] {
            assert_eq!(label(&wildcard(), &host), None, "{host}");
        }
        assert_eq!(label(&settings(GatewayMode::Off), &format!("{PORT}.boxes.example")), None);
    }

    fn by_header(settings: &Settings, name: &str) -> Option<Named> {
        let request = Request::builder().header("host", "localhost").header(name, PORT);
        named(settings, &request.body(Body::empty()).unwrap())
    }

    #[test]
    fn header_names_a_port_only_in_header_mode() {
        for name in ["OpenSandbox-Ingress-To", "OPEN-SANDBOX-INGRESS"] {
            let named = by_header(&settings(GatewayMode::Header), name);
            assert_eq!(named, Some(Named(PORT.to_owned())), "{name}");
            assert_eq!(by_header(&settings(GatewayMode::Off), name), None);
            assert_eq!(by_header(&wildcard(), name), None);
        }
    }
}
