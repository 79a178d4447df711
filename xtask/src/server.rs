//! A server under test: `coracle serve` on a free port with its own state directory, and the checks after
//! its end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::report::say;
use crate::tools::run_command;

/// The server's ready line, up to its address.
const READY_PREFIX: &str = "coracle listening on ";
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether clients of a server need a key.
#[derive(Clone, Copy)]
pub(crate) enum ServerAccess {
    Keyed,
    Keyless,
}

/// How a server is set up.
pub(crate) struct ServerSetup<'a> {
    pub(crate) access: ServerAccess,
    /// Variables for settings beyond those that every test needs.
    pub(crate) settings: &'a [(&'a str, &'a str)],
}

/// A running server.
pub(crate) struct ServerProcess {
    process: Child,
    binary: PathBuf,
    state: PathBuf,
    instance: String,
    log: PathBuf,
    /// `None`: every client that reaches it may use it.
    pub(crate) key: Option<String>,
    pub(crate) url: String,
}

impl ServerProcess {
    /// Starts a server in `directory` and waits for its ready line.
    pub(crate) fn start(binary: &Path, directory: &Path, setup: &ServerSetup<'_>) -> Result<Self> {
        let state = directory.join("state");
        let log = directory.join("server.log");
        let key = match setup.access {
            ServerAccess::Keyed => Some(format!("key-{:032x}", u128::from_ne_bytes(random_bytes()?))),
            ServerAccess::Keyless => None,
        };
        // Clients request this image by default; whether the image `host` may stand in for it depends on
        // the host.
        let config = directory.join("coracle.toml");
        let aliases = "[images]\naliases = { \"python:3.12\" = \"host\" }\n";
        fs::write(&config, aliases).context("could not write the configuration")?;
        let instance = format!("t{:031x}", u128::from_ne_bytes(random_bytes()?) >> 4);
        let mut process = Command::new(binary)
            .args(["serve", "--listen", "127.0.0.1:0", "--state-dir"])
            .arg(&state)
            .env("CORACLE_INSTANCE", &instance)
            .env("CORACLE_CONFIG", &config)
            .envs(key.iter().map(|key| ("CORACLE_API_KEY", key)))
            // Tests must not change the links and packet filters of this host.
            .env("CORACLE_NETWORK_DEFAULT", "off")
            // Everything it could ever log, so that a secret in a rare line is found too.
            .env("CORACLE_LOG", "trace")
            .envs(setup.settings.iter().copied())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).context("could not make the log")?)
            .spawn()
            .with_context(|| format!("could not start `{}`", binary.display()))?;
        let url = wait_for_ready_line(&mut process);
        let mut server =
            Self { process, binary: binary.to_owned(), state, instance, log, key, url: String::new() };
        server.url = url.with_context(|| {
            let log = fs::read_to_string(&server.log).unwrap_or_default();
            format!("the server did not start; its log:\n{}", last_lines(&log))
        })?;
        Ok(server)
    }

    /// Removes the sandboxes that clients left, ends the server, and checks what it leaves behind. None of
    /// `secrets` may be in its log.
    pub(crate) fn finish(mut self, secrets: &[String]) -> Result<()> {
        run_command(
            Command::new(&self.binary)
                .args(["rm", "--all", "--url", &self.url])
                .envs(self.key.iter().map(|key| ("CORACLE_API_KEY", key)))
                .stdout(Stdio::null()),
        )
        .context("could not remove the sandboxes that the tests left")?;
        let status = self.stop()?;
        if !status.success() {
            bail!("the server ended with {status}");
        }
        let left = self.find_leftovers();
        if !left.is_empty() {
            bail!("the server left behind:\n{}", left.join("\n"));
        }
        let log = fs::read_to_string(&self.log).context("could not read the log")?;
        let leaked = secrets.iter().chain(&self.key).filter(|secret| log.contains(secret.as_str())).count();
        if leaked > 0 {
            bail!("{leaked} keys or tokens are in the server's log");
        }
        Ok(())
    }

    /// The resources of the server that are left on the host: mounts, loop devices, processes, groups.
    fn find_leftovers(&self) -> Vec<String> {
        let state = self.state.to_string_lossy();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mounts = mounts.lines().filter(|line| line.contains(state.as_ref()));
        let mut found: Vec<String> = mounts.map(|line| format!("mount {line}")).collect();
        for device in list_entries(Path::new("/sys/block")) {
            let file = fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
            if file.contains(state.as_ref()) {
                found.push(format!("loop device {}", device.display()));
            }
        }
        for process in list_entries(Path::new("/proc")) {
            let words = fs::read(process.join("cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&words).replace('\0', " ");
            if words.contains(state.as_ref()) {
                found.push(format!("process {} {words}", process.display()));
            }
        }
        found.extend(list_groups(&self.instance).iter().map(|group| format!("group {}", group.display())));
        found
    }

    /// Stops the server and waits for it. A server that has already ended is left alone.
    fn stop(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.process.try_wait()? {
            return Ok(status);
        }
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        let pid = pid.context("a process has an id")?;
        let ended = pidfd_open(pid, PidfdFlags::empty()).context("could not watch the server")?;
        kill_process(pid, Signal::TERM).context("could not stop the server")?;
        let time = Timespec { tv_sec: STOP_TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
        if poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&time))? == 0 {
            self.process.kill().context("could not kill the server")?;
            self.process.wait()?;
            bail!("the server did not end within {} s and was killed", STOP_TIMEOUT.as_secs());
        }
        Ok(self.process.wait()?)
    }
}

impl Drop for ServerProcess {
    /// A test that fails early must not leave a server behind.
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            say(format_args!("{error:#}"));
        }
    }
}

/// Reads the address from the one line on standard output.
fn wait_for_ready_line(process: &mut Child) -> Result<String> {
    let stdout = process.stdout.take().context("standard output is a pipe")?;
    let (found, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            found.send(line).ok();
        }
    });
    let begun = Instant::now();
    loop {
        let left = START_TIMEOUT.saturating_sub(begun.elapsed());
        let line = lines.recv_timeout(left).context("the server did not print its ready line")?;
        if let Some(url) = line.strip_prefix(READY_PREFIX) {
            return Ok(url.trim().to_owned());
        }
    }
}

fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("could not get random bytes")?;
    Ok(bytes)
}

fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

fn list_entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// The groups of a server's sandboxes, in every hierarchy. The server's own group may stay: it is empty and
/// is reused.
fn list_groups(instance: &str) -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let hierarchies = std::iter::once(root.clone()).chain(list_entries(&root));
    let below = hierarchies.flat_map(|hierarchy| list_entries(&hierarchy.join("coracle").join(instance)));
    below.filter(|entry| entry.is_dir()).collect()
}
