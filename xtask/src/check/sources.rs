//! Text that the sources must not contain, by location.

use super::Findings;
use super::rust_text::RustText;
use super::tree::TextFile;

/// One Rust file of the repository.
pub(super) struct RustSource {
    /// From the root of the repository.
    pub path: String,
    /// Code and strings before the tests, which come last in a file.
    pub text: RustText,
}

/// Text that is forbidden in some sources.
struct SourceRule {
    /// The rule applies to paths with this prefix.
    within: &'static str,
    /// The rule does not apply to paths with one of these prefixes.
    except: &'static [&'static str],
    look_in: TextView,
    forbidden: &'static [&'static str],
    why: &'static str,
}

enum TextView {
    Code,
    Strings,
}

const RULES: &[SourceRule] = &[
    SourceRule {
        within: "crates/",
        except: &["crates/linux/", "crates/embedded/src/client_entry.rs"],
        look_in: TextView::Code,
        forbidden: &["unsafe"],
        why: "`unsafe` is for crates/linux and the entry of the program alone",
    },
    SourceRule {
        within: "crates/fronts/",
        except: &[],
        look_in: TextView::Code,
        forbidden: &["backend", "backend_local", "launcher", "wire", "linux", "agent", "rusqlite"],
        why: "a front calls the core and nothing below it",
    },
    SourceRule {
        within: "crates/fronts/",
        except: &[],
        look_in: TextView::Code,
        forbidden: &["std::fs", "tokio::fs", "OpenOptions", "canonicalize"],
        why: "a front opens no file of the host",
    },
    SourceRule {
        within: "crates/fronts/",
        except: &[],
        look_in: TextView::Strings,
        forbidden: &["SELECT ", "INSERT INTO", "UPDATE ", "DELETE FROM", "CREATE TABLE"],
        why: "SQL is for the store of the service",
    },
    SourceRule {
        within: "crates/fronts/",
        except: &[],
        look_in: TextView::Strings,
        forbidden: &["/proc/", "/sys/", "/var/lib", "/run/"],
        why: "a front knows no path of the host",
    },
    SourceRule {
        within: "crates/domain/",
        except: &[],
        look_in: TextView::Code,
        forbidden: &["serde", "Serialize", "Deserialize"],
        why: "each border has types of its own and converts",
    },
    SourceRule {
        within: "crates/agent/",
        except: &[],
        look_in: TextView::Code,
        forbidden: &["async fn", "tokio"],
        why: "the agent is one thread around epoll(7)",
    },
];

/// Files that start programs on purpose: ourselves, as supervisor, server and launcher; the formatter of
/// ext4, once, for the template of a volume; the
/// programs that `bench` compares us with; and inside a sandbox, the code that runs user commands anyway.
const MAY_START_PROGRAMS: &[&str] = &[
    "crates/launcher/src/volumes/ext4.rs",
    "crates/cli/src/bench",
    "crates/cli/src/egress_process.rs",
    "crates/cli/src/pull_process.rs",
    "crates/cli/src/serve/child_process.rs",
    "crates/embedded/build.rs",
    "crates/kernel/",
    "crates/testkit/src/unjailed_agent.rs",
];

/// Files with more lines of code than this usually have two subjects.
const MAX_CODE_LINES: usize = 600;

pub(super) fn parse_sources(files: &[TextFile]) -> Vec<RustSource> {
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    rust.map(|file| RustSource::parse(&file.path, &file.text)).collect()
}

impl RustSource {
    pub(super) fn is_test(&self) -> bool {
        self.path.starts_with("tests/") || self.path.contains("/tests/") || self.path.ends_with("/tests.rs")
    }

    pub(super) fn parse(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: RustText::scan(before_tests(text)) }
    }
}

/// Tests may do what the program may not: start programs, name paths. A module of tests in a file of its
/// own is declared in the middle of this one, so only the block of such a module ends the program.
fn before_tests(text: &str) -> &str {
    text.split("\nmod tests {").next().unwrap_or(text)
}

pub(super) fn check_sources(sources: &[RustSource]) -> Findings {
    let mut findings = Findings::new();
    for source in sources.iter().filter(|source| !source.is_test()) {
        findings.extend(RULES.iter().flat_map(|rule| rule.find_violations(source)));
        findings.extend(foreign_fronts(source));
        findings.extend(started_programs(source));
    }
    findings
}

impl SourceRule {
    fn find_violations(&self, source: &RustSource) -> Findings {
        let excepted = self.except.iter().any(|path| source.path.starts_with(path));
        if excepted || !source.path.starts_with(self.within) {
            return Findings::new();
        }
        let text = match self.look_in {
            TextView::Code => &source.text.code,
            TextView::Strings => &source.text.strings,
        };
        let lines = text.lines().enumerate();
        lines
            .flat_map(|(number, line)| {
                let found =
                    self.forbidden.iter().filter(move |word| contains_word(line, word, &self.look_in));
                found.map(move |word| {
                    format!("{}:{}: `{}`; {}", source.path, number + 1, word.trim(), self.why)
                })
            })
            .collect()
    }
}

/// Whether a line contains the word: in code as a whole name at the start of a path, in strings anywhere.
fn contains_word(line: &str, word: &str, view: &TextView) -> bool {
    let part_of_name = |character: char| character.is_alphanumeric() || character == '_';
    line.match_indices(word).any(|(at, _)| match view {
        TextView::Strings => true,
        TextView::Code => {
            let before = line[..at].chars().next_back();
            let after = line[at + word.len()..].chars().next();
            let whole = !before.is_some_and(part_of_name) && !after.is_some_and(part_of_name);
            // A crate is meant only at the beginning of a path: `use wire` or `wire::`, not `self.wire`.
            let path =
                word.contains("::") || word.chars().any(char::is_whitespace) || is_path_start(line, at, word);
            whole && path
        }
    })
}

fn is_path_start(line: &str, at: usize, word: &str) -> bool {
    const NOT_CRATES: &[&str] = &["unsafe", "Serialize", "Deserialize", "OpenOptions", "canonicalize"];
    let used = line[..at].trim_end().ends_with("use");
    NOT_CRATES.contains(&word)
        || used
        || (line[at + word.len()..].starts_with("::") && !line[..at].ends_with("::"))
}

/// Programs that are started in a file where none should be.
fn started_programs(source: &RustSource) -> Findings {
    let allowed = MAY_START_PROGRAMS.iter().any(|path| source.path.starts_with(path));
    if allowed || !source.path.starts_with("crates/") {
        return Findings::new();
    }
    let lines = source.text.code.lines().enumerate();
    let starts = |line: &str| {
        let named = ["std::process", "tokio::process"].iter().any(|module| line.contains(module));
        named && line.contains("Command")
    };
    let why = "sandboxes are made by the launcher, commands are started by the agent";
    lines
        .filter(|(_, line)| starts(line))
        .map(|(number, _)| format!("{}:{}: it starts a program; {why}", source.path, number + 1))
        .collect()
}

/// The folders of the fronts. `check_fronts` compares them with the features.
pub(super) const FRONTS: &[&str] = &["aio", "opensandbox", "operator"];

/// Finds a front that names another, and shared code that names any: each front must be removable
/// without changes to the rest. Only the table of fronts names them.
fn foreign_fronts(source: &RustSource) -> Findings {
    const TABLE: &str = "registry.rs";
    let Some(path) = source.path.strip_prefix("crates/fronts/src/").filter(|path| *path != TABLE) else {
        return Findings::new();
    };
    let foreign = FRONTS.iter().filter(|front| !path.starts_with(&format!("{front}/")));
    foreign
        .filter(|front| source.text.code.contains(&format!("crate::{front}")))
        .map(|front| format!("{}: it names the front `{front}`; only {TABLE} may", source.path))
        .collect()
}

/// Files that have grown too long, as warnings.
pub(super) fn long_files(sources: &[RustSource]) -> Vec<String> {
    let lines = |source: &RustSource| source.text.code.lines().filter(|line| !line.trim().is_empty()).count();
    let long = sources.iter().filter(|source| lines(source) > MAX_CODE_LINES);
    long.map(|source| format!("{}: {} lines of code, usually two things", source.path, lines(source)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        check_sources(&[RustSource::parse(path, text)])
    }

    #[test]
    fn unsafe_is_found_as_code_and_only_outside_linux() {
        assert_eq!(found("crates/agent/src/a.rs", "// unsafe\nlet x = \"unsafe\";"), Findings::new());
        assert_eq!(found("crates/linux/src/a.rs", "unsafe { f() }"), Findings::new());
        assert_eq!(
            found("crates/agent/src/a.rs", "\nunsafe { f() }"),
            [
                "crates/agent/src/a.rs:2: `unsafe`; `unsafe` is for crates/linux and the entry of the program alone"
            ]
        );
        assert_eq!(found("crates/agent/src/a.rs", "#![deny(unsafe_code)]"), Findings::new());
    }

    #[test]
    fn a_front_may_not_reach_down() {
        for text in [
            "use backend::Backend;",
            "wire::VERSION",
            "std::fs::read(x)",
            "f(\"SELECT 1\")",
            "f(\"/proc/self\")",
        ] {
            assert_eq!(found("crates/fronts/src/x.rs", text).len(), 1, "{text}");
        }
        for text in ["use service::Service;", "self.backend.len()", "let agent = headers;", "f(\"/tmp\")"] {
            assert_eq!(found("crates/fronts/src/x.rs", text), Findings::new(), "{text}");
        }
    }

    #[test]
    fn fronts_do_not_know_each_other() {
        assert_eq!(found("crates/fronts/src/operator/a.rs", "use crate::opensandbox::x;").len(), 1);
        assert_eq!(found("crates/fronts/src/router.rs", "use crate::opensandbox::x;").len(), 1);
        for path in ["registry.rs", "opensandbox/a.rs"] {
            let path = format!("crates/fronts/src/{path}");
            assert_eq!(found(&path, "use crate::opensandbox::x;"), Findings::new(), "{path}");
        }
    }

    #[test]
    fn tests_may_start_programs() {
        for text in [
            "use std::process::{Command, Stdio};",
            "std::process::Command::new(x)",
            "use tokio::process::Command;",
        ] {
            assert_eq!(found("crates/service/src/a.rs", text).len(), 1, "{text}");
        }
        assert_eq!(
            found("crates/agent/src/a.rs", "use crate::command::Command;\nCommand::new(x)"),
            Findings::new()
        );
        let text = "fn a() {}\n\n#[cfg(test)]\nmod tests { use std::process::Command; }";
        assert_eq!(found("crates/service/src/a.rs", text), Findings::new());
        let text = "#[cfg(test)]\nmod tests;\nuse std::process::Command;";
        assert_eq!(found("crates/service/src/a.rs", text).len(), 1);
    }

    #[test]
    fn files_allowed_to_start_programs_exist() {
        for path in MAY_START_PROGRAMS {
            assert!(crate::tools::workspace_root().join(path).exists(), "{path}");
        }
    }

    #[test]
    fn only_code_makes_a_file_long() {
        let long = |line: &str| {
            long_files(&[RustSource::parse("crates/a.rs", &line.repeat(MAX_CODE_LINES + 1))]).len()
        };
        assert_eq!(long("let x = 1;\n"), 1);
        assert_eq!(long("// a comment\n"), 0);
    }
}
