//! The real agent without a jail: its commands and files are those of this host.
//!
//! The program is `crates/agent/tests/agent/bare-agent.rs`, which each package builds for its own tests.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, pidfd_open, pidfd_send_signal, waitid,
};
use tempfile::TempDir;
use wire::AgentConfig;

/// An agent that is about to be started.
pub struct AgentSetup {
    directory: TempDir,
    pub config: AgentConfig,
    /// Further arguments of the program, such as `group=DIR`.
    pub words: Vec<String>,
}

/// A running agent. It is killed when this is dropped, and its commands with it unless they have a
/// control group.
pub struct UnjailedAgent {
    process: Child,
    directory: TempDir,
}

impl AgentSetup {
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("agent").tempdir_in("/tmp").unwrap();
        let home = directory.path().join("home");
        fs::create_dir(&home).unwrap();
        fs::create_dir(directory.path().join("journals")).unwrap();
        let config = plain_config(home.to_str().unwrap());
        Self { directory, config, words: Vec::new() }
    }

    /// The directory of this agent alone; its name is unique.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn journals(&self) -> PathBuf {
        self.directory.path().join("journals")
    }

    /// Starts the program and waits until it listens.
    pub fn start(self, program: &Path) -> UnjailedAgent {
        let mut command = agent_command(program);
        command.arg(self.directory.path().join("socket")).arg(self.journals());
        command.arg(serde_json::to_string(&self.config).unwrap()).args(&self.words);
        let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut process =
            started.unwrap_or_else(|error| panic!("could not start {}: {error}", program.display()));
        let mut ready = [0];
        process.stdout.take().unwrap().read_exact(&mut ready).unwrap();
        UnjailedAgent { process, directory: self.directory }
    }
}

impl Default for AgentSetup {
    fn default() -> Self {
        Self::new()
    }
}

impl UnjailedAgent {
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// The directory in which commands start.
    pub fn home(&self) -> PathBuf {
        self.directory.path().join("home")
    }

    pub fn journal(&self, process: &str) -> PathBuf {
        self.directory.path().join("journals").join(process)
    }

    /// The agent's own process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Freezes the agent (SIGSTOP), but nothing that it has started. It can only be killed afterwards.
    pub fn freeze(&self) {
        kill_process(Pid::from_child(&self.process), Signal::STOP).unwrap();
    }

    /// Kills it with everything that it has started and waits until all have ended, so that no file
    /// of theirs is in use afterwards. Does nothing if the agent has ended already.
    pub fn kill(&mut self) {
        if self.process.try_wait().unwrap().is_some() {
            return;
        }
        // A stopped agent starts nothing that the list would miss.
        let agent = Pid::from_child(&self.process);
        kill_process(agent, Signal::STOP).unwrap();
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        retry_on_intr(|| waitid(WaitId::Pid(agent), stopped)).unwrap();
        let mut descendants = Vec::new();
        list_descendants(agent, &mut descendants);
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        for descendant in descendants {
            match pidfd_send_signal(&descendant, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => panic!("could not kill a process of the agent: {error}"),
            }
            retry_on_intr(|| poll(&mut [PollFd::new(&descendant, PollFlags::IN)], None)).unwrap();
        }
    }
}

/// Opens a descriptor of each process that descends from this one.
fn list_descendants(process: Pid, found: &mut Vec<OwnedFd>) {
    let children = format!("/proc/{0}/task/{0}/children", process.as_raw_pid());
    // A process that has just ended has no such file.
    let children = fs::read_to_string(children).unwrap_or_default();
    for child in children.split_ascii_whitespace() {
        let child = child.parse().ok().and_then(Pid::from_raw).expect("the kernel lists pids");
        if let Ok(descriptor) = pidfd_open(child, PidfdFlags::empty()) {
            found.push(descriptor);
            list_descendants(child, found);
        }
    }
}

impl Drop for UnjailedAgent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The program that cargo built as an example of the package whose tests are running.
pub fn example_program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let profile = tests.parent().and_then(Path::parent).expect("tests are built in `PROFILE/deps`");
    let program = profile.join("examples").join(name);
    assert!(program.exists(), "{} is missing: `cargo test` without `--test` builds it", program.display());
    program
}

/// For an ordinary user, the agent is root in its own user namespace, as it is in a jail.
fn agent_command(program: &Path) -> Command {
    if crate::is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("unshare");
    command.arg("--map-root-user").arg(program);
    command
}

/// No limits, no filter, and commands that are killed through their runners.
fn plain_config(home: &str) -> AgentConfig {
    AgentConfig {
        version: wire::VERSION,
        listen_fd: -1,
        ready_fd: -1,
        journal_fd: -1,
        commands_fd: None,
        tasks_fds: Vec::new(),
        shares_fds: Vec::new(),
        oom_fd: None,
        command_filter: Vec::new(),
        command_capabilities: u64::MAX,
        process_rlimit: None,
        single_user: !crate::is_root(),
        default_user: "root".to_owned(),
        default_directory: home.to_owned(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())]),
        env_file: None,
        namespace_broker: None,
        max_processes: 100,
        limit_view: None,
        threads: None,
        kernels_fd: None,
    }
}
