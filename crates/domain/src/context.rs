//! Contexts: code of one language runs in a context and sees the state that earlier code left
//! behind.

use std::fmt;

/// A programming language, by its canonical name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Language(String);

/// The error for text that is not a valid language name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a language must be a word of at most {} letters, digits and `+#._-`, or `jupyter:` and such a word",
    Language::MAX_LENGTH
)]
pub struct LanguageError;

/// The program that runs the code of a language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LanguageRuntime<'a> {
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
const JUPYTER_PREFIX: &str = "jupyter:";

/// Other common names of languages.
const LANGUAGE_ALIASES: [(&str, &str); 13] = [
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
    pub const MAX_LENGTH: usize = 48;

    /// Accepts any of the names by which a language is known.
    pub fn parse(text: &str) -> Result<Self, LanguageError> {
        if let Some(name) = text.strip_prefix(JUPYTER_PREFIX) {
            return if is_language_word(name) { Ok(Self(text.to_owned())) } else { Err(LanguageError) };
        }
        let name = text.to_ascii_lowercase();
        let alias = LANGUAGE_ALIASES.into_iter().find(|(alias, _)| *alias == name);
        match alias {
            Some((_, name)) => Ok(Self(name.to_owned())),
            None if is_language_word(&name) => Ok(Self(name)),
            None => Err(LanguageError),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn runtime(&self) -> LanguageRuntime<'_> {
        match self.0.as_str() {
            "python" => LanguageRuntime::Python,
            "javascript" => LanguageRuntime::JavaScript,
            "typescript" => LanguageRuntime::TypeScript,
            "bash" => LanguageRuntime::Bash,
            other => LanguageRuntime::Jupyter(other.strip_prefix(JUPYTER_PREFIX).unwrap_or(other)),
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_language_word(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"+#._-".contains(&byte);
    (1..=Language::MAX_LENGTH).contains(&name.len())
        && name.bytes().all(fits)
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, name: &str, worker: LanguageRuntime<'_>) {
        let language = Language::parse(text).expect("a valid language");
        assert_eq!((language.as_str(), language.runtime()), (name, worker), "{text}");
    }

    #[test]
    fn aliases_parse_to_the_canonical_name() {
        check("Python", "python", LanguageRuntime::Python);
        check("py", "python", LanguageRuntime::Python);
        check("JS", "javascript", LanguageRuntime::JavaScript);
        check("ts", "typescript", LanguageRuntime::TypeScript);
        check("sh", "bash", LanguageRuntime::Bash);
        check("java", "java", LanguageRuntime::Jupyter("java"));
        check("C++", "cpp", LanguageRuntime::Jupyter("cpp"));
        check("jupyter:Python3", "jupyter:Python3", LanguageRuntime::Jupyter("Python3"));
    }

    #[test]
    fn ambiguous_text_is_not_a_language() {
        let long = "x".repeat(Language::MAX_LENGTH + 1);
        for wrong in ["", " ", "a b", "-c", "../x", "jupyter:", "jupyter:-x", "a/b", "a\n", "é", &long] {
            assert_eq!(Language::parse(wrong), Err(LanguageError), "{wrong:?}");
        }
    }

    #[test]
    fn alias_targets_are_canonical_names() {
        for (alias, name) in LANGUAGE_ALIASES {
            assert_eq!(Language::parse(name).expect("a valid name").as_str(), name, "{alias}");
        }
    }
}
