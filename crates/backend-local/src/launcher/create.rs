//! Making a sandbox: prepare its resources, start it, and wait for its report.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use domain::{Bytes, MAX_PIDS, MIN_DISK, MIN_MEMORY};
use linux::namespaces::Setgroups;
use rustix::fs::{AtFlags, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use wire::AgentConfig;
use wire::config::Nesting;

use super::end::Keep;
use super::inherited::{Inherited, memfd};
use super::mounts::Gathered;
use super::protocol::{Answer, Holds, Refusal, RefusalKind};
use super::record::MadeOf;
use super::{Launcher, PREPARED_DISK, Rights, Root};
use crate::cgroups::{Groups, has_legacy_controllers};
use crate::images::{self, ImageError, Resolved};
use crate::jail::build::{self, Begun, NetworkPart, Ownership, Parts};
use crate::jail::enter::{
    AGENT_CAPABILITIES, COMMAND_CAPABILITIES, Entry, EntryTree, EntryVolume, make_uppers,
};
use crate::jail::filters::Pair;
use crate::jail::limit_view::EntryView;
use crate::jail::plan::{DiskPlan, GuestPlan, JailPlan, LimitName, Limits};
use crate::jail::sources::Opened;
use crate::jail::step::{At, Failure, JailError, Step};
use crate::network::Reach;
use crate::settings::{Lifetime, Maxima};
use crate::volumes::{Kind, Volume, VolumeError, tree_name};

/// Advice for an ordinary user who needs control groups with controllers.
const DELEGATED: &str =
    "start it in a control group of its own, `systemd-run --user --scope -p Delegate=yes coracle";

/// A sandbox that is starting. When `status` is readable, [`Launcher::conclude`] returns the outcome.
#[derive(Debug)]
pub struct Pending {
    pub id: String,
    pub status: OwnedFd,
    /// The parts that are kept if it does not start.
    pub keep: Keep,
    begun: Begun,
    holds: Holds,
}

/// A sandbox whose agent listens.
#[derive(Debug)]
pub struct Created {
    pub pidfd: OwnedFd,
    pub holds: Holds,
}

/// The reason why a sandbox could not be started.
#[derive(Debug)]
pub enum NotBegun {
    /// Refused before anything was made.
    Refused(Refusal),
    /// Failed after something was made. The caller must end it like any other sandbox, and keep the
    /// parts named here.
    Failed(Refusal, Keep),
}

/// The image and limits that a sandbox is made with.
struct Foundation {
    image: Resolved,
    /// The number of bytes that came from a snapshot.
    restored: u64,
    limits: Limits,
}

impl<T: Into<Refusal>> From<T> for NotBegun {
    fn from(error: T) -> Self {
        Self::Refused(error.into())
    }
}

impl Launcher {
    /// Starts making a sandbox.
    pub fn begin(&mut self, plan: &JailPlan) -> Result<Pending, NotBegun> {
        let Foundation { image, restored, limits } = self.foundation(plan)?;
        let plan = &JailPlan { limits, ..plan.clone() };
        let keep = if plan.disk == DiskPlan::Kept { Keep::Disk } else { Keep::Nothing };
        self.log_stand_in(&image);
        let (reach, network) = self.reach(plan.network)?;
        let by_image = self.ids_by_image(plan, &image);
        let mut holds = self.judge(plan, &image, by_image, network)?;
        self.tell_of_snapshot(plan, restored, &mut holds);
        let mut gathered = self.gather_mounts(&plan.mounts)?;
        holds.measures.append(&mut gathered.measures);
        let made_of = MadeOf::of(&image, restored);
        let begun = match plan.disk {
            DiskPlan::New => self.records.begin(&plan.id, plan.limits, made_of),
            DiskPlan::Kept => self.records.begin_again(&plan.id, plan.limits, made_of),
        };
        let mut record = begun.at(Step::Record)?;
        if !image.is_whole() {
            // The image was just removed. From here on the record prevents its removal.
            return Err(NotBegun::Failed(refuse_image(ImageError::Unknown(plan.image.clone())), keep));
        }
        self.note_use(&image);
        record.user = default_ids(plan, by_image);
        record.without_set_id = self.refuses_set_id(plan);
        record.connected = reach != Reach::Nothing;
        let begun = self.prepare(plan, &image, record.user, reach, gathered).and_then(|(parts, status)| {
            let records = self.records.clone();
            let begun =
                build::begin(&self.thread, parts, |pid| records.add_process(&plan.id, &mut record, pid))?;
            if let (Reach::Userspace, Some(process)) = (reach, &record.process) {
                self.carry(process)?;
            }
            Ok((begun, status))
        });
        match begun {
            Ok((begun, status)) => Ok(Pending { id: plan.id.clone(), status, keep, begun, holds }),
            Err(error) => Err(NotBegun::Failed(error.into(), keep)),
        }
    }

    /// Returns the image and limits of a sandbox. A restarted sandbox keeps those that it had, even if
    /// the image's name or the server's defaults have changed.
    fn foundation(&self, plan: &JailPlan) -> Result<Foundation, Refusal> {
        let limits = plan.limits;
        match (&plan.snapshot, plan.disk) {
            (Some(snapshot), DiskPlan::New) => {
                let (image, restored) = self.image_below(snapshot)?;
                Ok(Foundation { image, restored, limits })
            }
            (None, DiskPlan::New) => {
                Ok(Foundation { image: self.resolve(&plan.image)?, restored: 0, limits })
            }
            (_, DiskPlan::Kept) => {
                if !self.has_disk(&plan.id) {
                    return Err(Refusal::gone());
                }
                let record = self.records.read(&plan.id);
                if record.as_ref().is_some_and(|record| record.pidfd().is_some()) {
                    return Err(Refusal::unsupported("sandbox is still running", None));
                }
                let limits = record.as_ref().map_or(limits, |record| record.limits);
                match record.and_then(|record| record.made_of) {
                    Some(made_of) => {
                        let restored = made_of.restored;
                        Ok(Foundation { image: self.image_again(made_of)?, restored, limits })
                    }
                    None => Ok(Foundation { image: self.resolve(&plan.image)?, restored: 0, limits }),
                }
            }
        }
    }

    /// Returns the outcome for a sandbox whose status is readable. The caller must end a failed one.
    pub fn conclude(&mut self, pending: Pending) -> Result<Created, Refusal> {
        let mut message = Vec::new();
        // One read is enough: a report is short enough that a pipe takes it whole. This never waits for
        // more.
        let mut report = [0; 4096];
        let read = rustix::io::read(&pending.status, &mut report).map_err(io::Error::from);
        message.extend_from_slice(&report[..*read.as_ref().unwrap_or(&0)]);
        let failure = match (read, message.as_slice()) {
            (Ok(_), [first, ..]) if *first != b'{' => {
                return Ok(Created { pidfd: pending.begun.pidfd, holds: pending.holds });
            }
            (Ok(_), []) => {
                JailError::new(Step::AgentReady, io::Error::other("the agent died before it was ready"))
            }
            (Ok(_), json) => match serde_json::from_slice::<Failure>(json) {
                Ok(failure) => failure.into(),
                Err(error) => JailError::new(Step::AgentReady, io::Error::other(error)),
            },
            (Err(error), _) => JailError::new(Step::AgentReady, error),
        };
        Err(failure.into())
    }

    /// Returns the image that a sandbox would get for this name.
    pub fn resolve_name(&self, name: &str) -> Result<Answer, Refusal> {
        let image = self.resolve(name)?;
        Ok(Answer::Resolved {
            image: image.name,
            stand_in: image.stand_in.map(|stand_in| stand_in.to_string()),
        })
    }

    pub(super) fn resolve(&self, name: &str) -> Result<Resolved, Refusal> {
        images::resolve(&self.settings.image_state, &self.host, name, &self.aliases).map_err(refuse_image)
    }

    /// Records the use of an image: the least recently used one is removed first when space is needed.
    fn note_use(&self, image: &Resolved) {
        let Some(record) = &image.record else { return };
        if let Err(error) = images::touch(&self.settings.image_state, record) {
            tracing::debug!(%error, "failed to record the use of an image");
        }
    }

    /// Logs, once for each name, that a client did not get the image it asked for.
    fn log_stand_in(&mut self, image: &Resolved) {
        /// Clients choose the names, so their number is limited.
        const MAX_NAMES: usize = 256;
        let Some(stand_in) = &image.stand_in else { return };
        if self.stood_in.len() < MAX_NAMES && self.stood_in.insert(stand_in.asked.clone()) {
            tracing::warn!("{stand_in}; this is logged once for each name");
        }
    }

    /// Returns the measures that will be in force, or refuses the plan if one cannot be enforced.
    fn judge(
        &self,
        plan: &JailPlan,
        image: &Resolved,
        by_image: Option<(u32, u32)>,
        network: String,
    ) -> Result<Holds, Refusal> {
        let stand_in = image.stand_in.as_ref().map(ToString::to_string);
        let mut holds = Holds { image: image.name.clone(), stand_in, ..Holds::default() };
        if plan.keep && self.settings.lifetime == Lifetime::Own {
            return Err(Refusal::unsupported(
                "only a sandbox that ends with the process that made it is kept",
                None,
            ));
        }
        self.check_amounts(&plan.limits, &plan.named)?;
        match self.image_user(plan, image) {
            ImageUser::Ignored => holds
                .weaker
                .push("the image's user is ignored: this sandbox has no user except root".to_owned()),
            ImageUser::Taken(_) if by_image.is_none() => holds.weaker.push(
                "directories of the host belong to root inside: the image does not define its user's ids"
                    .to_owned(),
            ),
            ImageUser::Taken(_) | ImageUser::None => {}
        }
        for limit in LimitName::ALL {
            if self.enforces(limit) && !(plan.keep && limit == LimitName::Disk) {
                holds.measures.push((limit.word().to_owned(), self.describe(limit, &plan.limits)));
            } else if plan.named.contains(&limit) || plan.require_limits {
                return Err(self.cannot_hold(limit, &plan.named));
            } else {
                holds.weaker.push(self.missing(limit, plan));
            }
        }
        let root = matches!(self.rights, Rights::Root(_));
        let users = if root { "own range of host ids" } else { "one id, the caller's" };
        if plan.nesting && self.can_freeze() {
            holds.measures.push(("nests".to_owned(), "by one process with rights over them".to_owned()));
        }
        let kill = if self.can_freeze() { "cgroup.kill" } else { "a subreaping runner" };
        for (name, value) in [
            ("users", users),
            ("kill", kill),
            ("network", network.as_str()),
            ("filter", "seccomp"),
            ("mount tree", "Landlock"),
            ("nested user namespaces", "off"),
        ] {
            holds.measures.push((name.to_owned(), value.to_owned()));
        }
        Ok(holds)
    }

    /// Makes the refusal for a limit that cannot be enforced, with advice.
    pub(super) fn cannot_hold(&self, limit: LimitName, named: &[LimitName]) -> Refusal {
        let mut message = format!("this host cannot enforce the limit on {}", limit.word());
        let mut hint = "`coracle doctor` shows what is missing for it".to_owned();
        let served = self.settings.lifetime == Lifetime::Own;
        if let Some(reason) = self.shortfall() {
            message = format!("{message}: {reason}");
            hint = format!("{}; {hint}", self.delegation_hint());
        }
        if !named.contains(&limit) {
            let without = if served {
                "set `require_limits = false` in the configuration"
            } else {
                "leave `--require-limits` out"
            };
            hint = format!("{hint}; to do without default limits, {without}");
        }
        Refusal::unsupported(message, Some(&hint))
    }

    /// The refusal to pause or resume: both require a control group for each sandbox.
    pub(super) fn cannot_pause(&self) -> Refusal {
        let reason = self.shortfall().unwrap_or("the sandbox has no control group");
        let hint = format!("{}; `coracle doctor` shows what is missing for it", self.delegation_hint());
        Refusal::unsupported(format!("this host cannot pause sandboxes: {reason}"), Some(&hint))
    }

    /// A hint that tells an ordinary user how to get control groups on this host.
    fn delegation_hint(&self) -> String {
        let command = if self.settings.lifetime == Lifetime::Own { "serve" } else { "run" };
        if has_legacy_controllers() {
            "run it as root, since controllers of cgroup v1 cannot be delegated".to_owned()
        } else {
            format!("{DELEGATED} {command} ...`, or run it as root")
        }
    }

    /// Returns RLIMIT_NPROC for commands, if no control group limits their number.
    fn process_rlimit(&self, plan: &JailPlan) -> Option<u64> {
        let by_group = self.enforces(LimitName::Pids) && !self.bounds_processes_by_rlimit();
        (!by_group).then_some(u64::from(plan.limits.pids))
    }

    fn missing(&self, limit: LimitName, plan: &JailPlan) -> String {
        match limit {
            LimitName::Disk if plan.keep => "files that are kept have no limit on disk".to_owned(),
            limit => limit.without_groups(),
        }
    }

    pub(super) fn describe(&self, limit: LimitName, limits: &Limits) -> String {
        let (_, amount) = limits.amount(limit);
        let by = match (&self.rights, limit) {
            (Rights::Root(root), LimitName::Disk) => match root.volumes.kind() {
                Kind::Btrfs => "btrfs quota",
                Kind::Ext4 => "ext4 image",
                Kind::Tmpfs => "tmpfs",
            },
            (Rights::User { .. }, LimitName::Disk) => "tmpfs",
            (_, LimitName::Pids) if self.bounds_processes_by_rlimit() => "RLIMIT_NPROC",
            (_, limit) => self.groups().map_or("none", |groups| groups.version(limit)),
        };
        format!("{amount} by {by}")
    }

    /// Refuses limits above the maximum of the operator or the kernel, limits below what a sandbox needs
    /// to start, and a disk that is larger than the capacity.
    pub(super) fn check_amounts(&self, limits: &Limits, named: &[LimitName]) -> Result<(), Refusal> {
        let Maxima { memory, cpus, pids, disk } = self.settings.maxima;
        let most = Limits {
            memory: memory.unwrap_or(u64::MAX),
            cpus: cpus.unwrap_or(u32::MAX),
            pids: pids.unwrap_or(u32::MAX),
            disk: disk.unwrap_or(u64::MAX),
        };
        if limits.memory < MIN_MEMORY.0 {
            let shown = Bytes(limits.memory);
            let message =
                format!("memory of {shown} is less than the {MIN_MEMORY} that starting a process takes");
            return Err(Refusal::amount(message, format!("name at least {MIN_MEMORY}")));
        }
        if limits.pids > MAX_PIDS {
            let message = format!("pids of {} is more than the {MAX_PIDS} that Linux can count", limits.pids);
            return Err(Refusal::amount(message, format!("name at most {MAX_PIDS}")));
        }
        for limit in LimitName::ALL {
            let ((asked, shown), (most, bound)) = (limits.amount(limit), most.amount(limit));
            if asked > most {
                let message = format!("{} of {shown} is more than the {bound} allowed here", limit.word());
                return Err(Refusal::amount(message, format!("name at most {bound}")));
            }
        }
        let Rights::Root(root) = &self.rights else { return Ok(()) };
        if root.volumes.kind() != Kind::Tmpfs && limits.disk < MIN_DISK.0 {
            let shown = Bytes(limits.disk);
            let message = format!("disk of {shown} is less than the {MIN_DISK} that a file system takes");
            return Err(Refusal::amount(message, format!("name at least {MIN_DISK}")));
        }
        if named.contains(&LimitName::Disk)
            && let Some(pool) = root.volumes.capacity()
            && limits.disk > pool.0
        {
            let shown = Bytes(limits.disk);
            let message = format!("disk of {shown} is more than the {pool} of all disks");
            return Err(Refusal::amount(message, format!("name at most {pool}")));
        }
        Ok(())
    }

    /// Makes everything that has to exist before the first process.
    fn prepare(
        &mut self,
        plan: &JailPlan,
        image: &Resolved,
        user: (u32, u32),
        reach: Reach,
        gathered: Gathered,
    ) -> Result<(Parts, OwnedFd), JailError> {
        let listen = self.bind_socket(&plan.id).at(Step::Socket)?;
        let (status, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).at(Step::Configuration)?;
        let trees: Vec<EntryTree> = image.trees.iter().map(entry_tree).collect();
        let Gathered { entries: mounts, opened, .. } = gathered;
        let resources = self.resources(plan, user, reach, &trees, opened)?;
        let mut inherited = Inherited::new(report.try_clone().at(Step::Configuration)?, listen);
        let (mut commands, mut limit_view) = (None, None);
        let (group, groups_fds) = match resources.groups {
            Some(groups) => {
                commands = groups.unmounted.map(|path| (inherited.descriptors.len(), path));
                inherited.add_groups(groups.commands, groups.command_tasks, groups.oom);
                inherited.add_shares(groups.shares);
                let shows = [groups.readings.memory.is_some(), groups.readings.cpu.is_some()];
                limit_view = inherited.add_limit_view(groups.readings).map(|places| EntryView {
                    places,
                    memory: shows[0],
                    cpus: shows[1],
                });
                (Some(groups.agent), groups.agent_tasks)
            }
            None => (None, Vec::new()),
        };
        // Without control groups an isolated session could not be ended, so no process gets the rights
        // to make one.
        let nests = (plan.nesting && inherited.commands.is_some()).then(|| inherited.add_spare());
        let config = self.agent_config(plan, image, &inherited, nests);
        inherited.set_config(memfd(&config).at(Step::Configuration)?);
        let entry = Entry {
            setgroups: resources.setgroups,
            die_with_parent: self.settings.lifetime == Lifetime::Ours,
            host_name: plan.id.clone(),
            trees,
            volume: resources.volume,
            mounts,
            resolv_conf: self.resolv_conf(reach),
            guest: GuestPlan { default_directory: usual_directory(plan, image), ..plan.guest.clone() },
            agent: self.agent.try_clone().at(Step::Configuration)?,
            agent_tasks: groups_fds,
            filter: self.filters(plan).agent.clone(),
            open_files: self.open_files,
            journal: Inherited::JOURNAL,
            commands,
            nests,
            limit_view,
            inherited: inherited.descriptors,
        };
        let parts = Parts {
            entry,
            group,
            network: resources.network,
            cgroup_namespace: resources.cgroup_namespace,
            ownership: resources.ownership,
            report,
        };
        Ok((parts, status))
    }

    fn resources(
        &mut self,
        plan: &JailPlan,
        user: (u32, u32),
        reach: Reach,
        trees: &[EntryTree],
        mounts: Vec<Opened>,
    ) -> Result<Resources, JailError> {
        let kept = plan.keep.then(|| self.kept(&plan.id));
        if let Some(kept) = &kept {
            std::fs::create_dir_all(kept).at_path(Step::Volume, kept)?;
            make_uppers(kept, trees).at_path(Step::Volume, kept)?;
        }
        match &mut self.rights {
            Rights::Root(root) => root.resources(plan, user, reach, trees, mounts, kept),
            Rights::User { uid, gid, groups } => {
                let own = groups.as_ref().ok().filter(|groups| groups.can_make());
                let made = own.map(|groups| groups.make(&plan.id, &plan.limits, *uid));
                Ok(Resources {
                    groups: made.transpose().at(Step::Groups)?,
                    volume: kept.map_or(EntryVolume::Tmpfs(plan.limits.disk), EntryVolume::Directory),
                    network: NetworkPart::New,
                    cgroup_namespace: own.is_none_or(|groups| groups.allows_namespace()),
                    ownership: Ownership::Single { uid: *uid, gid: *gid },
                    setgroups: Setgroups::Deny,
                })
            }
        }
    }

    /// Returns the directory in which the files of a sandbox are kept.
    pub fn kept(&self, id: &str) -> PathBuf {
        self.settings.state_dir.join("kept").join(id)
    }

    /// Removes the kept files of a sandbox that never started.
    pub fn discard_kept(&self, id: &str) -> io::Result<()> {
        match linux::fs::Root::open(&self.settings.state_dir.join("kept")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            kept => kept?.remove_tree(Path::new(id)),
        }
    }

    /// Binds the agent's socket. The agent itself calls listen, so that a successful connect means that
    /// the agent is at the other end and not the launcher.
    fn bind_socket(&self, id: &str) -> io::Result<OwnedFd> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // The directory is addressed by its descriptor, because a socket's path is limited to 108 bytes.
        let path = format!("/proc/self/fd/{}/{id}", self.run.as_raw_fd());
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::fs::chmodat(
            self.run_directory(),
            id,
            rustix::fs::Mode::from_raw_mode(0o600),
            AtFlags::empty(),
        )?;
        if let Some(uid) = self.settings.server_uid {
            let uid = Some(Uid::from_raw(uid));
            rustix::fs::chownat(self.run_directory(), id, uid, None, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(socket)
    }

    /// Returns the filters of a sandbox. If it can write to directories of the host, set-id bits are
    /// refused: root inside is a real user there, and the host's users could execute its files.
    fn filters(&self, plan: &JailPlan) -> &Pair {
        if self.refuses_set_id(plan) { &self.filters.without_set_id } else { &self.filters.usual }
    }

    fn agent_config(
        &self,
        plan: &JailPlan,
        image: &Resolved,
        inherited: &Inherited,
        nests: Option<usize>,
    ) -> AgentConfig {
        let mut env: BTreeMap<String, String> = image.env.iter().cloned().collect();
        env.insert("CORACLE_SANDBOX".to_owned(), plan.id.clone());
        env.extend(plan.env.clone());
        let root = matches!(self.rights, Rights::Root(_));
        let (default_user, default_directory) = self.usual_place(plan, image);
        AgentConfig {
            version: wire::VERSION,
            listen_fd: Inherited::number(Inherited::LISTEN),
            ready_fd: Inherited::number(Inherited::READY),
            journal_fd: Inherited::number(Inherited::JOURNAL),
            commands_fd: inherited.commands,
            tasks_fds: inherited.tasks.clone(),
            shares_fds: inherited.shares.clone(),
            oom_fd: inherited.oom,
            command_filter: self.filters(plan).command.to_words(),
            command_capabilities: COMMAND_CAPABILITIES.0,
            process_rlimit: self.process_rlimit(plan),
            single_user: !root,
            default_user,
            default_directory,
            env,
            env_file: plan.env_file.clone(),
            nesting: nests.map(|index| Nesting {
                agent_filter: self.filters(plan).agent.to_words(),
                nester_filter: self.filters(plan).nester.to_words(),
                agent_capabilities: AGENT_CAPABILITIES.0,
                disk_fd: Some(Inherited::number(index)),
            }),
            max_processes: plan.max_processes,
            limit_view: inherited.limit_view.clone(),
            threads: None,
        }
    }
}

/// How the user that an image names is used.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ImageUser {
    /// The image names no user, or the plan decides.
    None,
    Taken(String),
    /// The user does not exist, because the sandbox has only the caller's id.
    Ignored,
}

impl Launcher {
    fn image_user(&self, plan: &JailPlan, image: &Resolved) -> ImageUser {
        let user = image.record.as_ref().and_then(|record| record.config.user.clone());
        let is_root = |user: &str| matches!(user, "root" | "0" | "0:0" | "root:root");
        match user.filter(|user| plan.guest.by_image && !is_root(user)) {
            None => ImageUser::None,
            Some(_) if matches!(self.rights, Rights::User { .. }) => ImageUser::Ignored,
            Some(user) => ImageUser::Taken(user),
        }
    }

    /// Returns the ids of the image's user, if commands start as that user and the image's files define
    /// them.
    fn ids_by_image(&self, plan: &JailPlan, image: &Resolved) -> Option<(u32, u32)> {
        match self.image_user(plan, image) {
            ImageUser::Taken(user) => image.ids_of(&user),
            ImageUser::None | ImageUser::Ignored => None,
        }
    }

    /// Returns the default user and directory of commands.
    fn usual_place(&self, plan: &JailPlan, image: &Resolved) -> (String, String) {
        let user = match self.image_user(plan, image) {
            ImageUser::Taken(user) => user,
            ImageUser::None | ImageUser::Ignored => plan.guest.default_user.clone(),
        };
        (user, usual_directory(plan, image))
    }
}

/// Returns the ids of the default user, for the owners of mounts.
fn default_ids(plan: &JailPlan, by_image: Option<(u32, u32)>) -> (u32, u32) {
    let default_user = plan.guest.users.iter().find(|user| user.name == plan.guest.default_user);
    plan.user.or(by_image).unwrap_or(default_user.map_or((0, 0), |user| (user.uid, user.gid)))
}

fn usual_directory(plan: &JailPlan, image: &Resolved) -> String {
    let own = image.record.as_ref().and_then(|record| record.config.workdir.clone());
    own.filter(|_| plan.guest.by_image).unwrap_or_else(|| plan.guest.default_directory.clone())
}

/// The resources of a new sandbox that differ between root and an ordinary user.
struct Resources {
    groups: Option<Groups>,
    volume: EntryVolume,
    network: NetworkPart,
    cgroup_namespace: bool,
    ownership: Ownership,
    setgroups: Setgroups,
}

impl Root {
    fn resources(
        &mut self,
        plan: &JailPlan,
        user: (u32, u32),
        reach: Reach,
        trees: &[EntryTree],
        mounts: Vec<Opened>,
        kept: Option<PathBuf>,
    ) -> Result<Resources, JailError> {
        let base = self.ranges.allocate(&plan.id).map_err(io::Error::other).at(Step::UidRange)?.first;
        let groups = self.groups.make(&plan.id, &plan.limits, base).at(Step::Groups)?;
        let volume = match plan.disk {
            DiskPlan::New => self.new_volume(plan)?,
            DiskPlan::Kept => self.volumes.volume(&plan.id).map_err(disk_error).at(Step::Volume)?,
        };
        for tree in trees.iter().filter(|tree| tree.name != "root" && tree.name != "usr") {
            volume.add_tree(&tree.name).map_err(disk_error).at(Step::Volume)?;
        }
        let namespace = self.nets.take(reach).at(Step::NetNamespace)?;
        let home = self.nets.home().at(Step::NetNamespace)?;
        Ok(Resources {
            groups: Some(groups),
            volume: EntryVolume::Given,
            network: NetworkPart::Prepared { namespace, home },
            cgroup_namespace: self.groups.allows_namespace(),
            ownership: Ownership::Range {
                base,
                user,
                volume: kept.unwrap_or(volume.disk),
                journal: volume.journal,
                mounts,
            },
            setgroups: Setgroups::Allow,
        })
    }

    fn new_volume(&mut self, plan: &JailPlan) -> Result<Volume, JailError> {
        let prepared = match self.take_restored(&plan.id).or_else(|| self.disks.pop()) {
            Some(disk) => disk,
            None => self.volumes.prepare(PREPARED_DISK).map_err(disk_error).at(Step::Volume)?,
        };
        let limit = Bytes(plan.limits.disk);
        self.volumes.assign(prepared, &plan.id, limit).map_err(disk_error).at(Step::Volume)
    }
}

fn entry_tree(tree: &images::Tree) -> EntryTree {
    EntryTree {
        mount_point: tree.mount_point.clone(),
        name: tree_name(&tree.mount_point),
        lowers: tree.lowers.clone(),
    }
}

fn disk_error(error: VolumeError) -> io::Error {
    io::Error::other(error)
}

pub(super) fn refuse_image(error: ImageError) -> Refusal {
    let hint = error.hint().map(str::to_owned);
    match error {
        ImageError::Unknown(_) | ImageError::NoStandIn { .. } | ImageError::Strict(_) => {
            Refusal { kind: RefusalKind::NoImage, message: error.to_string(), hint }
        }
        error => Refusal { kind: RefusalKind::Unsupported, message: error.to_string(), hint },
    }
}
