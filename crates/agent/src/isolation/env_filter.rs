//! Selects the sandbox's variables that an isolated session inherits.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use wire::isolated_session::EnvFilter;
use wire::{Fault, FaultKind};

use crate::fault;

/// Without these no shell finds its programs or its home directory.
const ALWAYS_INHERITED: [&str; 5] = ["PATH", "HOME", "USER", "LOGNAME", "SHELL"];

/// The maximum number of patterns of one filter.
const MAX_PATTERNS: usize = 1024;

/// Returns a function that decides whether a variable is inherited.
pub(crate) fn compile_filter(filter: &EnvFilter) -> Result<impl Fn(&str) -> bool + use<>, Fault> {
    let only = filter.only.as_deref().map(compile_patterns).transpose()?;
    let without = compile_patterns(&filter.without)?;
    Ok(move |name: &str| {
        let included =
            only.as_ref().is_none_or(|only| only.is_match(name) || ALWAYS_INHERITED.contains(&name));
        included && !without.is_match(name)
    })
}

fn compile_patterns(words: &[String]) -> Result<GlobSet, Fault> {
    let wrong = |word: &str| fault::from_kind(FaultKind::Invalid, "choose variables", word);
    if words.len() > MAX_PATTERNS {
        return Err(wrong("too many patterns"));
    }
    let mut set = GlobSetBuilder::new();
    for word in words {
        let glob = GlobBuilder::new(word).case_insensitive(true).build();
        set.add(glob.map_err(|_error| wrong(word))?);
    }
    set.build().map_err(|_error| wrong("these patterns"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(only: Option<&[&str]>, without: &[&str], passing: &[&str]) {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let screen = EnvFilter { only: only.map(words), without: words(without) };
        let passes = compile_filter(&screen).expect("these are patterns");
        let names = ["PATH", "HOME", "A", "MY_TOKEN", "AWS_KEY", "aws_other"];
        let through: Vec<&str> = names.into_iter().filter(|name| passes(name)).collect();
        assert_eq!(through, passing, "{only:?} {without:?}");
    }

    #[test]
    fn inherited_variables_are_included_and_not_excluded() {
        check(None, &[], &["PATH", "HOME", "A", "MY_TOKEN", "AWS_KEY", "aws_other"]);
        check(None, &["*_TOKEN", "AWS_*"], &["PATH", "HOME", "A"]);
        check(Some(&["A"]), &[], &["PATH", "HOME", "A"]);
        check(Some(&["a*"]), &["AWS_*", "HOME"], &["PATH", "A"]);
        check(Some(&[]), &[], &["PATH", "HOME"]);
    }
}
