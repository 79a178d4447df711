//! Starts an agent for a test, and removes everything of it afterwards.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use wire::AgentConfig;

/// How trees are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeMode {
    Groups,
    Runners,
}

pub(crate) struct TestAgent {
    process: Child,
    /// Dropped before the directory it is mounted in.
    _mounted: Option<MountedTmpfs>,
    directory: TempDir,
    group: Option<PathBuf>,
}

/// Runs a check against an agent with runners and, where groups can be created, one with groups.
pub(crate) fn with_both_tree_modes(check: impl Fn(&TestAgent)) {
    check(&TestAgent::with_trees(TreeMode::Runners));
    match groups_root() {
        Some(_) => check(&TestAgent::with_trees(TreeMode::Groups)),
        None => testkit::skip_test("groups cannot be created here; only runners were tested"),
    }
}

/// The root of the v2 hierarchy, if it is mounted and this is root.
fn groups_root() -> Option<&'static Path> {
    let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
    let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
    rustix::process::geteuid().is_root().then_some(root)
}

impl TestAgent {
    pub(crate) fn with_trees(trees: TreeMode) -> Self {
        Self::with_config(trees, |_| {})
    }

    pub(crate) fn with_config(trees: TreeMode, change: impl FnOnce(&mut AgentConfig)) -> Self {
        Self::with_limits(trees, &[], change)
    }

    /// Puts the journals on a separate tmpfs with these options.
    pub(crate) fn with_small_journals(trees: TreeMode, options: &str) -> Self {
        Self::make(trees, &[], |_| {}, |journals| mount_tmpfs(journals, options))
    }

    /// Also passes files of groups with limits to the agent, such as `tasks=PATH`.
    pub(crate) fn with_limits(
        trees: TreeMode,
        limits: &[String],
        change: impl FnOnce(&mut AgentConfig),
    ) -> Self {
        Self::make(trees, limits, change, |_| None)
    }

    fn make(
        trees: TreeMode,
        limits: &[String],
        change: impl FnOnce(&mut AgentConfig),
        mount: impl FnOnce(&Path) -> Option<MountedTmpfs>,
    ) -> Self {
        let directory = tempfile::Builder::new().prefix("agent").tempdir_in("/tmp").unwrap();
        let journals = directory.path().join("journals");
        std::fs::create_dir(&journals).unwrap();
        let mounted = mount(&journals);
        let home = directory.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let root = rustix::process::geteuid().is_root();
        let mut config = AgentConfig {
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
            single_user: !root,
            default_user: "root".to_owned(),
            default_directory: home.to_str().unwrap().to_owned(),
            env: BTreeMap::from([("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())]),
            env_file: None,
            nesting: None,
            max_processes: 100,
            limit_view: None,
            threads: None,
        };
        change(&mut config);
        let group = (trees == TreeMode::Groups).then(|| make_group(directory.path()));
        let mut command = agent_command(root);
        command.arg(directory.path().join("socket")).arg(directory.path().join("journals"));
        command.arg(serde_json::to_string(&config).unwrap());
        command.args(group.iter().map(|group| format!("group={}", group.display())));
        command.args(limits);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0];
        process.stdout.take().unwrap().read_exact(&mut ready).unwrap();
        Self { process, _mounted: mounted, directory, group }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.directory.path().join("home")
    }

    pub(crate) fn journal(&self, process: &str) -> PathBuf {
        self.directory.path().join("journals").join(process)
    }

    /// The agent's own process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The groups of commands that still exist.
    pub(crate) fn command_groups(&self) -> Vec<PathBuf> {
        let group = self.group.as_ref().unwrap();
        let entries = std::fs::read_dir(group).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    }
}

/// A mount that is removed when the test ends.
struct MountedTmpfs(PathBuf);

fn mount_tmpfs(path: &Path, options: &str) -> Option<MountedTmpfs> {
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(path);
    assert!(mount.status().unwrap().success());
    Some(MountedTmpfs(path.to_owned()))
}

impl Drop for MountedTmpfs {
    fn drop(&mut self) {
        assert!(Command::new("umount").arg(&self.0).status().unwrap().success());
    }
}

/// For an ordinary user, the agent is root in its own user namespace, as it is in a jail.
fn agent_command(root: bool) -> Command {
    let agent = env!("CARGO_BIN_EXE_bare-agent");
    if root {
        return Command::new(agent);
    }
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", agent]);
    command
}

fn make_group(directory: &Path) -> PathBuf {
    let name = directory.file_name().unwrap();
    let group = groups_root().unwrap().join(format!("coracle-test-{}", name.to_str().unwrap()));
    std::fs::create_dir(&group).unwrap();
    group
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        if let Some(group) = &self.group {
            std::fs::write(group.join("cgroup.kill"), "1").unwrap();
        }
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        if let Some(group) = &self.group {
            remove_group(group);
        }
    }
}

/// Removes a group as soon as its last process, which was killed, has been reaped.
pub(crate) fn remove_group(group: &Path) {
    for entry in std::fs::read_dir(group).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            remove_group(&path);
        }
    }
    while std::fs::remove_dir(group).is_err() {
        std::thread::yield_now();
    }
}
