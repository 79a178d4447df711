//! A page as a script: its blocks as files, and a bash script that runs them in order.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::extract::{Action, Block};

const SHELL_SESSION: &str = include_str!("session.sh");
const PYTHON_SESSION: &str = include_str!("session.py");

/// Writes everything that the page needs below `directory`, the script as `page.sh`.
pub(super) fn write(page: &str, blocks: &[Block], binary: &Path, directory: &Path) -> Result<()> {
    let file = |name: &str, text: &str| {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("could not write `{}`", path.display()))
    };
    for name in ["bin", "blocks", "home", "tmp", "cwd"] {
        fs::create_dir(directory.join(name)).context("could not make a directory for a page")?;
    }
    file("session.sh", SHELL_SESSION)?;
    file("session.py", PYTHON_SESSION)?;
    file("bin/coracle", &wrapper(binary))?;
    fs::set_permissions(directory.join("bin/coracle"), fs::Permissions::from_mode(0o755))?;
    let mut script = ". \"$DOCS_DIR/session.sh\"\n".to_owned();
    for block in blocks {
        let Some(call) = call(page, block) else { continue };
        file(&format!("blocks/{}", block.line), &content(block))?;
        script.push_str(&format!("__block {}\n{call}\n", block.line));
    }
    script.push_str("touch \"$DOCS_DIR/completed\"\n");
    file("page.sh", &script)
}

/// The call that runs a block, or nothing for one that is not run.
fn call(page: &str, block: &Block) -> Option<String> {
    let path = format!("\"$DOCS_DIR/blocks/{}\"", block.line);
    match block.action {
        Action::Shell => Some(format!(". {path}")),
        Action::ShellOnHostNetwork => Some(format!("__on_host_network {path}")),
        Action::Python => Some(format!("__python {page}:{}:{path}", block.line)),
        Action::CheckConfig => Some(format!("coracle config check {path}")),
        Action::NotRun(_) | Action::Show => None,
    }
}

/// The text of a block. The text of a shell block has as many empty lines before it as the page has lines,
/// so that bash reports the page's line numbers.
fn content(block: &Block) -> String {
    match block.action {
        Action::Shell | Action::ShellOnHostNetwork => {
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
    if in_background && code.contains("coracle serve") {
        format!("{code} __wait_for_server")
    } else {
        line.to_owned()
    }
}

/// The `coracle` wrapper of pages: the output of a server goes to the file that the session watches.
fn wrapper(binary: &Path) -> String {
    let binary = binary.display();
    format!(
        "#!/bin/sh\n\
         [ \"$1\" != serve ] || exec '{binary}' \"$@\" >\"$DOCS_DIR/ready\" 2>>\"$DOCS_DIR/server.log\"\n\
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
        for line in ["coracle serve", "coracle serve && true", "sleep 1 &", "coracle create  # serve &"] {
            assert_eq!(wait_for_server(line), line);
        }
    }

    #[test]
    fn blocks_count_lines_as_their_page_does() {
        let block = Block { line: 3, action: Action::Shell, text: "false\n".to_owned() };
        assert_eq!(content(&block).lines().position(|line| line == "false"), Some(3));
    }
}
