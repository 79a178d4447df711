//! Finds the credentials of a request, and removes them from it.
//!
//! Only values that are ours are removed: a service behind a port may have an `Authorization` of its own.

use axum::extract::Request;
use http::{HeaderMap, HeaderValue, Uri, header, uri::PathAndQuery};

use super::{AccessControl, AccessProof};

/// AIO's own header for the key.
pub(in crate::aio) const KEY_HEADER_NAME: &str = "x-aio-api-key";
/// In it a proxy names the address of the request that it asks about.
const ORIGINAL_URI_HEADER: &str = "x-original-uri";
const KEY_PARAMETER: &str = "api_key";
const TICKET_PARAMETER: &str = "ticket";

/// Checks the credentials of a request and removes them; `None` if none of them is valid.
pub(super) fn take_credentials(access: &AccessControl, request: &mut Request) -> Option<AccessProof> {
    let by_header = take_from_headers(access, request.headers_mut());
    let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
    let (query, by_query) = take_from_query(access, path, query);
    if let Some(query) = query {
        *request.uri_mut() = replace_query(request.uri(), &query)?;
    }
    // Both were looked at, so that nothing of ours is left in the request.
    by_header.or(by_query)
}

/// Checks the credentials of the request that a proxy asks about, in its headers and in the address that the proxy
/// names, and removes them.
pub(super) fn take_original_credentials(
    access: &AccessControl,
    headers: &mut HeaderMap,
) -> Option<AccessProof> {
    let original = headers.get(ORIGINAL_URI_HEADER).and_then(|uri| uri.to_str().ok()).map(str::to_owned);
    take_from_headers(access, headers).or_else(|| {
        let original = original?;
        let (path, query) = original.split_once('?')?;
        take_from_query(access, path, query.split('#').next().unwrap_or_default()).1
    })
}

fn take_from_headers(access: &AccessControl, headers: &mut HeaderMap) -> Option<AccessProof> {
    let settings = &access.settings;
    let is_key = |value: &[u8]| settings.api_key.as_ref().is_some_and(|key| key.is_equal_to(value));
    let own_header = headers.get_all(KEY_HEADER_NAME).iter().any(|value| is_key(value.as_bytes()));
    headers.remove(KEY_HEADER_NAME);
    headers.remove(ORIGINAL_URI_HEADER);
    let (mut is_valid, mut theirs) = (own_header, Vec::new());
    if let header::Entry::Occupied(entry) = headers.entry(header::AUTHORIZATION) {
        for value in entry.remove_entry_mult().1 {
            let bearer = bearer_token(&value);
            let (valid, ours) = match (bearer, &settings.jwt_public_key) {
                (Some(bearer), _) if is_key(bearer.as_bytes()) => (true, true),
                (Some(bearer), Some(key)) => (key.is_valid_token(bearer), key.is_signed_token(bearer)),
                (Some(_), None) | (None, _) => (false, false),
            };
            is_valid |= valid;
            if !ours {
                theirs.push(value);
            }
        }
    }
    for value in theirs {
        headers.append(header::AUTHORIZATION, value);
    }
    shorten_referer(headers);
    is_valid.then_some(AccessProof::Credential)
}

fn bearer_token(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// A page that was opened with credentials in its address names them in the requests it makes.
fn shorten_referer(headers: &mut HeaderMap) {
    let referer = headers.get(header::REFERER).and_then(|value| value.to_str().ok());
    let Some((address, query)) = referer.and_then(|referer| referer.split_once('?')) else { return };
    let names = form_urlencoded::parse(query.as_bytes()).any(|(name, _)| is_credential_name(&name));
    if let Some(shortened) = names.then(|| HeaderValue::from_str(address).ok()).flatten() {
        headers.insert(header::REFERER, shortened);
    }
}

fn is_credential_name(name: &str) -> bool {
    name == KEY_PARAMETER || name == TICKET_PARAMETER
}

/// Returns the query without credentials of ours, if it contains any, and what they prove.
fn take_from_query(access: &AccessControl, path: &str, query: &str) -> (Option<String>, Option<AccessProof>) {
    let (mut kept, mut proof) = (Vec::new(), None);
    let mut is_changed = false;
    for pair in query.split('&') {
        match check_pair(access, path, pair) {
            Some(found) => {
                is_changed = true;
                // A key proves more than a ticket.
                if proof != Some(AccessProof::Credential) {
                    proof = Some(found);
                }
            }
            None => kept.push(pair),
        }
    }
    (is_changed.then(|| kept.join("&")), proof)
}

fn check_pair(access: &AccessControl, path: &str, pair: &str) -> Option<AccessProof> {
    let (name, value) = form_urlencoded::parse(pair.as_bytes()).next()?;
    if name == KEY_PARAMETER {
        let key = access.settings.api_key.as_ref()?;
        return key.is_equal_to(value.as_bytes()).then_some(AccessProof::Credential);
    }
    (name == TICKET_PARAMETER && access.tickets.redeem(&value, path)).then_some(AccessProof::Ticket)
}

fn replace_query(uri: &Uri, query: &str) -> Option<Uri> {
    let separator = if query.is_empty() { "" } else { "?" };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(format!("{}{separator}{query}", uri.path())).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::Body;
    use serde_json::json;

    use super::*;
    use crate::aio::access::{AccessSettings, TicketScope};

    fn access() -> AccessControl {
        let values = json!({"api_key": "k3y+/&"});
        AccessControl::new(AccessSettings::from_values(values.as_object().unwrap()).unwrap())
    }

    fn request(uri: &str, headers: &[(&'static str, &str)]) -> Request {
        let builder = Request::builder().uri(uri);
        let builder = headers.iter().fold(builder, |builder, (name, value)| builder.header(*name, *value));
        builder.body(Body::empty()).unwrap()
    }

    #[test]
    fn key_is_accepted_in_three_places_and_removed() {
        for (uri, headers) in [
            ("/x?a=1&b", &[("x-aio-api-key", "k3y+/&")][..]),
            ("/x?a=1&b", &[("authorization", "Bearer k3y+/&")]),
            ("/x?a=1&b", &[("authorization", "bearer  k3y+/&")]),
            ("/x?a=1&api_key=k3y%2B%2F%26&b", &[]),
            ("/x?api_key=k3y%2b/%26&a=1&b&api_key=k3y%2B%2F%26", &[("x-aio-api-key", "k3y+/&")]),
        ] {
            let mut request = request(uri, headers);
            assert_eq!(take_credentials(&access(), &mut request), Some(AccessProof::Credential), "{uri}");
            assert_eq!(request.uri(), "/x?a=1&b");
            assert!(request.headers().is_empty(), "{:?}", request.headers());
        }
        let mut alone = request("/x?api_key=k3y%2B%2F%26", &[]);
        assert!(take_credentials(&access(), &mut alone).is_some());
        assert_eq!(alone.uri(), "/x");
    }

    #[test]
    fn values_of_others_are_refused_and_kept() {
        let headers =
            &[("authorization", "Basic eDp5"), ("authorization", "Bearer theirs"), ("cookie", "k3y+/&")];
        let mut foreign = request("/x?ticket=t&api_key=theirs&api_key=", headers);
        assert_eq!(take_credentials(&access(), &mut foreign), None);
        assert_eq!(foreign.uri(), "/x?ticket=t&api_key=theirs&api_key=");
        assert_eq!(foreign.headers().get_all("authorization").iter().count(), 2);
    }

    #[test]
    fn ticket_is_used_up_even_beside_a_key() {
        let access = access();
        let ticket = access.tickets.issue(TicketScope::Everything, Duration::from_secs(30)).unwrap();
        let uri = format!("/x?ticket={ticket}&ticket=own");
        let mut first = request(&uri, &[("x-aio-api-key", "k3y+/&")]);
        assert_eq!(take_credentials(&access, &mut first), Some(AccessProof::Credential));
        assert_eq!(first.uri(), "/x?ticket=own");
        assert_eq!(take_credentials(&access, &mut request(&uri, &[])), None);
    }

    #[test]
    fn original_uri_is_read_only_where_a_proxy_asks() {
        let access = access();
        let named = [("x-original-uri", "/vnc/?api_key=k3y%2B%2F%26#x")];
        let mut asked = request("/auth", &named);
        assert!(take_original_credentials(&access, asked.headers_mut()).is_some());
        assert_eq!(take_credentials(&access, &mut request("/v1/sandbox", &named)), None);
    }

    #[test]
    fn referer_loses_a_query_with_credentials() {
        for (referer, expected) in [
            ("http://h/p?api_key=x", "http://h/p"),
            ("http://h/p?a=1&ticket=x", "http://h/p"),
            ("http://h/p?a=1", "http://h/p?a=1"),
        ] {
            let mut request = request("/x", &[("referer", referer)]);
            take_credentials(&access(), &mut request);
            assert_eq!(request.headers()["referer"], expected);
        }
    }
}
