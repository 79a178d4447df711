//! A page as a script: its blocks as files, and a bash script that runs them in order.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::extract::{BlockAction, CodeBlock};

const SHELL_SESSION: &str = include_str!("session.sh");
const PYTHON_SESSION: &str = include_str!("session.py");

/// Writes everything that the page needs below `directory`, the script as `page.sh`.
pub(super) fn write_session(page: &str, blocks: &[CodeBlock], binary: &Path, directory: &Path) -> Result<()> {
    let file = |name: &str, text: &str| {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("could not write `{}`", path.display()))
    };
    for name in ["bin", "blocks", "home", "tmp", "cwd"] {
        fs::create_dir(directory.join(name)).context("could not make a directory for a page")?;
    }
    file("session.sh", SHELL_SESSION)?;
    file("session.py", PYTHON_SESSION)?;
    file("bin/coracle", &coracle_wrapper(binary))?;
    fs::set_permissions(directory.join("bin/coracle"), fs::Permissions::from_mode(0o755))?;
    let mut script = ". \"$DOCS_DIR/session.sh\"\n".to_owned();
    for block in blocks {
        let Some(call) = block_call(page, block) else { continue };
        file(&format!("blocks/{}", block.line), &block_content(block))?;
        script.push_str(&format!("__block {}\n{call}\n", block.line));
    }
    script.push_str("touch \"$DOCS_DIR/completed\"\n");
    file("page.sh", &script)
}

/// The call that runs a block, or nothing for one that is not run.
fn block_call(page: &str, block: &CodeBlock) -> Option<String> {
    let path = format!("\"$DOCS_DIR/blocks/{}\"", block.line);
    match block.action {
        BlockAction::Shell => Some(format!(". {path}")),
        BlockAction::ShellOnHostNetwork => Some(format!("__on_host_network {path}")),
        BlockAction::ShellWithInternet => Some(format!("__connect_to_internet\n. {path}")),
        BlockAction::Python => Some(format!("__python {page}:{}:{path}", block.line)),
        BlockAction::CheckConfig => Some(format!("coracle config check {path}")),
        BlockAction::LongShell(_) | BlockAction::NotRun(_) | BlockAction::Show => None,
    }
}

/// The text of a block. The text of a shell block has as many empty lines before it as the page has lines,
/// so that bash reports the page's line numbers.
fn block_content(block: &CodeBlock) -> String {
    match block.action {
        BlockAction::Shell | BlockAction::ShellOnHostNetwork | BlockAction::ShellWithInternet => {
            let lines = block.text.lines().map(wait_for_server);
            "\n".repeat(block.line) + &lines.fold(String::new(), |text, line| text + &line + "\n")
        }
        _ => block.text.clone(),
    }
}

/// A server that is started in the background is waited for, as a reader would see it become
/// ready before typing the next line.
fn wait_for_server(line: &str) -> String {
    let code = line.split(" #").next().unwrap_or_default().trim_end();
    let in_background = code.ends_with('&') && !code.ends_with("&&");
    if in_background && (code.contains("coracle serve") || code.contains("coracle aio")) {
        format!("{code} __wait_for_server")
    } else {
        line.to_owned()
    }
}

/// The `coracle` wrapper of pages: the output of a server goes to the file that the session watches.
fn coracle_wrapper(binary: &Path) -> String {
    let binary = binary.display();
    format!(
        "#!/bin/sh\n\
         case \"$1\" in serve|aio) exec '{binary}' \"$@\" >\"$DOCS_DIR/ready\" 2>>\"$DOCS_DIR/server.log\" ;; esac\n\
         exec '{binary}' \"$@\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_in_the_background_are_waited_for() {
        let waited = "coracle serve --config x.toml & __wait_for_server";
        assert_eq!(wait_for_server("coracle serve --config x.toml &      # a comment"), waited);
        let waited = "coracle serve 2>coracle.log & __wait_for_server";
        assert_eq!(wait_for_server("coracle serve 2>coracle.log &"), waited);
        assert_eq!(wait_for_server("coracle aio --port 1 &"), "coracle aio --port 1 & __wait_for_server");
        for line in ["coracle serve", "coracle serve && true", "sleep 1 &", "coracle create  # serve &"] {
            assert_eq!(wait_for_server(line), line);
        }
    }

    #[test]
    fn blocks_count_lines_as_their_page_does() {
        let block = CodeBlock { line: 3, action: BlockAction::Shell, text: "false\n".to_owned() };
        assert_eq!(block_content(&block).lines().position(|line| line == "false"), Some(3));
    }
}
