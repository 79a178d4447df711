//! Making a sandbox: prepare its resources, start it, and wait for its report.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use domain::{Bytes, SandboxId};
use linux::namespaces::SetgroupsPolicy;
use rustix::pipe::PipeFlags;
use wire::AgentConfig;
use wire::config::NamespaceBrokerConfig;

use super::agent_descriptors::{AgentDescriptors, write_config_memfd};
use super::end::KeptParts;
use super::images::image_op_error;
use super::mounts::OpenedMounts;
use super::netns_pool::TakenNamespace;
use super::record::{FilteredRecord, SandboxOrigin};
use super::rights::PREPARED_DISK_SIZE;
use super::serve::step_error;
use super::{Launcher, LauncherRights, RootState};
use crate::cgroups::SandboxCgroups;
use crate::images::{self, FoundImage, ImageError};
use crate::jail::build::{self, IdMapping, JailNetwork, JailParts, StartedChild};
use crate::jail::enter::{
    AGENT_CAPABILITIES, COMMAND_CAPABILITIES, EntryJournal, EntryTree, EntryVolume, JailEntry,
    make_upper_directories,
};
use crate::jail::filters::FilterSet;
use crate::jail::host_shares;
use crate::jail::limit_view::EntryLimitView;
use crate::jail::plan::{DiskPlan, GuestPlan, JailLimits, JailPlan, LimitName};
use crate::jail::sources::OpenedSource;
use crate::jail::stages::StageClock;
use crate::jail::step::{FailureReport, JailError, JailStep, StepContext};
use crate::network::UplinkKind;
use crate::network::filtered::{FilteredLayout, FilteredNetwork};
use crate::protocol::{EnforcedPlan, OpError};
use crate::settings::LifetimePolicy;
use crate::volumes::{SandboxVolume, VolumeError, tree_name};

/// A sandbox that is starting. When `status` is readable, [`PendingCreate::conclude`] returns the outcome.
#[derive(Debug)]
pub struct PendingCreate {
    pub id: SandboxId,
    pub status: OwnedFd,
    /// The parts that are kept if it does not start.
    pub keep: KeptParts,
    /// Its first process.
    child: StartedChild,
    enforced: EnforcedPlan,
    clock: StageClock,
    /// How long the launcher worked for the child after it was cloned.
    handover: Duration,
}

/// A sandbox whose agent listens.
#[derive(Debug)]
pub struct CreatedSandbox {
    pub pidfd: OwnedFd,
    pub enforced: EnforcedPlan,
}

/// The reason why a sandbox could not be started.
#[derive(Debug)]
pub enum BeginCreateError {
    /// Refused before anything was made.
    Refused(OpError),
    /// Failed after something was made. The caller must end it like any other sandbox, and keep the
    /// parts named here.
    Failed(OpError, KeptParts),
}

/// The image and limits that a sandbox is made with.
struct ImageAndLimits {
    image: FoundImage,
    /// The number of bytes that came from a snapshot.
    restored: u64,
    limits: JailLimits,
}

impl<T: Into<OpError>> From<T> for BeginCreateError {
    fn from(error: T) -> Self {
        Self::Refused(error.into())
    }
}

impl PendingCreate {
    /// Returns the outcome for a sandbox whose status is readable. The caller must end a failed one.
    pub fn conclude(self) -> Result<CreatedSandbox, OpError> {
        let mut message = Vec::new();
        // One read is enough: a report is short enough that a pipe takes it whole. This never waits for
        // more.
        let mut report = [0; 4096];
        let read = rustix::io::read(&self.status, &mut report).map_err(io::Error::from);
        message.extend_from_slice(&report[..*read.as_ref().unwrap_or(&0)]);
        let failure = match (read, message.as_slice()) {
            (Ok(_), [first, ..]) if *first != b'{' => {
                let StartedChild { pidfd, socket, cloned } = self.child;
                let child = build::receive_stages(socket.as_fd());
                let stages = self.clock.add_child(child, self.handover, cloned.elapsed());
                return Ok(CreatedSandbox { pidfd, enforced: EnforcedPlan { stages, ..self.enforced } });
            }
            (Ok(_), []) => {
                JailError::new(JailStep::AgentReady, io::Error::other("the agent died before it was ready"))
            }
            (Ok(_), json) => match serde_json::from_slice::<FailureReport>(json) {
                Ok(failure) => failure.into(),
                Err(error) => JailError::new(JailStep::AgentReady, io::Error::other(error)),
            },
            (Err(error), _) => JailError::new(JailStep::AgentReady, error),
        };
        Err(failure.into())
    }
}

impl Launcher {
    /// Starts making a sandbox.
    pub fn begin_create(&mut self, plan: &JailPlan) -> Result<PendingCreate, BeginCreateError> {
        if self.records.is_ended(&plan.id) {
            // The sandbox was destroyed, and its remains still exist. A create that replaces it is queued until they are
            // removed, so their removal has failed.
            return Err(match plan.disk {
                DiskPlan::Kept => OpError::gone(),
                DiskPlan::New => {
                    step_error("remove the former sandbox", &io::Error::from(io::ErrorKind::ResourceBusy))
                }
            }
            .into());
        }
        let mut clock = StageClock::start();
        let ImageAndLimits { image, restored, limits } = self.resolve_image_and_limits(plan)?;
        let mut plan = JailPlan { limits, ..plan.clone() };
        self.rights.adapt_guest(&mut plan, &image);
        let plan = &plan;
        let keep = if plan.disk == DiskPlan::Kept { KeptParts::Disk } else { KeptParts::Nothing };
        let (reach, network) = self.choose_network(plan.network)?;
        let by_image = self.rights.image_user_ids(plan, &image);
        let mut holds = self.plan_rules().check_plan(plan, &image, by_image, network)?;
        self.rights.add_snapshot_measure(plan, restored, &mut holds);
        let mut gathered = self.mount_opener().open_mounts(&plan.mounts)?;
        holds.measures.append(&mut gathered.measures);
        let made_of = SandboxOrigin::of_image(&image, restored);
        let begun = match plan.disk {
            DiskPlan::New => self.records.begin_create(&plan.id, plan.limits, made_of),
            DiskPlan::Kept => self.records.begin_restart(&plan.id, plan.limits, made_of),
        };
        let mut record = begun.at_step(JailStep::Record)?;
        if !image.has_all_layers() {
            // The image was just removed. From here on the record prevents its removal.
            return Err(BeginCreateError::Failed(
                image_op_error(ImageError::Unknown(plan.image.clone())),
                keep,
            ));
        }
        self.images.record_use(&image);
        record.user = default_user_ids(plan, by_image);
        record.without_set_id = self.settings.mounts.refuses_set_id(plan);
        record.connected = reach != UplinkKind::Nothing;
        clock.end_stage("check");
        let begun = self.prepare_parts(plan, &image, record.user, reach, gathered, &mut clock).and_then(
            |(parts, status, filtered)| {
                if let (UplinkKind::Egress(mode), Some(filtered)) = (reach, &filtered) {
                    record.filtered = Some(FilteredRecord { mode, own: filtered.layout().own.clone() });
                }
                let records = self.records.clone();
                let begun = build::start_jail(&self.thread, parts, |pid| {
                    records.add_process(&plan.id, &mut record, pid)
                })?;
                if let (Some(filtered), Some(how)) = (filtered, &record.filtered) {
                    let sockets = match filtered {
                        NewFilteredNetwork::Prepared(network) => network.sockets,
                        NewFilteredNetwork::Planned(layout) => {
                            self.set_up_new_namespace(&begun.pidfd, layout).at_step(JailStep::NetNamespace)?
                        }
                    };
                    self.hand_over_sockets(&plan.id, how, &sockets).at_step(JailStep::NetNamespace)?;
                }
                Ok((begun, status))
            },
        );
        match begun {
            Ok((child, status)) => {
                clock.end_stage("clone and handover");
                let (id, handover) = (plan.id.clone(), child.cloned.elapsed());
                Ok(PendingCreate { id, status, keep, child, enforced: holds, clock, handover })
            }
            Err(error) => Err(BeginCreateError::Failed(error.into(), keep)),
        }
    }

    /// Returns the image and limits of a sandbox. A restarted sandbox keeps those that it had, even if
    /// the image's name or the server's defaults have changed.
    fn resolve_image_and_limits(&self, plan: &JailPlan) -> Result<ImageAndLimits, OpError> {
        let limits = plan.limits;
        match (&plan.snapshot, plan.disk) {
            (Some(snapshot), DiskPlan::New) => {
                let (image, restored) = self.image_below_snapshot(snapshot)?;
                Ok(ImageAndLimits { image, restored, limits })
            }
            (None, DiskPlan::New) => {
                Ok(ImageAndLimits { image: self.images.resolve(&plan.image)?, restored: 0, limits })
            }
            (_, DiskPlan::Kept) => {
                if !self.rights.has_disk(&plan.id) {
                    return Err(OpError::gone());
                }
                let record = self.records.read(&plan.id);
                if record.as_ref().is_some_and(|record| record.pidfd().is_some()) {
                    return Err(OpError::unsupported("sandbox is still running", None));
                }
                let limits = record.as_ref().map_or(limits, |record| record.limits);
                match record.and_then(|record| record.made_of) {
                    Some(made_of) => {
                        let restored = made_of.restored;
                        Ok(ImageAndLimits {
                            image: self.images.image_below_files(made_of)?,
                            restored,
                            limits,
                        })
                    }
                    None => {
                        Ok(ImageAndLimits { image: self.images.resolve(&plan.image)?, restored: 0, limits })
                    }
                }
            }
        }
    }

    /// Makes everything that has to exist before the first process.
    fn prepare_parts(
        &mut self,
        plan: &JailPlan,
        image: &FoundImage,
        user: (u32, u32),
        reach: UplinkKind,
        gathered: OpenedMounts,
        clock: &mut StageClock,
    ) -> Result<(JailParts, OwnedFd, Option<NewFilteredNetwork>), JailError> {
        let listen = self.sockets.bind(&plan.id).at_step(JailStep::Socket)?;
        let (status, report) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).at_step(JailStep::Configuration)?;
        let trees: Vec<EntryTree> = image.trees.iter().map(to_entry_tree).collect();
        let OpenedMounts { entries: mounts, opened, .. } = gathered;
        clock.end_stage("socket");
        let resources = self.make_resources(plan, user, reach, &trees, opened, clock)?;
        let mut inherited =
            AgentDescriptors::new(report.try_clone().at_step(JailStep::Configuration)?, listen);
        let (mut commands, mut limit_view) = (None, None);
        let (group, groups_fds) = match resources.groups {
            Some(groups) => {
                commands = groups.unmounted.map(|path| (inherited.descriptors.len(), path));
                inherited.add_groups(groups.commands, groups.command_tasks, groups.oom);
                inherited.add_shares(groups.shares);
                let shows = [groups.limit_files.memory.is_some(), groups.limit_files.cpu.is_some()];
                limit_view = inherited.add_limit_view(groups.limit_files).map(|places| EntryLimitView {
                    descriptor_indexes: places,
                    memory: shows[0],
                    cpus: shows[1],
                });
                (Some(groups.agent), groups.agent_tasks)
            }
            None => (None, Vec::new()),
        };
        // Without control groups an isolated session could not be ended, so no process gets the rights
        // to make one.
        let isolated_sessions =
            (plan.isolated_sessions && inherited.commands.is_some()).then(|| inherited.add_placeholder());
        let kernels = self.agent.copies.kernels().at_step(JailStep::Configuration)?;
        let kernels = kernels.map(|program| (inherited.add_placeholder(), program));
        let config = AgentConfig {
            kernels_fd: kernels.as_ref().map(|(index, _)| AgentDescriptors::fd_number(*index)),
            ..self.build_agent_config(plan, image, &inherited, isolated_sessions)
        };
        inherited.set_config(write_config_memfd(&config).at_step(JailStep::Configuration)?);
        let user_limits = match &self.rights {
            LauncherRights::Root(_) => Vec::new(),
            LauncherRights::User { .. } => host_shares::inotify_limits(),
        };
        let entry = JailEntry {
            setgroups: resources.setgroups,
            die_with_parent: self.settings.lifetime == LifetimePolicy::Ours,
            host_name: plan.id.to_string(),
            trees,
            volume: resources.volume,
            mounts,
            resolv_conf: match reach {
                UplinkKind::Nothing => None,
                UplinkKind::Link => self.rights.linked_resolv_conf(),
                UplinkKind::Egress(_) => {
                    resources.filtered.as_ref().map(|filtered| filtered.layout().resolv_conf())
                }
            },
            guest: GuestPlan { default_directory: default_directory(plan, image), ..plan.guest.clone() },
            agent: self.agent.copies.agent().at_step(JailStep::Configuration)?,
            kernels,
            agent_tasks: groups_fds,
            filter: self.filters_for(plan).agent.clone(),
            open_files: host_shares::open_file_limit(self.agent.open_files, plan.limits.pids),
            user_limits,
            journal: AgentDescriptors::JOURNAL_INDEX,
            commands,
            isolated_sessions,
            limit_view,
            inherited: inherited.descriptors,
        };
        clock.end_stage("configuration");
        let parts = JailParts {
            entry,
            group,
            network: resources.network,
            cgroup_namespace: resources.cgroup_namespace,
            id_mapping: resources.id_mapping,
            report,
        };
        Ok((parts, status, resources.filtered))
    }

    fn make_resources(
        &mut self,
        plan: &JailPlan,
        user: (u32, u32),
        reach: UplinkKind,
        trees: &[EntryTree],
        mounts: Vec<OpenedSource>,
        clock: &mut StageClock,
    ) -> Result<SandboxResources, JailError> {
        let kept = plan.keep.then(|| self.kept_files_path(&plan.id));
        if let Some(kept) = &kept {
            std::fs::create_dir_all(kept).at_path(JailStep::Volume, kept)?;
            make_upper_directories(kept, trees).at_path(JailStep::Volume, kept)?;
        }
        match &mut self.rights {
            LauncherRights::Root(root) => {
                let mut made = root.make_resources(plan, user, reach, trees, clock)?;
                if let IdMapping::Range { volume, mounts: mapped, .. } = &mut made.id_mapping {
                    *mapped = mounts;
                    *volume = kept.unwrap_or_else(|| std::mem::take(volume));
                }
                Ok(made)
            }
            LauncherRights::User { uid, gid, groups } => {
                let own = groups.as_ref().ok().filter(|groups| groups.can_make());
                let made = own.map(|groups| groups.make_for_sandbox(&plan.id, &plan.limits, *uid));
                let filtered = match reach {
                    UplinkKind::Egress(_) => {
                        let layout = FilteredLayout::choose(&self.settings.network);
                        Some(NewFilteredNetwork::Planned(layout.at_step(JailStep::NetNamespace)?))
                    }
                    UplinkKind::Nothing | UplinkKind::Link => None,
                };
                Ok(SandboxResources {
                    groups: made.transpose().at_step(JailStep::Groups)?,
                    volume: kept.map_or(EntryVolume::Tmpfs(plan.limits.disk), EntryVolume::Directory),
                    network: JailNetwork::New,
                    filtered,
                    cgroup_namespace: own.is_none_or(|groups| groups.allows_namespace()),
                    id_mapping: IdMapping::Single { uid: *uid, gid: *gid },
                    setgroups: SetgroupsPolicy::Deny,
                })
            }
        }
    }

    /// Returns the directory in which the files of a sandbox are kept.
    pub fn kept_files_path(&self, id: &SandboxId) -> PathBuf {
        self.settings.state_dir.join("kept").join(id.as_str())
    }

    /// Removes the kept files of a sandbox that never started.
    pub fn discard_kept_files(&self, id: &SandboxId) -> io::Result<()> {
        match linux::fs::RootDirectory::open(&self.settings.state_dir.join("kept")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            kept => kept?.remove_tree(Path::new(id.as_str())),
        }
    }

    fn filters_for(&self, plan: &JailPlan) -> &FilterSet {
        self.agent.filters(self.settings.mounts.refuses_set_id(plan))
    }

    fn build_agent_config(
        &self,
        plan: &JailPlan,
        image: &FoundImage,
        inherited: &AgentDescriptors,
        isolated_sessions: Option<usize>,
    ) -> AgentConfig {
        let mut env: BTreeMap<String, String> = image.env.iter().cloned().collect();
        env.insert("CORACLE_SANDBOX".to_owned(), plan.id.to_string());
        env.extend(plan.env.clone());
        let root = matches!(self.rights, LauncherRights::Root(_));
        let (default_user, default_directory) = self.rights.default_user_and_directory(plan, image);
        AgentConfig {
            version: wire::VERSION,
            listen_fd: AgentDescriptors::fd_number(AgentDescriptors::LISTEN_INDEX),
            ready_fd: AgentDescriptors::fd_number(AgentDescriptors::READY_INDEX),
            journal_fd: AgentDescriptors::fd_number(AgentDescriptors::JOURNAL_INDEX),
            commands_fd: inherited.commands,
            tasks_fds: inherited.tasks.clone(),
            shares_fds: inherited.shares.clone(),
            oom_fd: inherited.oom,
            command_filter: self.filters_for(plan).command.to_words(),
            command_capabilities: COMMAND_CAPABILITIES.0,
            process_rlimit: self.rights.process_rlimit(plan),
            single_user: !root,
            default_user,
            default_directory,
            env,
            env_file: plan.env_file.clone(),
            namespace_broker: isolated_sessions.map(|index| NamespaceBrokerConfig {
                agent_filter: self.filters_for(plan).agent.to_words(),
                broker_filter: self.filters_for(plan).namespace_broker.to_words(),
                agent_capabilities: AGENT_CAPABILITIES.0,
                disk_fd: Some(AgentDescriptors::fd_number(index)),
            }),
            max_processes: plan.max_processes,
            limit_view: inherited.limit_view.clone(),
            threads: None,
            kernels_fd: None,
        }
    }
}

/// How the user that an image names is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ImageUser {
    /// The image names no user, or the plan decides.
    None,
    Taken(String),
    /// The user does not exist, because the sandbox has only the caller's id.
    Ignored,
}

impl LauncherRights {
    /// Returns RLIMIT_NPROC for commands, if no control group limits their number.
    fn process_rlimit(&self, plan: &JailPlan) -> Option<u64> {
        let by_group = self.enforces(LimitName::Pids) && !self.bounds_processes_by_rlimit();
        (!by_group).then_some(u64::from(plan.limits.pids))
    }

    /// Returns how the image's user is used.
    pub(super) fn image_user(&self, plan: &JailPlan, image: &FoundImage) -> ImageUser {
        let user = image.record.as_ref().and_then(|record| record.config.user.clone());
        let is_root = |user: &str| matches!(user, "root" | "0" | "0:0" | "root:root");
        match user.filter(|user| plan.guest.by_image && !is_root(user)) {
            None => ImageUser::None,
            Some(_) if matches!(self, Self::User { .. }) => ImageUser::Ignored,
            Some(user) => ImageUser::Taken(user),
        }
    }

    /// Returns the ids of the image's user, if commands start as that user and the image's files define
    /// them.
    fn image_user_ids(&self, plan: &JailPlan, image: &FoundImage) -> Option<(u32, u32)> {
        match self.image_user(plan, image) {
            ImageUser::Taken(user) => image.ids_of(&user),
            ImageUser::None | ImageUser::Ignored => None,
        }
    }

    /// Returns the default user and directory of commands.
    fn default_user_and_directory(&self, plan: &JailPlan, image: &FoundImage) -> (String, String) {
        let user = match self.image_user(plan, image) {
            ImageUser::Taken(user) => user,
            ImageUser::None | ImageUser::Ignored => plan.guest.default_user.clone(),
        };
        (user, default_directory(plan, image))
    }
}

/// Returns the ids of the default user, for the owners of mounts.
fn default_user_ids(plan: &JailPlan, by_image: Option<(u32, u32)>) -> (u32, u32) {
    let default_user = plan.guest.users.iter().find(|user| user.name == plan.guest.default_user);
    plan.user.or(by_image).unwrap_or(default_user.map_or((0, 0), |user| (user.uid, user.gid)))
}

fn default_directory(plan: &JailPlan, image: &FoundImage) -> String {
    let own = image.record.as_ref().and_then(|record| record.config.workdir.clone());
    own.filter(|_| plan.guest.by_image).unwrap_or_else(|| plan.guest.default_directory.clone())
}

/// The resources of a new sandbox that differ between root and an ordinary user.
struct SandboxResources {
    groups: Option<SandboxCgroups>,
    volume: EntryVolume,
    network: JailNetwork,
    /// Set if egress carries the connections of the sandbox.
    filtered: Option<NewFilteredNetwork>,
    cgroup_namespace: bool,
    id_mapping: IdMapping,
    setgroups: SetgroupsPolicy,
}

/// The network of a sandbox whose connections egress carries.
enum NewFilteredNetwork {
    /// Set up in a namespace that was made before the sandbox.
    Prepared(FilteredNetwork),
    /// To be set up once the sandbox has its namespace.
    Planned(FilteredLayout),
}

impl NewFilteredNetwork {
    fn layout(&self) -> &FilteredLayout {
        match self {
            Self::Prepared(network) => &network.layout,
            Self::Planned(layout) => layout,
        }
    }
}

impl RootState {
    /// Makes the resources of a sandbox that has no other mounts and whose files are on its own disk.
    fn make_resources(
        &mut self,
        plan: &JailPlan,
        user: (u32, u32),
        reach: UplinkKind,
        trees: &[EntryTree],
        clock: &mut StageClock,
    ) -> Result<SandboxResources, JailError> {
        let base =
            self.ranges.allocate(&plan.id).map_err(io::Error::other).at_step(JailStep::UidRange)?.first;
        clock.end_stage("uid range");
        let groups = self.groups.make_for_sandbox(&plan.id, &plan.limits, base).at_step(JailStep::Groups)?;
        clock.end_stage("control groups");
        let volume = match plan.disk {
            DiskPlan::New => self.new_volume(plan)?,
            DiskPlan::Kept => {
                self.volumes.sandbox_volume(&plan.id).map_err(disk_error).at_step(JailStep::Volume)?
            }
        };
        for tree in trees.iter().filter(|tree| tree.name != "root" && tree.name != "usr") {
            volume.add_tree(&tree.name).map_err(disk_error).at_step(JailStep::Volume)?;
        }
        clock.end_stage("disk");
        let TakenNamespace { namespace, filtered } =
            self.netns_pool.take(reach).at_step(JailStep::NetNamespace)?;
        clock.end_stage("net namespace");
        let home = self.netns_pool.home_namespace().at_step(JailStep::NetNamespace)?;
        Ok(SandboxResources {
            groups: Some(groups),
            volume: EntryVolume::Given(
                volume.journal.as_ref().map_or(EntryJournal::Memory, |_| EntryJournal::Given),
            ),
            network: JailNetwork::Prepared { namespace, home },
            filtered: filtered.map(NewFilteredNetwork::Prepared),
            cgroup_namespace: self.groups.allows_namespace(),
            id_mapping: IdMapping::Range {
                base,
                user,
                volume: volume.disk,
                journal: volume.journal,
                mounts: Vec::new(),
            },
            setgroups: SetgroupsPolicy::Allow,
        })
    }

    fn new_volume(&mut self, plan: &JailPlan) -> Result<SandboxVolume, JailError> {
        let prepared = match self.take_restored_disk(&plan.id).or_else(|| self.prepared_disks.pop()) {
            Some(disk) => disk,
            None => self.volumes.prepare(PREPARED_DISK_SIZE).map_err(disk_error).at_step(JailStep::Volume)?,
        };
        let limit = Bytes(plan.limits.disk);
        let unused = prepared.clone();
        let assigned = self.volumes.assign(prepared, &plan.id, limit);
        if assigned.is_err() {
            self.discard_disk(unused);
        }
        assigned.map_err(disk_error).at_step(JailStep::Volume)
    }
}

fn to_entry_tree(tree: &images::ImageTree) -> EntryTree {
    EntryTree {
        mount_point: tree.mount_point.clone(),
        name: tree_name(&tree.mount_point),
        lowers: tree.lowers.clone(),
    }
}

fn disk_error(error: VolumeError) -> io::Error {
    io::Error::other(error)
}
