//! The main process that clients of the code interpreter name by habit.
//!
//! It starts the reference's kernels and is a part of the reference's image. Ours need no start,
//! so in any other image its place is taken by something that waits.

const STARTER: &str = "/opt/code-interpreter/code-interpreter.sh";
const WAITING: &str = r#"[ -x "$0" ] && exec "$0" "$@"; exec tail -f /dev/null"#;

/// What is started for an entrypoint.
pub(super) fn or_wait(words: Vec<String>) -> Vec<String> {
    if words.first().is_none_or(|word| word != STARTER) {
        return words;
    }
    ["sh", "-c", WAITING].map(str::to_owned).into_iter().chain(words).collect()
}

/// The entrypoint as the client named it.
pub(super) fn as_sent(words: &[String]) -> &[String] {
    match words {
        [_, _, script, sent @ ..] if script == WAITING => sent,
        words => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_sees_what_it_has_sent() {
        for words in [vec![STARTER, "-x"], vec!["tail", "-f", "/dev/null"], vec!["sh", "-c", "true"]] {
            let sent: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let started = or_wait(sent.clone());
            assert_eq!(started == sent, words[0] != STARTER);
            assert_eq!(as_sent(&started), sent);
        }
    }
}
