//! Control groups: where limits are enforced, commands frozen and trees killed.
//!
//! ```text
//! v2   coracle/<instance>/<id>/agent     the agent alone, with small bounds of its own
//!      coracle/<instance>/<id>/cmd/<n>   a command; the limits sit on `cmd`
//! v1   coracle/<instance>/<id>.agent, <id>.cmd   in memory, cpu and pids, where v2 has no controllers
//!      coracle/<instance>/<id>.cmd/<share>       in cpu: a few, over which commands are spread
//! ```
//!
//! On a hybrid host the v2 tree, though without controllers, still groups, freezes and kills.
//! A v1 group is joined by writing `0` to `tasks` from inside the process, never by writing a
//! pid to `cgroup.procs`: that stalls for a grace period of the kernel.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use linux::mounts::{self, Depth};

use crate::jail::plan::{LimitName, Limits};

const OURS: &str = "coracle";

/// The agent's own bounds: it forks workers and its journal passes through the page cache.
const AGENT_MEMORY: u64 = 256 << 20;
const AGENT_PIDS: u32 = 128;
/// Groups of commands in one sandbox, finished ones whose children live on included.
const MOST_GROUPS: u32 = 4096;

/// Into how many shares of the processor a v1 sandbox's is divided, one of them for file work. A
/// command that forks without end takes one; where v2 has the controller each command has its own.
const SHARES: usize = 4;

/// Where this host keeps its groups.
#[derive(Clone, Debug)]
pub struct Hierarchies {
    instance: String,
    unified: PathBuf,
    /// Whether the hierarchy is mounted with `nsdelegate`, as systemd does.
    delegates_by_namespace: bool,
    memory: Controller,
    cpu: Controller,
    pids: Controller,
}

/// How one kind of limit is set on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Controller {
    Unified,
    Legacy(PathBuf),
    Absent,
}

/// Descriptors that the agent inherits.
#[derive(Debug)]
pub struct Groups {
    /// The agent's v2 group, to be cloned into.
    pub agent: OwnedFd,
    /// The v2 group in which the agent makes one for each command.
    pub commands: OwnedFd,
    /// v1 `tasks` files of the agent and of commands.
    pub agent_tasks: Vec<OwnedFd>,
    pub command_tasks: Vec<OwnedFd>,
    /// v1 `tasks` files of shares of the processor; a command joins one of them.
    pub shares: Vec<OwnedFd>,
    /// A file with the word `oom_kill` and a count.
    pub oom: Option<OwnedFd>,
}

/// What a sandbox's commands have used.
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupUsage {
    pub memory: Option<u64>,
    pub cpu_micros: Option<u64>,
    pub pids: Option<u64>,
    pub oom_kills: Option<u64>,
}

impl Hierarchies {
    /// Finds the hierarchies in the mount table, or says why there are none to use.
    pub fn find(instance: &str) -> io::Result<Self> {
        let table = fs::read_to_string("/proc/self/mountinfo")?;
        let mounts: Vec<CgroupMount> = table.lines().filter_map(CgroupMount::parse).collect();
        let unified = mounts.iter().find(|mount| mount.kind == "cgroup2");
        let unified = unified.ok_or_else(|| io::Error::other("no cgroup v2 hierarchy is mounted"))?;
        let delegates_by_namespace = unified.has("nsdelegate");
        let unified = unified.path.clone();
        let offered = fs::read_to_string(unified.join("cgroup.controllers"))?;
        let controller = |name: &str| {
            if offered.split_whitespace().any(|word| word == name) {
                return Controller::Unified;
            }
            let legacy = mounts.iter().find(|mount| mount.kind == "cgroup" && mount.has(name));
            legacy.map_or(Controller::Absent, |mount| Controller::Legacy(mount.path.clone()))
        };
        let (memory, cpu, pids) = (controller("memory"), controller("cpu"), controller("pids"));
        Ok(Self { instance: instance.to_owned(), unified, delegates_by_namespace, memory, cpu, pids })
    }

    /// Whether a sandbox can have a cgroup namespace. With `nsdelegate` the kernel lets nobody move
    /// a process out of its namespace's root, and the agent, whose group that root would be, could
    /// start no command in another one. Names of groups can then be read inside.
    pub fn allows_namespace(&self) -> bool {
        !self.delegates_by_namespace
    }

    /// Makes the instance's own groups, with controllers switched on and a ceiling for the sum.
    pub fn open(&self) -> io::Result<()> {
        const ATTEMPTS: usize = 100;
        for _ in 0..ATTEMPTS {
            match self.make_instance() {
                // Another instance closed at this moment and took the empty parent along.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => return other,
            }
        }
        self.make_instance()
    }

    fn make_instance(&self) -> io::Result<()> {
        let mut enable = String::new();
        for (name, controller) in [("memory", &self.memory), ("cpu", &self.cpu), ("pids", &self.pids)] {
            if *controller == Controller::Unified {
                enable.push_str(&format!("+{name} "));
            }
        }
        let ours = self.unified.join(OURS);
        let instance = ours.join(&self.instance);
        fs::create_dir_all(&instance)?;
        if !enable.is_empty() {
            for group in [&self.unified, &ours, &instance] {
                fs::write(group.join("cgroup.subtree_control"), &enable)?;
            }
        }
        for controller in self.legacy() {
            fs::create_dir_all(controller.join(OURS).join(&self.instance))?;
        }
        self.set_ceiling(&instance)
    }

    /// All sandboxes together leave the host some processes to live with.
    fn set_ceiling(&self, instance: &Path) -> io::Result<()> {
        let most = fs::read_to_string("/proc/sys/kernel/pid_max")?;
        let most: u64 = most.trim().parse().map_err(io::Error::other)?;
        let ceiling = (most - most / 8).to_string();
        match &self.pids {
            Controller::Unified => fs::write(instance.join("pids.max"), ceiling),
            Controller::Legacy(root) => {
                fs::write(root.join(OURS).join(&self.instance).join("pids.max"), ceiling)
            }
            Controller::Absent => Ok(()),
        }
    }

    fn legacy(&self) -> impl Iterator<Item = &PathBuf> {
        let all = [&self.memory, &self.cpu, &self.pids];
        all.into_iter().filter_map(|controller| match controller {
            Controller::Legacy(root) => Some(root),
            Controller::Unified | Controller::Absent => None,
        })
    }

    /// Whether this host enforces a limit.
    pub fn enforces(&self, limit: LimitName) -> bool {
        let controller = match limit {
            LimitName::Memory => &self.memory,
            LimitName::Cpus => &self.cpu,
            LimitName::Pids => &self.pids,
            LimitName::Disk => return false,
        };
        *controller != Controller::Absent
    }

    /// The word for reports: `cgroup v2`, or `cgroup v1` where a legacy controller does it.
    pub fn version(&self, limit: LimitName) -> &'static str {
        let controller = match limit {
            LimitName::Memory => &self.memory,
            LimitName::Cpus => &self.cpu,
            LimitName::Pids | LimitName::Disk => &self.pids,
        };
        match controller {
            Controller::Unified => "cgroup v2",
            Controller::Legacy(_) => "cgroup v1",
            Controller::Absent => "none",
        }
    }

    fn home(&self, id: &str) -> PathBuf {
        self.unified.join(OURS).join(&self.instance).join(id)
    }

    fn legacy_home(&self, root: &Path, id: &str, part: &str) -> PathBuf {
        root.join(OURS).join(&self.instance).join(format!("{id}.{part}"))
    }

    /// Makes a sandbox's groups, sets its limits, and hands the command group to `root_uid`,
    /// the host id of root inside.
    pub fn make(&self, id: &str, limits: &Limits, root_uid: u32) -> io::Result<Groups> {
        let home = self.home(id);
        let (agent, commands) = (home.join("agent"), home.join("cmd"));
        fs::create_dir(&home)?;
        if [&self.memory, &self.cpu, &self.pids].into_iter().any(|c| *c == Controller::Unified) {
            let enabled = fs::read_to_string(home.join("cgroup.controllers"))?;
            let enable: String = enabled.split_whitespace().map(|word| format!("+{word} ")).collect();
            fs::write(home.join("cgroup.subtree_control"), enable)?;
        }
        fs::create_dir(&agent)?;
        fs::create_dir(&commands)?;
        // One group for each command and nothing below, so that what the agent makes can always be
        // removed and does not fill the kernel's memory.
        fs::write(commands.join("cgroup.max.depth"), "1")?;
        fs::write(commands.join("cgroup.max.descendants"), MOST_GROUPS.to_string())?;
        self.delegate(&home, &commands, root_uid)?;
        let mut agent_tasks = Vec::new();
        let mut command_tasks = Vec::new();
        for root in self.legacy() {
            for (part, tasks) in [("agent", &mut agent_tasks), ("cmd", &mut command_tasks)] {
                let group = self.legacy_home(root, id, part);
                fs::create_dir(&group)?;
                if part == "cmd" && self.cpu == Controller::Legacy(root.clone()) {
                    continue;
                }
                tasks.push(File::options().write(true).open(group.join("tasks"))?.into());
            }
        }
        let shares = self.make_shares(id)?;
        self.limit(id, limits)?;
        let oom = self.oom_file(id, "cmd").map(File::open).transpose()?;
        Ok(Groups {
            agent: File::open(agent)?.into(),
            // A mount of its own, which has nothing above: from an open directory of the host's
            // hierarchy a subverted agent would walk up to the host's root.
            commands: mounts::clone_tree(&commands, Depth::Single)?,
            agent_tasks,
            command_tasks,
            shares,
            oom: oom.map(Into::into),
        })
    }

    /// Divides the processor of a sandbox where commands are not groups of its controller.
    fn make_shares(&self, id: &str) -> io::Result<Vec<OwnedFd>> {
        let Controller::Legacy(root) = &self.cpu else { return Ok(Vec::new()) };
        let commands = self.legacy_home(root, id, "cmd");
        let share = |number: usize| {
            let share = commands.join(number.to_string());
            fs::create_dir(&share)?;
            Ok(File::options().write(true).open(share.join("tasks"))?.into())
        };
        (0..SHARES).map(share).collect()
    }

    /// Lets root inside make groups below `cmd` and move its children there from `agent`: the
    /// kernel asks for write access to `cgroup.procs` of their common ancestor.
    fn delegate(&self, home: &Path, commands: &Path, root_uid: u32) -> io::Result<()> {
        for path in [home.join("cgroup.procs"), commands.to_owned(), commands.join("cgroup.procs")] {
            std::os::unix::fs::chown(path, Some(root_uid), Some(root_uid))?;
        }
        Ok(())
    }

    fn limit(&self, id: &str, limits: &Limits) -> io::Result<()> {
        self.limit_memory(id, "cmd", limits.memory)?;
        self.limit_memory(id, "agent", AGENT_MEMORY)?;
        self.limit_pids(id, "cmd", limits.pids)?;
        self.limit_pids(id, "agent", AGENT_PIDS)?;
        const PERIOD: u64 = 100_000;
        let quota = (u64::from(limits.cpus) * PERIOD / 1000).max(1000);
        match &self.cpu {
            Controller::Unified => fs::write(self.home(id).join("cmd/cpu.max"), format!("{quota} {PERIOD}")),
            Controller::Legacy(root) => {
                fs::write(self.legacy_home(root, id, "cmd").join("cpu.cfs_quota_us"), quota.to_string())
            }
            Controller::Absent => Ok(()),
        }
    }

    fn limit_memory(&self, id: &str, part: &str, bytes: u64) -> io::Result<()> {
        match &self.memory {
            Controller::Unified => {
                let group = self.home(id).join(part);
                fs::write(group.join("memory.max"), bytes.to_string())?;
                // Swap would let a sandbox have more than it was given; the file is absent
                // where the kernel has no swap accounting.
                write_if_present(&group.join("memory.swap.max"), "0")
            }
            Controller::Legacy(root) => {
                let group = self.legacy_home(root, id, part);
                fs::write(group.join("memory.limit_in_bytes"), bytes.to_string())?;
                // Buffers of sockets are counted apart here; v2 counts them with the rest.
                fs::write(group.join("memory.kmem.tcp.limit_in_bytes"), (bytes / 4).to_string())?;
                write_if_present(&group.join("memory.memsw.limit_in_bytes"), &bytes.to_string())
            }
            Controller::Absent => Ok(()),
        }
    }

    fn limit_pids(&self, id: &str, part: &str, count: u32) -> io::Result<()> {
        match &self.pids {
            Controller::Unified => fs::write(self.home(id).join(part).join("pids.max"), count.to_string()),
            Controller::Legacy(root) => {
                fs::write(self.legacy_home(root, id, part).join("pids.max"), count.to_string())
            }
            Controller::Absent => Ok(()),
        }
    }

    fn oom_file(&self, id: &str, part: &str) -> Option<PathBuf> {
        match &self.memory {
            Controller::Unified => Some(self.home(id).join(part).join("memory.events")),
            Controller::Legacy(root) => Some(self.legacy_home(root, id, part).join("memory.oom_control")),
            Controller::Absent => None,
        }
    }

    /// Whether the kernel killed the agent itself for lack of memory.
    pub fn agent_was_killed_for_memory(&self, id: &str) -> bool {
        let text = self.oom_file(id, "agent").and_then(|file| fs::read_to_string(file).ok());
        text.and_then(|text| word(&text, "oom_kill")).is_some_and(|count| count > 0)
    }

    /// Asks the kernel to stop every command, or to let them go on.
    pub fn freeze(&self, id: &str, frozen: bool) -> io::Result<Freezing> {
        let group = self.home(id).join("cmd");
        fs::write(group.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        Ok(Freezing { events: File::open(group.join("cgroup.events"))?, frozen })
    }

    /// Whether a sandbox is frozen or about to be: a launcher that was killed between asking the
    /// kernel and hearing of it leaves a group that freezes a moment later.
    pub fn is_frozen(&self, id: &str) -> bool {
        fs::read_to_string(self.home(id).join("cmd/cgroup.freeze")).is_ok_and(|text| text.trim() == "1")
    }

    /// Kills whatever is left in a sandbox's groups.
    pub fn kill(&self, id: &str) -> io::Result<()> {
        write_if_present(&self.home(id).join("cgroup.kill"), "1")
    }

    /// Removes a sandbox's groups; `WouldBlock` if something in them has not ended yet.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        let home = self.home(id);
        for entry in fs::read_dir(home.join("cmd")).into_iter().flatten() {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                remove_group(&entry.path())?;
            }
        }
        for group in [home.join("cmd"), home.join("agent"), home] {
            remove_group(&group)?;
        }
        for root in self.legacy() {
            for share in 0..SHARES {
                remove_group(&self.legacy_home(root, id, "cmd").join(share.to_string()))?;
            }
            for part in ["cmd", "agent"] {
                remove_group(&self.legacy_home(root, id, part))?;
            }
        }
        Ok(())
    }

    /// The ids that have groups here.
    pub fn list(&self) -> io::Result<Vec<String>> {
        let mut ids = Vec::new();
        let v2 = self.unified.join(OURS).join(&self.instance);
        let v1 = self.legacy().map(|root| root.join(OURS).join(&self.instance));
        for directory in std::iter::once(v2).chain(v1) {
            for entry in fs::read_dir(directory).into_iter().flatten() {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    let name = entry.file_name().to_string_lossy().into_owned();
                    ids.push(name.split('.').next().unwrap_or_default().to_owned());
                }
            }
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Removes the instance's own groups if nothing is in them any more.
    pub fn close(&self) -> io::Result<()> {
        let v2 = self.unified.join(OURS);
        let v1 = self.legacy().map(|root| root.join(OURS));
        for ours in std::iter::once(v2).chain(v1) {
            for group in [ours.join(&self.instance), ours] {
                match remove_group(&group) {
                    // Another instance, or a sandbox that stays.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => other?,
                }
            }
        }
        Ok(())
    }

    pub fn usage(&self, id: &str) -> GroupUsage {
        let number = |path: PathBuf| fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
        let memory = match &self.memory {
            Controller::Unified => number(self.home(id).join("cmd/memory.current")),
            Controller::Legacy(root) => {
                number(self.legacy_home(root, id, "cmd").join("memory.usage_in_bytes"))
            }
            Controller::Absent => None,
        };
        let pids = match &self.pids {
            Controller::Unified => number(self.home(id).join("cmd/pids.current")),
            Controller::Legacy(root) => number(self.legacy_home(root, id, "cmd").join("pids.current")),
            Controller::Absent => None,
        };
        // Every v2 group accounts processor time, with or without a controller.
        let stat = fs::read_to_string(self.home(id).join("cmd/cpu.stat")).unwrap_or_default();
        let oom = self.oom_file(id, "cmd").and_then(|file| fs::read_to_string(file).ok());
        GroupUsage {
            memory,
            pids,
            cpu_micros: word(&stat, "usage_usec"),
            oom_kills: oom.and_then(|text| word(&text, "oom_kill")),
        }
    }
}

/// A group on its way to being stopped or continued.
#[derive(Debug)]
pub struct Freezing {
    /// The kernel marks it with `POLLPRI` when it changes; looking at it takes the mark away.
    pub events: File,
    frozen: bool,
}

impl Freezing {
    /// Whether the kernel has done it.
    pub fn is_done(&self) -> io::Result<bool> {
        let mut buffer = [0; 256];
        let length = rustix::io::pread(&self.events, &mut buffer, 0)?;
        let text = String::from_utf8_lossy(&buffer[..length]);
        Ok(word(&text, "frozen") == Some(u64::from(self.frozen)))
    }
}

/// A cgroup line of the mount table.
struct CgroupMount {
    path: PathBuf,
    kind: String,
    options: String,
}

impl CgroupMount {
    fn parse(line: &str) -> Option<Self> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let path = mount.split(' ').nth(4)?;
        let mut words = filesystem.split(' ');
        let kind = words.next()?;
        let options = words.nth(1)?;
        let ours = kind == "cgroup" || kind == "cgroup2";
        ours.then(|| Self { path: path.into(), kind: kind.to_owned(), options: options.to_owned() })
    }

    fn has(&self, controller: &str) -> bool {
        self.options.split(',').any(|word| word == controller)
    }
}

/// The number behind a word at the beginning of a line.
fn word(text: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value)
}

fn write_if_present(path: &Path, text: &str) -> io::Result<()> {
    match fs::write(path, text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn remove_group(path: &Path) -> io::Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(io::ErrorKind::WouldBlock.into()),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            Err(io::ErrorKind::WouldBlock.into())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_found_only_at_the_beginning_of_its_line() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(word(text, "oom_kill"), Some(3));
        assert_eq!(word(text, "oom"), None);
    }

    #[test]
    fn cgroup_mounts_are_read_from_the_table() {
        let line =
            "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct";
        let mount = CgroupMount::parse(line).expect("it is one");
        assert_eq!(mount.path, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(mount.has("cpu") && !mount.has("memory"));
        assert!(CgroupMount::parse("22 1 8:1 / / rw - ext4 /dev/sda1 rw").is_none());
    }
}
