//! The protocol between the agent and a session's shell.
//!
//! ```text
//! agent ── commands ►  length\n text key\n          shell reads text, runs it, reads key
//! agent ◄─ verdicts ─  key kind status\0 directory\0 state\0
//! ```
//! The shell evaluates the text itself, so variables, functions and the directory persist. Options
//! do not: options that one text sets for itself (`set -eu`) would end the next text at its first
//! failing command. The state is shell text that gives another shell the same variables, and in bash
//! the same functions and aliases.
//! While the text runs, the two private descriptors are closed in the shell (bash keeps copies that
//! no child inherits) and the key has not been read, so neither the text nor what it starts can
//! forge a verdict without deliberately manipulating the shell. In that case it misleads only its
//! own caller.
//!
//! A plain `sh` can neither read a counted number of bytes nor use descriptor numbers above nine:
//! it gets its text on one line with all unusual characters escaped, and opens the pipes by name.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::fd::RawFd;

use crate::session::change_dir::ChangeDir;

/// The longest verdict that is kept. The state of a shell with more is not restored.
pub(crate) const MAX_VERDICT_BYTES: usize = 1 << 20;

/// The longest verdict that is read. A longer one does not come from the shell's script.
pub(crate) const MAX_READ_VERDICT_BYTES: u64 = 256 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShellDialect {
    Bash,
    Sh,
}

/// What a shell reports of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportedState {
    /// Exported variables, for commands that run next to the shell.
    Exports,
    /// Everything that another shell needs to take its place.
    Everything,
}

/// The shell's report about a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ShellVerdict {
    pub(crate) key: String,
    pub(crate) kind: VerdictKind,
    pub(crate) directory: String,
    /// Shell text that restores the shell's state.
    pub(crate) state: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VerdictKind {
    /// The text has run, with this status.
    Done(i32),
    /// The shell itself is about to exit; the kernel will report how.
    Leaving,
}

impl ShellDialect {
    pub(crate) fn from_path(shell: &str) -> Self {
        if shell.ends_with("bash") { Self::Bash } else { Self::Sh }
    }

    /// The arguments that start a shell which reads what to run from a pipe.
    pub(crate) fn start_arguments(
        self,
        shell: &str,
        [commands, verdicts]: [RawFd; 2],
        state: ReportedState,
    ) -> Vec<String> {
        let words: &[&str] = match self {
            Self::Bash => &["--noprofile", "--norc", "-c"],
            Self::Sh => &["-c"],
        };
        let script = match self {
            Self::Bash => bash_script(commands, verdicts, state),
            Self::Sh => sh_script(commands, verdicts),
        };
        let words = std::iter::once(&shell).chain(words).map(|word| (*word).to_owned());
        words.chain([script, shell.to_owned()]).collect()
    }

    /// Formats the command for one run.
    pub(crate) fn format_command(self, text: &str, key: &str) -> Vec<u8> {
        match self {
            Self::Bash => format!("{}\n{text}{key}\n", text.len()).into_bytes(),
            Self::Sh => format!("{}\n{key}\n", escape_line(text)).into_bytes(),
        }
    }
}

/// Everything around the text is silent even if the user has enabled tracing. The text may have left options like `-e`
/// in effect, so no command after it may fail.
fn bash_script(commands: RawFd, verdicts: RawFd, state: ReportedState) -> String {
    let print_state = match state {
        ReportedState::Exports => "builtin export -p",
        ReportedState::Everything => {
            "builtin unset __coracle_text __coracle_length
builtin declare -p
builtin declare -f
builtin alias -p
builtin shopt -p expand_aliases || builtin :"
        }
    };
    format!(
        r#"builtin unset BASH_EXECUTION_STRING
trap '{{ __coracle_status=$?; }} 2>/dev/null
{{ builtin read -r -u {commands} __coracle_key
builtin printf "%s leaving 0\0%s\0" "$__coracle_key" "$PWD"
{print_state}
builtin printf "\0"; }} 2>/dev/null >&{verdicts}
{{ builtin exit "$__coracle_status"; }} 2>/dev/null' EXIT
while {{ IFS= builtin read -r -u {commands} __coracle_length &&
LC_ALL=C IFS= builtin read -r -N "$__coracle_length" -u {commands} __coracle_text; }} 2>/dev/null; do
{{ builtin set +aefkmuvxCET +o pipefail; }} 2>/dev/null
eval "$__coracle_text" {commands}<&- {verdicts}>&-
{{ __coracle_status=$?
builtin read -r -u {commands} __coracle_key
builtin printf "%s done %s\0%s\0" "$__coracle_key" "$__coracle_status" "$PWD"
{print_state}
builtin printf "\0"; }} >&{verdicts} 2>/dev/null
done"#
    )
}

/// Not every shell knows `pipefail`, and a shell that does not would exit on it.
fn sh_script(commands: RawFd, verdicts: RawFd) -> String {
    let (commands, verdicts) = (format!("/proc/self/fd/{commands}"), format!("/proc/self/fd/{verdicts}"));
    format!(
        r#"__coracle_plain='set +aefuvxC'
if (set +o pipefail) 2>/dev/null; then __coracle_plain="$__coracle_plain +o pipefail"; fi
trap '{{ __coracle_status=$?; }} 2>/dev/null
{{ read -r __coracle_key < {commands}
printf "%s leaving 0\0%s\0" "$__coracle_key" "$PWD"
export -p
printf "\0"; }} 2>/dev/null > {verdicts}
{{ exit "$__coracle_status"; }} 2>/dev/null' EXIT
while IFS= read -r __coracle_text < {commands}; do
{{ eval "$__coracle_plain"; }} 2>/dev/null
eval "$(printf %b "$__coracle_text")"
{{ __coracle_status=$?
read -r __coracle_key < {commands}
printf "%s done %s\0%s\0" "$__coracle_key" "$__coracle_status" "$PWD"
export -p
printf "\0"; }} > {verdicts} 2>/dev/null
done"#
    )
}

/// The text that is evaluated for one run: the state of a shell that died, the directory, the
/// text.
pub(crate) fn compose_run_text(state: &str, change_dir: Option<&ChangeDir>, text: &str) -> String {
    let mut script = restore_state_text(state);
    match change_dir {
        None => script.push_str(text),
        Some(change_dir) => {
            script.push_str(&format!("{} && eval {}", change_dir.to_shell_text(), quote_word(text)))
        }
    }
    script.push('\n');
    script
}

/// Shell text that evaluates the state of another shell.
pub(crate) fn restore_state_text(state: &str) -> String {
    match state {
        "" => String::new(),
        state => format!("eval {} 2>/dev/null\n", quote_word(state)),
    }
}

/// Shell text that sets variables for one run only: it first restores those of the last run, then
/// sets these. The caller has checked that the names are valid.
pub(crate) fn run_variables_text(former: &[String], env: &BTreeMap<String, String>) -> String {
    let mut text = String::new();
    for name in former {
        text.push_str(&format!(
            "if [ -n \"${{__coracle_had_{name}+x}}\" ]; then export {name}=\"$__coracle_had_{name}\"; \
             unset __coracle_had_{name}; else unset {name}; fi\n"
        ));
    }
    for (name, value) in env {
        text.push_str(&format!(
            "if [ -n \"${{{name}+x}}\" ]; then __coracle_had_{name}=\"${name}\"; fi\nexport {name}={}\n",
            quote_word(value)
        ));
    }
    text
}

/// Whether a shell variable can have this name.
pub(crate) fn is_variable_name(name: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && name.bytes().all(word) && !name.starts_with(|first: char| first.is_ascii_digit())
}

/// Quotes any text as one word.
pub(crate) fn quote_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Escapes the text as one line for `printf %b`.
fn escape_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len() * 2);
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b" _-./,:;=+@".contains(&byte) {
            line.push(char::from(byte));
        } else {
            write!(line, "\\0{byte:03o}").expect("writing to a string does not fail");
        }
    }
    line
}

/// Removes the first complete verdict from the front of the received bytes. The outer `None` means
/// that there is none yet, the inner one that it is malformed.
pub(crate) fn take_verdict(bytes: &mut Vec<u8>) -> Option<Option<ShellVerdict>> {
    let mut zeros = bytes.iter().enumerate().filter(|(_, byte)| **byte == 0).map(|(index, _)| index);
    let end = zeros.nth(2)?;
    let message: Vec<u8> = bytes.drain(..=end).collect();
    Some(parse_verdict(&message))
}

/// Removes the part of the state that was received so far from an incomplete verdict, and returns whether there
/// was one.
pub(crate) fn drop_partial_state(bytes: &mut Vec<u8>) -> bool {
    let mut zeros = bytes.iter().enumerate().filter(|(_, byte)| **byte == 0).map(|(index, _)| index);
    let start = zeros.nth(1);
    if let Some(start) = start {
        bytes.truncate(start + 1);
    }
    start.is_some()
}

fn parse_verdict(message: &[u8]) -> Option<ShellVerdict> {
    let mut fields = message.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let (head, directory, state) = (fields.next()?, fields.next()?, fields.next()?);
    let mut words = head.split(' ');
    let (key, kind, status) = (words.next()?, words.next()?, words.next()?.parse().ok()?);
    let kind = match kind {
        "done" => VerdictKind::Done(status),
        "leaving" => VerdictKind::Leaving,
        _ => return None,
    };
    Some(ShellVerdict {
        key: key.to_owned(),
        kind,
        directory: directory.into_owned(),
        state: state.into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use wire::process::MissingDirectory;

    use super::*;

    #[test]
    fn verdict_is_taken_when_complete() {
        let mut bytes = b"k1 done 7\0/a b\0declare -x A=\"1\n2\"\n\0k2 lea".to_vec();
        let verdict = take_verdict(&mut bytes).flatten().expect("the first one is complete");
        assert_eq!((verdict.key.as_str(), verdict.kind), ("k1", VerdictKind::Done(7)));
        assert_eq!((verdict.directory.as_str(), verdict.state.as_str()), ("/a b", "declare -x A=\"1\n2\"\n"));
        assert_eq!(bytes, b"k2 lea");
        assert_eq!(take_verdict(&mut bytes), None);
        assert_eq!(take_verdict(&mut b"nonsense\0\0\0".to_vec()), Some(None));
    }

    #[test]
    fn quoting_and_escaping_preserve_the_text() {
        assert_eq!(quote_word("it's"), r"'it'\''s'");
        assert_eq!(escape_line("a\n$b"), r"a\0012\0044b");
        assert_eq!(compose_run_text("", None, "x"), "x\n");
        assert_eq!(
            compose_run_text("e", Some(&ChangeDir::to_path("d", MissingDirectory::Create)), "x"),
            "eval 'e' 2>/dev/null\nmkdir -p -- 'd' && cd -- 'd' && eval 'x'\n"
        );
    }

    /// Drives a plain shell with its standard input and output as the private pipes.
    #[test]
    fn plain_sh_runs_commands_of_the_pipe() {
        use std::io::{Read, Write};
        use std::process::{Command, Stdio};
        let words = ShellDialect::Sh.start_arguments("/bin/sh", [0, 1], ReportedState::Everything);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut shell = command.spawn().expect("every host has a shell");
        let mut commands = shell.stdin.take().expect("it was piped");
        let texts = [
            ("cd /usr; A='x y'\nexport A; false", "k1"),
            ("set -eufC", "k2"),
            ("false; echo /us[r] $NONE \"$A\" >&2; exit 4", "k3"),
        ];
        for (text, key) in texts {
            commands.write_all(&ShellDialect::Sh.format_command(text, key)).expect("the shell reads");
        }
        let (mut verdicts, mut printed) = (Vec::new(), String::new());
        shell.stdout.take().expect("it was piped").read_to_end(&mut verdicts).expect("the shell ends");
        shell.stderr.take().expect("it was piped").read_to_string(&mut printed).expect("it is text");
        assert_eq!(shell.wait().expect("it has ended").code(), Some(4));
        assert_eq!(printed, "/usr x y\n", "no option has outlived its run");
        let first = take_verdict(&mut verdicts).flatten().expect("the first run");
        assert_eq!(
            (first.key.as_str(), first.kind, first.directory.as_str()),
            ("k1", VerdictKind::Done(1), "/usr")
        );
        assert!(first.state.contains("A='x y'"), "{}", first.state);
        let second = take_verdict(&mut verdicts).flatten().expect("the second run");
        assert_eq!((second.key.as_str(), second.kind), ("k2", VerdictKind::Done(0)));
        let third = take_verdict(&mut verdicts).flatten().expect("the third run");
        assert_eq!((third.key.as_str(), third.kind), ("k3", VerdictKind::Leaving));
    }
}
