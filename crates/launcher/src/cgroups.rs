//! Control groups: they enforce limits, freeze commands and kill process trees.
//!
//! ```text
//! v2   coracle/<instance>/<id>/agent     only the agent, with small limits of its own
//!      coracle/<instance>/<id>/cmd/<n>   a command; the limits sit on `cmd`
//! v1   coracle/<instance>/<id>.agent, <id>.cmd   in memory, cpu and pids, where v2 has no controllers
//!      coracle/<instance>/<id>.cmd/<share>       in cpu: a few groups, over which commands are spread
//!      coracle/<instance>                        in all other hierarchies: the launcher and all sandboxes
//! both coracle/<instance>.egress                 egress, with a limit on memory
//! ```
//!
//! For root, `coracle` is at the top of each hierarchy; for an ordinary user it is in the v2 group
//! that was delegated to us, if there is one.
//!
//! On a hybrid host the v2 tree has no controllers, but it still groups, freezes and kills processes.
//! A v1 group is joined by writing `0` to `tasks` from inside the process, never by writing a
//! pid to `cgroup.procs`: that stalls for a grace period of the kernel.

mod delegation;
mod egress_group;
mod legacy;
mod limits;
mod mount_table;
mod own_limits;
mod starter;
mod total_limits;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use domain::SandboxId;
use linux::mounts::{self, MountDepth};

use self::mount_table::CgroupMount;
use self::starter::UnlimitedHierarchy;
use crate::jail::plan::{JailLimits, LimitName};

pub use self::delegation::{leave_leaf_group, move_to_leaf_group};
pub use self::egress_group::join_egress_group;
pub(crate) use self::own_limits::{own_limits, sees_only_a_part};

const ROOT_GROUP_NAME: &str = "coracle";
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

/// The largest number of command groups in one sandbox, including those of finished commands whose
/// children are still running.
const MAX_COMMAND_GROUPS: u32 = 4096;

/// How often groups are made again while other instances remove their empty parent.
const MAX_OPEN_ATTEMPTS: usize = 100;

/// Whether v1 hierarchies have the controllers; they cannot be delegated to an ordinary user then.
pub(crate) fn has_legacy_controllers() -> bool {
    let legacy =
        |mount: &CgroupMount| mount.kind == "cgroup" && CONTROLLERS.iter().any(|name| mount.has_option(name));
    mount_table::read_cgroup_mounts().is_ok_and(|mounts| mounts.iter().any(legacy))
}

/// The control group hierarchies of this host, and our groups in them.
#[derive(Clone, Debug)]
pub(crate) struct CgroupHierarchies {
    instance: String,
    /// The v2 group that contains our groups.
    unified: PathBuf,
    /// Groups that may still contain ours from former starts.
    former: Vec<PathBuf>,
    extent: CgroupAccess,
    /// Whether the hierarchy is mounted with `nsdelegate`, as systemd does.
    delegates_by_namespace: bool,
    memory: CgroupController,
    cpu: CgroupController,
    pids: CgroupController,
    /// The v1 hierarchies in which we set no limits.
    unlimited: Vec<UnlimitedHierarchy>,
    /// The limit of all sandboxes together, in thousandths of a core.
    total_cpus: Option<u32>,
}

/// The part of the hierarchy that we may use.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CgroupAccess {
    /// All of it: we are root.
    Whole,
    /// A group that was delegated to us.
    Delegated {
        /// Why expected controllers are missing.
        shortfall: Option<String>,
    },
    /// Only groups that former starts left; no new ones can be made.
    Remains { reason: String },
}

/// The mechanism that sets one kind of limit on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CgroupController {
    Unified,
    Legacy(PathBuf),
    Absent,
}

/// The control groups of a new sandbox: descriptors that the agent inherits.
#[derive(Debug)]
pub(crate) struct SandboxCgroups {
    /// The agent's v2 group, into which the child is cloned.
    pub agent: OwnedFd,
    /// The v2 group in which the agent makes one for each command.
    pub commands: OwnedFd,
    /// The path of `commands` if the child has to mount it. Only root can make the mount here.
    pub unmounted: Option<PathBuf>,
    /// v1 `tasks` files of the agent and of commands.
    pub agent_tasks: Vec<OwnedFd>,
    pub command_tasks: Vec<OwnedFd>,
    /// v1 `tasks` files of shares of the processor; a command joins one of them.
    pub shares: Vec<OwnedFd>,
    /// A file that contains `oom_kill` and a count.
    pub oom: Option<OwnedFd>,
    pub limit_files: LimitFiles,
}

/// The files that show the limits and the usage of the commands' group, opened for reading.
#[derive(Debug)]
pub(crate) struct LimitFiles {
    pub memory: Option<MemoryLimitFiles>,
    /// `cpu.max`, or `cpu.cfs_quota_us` of v1.
    pub cpu: Option<OwnedFd>,
}

#[derive(Debug)]
pub(crate) struct MemoryLimitFiles {
    pub limit: OwnedFd,
    pub usage: OwnedFd,
    pub stat: OwnedFd,
}

/// The resources that a sandbox's commands have used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CgroupUsage {
    pub memory: Option<u64>,
    pub cpu_micros: Option<u64>,
    pub pids: Option<u64>,
    pub oom_kills: Option<u64>,
}

/// The pages of files in a group's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilePages {
    /// How often a page was read again after it had been dropped.
    pub refaults: u64,
    pub bytes: u64,
}

impl FilePages {
    /// Parses `memory.stat`, which has the same names in both versions. Before Linux 5.9 there was one counter for
    /// all pages.
    fn parse(stat: &str) -> Option<Self> {
        let refaults = parse_counter(stat, "workingset_refault_file")
            .or_else(|| parse_counter(stat, "workingset_refault"))?;
        let bytes = parse_counter(stat, "active_file")?.saturating_add(parse_counter(stat, "inactive_file")?);
        Some(Self { refaults, bytes })
    }
}

impl CgroupHierarchies {
    /// Finds the hierarchies in the mount table, or returns why there are none to use.
    pub(crate) fn find_for_root(instance: &str) -> io::Result<Self> {
        let mounts = mount_table::read_cgroup_mounts()?;
        let unified = mount_table::find_unified_mount(&mounts)?;
        let legacy = |name: &str| {
            let found = mounts.iter().find(|mount| mount.kind == "cgroup" && mount.has_option(name));
            found.map_or(CgroupController::Absent, |mount| CgroupController::Legacy(mount.path.clone()))
        };
        let mut found = Self::open_in_group(instance, unified, &unified.path, CgroupAccess::Whole, legacy)?;
        found.add_unlimited_hierarchies(&mounts);
        Ok(found)
    }

    /// Finds the groups that an ordinary user may use: the group we were started in, if it was
    /// delegated to us, and groups that former starts with this state directory left elsewhere.
    pub(crate) fn find_delegated(instance: &str, state_dir: &Path) -> io::Result<Self> {
        let mounts = mount_table::read_cgroup_mounts()?;
        let unified = mount_table::find_unified_mount(&mounts)?;
        let mut former = delegation::read_former_groups(state_dir, instance)?;
        let (group, extent) = match (delegation::delegated_group(unified), former.first()) {
            (Ok(group), _) => (group, CgroupAccess::Delegated { shortfall: None }),
            (Err(error), Some(left)) => (left.clone(), CgroupAccess::Remains { reason: error.to_string() }),
            (Err(error), None) => return Err(error),
        };
        former.retain(|left| *left != group);
        let mut found = Self::open_in_group(instance, unified, &group, extent, |_| CgroupController::Absent)?;
        found.former = former;
        Ok(found)
    }

    /// Records where groups will be, so that a start from another group finds them.
    pub(crate) fn save_group_roots(&self, state_dir: &Path) -> io::Result<()> {
        delegation::write_group_list(state_dir, &self.group_roots().collect::<Vec<_>>())
    }

    fn open_in_group(
        instance: &str,
        mount: &CgroupMount,
        group: &Path,
        access: CgroupAccess,
        otherwise: impl Fn(&str) -> CgroupController,
    ) -> io::Result<Self> {
        let offered = fs::read_to_string(group.join("cgroup.controllers"))?;
        let controller = |name: &str| {
            let here = offered.split_whitespace().any(|word| word == name);
            if here { CgroupController::Unified } else { otherwise(name) }
        };
        let [memory, cpu, pids] = CONTROLLERS.map(controller);
        Ok(Self {
            instance: instance.to_owned(),
            unified: group.to_owned(),
            former: Vec::new(),
            extent: access,
            delegates_by_namespace: mount.has_option("nsdelegate"),
            memory,
            cpu,
            pids,
            unlimited: Vec::new(),
            total_cpus: None,
        })
    }

    /// Returns all groups that may contain ours.
    fn group_roots(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.unified).chain(&self.former)
    }

    /// Whether groups for new sandboxes can be made.
    pub(crate) fn can_make(&self) -> bool {
        !matches!(self.extent, CgroupAccess::Remains { .. })
    }

    /// Returns why not all limits are enforced, if the reason is the group that was delegated to us.
    pub(crate) fn unenforced_reason(&self) -> Option<&str> {
        match &self.extent {
            CgroupAccess::Whole => None,
            CgroupAccess::Delegated { shortfall } => shortfall.as_deref(),
            CgroupAccess::Remains { reason } => Some(reason),
        }
    }

    /// Whether a sandbox can have a cgroup namespace. With `nsdelegate` the kernel does not allow a
    /// process to be moved out of its namespace's root. That root would be the agent's group, so the
    /// agent could not start commands in other groups. Without the namespace, code inside can read the
    /// names of groups.
    pub(crate) fn allows_namespace(&self) -> bool {
        !self.delegates_by_namespace
    }

    /// Makes the groups of this instance, enables controllers and sets a limit for all sandboxes together.
    pub(crate) fn open(&mut self) -> io::Result<()> {
        if !self.can_make() {
            return Ok(());
        }
        self.enable_controllers()?;
        for _ in 0..MAX_OPEN_ATTEMPTS {
            match self.make_instance() {
                // Another instance was just closed and removed the empty parent.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => return other,
            }
        }
        self.make_instance()
    }

    /// Enables controllers for the groups below ours. A group that was delegated to an ordinary user
    /// may lack some of them, or contain processes that are not ours; those limits are not enforced
    /// then.
    fn enable_controllers(&mut self) -> io::Result<()> {
        let control = self.unified.join("cgroup.subtree_control");
        let CgroupAccess::Delegated { shortfall } = &mut self.extent else {
            let enable = self.unified_controllers();
            if enable.is_empty() {
                return Ok(());
            }
            return match fs::write(&control, &enable) {
                // In a container the visible root is an ordinary group, with the container's processes.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    delegation::move_all_to_leaf_group(&self.unified)?;
                    fs::write(control, enable)
                }
                other => other,
            };
        };
        let all = [&mut self.memory, &mut self.cpu, &mut self.pids];
        let mut passed_on = delegation::move_to_leaf_group();
        for (name, controller) in CONTROLLERS.into_iter().zip(all) {
            if *controller == CgroupController::Unified {
                passed_on = passed_on.and_then(|()| fs::write(&control, format!("+{name}")));
            }
            if passed_on.is_err() {
                *controller = CgroupController::Absent;
            }
        }
        *shortfall = passed_on.err().map(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => "other processes are in our control group".to_owned(),
            _ => format!("could not enable controllers below our control group: {error}"),
        });
        Ok(())
    }

    /// Returns the v2 controllers in the form that enables them in `cgroup.subtree_control`.
    fn unified_controllers(&self) -> String {
        let all = CONTROLLERS.into_iter().zip([&self.memory, &self.cpu, &self.pids]);
        let here = all.filter(|(_, controller)| **controller == CgroupController::Unified);
        here.map(|(name, _)| format!("+{name} ")).collect()
    }

    fn make_instance(&self) -> io::Result<()> {
        let ours = self.unified.join(ROOT_GROUP_NAME);
        let instance = ours.join(&self.instance);
        fs::create_dir_all(&instance)?;
        let enable = self.unified_controllers();
        if !enable.is_empty() {
            for group in [&ours, &instance] {
                fs::write(group.join("cgroup.subtree_control"), &enable)?;
            }
        }
        for controller in self.legacy_roots() {
            fs::create_dir_all(controller.join(ROOT_GROUP_NAME).join(&self.instance))?;
        }
        self.limit_total_tcp_memory()?;
        self.set_total_pids_limit(&instance)
    }

    /// Limits the processes of all sandboxes together, so that some are left for the host.
    fn set_total_pids_limit(&self, instance: &Path) -> io::Result<()> {
        let ceiling = total_limits::pids_ceiling()?.to_string();
        match &self.pids {
            CgroupController::Unified => fs::write(instance.join("pids.max"), ceiling),
            CgroupController::Legacy(root) => {
                fs::write(root.join(ROOT_GROUP_NAME).join(&self.instance).join("pids.max"), ceiling)
            }
            CgroupController::Absent => Ok(()),
        }
    }

    /// Whether this host enforces a limit by groups.
    pub(crate) fn enforces(&self, limit: LimitName) -> bool {
        *self.controller_for(limit) != CgroupController::Absent
    }

    fn controller_for(&self, limit: LimitName) -> &CgroupController {
        match limit {
            LimitName::Memory => &self.memory,
            LimitName::Cpus => &self.cpu,
            LimitName::Pids => &self.pids,
            // Disk limits are not enforced by control groups.
            LimitName::Disk => &CgroupController::Absent,
        }
    }

    /// Returns the name for reports: `cgroup v2`, or `cgroup v1` for a legacy controller.
    pub(crate) fn version_label(&self, limit: LimitName) -> &'static str {
        match self.controller_for(limit) {
            CgroupController::Unified => "cgroup v2",
            CgroupController::Legacy(_) => "cgroup v1",
            CgroupController::Absent => "none",
        }
    }

    fn sandbox_group(&self, id: &SandboxId) -> PathBuf {
        let below = |group: &PathBuf| group.join(ROOT_GROUP_NAME).join(&self.instance).join(id.as_str());
        let left = self.former.iter().map(below).find(|home| home.is_dir());
        left.unwrap_or_else(|| below(&self.unified))
    }

    /// Makes a sandbox's groups, sets its limits, and makes `root_uid`, the host id of root inside,
    /// the owner of the command group.
    pub(crate) fn make_for_sandbox(
        &self,
        id: &SandboxId,
        limits: &JailLimits,
        root_uid: u32,
    ) -> io::Result<SandboxCgroups> {
        let home = self.sandbox_group(id);
        let (agent, commands) = (home.join("agent"), home.join("cmd"));
        fs::create_dir(&home)?;
        let enable = self.unified_controllers();
        if !enable.is_empty() {
            fs::write(home.join("cgroup.subtree_control"), enable)?;
        }
        fs::create_dir(&agent)?;
        fs::create_dir(&commands)?;
        // Only one level of groups, one for each command, so that the groups that the agent makes can
        // always be removed and do not fill the kernel's memory.
        fs::write(commands.join("cgroup.max.depth"), "1")?;
        fs::write(commands.join("cgroup.max.descendants"), MAX_COMMAND_GROUPS.to_string())?;
        if self.cpu == CgroupController::Unified {
            // Each command gets its own cpu group; a command that forks without end would otherwise
            // starve the others.
            fs::write(commands.join("cgroup.subtree_control"), "+cpu")?;
        }
        self.delegate_command_group(&home, &commands, root_uid)?;
        self.make_legacy_groups(id)?;
        let tasks = self.open_legacy_tasks(id)?;
        self.set_agent_limits(id)?;
        self.set_sandbox_limits(id, limits)?;
        let oom = self.oom_file(id, "cmd").map(File::open).transpose()?;
        // The agent gets a separate mount without parent directories: a subverted agent could walk up
        // from an open directory of the host's hierarchy to its root.
        let (commands, unmounted) = match self.extent {
            CgroupAccess::Whole => (mounts::clone_tree(&commands, MountDepth::Single)?, None),
            CgroupAccess::Delegated { .. } | CgroupAccess::Remains { .. } => {
                (File::open(&commands)?.into(), Some(commands))
            }
        };
        Ok(SandboxCgroups {
            agent: File::open(agent)?.into(),
            commands,
            unmounted,
            agent_tasks: tasks.agent,
            command_tasks: tasks.commands,
            shares: tasks.shares,
            oom: oom.map(Into::into),
            limit_files: self.open_limit_files(id)?,
        })
    }

    /// Opens the files that show the limits of a sandbox's commands. The descriptor of a file gives no
    /// access to the rest of the hierarchy.
    fn open_limit_files(&self, id: &SandboxId) -> io::Result<LimitFiles> {
        let open = |path: PathBuf| File::open(path).map(OwnedFd::from);
        let memory = match &self.memory {
            CgroupController::Unified => {
                Some((self.sandbox_group(id).join("cmd"), ["memory.max", "memory.current"]))
            }
            CgroupController::Legacy(root) => {
                let group = self.legacy_group(root, id, "cmd");
                Some((group, ["memory.limit_in_bytes", "memory.usage_in_bytes"]))
            }
            CgroupController::Absent => None,
        };
        let memory = memory.map(|(group, [limit, usage])| {
            let stat = open(group.join("memory.stat"))?;
            Ok(MemoryLimitFiles { limit: open(group.join(limit))?, usage: open(group.join(usage))?, stat })
        });
        let cpu = match &self.cpu {
            CgroupController::Unified => Some(self.sandbox_group(id).join("cmd/cpu.max")),
            CgroupController::Legacy(root) => {
                Some(self.legacy_group(root, id, "cmd").join("cpu.cfs_quota_us"))
            }
            CgroupController::Absent => None,
        };
        Ok(LimitFiles {
            memory: memory.transpose().map_err(|error: io::Error| error)?,
            cpu: cpu.map(open).transpose()?,
        })
    }

    /// Allows root inside to make groups below `cmd` and to move its children there from `agent`: the
    /// kernel requires write access to `cgroup.procs` of their common ancestor.
    fn delegate_command_group(&self, home: &Path, commands: &Path, root_uid: u32) -> io::Result<()> {
        if root_uid == rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        for path in [home.join("cgroup.procs"), commands.to_owned(), commands.join("cgroup.procs")] {
            std::os::unix::fs::chown(path, Some(root_uid), Some(root_uid))?;
        }
        Ok(())
    }

    fn oom_file(&self, id: &SandboxId, part: &str) -> Option<PathBuf> {
        match &self.memory {
            CgroupController::Unified => Some(self.sandbox_group(id).join(part).join("memory.events")),
            CgroupController::Legacy(root) => {
                Some(self.legacy_group(root, id, part).join("memory.oom_control"))
            }
            CgroupController::Absent => None,
        }
    }

    /// Whether the kernel killed the agent itself for lack of memory.
    pub(crate) fn agent_was_killed_for_memory(&self, id: &SandboxId) -> bool {
        let text = self.oom_file(id, "agent").and_then(|file| fs::read_to_string(file).ok());
        text.and_then(|text| parse_counter(&text, "oom_kill")).is_some_and(|count| count > 0)
    }

    /// Asks the kernel to freeze or to thaw all commands.
    pub(crate) fn set_frozen(&self, id: &SandboxId, frozen: bool) -> io::Result<PendingFreeze> {
        let group = self.sandbox_group(id).join("cmd");
        fs::write(group.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        Ok(PendingFreeze { events: File::open(group.join("cgroup.events"))?, frozen })
    }

    /// Whether a sandbox is frozen or about to be: if a launcher is killed after it asked the kernel
    /// to freeze a group, the group still freezes a moment later.
    pub(crate) fn is_frozen(&self, id: &SandboxId) -> bool {
        fs::read_to_string(self.sandbox_group(id).join("cmd/cgroup.freeze"))
            .is_ok_and(|text| text.trim() == "1")
    }

    /// Returns the file in which the kernel shows whether the commands are frozen.
    pub(crate) fn events_file(&self, id: &SandboxId) -> PathBuf {
        self.sandbox_group(id).join("cmd/cgroup.events")
    }

    /// Returns the processes in a sandbox's groups.
    pub(crate) fn process_ids(&self, id: &SandboxId) -> Vec<i32> {
        let home = self.sandbox_group(id);
        let commands = home.join("cmd");
        let below = fs::read_dir(&commands).into_iter().flatten().flatten().map(|entry| entry.path());
        let groups = [home.join("agent"), commands.clone()].into_iter().chain(below);
        // A group may be removed meanwhile, and other entries are files.
        let listed = groups.filter_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
        listed
            .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>())
            .collect()
    }

    /// Kills all processes that are left in a sandbox's groups.
    pub(crate) fn kill_processes(&self, id: &SandboxId) -> io::Result<()> {
        write_if_present(&self.sandbox_group(id).join("cgroup.kill"), "1")
    }

    /// Removes a sandbox's groups; `WouldBlock` if a process in them has not ended yet.
    pub(crate) fn remove(&self, id: &SandboxId) -> io::Result<()> {
        let home = self.sandbox_group(id);
        for entry in fs::read_dir(home.join("cmd")).into_iter().flatten() {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                remove_group(&entry.path())?;
            }
        }
        for group in [home.join("cmd"), home.join("agent"), home] {
            remove_group(&group)?;
        }
        self.remove_legacy_groups(id)
    }

    /// Returns the ids of all sandboxes that have groups here.
    pub(crate) fn list_sandboxes(&self) -> io::Result<Vec<String>> {
        let mut ids = Vec::new();
        let roots = self.group_roots().chain(self.legacy_roots());
        for directory in roots.map(|root| root.join(ROOT_GROUP_NAME).join(&self.instance)) {
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

    /// Removes the groups of this instance if they are empty. A failure in one hierarchy does not stop the work in the
    /// others; the first error is returned.
    pub(crate) fn close(&self) -> io::Result<()> {
        let mut closed = self.return_to_starter_groups();
        let unlimited = self.unlimited.iter().filter_map(UnlimitedHierarchy::entered_root);
        for root in self.group_roots().chain(self.legacy_roots()).chain(unlimited) {
            closed = closed.and(remove_instance_group(root, &self.instance));
        }
        match self.extent {
            CgroupAccess::Delegated { .. } | CgroupAccess::Whole => {
                closed.and(delegation::restore_group(&self.unified))
            }
            CgroupAccess::Remains { .. } => closed,
        }
    }

    pub(crate) fn usage(&self, id: &SandboxId) -> CgroupUsage {
        let number = |path: PathBuf| fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
        let memory = match &self.memory {
            CgroupController::Unified => number(self.sandbox_group(id).join("cmd/memory.current")),
            CgroupController::Legacy(root) => {
                number(self.legacy_group(root, id, "cmd").join("memory.usage_in_bytes"))
            }
            CgroupController::Absent => None,
        };
        let pids = match &self.pids {
            CgroupController::Unified => number(self.sandbox_group(id).join("cmd/pids.current")),
            CgroupController::Legacy(root) => number(self.legacy_group(root, id, "cmd").join("pids.current")),
            CgroupController::Absent => None,
        };
        let oom = self.oom_file(id, "cmd").and_then(|file| fs::read_to_string(file).ok());
        CgroupUsage {
            memory,
            pids,
            cpu_micros: self.cpu_micros(id),
            oom_kills: oom.and_then(|text| parse_counter(&text, "oom_kill")),
        }
    }

    /// Returns what the kernel counts about pages of files of the commands.
    pub(crate) fn file_pages(&self, id: &SandboxId) -> Option<FilePages> {
        let group = match &self.memory {
            CgroupController::Unified => self.sandbox_group(id).join("cmd"),
            CgroupController::Legacy(root) => self.legacy_group(root, id, "cmd"),
            CgroupController::Absent => return None,
        };
        FilePages::parse(&fs::read_to_string(group.join("memory.stat")).ok()?)
    }

    /// Returns the processor time that commands used. Every v2 group accounts it, with or without a
    /// controller.
    pub(crate) fn cpu_micros(&self, id: &SandboxId) -> Option<u64> {
        parse_counter(&fs::read_to_string(self.sandbox_group(id).join("cmd/cpu.stat")).ok()?, "usage_usec")
    }
}

/// A freeze or thaw of a group that the kernel has been asked for.
#[derive(Debug)]
pub struct PendingFreeze {
    /// The kernel reports changes of this file with `POLLPRI`; reading the file clears that.
    pub events: File,
    frozen: bool,
}

impl PendingFreeze {
    /// Whether the kernel has finished.
    pub fn is_done(&self) -> io::Result<bool> {
        let mut buffer = [0; 256];
        let length = rustix::io::pread(&self.events, &mut buffer, 0)?;
        let text = String::from_utf8_lossy(&buffer[..length]);
        Ok(parse_counter(&text, "frozen") == Some(u64::from(self.frozen)))
    }
}

/// Returns the number after `name` at the beginning of a line.
fn parse_counter(text: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value)
}

fn write_if_present(path: &Path, text: &str) -> io::Result<()> {
    match fs::write(path, text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes the groups of an instance that are empty, in every hierarchy of this host. [`CgroupHierarchies::close`] does the
/// same at the end of a launcher; this is for a server whose launcher was killed.
///
/// The caller must have the lock of the instance's state directory, so that no server makes these groups meanwhile. A group
/// with a process or a sandbox is left: the kernel refuses to remove it.
pub fn remove_empty_groups(instance: &str) -> io::Result<()> {
    let mut removed = Ok(());
    for mount in mount_table::read_cgroup_mounts()? {
        for name in [&egress_group::group_name(instance), instance] {
            if mount.path.join(ROOT_GROUP_NAME).join(name).is_dir() {
                removed = removed.and(remove_instance_group(&mount.path, name));
            }
        }
    }
    removed
}

/// Removes the group of an instance below `root`, and the one that contains all instances, if they are empty.
fn remove_instance_group(root: &Path, instance: &str) -> io::Result<()> {
    let ours = root.join(ROOT_GROUP_NAME);
    for group in [ours.join(instance), ours] {
        match remove_group(&group) {
            // The group still contains another instance or a sandbox.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => other?,
        }
    }
    Ok(())
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
    fn file_pages_are_found_in_memory_stat() {
        let stat = "cache 1\nworkingset_refault_anon 1\nworkingset_refault_file 396564\n\
                    inactive_file 1761280\nactive_file 4096\n";
        assert_eq!(FilePages::parse(stat), Some(FilePages { refaults: 396_564, bytes: 1_765_376 }));
        assert_eq!(FilePages::parse("cache 1\n"), None);
    }

    #[test]
    fn key_matches_only_at_the_beginning_of_a_line() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(parse_counter(text, "oom_kill"), Some(3));
        assert_eq!(parse_counter(text, "oom"), None);
    }
}
