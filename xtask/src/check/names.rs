//! Names that readers search for: types are unique within their crate, and constants say what they limit.

use std::collections::BTreeMap;

use super::Findings;
use super::sources::RustSource;

/// Types of one border that mirror another in the same crate on purpose, as crate directory and name.
const MIRROR_TYPES: &[(&str, &str)] = &[];

/// Beginnings of constant names, and the rule that each of them breaks.
const FORBIDDEN_BEGINNINGS: &[(&str, &str)] = &[
    ("MOST_", LIMIT_RULE),
    ("LONGEST_", LIMIT_RULE),
    ("LARGEST_", LIMIT_RULE),
    ("SHORTEST_", LIMIT_RULE),
    ("SMALLEST_", LIMIT_RULE),
    ("FEWEST_", LIMIT_RULE),
    ("ENOUGH", LIMIT_RULE),
    ("USUAL", "a default is `DEFAULT_*`"),
    ("PATIENCE", "a wait is `*_TIMEOUT`"),
    ("QUIET", "a wait is `*_TIMEOUT`"),
];

const LIMIT_RULE: &str = "a limit is `MAX_*` or `MIN_*`";

/// Beginnings and ends by which the name of a duration says what it is for.
const DURATION_BEGINNINGS: &[&str] = &["MAX_", "MIN_", "DEFAULT_"];
const DURATION_ENDS: &[&str] =
    &["_TIMEOUT", "_INTERVAL", "_DELAY", "_GRACE", "_WINDOW", "_RETENTION", "_AGE", "_TIME"];

/// Constants that are only another way to write a duration.
const DURATION_UNITS: &[&str] = &["SECOND", "MINUTE", "HOUR", "DAY"];

/// Folders with more sources than this are hard to survey.
const MAX_FOLDER_FILES: usize = 25;

pub(super) fn check_names(sources: &[RustSource]) -> Findings {
    let mut findings = repeated_types(sources);
    for source in sources {
        findings.extend(check_constants(source));
    }
    findings
}

/// Types whose name another type of the same crate has already.
fn repeated_types(sources: &[RustSource]) -> Findings {
    let mut first_uses = BTreeMap::new();
    let mut findings = Findings::new();
    for source in sources.iter().filter(|source| !source.is_test()) {
        let Some((krate, _)) = source.path.split_once("/src/") else { continue };
        for (line, name) in type_names(&source.text.code) {
            let here = format!("{}:{line}", source.path);
            if MIRROR_TYPES.contains(&(krate, name)) {
                continue;
            }
            if let Some(first) = first_uses.insert((krate, name), here.clone()) {
                let why = "a name leads to one type of its crate";
                findings.push(format!("{here}: the type `{name}` exists at {first} as well; {why}"));
            }
        }
    }
    findings
}

/// The structs, enums and traits that the code defines, with their lines.
fn type_names(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let words = numbered_words(code);
    words.filter_map(|(line, before, word)| {
        let defines = matches!(before, "struct" | "enum" | "trait");
        (defines && word.starts_with(char::is_uppercase)).then_some((line, word))
    })
}

/// Each name in the code with its line and the name before it in that line.
fn numbered_words(code: &str) -> impl Iterator<Item = (usize, &str, &str)> {
    code.lines().enumerate().flat_map(|(number, line)| {
        let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        let names = line.split(move |letter| !is_name(letter)).filter(|word| !word.is_empty());
        names.scan("", move |before, word| Some((number + 1, std::mem::replace(before, word), word)))
    })
}

/// Constants with a name from which a reader cannot tell what they are for. Tests name their durations
/// as they like: `HOUR` or `STEP` says enough there.
fn check_constants(source: &RustSource) -> Findings {
    let mut findings = Findings::new();
    for (number, line) in source.text.code.lines().enumerate() {
        let Some((name, is_duration)) = defined_constant(line) else { continue };
        let here = format!("{}:{}: the constant `{name}`", source.path, number + 1);
        if let Some((_, why)) = FORBIDDEN_BEGINNINGS.iter().find(|(begins, _)| name.starts_with(begins)) {
            findings.push(format!("{here}; {why}"));
        } else if is_duration && !source.is_test() && !is_duration_name(name) {
            let why = "a duration is `*_TIMEOUT`, `*_INTERVAL`, `*_DELAY`, `MAX_*` or similar";
            findings.push(format!("{here}; {why} (xtask/src/check/names.rs has the list)"));
        }
    }
    findings
}

/// The name of the constant that a line defines, and whether it is a duration.
fn defined_constant(line: &str) -> Option<(&str, bool)> {
    let (before, rest) = line.split_once("const ")?;
    let (name, rest) = rest.split_once(':')?;
    let starts_word = before.is_empty() || before.ends_with(' ');
    let is_name = name.chars().all(|letter| letter.is_ascii_uppercase() || "_0123456789".contains(letter));
    let kind = rest.split('=').next().unwrap_or_default().trim();
    (starts_word && is_name).then(|| (name, kind == "Duration" || kind.ends_with("::Duration")))
}

fn is_duration_name(name: &str) -> bool {
    DURATION_UNITS.contains(&name)
        || DURATION_BEGINNINGS.iter().any(|begins| name.starts_with(begins))
        || DURATION_ENDS.iter().any(|ends| name.ends_with(ends))
}

/// Folders that hold too many sources, as warnings.
pub(super) fn full_folders(sources: &[RustSource]) -> Vec<String> {
    let mut counts = BTreeMap::<&str, usize>::new();
    for source in sources.iter().filter(|source| !source.is_test()) {
        let folder = source.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *counts.entry(folder).or_default() += 1;
    }
    let full = counts.into_iter().filter(|(_, count)| *count > MAX_FOLDER_FILES);
    full.map(|(folder, count)| format!("{folder}: {count} sources in one folder, usually several subjects"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Findings {
        let sources: Vec<_> = files.iter().map(|(path, text)| RustSource::parse(path, text)).collect();
        check_names(&sources)
    }

    #[test]
    fn type_name_is_found_twice_only_inside_a_crate() {
        let one = ("crates/a/src/one.rs", "pub struct Thing<T>(T);");
        let other = ("crates/a/src/two/other.rs", "\npub(crate) enum Thing { A }");
        let expected = "crates/a/src/two/other.rs:2: the type `Thing` exists at crates/a/src/one.rs:1 as well; \
                        a name leads to one type of its crate";
        assert_eq!(found(&[one, other]), [expected]);
        assert_eq!(found(&[one, ("crates/b/src/other.rs", other.1)]), Findings::new());
    }

    #[test]
    fn types_of_tests_comments_and_macros_do_not_count() {
        let one = ("crates/a/src/one.rs", "trait Thing {}");
        for (path, text) in [
            ("crates/a/src/tests/two.rs", "struct Thing;"),
            ("crates/a/src/two.rs", "#[cfg(test)]\nmod tests {\n struct Thing;\n}"),
            ("crates/a/src/two.rs", "// struct Thing\nlet x = \"enum Thing\";"),
            ("crates/a/src/two.rs", "impl Thing for Other {}"),
            ("crates/a/src/two.rs", "struct $name;"),
        ] {
            assert_eq!(found(&[one, (path, text)]), Findings::new(), "{text}");
        }
    }

    #[test]
    fn limits_and_defaults_have_one_form() {
        for name in ["MOST_FILES", "LONGEST_NAME", "SMALLEST_DISK", "USUAL_PORT", "ENOUGH", "PATIENCE"] {
            let text = format!("pub(crate) const {name}: usize = 3;");
            assert_eq!(found(&[("crates/a/src/x.rs", &text)]).len(), 1, "{name}");
            assert_eq!(found(&[("tests/e2e/x.rs", &text)]).len(), 1, "{name}");
        }
        for text in ["const MAX_FILES: u8 = 1;", "const fn f(MOST_X: u8) {}", "fn f<const MOST: usize>() {}"]
        {
            assert_eq!(found(&[("crates/a/src/x.rs", text)]), Findings::new(), "{text}");
        }
    }

    #[test]
    fn durations_say_what_they_are_for() {
        let found = |path: &str, name: &str, kind: &str| {
            found(&[(path, &format!("    const {name}: {kind} = {kind}::from_secs(1);"))]).len()
        };
        for kind in ["Duration", "std::time::Duration"] {
            assert_eq!(found("crates/a/src/x.rs", "RETRY_AFTER", kind), 1);
            for name in ["READ_TIMEOUT", "POLL_INTERVAL", "MAX_CLOCK_DRIFT", "HOUR"] {
                assert_eq!(found("crates/a/src/x.rs", name, kind), 0, "{name}");
            }
        }
        assert_eq!(found("crates/a/src/x.rs", "RETRY_AFTER", "Header"), 0);
        assert_eq!(found("tests/e2e/x.rs", "STEP", "Duration"), 0);
    }

    #[test]
    fn full_folder_is_reported_once() {
        let sources = |folder: &str| -> Vec<RustSource> {
            let paths = (0..=MAX_FOLDER_FILES).map(|number| format!("{folder}/{number}.rs"));
            paths.map(|path| RustSource::parse(&path, "")).collect()
        };
        assert_eq!(full_folders(&sources("crates/a/src")).len(), 1);
        assert_eq!(full_folders(&sources("crates/a/src")[1..]), Vec::<String>::new());
        assert_eq!(full_folders(&sources("crates/a/tests")), Vec::<String>::new());
    }

    #[test]
    fn excepted_mirror_types_exist() {
        for (krate, name) in MIRROR_TYPES {
            let files = super::super::tree::read_text_files().expect("the sources can be read");
            let ours = files.iter().filter(|file| file.path.starts_with(&format!("{krate}/src/")));
            let defined = ours
                .map(|file| RustSource::parse(&file.path, &file.text))
                .any(|source| type_names(&source.text.code).any(|(_, found)| found == *name));
            assert!(defined, "{krate} has no type `{name}`");
        }
    }
}
