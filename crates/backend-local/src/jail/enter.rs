//! Building a sandbox from inside: the steps of the cloned child until it becomes the agent.
//!
//! ```text
//! join groups ─► wait for maps and layers ─► root inside ─► no user namespaces ─► private mounts
//!   ─► scratch ─► layers ─► overlays ─► /dev ─► /proc ─► limit view ─► guest ─► mounts ─► pivot ─► probe
//!   ─► limits ─► capabilities ─► no_new_privs ─► Landlock ─► seccomp ─► exec
//! ```
//!
//! The order matters. The root changes while capabilities still allow it, and the filter comes
//! last because it forbids what the earlier steps need.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use linux::caps::{self, CapSet};
use linux::descriptors::Departure;
use linux::mounts::{self, Attributes, Depth};
use linux::namespaces::{self, Setgroups};
use linux::seccomp::Program;
use linux::spawn::Words;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::process::{Resource, Rlimit};

use super::limit_view::{self, EntryView};
use super::plan::GuestPlan;
use super::sources::{self, Site};
use super::step::{At, Failure, JailError, Step};
use crate::images;
use crate::network::resolver;

/// The directory in which the child builds its root. It exists on every host, and only the child sees
/// the mounts over it.
const SCRATCH: &str = "/tmp";

/// The capabilities of the agent, all of them only over its own user namespace.
pub const AGENT_CAPABILITIES: CapSet = CapSet::of(&[
    // Needed to reduce the bounding set of each command; a command never has it.
    caps::SETPCAP,
])
.and(COMMAND_CAPABILITIES);

/// The capabilities of a command that runs as root inside.
pub const COMMAND_CAPABILITIES: CapSet = CapSet::of(&[
    caps::CHOWN,
    caps::DAC_OVERRIDE,
    caps::FOWNER,
    caps::FSETID,
    caps::KILL,
    caps::SETGID,
    caps::SETUID,
]);

/// The capabilities of the process that makes isolated sessions, over the same user namespace: the
/// agent's and some more.
pub const NESTER_CAPABILITIES: CapSet = CapSet::of(&[
    // Needed for mounts and namespaces.
    caps::SYS_ADMIN,
    // Needed because entering a mount namespace changes the root.
    caps::SYS_CHROOT,
    // Needed to bring up the loopback of an isolated session without a network.
    caps::NET_ADMIN,
])
.and(AGENT_CAPABILITIES);

/// Everything that the child needs, prepared before it is cloned.
pub struct Entry {
    pub setgroups: Setgroups,
    pub die_with_parent: bool,
    pub host_name: String,
    pub trees: Vec<EntryTree>,
    pub volume: EntryVolume,
    pub mounts: Vec<EntryMount>,
    /// The name servers of a sandbox that has a network.
    pub resolv_conf: Option<String>,
    pub guest: GuestPlan,
    pub agent: OwnedFd,
    pub agent_tasks: Vec<OwnedFd>,
    pub filter: Program,
    /// The limit on open files before the launcher raised its own; programs inside expect that one.
    pub open_files: Rlimit,
    /// Descriptors for the agent, in the order of its configuration, from 3 on.
    pub inherited: Vec<OwnedFd>,
    /// The index in `inherited` that is replaced by the journal directory, which arrives later.
    pub journal: usize,
    /// Without root: the index in `inherited` that is replaced by a mount of the commands' group,
    /// which the child makes.
    pub commands: Option<(usize, PathBuf)>,
    /// If isolated sessions are possible: the index in `inherited` that is replaced by the directory on
    /// the volume for files that change in them. The agent then confines itself.
    pub nests: Option<usize>,
    /// The limits that the sandbox sees instead of the host's values.
    pub limit_view: Option<EntryView>,
}

/// One tree of the image. Its lower layers arrive as detached mounts, or are paths that the child clones.
pub struct EntryTree {
    pub mount_point: String,
    /// The name of its directories in the volume.
    pub name: String,
    pub lowers: Vec<PathBuf>,
}

pub enum EntryVolume {
    /// Arrives as a detached mount.
    Given,
    /// A tmpfs of this many bytes, charged to memory.
    Tmpfs(u64),
    /// A directory of the launcher, which the child clones.
    Directory(PathBuf),
}

pub struct EntryMount {
    pub site: Site,
    pub target: String,
    pub read_only: bool,
}

/// The size of the journals of a sandbox that has no volume for them. They are charged to the agent's
/// memory, so this is less than the agent's limit.
const JOURNALS: &str = "mode=0700,size=128m,nr_inodes=8k";

/// The descriptors that arrive once the id maps are written. For root, these are the detached and
/// idmapped mounts in the order: lowers of each tree, volume, journal, mounts. For an ordinary user
/// there are none.
pub type Handover = Vec<OwnedFd>;

/// Turns this process into the sandbox's first process. It returns only on failure. A failure of the
/// very last step, after which this cannot return, is written to `report`.
pub fn enter(
    entry: Entry,
    wait: impl FnOnce() -> io::Result<Handover>,
    report: OwnedFd,
) -> Result<Infallible, JailError> {
    for tasks in &entry.agent_tasks {
        rustix::io::write(tasks, b"0").at(Step::JoinGroups)?;
    }
    let handover = wait().at(Step::Handover)?;
    namespaces::become_ids(0, 0, entry.setgroups).at(Step::BecomeRoot)?;
    if entry.die_with_parent {
        // Not earlier, because changing ids clears the setting.
        namespaces::die_with_parent().at(Step::BecomeRoot)?;
    }
    fs::write("/proc/sys/user/max_user_namespaces", "0").at(Step::ForbidUserNamespaces)?;
    mounts::make_private().at(Step::PrivateMounts)?;

    let mut layers = gather(&entry, handover)?;
    build_root(&entry, &mut layers)?;
    let nests = entry.nests.map(|index| make_nests().map(|made| (index, made)));
    let nests = nests.transpose().at(Step::Scratch)?;
    let journals = layers.journal.take().map_or_else(make_journals, Ok).at(Step::Scratch)?;
    let root = Path::new(SCRATCH).join("root");
    for name in ["dev", "proc"] {
        check_mount_point(&root, name).at_path(Step::Guest, name)?;
    }
    make_devices(&root.join("dev")).at(Step::Devices)?;
    linux::procfs::mount(&root.join("proc"), Path::new("/dev/null")).at(Step::Proc)?;
    let view = entry.limit_view.as_ref().map(|view| limit_view::cover(view, Path::new(SCRATCH), &root));
    let view = view.transpose().at(Step::LimitView)?;
    attach_mounts(&root, &entry, &layers.mounts)?;
    namespaces::set_host_name(&entry.host_name).at(Step::Guest)?;

    mounts::pivot(&root).at(Step::Pivot)?;
    probe_write().at(Step::ProbeWrite)?;
    if let Some(text) = &entry.resolv_conf {
        resolver::write(text).at_path(Step::Guest, "/etc/resolv.conf")?;
    }
    settle_guest(&entry.guest)?;

    rustix::process::umask(Mode::from_raw_mode(0o022));
    namespaces::limit(Resource::Core, 0).at(Step::ResourceLimits)?;
    let Entry { mut inherited, journal, agent, filter, commands, open_files, limit_view, .. } = entry;
    if let (Some(EntryView { places, .. }), Some(view)) = (limit_view, view) {
        places.into_iter().zip(view).for_each(|(index, descriptor)| inherited[index] = descriptor);
    }
    if let (Some((index, _)), Some(group)) = (commands, layers.commands) {
        inherited[index] = group;
    }
    let nesting = nests.is_some();
    if let Some((index, directory)) = nests {
        inherited[index] = directory;
    }
    let departure = depart(inherited, journal, journals, agent, report).at(Step::ExecuteAgent)?;
    rustix::process::setrlimit(Resource::Nofile, open_files).at(Step::ResourceLimits)?;
    let (arguments, environment) = (words(&[c"coracle", c"__agent"]), words(&[]));
    let keep = if nesting { NESTER_CAPABILITIES } else { AGENT_CAPABILITIES };
    caps::bound_to(keep).at(Step::Capabilities)?;
    caps::set(keep).at(Step::Capabilities)?;
    linux::set_no_new_privs().at(Step::NoNewPrivileges)?;
    if !nesting {
        linux::landlock::forbid_mounts().at(Step::Landlock)?;
        filter.install().at(Step::Seccomp)?;
    }
    departure.go(&arguments, &environment, |source| {
        Failure::from(JailError::new(Step::ExecuteAgent, source)).told()
    })
}

/// The parts of the new root, all as detached mounts.
struct Layers {
    trees: Vec<Vec<OwnedFd>>,
    volume: Option<OwnedFd>,
    journal: Option<OwnedFd>,
    commands: Option<OwnedFd>,
    mounts: Vec<OwnedFd>,
}

fn gather(entry: &Entry, handover: Handover) -> Result<Layers, JailError> {
    if !matches!(entry.volume, EntryVolume::Given) {
        let attributes = Attributes::READ_ONLY.and(Attributes::NO_DEV);
        let mut trees = Vec::new();
        for tree in &entry.trees {
            let lowers = tree
                .lowers
                .iter()
                .map(|path| clone(path, Depth::Single, attributes).at_path(Step::CloneLowers, path));
            trees.push(lowers.collect::<Result<_, _>>()?);
        }
        let mounts = entry
            .mounts
            .iter()
            .map(|mount| clone_site(&mount.site, mount.read_only).at_path(Step::CloneMounts, &mount.target));
        let mounts = mounts.collect::<Result<_, _>>()?;
        let commands = entry.commands.as_ref().map(|(_, path)| mounts::clone_tree(path, Depth::Single));
        let commands = commands.transpose().at(Step::JoinGroups)?;
        return Ok(Layers { trees, volume: None, journal: None, commands, mounts });
    }
    let mut given = handover.into_iter();
    let mut next = || given.next().ok_or_else(|| io::Error::other("fewer mounts than planned"));
    let mut trees = Vec::new();
    for tree in &entry.trees {
        let lowers = tree.lowers.iter().map(|_| next());
        trees.push(lowers.collect::<io::Result<_>>().at(Step::Handover)?);
    }
    let volume = Some(next().at(Step::Handover)?);
    let journal = Some(next().at(Step::Handover)?);
    Ok(Layers { trees, volume, journal, commands: None, mounts: given.collect() })
}

fn clone(path: &Path, depth: Depth, attributes: Attributes) -> io::Result<OwnedFd> {
    let tree = mounts::clone_tree(path, depth)?;
    mounts::set_attributes(tree.as_fd(), attributes, None, depth)?;
    Ok(tree)
}

/// Opens and copies the source of a mount whose ids are not mapped. Submounts are included: the
/// kernel allows only root to see what they cover.
pub fn clone_site(site: &Site, read_only: bool) -> io::Result<OwnedFd> {
    let opened = site.open_existing().map_err(io::Error::other)?;
    let tree = mounts::clone_of(opened.source.as_fd(), Depth::Recursive)?;
    mounts::set_attributes(tree.as_fd(), sources::attributes(read_only), None, Depth::Recursive)?;
    Ok(tree)
}

/// Mounts the image's trees: an overlay at `/`, then one at each mount point.
fn build_root(entry: &Entry, layers: &mut Layers) -> Result<(), JailError> {
    let options = "mode=0755,size=1m,nr_inodes=1k";
    mounts::mount("tmpfs", Path::new(SCRATCH), Attributes::NO_SUID.and(Attributes::NO_DEV), options)
        .at(Step::Scratch)?;
    let volume = Path::new(SCRATCH).join("v");
    fs::create_dir(&volume).at(Step::Scratch)?;
    fs::create_dir(Path::new(SCRATCH).join("root")).at(Step::Scratch)?;
    match (&entry.volume, layers.volume.take()) {
        (EntryVolume::Given, Some(given)) => mounts::attach(given.as_fd(), &volume).at(Step::AttachLayers)?,
        (EntryVolume::Tmpfs(bytes), _) => {
            make_tmpfs_volume(&volume, *bytes, &entry.trees).at(Step::Scratch)?
        }
        (EntryVolume::Directory(path), _) => {
            let own = Attributes::NO_SUID.and(Attributes::NO_DEV);
            let directory = clone(path, Depth::Single, own).at_path(Step::CloneVolume, path)?;
            mounts::attach(directory.as_fd(), &volume).at(Step::AttachLayers)?;
        }
        (EntryVolume::Given, None) => {
            return Err(io::Error::other("no volume was received")).at(Step::Handover);
        }
    }
    for (index, (tree, lowers)) in entry.trees.iter().zip(std::mem::take(&mut layers.trees)).enumerate() {
        let mut paths = Vec::new();
        for (number, lower) in lowers.iter().enumerate() {
            let path = format!("{SCRATCH}/l{index}.{number}");
            fs::create_dir(&path).at(Step::Scratch)?;
            mounts::attach(lower.as_fd(), Path::new(&path)).at(Step::AttachLayers)?;
            paths.push(path);
        }
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let upper = format!("{SCRATCH}/v/{}.upper", tree.name);
        let work = format!("{SCRATCH}/v/{}.work", tree.name);
        let target = format!("{SCRATCH}/root{}", tree.mount_point.trim_end_matches('/'));
        mounts::overlay(&paths, &upper, &work, Path::new(&target))
            .at_path(Step::Overlay, &tree.mount_point)?;
    }
    Ok(())
}

fn make_tmpfs_volume(volume: &Path, bytes: u64, trees: &[EntryTree]) -> io::Result<()> {
    let inodes = (bytes / 4096).max(1024);
    let options = format!("mode=0755,size={bytes},nr_inodes={inodes}");
    mounts::mount("tmpfs", volume, Attributes::NO_SUID.and(Attributes::NO_DEV), &options)?;
    make_uppers(volume, trees)
}

/// Makes a bounded filesystem in memory for the journals. Only the agent reads them, so they need no
/// name outside and end with the sandbox.
fn make_journals() -> io::Result<OwnedFd> {
    let directory = Path::new(SCRATCH).join("journals");
    fs::create_dir(&directory)?;
    let attributes = Attributes::NO_SUID.and(Attributes::NO_DEV).and(Attributes::NO_EXEC);
    mounts::mount("tmpfs", &directory, attributes, JOURNALS)?;
    mounts::clone_tree(&directory, Depth::Single)
}

/// Makes a new directory on the volume for files that change in isolated sessions. Its name is random,
/// so code inside cannot find it by name.
///
/// A volume that was made from a snapshot may contain such a directory of another sandbox. That one is
/// left alone, because code inside decided how deep and how wide it is. It counts against the disk
/// limit like everything else in the snapshot.
fn make_nests() -> io::Result<OwnedFd> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let directory = format!("{SCRATCH}/v/nests.{:016x}", u64::from_le_bytes(random));
    fs::DirBuilder::new().mode(0o700).create(&directory)?;
    mounts::clone_tree(Path::new(&directory), Depth::Single)
}

/// Makes the directories of each tree in an empty volume.
pub fn make_uppers(volume: &Path, trees: &[EntryTree]) -> io::Result<()> {
    for tree in trees {
        let upper = volume.join(format!("{}.upper", tree.name));
        fs::create_dir(&upper)?;
        fs::set_permissions(&upper, fs::Permissions::from_mode(0o755))?;
        fs::create_dir(volume.join(format!("{}.work", tree.name)))?;
        if tree.mount_point == "/usr" {
            // Without root, files of the host's /usr have no mapped owner inside, and only directories
            // that exist in the upper layer can be written.
            for directory in images::premade_in_usr() {
                fs::create_dir_all(upper.join(directory))?;
            }
        }
    }
    Ok(())
}

/// Refuses an image that has something else where a directory is mounted on. Before the root changes, a
/// link would lead to a place of the host.
fn check_mount_point(root: &Path, name: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    match rustix::fs::openat2(&root, name, flags, Mode::empty(), resolve) {
        Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => {
            Err(io::Error::other("the image has a link or a file here, and a directory is needed"))
        }
        opened => Ok(opened.map(drop)?),
    }
}

fn make_devices(dev: &Path) -> io::Result<()> {
    let (no_suid, no_exec) = (Attributes::NO_SUID, Attributes::NO_EXEC);
    mounts::mount("tmpfs", dev, no_suid.and(no_exec), "mode=0755,size=64k,nr_inodes=64")?;
    for node in ["null", "zero", "full", "random", "urandom", "tty"] {
        let target = dev.join(node);
        fs::OpenOptions::new().write(true).create_new(true).mode(0o666).open(&target)?;
        mounts::bind(&Path::new("/dev").join(node), &target)?;
    }
    let pts = dev.join("pts");
    fs::create_dir(&pts)?;
    mounts::mount("devpts", &pts, no_suid.and(no_exec), "newinstance,ptmxmode=0666,mode=0620,max=256")?;
    let shm = dev.join("shm");
    fs::create_dir(&shm)?;
    mounts::mount("tmpfs", &shm, no_suid.and(Attributes::NO_DEV), "mode=1777,size=64m")?;
    for (link, target) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        std::os::unix::fs::symlink(target, dev.join(link))?;
    }
    Ok(())
}

/// Attaches host directories at their targets. The image may contain links anywhere, so each target
/// is opened within the new root, and the mount is attached to that descriptor.
fn attach_mounts(root: &Path, entry: &Entry, given: &[OwnedFd]) -> Result<(), JailError> {
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .at(Step::AttachMounts)?;
    for (mount, tree) in entry.mounts.iter().zip(given) {
        make_target(root.as_fd(), &mount.target, tree.as_fd(), ResolveFlags::IN_ROOT)
            .and_then(|target| mounts::attach_on(tree.as_fd(), target.as_fd()))
            .at_path(Step::AttachMounts, &mount.target)?;
    }
    Ok(())
}

/// Opens the target of a mount and makes the missing parts of its path: a file for a file, a
/// directory for a directory.
pub fn make_target(
    root: BorrowedFd<'_>,
    target: &str,
    source: BorrowedFd<'_>,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let open =
        |path: &str, flags| rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
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

/// Makes the users and directories that the client expects.
fn settle_guest(guest: &GuestPlan) -> Result<(), JailError> {
    for user in &guest.users {
        let line = format!("{0}:x:{1}:{2}::{3}:/bin/bash\n", user.name, user.uid, user.gid, user.home);
        append("/etc/passwd", &line)?;
        append("/etc/group", &format!("{0}:x:{1}:\n", user.name, user.gid))?;
        make_owned(&user.home, user.uid, user.gid)?;
    }
    for (directory, owner) in &guest.directories {
        let user = guest.users.iter().find(|user| user.name == *owner);
        make_owned(directory, user.map_or(0, |user| user.uid), user.map_or(0, |user| user.gid))?;
    }
    make_directories(&guest.default_directory)
}

fn append(path: &str, text: &str) -> Result<(), JailError> {
    let file = fs::OpenOptions::new().append(true).create(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes())).at_path(Step::Guest, path)
}

fn make_owned(path: &str, uid: u32, gid: u32) -> Result<(), JailError> {
    make_directories(path)?;
    let ids = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
    rustix::fs::chownat(CWD, path, Some(ids.0), Some(ids.1), rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .at_path(Step::Guest, path)
}

fn make_directories(path: &str) -> Result<(), JailError> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path).at_path(Step::Guest, path)
}

/// Collects the descriptors that the agent inherits: `/dev/null` as standard input, output and error,
/// then its descriptors in the order of the numbers in its configuration.
fn depart(
    mut inherited: Vec<OwnedFd>,
    index: usize,
    journal: OwnedFd,
    agent: OwnedFd,
    report: OwnedFd,
) -> io::Result<Departure> {
    inherited[index] = journal;
    let nothing = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let standard = [nothing.try_clone()?, nothing.try_clone()?, nothing];
    Departure::prepare(agent, standard.into_iter().chain(inherited).collect(), report)
}

fn words(words: &[&CStr]) -> Words {
    Words::new(words.iter().map(|word| CString::from(*word)).collect())
}

#[cfg(test)]
mod tests;
