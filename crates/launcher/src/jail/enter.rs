//! Building a sandbox from inside: the steps of the cloned child until it becomes the agent.
//!
//! ```text
//! join groups ─► wait for maps and layers ─► root inside ─► private mounts ─► scratch ─► layers ─► overlays
//!   ─► /dev ─► /proc ─► no user namespaces ─► limit view ─► mounts ─► pivot ─► probe ─► guest
//!   ─► limits ─► capabilities ─► no_new_privs ─► Landlock ─► seccomp ─► exec
//! ```
//!
//! The order matters. The root changes while capabilities still allow it, and the filter comes
//! last because it forbids what the earlier steps need. If a namespace broker is needed, the agent
//! applies Landlock and its filter itself, after it has forked the broker.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use linux::caps::{self, CapSet};
use linux::descriptors::PreparedExec;
use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces::{self, SetgroupsPolicy};
use linux::seccomp::SeccompProgram;
use linux::spawn::ExecStrings;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::process::{Resource, Rlimit};

use super::host_shares::{MAX_TERMINALS, UserNamespaceLimits};
use super::limit_view::{self, EntryLimitView};
use super::plan::GuestPlan;
use super::sources::{self, MountOrigin, SourceLocation};
use super::stages::{CHILD_WAIT_STAGE, StageClock, StageTime};
use super::step::{FailureReport, JailError, JailStep, StepContext};
use crate::images;
use crate::network::resolver;

/// The directory in which the child builds its root. It exists on every host, and only the child sees
/// the mounts over it.
const SCRATCH_DIRECTORY: &str = "/tmp";

/// The scratch filesystem also holds `/dev`, `/dev/shm` and the limit view, of which code inside can fill
/// the first two. It is one filesystem and not three, because the kernel keeps a part of its books for each
/// pair of a mounted filesystem and a memory group.
const SCRATCH_TMPFS_OPTIONS: &str = "mode=0755,size=64m";

/// The capabilities of the agent, all of them only over its own user namespace.
pub(crate) const AGENT_CAPABILITIES: CapSet = CapSet::of(&[
    // Needed to reduce the bounding set of each command; a command never has it.
    caps::SETPCAP,
])
.and(COMMAND_CAPABILITIES);

/// The capabilities of a command that runs as root inside.
pub(crate) const COMMAND_CAPABILITIES: CapSet = CapSet::of(&[
    caps::CHOWN,
    caps::DAC_OVERRIDE,
    caps::FOWNER,
    caps::FSETID,
    caps::KILL,
    caps::SETGID,
    caps::SETUID,
]);

/// The capabilities of the namespace broker, over the same user namespace: the agent's and some more.
pub(crate) const NAMESPACE_BROKER_CAPABILITIES: CapSet = CapSet::of(&[
    // Needed for mounts and namespaces.
    caps::SYS_ADMIN,
    // Needed because entering a mount namespace changes the root.
    caps::SYS_CHROOT,
    // Needed to bring up the loopback of an isolated session without a network.
    caps::NET_ADMIN,
])
.and(AGENT_CAPABILITIES);

/// Everything that the child needs, prepared before it is cloned.
pub(crate) struct JailEntry {
    pub setgroups: SetgroupsPolicy,
    pub die_with_parent: bool,
    pub host_name: String,
    pub trees: Vec<EntryTree>,
    pub volume: EntryVolume,
    pub mounts: Vec<EntryMount>,
    /// The name servers of a sandbox that has a network.
    pub resolv_conf: Option<String>,
    pub guest: GuestPlan,
    pub agent: EntryProgram,
    /// The program that runs kernels, and the index in `inherited` that it replaces.
    pub kernels: Option<(usize, EntryProgram)>,
    pub agent_tasks: Vec<OwnedFd>,
    pub filter: SeccompProgram,
    pub open_files: Rlimit,
    /// Limits of the sandbox's user namespace beside the one on further namespaces.
    pub user_limits: UserNamespaceLimits,
    /// Descriptors for the agent, in the order of its configuration, from 3 on. Those that the child
    /// makes or receives are absent until then.
    pub inherited: Vec<Option<OwnedFd>>,
    /// The index in `inherited` of the journal directory, which arrives later.
    pub journal: usize,
    /// Without root: the index in `inherited` of a mount of the commands' group, which the child makes
    /// in place of the group itself.
    pub commands: Option<(usize, PathBuf)>,
    /// If isolated sessions are possible: the index in `inherited` of the directory on the volume for
    /// files that change in them. The agent then confines itself.
    pub isolated_sessions: Option<usize>,
    /// The limits that the sandbox sees instead of the host's values.
    pub limit_view: Option<EntryLimitView>,
}

/// One tree of the image. Its lower layers arrive as detached mounts, or are paths that the child clones.
pub(crate) struct EntryTree {
    pub mount_point: String,
    /// The name of its directories in the volume.
    pub name: String,
    pub lowers: Vec<PathBuf>,
}

/// A program that is executed inside although it lies outside.
pub(crate) enum EntryProgram {
    /// A file that processes inside can neither read nor change.
    Opened(OwnedFd),
    /// A file that would belong to root inside; the child executes it from a read-only mount of its own.
    Path(PathBuf),
}

pub(crate) enum EntryVolume {
    /// Arrives as a detached mount.
    Given(EntryJournal),
    /// A tmpfs of this many bytes, charged to memory.
    Tmpfs(u64),
    /// A directory of the launcher, which the child clones.
    Directory(PathBuf),
}

/// Where the agent writes the output of commands. It must not be on the disk of the commands, or a full disk would
/// lose output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryJournal {
    /// Arrives as a detached mount.
    Given,
    /// A filesystem in memory, charged to the agent.
    Memory,
}

pub(crate) struct EntryMount {
    pub location: SourceLocation,
    pub target: String,
    pub read_only: bool,
}

impl EntryMount {
    fn is_writable_volume(&self) -> bool {
        !self.read_only && matches!(self.location.origin, MountOrigin::Volume(_))
    }
}

/// The size of the journals of a sandbox that has no volume for them. They are charged to the agent's
/// memory, so this is less than the agent's limit.
const JOURNAL_TMPFS_OPTIONS: &str = "mode=0700,size=128m,nr_inodes=8k";

/// The descriptors that arrive once the id maps are written. For root, these are the detached and
/// idmapped mounts in the order: lowers of each tree, volume, journal unless it is in memory, mounts. For an ordinary user
/// there are none.
pub(crate) type HandoverMounts = Vec<OwnedFd>;

/// Turns this process into the sandbox's first process. It returns only on failure. A failure of the
/// very last step, after which this cannot return, is written to `report`. The durations of the stages
/// before that step are passed to `send_stages`.
pub(crate) fn enter_jail(
    entry: JailEntry,
    wait: impl FnOnce() -> Result<HandoverMounts, JailError>,
    send_stages: impl FnOnce(&[StageTime]),
    report: OwnedFd,
) -> Result<Infallible, JailError> {
    let mut clock = StageClock::start();
    for tasks in &entry.agent_tasks {
        rustix::io::write(tasks, b"0").at_step(JailStep::JoinGroups)?;
    }
    let handover = wait()?;
    clock.end_stage(CHILD_WAIT_STAGE);
    namespaces::switch_ids(0, 0, entry.setgroups).at_step(JailStep::BecomeRoot)?;
    if entry.die_with_parent {
        // Not earlier, because changing ids clears the setting.
        namespaces::die_with_parent().at_step(JailStep::BecomeRoot)?;
    }
    mounts::make_private().at_step(JailStep::PrivateMounts)?;
    clock.end_stage("identity");

    let mut layers = collect_layers(&entry, handover)?;
    build_root(&entry, &mut layers)?;
    clock.end_stage("overlays");
    let isolated_sessions =
        entry.isolated_sessions.map(|index| make_isolated_sessions_directory().map(|made| (index, made)));
    let isolated_sessions = isolated_sessions.transpose().at_step(JailStep::Scratch)?;
    let journals = layers.journal.take().map_or_else(make_journals, Ok).at_step(JailStep::Scratch)?;
    let root = Path::new(SCRATCH_DIRECTORY).join("root");
    check_mount_points(&root, &["dev", "proc"])?;
    make_devices(Path::new(SCRATCH_DIRECTORY), &root.join("dev")).at_step(JailStep::Devices)?;
    mount_proc(Path::new(SCRATCH_DIRECTORY), &root.join("proc"), &entry.user_limits)?;
    clock.end_stage("devices");
    let view = entry
        .limit_view
        .as_ref()
        .map(|view| limit_view::mount_limit_view(view, Path::new(SCRATCH_DIRECTORY), &root));
    let view = view.transpose().at_step(JailStep::LimitView)?;
    attach_mounts(&root, &entry, &layers.mounts)?;
    namespaces::set_host_name(&entry.host_name).at_step(JailStep::Guest)?;
    clock.end_stage("mounts");

    mounts::pivot_root(&root).at_step(JailStep::Pivot)?;
    clock.end_stage("pivot");
    probe_write().at_step(JailStep::ProbeWrite)?;
    if let Some(text) = &entry.resolv_conf {
        resolver::write_resolv_conf(text).at_path(JailStep::Guest, "/etc/resolv.conf")?;
    }
    set_up_guest(&entry.guest, &entry.mounts)?;
    clock.end_stage("guest");

    rustix::process::umask(Mode::from_raw_mode(0o022));
    namespaces::set_resource_limit(Resource::Core, 0).at_step(JailStep::ResourceLimits)?;
    let JailEntry { mut inherited, journal, filter, commands, open_files, limit_view, .. } = entry;
    if let (Some(EntryLimitView { descriptor_indexes: places, .. }), Some(view)) = (limit_view, view) {
        places.into_iter().zip(view).for_each(|(index, descriptor)| inherited[index] = Some(descriptor));
    }
    if let (Some((index, _)), Some(group)) = (commands, layers.commands) {
        inherited[index] = Some(group);
    }
    if let Some((index, program)) = layers.kernels {
        inherited[index] = Some(program);
    }
    let has_broker = isolated_sessions.is_some();
    if let Some((index, directory)) = isolated_sessions {
        inherited[index] = Some(directory);
    }
    let departure = prepare_agent_descriptors(inherited, journal, journals, layers.agent, report)
        .at_step(JailStep::ExecuteAgent)?;
    rustix::process::setrlimit(Resource::Nofile, open_files).at_step(JailStep::ResourceLimits)?;
    let (arguments, environment) = (exec_strings(&[c"coracle-agent", c"__agent"]), exec_strings(&[]));
    clock.end_stage("descriptors");
    send_stages(&clock.into_stages());
    let keep = if has_broker { NAMESPACE_BROKER_CAPABILITIES } else { AGENT_CAPABILITIES };
    caps::limit_bounding_set(keep).at_step(JailStep::Capabilities)?;
    caps::set_capabilities(keep).at_step(JailStep::Capabilities)?;
    linux::set_no_new_privs().at_step(JailStep::NoNewPrivileges)?;
    if !has_broker {
        linux::landlock::forbid_mounts().at_step(JailStep::Landlock)?;
        filter.install().at_step(JailStep::Seccomp)?;
    }
    departure.exec_or_exit(&arguments, &environment, |source| {
        FailureReport::from(JailError::new(JailStep::ExecuteAgent, source)).to_json()
    })
}

/// The parts of the new root, all as detached mounts.
struct RootLayers {
    trees: Vec<Vec<OwnedFd>>,
    volume: Option<OwnedFd>,
    journal: Option<OwnedFd>,
    commands: Option<OwnedFd>,
    mounts: Vec<OwnedFd>,
    agent: OwnedFd,
    kernels: Option<(usize, OwnedFd)>,
}

/// Opens everything that is found by a path of the host, which is visible only until the root changes.
fn collect_layers(entry: &JailEntry, handover: HandoverMounts) -> Result<RootLayers, JailError> {
    let agent = entry.agent.open()?;
    let open_kernels = |(index, program): &(usize, EntryProgram)| program.open().map(|file| (*index, file));
    let kernels = entry.kernels.as_ref().map(open_kernels).transpose()?;
    let EntryVolume::Given(journal) = entry.volume else {
        let attributes = MountAttrs::READ_ONLY.and(MountAttrs::NO_DEV);
        let mut trees = Vec::new();
        for tree in &entry.trees {
            let lowers = tree.lowers.iter().map(|path| {
                clone_mount(path, MountDepth::Single, attributes).at_path(JailStep::CloneLowers, path)
            });
            trees.push(lowers.collect::<Result<_, _>>()?);
        }
        let mounts = entry.mounts.iter().map(|mount| {
            clone_mount_source(&mount.location, mount.read_only).at_path(JailStep::CloneMounts, &mount.target)
        });
        let mounts = mounts.collect::<Result<_, _>>()?;
        let commands = entry.commands.as_ref().map(|(_, path)| mounts::clone_tree(path, MountDepth::Single));
        let commands = commands.transpose().at_step(JailStep::JoinGroups)?;
        return Ok(RootLayers { trees, volume: None, journal: None, commands, mounts, agent, kernels });
    };
    let mut given = handover.into_iter();
    let mut next = || given.next().ok_or_else(|| io::Error::other("fewer mounts than planned"));
    let mut trees = Vec::new();
    for tree in &entry.trees {
        let lowers = tree.lowers.iter().map(|_| next());
        trees.push(lowers.collect::<io::Result<_>>().at_step(JailStep::Handover)?);
    }
    let volume = Some(next().at_step(JailStep::Handover)?);
    let journal = match journal {
        EntryJournal::Given => Some(next().at_step(JailStep::Handover)?),
        EntryJournal::Memory => None,
    };
    Ok(RootLayers { trees, volume, journal, commands: None, mounts: given.collect(), agent, kernels })
}

impl EntryProgram {
    fn open(&self) -> Result<OwnedFd, JailError> {
        match self {
            Self::Opened(file) => file.try_clone().at_step(JailStep::OpenPrograms),
            Self::Path(path) => {
                let attributes = MountAttrs::READ_ONLY.and(MountAttrs::NO_DEV).and(MountAttrs::NO_SUID);
                clone_mount(path, MountDepth::Single, attributes).at_step(JailStep::OpenPrograms)
            }
        }
    }
}

fn clone_mount(path: &Path, depth: MountDepth, attributes: MountAttrs) -> io::Result<OwnedFd> {
    let tree = mounts::clone_tree(path, depth)?;
    mounts::set_attributes(tree.as_fd(), attributes, None, depth)?;
    Ok(tree)
}

/// Opens and copies the source of a mount whose ids are not mapped. Submounts are included: the
/// kernel allows only root to see what they cover.
pub(crate) fn clone_mount_source(site: &SourceLocation, read_only: bool) -> io::Result<OwnedFd> {
    let opened = site.open_existing().map_err(io::Error::other)?;
    let tree = mounts::clone_tree_of(opened.source.as_fd(), MountDepth::Recursive)?;
    mounts::set_attributes(tree.as_fd(), sources::mount_attributes(read_only), None, MountDepth::Recursive)?;
    Ok(tree)
}

/// Mounts the image's trees: an overlay at `/`, then one at each mount point.
fn build_root(entry: &JailEntry, layers: &mut RootLayers) -> Result<(), JailError> {
    mounts::mount_filesystem(
        "tmpfs",
        Path::new(SCRATCH_DIRECTORY),
        MountAttrs::NO_SUID.and(MountAttrs::NO_DEV),
        SCRATCH_TMPFS_OPTIONS,
    )
    .at_step(JailStep::Scratch)?;
    let volume = Path::new(SCRATCH_DIRECTORY).join("v");
    fs::create_dir(&volume).at_step(JailStep::Scratch)?;
    fs::create_dir(Path::new(SCRATCH_DIRECTORY).join("root")).at_step(JailStep::Scratch)?;
    match (&entry.volume, layers.volume.take()) {
        (EntryVolume::Given(_), Some(given)) => {
            mounts::attach_mount(given.as_fd(), &volume).at_step(JailStep::AttachLayers)?
        }
        (EntryVolume::Tmpfs(bytes), _) => {
            make_tmpfs_volume(&volume, *bytes, &entry.trees).at_step(JailStep::Scratch)?
        }
        (EntryVolume::Directory(path), _) => {
            let own = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV);
            let directory =
                clone_mount(path, MountDepth::Single, own).at_path(JailStep::CloneVolume, path)?;
            mounts::attach_mount(directory.as_fd(), &volume).at_step(JailStep::AttachLayers)?;
        }
        (EntryVolume::Given(_), None) => {
            return Err(io::Error::other("no volume was received")).at_step(JailStep::Handover);
        }
    }
    for (index, (tree, lowers)) in entry.trees.iter().zip(std::mem::take(&mut layers.trees)).enumerate() {
        let mut paths = Vec::new();
        for (number, lower) in lowers.iter().enumerate() {
            let path = format!("{SCRATCH_DIRECTORY}/l{index}.{number}");
            fs::create_dir(&path).at_step(JailStep::Scratch)?;
            mounts::attach_mount(lower.as_fd(), Path::new(&path)).at_step(JailStep::AttachLayers)?;
            paths.push(path);
        }
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let upper = format!("{SCRATCH_DIRECTORY}/v/{}.upper", tree.name);
        let work = format!("{SCRATCH_DIRECTORY}/v/{}.work", tree.name);
        let target = format!("{SCRATCH_DIRECTORY}/root{}", tree.mount_point.trim_end_matches('/'));
        mounts::mount_overlay(&paths, &upper, &work, Path::new(&target))
            .at_path(JailStep::Overlay, &tree.mount_point)?;
    }
    Ok(())
}

fn make_tmpfs_volume(volume: &Path, bytes: u64, trees: &[EntryTree]) -> io::Result<()> {
    let inodes = (bytes / 4096).max(1024);
    let options = format!("mode=0755,size={bytes},nr_inodes={inodes}");
    mounts::mount_filesystem("tmpfs", volume, MountAttrs::NO_SUID.and(MountAttrs::NO_DEV), &options)?;
    make_upper_directories(volume, trees)
}

/// Makes a bounded filesystem in memory for the journals. Only the agent reads them, so they need no
/// name outside and end with the sandbox.
fn make_journals() -> io::Result<OwnedFd> {
    let directory = Path::new(SCRATCH_DIRECTORY).join("journals");
    fs::create_dir(&directory)?;
    let attributes = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV).and(MountAttrs::NO_EXEC);
    mounts::mount_filesystem("tmpfs", &directory, attributes, JOURNAL_TMPFS_OPTIONS)?;
    mounts::clone_tree(&directory, MountDepth::Single)
}

/// Makes a new directory on the volume for files that change in isolated sessions. Its name is random,
/// so code inside cannot find it by name.
///
/// A volume that was made from a snapshot may contain such a directory of another sandbox. That one is
/// left alone, because code inside decided how deep and how wide it is. It counts against the disk
/// limit like everything else in the snapshot.
fn make_isolated_sessions_directory() -> io::Result<OwnedFd> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let directory = format!("{SCRATCH_DIRECTORY}/v/nests.{:016x}", u64::from_le_bytes(random));
    fs::DirBuilder::new().mode(0o700).create(&directory)?;
    mounts::clone_tree(Path::new(&directory), MountDepth::Single)
}

/// Makes the directories of each tree in an empty volume.
pub(crate) fn make_upper_directories(volume: &Path, trees: &[EntryTree]) -> io::Result<()> {
    for tree in trees {
        let upper = volume.join(format!("{}.upper", tree.name));
        fs::create_dir(&upper)?;
        fs::set_permissions(&upper, fs::Permissions::from_mode(0o755))?;
        fs::create_dir(volume.join(format!("{}.work", tree.name)))?;
        if tree.mount_point == "/usr" {
            // Without root, files of the host's /usr have no mapped owner inside, and only directories
            // that exist in the upper layer can be written.
            for directory in images::premade_usr_directories() {
                fs::create_dir_all(upper.join(directory))?;
            }
        }
    }
    Ok(())
}

/// Refuses an image that has something else where a directory is mounted on. Before the root changes, a
/// link would lead to a place of the host.
fn check_mount_points(root: &Path, names: &[&str]) -> Result<(), JailError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty()).at_step(JailStep::Guest)?;
    names.iter().try_for_each(|name| check_mount_point(root.as_fd(), name).at_path(JailStep::Guest, name))
}

fn check_mount_point(root: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    match rustix::fs::openat2(root, name, flags, Mode::empty(), resolve) {
        Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => {
            Err(io::Error::other("the image has a link or a file here, and a directory is needed"))
        }
        opened => Ok(opened.map(drop)?),
    }
}

/// Mounts `/proc`, forbids user namespaces inside and sets the other limits of this one.
///
/// The settings are written in the sandbox's own `/proc`, before that becomes read-only. In the host's, the
/// time of each create would grow with the number of sandboxes: see
/// [`linux::procfs::mount_uncovered_proc`].
///
/// An empty directory of the scratch filesystem covers directories of `/proc`. A filesystem of its own would cost more: the
/// removal of any memory group visits every mounted filesystem of the host. The scratch filesystem's root is not reachable
/// inside.
fn mount_proc(scratch: &Path, proc: &Path, user_limits: &UserNamespaceLimits) -> Result<(), JailError> {
    linux::procfs::mount_uncovered_proc(proc).at_step(JailStep::Proc)?;
    let settings = proc.join("sys/user");
    fs::write(settings.join("max_user_namespaces"), "0").at_step(JailStep::ForbidUserNamespaces)?;
    for (name, limit) in user_limits {
        fs::write(settings.join(name), limit.to_string()).at_step(JailStep::ResourceLimits)?;
    }
    let empty = scratch.join("empty");
    fs::DirBuilder::new().mode(0o555).create(&empty).at_step(JailStep::Proc)?;
    linux::procfs::cover_proc(proc, Path::new("/dev/null"), Some(&empty)).at_step(JailStep::Proc)
}

/// Makes `/dev` and `/dev/shm` as directories of the scratch filesystem and mounts them at `dev`.
fn make_devices(scratch: &Path, dev: &Path) -> io::Result<()> {
    const NODES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
    let (files, shared_memory) = (scratch.join("dev"), scratch.join("shm"));
    fs::create_dir(&shared_memory)?;
    fs::set_permissions(&shared_memory, fs::Permissions::from_mode(0o1777))?;
    for directory in [files.clone(), files.join("pts"), files.join("shm")] {
        fs::DirBuilder::new().mode(0o755).create(directory)?;
    }
    for node in NODES {
        // One call makes an empty file without opening it.
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(CWD, files.join(node), rustix::fs::FileType::RegularFile, mode, 0)?;
    }
    for (link, target) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        std::os::unix::fs::symlink(target, files.join(link))?;
    }
    let quiet = MountAttrs::NO_SUID.and(MountAttrs::NO_EXEC);
    mounts::bind_mount_with(&files, dev, quiet.and(MountAttrs::NO_DEV))?;
    for node in NODES {
        mounts::bind_mount(&Path::new("/dev").join(node), &dev.join(node))?;
    }
    mounts::mount_filesystem(
        "devpts",
        &dev.join("pts"),
        quiet,
        &format!("newinstance,ptmxmode=0666,mode=0620,max={MAX_TERMINALS}"),
    )?;
    mounts::bind_mount_with(&shared_memory, &dev.join("shm"), MountAttrs::NO_SUID.and(MountAttrs::NO_DEV))
}

/// Attaches host directories at their targets. The image may contain links anywhere, so each target
/// is opened within the new root, and the mount is attached to that descriptor.
fn attach_mounts(root: &Path, entry: &JailEntry, given: &[OwnedFd]) -> Result<(), JailError> {
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .at_step(JailStep::AttachMounts)?;
    for (mount, tree) in entry.mounts.iter().zip(given) {
        make_mount_target(root.as_fd(), &mount.target, tree.as_fd(), ResolveFlags::IN_ROOT)
            .and_then(|target| mounts::attach_mount_on(tree.as_fd(), target.as_fd()))
            .at_path(JailStep::AttachMounts, &mount.target)?;
    }
    Ok(())
}

/// Opens the target of a mount and makes the missing parts of its path: a file for a file, a
/// directory for a directory.
pub(crate) fn make_mount_target(
    root: BorrowedFd<'_>,
    target: &str,
    source: BorrowedFd<'_>,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let open =
        |path: &str, flags| rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
    if let Ok(existing) = open(target, OFlags::PATH) {
        return Ok(existing);
    }
    let is_file = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(source)?.st_mode).is_file();
    let mut path = String::new();
    let words: Vec<&str> = target.split('/').filter(|word| !word.is_empty()).collect();
    for (index, word) in words.iter().enumerate() {
        let parent = open(if path.is_empty() { "/" } else { &path }, OFlags::PATH | OFlags::DIRECTORY)?;
        path = format!("{path}/{word}");
        if open(&path, OFlags::PATH).is_ok() {
            continue;
        }
        if is_file && index + 1 == words.len() {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            drop(rustix::fs::openat(&parent, *word, flags, Mode::from_raw_mode(0o644))?);
        } else {
            rustix::fs::mkdirat(&parent, *word, Mode::from_raw_mode(0o755))?;
        }
    }
    open(&path, OFlags::PATH).map_err(Into::into)
}

/// Checks that the upper layer can be written, so that a sandbox that cannot write fails to start.
fn probe_write() -> io::Result<()> {
    let name = "/.coracle-probe";
    fs::OpenOptions::new().write(true).create_new(true).open(name)?;
    fs::remove_file(name)
}

/// Makes the users and directories that the client expects. Nothing is changed in directories of the host.
fn set_up_guest(guest: &GuestPlan, mounts: &[EntryMount]) -> Result<(), JailError> {
    for user in guest.users.iter().filter(|user| !user.in_image) {
        let line = format!("{0}:x:{1}:{2}::{3}:/bin/bash\n", user.name, user.uid, user.gid, user.home);
        append_to_file("/etc/passwd", &line)?;
        append_to_file("/etc/group", &format!("{0}:x:{1}:\n", user.name, user.gid))?;
        make_owned_directory(&user.home, user.uid, user.gid)?;
    }
    for (directory, owner) in &guest.directories {
        let user = guest.users.iter().find(|user| user.name == *owner);
        let (uid, gid) = user.map_or((0, 0), |user| (user.uid, user.gid));
        match mount_around(mounts, directory) {
            None => make_owned_directory(directory, uid, gid)?,
            Some(mount) if mount.is_writable_volume() => make_volume_directory(directory, uid, gid)?,
            Some(_) => {}
        }
    }
    make_directories(&guest.default_directory)
}

/// Returns the innermost mount that contains a path.
fn mount_around<'a>(mounts: &'a [EntryMount], path: &str) -> Option<&'a EntryMount> {
    let around = mounts.iter().filter(|mount| Path::new(path).starts_with(&mount.target));
    around.max_by_key(|mount| Path::new(&mount.target).components().count())
}

/// Makes a directory on a volume. An earlier sandbox may have put anything else in its place, which is then kept.
fn make_volume_directory(path: &str, uid: u32, gid: u32) -> Result<(), JailError> {
    match fs::DirBuilder::new().recursive(true).mode(0o755).create(path) {
        Ok(()) => make_owned_directory(path, uid, gid),
        Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory) => {
            Ok(())
        }
        Err(error) => Err(error).at_path(JailStep::Guest, path),
    }
}

fn append_to_file(path: &str, text: &str) -> Result<(), JailError> {
    let file = fs::OpenOptions::new().append(true).create(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes())).at_path(JailStep::Guest, path)
}

fn make_owned_directory(path: &str, uid: u32, gid: u32) -> Result<(), JailError> {
    make_directories(path)?;
    let ids = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
    rustix::fs::chownat(CWD, path, Some(ids.0), Some(ids.1), rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .at_path(JailStep::Guest, path)
}

fn make_directories(path: &str) -> Result<(), JailError> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path).at_path(JailStep::Guest, path)
}

/// Collects the descriptors that the agent inherits: `/dev/null` as standard input, output and error,
/// then its descriptors in the order of the numbers in its configuration.
fn prepare_agent_descriptors(
    mut inherited: Vec<Option<OwnedFd>>,
    index: usize,
    journal: OwnedFd,
    agent: OwnedFd,
    report: OwnedFd,
) -> io::Result<PreparedExec> {
    inherited[index] = Some(journal);
    let inherited: Option<Vec<OwnedFd>> = inherited.into_iter().collect();
    let inherited = inherited.ok_or_else(|| io::Error::other("a descriptor of the agent is missing"))?;
    let nothing = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let standard = [nothing.try_clone()?, nothing.try_clone()?, nothing];
    PreparedExec::prepare(agent, standard.into_iter().chain(inherited).collect(), report)
}

fn exec_strings(words: &[&CStr]) -> ExecStrings {
    ExecStrings::new(words.iter().map(|word| CString::from(*word)).collect())
}

#[cfg(test)]
mod tests;
