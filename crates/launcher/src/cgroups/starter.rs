//! The v1 groups in which the server was started, and how its sandboxes leave them.
//!
//! A process is in one group of each v1 hierarchy. Sandboxes have groups of their own in the hierarchies
//! with their limits; in the others (devices, freezer, cpuset, the one of systemd ...) they would inherit
//! those of the container or unit that started the server, and would be frozen or killed with it. So the
//! launcher of a server moves to `coracle/<instance>` in each of these, and sandboxes inherit that at no cost
//! per create.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::mount_table::CgroupMount;
use super::{CgroupController, CgroupHierarchies, MAX_OPEN_ATTEMPTS, ROOT_GROUP_NAME};

/// A v1 hierarchy without limits of ours.
#[derive(Clone, Debug)]
pub(super) struct UnlimitedHierarchy {
    mount: CgroupMount,
    /// The group in which this process was before it moved to ours.
    left: Option<PathBuf>,
}

impl UnlimitedHierarchy {
    fn path(&self) -> &PathBuf {
        &self.mount.path
    }

    /// Returns the hierarchy's directory if this process moved to our group in it.
    pub(super) fn entered_root(&self) -> Option<&PathBuf> {
        self.left.as_ref().map(|_| self.path())
    }
}

impl CgroupHierarchies {
    /// Remembers the v1 hierarchies in which we set no limits.
    pub(super) fn add_unlimited_hierarchies(&mut self, mounts: &[CgroupMount]) {
        for mount in mounts.iter().filter(|mount| mount.kind == "cgroup") {
            let limited = [&self.memory, &self.cpu, &self.pids]
                .into_iter()
                .any(|controller| *controller == CgroupController::Legacy(mount.path.clone()));
            if !limited && self.unlimited.iter().all(|known| *known.path() != mount.path) {
                self.unlimited.push(UnlimitedHierarchy { mount: mount.clone(), left: None });
            }
        }
    }

    /// Moves this process, and with it all sandboxes that it makes from now on, out of the groups in which
    /// it was started. Returns the hierarchies in which that failed, with the reason.
    pub(crate) fn leave_starter_groups(&mut self) -> io::Result<Vec<(PathBuf, io::Error)>> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mut failed = Vec::new();
        for hierarchy in &mut self.unlimited {
            let former = hierarchy.mount.parse_own_legacy_group(&own);
            match enter_group(hierarchy.path(), &self.instance, former.as_deref()) {
                Ok(()) => hierarchy.left = Some(former.unwrap_or_else(|| hierarchy.path().clone())),
                Err(error) => failed.push((hierarchy.path().clone(), error)),
            }
        }
        Ok(failed)
    }

    /// Moves this process back, so that our own groups can be removed. A failure in one hierarchy does not stop the work in
    /// the others; the first error is returned.
    pub(super) fn return_to_starter_groups(&self) -> io::Result<()> {
        let mut returned = Ok(());
        for hierarchy in &self.unlimited {
            let Some(left) = &hierarchy.left else { continue };
            let moved = match fs::write(left.join("tasks"), "0") {
                // The group has ended, and all its processes with it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    fs::write(hierarchy.path().join("tasks"), "0")
                }
                other => other,
            };
            returned = returned.and(moved);
        }
        returned
    }
}

/// Moves this process to the group of `instance`, with the processors and memory nodes of `former`.
fn enter_group(root: &Path, instance: &str, former: Option<&Path>) -> io::Result<()> {
    let ours = root.join(ROOT_GROUP_NAME);
    let group = ours.join(instance);
    for attempt in 1.. {
        let entered = fs::create_dir_all(&group)
            .and_then(|()| copy_cpuset(root, &ours))
            .and_then(|()| copy_cpuset(former.unwrap_or(root), &group))
            .and_then(|()| fs::write(group.join("tasks"), "0"));
        match entered {
            // Another instance was just closed and removed the empty parent.
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < MAX_OPEN_ATTEMPTS => {}
            other => return other,
        }
    }
    Ok(())
}

/// Gives a new group of the cpuset hierarchy what `source` has; an empty one accepts no processes.
fn copy_cpuset(source: &Path, group: &Path) -> io::Result<()> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let file = group.join(name);
        match fs::read_to_string(&file) {
            Ok(present) if present.trim().is_empty() => {
                let value = fs::read_to_string(source.join(name))?;
                fs::write(&file, value.trim())?;
            }
            Ok(_) => {}
            // This is another hierarchy.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
