//! The launcher, the only privileged process: it makes, freezes, lists and removes sandboxes.
//!
//! It is single-threaded, because it clones, and has no network. [`Launcher`] implements its
//! operations and is also used by `coracle run` in its own process; `serve` is its request loop behind a
//! socket.

mod agent_descriptors;
pub(crate) mod agent_program;
mod agent_sockets;
pub(crate) mod attach;
pub(crate) mod connect;
pub(crate) mod create;
pub(crate) mod disk_task;
mod disk_task_queue;
mod egress_keeper;
pub(crate) mod end;
mod ended_sandboxes;
mod enforcement;
pub(crate) mod filtered;
pub(crate) mod host_report;
pub(crate) mod images;
mod mounts;
mod named_volumes;
pub(crate) mod netns_pool;
mod open_files;
pub(crate) mod puller;
pub(crate) mod record;
pub(crate) mod resize;
mod rights;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod snapshot_record;

use std::cell::OnceCell;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use domain::SandboxId;
use linux::seccomp::policy::PolicyError;
use linux::spawn::SingleThread;
use rustix::fs::{Mode, OFlags};
use rustix::process::Rlimit;

use self::agent_program::program_copies::SandboxPrograms;
use self::agent_program::{AgentProgram, MIN_OPEN_FILES};
use self::agent_sockets::AgentSockets;
use self::egress_keeper::EgressKeeper;
use self::enforcement::PlanRules;
use self::images::LauncherImages;
use self::mounts::MountOpener;
use self::record::LauncherRecords;
use self::rights::{LauncherRights, RootState};
use crate::cgroups::PendingFreeze;
use crate::images::ImageError;
use crate::jail::plan::LimitName;
use crate::pidfd_queue::PidfdQueue;
use crate::protocol::{FoundSandbox, OpError, SandboxCondition, SandboxUsage};
use crate::settings::{LauncherSettings, LifetimePolicy};
use crate::uid_ranges::UidRangeError;
use crate::volumes::VolumeError;
use linux::packet;

/// Makes and removes sandboxes on this host.
pub struct Launcher {
    thread: SingleThread,
    settings: LauncherSettings,
    rights: LauncherRights,
    records: LauncherRecords,
    images: LauncherImages,
    agent: AgentProgram,
    sockets: AgentSockets,
    /// The process that keeps the sockets of sandboxes whose connections egress carries, once it is connected.
    keeper: Option<EgressKeeper>,
    /// Whether the kernel can divert connections, or why not; tried when it is asked for.
    diversion: OnceCell<Result<(), String>>,
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
    #[error("could not limit all sandboxes together")]
    TotalLimits(#[source] io::Error),
    #[error("could not open the disks of sandboxes")]
    Volumes(#[from] VolumeError),
    #[error("could not open the uid ranges")]
    Ranges(#[from] UidRangeError),
    #[error("could not make the image `host`")]
    Images(#[from] ImageError),
    #[error("could not compile a system call filter")]
    Filters(#[from] PolicyError),
}

impl LauncherError {
    /// Returns advice for the operator.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::FewFiles(_) => Some("raise it: `ulimit -Hn 65536`, or LimitNOFILE=65536 in the unit"),
            Self::TotalLimits(_) => Some(
                "start the server as root or in a delegated control group, or leave `limits.total_memory`, \
                 `limits.total_cpus` and `limits.total_pids` out; `coracle doctor` shows what is enforced here",
            ),
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

impl Launcher {
    /// Opens the state directory and mounts the disks in this process's own mount namespace, which the
    /// caller has made private.
    pub fn open(settings: LauncherSettings, programs: SandboxPrograms) -> Result<Self, LauncherError> {
        let thread = SingleThread::prove().map_err(LauncherError::Threads)?;
        let own = agent_program::raise_open_file_limit()?;
        let open_files = Rlimit { current: settings.open_files.or(own.current), ..own };
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
        let agent = AgentProgram::open(&state.join("bin"), programs, open_files)?;
        let run = state.join("run");
        let sockets = AgentSockets::open(&run, settings.server_uid).map_err(failed("open", &run))?;
        let images = LauncherImages::open(&settings)?;
        let rights = LauncherRights::open(&settings)?;
        let (keeper, diversion) = (None, OnceCell::new());
        let mut launcher =
            Self { thread, settings, rights, records, images, agent, sockets, keeper, diversion };
        let lives = |found: &FoundSandbox| found.condition != SandboxCondition::Dead;
        let in_use = || launcher.list_sandboxes().map(|found| found.iter().any(lives));
        crate::images::remove_old_skeletons(&state.join("host"), &launcher.images.host, in_use)?;
        crate::images::remove_old_layers(&state.join("hidden"), in_use)?;
        if launcher.settings.lifetime == LifetimePolicy::Own {
            // A process that was killed while it changed images may have left files.
            crate::images::collect_images_if_unlocked(&launcher.settings.image_state, None)?;
        }
        launcher.open_network().map_err(LauncherError::Net)?;
        Ok(launcher)
    }

    /// Applies those settings that can change while sandboxes run: the size of the image store, the
    /// maximum limits of one sandbox, and the proxy of egress. All others need a restart.
    pub fn reload_settings(&mut self, settings: LauncherSettings) {
        let LauncherSettings { image_bytes, maxima, network, .. } = settings;
        if self.settings.network.upstream_proxy != network.upstream_proxy {
            self.settings.network.upstream_proxy = network.upstream_proxy;
            self.guard_egress();
        }
        self.settings.image_bytes = image_bytes;
        self.settings.maxima = maxima;
        self.images.apply_settings(&self.settings);
    }

    /// Prepares one more net namespace, volume or copy of a snapshot if there are too few; `true` if more are missing.
    /// Called when there is nothing else to do.
    pub fn refill_prepared(&mut self) -> io::Result<bool> {
        if let Some(id) = self.rights.next_outdated_guard() {
            self.reinstall_guard(&id);
            return Ok(true);
        }
        let wanted = self.settings.prepared;
        if wanted > 0 && self.rights.start_spare_copy(&self.thread)? {
            return Ok(true);
        }
        self.rights.refill_prepared(wanted)
    }

    /// Whether fewer than half of the net namespaces or volumes that should be prepared are available, or a copy of
    /// the snapshot that was restored last is missing.
    pub fn prepared_are_low(&self) -> bool {
        self.rights.prepared_are_low(self.settings.prepared)
    }

    /// Returns all sandboxes that have a record or a disk in the state directory. Control groups are not
    /// searched: a record is written before a group is made and removed after it, and a group
    /// without a record may belong to another server.
    pub fn list_sandboxes(&self) -> io::Result<Vec<FoundSandbox>> {
        let mut ids = self.records.list()?;
        if let LauncherRights::Root(root) = &self.rights {
            let disks = root.volumes.list_ids().map_err(io::Error::other)?;
            ids.extend(disks.into_iter().filter(|id| !self.records.is_ended(id)));
        }
        ids.sort_unstable();
        ids.dedup();
        let found = |id: SandboxId| FoundSandbox {
            condition: self.sandbox_condition(&id),
            files: self.rights.has_disk(&id),
            id,
        };
        Ok(ids.into_iter().map(found).collect())
    }

    /// Returns all sandboxes with the descriptors of the running ones.
    pub(crate) fn list_with_pidfds(&self) -> io::Result<(Vec<FoundSandbox>, PidfdQueue)> {
        let mut found = self.list_sandboxes()?;
        let mut queue = PidfdQueue::new()?;
        for part in found.chunks_mut(packet::MAX_DESCRIPTORS) {
            let (mut ids, mut pidfds) = (Vec::new(), Vec::new());
            for sandbox in part {
                if !matches!(sandbox.condition, SandboxCondition::Alive | SandboxCondition::Frozen) {
                    continue;
                }
                match self.records.pidfd(&sandbox.id) {
                    Some(pidfd) => {
                        ids.push(sandbox.id.clone());
                        pidfds.push(pidfd);
                    }
                    // It ended while it was listed.
                    None => sandbox.condition = SandboxCondition::Dead,
                }
            }
            queue.push(ids, &pidfds)?;
        }
        Ok((found, queue))
    }

    fn sandbox_condition(&self, id: &SandboxId) -> SandboxCondition {
        let record = match self.records.read(id) {
            Some(record) if record.stopped => return SandboxCondition::Dead,
            Some(record) if record.process.is_some() => record,
            Some(_) | None => return SandboxCondition::Half,
        };
        match (record.pidfd(), self.rights.groups()) {
            (None, _) => SandboxCondition::Dead,
            (Some(_), Some(groups)) if groups.is_frozen(id) && self.rights.is_paused(id) => {
                SandboxCondition::Frozen
            }
            (Some(_), _) if self.sockets.is_listening(id) => SandboxCondition::Alive,
            // The process was cloned, but it is unknown whether it became an agent.
            (Some(_), _) => SandboxCondition::Half,
        }
    }

    /// Begins to freeze or thaw all commands of a sandbox.
    pub fn set_frozen(&self, id: &SandboxId, frozen: bool) -> Result<PendingFreeze, OpError> {
        let groups = self.rights.groups().ok_or_else(|| self.plan_rules().pause_unsupported_error())?;
        groups.set_frozen(id, frozen).map_err(|error| match error.kind() {
            // Groups of an earlier start are still searched, but new sandboxes have none.
            io::ErrorKind::NotFound if !self.rights.can_freeze() => {
                self.plan_rules().pause_unsupported_error()
            }
            _ => serve::step_error("freeze", &error),
        })
    }

    pub fn usage(&self, id: &SandboxId) -> Option<SandboxUsage> {
        let limits = self.records.read(id)?.limits;
        let used = self.rights.groups().map(|groups| groups.usage(id)).unwrap_or_default();
        let disk = self.rights.disk_usage(id);
        let near_limit = used.memory.is_some_and(|memory| memory >= limits.memory / 10 * 9);
        let files = self.rights.groups().filter(|_| near_limit).and_then(|groups| groups.file_pages(id));
        Some(SandboxUsage {
            memory: used.memory,
            memory_limit: self.rights.enforces(LimitName::Memory).then_some(limits.memory),
            refaults: files.map(|files| files.refaults),
            file_memory: files.map(|files| files.bytes),
            cpu_micros: used.cpu_micros,
            cpu_limit: self.rights.enforces(LimitName::Cpus).then_some(limits.cpus),
            pids: used.pids,
            pids_limit: self.rights.enforces(LimitName::Pids).then_some(limits.pids),
            disk: disk.map(|disk| disk.used.0),
            disk_limit: disk.map(|disk| disk.limit.0),
            oom_kills: used.oom_kills,
        })
    }

    /// Returns why an ordinary user's control groups do not enforce all limits.
    pub fn unenforced_reason(&self) -> Option<&str> {
        self.rights.unenforced_reason()
    }

    /// Returns the path of the socket of the agent of `id`, for a caller in this process.
    pub fn agent_socket_path(&self, id: &SandboxId) -> PathBuf {
        self.sockets.path_of(id)
    }

    pub fn settings(&self) -> &LauncherSettings {
        &self.settings
    }

    /// Borrows the descriptor of the agents' socket directory.
    pub(crate) fn run_directory(&self) -> BorrowedFd<'_> {
        self.sockets.directory()
    }

    /// Returns the rules that the limits and protections of a plan must meet.
    fn plan_rules(&self) -> PlanRules<'_> {
        let LauncherSettings { lifetime, maxima, totals, .. } = self.settings;
        PlanRules { rights: &self.rights, lifetime, maxima, totals }
    }

    fn mount_opener(&self) -> MountOpener<'_> {
        MountOpener { thread: &self.thread, rights: &self.rights, rule: &self.settings.mounts }
    }
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(Into::into)
}
