//! The env file of a sandbox: variables that its commands write there are in the environment of
//! every command and shell started afterwards.
//!
//! ```text
//! KEY=value       trimmed; $NAME and ${NAME} are replaced
//! KEY="v a\"l"    \n \r \t \\ \" are escapes; $NAME is replaced
//! KEY='v a l'     taken literally, may span several lines; '\'' is one quote
//! # a comment
//! ```
//! The sandbox controls the file, so its content and type are arbitrary. The forked child reads it
//! with the command's identity, after it has dropped its privileges, so only that command is at
//! risk. A pipe, a device or a directory counts as no file, and a malformed line is skipped. The
//! number of bytes it adds is bounded, so that the file alone can never keep a command from
//! starting.

use std::collections::BTreeMap;
use std::ffi::CStr;

use rustix::fs::{FileType, Mode, OFlags};

use crate::path::expand_variables;

/// How much of the file is read; the rest is ignored.
const MAX_FILE_BYTES: usize = 256 << 10;

/// The maximum size of one variable with its name. The kernel allows 128 KiB.
const MAX_VARIABLE_BYTES: usize = 100 << 10;

/// The maximum size of all variables together. The kernel allows a quarter of the stack limit, 2
/// MiB by default, for these and the arguments.
const MAX_TOTAL_BYTES: usize = 512 << 10;

/// Reads the variables; an unreadable file has none.
pub(crate) fn read_env_file(path: &CStr, base: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let Some(bytes) = read_start(path) else { return BTreeMap::new() };
    let complete = match bytes.len() {
        MAX_FILE_BYTES => bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1),
        all => all,
    };
    parse_variables(&String::from_utf8_lossy(&bytes[..complete]), base)
}

fn read_start(path: &CStr) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    if !FileType::from_raw_mode(stat.st_mode).is_file() {
        return None;
    }
    let mut bytes = vec![0; MAX_FILE_BYTES];
    let mut length = 0;
    while length < bytes.len() {
        match rustix::io::read(&file, &mut bytes[length..]) {
            Ok(0) | Err(_) => break,
            Ok(count) => length += count,
        }
    }
    bytes.truncate(length);
    Some(bytes)
}

/// Parses the variables in a text; if a name occurs twice, the last one counts. `$NAME` is looked
/// up in `base`.
fn parse_variables(text: &str, base: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut variables = BTreeMap::new();
    let mut left = MAX_TOTAL_BYTES;
    let mut rest = text;
    while !rest.is_empty() {
        let (found, behind) = parse_entry(rest);
        rest = behind;
        let Some((name, value)) = found else { continue };
        let value = value.into_expanded(base);
        let size = name.len() + value.len() + 2;
        if size > MAX_VARIABLE_BYTES.min(left) || name.contains('\0') || value.contains('\0') {
            continue;
        }
        left -= size;
        variables.insert(name.to_owned(), value);
    }
    variables
}

/// A value before `$NAME` is replaced.
enum EnvValue {
    Literal(String),
    Expandable(String),
}

impl EnvValue {
    fn into_expanded(self, base: &BTreeMap<String, String>) -> String {
        match self {
            Self::Literal(text) => text,
            // A text may refer to a long value of `base` many times.
            Self::Expandable(text) => {
                let longest = base.values().map(String::len).max().unwrap_or(0);
                let named = text.matches('$').count();
                let fits = named.saturating_mul(longest) <= 8 * MAX_VARIABLE_BYTES;
                if fits { expand_variables(&text, base) } else { text }
            }
        }
    }
}

/// Parses the first entry and returns the remaining text. A malformed entry is skipped as one line.
fn parse_entry(text: &str) -> (Option<(&str, EnvValue)>, &str) {
    let (line, behind) = text.split_once('\n').unwrap_or((text, ""));
    let trimmed = line.trim();
    if trimmed.is_empty() || trimmed.starts_with('#') {
        return (None, behind);
    }
    let Some((name, value)) = line.split_once('=') else { return (None, behind) };
    let name = name.trim();
    if name.is_empty() {
        return (None, behind);
    }
    let value = value.trim_start();
    let Some(quote) = value.chars().next().filter(|first| matches!(first, '"' | '\'')) else {
        return (Some((name, EnvValue::Expandable(value.trim_end().to_owned()))), behind);
    };
    // A quoted value may continue after the end of its line.
    let begin = line.len() - value.len() + quote.len_utf8();
    let quoted =
        if quote == '"' { parse_double_quoted(&text[begin..]) } else { parse_single_quoted(&text[begin..]) };
    let Some((value, tail)) = quoted else { return (None, behind) };
    let (tail, after) = tail.split_once('\n').unwrap_or((tail, ""));
    if tail.trim().is_empty() { (Some((name, value)), after) } else { (None, behind) }
}

/// The value and the text after its closing quote.
fn parse_single_quoted(text: &str) -> Option<(EnvValue, &str)> {
    const ESCAPED_QUOTE: &str = r"\''";
    let mut value = String::new();
    let mut rest = text;
    loop {
        let (part, after) = rest.split_once('\'')?;
        value.push_str(part);
        match after.strip_prefix(ESCAPED_QUOTE) {
            Some(more) => {
                value.push('\'');
                rest = more;
            }
            None => return Some((EnvValue::Literal(value), after)),
        }
    }
}

fn parse_double_quoted(text: &str) -> Option<(EnvValue, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((index, letter)) = letters.next() {
        match letter {
            '"' => return Some((EnvValue::Expandable(value), &text[index + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                'r' => value.push('\r'),
                't' => value.push('\t'),
                plain @ ('\\' | '"') => value.push(plain),
                // An unknown escape is kept literally.
                other => value.extend(['\\', other]),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn base() -> BTreeMap<String, String> {
        BTreeMap::from([("HOME".to_owned(), "/root".to_owned()), ("A".to_owned(), "one".to_owned())])
    }

    fn check(text: &str, expected: &[(&str, &str)]) {
        let expected: BTreeMap<String, String> =
            expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        assert_eq!(parse_variables(text, &base()), expected, "{text:?}");
    }

    #[test]
    fn plain_values_are_trimmed_and_their_variables_replaced() {
        check("A=b", &[("A", "b")]);
        check("  K =  v w  \r\n", &[("K", "v w")]);
        check("P=$HOME/bin:${A}x\nEMPTY=\nN=$NONE!", &[("P", "/root/bin:onex"), ("EMPTY", ""), ("N", "!")]);
        check("K=a=b#c", &[("K", "a=b#c")]);
        check("A=two\nB=$A", &[("A", "two"), ("B", "one")]);
    }

    #[test]
    fn quoted_values_keep_their_blanks_and_know_escapes() {
        check(r#"K=" a\tb\n\"c\" \\ \x $A ""#, &[("K", " a\tb\n\"c\" \\ \\x one ")]);
        check("K=' a $HOME \\n '", &[("K", " a $HOME \\n ")]);
        check("K='one\ntwo'\nL=3", &[("K", "one\ntwo"), ("L", "3")]);
        check("K=\"one\ntwo\"  \nL=3", &[("K", "one\ntwo"), ("L", "3")]);
        check(r"K='it'\''s'", &[("K", "it's")]);
        check(r"K=''\'''", &[("K", "'")]);
        check("K=''", &[("K", "")]);
    }

    #[test]
    fn comments_and_malformed_lines_are_skipped_and_the_last_entry_counts() {
        check("# K=1\n\n  # L=2\nMALFORMED\n=x\n  =y\nA=1\nA=2", &[("A", "2")]);
        check("K='never closed\nL=2", &[("L", "2")]);
        check("K=\"never closed\\\"\nL=2", &[("L", "2")]);
        check("K='a' b\nL=2", &[("L", "2")]);
        check("K=a\0b\nL=2", &[("L", "2")]);
        check("K=\"a\\", &[]);
    }

    #[test]
    fn size_of_added_variables_is_bounded() {
        let long = "x".repeat(MAX_VARIABLE_BYTES);
        check(&format!("K={long}\nL=2"), &[("L", "2")]);
        let many: String = (0..20_000).map(|n| format!("K{n}={}\n", "y".repeat(100))).collect();
        let all: usize =
            parse_variables(&many, &base()).iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        assert!(all <= MAX_TOTAL_BYTES);
        let large = BTreeMap::from([("BIG".to_owned(), "z".repeat(MAX_VARIABLE_BYTES))]);
        let bomb = format!("K={}\nL=2", "$BIG".repeat(50_000));
        assert!(
            !parse_variables(&bomb, &large).contains_key("K")
                && parse_variables(&bomb, &large).contains_key("L")
        );
    }

    #[test]
    fn only_a_regular_file_is_read_and_no_more_than_its_beginning() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| {
            let path = dir.path().join(name).into_os_string().into_encoded_bytes();
            std::ffi::CString::new(path).expect("no zero byte")
        };
        assert!(read_env_file(&path("none"), &base()).is_empty());
        assert!(read_env_file(&path("."), &base()).is_empty());
        assert!(read_env_file(c"/dev/zero", &base()).is_empty());
        let pipe = path("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        assert!(read_env_file(&pipe, &base()).is_empty());
        let text = format!("A=1\n{}\nB=2\n", "#".repeat(MAX_FILE_BYTES));
        std::fs::write(dir.path().join("long"), text).expect("written");
        assert_eq!(read_env_file(&path("long"), &base()).into_keys().collect::<Vec<_>>(), ["A"]);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_to_its_end(text in "[\\PC\n\"'\\\\=$# ]{0,200}") {
            for (name, value) in parse_variables(&text, &base()) {
                prop_assert!(!name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0'));
            }
        }

        /// As clients write them: in single quotes, or with escapes in double quotes.
        #[test]
        fn quoted_values_round_trip(value in "[^\0$]{0,100}") {
            let idiom = format!("K='{}'\n", value.replace('\'', r"'\''"));
            prop_assert_eq!(parse_variables(&idiom, &base()).remove("K"), Some(value.clone()));
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"");
            let escaped = escaped.replace('\n', "\\n").replace('\r', "\\r").replace('\t', "\\t");
            let escaped = format!("K=\"{escaped}\"");
            prop_assert_eq!(parse_variables(&escaped, &base()).remove("K"), Some(value));
        }
    }
}
