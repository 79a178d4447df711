//! Starts an agent for a test, and removes everything of it afterwards.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::unjailed_agent::{AgentSetup, UnjailedAgent};
use wire::AgentConfig;

/// How trees are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeMode {
    Groups,
    Runners,
}

pub(crate) struct TestAgent {
    /// Dropped before the directory it is mounted in.
    _mounted: Option<MountedTmpfs>,
    agent: UnjailedAgent,
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
        let mut setup = AgentSetup::new();
        let mounted = mount(&setup.journals());
        change(&mut setup.config);
        let group = (trees == TreeMode::Groups).then(|| make_group(setup.directory()));
        setup.words.extend(group.iter().map(|group| format!("group={}", group.display())));
        setup.words.extend_from_slice(limits);
        let agent = setup.start(Path::new(env!("CARGO_BIN_EXE_bare-agent")));
        Self { _mounted: mounted, agent, group }
    }

    /// The groups of commands that still exist.
    pub(crate) fn command_groups(&self) -> Vec<PathBuf> {
        let group = self.group.as_ref().unwrap();
        let entries = std::fs::read_dir(group).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    }
}

impl Deref for TestAgent {
    type Target = UnjailedAgent;

    fn deref(&self) -> &UnjailedAgent {
        &self.agent
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
        self.agent.kill();
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
