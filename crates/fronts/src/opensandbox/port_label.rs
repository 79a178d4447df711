//! A label that names a sandbox port, as used in hosts and headers.
//!
//! ```text
//! {id}-{port}                          OpenSandbox-Ingress-To, or before the gateway's domain
//! {id}-{port}-{expires}-{signature}    a signed route
//! ```

use domain::SandboxId;
use http::StatusCode;

use super::problem::Problem;
use super::signed_routes::RouteSignature;

/// A parsed label.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PortAddress {
    pub(super) id: SandboxId,
    pub(super) port: u16,
    pub(super) signed: Option<RouteSignature>,
}

impl PortAddress {
    pub(super) fn parse(label: &str) -> Result<Self, Problem> {
        let (id, rest) = label.split_once('-').unwrap_or((label, ""));
        let id = SandboxId::parse(id).ok().ok_or_else(|| Problem::no_sandbox(id))?;
        let (port, signed) = parse_port_and_signature(rest)?;
        Ok(Self { id, port, signed })
    }
}

/// Whether the first label of a host belongs to this front. Ids begin with a letter, so a label that
/// begins with a port does not.
pub(super) fn claims_label(label: &str) -> bool {
    label.split_once('-').is_some_and(|(id, _)| SandboxId::parse(id).is_ok())
}

/// Parses `{port}` or `{port}-{expires}-{signature}`.
pub(super) fn parse_port_and_signature(text: &str) -> Result<(u16, Option<RouteSignature>), Problem> {
    let mut parts = text.split('-');
    let port = parts.next().unwrap_or_default();
    let signed = match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => None,
        (Some(expires), Some(signature), None) => {
            Some(RouteSignature { expires: expires.to_owned(), signature: signature.to_owned() })
        }
        _ => return Err(invalid_port()),
    };
    Ok((self::parse_port(port)?, signed))
}

/// Parses a port in its usual decimal form.
pub(super) fn parse_port(text: &str) -> Result<u16, Problem> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| plain).ok_or_else(invalid_port)
}

fn invalid_port() -> Problem {
    let message = "port must be a number from 1 to 65535";
    Problem::new(StatusCode::BAD_REQUEST, "DOCKER::INVALID_PORT", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "abcdefghij0123456789";

    #[test]
    fn label_is_parsed_with_and_without_a_signature() {
        let label = PortAddress::parse(&format!("{ID}-8080")).unwrap();
        assert_eq!((label.id.as_str(), label.port, label.signed), (ID, 8080, None));
        let label = PortAddress::parse(&format!("{ID}-1-t2k-0011aabbz")).unwrap();
        let signed = RouteSignature { expires: "t2k".to_owned(), signature: "0011aabbz".to_owned() };
        assert_eq!((label.port, label.signed), (1, Some(signed)));
    }

    #[test]
    fn malformed_labels_are_refused() {
        for (label, status) in [
            (format!("{ID}-0"), StatusCode::BAD_REQUEST),
            (format!("{ID}-080"), StatusCode::BAD_REQUEST),
            (format!("{ID}-+80"), StatusCode::BAD_REQUEST),
            (format!("{ID}-65536"), StatusCode::BAD_REQUEST),
            (format!("{ID}-80-t2k"), StatusCode::BAD_REQUEST),
            (format!("{ID}-80-a-b-c"), StatusCode::BAD_REQUEST),
            (ID.to_owned(), StatusCode::BAD_REQUEST),
            ("8080-abcdefghij0123456789".to_owned(), StatusCode::NOT_FOUND),
            (String::new(), StatusCode::NOT_FOUND),
        ] {
            assert_eq!(PortAddress::parse(&label).unwrap_err().status, status, "{label}");
        }
    }

    #[test]
    fn label_with_the_port_first_is_not_claimed() {
        assert!(claims_label(&format!("{ID}-8080")) && claims_label(&format!("{ID}-x")));
        assert!(
            !claims_label(&format!("8080-{ID}"))
                && !claims_label("api")
                && !claims_label(ID)
                && !claims_label("a-b")
        );
    }
}
