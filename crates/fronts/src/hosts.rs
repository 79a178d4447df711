//! Requests that name a sandbox port by host or header. Checked before any path.
//!
//! ```text
//! Host: {label}.domain          wildcard    the front whose row claims the label
//! {routing header}: {label}     header      the front whose row has the header
//! ```
//! A label such as `{id}-{port}` has the form of one front; the rows are in `registry.rs`. A host is
//! recognised by its first label; any other name below the domain is an ordinary name of this server.
//! A recognised request is never answered by an API, regardless of its path.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;

use crate::kit::headers::{request_host, without_port};
use crate::registry::{FRONTS, Front, PortHandler};
use crate::settings::{GatewayMode, HttpSettings};

/// The label with which a request named a port, and the front whose form it has.
#[derive(Clone)]
struct RequestPortLabel {
    front: &'static Front,
    label: String,
}

/// Records the port that a request names, for the layers below.
pub(crate) async fn record_port_label(
    State(settings): State<Arc<HttpSettings>>,
    mut request: Request,
    next: Next,
) -> Response {
    if let Some(named) = find_port_label(&settings, &request) {
        request.extensions_mut().insert(named);
    }
    next.run(request).await
}

/// Whether a request names a port, so that its path is not one of this server's.
pub(crate) fn names_port(request: &Request) -> bool {
    request.extensions().get::<RequestPortLabel>().is_some()
}

/// Returns the front in whose form a request names a port.
pub(crate) fn front_of_named_port(request: &Request) -> Option<&'static Front> {
    request.extensions().get::<RequestPortLabel>().map(|named| named.front)
}

/// The handlers of ports, by the name of their front.
pub(crate) type PortHandlers = Arc<Vec<(&'static str, PortHandler)>>;

/// Answers requests that name a port, and passes all others on.
pub(crate) async fn answer_named_port(
    State(ports): State<PortHandlers>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(named) = request.extensions_mut().remove::<RequestPortLabel>() else {
        return next.run(request).await;
    };
    match ports.iter().find(|(name, _)| *name == named.front.name) {
        Some((_, handler)) => handler(named.label, request).await,
        None => named.front.error_format.path_not_found(),
    }
}

fn find_port_label(settings: &HttpSettings, request: &Request) -> Option<RequestPortLabel> {
    let host = request_host(request.uri(), request.headers());
    if let Some((front, label)) = host.as_deref().and_then(|host| port_label_of_host(settings, host)) {
        return Some(RequestPortLabel { front, label });
    }
    let by_header = |front: &&'static Front| {
        let value = front.routing_headers.iter().find_map(|name| request.headers().get(*name))?;
        let label = String::from_utf8_lossy(value.as_bytes()).trim().to_owned();
        Some(RequestPortLabel { front, label })
    };
    if settings.gateway.mode == GatewayMode::Header { FRONTS.iter().find_map(by_header) } else { None }
}

/// Returns the first label of a host below the gateway's domain, if it names a port in the form of some
/// front. The host's own port is ignored: there may be a proxy in front of this server.
pub(crate) fn port_label_of_host(settings: &HttpSettings, host: &str) -> Option<(&'static Front, String)> {
    let GatewayMode::Wildcard { domain } = &settings.gateway.mode else { return None };
    let host = without_port(host).trim_end_matches('.').to_ascii_lowercase();
    let above = without_port(domain).to_ascii_lowercase();
    let label = host.strip_suffix(&above)?.strip_suffix('.')?;
    if label.contains('.') {
        return None;
    }
    let front = FRONTS.iter().find(|front| (front.claims_label)(label))?;
    Some((front, label.to_owned()))
}

#[cfg(all(test, feature = "opensandbox"))]
mod tests {
    use axum::body::Body;

    use super::*;

    const PORT: &str = "abcdefghij0123456789-8080";

    fn settings(mode: GatewayMode) -> HttpSettings {
        let mut settings = HttpSettings::new("127.0.0.1:8080".parse().unwrap());
        settings.gateway.mode = mode;
        settings
    }

    fn wildcard() -> HttpSettings {
        settings(GatewayMode::Wildcard { domain: "boxes.example:8080".to_owned() })
    }

    fn label_of(settings: &HttpSettings, host: &str) -> Option<String> {
        port_label_of_host(settings, host).map(|(_, label)| label)
    }

    #[test]
    fn first_label_below_the_domain_names_a_port() {
        for host in [
            format!("{PORT}.boxes.example"),
            format!("{PORT}.BOXES.example:8080"),
            format!("{}.boxes.example:9", PORT.to_ascii_uppercase()),
            format!("{PORT}.boxes.example."),
        ] {
            assert_eq!(label_of(&wildcard(), &host).as_deref(), Some(PORT), "{host}");
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
            assert_eq!(label_of(&wildcard(), &host), None, "{host}");
        }
        assert_eq!(label_of(&settings(GatewayMode::Off), &format!("{PORT}.boxes.example")), None);
    }

    fn by_header(settings: &HttpSettings, name: &str) -> Option<String> {
        let request = Request::builder().header("host", "localhost").header(name, PORT);
        find_port_label(settings, &request.body(Body::empty()).unwrap()).map(|named| named.label)
    }

    #[test]
    fn header_names_a_port_only_in_header_mode() {
        for name in ["OpenSandbox-Ingress-To", "OPEN-SANDBOX-INGRESS"] {
            let named = by_header(&settings(GatewayMode::Header), name);
            assert_eq!(named, Some(PORT.to_owned()), "{name}");
            assert_eq!(by_header(&settings(GatewayMode::Off), name), None);
            assert_eq!(by_header(&wildcard(), name), None);
        }
    }
}
