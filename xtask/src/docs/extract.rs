//! The code blocks of a page, in order, and the action for each.
//!
//! A fence names its language, and may have an option after it:
//!
//! ```text
//! ```sh                         run in the page's one bash session
//! ```sh host-network            run in the network of the host, in a shell of its own
//! ```sh internet                run in the page's session, whose network reaches that of the host
//! ```sh long needs minutes      run only with CORACLE_TEST_LONG=1, otherwise listed with its reason
//! ```sh no-run needs a registry listed in the report with its reason, not run
//! ```console                    the lines after `$ ` are run, the others are output
//! ```python                     run in the page's one interpreter
//! ```toml                       checked as a configuration file
//! ```
//!
//! Everything that would let a command go unchecked is an error: a fence without a language or with an
//! unknown one, an unknown option, a command in an indented block.

use std::fmt;

/// The action for a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BlockAction {
    Shell,
    ShellOnHostNetwork,
    /// Run in the page's session, whose network is connected with that of the host.
    ShellWithInternet,
    Python,
    CheckConfig,
    /// Runs only with `CORACLE_TEST_LONG`; the page gives the reason.
    LongShell(String),
    /// Listed with the reason that the page gives.
    NotRun(String),
    /// Output, drawings and other languages.
    Show,
}

/// A code block of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CodeBlock {
    /// The line of its fence, counted from one. The content begins on the next line.
    pub(super) line: usize,
    pub(super) action: BlockAction,
    pub(super) text: String,
}

/// A block that cannot be understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadBlock {
    pub(super) line: usize,
    why: String,
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.why)
    }
}

#[derive(Clone, Copy)]
enum FenceLanguage {
    Shell,
    Console,
    Python,
    Toml,
    Shown,
}

/// Languages of blocks that are only shown.
const SHOWN_LANGUAGES: &[&str] = &["text", "json", "ini", "yaml", "js", "ts", "dockerfile", "http"];

/// An open fence: its marker, and the indentation of its content.
struct OpenFence<'a> {
    marks: &'a str,
    indent: usize,
    info: &'a str,
}

/// Finds all blocks of a page.
pub(super) fn extract_blocks(page: &str) -> Result<Vec<CodeBlock>, BadBlock> {
    let lines: Vec<&str> = page.lines().collect();
    let mut blocks = Vec::new();
    let mut index = 0;
    while index < lines.len() {
        let line = index + 1;
        if let Some(fence) = parse_opening_fence(lines[index]) {
            let length = lines[index + 1..].iter().position(|line| is_closing_fence(line, &fence));
            let length = length.ok_or(BadBlock { line, why: "the block has no end".to_owned() })?;
            let content = &lines[index + 1..index + 1 + length];
            blocks.push(parse_block(line, &fence, content)?);
            index += length + 1;
        } else if is_indented_command(&lines, index) {
            let why = "a command in an indented block is not run; use a fence".to_owned();
            return Err(BadBlock { line, why });
        }
        index += 1;
    }
    Ok(blocks)
}

/// A fence may be indented, and may follow the mark of a list item.
fn parse_opening_fence(line: &str) -> Option<OpenFence<'_>> {
    let rest = line.trim_start();
    let item = rest.find(' ').filter(|end| is_list_mark(&rest[..*end]));
    let rest = item.map_or(rest, |end| rest[end..].trim_start());
    let length = rest.bytes().take_while(|byte| *byte == b'`').count();
    let (marks, info) = rest.split_at(length);
    let is_fence = length >= 3 && !info.contains('`');
    is_fence.then(|| OpenFence { marks, indent: line.len() - rest.len(), info: info.trim() })
}

fn is_list_mark(word: &str) -> bool {
    let digits = word.trim_end_matches(['.', ')']);
    matches!(word, "-" | "*" | "+")
        || (digits.len() < word.len()
            && !digits.is_empty()
            && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_closing_fence(line: &str, fence: &OpenFence<'_>) -> bool {
    let line = line.trim();
    line.len() >= fence.marks.len() && line.bytes().all(|byte| byte == b'`')
}

fn is_indented_command(lines: &[&str], index: usize) -> bool {
    let after_blank = index == 0 || lines[index - 1].trim().is_empty();
    let code = lines[index].strip_prefix("    ").unwrap_or_default();
    after_blank && ["coracle ", "$ ", "cargo ", "curl "].iter().any(|start| code.starts_with(start))
}

fn parse_block(line: usize, fence: &OpenFence<'_>, content: &[&str]) -> Result<CodeBlock, BadBlock> {
    let bad = |why: String| BadBlock { line, why };
    let (name, words) = fence.info.split_once(char::is_whitespace).unwrap_or((fence.info, ""));
    let language = match name {
        "sh" => FenceLanguage::Shell,
        "console" => FenceLanguage::Console,
        "python" => FenceLanguage::Python,
        "toml" => FenceLanguage::Toml,
        "" => return Err(bad("the fence names no language; `text` is for what is only shown".to_owned())),
        name if SHOWN_LANGUAGES.contains(&name) => FenceLanguage::Shown,
        name => return Err(bad(format!("unknown language `{name}`; a shell block is `sh`"))),
    };
    let (option, reason) = words.trim().split_once(' ').unwrap_or((words.trim(), ""));
    let reason = reason.trim().to_owned();
    let action = match (language, option) {
        (_, "no-run" | "long") if reason.is_empty() => {
            return Err(bad(format!("`{option}` needs a reason after it")));
        }
        (_, "no-run") => BlockAction::NotRun(reason),
        (FenceLanguage::Shell, "long") => BlockAction::LongShell(reason),
        (FenceLanguage::Shell, "host-network") if reason.is_empty() => BlockAction::ShellOnHostNetwork,
        (FenceLanguage::Shell, "internet") if reason.is_empty() => BlockAction::ShellWithInternet,
        (_, option) if !option.is_empty() => {
            return Err(bad(format!("unknown words `{}` after the language", words.trim())));
        }
        (FenceLanguage::Shell | FenceLanguage::Console, _) => BlockAction::Shell,
        (FenceLanguage::Python, _) => BlockAction::Python,
        (FenceLanguage::Toml, _) => BlockAction::CheckConfig,
        (FenceLanguage::Shown, _) => BlockAction::Show,
    };
    let mut text = String::new();
    for line in content {
        let blank = line.bytes().take_while(|byte| *byte == b' ').count();
        let line = &line[blank.min(fence.indent)..];
        text.push_str(match language {
            // A line of output becomes an empty one, so that line numbers are kept.
            FenceLanguage::Console => line.strip_prefix("$ ").unwrap_or_default(),
            _ => line,
        });
        text.push('\n');
    }
    Ok(CodeBlock { line, action, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(page: &str) -> CodeBlock {
        let mut blocks = extract_blocks(page).expect("it is understood");
        assert_eq!(blocks.len(), 1, "{blocks:?}");
        blocks.remove(0)
    }

    fn refused(page: &str) -> String {
        extract_blocks(page).expect_err("it is refused").to_string()
    }

    #[test]
    fn blocks_come_in_order_with_their_lines() {
        let page = "# A\n\n```sh\necho 1\n```\ntext\n```python\nprint(2)\n```\n```text\nshown\n```\n";
        let found = extract_blocks(page).expect("it is understood");
        let expected = [
            (3, BlockAction::Shell, "echo 1\n"),
            (7, BlockAction::Python, "print(2)\n"),
            (10, BlockAction::Show, "shown\n"),
        ];
        let expected = expected.map(|(line, action, text)| CodeBlock { line, action, text: text.to_owned() });
        assert_eq!(found, expected);
    }

    #[test]
    fn no_run_keeps_its_reason() {
        let block = one("```sh no-run needs a registry\ncoracle image pull x\n```\n");
        assert_eq!(block.action, BlockAction::NotRun("needs a registry".to_owned()));
        assert_eq!(refused("```sh no-run\nx\n```\n"), "line 1: `no-run` needs a reason after it");
        let block = one("```sh long needs a mirror\nx\n```\n");
        assert_eq!(block.action, BlockAction::LongShell("needs a mirror".to_owned()));
        assert_eq!(refused("```sh long\nx\n```\n"), "line 1: `long` needs a reason after it");
    }

    #[test]
    fn shell_blocks_may_ask_for_the_network_of_the_host() {
        assert_eq!(one("```sh host-network\npip download x\n```\n").action, BlockAction::ShellOnHostNetwork);
        assert!(refused("```python host-network\nx\n```\n").contains("unknown words"));
        assert_eq!(one("```sh internet\npip install x\n```\n").action, BlockAction::ShellWithInternet);
        assert!(refused("```sh internet now\nx\n```\n").contains("unknown words `internet now`"));
    }

    #[test]
    fn console_output_is_not_run_and_keeps_line_numbers() {
        assert_eq!(one("```console\n$ coracle ls\nID  IMAGE\n$ true\n```\n").text, "coracle ls\n\ntrue\n");
    }

    #[test]
    fn fences_in_lists_lose_their_indentation() {
        let block = one("1. text\n2. ```toml\n   [gateway]\n   mode = \"off\"\n   ```\n");
        assert_eq!((block.line, block.action), (2, BlockAction::CheckConfig));
        assert_eq!(block.text, "[gateway]\nmode = \"off\"\n");
        assert_eq!(one("- ```sh\n  if x; then\n    y\n  fi\n  ```").text, "if x; then\n  y\nfi\n");
    }

    #[test]
    fn longer_fences_hold_shorter_ones() {
        assert_eq!(one("````text\n```sh\nx\n```\n````\n").text, "```sh\nx\n```\n");
    }

    #[test]
    fn inline_code_is_no_fence() {
        assert_eq!(extract_blocks("```sh no-run```\n`x`\n"), Ok(Vec::new()));
    }

    #[test]
    fn blocks_that_would_be_missed_are_refused() {
        assert!(refused("```\nx\n```\n").starts_with("line 1: the fence names no language"));
        assert!(refused("\n```shell\nx\n```\n").starts_with("line 2: unknown language `shell`"));
        assert!(refused("```sh norun x\nx\n```\n").contains("unknown words `norun x`"));
        assert_eq!(refused("a\n```sh\nx\n"), "line 2: the block has no end");
        assert!(refused("a:\n\n    coracle ls\n").starts_with("line 3: a command in an indented block"));
    }
}
