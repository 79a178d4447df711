//! The part of the hierarchy that was delegated to an ordinary user.
//!
//! ```text
//! GROUP                       the group we were started in, if we may write there
//! GROUP/coracle.processes     holds our own processes: the kernel allows a group either processes
//!                             or controllers for the groups below
//! GROUP/coracle/<instance>/…  sandboxes, as for root
//! ```
//!
//! systemd delegates such a group to a unit with `Delegate=`. A process can be moved only within a
//! group that the mover may write, so no other group of the same user can be used. A later start may
//! be in another group; groups that were made in a former one are listed in the state directory.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD};

use super::ROOT_GROUP_NAME;
use super::mount_table::{self, CgroupMount};

const LEAF_GROUP_NAME: &str = "coracle.processes";
/// The list of groups that were used, in the state directory.
const GROUP_LIST_FILE: &str = "groups";

/// Moves this process from the group it was started in to a group below, if that group was delegated
/// to us. A process must call this before it starts other processes of ours, so that none of them
/// stays in the parent group.
pub fn move_to_leaf_group() -> io::Result<()> {
    let mounts = mount_table::read_cgroup_mounts()?;
    let unified = mount_table::find_unified_mount(&mounts)?;
    let group = delegated_group(unified)?;
    if unified.own_group()? != group || !has_controllers(&group)? {
        return Ok(());
    }
    let leaf = group.join(LEAF_GROUP_NAME);
    match fs::create_dir(&leaf) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    fs::write(leaf.join("cgroup.procs"), "0")
}

/// Moves all processes of `group` to a group below it. Only root may move processes that are not its own.
pub(super) fn move_all_to_leaf_group(group: &Path) -> io::Result<()> {
    /// Processes that are moved may fork meanwhile.
    const MAX_MOVE_ROUNDS: usize = 100;
    let leaf = group.join(LEAF_GROUP_NAME);
    match fs::create_dir(&leaf) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    for _ in 0..MAX_MOVE_ROUNDS {
        let pids = fs::read_to_string(group.join("cgroup.procs"))?;
        if pids.is_empty() {
            break;
        }
        if pids.lines().any(|pid| pid == "0") {
            return Err(io::Error::other(
                "a process that is not visible here is in the control group of this container",
            ));
        }
        for pid in pids.lines() {
            match fs::write(leaf.join("cgroup.procs"), pid) {
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                other => other?,
            }
        }
    }
    Ok(())
}

/// Undoes [`move_to_leaf_group`] if this is the last process of ours.
pub fn leave_leaf_group() -> io::Result<()> {
    let mounts = mount_table::read_cgroup_mounts()?;
    let unified = mount_table::find_unified_mount(&mounts)?;
    let group = delegated_group(unified)?;
    if unified.own_group()? == group { Ok(()) } else { restore_group(&group) }
}

/// Returns the group that was delegated to us, or why there is none.
pub(super) fn delegated_group(unified: &CgroupMount) -> io::Result<PathBuf> {
    let own = unified.own_group()?;
    let above = own.parent().filter(|_| own.ends_with(LEAF_GROUP_NAME));
    let group = above.map_or(own.clone(), Path::to_owned);
    for path in [group.clone(), group.join("cgroup.procs"), group.join("cgroup.subtree_control")] {
        rustix::fs::accessat(CWD, &path, Access::WRITE_OK, AtFlags::EACCESS).map_err(|errno| {
            let error = io::Error::from(errno);
            io::Error::new(error.kind(), format!("our control group is not writable: {error}"))
        })?;
    }
    Ok(group)
}

/// Whether the group has controllers for the groups below; only then must it be empty of processes.
fn has_controllers(group: &Path) -> io::Result<bool> {
    let offered = fs::read_to_string(group.join("cgroup.controllers"))?;
    Ok(offered.split_whitespace().any(|word| super::CONTROLLERS.contains(&word)))
}

/// Returns the groups of former starts that still contain groups of `instance`.
pub(super) fn read_former_groups(state_dir: &Path, instance: &str) -> io::Result<Vec<PathBuf>> {
    let text = match fs::read_to_string(state_dir.join(GROUP_LIST_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    let left = |group: &PathBuf| group.join(ROOT_GROUP_NAME).join(instance).is_dir();
    Ok(text.lines().map(PathBuf::from).filter(left).collect())
}

/// Records which groups are used from now on, before anything is made in them. The state directory can be entered by
/// others, so the file is closed to them.
pub(super) fn write_group_list(state_dir: &Path, groups: &[&PathBuf]) -> io::Result<()> {
    let lines: String = groups.iter().map(|group| format!("{}\n", group.display())).collect();
    let fresh = state_dir.join(format!("{GROUP_LIST_FILE}.new"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    // A file that an earlier start has left keeps its mode.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(lines.as_bytes())?;
    fs::rename(fresh, state_dir.join(GROUP_LIST_FILE))
}

/// Restores a group to its original state if nothing else was made in it: controllers for the groups
/// below are disabled, and this process moves back into it. Other processes of ours that are still
/// below keep their group.
pub(super) fn restore_group(group: &Path) -> io::Result<()> {
    let leaf = group.join(LEAF_GROUP_NAME);
    if !leaf.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.path() != leaf {
            return Ok(());
        }
    }
    let passed_on = fs::read_to_string(group.join("cgroup.subtree_control"))?;
    let none: String = passed_on.split_whitespace().map(|word| format!("-{word} ")).collect();
    if !none.is_empty() {
        fs::write(group.join("cgroup.subtree_control"), none)?;
    }
    fs::write(group.join("cgroup.procs"), "0")?;
    match super::remove_group(&leaf) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_groups_is_private_even_if_a_former_one_was_not() {
        let state = tempfile::tempdir().expect("the temporary directory can be written");
        let draft = state.path().join("groups.new");
        fs::write(&draft, "left by a start that was interrupted").expect("our own directory");
        fs::set_permissions(&draft, Permissions::from_mode(0o644)).expect("our own file");
        write_group_list(state.path(), &[&PathBuf::from("/a"), &PathBuf::from("/b")]).expect("it is written");
        let list = state.path().join("groups");
        assert_eq!(fs::read_to_string(&list).expect("it exists"), "/a\n/b\n");
        assert_eq!(fs::metadata(&list).expect("it exists").permissions().mode() & 0o777, 0o600);
    }
}
