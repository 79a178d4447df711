//! What `/proc` tells of processes. It is the sandbox's, so it may be wrong.

/// What a process is to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kin {
    pub(crate) parent: i32,
    /// Its process group, 0 if that is another namespace's.
    pub(crate) group: i32,
}

/// The numbers of all processes.
pub(crate) fn pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Whom a process has started. Each of its threads has a list; see proc_tid_children(5).
pub(crate) fn children(pid: i32) -> impl Iterator<Item = i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
}

/// The kin of a process that has not ended. The name in brackets may hold anything, so the
/// fields are counted from behind it. See proc_pid_stat(5).
pub(crate) fn living_kin(pid: i32) -> Option<Kin> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let kin = Kin { parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? };
    (state != "Z" && state != "X").then_some(kin)
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, getpgrp, getpid, getppid};

    use super::*;

    #[test]
    fn the_kin_of_a_process_is_known() {
        let own = getpid().as_raw_pid();
        let parent = getppid().map(Pid::as_raw_pid).expect("somebody has started us");
        assert_eq!(living_kin(own), Some(Kin { parent, group: getpgrp().as_raw_pid() }));
        assert!(pids().any(|pid| pid == own));
    }
}
