//! Expands `~` and variables in paths.

use std::collections::BTreeMap;

use wire::process::WorkingDirectory;

use crate::session::shell;

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
enum PathPiece<'a> {
    Text(&'a str),
    Name(&'a str),
}

/// Replaces `~` at the start and, if asked, variables; a relative path starts at `base`.
pub(crate) fn expand_path(
    base: &str,
    env: &BTreeMap<String, String>,
    directory: &WorkingDirectory,
) -> String {
    let (home, rest) = split_home(&directory.path);
    let rest = if directory.expand { expand_variables(rest, env) } else { rest.to_owned() };
    let home = if home { env.get("HOME").map_or("/", String::as_str) } else { "" };
    let path = format!("{home}{rest}");
    match path.as_str() {
        "" => base.to_owned(),
        absolute if absolute.starts_with('/') => path,
        relative => format!("{base}/{relative}"),
    }
}

/// Replaces `$NAME` and `${NAME}`; an unset name becomes empty, as in a shell.
pub(crate) fn expand_variables(text: &str, env: &BTreeMap<String, String>) -> String {
    let value = |piece| match piece {
        PathPiece::Text(text) => text,
        PathPiece::Name(name) => env.get(name).map_or("", String::as_str),
    };
    split_variables(text).into_iter().map(value).collect()
}

/// Whether the path depends on variables.
pub(crate) fn has_variables(directory: &WorkingDirectory) -> bool {
    split_home(&directory.path).0 || variable_names(directory).next().is_some()
}

/// Whether all variables of the path are set.
pub(crate) fn all_variables_set(env: &BTreeMap<String, String>, directory: &WorkingDirectory) -> bool {
    variable_names(directory).all(|name| env.contains_key(name))
}

/// A shell word in which the shell replaces the variables and nothing else. A name that is not
/// valid for a shell variable is looked up in `env`.
pub(crate) fn shell_word(env: &BTreeMap<String, String>, directory: &WorkingDirectory) -> String {
    let (home, rest) = split_home(&directory.path);
    let rest = if directory.expand { split_variables(rest) } else { vec![PathPiece::Text(rest)] };
    let home = if home { "\"${HOME-/}\"" } else { "" };
    // An unset variable expands to nothing even in a shell with `set -u`.
    let word = |piece| match piece {
        PathPiece::Text(text) => shell::quote_word(text),
        PathPiece::Name(name) if shell::is_variable_name(name) => format!("\"${{{name}-}}\""),
        PathPiece::Name(name) => shell::quote_word(env.get(name).map_or("", String::as_str)),
    };
    std::iter::once(home.to_owned()).chain(rest.into_iter().map(word)).collect()
}

fn variable_names(directory: &WorkingDirectory) -> impl Iterator<Item = &str> {
    let pieces = if directory.expand { split_variables(&directory.path) } else { Vec::new() };
    pieces.into_iter().filter_map(|piece| match piece {
        PathPiece::Name(name) => Some(name),
        PathPiece::Text(_) => None,
    })
}

/// Whether a path begins with the home directory, and the rest of it.
fn split_home(path: &str) -> (bool, &str) {
    match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => (true, rest),
        _ => (false, path),
    }
}

fn split_variables(text: &str) -> Vec<PathPiece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        pieces.push(PathPiece::Text(before));
        let (name, following) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some(braced) => braced,
            None => {
                let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                after.split_at(end.unwrap_or(after.len()))
            }
        };
        pieces.push(if name.is_empty() { PathPiece::Text("$") } else { PathPiece::Name(name) });
        rest = following;
    }
    pieces.push(PathPiece::Text(rest));
    pieces.retain(|piece| *piece != PathPiece::Text(""));
    pieces
}

#[cfg(test)]
mod tests {
    use wire::process::MissingDirectory;

    use super::*;

    fn env() -> BTreeMap<String, String> {
        let variables = [("A", "one"), ("HOME", "/h"), ("a.b", "it's")];
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    fn directory(path: &str) -> WorkingDirectory {
        WorkingDirectory { path: path.to_owned(), missing: MissingDirectory::Fail, expand: true }
    }

    fn check(text: &str, expected: &str) {
        assert_eq!(expand_variables(text, &env()), expected, "{text}");
    }

    #[test]
    fn variables_are_replaced_as_a_shell_would() {
        check("/x/$A/y", "/x/one/y");
        check("${A}b$A", "onebone");
        check("$NONE/a", "/a");
        check("$", "$");
        check("a$$A", "a$one");
        check("${A", "${A");
        check("$HOME", "/h");
    }

    #[test]
    fn expanded_path_is_absolute() {
        for (path, whole) in [
            ("~", "/h"),
            ("~/$A", "/h/one"),
            ("~a", "/b/~a"),
            ("$A", "/b/one"),
            ("$NONE", "/b"),
            ("/$A", "/one"),
        ] {
            assert_eq!(expand_path("/b", &env(), &directory(path)), whole, "{path}");
        }
        let literal = WorkingDirectory { expand: false, ..directory("$A") };
        assert_eq!(expand_path("/b", &env(), &literal), "/b/$A");
    }

    #[test]
    fn variables_of_a_path_are_found() {
        for (path, variable, known) in [
            ("/a", false, true),
            ("/$", false, true),
            ("~/a", true, true),
            ("$A", true, true),
            ("$B", true, false),
        ] {
            let directory = directory(path);
            assert_eq!(
                (has_variables(&directory), all_variables_set(&env(), &directory)),
                (variable, known),
                "{path}"
            );
        }
        assert!(!has_variables(&WorkingDirectory { expand: false, ..directory("$A") }));
    }

    /// This runs a real shell, because the result depends on its parsing.
    #[test]
    fn a_shell_replaces_variables_and_nothing_else() {
        for (path, expected) in [
            ("/$A/${A}b", "/o n*e/o n*eb"),
            ("~/$NONE$", "/house/$"),
            ("$(echo x)`echo y`;'\"\\\n*", "$(echo x)`echo y`;'\"\\\n*"),
            ("${A:-x}${a.b}$1$", "it's$"),
            ("${A;echo x}", ""),
            ("~root/a!b", "~root/a!b"),
        ] {
            let text = format!("set -u; printf %s {}", shell_word(&env(), &directory(path)));
            let mut command = std::process::Command::new("/bin/sh");
            command.args(["-c", &text]).env_clear().env("A", "o n*e").env("HOME", "/house");
            let output = command.output().expect("every host has a shell");
            assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{path}");
        }
    }
}
