//! The groups of one sandbox in the v1 hierarchies.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use domain::SandboxId;

use super::{CgroupController, CgroupHierarchies, ROOT_GROUP_NAME, remove_group};

/// The number of groups over which the processor time of a v1 sandbox is divided; one of them is for
/// file operations. A command that forks without end can use only one of them. Where v2 has the
/// controller, each command has its own group.
const CPU_SHARE_COUNT: usize = 4;

/// A sandbox has one group for its agent and one for its commands.
const PARTS: [&str; 2] = ["agent", "cmd"];

/// Open `tasks` files, by which processes join the groups.
#[derive(Debug, Default)]
pub(super) struct LegacyTasks {
    pub(super) agent: Vec<OwnedFd>,
    pub(super) commands: Vec<OwnedFd>,
    /// Shares of the processor; a command joins one of them.
    pub(super) shares: Vec<OwnedFd>,
}

impl CgroupHierarchies {
    pub(super) fn legacy_roots(&self) -> impl Iterator<Item = &PathBuf> {
        let all = [&self.memory, &self.cpu, &self.pids];
        all.into_iter().filter_map(|controller| match controller {
            CgroupController::Legacy(root) => Some(root),
            CgroupController::Unified | CgroupController::Absent => None,
        })
    }

    pub(super) fn legacy_group(&self, root: &Path, id: &SandboxId, part: &str) -> PathBuf {
        root.join(ROOT_GROUP_NAME).join(&self.instance).join(format!("{id}.{part}"))
    }

    /// Makes the v1 groups of a sandbox, without limits.
    pub(super) fn make_legacy_groups(&self, id: &SandboxId) -> io::Result<()> {
        for root in self.legacy_roots() {
            for part in PARTS {
                fs::create_dir(self.legacy_group(root, id, part))?;
            }
        }
        // Commands have no group of their own in a v1 hierarchy, so processor time is divided over these.
        self.share_groups(id).try_for_each(fs::create_dir)
    }

    /// Opens the `tasks` files of a sandbox's v1 groups.
    pub(super) fn open_legacy_tasks(&self, id: &SandboxId) -> io::Result<LegacyTasks> {
        let mut tasks = LegacyTasks::default();
        for root in self.legacy_roots() {
            tasks.agent.push(open_tasks(&self.legacy_group(root, id, "agent"))?);
            if self.cpu != CgroupController::Legacy(root.clone()) {
                tasks.commands.push(open_tasks(&self.legacy_group(root, id, "cmd"))?);
            }
        }
        tasks.shares = self.share_groups(id).map(|share| open_tasks(&share)).collect::<io::Result<_>>()?;
        Ok(tasks)
    }

    /// Returns the groups over which processor time is divided.
    fn share_groups(&self, id: &SandboxId) -> impl Iterator<Item = PathBuf> {
        let commands = match &self.cpu {
            CgroupController::Legacy(root) => Some(self.legacy_group(root, id, "cmd")),
            CgroupController::Unified | CgroupController::Absent => None,
        };
        commands
            .into_iter()
            .flat_map(|commands| (0..CPU_SHARE_COUNT).map(move |number| commands.join(number.to_string())))
    }

    /// Removes the v1 groups of a sandbox.
    pub(super) fn remove_legacy_groups(&self, id: &SandboxId) -> io::Result<()> {
        for share in self.share_groups(id) {
            remove_group(&share)?;
        }
        for root in self.legacy_roots() {
            for part in PARTS {
                remove_group(&self.legacy_group(root, id, part))?;
            }
        }
        Ok(())
    }
}

fn open_tasks(group: &Path) -> io::Result<OwnedFd> {
    Ok(File::options().write(true).open(group.join("tasks"))?.into())
}
