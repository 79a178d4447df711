//! The resources that the host holds, as sets, for comparison before and after a test.
//!
//! A removed sandbox must have left no mount, group, process, loop device, namespace or directory. Other
//! servers may run on the same machine, so the sets can be narrowed to entries that mention certain words:
//! a state directory and the ids of its sandboxes.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The state of the host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostState {
    pub mounts: BTreeSet<String>,
    pub groups: BTreeSet<String>,
    pub processes: BTreeSet<String>,
    pub loop_devices: BTreeSet<String>,
    /// Network namespaces that some process is in.
    pub namespaces: BTreeSet<u64>,
    pub directories: BTreeSet<String>,
    /// Links of sandboxes, in the net namespace of the calling thread.
    pub links: BTreeSet<String>,
}

impl HostState {
    /// Collects everything that could be ours; `state` is walked one level deep below each of its directories.
    pub fn capture(state: &Path) -> Self {
        let ours = |line: &String| line.contains("coracle");
        Self {
            mounts: list_mounts().into_iter().filter(ours).collect(),
            groups: list_groups().into_iter().filter(ours).collect(),
            processes: list_processes(),
            loop_devices: list_loop_devices(),
            namespaces: list_net_namespaces(),
            directories: list_directories(state),
            links: crate::test_network::sandbox_links().into_iter().collect(),
        }
    }

    /// The same state, narrowed to entries that mention one of `words`; all links are kept, since tests
    /// make theirs in their own namespaces.
    ///
    /// Namespaces are left out: they have no names, and the number of a removed one is given to the next,
    /// which may belong to another server. Nothing is lost by it. A namespace exists as long as a process
    /// is in it, a process holds it open, or it is mounted somewhere. Processes and mounts are compared,
    /// and all processes of a sandbox end with its first process, which the kernel ensures and whose start
    /// time the crash tests check.
    pub fn mentioning(&self, words: &[String]) -> Self {
        let keep = |set: &BTreeSet<String>| -> BTreeSet<String> {
            set.iter().filter(|line| words.iter().any(|word| line.contains(word.as_str()))).cloned().collect()
        };
        Self {
            mounts: keep(&self.mounts),
            groups: keep(&self.groups),
            processes: keep(&self.processes),
            loop_devices: keep(&self.loop_devices),
            namespaces: BTreeSet::new(),
            directories: keep(&self.directories),
            links: self.links.clone(),
        }
    }

    /// The entries that were not there `before`, as lines; empty if nothing was left.
    pub fn added_since(&self, before: &Self) -> Vec<String> {
        let named = [
            ("mount", &self.mounts, &before.mounts),
            ("group", &self.groups, &before.groups),
            ("process", &self.processes, &before.processes),
            ("loop device", &self.loop_devices, &before.loop_devices),
            ("directory", &self.directories, &before.directories),
            ("link", &self.links, &before.links),
        ];
        let namespaces =
            self.namespaces.difference(&before.namespaces).map(|inode| format!("network namespace {inode}"));
        named
            .into_iter()
            .flat_map(|(kind, now, then)| now.difference(then).map(move |line| format!("{kind} {line}")))
            .chain(namespaces)
            .collect()
    }
}

/// The pid of a sandbox's agent on the host: the process in its groups that is the first in its own pid
/// namespace.
pub fn agent_pid(id: &str) -> Option<u32> {
    numeric_entries("/proc").find_map(|process| {
        let groups = fs::read_to_string(process.join("cgroup")).ok()?;
        let status = fs::read_to_string(process.join("status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let first = numbers.split_whitespace().nth(1) == Some("1");
        (first && groups.contains(id)).then(|| process.file_name()?.to_str()?.parse().ok()).flatten()
    })
}

/// The pid on the host of the process that makes the namespaces of isolated sessions in a sandbox: the
/// first that its agent has forked.
pub fn namespace_broker_pid(id: &str) -> Option<u32> {
    let agent = agent_pid(id)?.to_string();
    numeric_entries("/proc").find_map(|process| {
        let status = fs::read_to_string(process.join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let numbers: Vec<&str> = field("NSpid:")?.split_whitespace().collect();
        let is_it = field("PPid:")? == agent && numbers.get(1) == Some(&"2") && numbers.len() == 2;
        is_it.then(|| process.file_name()?.to_str()?.parse().ok()).flatten()
    })
}

/// The pid on the host of the first process in the pid namespace of a process.
pub fn namespace_init_pid(pid: u32) -> Option<u32> {
    let space = |process: &Path| fs::read_link(process.join("ns/pid")).ok();
    let wanted = space(&Path::new("/proc").join(pid.to_string()))?;
    numeric_entries("/proc").find_map(|process| {
        let status = fs::read_to_string(process.join("status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let first = numbers.split_whitespace().next_back() == Some("1");
        (first && space(&process)? == wanted).then(|| process.file_name()?.to_str()?.parse().ok()).flatten()
    })
}

/// The pids on the host of processes whose command line contains `text`.
pub fn pids_with_command_line(text: &str) -> Vec<u32> {
    numeric_entries("/proc")
        .filter(|process| {
            fs::read_to_string(process.join("cmdline"))
                .is_ok_and(|line| line.replace('\0', " ").contains(text))
        })
        .filter_map(|process| process.file_name()?.to_str()?.parse().ok())
        .collect()
}

/// Memory of the agent of a sandbox and of its forks for file work, in bytes. Commands execute another
/// program and are not counted.
pub fn agent_memory(id: &str) -> u64 {
    const PAGE: u64 = 4096;
    let Some(agent) = agent_pid(id) else { return 0 };
    let program = |pid: &Path| fs::read_link(pid.join("exe")).ok();
    let own = program(Path::new(&format!("/proc/{agent}")));
    numeric_entries("/proc")
        .filter(|process| fs::read_to_string(process.join("cgroup")).is_ok_and(|text| text.contains(id)))
        .filter(|process| program(process) == own)
        .filter_map(|process| fs::read_to_string(process.join("statm")).ok())
        .filter_map(|text| text.split(' ').nth(1)?.parse::<u64>().ok())
        .map(|pages| pages * PAGE)
        .sum()
}

/// Mount points and their sources, of every mount namespace with a process: volumes are mounted where only
/// the launcher sees them.
fn list_mounts() -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut all = BTreeSet::new();
    for process in numeric_entries("/proc") {
        let Ok(namespace) = fs::metadata(process.join("ns/mnt")) else { continue };
        if !seen.insert(namespace.ino()) {
            continue;
        }
        let table = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
        all.extend(table.lines().filter_map(mount_words));
    }
    all
}

/// `POINT SOURCE ROOT OPTIONS`, without the numbers, which change from read to read.
fn mount_words(line: &str) -> Option<String> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, point) = (left.next()?, left.next()?);
    Some(format!("{point} {root} {right}"))
}

/// Every group below a directory named `coracle`, in all hierarchies.
fn list_groups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    collect_directories(Path::new("/sys/fs/cgroup"), 12, &mut found);
    found
}

/// `PID PROGRAM COMMAND LINE GROUPS` of processes that run our binary or are in our groups.
fn list_processes() -> BTreeSet<String> {
    numeric_entries("/proc")
        .filter_map(|process| {
            let program = fs::read_link(process.join("exe")).unwrap_or_default();
            let line = fs::read_to_string(process.join("cmdline")).unwrap_or_default().replace('\0', " ");
            let groups = fs::read_to_string(process.join("cgroup")).unwrap_or_default().replace('\n', " ");
            let ours =
                program.ends_with("coracle") || line.contains("__agent") || groups.contains("/coracle/");
            ours.then(|| format!("{} {} {line}{groups}", process.display(), program.display()))
        })
        .collect()
}

/// Loop devices and the files behind them.
fn list_loop_devices() -> BTreeSet<String> {
    let Ok(devices) = fs::read_dir("/sys/block") else { return BTreeSet::new() };
    devices
        .flatten()
        .filter_map(|device| {
            let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
            Some(format!("{} {}", device.file_name().to_string_lossy(), file.trim()))
        })
        .collect()
}

fn list_net_namespaces() -> BTreeSet<u64> {
    numeric_entries("/proc")
        .filter_map(|process| fs::metadata(process.join("ns/net")).ok())
        .map(|namespace| namespace.ino())
        .collect()
}

fn list_directories(state: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    collect_directories(state, 3, &mut found);
    found
}

fn collect_directories(directory: &Path, depth: usize, found: &mut BTreeSet<String>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        found.insert(entry.path().display().to_string());
        if depth > 1 {
            collect_directories(&entry.path(), depth - 1, found);
        }
    }
}

/// The entries of a directory whose names are numbers.
fn numeric_entries(directory: &str) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
        .map(|entry| entry.path())
}
