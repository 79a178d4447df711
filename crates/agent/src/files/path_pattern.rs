//! A glob over paths, matched one component at a time, so that a walk enters only directories in which
//! something can match.
//!
//! A walk keeps the set of positions in the pattern that its path has reached. `**` stays at its position for
//! any number of directories, and can also be skipped:
//!
//! ```text
//! src / ** / *.rs          path        positions
//!  0     1     2    3      src         1 2
//!                          src/a       1 2
//!                          src/a/b.rs  1 2 3      3 is the end, so the path matches
//! ```

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// The longest pattern. A path cannot be longer either.
pub(super) const MAX_PATTERN_BYTES: usize = 4096;

/// How much of a pattern is shown in a fault, so that the reason is not cut off.
pub(super) const MAX_SHOWN_CHARS: usize = 200;

/// The most components of a pattern: their positions, and the end, are bits of a number.
const MAX_COMPONENTS: usize = 127;

#[derive(Debug)]
pub(super) struct PathPattern {
    components: Vec<PatternComponent>,
    /// Whether the pattern ends in `/`, so that only directories match.
    pub(super) directories_only: bool,
}

#[derive(Debug)]
enum PatternComponent {
    /// `**`
    AnyDepth,
    /// `*`
    AnyName,
    Literal(Vec<u8>),
    Glob {
        names: GlobSet,
        /// Whether the component begins with a dot, and so matches hidden names.
        dotted: bool,
    },
}

/// The positions in a pattern that a path has reached, as bits. Each name of a walk makes a new set, so it must not be
/// allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PatternPositions(u128);

/// Which components may match a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameMatching {
    All,
    /// Only components without wildcards.
    LiteralOnly,
}

impl PathPattern {
    /// Parses a pattern; the error says what is wrong with it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        check_length(text)?;
        if text.starts_with('/') {
            return Err("a pattern must be relative".to_owned());
        }
        let words = text.split('/').filter(|word| !word.is_empty() && *word != ".");
        let mut components = words.map(PatternComponent::parse).collect::<Result<Vec<_>, _>>()?;
        if let Some(PatternComponent::AnyDepth) = components.last() {
            // `a/**` is everything below `a`, but not `a` itself.
            components.push(PatternComponent::AnyName);
        }
        match components.len() {
            0 => Err("the pattern is empty".to_owned()),
            1..=MAX_COMPONENTS => Ok(Self { components, directories_only: text.ends_with('/') }),
            _ => Err(format!("the pattern has more than {MAX_COMPONENTS} components")),
        }
    }

    /// The positions at the directory where the walk starts.
    pub(super) fn start(&self) -> PatternPositions {
        let mut positions = PatternPositions::default();
        self.reach(0, &mut positions);
        positions
    }

    /// The positions after one more component of the path.
    pub(super) fn step(
        &self,
        from: PatternPositions,
        name: &OsStr,
        hidden: bool,
        matching: NameMatching,
    ) -> PatternPositions {
        let mut reached = PatternPositions::default();
        for (position, component) in self.components.iter().enumerate().filter(|(index, _)| from.has(*index))
        {
            if matching == NameMatching::LiteralOnly && !matches!(component, PatternComponent::Literal(_)) {
                continue;
            }
            if component.matches_name(name, hidden) {
                let stays = matches!(component, PatternComponent::AnyDepth);
                self.reach(if stays { position } else { position + 1 }, &mut reached);
            }
        }
        reached
    }

    /// Whether a path that has reached these positions matches.
    pub(super) fn is_match(&self, positions: PatternPositions) -> bool {
        positions.has(self.components.len())
    }

    /// Whether something below a path that has reached these positions can match.
    pub(super) fn can_continue(&self, positions: PatternPositions) -> bool {
        (0..self.components.len()).any(|position| positions.has(position))
    }

    /// Adds a position, and those after it that are reached by skipping `**`.
    fn reach(&self, mut position: usize, positions: &mut PatternPositions) {
        positions.0 |= 1 << position;
        while let Some(PatternComponent::AnyDepth) = self.components.get(position) {
            position += 1;
            positions.0 |= 1 << position;
        }
    }
}

impl PatternPositions {
    fn has(self, position: usize) -> bool {
        self.0 & (1 << position) != 0
    }
}

impl PatternComponent {
    fn parse(word: &str) -> Result<Self, String> {
        match word {
            "**" => Ok(Self::AnyDepth),
            "*" => Ok(Self::AnyName),
            ".." => Err("a pattern cannot contain `..`".to_owned()),
            _ if !word.contains(['*', '?', '[', ']', '{', '}', '\\']) => Ok(Self::Literal(word.into())),
            _ => Ok(Self::Glob { names: parse_globs([word])?, dotted: word.starts_with('.') }),
        }
    }

    fn matches_name(&self, name: &OsStr, hidden: bool) -> bool {
        let shown = || hidden || !name.as_bytes().starts_with(b".");
        match self {
            Self::AnyDepth | Self::AnyName => shown(),
            Self::Literal(literal) => name.as_bytes() == literal,
            Self::Glob { names, dotted } => (*dotted || shown()) && names.is_match(name),
        }
    }
}

/// Parses globs, in which `*` also matches `/`.
///
/// They are always compiled as a set, because compiling a single one panics if it is too large or too deeply
/// nested.
pub(super) fn parse_globs<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<GlobSet, String> {
    let mut globs = GlobSetBuilder::new();
    for text in texts {
        check_length(text)?;
        let glob = GlobBuilder::new(text).build();
        let shown = || text.chars().take(MAX_SHOWN_CHARS).collect::<String>();
        globs.add(glob.map_err(|error| format!("`{}`: {}", shown(), error.kind()))?);
    }
    globs.build().map_err(|error| error.kind().to_string())
}

fn check_length(text: &str) -> Result<(), String> {
    if text.len() <= MAX_PATTERN_BYTES {
        Ok(())
    } else {
        Err(format!("a pattern has at most {MAX_PATTERN_BYTES} bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, path: &str, hidden: bool) -> bool {
        let pattern = PathPattern::parse(pattern).expect("the pattern is valid");
        let mut positions = pattern.start();
        for name in path.split('/') {
            positions = pattern.step(positions, OsStr::new(name), hidden, NameMatching::All);
        }
        pattern.is_match(positions)
    }

    fn check(pattern: &str, matching: &[&str], other: &[&str]) {
        for path in matching {
            assert!(matches(pattern, path, false), "`{pattern}` matches {path}");
        }
        for path in other {
            assert!(!matches(pattern, path, false), "`{pattern}` does not match {path}");
        }
    }

    #[test]
    fn components_are_matched_one_by_one() {
        check("*.md", &["a.md"], &["d/a.md", ".a.md", "a.mdx"]);
        check("**/*.py", &["a.py", "d/a.py", "d/e/a.py"], &["a.pyc", ".d/a.py", "d/.a.py"]);
        check("src/**/*.ts", &["src/a.ts", "src/d/e/a.ts"], &["a.ts", "d/src/a.ts", "src/a.js"]);
        check("**", &["a", "d/a"], &[".a", "d/.a", ".d/a"]);
        check("src/**", &["src/a", "src/d/e"], &["src", "other/a"]);
        check("a/**/b/**/c", &["a/b/c", "a/x/b/y/z/c", "a/b/b/c"], &["a/c", "a/b", "a/x/c"]);
        check("./a//b", &["a/b"], &["a"]);
        check("*/x", &["d/x"], &["x", "d/e/x", ".d/x"]);
        check("{a,b}?[!0-9]", &["a1x", "b-y"], &["c1x", "a11"]);
        check("[.]a", &[], &[".a"]);
        check("a**b", &["ab", "axb"], &["a/b"]);
    }

    #[test]
    fn hidden_names_match_if_requested_or_written_with_a_dot() {
        check(".*", &[".a"], &["a"]);
        check(".git/*", &[".git/config"], &[".git/.x"]);
        check("**/.env", &[".env", "d/.env"], &[".d/.env"]);
        for (pattern, path) in [("*", ".a"), ("**/*.py", ".d/.a.py"), ("**", ".d/a"), ("?a", ".a")] {
            assert!(matches(pattern, path, true), "{pattern} {path}");
        }
    }

    #[test]
    fn only_directories_in_which_something_can_match_are_entered() {
        let pattern = PathPattern::parse("src/*.rs").expect("it is valid");
        let step = |from: PatternPositions, name: &str, matching| {
            pattern.step(from, OsStr::new(name), false, matching)
        };
        let start = pattern.start();
        assert!(pattern.can_continue(start));
        assert!(!pattern.can_continue(step(start, "other", NameMatching::All)));
        let source = step(start, "src", NameMatching::LiteralOnly);
        assert!(pattern.can_continue(source));
        let file = step(source, "a.rs", NameMatching::All);
        assert!(pattern.is_match(file) && !pattern.can_continue(file));
        assert!(!pattern.is_match(step(source, "a.rs", NameMatching::LiteralOnly)));
    }

    #[test]
    fn invalid_patterns_are_refused_with_the_reason() {
        let long = "a".repeat(MAX_PATTERN_BYTES + 1);
        let many = "a/".repeat(MAX_COMPONENTS + 1);
        let nested = "{".repeat(2000) + &"}".repeat(2000);
        for (pattern, reason) in [
            ("", "empty"),
            ("./", "empty"),
            ("/etc/*", "relative"),
            ("a/../b", "`..`"),
            ("a/[b", "`[b`: unclosed character class"),
            ("a/{b,c", "`{b,c`: unclosed alternate"),
            (long.as_str(), "at most 4096 bytes"),
            (many.as_str(), "more than 127 components"),
        ] {
            let error = PathPattern::parse(pattern).expect_err("it is invalid");
            assert!(error.contains(reason), "{pattern}: {error}");
        }
        // It must not panic; whether it is valid is up to the library.
        PathPattern::parse(&nested).ok();
        assert!(PathPattern::parse("d/*/").expect("it is valid").directories_only);
    }
}
