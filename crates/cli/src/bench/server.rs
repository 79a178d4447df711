//! The benchmark's own server: default configuration, and a state directory that is removed with it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::client::BenchClient;

/// The text that the server prints before its address when it is ready.
const READY_TEXT: &str = "coracle listening on http://";

/// The number of sandboxes that the server allows.
const MAX_BENCH_SANDBOXES: &str = "4000";

/// The key of servers that have one. They listen on loopback, for the time of a measurement.
const BENCH_KEY: &str = "key-of-the-benchmark";

pub(crate) struct BenchServer {
    process: Child,
    /// Header lines of every client.
    headers: String,
    pub(crate) address: SocketAddr,
    directory: PathBuf,
    /// A directory of packages that may be mounted in sandboxes.
    pub(crate) packages: Option<PathBuf>,
}

impl BenchServer {
    /// Starts a server that leaves the links and packet filters of this host as they are.
    pub(crate) fn start(packages: Option<PathBuf>) -> Result<Self> {
        Self::start_with("main", "off", packages)
    }

    /// Starts a server with this name among those of the benchmark and this default for networks.
    pub(crate) fn start_as(name: &str, network: &str) -> Result<Self> {
        Self::start_with(name, network, None)
    }

    /// Starts a server that logs, as JSON, where the time of each create goes.
    pub(crate) fn start_logging_stages() -> Result<Self> {
        let level = format!("{}=trace,info", backend::STAGE_LOG_TARGET);
        Self::start_in("breakdown", |command| {
            command.env("CORACLE_NETWORK_DEFAULT", "off");
            command.env("CORACLE_LOG", level).env("CORACLE_LOG_FORMAT", "json");
        })
    }

    /// Starts a server that removes its sandboxes when it stops.
    pub(crate) fn start_removing() -> Result<Self> {
        Self::start_in("stop", |command| {
            command.env("CORACLE_NETWORK_DEFAULT", "off").env("CORACLE_ON_STOP", "remove");
        })
    }

    /// Starts a server with a key, as the provisioner of AIO sandboxes needs one, and with this configuration file.
    /// The text may name an empty directory as `{empty}`.
    pub(crate) fn start_with_key(name: &str, configuration: &str) -> Result<Self> {
        let directory = make_directory(name)?;
        let (empty, file) = (directory.join("empty"), directory.join("coracle.toml"));
        fs::create_dir(&empty)?;
        fs::write(&file, configuration.replace("{empty}", &empty.display().to_string()))?;
        let mut server = Self::start_at(directory, |command| {
            command.arg("--config").arg(file).env("CORACLE_API_KEY", BENCH_KEY);
            command.env("CORACLE_NETWORK_DEFAULT", "off");
        })?;
        server.headers = format!("Open-Sandbox-Api-Key: {BENCH_KEY}\r\nX-Api-Key: {BENCH_KEY}\r\n");
        Ok(server)
    }

    fn start_with(name: &str, network: &str, packages: Option<PathBuf>) -> Result<Self> {
        let mut server = Self::start_in(name, |command| {
            command.env("CORACLE_NETWORK_DEFAULT", network);
            command.envs(packages.iter().map(|directory| ("CORACLE_VOLUMES_HOST_PATHS", directory)));
        })?;
        server.packages = packages;
        Ok(server)
    }

    fn start_in(name: &str, configure: impl FnOnce(&mut Command)) -> Result<Self> {
        Self::start_at(make_directory(name)?, configure)
    }

    fn start_at(directory: PathBuf, configure: impl FnOnce(&mut Command)) -> Result<Self> {
        let (process, address) = spawn_server(&directory, configure)?;
        Ok(Self { process, headers: String::new(), address, directory, packages: None })
    }

    /// Ends the server, which leaves its sandboxes, and starts it again on the same state. Returns how long the
    /// start took.
    pub(crate) fn restart(&mut self) -> Result<Duration> {
        self.end_process()?;
        let began = Instant::now();
        (self.process, self.address) = spawn_server(&self.directory, |command| {
            command.env("CORACLE_NETWORK_DEFAULT", "off");
        })?;
        Ok(began.elapsed())
    }

    fn end_process(&mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        self.process.wait().context("could not wait for the server").map(drop)
    }

    /// The server's log so far.
    pub(crate) fn read_log(&self) -> Result<String> {
        fs::read_to_string(self.directory.join("log")).context("could not read the log of the server")
    }

    pub(crate) fn client(&self) -> Result<BenchClient> {
        Ok(BenchClient::connect(self.address)?.with_headers(self.headers.clone()))
    }

    /// The address at which the server listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A directory for files of the benchmark, on the same filesystem as the server's.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Resident memory of the server and of every process it started except sandboxes, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        process_tree(self.process.id()).into_iter().filter_map(process_resident_bytes).sum()
    }

    /// Removes the remaining sandboxes, ends the server and removes its directory.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.stop_and_clean_up()
    }

    /// Ends the server with the sandboxes that it has, and removes its directory. Returns how long the end took.
    pub(crate) fn time_stop(mut self) -> Result<Duration> {
        let began = Instant::now();
        self.end_process()?;
        let took = began.elapsed();
        fs::remove_dir_all(&self.directory).context("could not remove the state directory")?;
        Ok(took)
    }

    fn stop_and_clean_up(&mut self) -> Result<()> {
        self.client()?.delete_all()?;
        self.end_process()?;
        fs::remove_dir_all(&self.directory).context("could not remove the state directory")
    }
}

impl Drop for BenchServer {
    /// Nothing may be left behind after an error either. Failures here are ignored, since the first
    /// error is the one to report.
    fn drop(&mut self) {
        if self.directory.exists() {
            self.stop_and_clean_up().ok();
        }
    }
}

fn make_directory(name: &str) -> Result<PathBuf> {
    let directory = std::env::temp_dir().join(format!("coracle-bench-{}-{name}", std::process::id()));
    fs::create_dir(&directory).context("could not make a temporary directory")?;
    Ok(directory)
}

/// Starts a server on the state below `directory`; returns it and its address when it is ready.
fn spawn_server(directory: &Path, configure: impl FnOnce(&mut Command)) -> Result<(Child, SocketAddr)> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--state-dir"])
        .arg(directory.join("state"))
        .env_remove("CORACLE_API_KEY")
        .env("CORACLE_LIMITS_MAX_SANDBOXES", MAX_BENCH_SANDBOXES)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::options().append(true).create(true).open(directory.join("log"))?);
    configure(&mut command);
    let mut process = command.spawn().context("could not start the server")?;
    let mut lines = BufReader::new(process.stdout.take().context("no standard output")?).lines();
    let address = lines
        .find_map(|line| line.ok()?.split_once(READY_TEXT).map(|(_, address)| address.to_owned()))
        .with_context(|| format!("the server did not start: {}", last_log_line(directory)))?;
    // Otherwise a full pipe could block the server.
    std::thread::spawn(move || lines.count());
    let address = address.trim_end_matches('/').parse().context("the server names no address")?;
    Ok((process, address))
}

/// The last line of the server's log.
fn last_log_line(directory: &Path) -> String {
    let log = fs::read_to_string(directory.join("log")).unwrap_or_default();
    log.lines().last().unwrap_or("it said nothing").to_owned()
}

/// A process and its descendants in the same pid namespace, which excludes sandboxes.
fn process_tree(pid: u32) -> Vec<u32> {
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let own = namespace(std::process::id());
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let below = children
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
        .filter(|child| namespace(*child) == own)
        .flat_map(process_tree);
    std::iter::once(pid).chain(below).collect()
}

fn process_resident_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    parse_kibibytes(&status, "VmRSS:")
}

/// The value of a line such as `VmRSS:  1234 kB`, in bytes.
pub(crate) fn parse_kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|number| number * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "Name:\tcoracle\nVmRSS:\t    2048 kB\n";
        assert_eq!(parse_kibibytes(text, "VmRSS:"), Some(2048 * 1024));
        assert_eq!(parse_kibibytes(text, "Pss:"), None);
    }
}
