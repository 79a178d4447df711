//! The challenge of a registry: how it wants to be convinced of a user. See RFC 9110, section 11.

/// A value of the header `WWW-Authenticate`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AuthChallenge {
    /// A token is to be fetched from `realm`.
    Bearer {
        realm: String,
        service: Option<String>,
    },
    Basic,
}

impl AuthChallenge {
    /// Parses one header; `None` if it asks for something else.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service) = (None, None);
        let mut rest = rest.trim_start();
        while let Some((name, value)) = rest.split_once('=') {
            let (value, after) = parse_value(value.trim_start())?;
            match name.trim().to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                _ => {}
            }
            rest = after.trim_start().trim_start_matches(',').trim_start();
        }
        Some(Self::Bearer { realm: realm?, service })
    }
}

/// Splits a token or a quoted string from the text behind it.
fn parse_value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(',').unwrap_or(text.len());
        return Some((text[..end].trim().to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((index, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &quoted[index + 1..])),
            '\\' => value.push(letters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed() {
        let bearer = |realm: &str, service: Option<&str>| {
            Some(AuthChallenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) })
        };
        for (header, expected) in [
            (
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io""#,
                bearer("https://auth.docker.io/token", Some("registry.docker.io")),
            ),
            (r#"bearer scope="a,b=c", realm = "x\"y""#, bearer("x\"y", None)),
            (r#"bearer scope="a,b=c", realm="x\"y""#, bearer("x\"y", None)),
            ("Bearer realm=https://a/b", bearer("https://a/b", None)),
            ("Basic realm=\"x\"", Some(AuthChallenge::Basic)),
            ("Basic", Some(AuthChallenge::Basic)),
            ("Bearer service=\"x\"", None),
            ("Bearer realm=\"unfinished", None),
            ("Negotiate", None),
        ] {
            assert_eq!(AuthChallenge::parse(header), expected, "{header}");
        }
    }
}
