//! The launcher, the only privileged process: it makes, freezes, lists and removes sandboxes.
//!
//! It is single-threaded, because it clones, and has no network. [`Launcher`] implements its
//! operations and is also used by `coracle run` in its own process; `serve` is its request loop behind a
//! socket.

mod agent_descriptors;
pub(crate) mod attach;
mod connect;
pub(crate) mod create;
pub(crate) mod disk_task;
mod disk_task_queue;
pub(crate) mod end;
mod enforcement;
pub(crate) mod images;
mod mounts;
mod named_volumes;
pub(crate) mod netns_pool;
pub(crate) mod record;
pub(crate) mod resize;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod snapshot_record;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use domain::{Bytes, SandboxId};
use linux::descriptors;
use linux::seccomp::policy::PolicyError;
use linux::spawn::SingleThread;
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, socketpair};
use rustix::process::Rlimit;

use self::netns_pool::NetnsPool;
use self::record::LauncherRecords;
use self::snapshot::SnapshotStore;
use crate::cgroups::{CgroupHierarchies, PendingFreeze};
use crate::images::{AliasRule, HostImage, HostPrograms, ImageAliases, ImageError};
use crate::jail::filters::SeccompFilters;
use crate::jail::plan::LimitName;
use crate::network::uplink::Uplink;
use crate::packet;
use crate::protocol::{FoundSandbox, OpError, SandboxCondition, SandboxUsage, WatchedIds};
use crate::settings::{LauncherSettings, LifetimePolicy};
use crate::uid_ranges::{UidRangeError, UidRanges};
use crate::volumes::{self, PreparedVolume, VolumeError, VolumeStore};

/// Makes and removes sandboxes on this host.
pub struct Launcher {
    thread: SingleThread,
    /// The original limit on open files, for programs inside; the launcher raises its own.
    open_files: Rlimit,
    settings: LauncherSettings,
    rights: LauncherRights,
    records: LauncherRecords,
    filters: SeccompFilters,
    host: HostImage,
    aliases: ImageAliases,
    /// Image names that were replaced by an alias, so that each is logged once.
    logged_stand_ins: BTreeSet<String>,
    /// This program, to be executed as the agent. As root it is a copy that other users cannot read.
    agent: OwnedFd,
    /// The directory with the agents' sockets.
    run_dir: OwnedFd,
    /// Sandboxes of an earlier launcher, whose inner guards may have other settings. Replacing a guard
    /// takes the kernel a long time, so that is done when the launcher is idle.
    outdated_guards: Vec<SandboxId>,
}

/// The privileges of this process on the host.
enum LauncherRights {
    Root(Box<RootState>),
    /// An ordinary user: one id, disks in memory, and control groups only if some were delegated.
    User {
        uid: u32,
        gid: u32,
        groups: Result<Box<CgroupHierarchies>, String>,
    },
}

struct RootState {
    groups: CgroupHierarchies,
    volumes: VolumeStore,
    ranges: UidRanges,
    netns_pool: NetnsPool,
    prepared_disks: Vec<PreparedVolume>,
    snapshots: SnapshotStore,
}

/// The reason why the launcher could not start.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the process that makes sandboxes must have only one thread")]
    Threads(#[source] io::Error),
    #[error("could not raise the limit on open files")]
    OpenFiles(#[source] io::Error),
    #[error("this process may open {0} files, but making sandboxes needs {MIN_OPEN_FILES}")]
    FewFiles(u64),
    #[error("could not set up net namespaces")]
    Net(#[source] io::Error),
    #[error("could not use the control groups of this host")]
    Groups(#[source] io::Error),
    #[error("could not open the disks of sandboxes")]
    Volumes(#[from] VolumeError),
    #[error("could not open the uid ranges")]
    Ranges(#[from] UidRangeError),
    #[error("could not make the image `host`")]
    Images(#[from] ImageError),
    #[error("could not compile a system call filter")]
    Filters(#[from] PolicyError),
}

/// The smallest limit on open files. Below it a sandbox could fail half-way for lack of a descriptor,
/// without an explanation.
const MIN_OPEN_FILES: u64 = 128;

impl LauncherError {
    /// Returns advice for the operator.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::FewFiles(_) => Some("raise it: `ulimit -Hn 65536`, or LimitNOFILE=65536 in the unit"),
            Self::Volumes(error) => error.hint(),
            Self::Ranges(error) => error.hint(),
            Self::Images(error) => error.hint(),
            Self::Io { .. }
            | Self::Threads(_)
            | Self::OpenFiles(_)
            | Self::Net(_)
            | Self::Groups(_)
            | Self::Filters(_) => None,
        }
    }
}

/// The limit of prepared volumes; assigning one sets the real limit.
const PREPARED_DISK_SIZE: Bytes = Bytes::from_mib(1024);

impl Launcher {
    /// Opens the state directory and mounts the disks in this process's own mount namespace, which the
    /// caller has made private.
    pub fn open(settings: LauncherSettings) -> Result<Self, LauncherError> {
        let thread = SingleThread::prove().map_err(LauncherError::Threads)?;
        let open_files = descriptors::raise_open_file_limit().map_err(LauncherError::OpenFiles)?;
        if let Some(most) = open_files.maximum.filter(|most| *most < MIN_OPEN_FILES) {
            return Err(LauncherError::FewFiles(most));
        }
        let state = settings.state_dir.clone();
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| LauncherError::Io { action, path, source }
        };
        for (name, mode) in [("run", 0o711), ("bin", 0o700), ("boxes", 0o700), ("images", 0o700)] {
            let path = state.join(name);
            make_directory(&path, mode).map_err(failed("make", &path))?;
        }
        let records = LauncherRecords::open(&state, settings.identity()).map_err(failed("open", &state))?;
        let bin = state.join("bin");
        let agent = open_agent_program(&bin).map_err(failed("copy ourselves to", &bin))?;
        let run = open_directory(&state.join("run")).map_err(failed("open", &state.join("run")))?;
        let host = crate::images::create_host_skeleton(&state.join("host"))?;
        let aliases = build_aliases(&settings, alias_rule(&settings));
        let rights = if rustix::process::geteuid().is_root() {
            LauncherRights::Root(Box::new(RootState::open(&settings)?))
        } else {
            let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            LauncherRights::User { uid, gid, groups: open_delegated_groups(&settings) }
        };
        let filters = SeccompFilters::compile()?;
        let stood_in = BTreeSet::new();
        let mut launcher = Self {
            thread,
            open_files,
            settings,
            rights,
            records,
            filters,
            host,
            aliases,
            logged_stand_ins: stood_in,
            agent,
            run_dir: run,
            outdated_guards: Vec::new(),
        };
        let lives = |found: &FoundSandbox| found.condition != SandboxCondition::Dead;
        let in_use = || launcher.list_sandboxes().map(|found| found.iter().any(lives));
        crate::images::remove_old_skeletons(&state.join("host"), &launcher.host, in_use)?;
        if launcher.settings.lifetime == LifetimePolicy::Own {
            // A process that was killed while it changed images may have left files.
            crate::images::collect_images_if_unlocked(&launcher.settings.image_state, None)?;
        }
        launcher.open_network().map_err(LauncherError::Net)?;
        Ok(launcher)
    }

    /// Applies those settings that can change while sandboxes run: image aliases, the size of the image
    /// store, and the maximum limits of one sandbox. All others need a restart.
    pub fn reload_settings(&mut self, settings: LauncherSettings) {
        let LauncherSettings { aliases: table, strict_images, image_bytes, maxima, .. } = settings;
        self.settings.aliases = table;
        self.settings.strict_images = strict_images;
        self.settings.image_bytes = image_bytes;
        self.settings.maxima = maxima;
        self.aliases = build_aliases(&self.settings, alias_rule(&self.settings));
    }

    /// Prepares one more net namespace or volume if there are too few; `true` if more are missing.
    /// Called when there is nothing else to do.
    pub fn refill_prepared(&mut self) -> io::Result<bool> {
        if let Some(id) = self.outdated_guards.pop() {
            self.reinstall_guard(&id);
            return Ok(true);
        }
        match &mut self.rights {
            LauncherRights::Root(root) => root.refill_prepared(self.settings.prepared),
            LauncherRights::User { .. } => Ok(false),
        }
    }

    /// Whether fewer than half of the net namespaces or volumes that should be prepared are available.
    pub fn prepared_are_low(&self) -> bool {
        match &self.rights {
            LauncherRights::Root(root) => {
                root.netns_pool.ready_count().min(root.prepared_disks.len()) < self.settings.prepared / 2
            }
            LauncherRights::User { .. } => false,
        }
    }

    /// Returns all sandboxes that have a record or a disk in the state directory. Control groups are not
    /// searched: a record is written before a group is made and removed after it, and a group
    /// without a record may belong to another server.
    pub fn list_sandboxes(&self) -> io::Result<Vec<FoundSandbox>> {
        let mut ids = self.records.list()?;
        if let LauncherRights::Root(root) = &self.rights {
            ids.extend(root.volumes.list_ids().map_err(io::Error::other)?);
        }
        ids.sort_unstable();
        ids.dedup();
        let found = |id: SandboxId| FoundSandbox {
            condition: self.sandbox_condition(&id),
            files: self.has_disk(&id),
            id,
        };
        Ok(ids.into_iter().map(found).collect())
    }

    /// Returns all sandboxes, and a socket that holds the descriptors of the running ones. One message takes
    /// only a few descriptors, but any number of messages can wait in a socket.
    pub fn list_with_pidfds(&self) -> io::Result<(Vec<FoundSandbox>, OwnedFd)> {
        let mut found = self.list_sandboxes()?;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        for part in found.chunks_mut(packet::MAX_DESCRIPTORS) {
            let (mut ids, mut pidfds) = (Vec::new(), Vec::new());
            for sandbox in part {
                if !matches!(sandbox.condition, SandboxCondition::Alive | SandboxCondition::Frozen) {
                    continue;
                }
                match self.pidfd(&sandbox.id) {
                    Some(pidfd) => {
                        ids.push(sandbox.id.clone());
                        pidfds.push(pidfd);
                    }
                    // It ended while it was listed.
                    None => sandbox.condition = SandboxCondition::Dead,
                }
            }
            let borrowed: Vec<_> = pidfds.iter().map(AsFd::as_fd).collect();
            packet::send_with_descriptors(ours.as_fd(), &WatchedIds { ids }, &borrowed)?;
        }
        Ok((found, theirs))
    }

    fn sandbox_condition(&self, id: &SandboxId) -> SandboxCondition {
        let record = match self.records.read(id) {
            Some(record) if record.stopped => return SandboxCondition::Dead,
            Some(record) if record.process.is_some() => record,
            Some(_) | None => return SandboxCondition::Half,
        };
        match (record.pidfd(), self.groups()) {
            (None, _) => SandboxCondition::Dead,
            (Some(_), Some(groups)) if groups.is_frozen(id) && self.is_paused(id) => SandboxCondition::Frozen,
            (Some(_), _) if self.agent_listens(id) => SandboxCondition::Alive,
            // The process was cloned, but it is unknown whether it became an agent.
            (Some(_), _) => SandboxCondition::Half,
        }
    }

    /// Whether a client paused the sandbox. One that is frozen only for a snapshot is thawed
    /// automatically.
    fn is_paused(&self, id: &SandboxId) -> bool {
        match &self.rights {
            LauncherRights::Root(root) => root.snapshots.paused_before(id).unwrap_or(true),
            LauncherRights::User { .. } => true,
        }
    }

    /// Whether the agent of `id` listens. Only a connect shows that: the launcher binds the socket long
    /// before the agent listens on it. An agent that does not accept must not block the launcher, so this
    /// does not wait for space in its queue: a full queue also means that it listens.
    fn agent_listens(&self, id: &SandboxId) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let path = format!("/proc/self/fd/{}/{id}", self.run_dir.as_raw_fd());
        let connected = SocketAddrUnix::new(path).and_then(|address| {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&socket, &address)
        });
        matches!(connected, Ok(()) | Err(rustix::io::Errno::AGAIN))
    }

    /// Returns a descriptor that becomes readable when the sandbox ends.
    pub fn pidfd(&self, id: &SandboxId) -> Option<OwnedFd> {
        self.records.read(id)?.pidfd()
    }

    /// Begins to freeze or thaw all commands of a sandbox.
    pub fn set_frozen(&self, id: &SandboxId, frozen: bool) -> Result<PendingFreeze, OpError> {
        let groups = self.groups().ok_or_else(|| self.pause_unsupported_error())?;
        groups.set_frozen(id, frozen).map_err(|error| match error.kind() {
            // Groups of an earlier start are still searched, but new sandboxes have none.
            io::ErrorKind::NotFound if !self.can_freeze() => self.pause_unsupported_error(),
            _ => serve::step_error("freeze", &error),
        })
    }

    pub fn was_out_of_memory(&self, id: &SandboxId) -> bool {
        self.groups().is_some_and(|groups| groups.agent_was_killed_for_memory(id))
    }

    pub fn usage(&self, id: &SandboxId) -> Option<SandboxUsage> {
        let limits = self.records.read(id)?.limits;
        let used = self.groups().map(|groups| groups.usage(id)).unwrap_or_default();
        let disk = match &self.rights {
            LauncherRights::Root(root) => root.volumes.usage(id).ok(),
            LauncherRights::User { .. } => None,
        };
        Some(SandboxUsage {
            memory: used.memory,
            memory_limit: self.enforces(LimitName::Memory).then_some(limits.memory),
            cpu_micros: used.cpu_micros,
            cpu_limit: self.enforces(LimitName::Cpus).then_some(limits.cpus),
            pids: used.pids,
            pids_limit: self.enforces(LimitName::Pids).then_some(limits.pids),
            disk: disk.map(|disk| disk.used.0),
            disk_limit: disk.map(|disk| disk.limit.0),
            oom_kills: used.oom_kills,
        })
    }

    /// Returns the processor time that a sandbox has used.
    pub fn cpu_micros(&self, id: &SandboxId) -> Option<u64> {
        self.groups()?.cpu_micros(id)
    }

    /// Whether this host enforces a limit for every sandbox.
    pub fn enforces(&self, limit: LimitName) -> bool {
        limit == LimitName::Disk
            || self.groups_for_new().is_some_and(|groups| groups.enforces(limit))
            || (limit == LimitName::Pids && self.bounds_processes_by_rlimit())
    }

    /// Whether RLIMIT_NPROC limits the processes of a sandbox. The kernel counts them for each uid of a
    /// user namespace. An ordinary user's sandbox has one uid and its own namespace, so the count is that
    /// of the sandbox; root's sandboxes have many uids.
    pub(super) fn bounds_processes_by_rlimit(&self) -> bool {
        matches!(self.rights, LauncherRights::User { .. })
            && !self.groups_for_new().is_some_and(|groups| groups.enforces(LimitName::Pids))
    }

    /// Whether commands can be frozen and thawed.
    pub fn can_freeze(&self) -> bool {
        self.groups_for_new().is_some()
    }

    /// Returns the control groups that may contain sandboxes.
    fn groups(&self) -> Option<&CgroupHierarchies> {
        match &self.rights {
            LauncherRights::Root(root) => Some(&root.groups),
            LauncherRights::User { groups, .. } => groups.as_deref().ok(),
        }
    }

    /// Returns the control groups in which a new sandbox can get its own.
    fn groups_for_new(&self) -> Option<&CgroupHierarchies> {
        self.groups().filter(|groups| groups.can_make())
    }

    /// Returns why an ordinary user's control groups do not enforce all limits.
    pub fn unenforced_reason(&self) -> Option<&str> {
        match &self.rights {
            LauncherRights::Root(_) => None,
            LauncherRights::User { groups: Ok(groups), .. } => groups.unenforced_reason(),
            LauncherRights::User { groups: Err(reason), .. } => Some(reason),
        }
    }

    /// Returns the path of the socket of the agent of `id`, for a caller in this process.
    pub fn agent_socket_path(&self, id: &SandboxId) -> PathBuf {
        self.settings.state_dir.join("run").join(id.as_str())
    }

    pub fn settings(&self) -> &LauncherSettings {
        &self.settings
    }
}

impl RootState {
    fn open(settings: &LauncherSettings) -> Result<Self, LauncherError> {
        let mut groups =
            CgroupHierarchies::find_for_root(&settings.instance).map_err(LauncherError::Groups)?;
        let kept = volumes::VolumeStoreSettings {
            kind: settings.disks,
            pool: settings.pool_bytes.map(Bytes),
            floor: Bytes(settings.free_space_floor),
            ..volumes::VolumeStoreSettings::default()
        };
        let turn = crate::backup::wait_for_backup(&settings.state_dir).map_err(|source| {
            LauncherError::Io { action: "lock", path: settings.state_dir.clone(), source }
        })?;
        let mut volumes = VolumeStore::open(&settings.state_dir.join("disk"), kept)?;
        drop(turn);
        let snapshots = SnapshotStore::open(settings, &groups, &mut volumes)?;
        let ranges =
            UidRanges::open(&settings.state_dir.join("ranges"), &settings.instance, settings.uid_base)?;
        let uplink = Uplink::new(settings.network.clone(), &settings.instance);
        let nets = NetnsPool::open(settings.prepared, uplink).map_err(LauncherError::Net)?;
        // Last, because the groups would not be removed if something else failed.
        groups.open().map_err(LauncherError::Groups)?;
        Ok(Self { groups, volumes, ranges, netns_pool: nets, prepared_disks: Vec::new(), snapshots })
    }

    fn refill_prepared(&mut self, wanted: usize) -> io::Result<bool> {
        if self.netns_pool.uplink.drop_stale_connections()? || self.netns_pool.refill()? {
            return Ok(true);
        }
        if self.prepared_disks.len() < wanted {
            let disk = self.volumes.prepare(PREPARED_DISK_SIZE).map_err(io::Error::other)?;
            self.prepared_disks.push(disk);
        }
        Ok(self.prepared_disks.len() < wanted)
    }
}

/// Opens the control groups that were delegated to an ordinary user, or returns why there are none.
fn open_delegated_groups(settings: &LauncherSettings) -> Result<Box<CgroupHierarchies>, String> {
    let open = || {
        let mut groups = CgroupHierarchies::find_delegated(&settings.instance, &settings.state_dir)?;
        groups.save_group_roots(&settings.state_dir)?;
        groups.open()?;
        Ok(Box::new(groups))
    };
    open().map_err(|error: io::Error| error.to_string())
}

fn alias_rule(settings: &LauncherSettings) -> AliasRule {
    if settings.strict_images { AliasRule::Refuse } else { AliasRule::OperatorThenHost }
}

/// Returns the operator's aliases and the rule for other names.
fn build_aliases(settings: &LauncherSettings, rule: AliasRule) -> ImageAliases {
    let table = settings.aliases.iter().map(|(name, target)| (name.clone(), target.clone()));
    ImageAliases { table: table.collect(), rule, host: HostPrograms::of_this_host() }
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(Into::into)
}

/// Opens this program in the form in which sandboxes execute it.
///
/// As root it is a copy that belongs to root and has mode 0111. Processes inside cannot read it, and
/// the kernel makes a process untraceable if it executes a program that it cannot read. An ordinary
/// user's sandboxes execute the program itself.
fn open_agent_program(bin: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let own = Path::new("/proc/self/exe");
    if !rustix::process::geteuid().is_root() {
        return rustix::fs::open(own, flags, Mode::empty()).map_err(Into::into);
    }
    let facts = fs::metadata(own)?;
    let name = format!("agent-{:x}-{:x}-{:x}", facts.ino(), facts.size(), facts.mtime_nsec() ^ facts.mtime());
    let copy = bin.join(name);
    if !copy.exists() {
        for old in fs::read_dir(bin)? {
            // Sandboxes that run an old copy keep the file, although its name is removed.
            fs::remove_file(old?.path())?;
        }
        let fresh = bin.join(format!("new-{}", std::process::id()));
        fs::copy(own, &fresh)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o111))?;
        fs::rename(&fresh, &copy)?;
    }
    rustix::fs::open(&copy, flags, Mode::empty()).map_err(Into::into)
}

impl Launcher {
    /// Borrows the descriptor of the agents' socket directory.
    pub(crate) fn run_directory(&self) -> std::os::fd::BorrowedFd<'_> {
        self.run_dir.as_fd()
    }
}
