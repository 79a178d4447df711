//! Text that no file of the repository may contain.

use std::path::Path;

use anyhow::{Context, Result};

use super::Findings;
use crate::tools::workspace_root;

/// A text, and why it is forbidden.
const FORBIDDEN_TEXTS: &[(&str, &str)] = &[
    ("TODO", "unfinished work belongs in an issue"),
    ("FIXME", "unfinished work belongs in an issue"),
    ("<<<<<<< ", "a merge was not finished"),
    (">>>>>>> ", "a merge was not finished"),
    ("--index-url", "packages come from the host's own index"),
    ("BEGIN PRIVATE KEY", "secrets are not kept in the repository"),
];

/// Where people keep their own files, and the names below it that are plainly made up.
const PRIVATE_ROOTS: &[(&str, &[&str])] =
    &[("/Users/", &[]), ("/home/", &["alice", "gem", "user"]), ("/work/", &[])];

/// Files that must name what they forbid, or are not ours.
const EXCLUDED_FILES: &[&str] = &["xtask/src/check/tree.rs", "LICENSE", "Cargo.lock"];

/// Generated directories.
const GENERATED_DIRECTORIES: &[&str] = &[".git", "target", ".venv", "__pycache__", ".pytest_cache"];

/// A text file, by its path from the root of the repository.
pub(super) struct TextFile {
    pub path: String,
    pub text: String,
}

/// Every text file of the repository.
pub(super) fn read_text_files() -> Result<Vec<TextFile>> {
    let mut files = Vec::new();
    collect_text_files(&workspace_root(), "", &mut files)?;
    Ok(files)
}

fn collect_text_files(root: &Path, below: &str, files: &mut Vec<TextFile>) -> Result<()> {
    let directory = root.join(below);
    let about = || format!("could not read `{}`", directory.display());
    for entry in std::fs::read_dir(&directory).with_context(about)? {
        let entry = entry.with_context(about)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() { name.clone() } else { format!("{below}/{name}") };
        let kind = entry.file_type().with_context(about)?;
        if GENERATED_DIRECTORIES.contains(&name.as_str()) {
            continue;
        }
        if kind.is_dir() {
            collect_text_files(root, &path, files)?;
        } else if kind.is_file() {
            // Files that are not text are ignored.
            files.extend(std::fs::read_to_string(entry.path()).ok().map(|text| TextFile { path, text }));
        }
    }
    Ok(())
}

pub(super) fn check_texts(files: &[TextFile]) -> Findings {
    let ours = files.iter().filter(|file| !EXCLUDED_FILES.contains(&file.path.as_str()));
    ours.flat_map(|file| find_forbidden(&file.path, &file.text)).collect()
}

fn find_forbidden(file: &str, text: &str) -> Findings {
    let lines = text.lines().enumerate();
    lines
        .flat_map(|(number, line)| {
            let texts = FORBIDDEN_TEXTS.iter().filter(move |(word, _)| line.contains(word)).copied();
            let paths =
                PRIVATE_ROOTS.iter().filter(move |(root, made_up)| names_private_path(line, root, made_up));
            let found = texts.chain(paths.map(|(root, _)| (*root, "a path of a private machine")));
            found.map(move |(word, why)| format!("{file}:{}: `{}`; {why}", number + 1, word.trim()))
        })
        .collect()
}

/// Whether a path in `line` begins with `root` and continues with a name that is not made up.
fn names_private_path(line: &str, root: &str, made_up: &[&str]) -> bool {
    let is_name = |letter: char| letter.is_alphanumeric() || "_-.".contains(letter);
    line.match_indices(root).any(|(place, _)| {
        let begins = !line[..place].ends_with(|letter: char| is_name(letter) || letter == '}');
        let rest = &line[place + root.len()..];
        let name = rest.split(|letter| !is_name(letter)).next().unwrap_or_default();
        begins && !made_up.contains(&name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_ends_and_foreign_paths_are_found_with_their_line() {
        assert_eq!(
            find_forbidden("a.rs", "fine\n// TODO later"),
            ["a.rs:2: `TODO`; unfinished work belongs in an issue"]
        );
        for line in ["see /Users/me/x", "cd /home/me", "(/work/x)", "\"/work/\""] {
            assert_eq!(find_forbidden("a.md", line).len(), 1, "{line}");
        }
        for line in ["/home/alice/x", "t/work/work", "{dir}/work/x", "/homes/me"] {
            assert_eq!(find_forbidden("a.md", line), Findings::new(), "{line}");
        }
        assert_eq!(find_forbidden("a.md", "see ~/x"), Findings::new());
    }
}
