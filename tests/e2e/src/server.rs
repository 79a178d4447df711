//! `coracle serve` as a process of the test.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::binary::ProgramCopies;
use crate::http::HttpClient;
use crate::refused_calls::RefusedCallLog;
use crate::run::{TestUser, with_shell_prefix};
use crate::sandbox::RemoteSandbox;

/// The server's ready line, up to its address.
const READY_PREFIX: &str = "coracle listening on http://";

/// A running server. Dropping it removes its sandboxes, ends it and searches its log for secrets.
pub struct TestServer {
    process: Child,
    address: String,
    directory: TempDir,
    /// The server's key, and tokens that it issued; none of them may be in the log.
    secrets: Mutex<Vec<String>>,
    refused_calls: Mutex<RefusedCallLog>,
}

/// How to start a server.
pub struct ServerBuilder {
    user: TestUser,
    shell_prefix: String,
    listen: String,
    state: Option<PathBuf>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    removed: Vec<&'static str>,
}

impl Default for ServerBuilder {
    fn default() -> Self {
        let listen = unused_address();
        Self {
            user: TestUser::Same,
            shell_prefix: ":".to_owned(),
            listen,
            state: None,
            arguments: Vec::new(),
            environment: Vec::new(),
            removed: Vec::new(),
        }
    }
}

impl ServerBuilder {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn as_user(mut self, user: TestUser) -> Self {
        self.user = user;
        self
    }

    /// Starts it from a shell that first runs this text; see [`with_shell_prefix`].
    pub fn with_shell_prefix(mut self, prefix: &str) -> Self {
        self.shell_prefix = prefix.to_owned();
        self
    }

    /// Listens at an address that a server had before.
    pub fn listen(mut self, address: &str) -> Self {
        self.listen = address.to_owned();
        self
    }

    /// Starts it in its own mount namespace, in which its state directory is mounted at `place`.
    pub fn with_state_mounted_at(mut self, place: &Path) -> Self {
        self.state = Some(place.to_owned());
        self
    }

    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Removes a variable that is otherwise set.
    pub fn without_env(mut self, name: &'static str) -> Self {
        self.removed.push(name);
        self
    }

    /// Starts it and waits for its ready line.
    pub fn start(self) -> TestServer {
        let directory = self.user.make_home();
        self.start_in(directory)
    }

    /// As [`ServerBuilder::start`], in a directory that may contain the state of another server.
    pub fn start_in(self, directory: TempDir) -> TestServer {
        let refused_calls = Mutex::new(RefusedCallLog::begin());
        let mut process = self.spawn(directory.path());
        let address = wait_until_ready(&mut process, directory.path());
        let keys = self.environment.iter().filter(|(name, _)| name == "CORACLE_API_KEY");
        let secrets = Mutex::new(keys.map(|(_, key)| key.clone()).collect());
        TestServer { process, address, directory, secrets, refused_calls }
    }

    /// Starts it with its state below `directory`, and leaves its standard output to the caller.
    pub fn spawn(&self, directory: &Path) -> Child {
        let log =
            File::options().create(true).append(true).open(directory.join("log")).expect("our own directory");
        let mut command = ProgramCopies::shared().command();
        command
            .args(["serve", "--listen", &self.listen, "--state-dir"])
            .arg(self.state.clone().unwrap_or_else(|| directory.join("state")))
            .args(&self.arguments)
            // Tests must not change the links and packet filters of this host.
            .env("CORACLE_NETWORK_DEFAULT", "off")
            // The log is searched for secrets, so it should be verbose.
            .env("CORACLE_LOG", "debug")
            .env("CORACLE_LOG_FORMAT", "json")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env("HOME", directory)
            .env_remove("XDG_RUNTIME_DIR");
        for name in &self.removed {
            command.env_remove(name);
        }
        let mut command = with_shell_prefix(&self.shell_prefix, &command);
        if let Some(place) = &self.state {
            const SHOW: &str = "mount --bind \"$0\" \"$1\" && shift && exec \"$@\"";
            let own = directory.join("state");
            fs::create_dir_all(&own).expect("our own directory");
            let mut apart = Command::new("unshare");
            apart.args(["--mount", "--propagation", "private", "sh", "-c", SHOW]).arg(own).arg(place);
            apart.arg(command.get_program()).args(command.get_args());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => apart.env(name, value),
                    None => apart.env_remove(name),
                };
            }
            command = apart;
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        self.user.apply_to(&mut command);
        command.process_group(0).spawn().expect("the binary can be run")
    }
}

/// An unused address. Its port is below those that the kernel assigns: while a server is down, no client of
/// another test may get the port to which it returns.
fn unused_address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 20_000).expect("it is below 20,000");
    loop {
        let place = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (first + place) % 22_000;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return format!("127.0.0.1:{port}");
        }
    }
}

/// Reads the ready line; if the server ends before it, its log has the reason.
fn wait_until_ready(process: &mut Child, directory: &Path) -> String {
    let mut lines = BufReader::new(process.stdout.take().expect("standard output is a pipe")).lines();
    let first = lines.find_map(|line| {
        line.ok().and_then(|line| {
            line.split_once(READY_PREFIX).map(|(_, address)| address.trim_end_matches('/').to_owned())
        })
    });
    // No more output is expected, but a full pipe must never block the server.
    std::thread::spawn(move || lines.count());
    first.unwrap_or_else(|| {
        process.wait().expect("it is our child");
        panic!("the server did not start:\n{}", last_lines(&read_log(directory)));
    })
}

impl TestServer {
    /// A server with the defaults, as the user who runs the tests.
    pub fn start() -> Self {
        ServerBuilder::new().start()
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn port(&self) -> &str {
        self.address.rsplit(':').next().expect("an address has a port")
    }

    pub fn client(&self) -> HttpClient {
        HttpClient::new(&self.address)
    }

    /// The pid of the supervisor.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The pid of the server itself (`__server`) or of its launcher (`__launcher`), once it runs.
    pub fn part_pid(&self, role: &str) -> u32 {
        let supervisor = self.process.id();
        let mut found = None;
        crate::eventually("the part runs", || {
            let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children"));
            let children = children.unwrap_or_default();
            found = children.split_whitespace().filter_map(|word| word.parse().ok()).find(|pid: &u32| {
                fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains(role))
            });
            found.is_some()
        });
        found.expect("it was waited for")
    }

    pub fn state_directory(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub fn log(&self) -> String {
        read_log(self.directory.path())
    }

    /// Creates a sandbox of the default image.
    pub fn create_sandbox(&self) -> RemoteSandbox {
        self.create_sandbox_with(&serde_json::json!({}))
    }

    /// Creates a sandbox; the given fields replace the usual ones.
    pub fn create_sandbox_with(&self, fields: &serde_json::Value) -> RemoteSandbox {
        let sandbox = RemoteSandbox::create(self.client(), fields);
        self.add_sandbox_secrets(&sandbox);
        sandbox
    }

    /// Adds a secret that must not appear in the log.
    pub fn add_secret(&self, secret: &str) {
        self.secrets.lock().expect("no thread panics while holding the lock").push(secret.to_owned());
    }

    fn add_sandbox_secrets(&self, sandbox: &RemoteSandbox) {
        let mut secrets = self.secrets.lock().expect("no thread panics while holding the lock");
        secrets.extend(sandbox.secrets().map(str::to_owned));
    }

    /// Ends the supervisor at once, as a crash would; its sandboxes stay.
    pub fn kill(&mut self) {
        self.process.kill().expect("it is our child");
        self.process.wait().expect("it is our child");
    }

    /// Sends SIGTERM to the supervisor and waits for its end; its sandboxes stay.
    pub fn terminate(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is our child");
        self.process.wait().expect("it is our child")
    }

    /// Interrupts it as a terminal does, which signals the whole process group.
    pub fn interrupt_group(&mut self) -> ExitStatus {
        let group = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process_group(group, rustix::process::Signal::INT).expect("it is our child's");
        self.process.wait().expect("it is our child")
    }

    /// Starts a server on the same state directory, after [`TestServer::kill`] or
    /// [`TestServer::terminate`].
    pub fn restart(&mut self, start: &ServerBuilder) {
        self.process = start.spawn(self.directory.path());
        self.address = wait_until_ready(&mut self.process, self.directory.path());
    }

    /// The directory that contains the log and the state.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Removes every sandbox.
    pub fn remove_all(&self) -> std::io::Result<()> {
        let mut client = self.client();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(120) {
            let page = client.get("/v1/sandboxes?pageSize=200")?;
            let items = page.json()["items"].as_array().cloned().unwrap_or_default();
            if items.is_empty() {
                return Ok(());
            }
            for item in items {
                let answer =
                    client.delete(&format!("/v1/sandboxes/{}", item["id"].as_str().unwrap_or_default()))?;
                if answer.status >= 500 {
                    return Err(std::io::Error::other(answer.text()));
                }
            }
        }
        Err(std::io::Error::other("some sandboxes stay, however often they are deleted"))
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let ended_before = matches!(self.process.try_wait(), Ok(Some(_)));
        // A server with a key is cleaned up by the test, which has the key.
        let keyed = self.client().get("/v1/sandboxes").is_ok_and(|answer| answer.status == 401);
        let removed = if ended_before || keyed { Ok(()) } else { self.remove_all() };
        if !ended_before {
            self.terminate();
        }
        if std::thread::panicking() {
            eprint_log(last_lines(&self.log()));
            return;
        }
        removed.expect("the server removes its sandboxes");
        let log = self.log();
        for secret in self.secrets.lock().expect("no thread panics while holding the lock").iter() {
            assert!(!log.contains(secret), "a key or token is in the log");
        }
        let mut refused = self.refused_calls.lock().expect("no thread panics while holding the lock");
        let refused = refused.read(&ProgramCopies::shared().coracle_path());
        assert!(refused.is_empty(), "a filter lacks a call that our own processes make: {refused:?}");
    }
}

#[expect(clippy::print_stderr, reason = "the log of a failed test is shown with it")]
fn eprint_log(log: &str) {
    eprintln!("the server's log:\n{log}");
}

fn read_log(directory: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(directory.join("log")) {
        file.take(64 << 20).read_to_string(&mut text).ok();
    }
    text
}

/// The last lines of a log.
fn last_lines(log: &str) -> &str {
    let lines = log.rmatch_indices('\n').nth(100);
    lines.map_or(log, |(place, _)| &log[place..])
}

/// Resident memory of a server in bytes: of its process and all its descendants outside of sandboxes.
pub fn resident_memory(pid: u32) -> u64 {
    const PAGE: u64 = 4096;
    let resident_pages = |pid: u32| {
        let counts = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
        counts.split(' ').nth(1)?.parse::<u64>().ok()
    };
    process_tree(pid).into_iter().filter_map(resident_pages).sum::<u64>() * PAGE
}

/// The peak of a server's memory from a moment on, as the kernel records it: memory that is used only briefly counts too.
pub struct PeakMemory {
    /// Each process, and its resident memory when the record began.
    processes: Vec<(u32, u64)>,
}

impl PeakMemory {
    /// Begins the record for a process and all its descendants outside of sandboxes. This needs root.
    pub fn watch(pid: u32) -> Self {
        /// Sets the peak to what is resident now; see proc_pid_clear_refs(5).
        const RESET_PEAK: &str = "5";
        let processes = process_tree(pid).into_iter().map(|pid| {
            fs::write(format!("/proc/{pid}/clear_refs"), RESET_PEAK).expect("root may reset it");
            (pid, peak_memory(pid))
        });
        Self { processes: processes.collect() }
    }

    /// How much more than in the beginning all processes had in memory, in bytes. Their peaks are added up although they
    /// need not have been at the same time.
    pub fn growth(&self) -> u64 {
        self.processes.iter().map(|(pid, before)| peak_memory(*pid).saturating_sub(*before)).sum()
    }
}

fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes =
        peak.and_then(|text| text.trim().strip_suffix(" kB")).and_then(|text| text.parse::<u64>().ok());
    kibibytes.expect("the kernel records it") << 10
}

/// A process and all its descendants outside of sandboxes.
fn process_tree(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    let below = children.filter(|child| pid_namespace(*child) == pid_namespace(pid)).flat_map(process_tree);
    std::iter::once(pid).chain(below).collect()
}

/// Sandboxes have their own pid namespaces.
fn pid_namespace(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}
