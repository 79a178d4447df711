//! Contexts: code of one language runs in a context and sees the state that earlier code left
//! behind.

use std::fmt;

use crate::process::SessionId;

/// The id of a context, in the same form as a session id; the agent treats a context as a session.
pub type ContextId = SessionId;

/// A programming language, by its canonical name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Language(String);

/// The error for text that is not a valid language name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a language must be a word of at most {} letters, digits and `+#._-`, or `jupyter:` and such a word",
    Language::LONGEST
)]
pub struct NotALanguage;

/// The program that runs the code of a language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker<'a> {
    /// Our own worker, which needs only the interpreter.
    Python,
    JavaScript,
    TypeScript,
    /// The shell of an ordinary session.
    Bash,
    /// A Jupyter kernel provided by the image, found by its own name or by the name of its
    /// language.
    Jupyter(&'a str),
}

/// The prefix that selects a Jupyter kernel by name.
const JUPYTER: &str = "jupyter:";

/// Other common names of languages.
const ALIASES: [(&str, &str); 13] = [
    ("py", "python"),
    ("python3", "python"),
    ("ipython", "python"),
    ("js", "javascript"),
    ("node", "javascript"),
    ("nodejs", "javascript"),
    ("ts", "typescript"),
    ("sh", "bash"),
    ("shell", "bash"),
    ("golang", "go"),
    ("c++", "cpp"),
    ("rscript", "r"),
    ("rs", "rust"),
];

impl Language {
    pub const LONGEST: usize = 48;

    /// Accepts any of the names by which a language is known.
    pub fn parse(text: &str) -> Result<Self, NotALanguage> {
        if let Some(name) = text.strip_prefix(JUPYTER) {
            return if is_word(name) { Ok(Self(text.to_owned())) } else { Err(NotALanguage) };
        }
        let name = text.to_ascii_lowercase();
        let alias = ALIASES.into_iter().find(|(alias, _)| *alias == name);
        match alias {
            Some((_, name)) => Ok(Self(name.to_owned())),
            None if is_word(&name) => Ok(Self(name)),
            None => Err(NotALanguage),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn worker(&self) -> Worker<'_> {
        match self.0.as_str() {
            "python" => Worker::Python,
            "javascript" => Worker::JavaScript,
            "typescript" => Worker::TypeScript,
            "bash" => Worker::Bash,
            other => Worker::Jupyter(other.strip_prefix(JUPYTER).unwrap_or(other)),
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_word(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"+#._-".contains(&byte);
    (1..=Language::LONGEST).contains(&name.len())
        && name.bytes().all(fits)
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, name: &str, worker: Worker<'_>) {
        let language = Language::parse(text).expect("a valid language");
        assert_eq!((language.as_str(), language.worker()), (name, worker), "{text}");
    }

    #[test]
    fn aliases_parse_to_the_canonical_name() {
        check("Python", "python", Worker::Python);
        check("py", "python", Worker::Python);
        check("JS", "javascript", Worker::JavaScript);
        check("ts", "typescript", Worker::TypeScript);
        check("sh", "bash", Worker::Bash);
        check("java", "java", Worker::Jupyter("java"));
        check("C++", "cpp", Worker::Jupyter("cpp"));
        check("jupyter:Python3", "jupyter:Python3", Worker::Jupyter("Python3"));
    }

    #[test]
    fn ambiguous_text_is_not_a_language() {
        let long = "x".repeat(Language::LONGEST + 1);
        for wrong in ["", " ", "a b", "-c", "../x", "jupyter:", "jupyter:-x", "a/b", "a\n", "é", &long] {
            assert_eq!(Language::parse(wrong), Err(NotALanguage), "{wrong:?}");
        }
    }

    #[test]
    fn alias_targets_are_canonical_names() {
        for (alias, name) in ALIASES {
            assert_eq!(Language::parse(name).expect("a valid name").as_str(), name, "{alias}");
        }
    }
}
