//! A port of a sandbox in one word, as hosts and headers have it.
//!
//! ```text
//! {id}-{port}                          OpenSandbox-Ingress-To, or before the gateway's domain
//! {id}-{port}-{expires}-{signature}    a signed route
//! ```

use domain::SandboxId;
use http::StatusCode;

use super::problem::Problem;
use super::signed::Signed;

/// What one word names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) id: SandboxId,
    pub(super) port: u16,
    pub(super) signed: Option<Signed>,
}

impl Place {
    pub(super) fn parse(label: &str) -> Result<Self, Problem> {
        let (id, rest) = label.split_once('-').unwrap_or((label, ""));
        let id = SandboxId::parse(id).ok().ok_or_else(|| Problem::no_sandbox(id))?;
        let (port, signed) = port_and_signature(rest)?;
        Ok(Self { id, port, signed })
    }
}

/// Whether a word in the place of a host's first label is meant for this front. Ids begin with a
/// letter, so nothing that begins with a port is.
pub(crate) fn claims(label: &str) -> bool {
    label.split_once('-').is_some_and(|(id, _)| SandboxId::parse(id).is_ok())
}

/// Reads `{port}` or `{port}-{expires}-{signature}`.
pub(super) fn port_and_signature(text: &str) -> Result<(u16, Option<Signed>), Problem> {
    let mut parts = text.split('-');
    let port = parts.next().unwrap_or_default();
    let signed = match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => None,
        (Some(expires), Some(signature), None) => {
            Some(Signed { expires: expires.to_owned(), signature: signature.to_owned() })
        }
        _ => return Err(wrong_port()),
    };
    Ok((self::port(port)?, signed))
}

/// A port as people write it.
pub(super) fn port(text: &str) -> Result<u16, Problem> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| plain).ok_or_else(wrong_port)
}

fn wrong_port() -> Problem {
    let message = "a port is a number from 1 to 65535";
    Problem::new(StatusCode::BAD_REQUEST, "DOCKER::INVALID_PORT", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "abcdefghij0123456789";

    #[test]
    fn a_word_names_a_port_with_or_without_a_signature() {
        let place = Place::parse(&format!("{ID}-8080")).unwrap();
        assert_eq!((place.id.as_str(), place.port, place.signed), (ID, 8080, None));
        let place = Place::parse(&format!("{ID}-1-t2k-0011aabbz")).unwrap();
        let signed = Signed { expires: "t2k".to_owned(), signature: "0011aabbz".to_owned() };
        assert_eq!((place.port, place.signed), (1, Some(signed)));
    }

    #[test]
    fn anything_else_names_nothing() {
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
            assert_eq!(Place::parse(&label).unwrap_err().status, status, "{label}");
        }
    }

    #[test]
    fn a_port_before_the_id_is_left_to_others() {
        assert!(claims(&format!("{ID}-8080")) && claims(&format!("{ID}-x")));
        assert!(!claims(&format!("8080-{ID}")) && !claims("api") && !claims(ID) && !claims("a-b"));
    }
}
