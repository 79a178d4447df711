//! Aliases: names that clients send by habit and that stand for an image this host has.

use super::HOST;

/// What becomes of a name that is no image but matches an alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlisted {
    /// The alias stands in for it.
    Alias,
    /// Only images that really exist are used.
    Refuse,
}

/// Patterns and the image each stands for; the first that matches counts. A `*` in a pattern
/// matches any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aliases {
    pub table: Vec<(String, String)>,
    pub unlisted: Unlisted,
}

/// What the SDKs and examples of the compatible APIs ask for.
const BY_HABIT: [&str; 24] = [
    "opensandbox/*",
    "*/opensandbox/*",
    "*/code-interpreter*",
    "code-interpreter*",
    "base",
    "base:*",
    "python",
    "python:*",
    "*/python:*",
    "node",
    "node:*",
    "*/node:*",
    "ubuntu",
    "ubuntu:*",
    "*/ubuntu:*",
    "debian",
    "debian:*",
    "*/debian:*",
    "alpine",
    "alpine:*",
    "*/alpine:*",
    "busybox",
    "busybox:*",
    "*/busybox:*",
];

impl Default for Aliases {
    fn default() -> Self {
        let table = BY_HABIT.map(|pattern| (pattern.to_owned(), HOST.to_owned())).to_vec();
        Self { table, unlisted: Unlisted::Alias }
    }
}

impl Aliases {
    /// The image `name` stands for.
    pub fn target(&self, name: &str) -> Option<&str> {
        let found = self.table.iter().find(|(pattern, _)| matches(pattern, name));
        found.map(|(_, target)| target.as_str())
    }
}

/// Whether `text` has the shape of `pattern`. Taking the first place for every part between two
/// stars is enough, so the time is bounded.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match text.find(part) {
            Some(place) => text = &text[place + part.len()..],
            None => return false,
        }
    }
    text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, text, expected) in [
            ("base", "base", true),
            ("base", "base2", false),
            ("python:*", "python:3.12", true),
            ("python:*", "python", false),
            ("*/code-interpreter*", "a/b/code-interpreter:v1", true),
            ("*/code-interpreter*", "code-interpreter", false),
            ("a*b*a", "aba", true),
            ("a*b*a", "ab", false),
            ("ab*ba", "aba", false),
            ("*", "", true),
            ("**", "x", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn names_sent_by_habit_stand_for_the_host() {
        let aliases = Aliases::default();
        for name in ["opensandbox/code-interpreter:latest", "python:3.12", "base", "ghcr.io/x/node:20"] {
            assert_eq!(aliases.target(name), Some(HOST), "{name}");
        }
        assert_eq!(aliases.target("my-own"), None);
    }
}
