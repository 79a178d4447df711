//! The pattern of a search, compiled for the engine that it needs.
//!
//! The fast engine takes time in proportion to the text, whatever the pattern. Look-around and back-references need
//! the other one, which tries alternatives one after the other and gives up after a fixed number of steps.

use fancy_regex::{BytesMode, CompileError, Regex, RegexBuilder};
use grep_matcher::{LineTerminator, Match, Matcher, NoCaptures};
use grep_regex::{ErrorKind, RegexMatcher, RegexMatcherBuilder};
use wire::Fault;
use wire::search::GrepRequest;

use crate::invalid;

const MAX_PATTERN_BYTES: usize = 16 << 10;

/// How much of a pattern is shown in a fault.
const MAX_SHOWN_CHARS: usize = 200;

/// The most memory of a compiled pattern.
const MAX_COMPILED_BYTES: usize = 16 << 20;

/// The most memory for states that are computed during a search, per thread.
const MAX_CACHE_BYTES: usize = 16 << 20;

/// The most instructions of a pattern for the engine that backtracks.
const MAX_PROGRAM_LENGTH: usize = 100_000;

/// The most steps back in one line, or in one file if matches may span lines.
const MAX_BACKTRACKS: usize = 1_000_000;

#[derive(Clone, Debug)]
pub(crate) enum SearchPattern {
    Fast(RegexMatcher),
    Backtracking(BacktrackingMatcher),
}

#[derive(Clone, Debug)]
pub(crate) struct BacktrackingMatcher(Regex);

impl SearchPattern {
    pub(crate) fn compile(request: &GrepRequest) -> Result<Self, Fault> {
        let pattern = &request.pattern;
        let refuse = |reason: &str| refuse_pattern(pattern, reason);
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(refuse(&format!("a pattern has at most {MAX_PATTERN_BYTES} bytes")));
        }
        let error = match compile_fast(request) {
            Ok(matcher) => return Ok(Self::Fast(matcher)),
            Err(error) => error,
        };
        match error.kind() {
            ErrorKind::Regex(_) if !request.literal => {
                let matcher =
                    compile_backtracking(request).map_err(|error| refuse(&describe_error(&error)))?;
                Ok(Self::Backtracking(BacktrackingMatcher(matcher)))
            }
            ErrorKind::NotAllowed(_) => {
                Err(refuse("a line cannot contain a line feed; search in multiline mode"))
            }
            _ => Err(refuse(&error.to_string())),
        }
    }
}

/// The fault for a pattern that cannot be used.
pub(crate) fn refuse_pattern(pattern: &str, reason: &str) -> Fault {
    // The reason must not be cut off with the end of a long pattern.
    let shown: String = pattern.chars().take(MAX_SHOWN_CHARS).collect();
    invalid("read pattern", &format!("{shown}: {reason}"))
}

fn compile_fast(request: &GrepRequest) -> Result<RegexMatcher, grep_regex::Error> {
    let mut builder = RegexMatcherBuilder::new();
    builder
        .multi_line(true)
        .fixed_strings(request.literal)
        .case_insensitive(request.ignore_case)
        .size_limit(MAX_COMPILED_BYTES)
        .dfa_size_limit(MAX_CACHE_BYTES);
    if request.multiline {
        builder.dot_matches_new_line(true);
    } else {
        builder.line_terminator(Some(b'\n'));
    }
    builder.build(&request.pattern)
}

fn compile_backtracking(request: &GrepRequest) -> Result<Regex, fancy_regex::Error> {
    RegexBuilder::new(&request.pattern)
        .multi_line(true)
        .case_insensitive(request.ignore_case)
        .dot_matches_new_line(request.multiline)
        .bytes_mode(BytesMode::UnicodeBytes)
        .delegate_size_limit(MAX_COMPILED_BYTES)
        .delegate_dfa_size_limit(MAX_CACHE_BYTES)
        .max_prog_size(MAX_PROGRAM_LENGTH)
        .backtrack_limit(MAX_BACKTRACKS)
        .build()
}

fn describe_error(error: &fancy_regex::Error) -> String {
    match error {
        fancy_regex::Error::CompileError(inner) => match &**inner {
            CompileError::InnerError(inner) if inner.size_limit().is_some() => {
                format!("the compiled pattern exceeds the size limit of {MAX_COMPILED_BYTES} bytes")
            }
            _ => error.to_string(),
        },
        _ => error.to_string(),
    }
}

impl Matcher for BacktrackingMatcher {
    type Captures = NoCaptures;
    type Error = fancy_regex::Error;

    fn find_at(&self, haystack: &[u8], at: usize) -> Result<Option<Match>, Self::Error> {
        let found = self.0.find_from_pos(haystack, at)?;
        Ok(found.map(|found| Match::new(found.start(), found.end())))
    }

    fn new_captures(&self) -> Result<NoCaptures, Self::Error> {
        Ok(NoCaptures::new())
    }

    /// None: the searcher then passes each line alone, so no match can span two.
    fn line_terminator(&self) -> Option<LineTerminator> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(pattern: &str) -> GrepRequest {
        crate::grep::plain_request("/", pattern)
    }

    fn is_fast(pattern: &str) -> bool {
        matches!(SearchPattern::compile(&request(pattern)), Ok(SearchPattern::Fast(_)))
    }

    #[test]
    fn the_fast_engine_is_used_where_it_can_be() {
        for pattern in ["a", r"(?i)\bfoo\w+$", r"[\p{Greek}]+", "a|b|c", ""] {
            assert!(is_fast(pattern), "{pattern}");
        }
        for pattern in ["foo(?=bar)", "(?<!a)b", r"(\w)\1", "(?P<n>a)(?P=n)", "(?>a+)b"] {
            let compiled = SearchPattern::compile(&request(pattern));
            assert!(matches!(compiled, Ok(SearchPattern::Backtracking(_))), "{pattern}: {compiled:?}");
        }
        let literal = GrepRequest { literal: true, ..request("foo(?=") };
        assert!(matches!(SearchPattern::compile(&literal), Ok(SearchPattern::Fast(_))));
    }

    #[test]
    fn invalid_patterns_are_refused_with_the_reason() {
        let long = "a".repeat(MAX_PATTERN_BYTES + 1);
        for (pattern, reason) in [
            ("a(b", "parenthesis"),
            ("[a", "class"),
            (r"(a)\2", "back reference"),
            ("a\nb", "line feed"),
            (r"\w{1000}{1000}", "size limit"),
            (long.as_str(), "at most 16384 bytes"),
        ] {
            let fault = SearchPattern::compile(&request(pattern)).expect_err("it is invalid");
            assert_eq!(fault.operation.as_str(), "read pattern");
            assert!(fault.subject.starts_with(&pattern[..1]), "{}", fault.subject);
            assert!(fault.subject.to_lowercase().contains(reason), "{reason}: {}", fault.subject);
        }
    }

    #[test]
    fn endless_backtracking_is_an_error() {
        let Ok(SearchPattern::Backtracking(matcher)) = SearchPattern::compile(&request(r"^(a|aa)+(?=x)$"))
        else {
            panic!("look-ahead needs the engine that backtracks")
        };
        let error = matcher.find(&[b'a'; 200]).expect_err("too many steps");
        assert!(error.to_string().to_lowercase().contains("backtrack"), "{error}");
    }
}
