//! Programs that the chores start, and paths of the repository.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::report::say;

/// How long to wait for output before checking whether a command has ended.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The root of the repository.
pub(crate) fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// Runs a command to its end and returns an error if it fails.
pub(crate) fn run_command(command: &mut Command) -> Result<()> {
    let shown = format_command(command);
    let status = command.status().with_context(|| format!("could not start {shown}"))?;
    if status.success() { Ok(()) } else { bail!("{shown} failed ({status})") }
}

/// Like [`run_command`], passing each line of output to `watch` as well.
pub(crate) fn run_watched(command: &mut Command, mut watch: impl FnMut(&str)) -> Result<()> {
    let shown = format_command(command);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("could not start {shown}"))?;
    let (sender, lines) = mpsc::channel();
    send_lines(child.stdout.take().expect("it is a pipe"), sender.clone());
    send_lines(child.stderr.take().expect("it is a pipe"), sender);
    let mut ended = None;
    loop {
        match lines.recv_timeout(EXIT_CHECK_INTERVAL) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line);
                say(format_args!("{line}"));
                watch(&line);
            }
            // Processes that the command left running may keep its pipes open for ever.
            Err(RecvTimeoutError::Timeout) if ended.is_some() => break,
            Err(RecvTimeoutError::Timeout) => {
                ended = child.try_wait().with_context(|| format!("could not wait for {shown}"))?;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.wait().with_context(|| format!("could not wait for {shown}"))?;
    if status.success() { Ok(()) } else { bail!("{shown} failed ({status})") }
}

/// Reads lines in a thread of its own, which ends with the stream or with the receiver.
fn send_lines(stream: impl Read + Send + 'static, sender: mpsc::Sender<Vec<u8>>) {
    let lines = BufReader::new(stream).split(b'\n');
    thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
}

/// How much of a failed command's output is shown.
const MAX_SHOWN_LINES: usize = 100;

/// Runs a command to its end and returns its output.
pub(crate) fn command_output(command: &mut Command) -> Result<String> {
    let shown = format_command(command);
    let output = command.output().with_context(|| format!("could not start {shown}"))?;
    if !output.status.success() {
        // Test programs describe their failures on standard output.
        let printed = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<&str> = printed.trim().lines().collect();
        let end = lines[lines.len().saturating_sub(MAX_SHOWN_LINES)..].join("\n");
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{shown} failed ({}): {}\n{end}", output.status, errors.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{shown} did not print text"))
}

/// The words of a command, without its environment, which may contain a key.
fn format_command(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    format!("`{}`", words.join(" "))
}

/// The cargo that runs us, at the root of the repository.
pub(crate) fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(args).current_dir(workspace_root());
    command
}
