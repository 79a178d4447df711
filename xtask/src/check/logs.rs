//! Log messages: a line is read alone, so its message begins with what it is about.

use super::Findings;
use super::sources::RustSource;

/// The macros whose messages an operator reads. Messages for debugging are for those who know the code.
const LOG_MACROS: &[&str] = &["tracing::error!(", "tracing::warn!(", "tracing::info!("];

/// First words that stand for a subject which the line does not have, or that come after one.
const NO_SUBJECTS: &[&str] = &[
    "it", "its", "they", "this", "that", "what", "who", "whoever", "nobody", "somebody", "is", "are", "was",
    "were", "has", "had", "did", "died",
];

pub(super) fn check_log_messages(sources: &[RustSource]) -> Findings {
    let ours = sources.iter().filter(|source| !source.is_test());
    ours.flat_map(|source| {
        let vague = log_messages(source).filter(|(_, message)| !has_subject(message));
        vague.map(|(line, message)| {
            let why = "a log message begins with what it is about";
            format!("{}:{line}: \"{message}\"; {why}", source.path)
        })
    })
    .collect()
}

/// The messages of the log macros in a source, with the lines of the macros.
fn log_messages(source: &RustSource) -> impl Iterator<Item = (usize, &str)> {
    let code = source.text.code.as_str();
    let calls = LOG_MACROS.iter().flat_map(move |name| code.match_indices(name));
    calls.filter_map(move |(at, name)| {
        let arguments = at + name.len();
        let message = arguments + message_offset(&code[arguments..])?;
        let literal = code[..message].matches("\"\"").count();
        Some((code[..at].matches('\n').count() + 1, source.text.literals.get(literal)?.as_str()))
    })
}

/// Where the message begins in the arguments of a log macro: the first string that is an argument by
/// itself, and not the name or the value of a field.
fn message_offset(arguments: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut before = '(';
    for (at, letter) in arguments.char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            '"' if depth == 0 && matches!(before, '(' | ',') => {
                let after = arguments[at..].strip_prefix("\"\"")?.trim_start();
                if after.starts_with([',', ')']) {
                    return Some(at);
                }
            }
            _ => {}
        }
        if !letter.is_whitespace() {
            before = letter;
        }
    }
    None
}

/// Whether a message begins with what it is about, or with what failed. One that begins with a value
/// cannot be judged here.
fn has_subject(message: &str) -> bool {
    let mut words = message.split_whitespace();
    let (first, second, third) = (words.next(), words.next(), words.next());
    let is_article = matches!(first, Some("a" | "an"));
    let is_passive = matches!((second, third), (Some(_), Some("was" | "found")));
    let is_subject = first.is_none_or(|word| !NO_SUBJECTS.contains(&word));
    is_subject && !(is_article && is_passive)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Findings {
        check_log_messages(&[RustSource::parse(path, text)])
    }

    #[test]
    fn message_without_a_subject_is_found_with_its_line() {
        let text = "f(\"it\");\ntracing::warn!(part = \"it\", %error, \"it is left\");";
        let expected = "crates/a/src/x.rs:2: \"it is left\"; a log message begins with what it is about";
        assert_eq!(found("crates/a/src/x.rs", text), [expected]);
        assert_eq!(found("crates/a/src/tests.rs", text), Findings::new());
    }

    #[test]
    fn words_that_stand_for_a_subject_are_found() {
        let found = |message: &str| {
            found("crates/a/src/x.rs", &format!("tracing::info!(x = f(\"a\", [1]), \"{message}\", 1)")).len()
        };
        for message in
            ["what is left", "an answer found nobody", "a sandbox was left", "died and is restarted"]
        {
            assert_eq!(found(message), 1, "{message}");
        }
        for message in ["failed to kill sandbox", "sandbox died", "{error:#}", "a sandbox of another owner"] {
            assert_eq!(found(message), 0, "{message}");
        }
    }

    #[test]
    fn fields_are_not_messages() {
        for text in [
            "tracing::info!(name = \"it\", \"setting changed\")",
            "tracing::info!(\"it\" = 1, \"setting changed\")",
            "tracing::info!(target: \"it\", \"setting changed\")",
            "tracing::info!(a = f(\"it\"), \"setting changed\")",
            "tracing::debug!(\"it is left\")",
            "tracing::info!(message = text)",
        ] {
            assert_eq!(found("crates/a/src/x.rs", text), Findings::new(), "{text}");
        }
    }
}
