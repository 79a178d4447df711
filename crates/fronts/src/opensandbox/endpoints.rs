//! Resolves the address of a sandbox port: always on this server, below the proxy path or in the
//! form of the gateway mode.

use std::collections::BTreeMap;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use domain::SandboxId;
use http::{HeaderMap, Uri};
use serde::Serialize;

use super::access::{Addressed, PortText, ROUTING_HEADERS, SECURE_ACCESS, SECURE_PURPOSE, token_of};
use super::address;
use super::problem::Problem;
use super::query::Query;
use super::types::Notes;
use super::{EGRESS_PORT, EXECD_PORT, Front};
use crate::auth;
use crate::settings::{ApiPorts, Gateway, GatewayMode};

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Endpoint {
    /// `host[:port]/path`, without a scheme.
    endpoint: String,
    /// Headers that the client must add to every request there: the sandbox's tokens, and its routing
    /// header.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<&'static str, String>,
}

/// `GET /sandboxes/{id}/endpoints/{port}`
pub(super) async fn resolve(
    State(front): State<Front>,
    at: Addressed,
    PortText(port): PortText,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Json<Endpoint>, Problem> {
    let query = Query::of(&uri);
    let by_path = query.is_on("use_server_proxy");
    let expires = expires(&query)?;
    if expires.is_some() && by_path {
        return Err(Problem::invalid("`expires` cannot be combined with `use_server_proxy`"));
    }
    let port = address::port(&port)?;
    let sandbox = front.service.get(&at.owner, &at.id)?;
    // The host that the client used is the one name known to work for it.
    let host = front.settings.public_address.clone().or_else(|| auth::host(&uri, &headers));
    let host = host.ok_or_else(|| Problem::invalid("the header `Host` is missing"))?;
    let (suffix, tokens) = match expires {
        // A signed address needs no tokens, so that it can be shared.
        Some(expires) => {
            let signed = front.routes.sign(&front.service, &at.id, port, expires)?;
            (format!("-{}-{}", signed.expires, signed.signature), BTreeMap::new())
        }
        None => (String::new(), tokens(&front, &at.id, port, &Notes::of(&sandbox))),
    };
    let mode = if by_path { &GatewayMode::Off } else { mode_of_port(&front.settings.gateway, port) };
    Ok(Json(endpoint(mode, host, &at.id, &format!("{port}{suffix}"), tokens)))
}

/// Returns the form in which a port is addressed.
fn mode_of_port(gateway: &Gateway, port: u16) -> &GatewayMode {
    let is_api = port == EXECD_PORT || port == EGRESS_PORT;
    if is_api && gateway.api_ports == ApiPorts::ByPath { &GatewayMode::Off } else { &gateway.mode }
}

/// Returns the token headers that open a port.
fn tokens(front: &Front, id: &SandboxId, port: u16, notes: &Notes) -> BTreeMap<&'static str, String> {
    let (header, purpose) = token_of(port);
    let secure = notes.secure_access.then_some((SECURE_ACCESS, SECURE_PURPOSE));
    let both = [Some((header, purpose)), secure].into_iter().flatten();
    both.map(|(header, purpose)| (header, front.service.token(id, purpose).expose().to_owned())).collect()
}

/// Builds the address in the form of the mode; `port` includes its signature.
fn endpoint(
    mode: &GatewayMode,
    host: String,
    id: &SandboxId,
    port: &str,
    mut headers: BTreeMap<&'static str, String>,
) -> Endpoint {
    let endpoint = match mode {
        GatewayMode::Off => format!("{host}/v1/sandboxes/{id}/proxy/{port}"),
        GatewayMode::Wildcard { domain } => format!("{id}-{port}.{domain}"),
        GatewayMode::Header => {
            headers.insert(ROUTING_HEADERS[0], format!("{id}-{port}"));
            host
        }
    };
    Endpoint { endpoint, headers }
}

/// Parses the time until which a signed address is valid; `None` if it need not be signed.
fn expires(query: &Query) -> Result<Option<u64>, Problem> {
    let Some(seconds) = query.number::<u64>("expires").map_err(Problem::invalid)? else { return Ok(None) };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    if seconds <= now.as_secs() {
        return Err(Problem::invalid("`expires` is not in the future"));
    }
    Ok(Some(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_the_form_of_its_mode() {
        let id = SandboxId::parse("abcdefghij0123456789").unwrap();
        for (mode, expected, header) in [
            (GatewayMode::Off, "h:1/v1/sandboxes/abcdefghij0123456789/proxy/80-e-s", None),
            (GatewayMode::Wildcard { domain: "d:2".to_owned() }, "abcdefghij0123456789-80-e-s.d:2", None),
            (GatewayMode::Header, "h:1", Some("abcdefghij0123456789-80-e-s")),
        ] {
            let made = endpoint(&mode, "h:1".to_owned(), &id, "80-e-s", BTreeMap::new());
            assert_eq!(made.endpoint, expected);
            assert_eq!(made.headers.get(ROUTING_HEADERS[0]).map(String::as_str), header);
        }
    }

    #[test]
    fn api_ports_are_addressed_by_path_if_configured() {
        let mode = GatewayMode::Wildcard { domain: "localhost:8080".to_owned() };
        let mut gateway = Gateway { mode: mode.clone(), ..Gateway::default() };
        assert_eq!(mode_of_port(&gateway, EXECD_PORT), &mode);
        gateway.api_ports = ApiPorts::ByPath;
        assert_eq!(mode_of_port(&gateway, EXECD_PORT), &GatewayMode::Off);
        assert_eq!(mode_of_port(&gateway, EGRESS_PORT), &GatewayMode::Off);
        assert_eq!(mode_of_port(&gateway, 8000), &mode);
    }
}
