//! Process information from `/proc`. The sandbox controls it, so it may be wrong.

/// The relations of a process to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessRelations {
    pub(crate) parent: i32,
    /// Its process group, 0 if that belongs to another namespace.
    pub(crate) group: i32,
}

/// The pids of all processes.
pub(crate) fn list_pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The children of a process. Each of its threads has a list; see proc_tid_children(5).
pub(crate) fn children_of(pid: i32) -> impl Iterator<Item = i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
}

/// The relations of a process that has not ended. The name in parentheses may contain anything, so
/// the fields are counted after it. See proc_pid_stat(5).
pub(crate) fn living_relations(pid: i32) -> Option<ProcessRelations> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let kin = ProcessRelations { parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? };
    (state != "Z" && state != "X").then_some(kin)
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, getpgrp, getpid, getppid};

    use super::*;

    #[test]
    fn parent_and_group_of_a_process_are_read() {
        let own = getpid().as_raw_pid();
        let parent = getppid().map(Pid::as_raw_pid).expect("the test has a parent");
        assert_eq!(living_relations(own), Some(ProcessRelations { parent, group: getpgrp().as_raw_pid() }));
        assert!(list_pids().any(|pid| pid == own));
    }
}
