//! Runs one page with a fresh state directory, home and working directory, and its own namespaces, so that
//! its server has the default port and pages can run in parallel.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::extract::CodeBlock;
use super::script;
use crate::tools::workspace_root;

/// The number of lines shown of a failed block's output.
const MAX_OUTPUT_LINES: usize = 60;

/// The programs that all pages use.
pub(super) struct PageTools {
    pub(super) binary: PathBuf,
    /// The interpreter of the environment with the SDKs.
    pub(super) python: PathBuf,
    /// A page is killed after this many seconds and counts as failed.
    pub(super) page_seconds: u32,
}

/// Runs the blocks of `page`; an error names the line and the command, with the block's output.
pub(super) fn run_page(page: &str, blocks: &[CodeBlock], tools: &PageTools) -> Result<()> {
    let directory = tempfile::tempdir().context("could not make a directory for the page")?;
    let directory = directory.path();
    script::write_session(page, blocks, &tools.binary, directory)?;
    let instance = instance_name(directory);
    let log = File::options().create(true).append(true).open(directory.join("log"))?;
    let status = session_command(directory, tools, &instance)?
        .stdout(log.try_clone()?)
        .stderr(log)
        .status()
        .context("could not start the page's session")?;
    remove_groups(&instance);
    if status.success() && directory.join("completed").exists() {
        return Ok(());
    }
    bail!("{}", describe_failure(page, directory, status, tools.page_seconds))
}

/// The instance names the page's control groups. The directory's name is random already.
fn instance_name(directory: &Path) -> String {
    let name = directory.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let letters: String = name.chars().filter(char::is_ascii_alphanumeric).take(20).collect();
    format!("docs-{letters}")
}

fn session_command(directory: &Path, tools: &PageTools, instance: &str) -> Result<Command> {
    let environment = tools.python.parent().context("the interpreter lies in a directory")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = [directory.join("bin"), environment.to_owned()];
    let path = std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path)))?;
    // The network of the host stays open as fd 9, for blocks that ask for it.
    let start = "exec 9</proc/self/ns/net; exec timeout --signal=KILL \"$0\" \
                 unshare --net --mount --pid --fork --kill-child --mount-proc bash \"$1\"";
    let mut command = Command::new("bash");
    command.args(["-c", start, &tools.page_seconds.to_string()]).arg(directory.join("page.sh"));
    command.current_dir(directory.join("cwd")).stdin(Stdio::null());
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| is_client_variable(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let configurations = [("PIP_CONFIG_FILE", ".config/pip/pip.conf"), ("NPM_CONFIG_USERCONFIG", ".npmrc")];
    for (name, file) in configurations {
        let file = home.join(file);
        if file.exists() && std::env::var_os(name).is_none() {
            command.env(name, file);
        }
    }
    command
        .env("PATH", path)
        .env("HOME", directory.join("home"))
        .env("TMPDIR", directory.join("tmp"))
        .env("VIRTUAL_ENV", environment.parent().unwrap_or(environment))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("DOCS_DIR", directory)
        .env("DOCS_PYTHON", &tools.python)
        .env("CORACLE_STATE_DIR", directory.join("state"))
        .env("CORACLE_INSTANCE", instance);
    Ok(command)
}

/// Whether a variable would change the behaviour of a page's clients or its server.
fn is_client_variable(name: &str) -> bool {
    ["CORACLE_", "OPEN_SANDBOX_", "OPENSANDBOX_", "XDG_"].iter().any(|start| name.starts_with(start))
}

fn describe_failure(
    page: &str,
    directory: &Path,
    status: std::process::ExitStatus,
    page_seconds: u32,
) -> String {
    let read = |name: &str| fs::read_to_string(directory.join(name)).unwrap_or_default();
    let failure = read("failure");
    let (line, command) = failure.split_once('\n').unwrap_or_default();
    // Line 0 is a failure outside of the page's own text; an empty file means a timeout or an `exit`.
    let block = read("block").trim().to_owned();
    let line = if line.is_empty() || line == "0" { &block } else { line };
    let what = match (command.trim(), status.code()) {
        ("", None | Some(137)) => format!("the block did not end within {page_seconds} s"),
        ("", _) => format!("the session ended in this block ({status})"),
        (command, _) => format!("`{command}` failed"),
    };
    let output = last_lines(&read("log"));
    let server = read("server.log");
    let server: Vec<&str> =
        server.lines().filter(|line| !line.contains("\"INFO\"") && !line.contains(" INFO ")).collect();
    let server = last_lines(&server.join("\n"));
    let server = if server.is_empty() { server } else { format!("\nlog of the server:\n{server}") };
    format!("{page}:{line}: {what}; output of the block at line {block}:\n{output}{server}")
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(MAX_OUTPUT_LINES)..].join("\n")
}

/// Removes the control groups of a session that was killed; one that ended by itself has none.
fn remove_groups(instance: &str) {
    let root = PathBuf::from("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path());
    for hierarchy in std::iter::once(root.clone()).chain(hierarchies) {
        remove_group(&hierarchy.join("coracle").join(instance));
    }
}

/// Removes a group and those in it. The kernel refuses for one that is still in use, which then stays.
fn remove_group(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_group(&entry.path());
        }
    }
    fs::remove_dir(group).ok();
}

/// Every page of the documentation, by its path from the root of the repository.
pub(super) fn list_pages() -> Result<Vec<String>> {
    let mut pages = vec!["README.md".to_owned()];
    let mut directories = vec!["docs".to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(workspace_root().join(&directory)).context("could not list the pages")? {
            let entry = entry?;
            let path = format!("{directory}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                directories.push(path);
            } else if path.ends_with(".md") {
                pages.push(path);
            }
        }
    }
    pages[1..].sort();
    Ok(pages)
}
