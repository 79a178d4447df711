//! The namespace init, the first process in the namespaces of an isolated session: sets up its file
//! tree, then reaps orphans until it is killed, which ends everything in the session.
//!
//! ```text
//! join groups ─► open the mount sources ─► make all read-only ─► /tmp, /run ─► mount the sources
//!   ─► terminals, shared memory ─► /proc ─► drop all privileges ─► wait forever
//! ```
//! Paths are the sandbox's own and may lead anywhere in it, but not through the links of `/proc`,
//! which would lead to descriptors of this process; some paths may contain no link at all. Sources
//! are opened before anything covers them. Everything happens in a mount namespace that contains no
//! other process yet.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use linux::caps::{self, CapSet};
use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces;
use linux::procfs;
use linux::readonly::make_read_only;
use linux::signals::{self, SignalFd};
use linux::spawn;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use wire::isolated_session::{IsolatedMount, IsolatedSessionSpec, MountView};
use wire::{Fault, FaultKind};

use super::{ChangeStorage, ChangeStoreId, open_namespace, protocol};
use crate::context::AgentContext;
use crate::fault;
use crate::identity::ResolvedUser;

/// Where overlays are assembled; no mount of the session is here.
const SCRATCH: &str = "/dev/shm";

/// The limits of the session's directories in memory. Their use is charged to the sandbox anyway.
const TMP_OPTIONS: &str = "mode=1777,size=1g,nr_inodes=256k";
const RUN_OPTIONS: &str = "mode=0755,size=64m,nr_inodes=16k";
const SHARED_MEMORY_OPTIONS: &str = "mode=1777,size=64m";
const OVERLAY_STORE_OPTIONS: &str = "mode=0700,size=1g,nr_inodes=256k";

/// The maximum number of symbolic links followed, as in the kernel.
const MAX_LINKS: usize = 40;

/// The kernel's magic number of the `/proc` filesystem.
const PROC_SUPER_MAGIC: rustix::fs::FsWord = 0x9fa0;

/// Paths where nothing can be mounted: these belong to the session itself.
const RESERVED_PATHS: [&str; 3] = ["/proc", "/dev", "/sys"];

/// The input of a namespace init.
pub(super) struct NamespaceInitTask<'a> {
    /// The number of its directory on the disk.
    pub(super) store: ChangeStoreId,
    pub(super) spec: &'a IsolatedSessionSpec,
    pub(super) user: &'a ResolvedUser,
    pub(super) stores: &'a ChangeStorage,
    /// The channel on which the broker receives the namespaces.
    pub(super) channel: &'a OwnedFd,
}

/// Sets up the namespaces and stays in them. An error is written to `report`.
pub(super) fn init_main(
    context: &AgentContext,
    task: &NamespaceInitTask<'_>,
    join: [Option<&OwnedFd>; 2],
    report: OwnedFd,
) -> ! {
    let built = join_groups(context, join)
        .and_then(|()| send_namespaces(task.channel))
        .and_then(|()| build_file_tree(task))
        .and_then(|()| {
            drop_privileges(context)
                .map_err(|error| fault::from_io(&error, "confine itself", "the first process of the session"))
        });
    if let Err(fault) = built {
        let report_text = serde_json::to_vec(&fault).unwrap_or_default();
        rustix::io::write(&report, &report_text).ok();
        spawn::exit_now(1);
    }
    drop(report);
    reap_orphans_forever()
}

/// Sends our namespaces to the broker. They cannot be opened by our pid, because the kernel forbids
/// access to a process whose executable cannot be read.
fn send_namespaces(channel: &OwnedFd) -> Result<(), Fault> {
    let opened = ["pid", "mnt", "ipc", "net"].map(open_namespace);
    let opened = opened.into_iter().collect::<io::Result<Vec<_>>>();
    let sent = opened.and_then(|spaces| {
        let spaces: Vec<BorrowedFd<'_>> = spaces.iter().map(AsFd::as_fd).collect();
        protocol::send_descriptors(channel, &spaces)
    });
    sent.or_fault("hand over", "its namespaces")
}

fn join_groups(context: &AgentContext, join: [Option<&OwnedFd>; 2]) -> Result<(), Fault> {
    let mut groups = join.into_iter().flatten().chain(&context.tasks);
    let joined = groups.try_for_each(|group| rustix::io::write(group, b"0").map(drop));
    joined.map_err(|errno| fault::from_errno(errno, "join the group", "an isolated session"))
}

/// A mount source, opened while it was still visible.
struct OpenedMountSource<'a> {
    mount: &'a IsolatedMount,
    tree: OwnedFd,
}

trait MountErrorContext<T> {
    fn or_fault(self, operation: &str, path: &str) -> Result<T, Fault>;
}

impl<T, E: Into<io::Error>> MountErrorContext<T> for Result<T, E> {
    fn or_fault(self, operation: &str, path: &str) -> Result<T, Fault> {
        self.map_err(|error| fault::from_io(&error.into(), operation, path))
    }
}

fn build_file_tree(task: &NamespaceInitTask<'_>) -> Result<(), Fault> {
    let spec = task.spec;
    let (source, target) = ("/tmp".to_owned(), "/tmp".to_owned());
    let shared = IsolatedMount { source, target, view: MountView::ReadWrite, without_links: false };
    let mut shown: Vec<&IsolatedMount> = spec.mounts.iter().collect();
    if spec.share_temporary && shown.iter().all(|mount| mount.target != "/tmp") {
        shown.push(&shared);
    }
    // A mount inside another one must come after it.
    shown.sort_by_key(|mount| mount.target.matches('/').count());
    let pieces =
        shown.into_iter().map(|mount| open_mount_source(mount, task)).collect::<Result<Vec<_>, _>>()?;

    for path in ["/tmp", "/run"] {
        open_or_make(path, None, MAX_LINKS).or_fault("open", path)?;
    }
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).or_fault("open", "/")?;
    // The devices below `/dev` are files of the host that no process inside may change, and `/proc`
    // is covered.
    make_read_only(root.as_fd(), &["/dev", "/proc"].map(Path::new)).or_fault("make read-only", "/")?;
    let plain = MountAttrs::NO_SUID.and(MountAttrs::NO_DEV);
    for (path, options) in [("/tmp", TMP_OPTIONS), ("/run", RUN_OPTIONS), (SCRATCH, OVERLAY_STORE_OPTIONS)] {
        mounts::mount_filesystem("tmpfs", Path::new(path), plain, options).or_fault("mount", path)?;
    }
    task.stores.mount_disk(&Path::new(SCRATCH).join("disk"), task.store).or_fault("mount", "the disk")?;
    for (number, piece) in pieces.iter().enumerate() {
        mount_at_target(piece, number, task)?;
    }
    mounts::detach_mount(Path::new(SCRATCH)).or_fault("unmount", SCRATCH)?;

    let quiet = MountAttrs::NO_SUID.and(MountAttrs::NO_EXEC);
    let terminals = "newinstance,ptmxmode=0666,mode=0620,max=32";
    mounts::mount_filesystem("devpts", Path::new("/dev/pts"), quiet, terminals)
        .or_fault("mount", "/dev/pts")?;
    mounts::mount_filesystem("tmpfs", Path::new(SCRATCH), plain, SHARED_MEMORY_OPTIONS)
        .or_fault("mount", SCRATCH)?;
    let covers = clone_limit_files().or_fault("mount", "/proc")?;
    procfs::mount_proc(Path::new("/proc"), Path::new("/dev/null")).or_fault("mount", "/proc")?;
    for (path, cover) in covers {
        mounts::attach_mount(cover.as_fd(), Path::new(path)).or_fault("mount", path)?;
    }
    if !spec.share_network {
        namespaces::set_loopback_up().or_fault("raise", "the loopback")?;
    }
    Ok(())
}

/// The files that show the sandbox's limits, where they cover those of its `/proc`.
fn clone_limit_files() -> io::Result<Vec<(&'static str, OwnedFd)>> {
    let mut covers = Vec::new();
    for path in ["/proc/meminfo", "/proc/cpuinfo", "/proc/stat"] {
        if rustix::fs::statfs(path)?.f_type != PROC_SUPER_MAGIC {
            covers.push((path, mounts::clone_tree(Path::new(path), MountDepth::Single)?));
        }
    }
    Ok(covers)
}

/// Opens the source of a mount, and creates source and target if they are missing.
fn open_mount_source<'a>(
    mount: &'a IsolatedMount,
    task: &NamespaceInitTask<'_>,
) -> Result<OpenedMountSource<'a>, Fault> {
    let links = if mount.without_links { 0 } else { MAX_LINKS };
    let source = open_or_make(&mount.source, Some(task.user), links).or_fault("open", &mount.source)?;
    refuse_reserved(source.as_fd(), &mount.source)?;
    let hidden = mount.target.starts_with("/tmp/") && !task.spec.share_temporary;
    if mount.target != mount.source && !hidden {
        let target =
            open_or_make(&mount.target, Some(task.user), MAX_LINKS).or_fault("open", &mount.target)?;
        refuse_reserved(target.as_fd(), &mount.target)?;
    }
    let tree =
        mounts::clone_tree_of(source.as_fd(), MountDepth::Recursive).or_fault("mount", &mount.source)?;
    Ok(OpenedMountSource { mount, tree })
}

/// Links may lead anywhere, so the resolved path is checked.
fn refuse_reserved(fd: BorrowedFd<'_>, path: &str) -> Result<(), Fault> {
    let led = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).or_fault("find", path)?;
    let reserved = RESERVED_PATHS.iter().any(|reserved| led.starts_with(reserved)) || led == Path::new("/");
    if reserved {
        return Err(fault::from_kind(
            FaultKind::Invalid,
            "mount",
            &format!("{path}: this path is reserved for the session itself"),
        ));
    }
    Ok(())
}

/// Mounts a source at its target.
fn mount_at_target(
    piece: &OpenedMountSource<'_>,
    number: usize,
    task: &NamespaceInitTask<'_>,
) -> Result<(), Fault> {
    let links =
        if piece.mount.without_links && piece.mount.target == piece.mount.source { 0 } else { MAX_LINKS };
    let target =
        open_or_make(&piece.mount.target, Some(task.user), links).or_fault("open", &piece.mount.target)?;
    refuse_reserved(target.as_fd(), &piece.mount.target)?;
    let MountView::Overlay { kept } = piece.mount.view else {
        return attach_mount(piece, &target).or_fault("mount", &piece.mount.target);
    };
    let store = if kept && task.stores.has_disk() { format!("{SCRATCH}/disk") } else { SCRATCH.to_owned() };
    mount_overlay(piece, number, &store, &target).or_fault("mount overlay", &piece.mount.target)
}

/// The copy has the attributes of its source, so it permits no more than that.
fn attach_mount(piece: &OpenedMountSource<'_>, target: &OwnedFd) -> io::Result<()> {
    mounts::attach_mount_on(piece.tree.as_fd(), target.as_fd())?;
    match piece.mount.view {
        MountView::ReadOnly => make_read_only(piece.tree.as_fd(), &[]),
        MountView::ReadWrite | MountView::Overlay { .. } => Ok(()),
    }
}

fn mount_overlay(
    piece: &OpenedMountSource<'_>,
    number: usize,
    store: &str,
    target: &OwnedFd,
) -> io::Result<()> {
    let lower = format!("{SCRATCH}/lower{number}");
    let (upper, work) = (format!("{store}/upper{number}"), format!("{store}/work{number}"));
    for directory in [&lower, &upper, &work] {
        fs::create_dir(directory)?;
    }
    mounts::attach_mount(piece.tree.as_fd(), Path::new(&lower))?;
    // The root of an overlay has the owner and mode of its upper layer.
    let like = fs::metadata(&lower)?;
    if !like.is_dir() {
        return Err(Errno::NOTDIR.into());
    }
    std::os::unix::fs::chown(&upper, Some(like.uid()), Some(like.gid()))?;
    fs::set_permissions(&upper, fs::Permissions::from_mode(like.mode() & 0o7777))?;
    let target = format!("/proc/self/fd/{}", target.as_raw_fd());
    mounts::mount_overlay(&[&lower], &upper, &work, Path::new(&target))
}

/// Opens a path and creates missing directories, which belong to `owner`, or to root. More than
/// `most_links` links are an error.
///
/// The path is walked here component by component, since a link of `/proc` would lead to
/// descriptors of this process, and openat2(2), which could forbid that, is not allowed in every
/// sandbox.
fn open_or_make(path: &str, owner: Option<&ResolvedUser>, most_links: usize) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let mut here = rustix::fs::open("/", flags, Mode::empty())?;
    let mut words = reversed_components(path);
    let mut links = 0;
    while let Some(word) = words.pop() {
        if rustix::fs::fstatfs(&here)?.f_type == PROC_SUPER_MAGIC {
            return Err(Errno::LOOP.into());
        }
        let next = match rustix::fs::openat(&here, word.as_str(), flags | OFlags::NOFOLLOW, Mode::empty()) {
            Err(Errno::NOENT) => make_directory(&here, &word, owner)?,
            opened => opened?,
        };
        if FileType::from_raw_mode(rustix::fs::fstat(&next)?.st_mode) != FileType::Symlink {
            here = next;
            continue;
        }
        links += 1;
        if links > most_links {
            return Err(Errno::LOOP.into());
        }
        let led = rustix::fs::readlinkat(&next, "", Vec::new())?;
        let led = String::from_utf8(led.into_bytes()).map_err(io::Error::other)?;
        if led.starts_with('/') {
            here = rustix::fs::open("/", flags, Mode::empty())?;
        }
        words.extend(reversed_components(&led));
    }
    Ok(here)
}

/// The components of a path, the last one first.
fn reversed_components(path: &str) -> Vec<String> {
    path.split('/').rev().filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn make_directory(parent: &OwnedFd, word: &str, owner: Option<&ResolvedUser>) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::mkdirat(parent, word, Mode::from_raw_mode(0o755)) {
        Ok(()) => {
            if let Some(who) = owner {
                let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(parent, word, Some(who.uid), Some(who.gid), flags)?;
            }
        }
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    rustix::fs::openat(parent, word, OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
}

/// None of its privileges is needed to reap orphans.
fn drop_privileges(context: &AgentContext) -> io::Result<()> {
    caps::limit_bounding_set_from(context.bounding_set, CapSet::NONE)?;
    caps::set_capabilities(CapSet::NONE)?;
    context.drop_broker_privileges()
}

/// Reaps the orphans of the session. The first process of a pid namespace cannot be killed from
/// inside it.
fn reap_orphans_forever() -> ! {
    let Ok(children) = SignalFd::watch(&[signals::SIGCHLD]) else { spawn::exit_now(1) };
    if linux::descriptors::close_all_except_these(std::iter::once(children.as_fd())).is_err() {
        spawn::exit_now(1);
    }
    loop {
        rustix::event::poll(&mut [PollFd::new(&children, PollFlags::IN)], None).ok();
        children.clear().ok();
        while matches!(spawn::reap_child(), Ok(Some(_))) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::namespaces::NamespaceSet;

    fn mount(path: &Path, target: &Path, view: MountView, without_links: bool) -> IsolatedMount {
        let text = |path: &Path| path.to_str().expect("the tests write text").to_owned();
        IsolatedMount { source: text(path), target: text(target), view, without_links }
    }

    /// Sets up a session's mounts in a thread with its own mount namespace and inspects them from
    /// inside.
    fn with_built_mounts(mounts: Vec<IsolatedMount>, look: impl FnOnce(Result<(), Fault>) + Send + 'static) {
        let run = || {
            namespaces::unshare_namespaces(NamespaceSet::MOUNT).expect("the test runs as root");
            mounts::make_private().expect("the test runs as root");
            // In a sandbox each device is a mount.
            mounts::bind_mount(Path::new("/dev/null"), Path::new("/dev/null"))
                .expect("the test runs as root");
            let spec = IsolatedSessionSpec { mounts, share_network: true, ..IsolatedSessionSpec::default() };
            let (_, channel) = protocol::create_channel().expect("a pair");
            let who = ResolvedUser {
                uid: rustix::fs::Uid::ROOT,
                gid: rustix::fs::Gid::ROOT,
                groups: Vec::new(),
                name: "root".to_owned(),
                home: "/root".to_owned(),
                shell: "/bin/sh".to_owned(),
                is_default: true,
            };
            let task = NamespaceInitTask {
                store: ChangeStoreId(1),
                spec: &spec,
                user: &who,
                stores: &ChangeStorage { disk_namespace: None },
                channel: &channel,
            };
            look(build_file_tree(&task));
        };
        std::thread::spawn(run).join().expect("the checks passed");
    }

    #[test]
    fn isolated_session_is_writable_only_in_requested_mounts() {
        if !testkit::needs_root() {
            return;
        }
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let [own, shown, laid] = ["own", "shown", "laid"].map(|name| dir.path().join(name));
        let mounts = vec![
            mount(&own, &own, MountView::ReadWrite, true),
            mount(&own, &shown, MountView::ReadOnly, true),
            mount(&laid, &laid, MountView::Overlay { kept: true }, false),
        ];
        let outside = dir.path().to_owned();
        let inside = outside.clone();
        with_built_mounts(mounts, move |outcome| {
            outcome.expect("all mounts are valid");
            for path in ["own/file", "laid/file"] {
                fs::write(inside.join(path), "x").expect("the mount is writable");
            }
            for path in
                [inside.join("shown/other"), inside.join("other"), "/other".into(), "/dev/other".into()]
            {
                let error = fs::write(&path, "x").expect_err("it is read-only");
                assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem, "{}", path.display());
            }
            assert!(inside.join("shown/file").exists());
            fs::write("/dev/null", "x").expect("devices work");
            fs::write("/tmp/file", "x").expect("the session has its own /tmp");
        });
        assert!(outside.join("own/file").exists());
        assert!(!outside.join("laid/file").exists());
    }

    #[test]
    fn links_are_refused_in_a_source_without_links() {
        if !testkit::needs_root() {
            return;
        }
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let (link, led) = (dir.path().join("link"), dir.path().join("led"));
        fs::create_dir(&led).expect("the name is free");
        std::os::unix::fs::symlink(&led, &link).expect("the name is free");
        for path in [link.clone(), link.join("below")] {
            with_built_mounts(vec![mount(&path, &path, MountView::ReadWrite, true)], |outcome| {
                assert_eq!(outcome.expect_err("the path contains a link").kind, FaultKind::Invalid);
            });
        }
        assert!(!led.join("below").exists());
        with_built_mounts(vec![mount(&link, &link, MountView::ReadWrite, false)], |outcome| {
            outcome.expect("links pass")
        });
    }
}
