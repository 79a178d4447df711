//! Licence expressions as packages state them. See the SPDX specification, annex D.

use std::collections::BTreeSet;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum LicenceExpression {
    /// An identifier, with its exception if it has one: `Apache-2.0 WITH LLVM-exception`.
    Licence(String),
    All(Vec<LicenceExpression>),
    Any(Vec<LicenceExpression>),
}

impl LicenceExpression {
    /// Parses an expression; older packages write `/` for OR.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let spaced = text.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
        let words: Vec<&str> = spaced.split_whitespace().collect();
        let mut words = words.as_slice();
        let parsed = parse_any(&mut words)?;
        words.is_empty().then_some(parsed)
    }

    pub(super) fn is_allowed(&self, allowed: &BTreeSet<String>) -> bool {
        match self {
            Self::Licence(name) => allowed.contains(name),
            Self::All(parts) => parts.iter().all(|part| part.is_allowed(allowed)),
            Self::Any(parts) => parts.iter().any(|part| part.is_allowed(allowed)),
        }
    }
}

fn parse_any(words: &mut &[&str]) -> Option<LicenceExpression> {
    let mut parts = vec![parse_all(words)?];
    while take_word(words, "OR") {
        parts.push(parse_all(words)?);
    }
    Some(if parts.len() == 1 { parts.remove(0) } else { LicenceExpression::Any(parts) })
}

fn parse_all(words: &mut &[&str]) -> Option<LicenceExpression> {
    let mut parts = vec![parse_one(words)?];
    while take_word(words, "AND") {
        parts.push(parse_one(words)?);
    }
    Some(if parts.len() == 1 { parts.remove(0) } else { LicenceExpression::All(parts) })
}

fn parse_one(words: &mut &[&str]) -> Option<LicenceExpression> {
    if take_word(words, "(") {
        let inner = parse_any(words)?;
        return take_word(words, ")").then_some(inner);
    }
    let (name, rest) = words.split_first().filter(|(name, _)| !["AND", "OR", "WITH", ")"].contains(name))?;
    *words = rest;
    if !take_word(words, "WITH") {
        return Some(LicenceExpression::Licence((*name).to_owned()));
    }
    let (exception, rest) = words.split_first()?;
    *words = rest;
    Some(LicenceExpression::Licence(format!("{name} WITH {exception}")))
}

fn take_word(words: &mut &[&str], expected: &str) -> bool {
    match words.split_first() {
        Some((word, rest)) if *word == expected => {
            *words = rest;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_judged_by_their_parts() {
        let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).into();
        for (text, expected) in [
            ("MIT", Some(true)),
            ("MIT/Apache-2.0", Some(true)),
            ("GPL-3.0 OR MIT", Some(true)),
            ("GPL-3.0 AND MIT", Some(false)),
            ("(MIT OR GPL-3.0) AND Apache-2.0", Some(true)),
            ("MIT OR GPL-3.0 AND GPL-2.0", Some(true)),
            ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", Some(true)),
            ("GPL-2.0 WITH Classpath-exception-2.0", Some(false)),
            ("", None),
            ("MIT OR", None),
            ("(MIT", None),
            ("MIT MIT", None),
        ] {
            let found = LicenceExpression::parse(text).map(|licence| licence.is_allowed(&allowed));
            assert_eq!(found, expected, "{text}");
        }
    }
}
