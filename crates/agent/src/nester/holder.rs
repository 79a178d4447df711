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
use linux::mounts::{self, Attributes, Depth};
use linux::namespaces;
use linux::procfs;
use linux::readonly::make_read_only;
use linux::signals::{self, Signals};
use linux::spawn;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use wire::nest::{Nest, NestMount, View};
use wire::{Fault, FaultKind};

use super::{Stores, open_namespace, order};
use crate::fault;
use crate::identity::Who;
use crate::place::Place;

/// Where overlays are assembled; no mount of the session is here.
const SCRATCH: &str = "/dev/shm";

/// The limits of the session's directories in memory. Their use is charged to the sandbox anyway.
const TEMPORARY: &str = "mode=1777,size=1g,nr_inodes=256k";
const RUNTIME: &str = "mode=0755,size=64m,nr_inodes=16k";
const SHARED_MEMORY: &str = "mode=1777,size=64m";
const CHANGES: &str = "mode=0700,size=1g,nr_inodes=256k";

/// The maximum number of symbolic links followed, as in the kernel.
const MOST_LINKS: usize = 40;

/// The kernel's magic number of the `/proc` filesystem.
const PROC: rustix::fs::FsWord = 0x9fa0;

/// Paths where nothing can be mounted: these belong to the session itself.
const RESERVED: [&str; 3] = ["/proc", "/dev", "/sys"];

/// The input of a namespace init.
pub(super) struct Task<'a> {
    /// The number of its directory on the disk.
    pub(super) store: u64,
    pub(super) nest: &'a Nest,
    pub(super) who: &'a Who,
    pub(super) stores: &'a Stores,
    /// The channel on which the broker receives the namespaces.
    pub(super) way: &'a OwnedFd,
}

/// Sets up the namespaces and stays in them. An error is written to `report`.
pub(super) fn run(place: &Place, task: &Task<'_>, join: [Option<&OwnedFd>; 2], report: OwnedFd) -> ! {
    let built = enter_groups(place, join)
        .and_then(|()| introduce(task.way))
        .and_then(|()| build(task))
        .and_then(|()| {
            give_up(place)
                .map_err(|error| fault::from_io(&error, "confine itself", "the first process of the session"))
        });
    if let Err(fault) = built {
        let report_text = serde_json::to_vec(&fault).unwrap_or_default();
        rustix::io::write(&report, &report_text).ok();
        spawn::exit_now(1);
    }
    drop(report);
    watch_over()
}

/// Sends our namespaces to the broker. They cannot be opened by our pid, because the kernel forbids
/// access to a process whose executable cannot be read.
fn introduce(way: &OwnedFd) -> Result<(), Fault> {
    let opened = ["pid", "mnt", "ipc", "net"].map(open_namespace);
    let opened = opened.into_iter().collect::<io::Result<Vec<_>>>();
    let sent = opened.and_then(|spaces| {
        let spaces: Vec<BorrowedFd<'_>> = spaces.iter().map(AsFd::as_fd).collect();
        order::hand_over(way, &spaces)
    });
    sent.named("hand over", "its namespaces")
}

fn enter_groups(place: &Place, join: [Option<&OwnedFd>; 2]) -> Result<(), Fault> {
    let mut groups = join.into_iter().flatten().chain(&place.tasks);
    let joined = groups.try_for_each(|group| rustix::io::write(group, b"0").map(drop));
    joined.map_err(|errno| fault::from_errno(errno, "join the group", "an isolated session"))
}

/// A mount source, opened while it was still visible.
struct Piece<'a> {
    mount: &'a NestMount,
    tree: OwnedFd,
}

trait Named<T> {
    fn named(self, operation: &str, path: &str) -> Result<T, Fault>;
}

impl<T, E: Into<io::Error>> Named<T> for Result<T, E> {
    fn named(self, operation: &str, path: &str) -> Result<T, Fault> {
        self.map_err(|error| fault::from_io(&error.into(), operation, path))
    }
}

fn build(task: &Task<'_>) -> Result<(), Fault> {
    let nest = task.nest;
    let (source, target) = ("/tmp".to_owned(), "/tmp".to_owned());
    let shared = NestMount { source, target, view: View::ReadWrite, without_links: false };
    let mut shown: Vec<&NestMount> = nest.mounts.iter().collect();
    if nest.share_temporary && shown.iter().all(|mount| mount.target != "/tmp") {
        shown.push(&shared);
    }
    // A mount inside another one must come after it.
    shown.sort_by_key(|mount| mount.target.matches('/').count());
    let pieces = shown.into_iter().map(|mount| take(mount, task)).collect::<Result<Vec<_>, _>>()?;

    for path in ["/tmp", "/run"] {
        open_or_make(path, None, MOST_LINKS).named("open", path)?;
    }
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).named("open", "/")?;
    // The devices below `/dev` are files of the host that no process inside may change, and `/proc`
    // is covered.
    make_read_only(root.as_fd(), &["/dev", "/proc"].map(Path::new)).named("make read-only", "/")?;
    let plain = Attributes::NO_SUID.and(Attributes::NO_DEV);
    for (path, options) in [("/tmp", TEMPORARY), ("/run", RUNTIME), (SCRATCH, CHANGES)] {
        mounts::mount("tmpfs", Path::new(path), plain, options).named("mount", path)?;
    }
    task.stores.show_disk(&Path::new(SCRATCH).join("disk"), task.store).named("mount", "the disk")?;
    for (number, piece) in pieces.iter().enumerate() {
        put(piece, number, task)?;
    }
    mounts::detach(Path::new(SCRATCH)).named("unmount", SCRATCH)?;

    let quiet = Attributes::NO_SUID.and(Attributes::NO_EXEC);
    let terminals = "newinstance,ptmxmode=0666,mode=0620,max=256";
    mounts::mount("devpts", Path::new("/dev/pts"), quiet, terminals).named("mount", "/dev/pts")?;
    mounts::mount("tmpfs", Path::new(SCRATCH), plain, SHARED_MEMORY).named("mount", SCRATCH)?;
    let covers = take_covers().named("mount", "/proc")?;
    procfs::mount(Path::new("/proc"), Path::new("/dev/null")).named("mount", "/proc")?;
    for (path, cover) in covers {
        mounts::attach(cover.as_fd(), Path::new(path)).named("mount", path)?;
    }
    if !nest.share_network {
        namespaces::raise_loopback().named("raise", "the loopback")?;
    }
    Ok(())
}

/// The files that show the sandbox's limits, where they cover those of its `/proc`.
fn take_covers() -> io::Result<Vec<(&'static str, OwnedFd)>> {
    let mut covers = Vec::new();
    for path in ["/proc/meminfo", "/proc/cpuinfo", "/proc/stat"] {
        if rustix::fs::statfs(path)?.f_type != PROC {
            covers.push((path, mounts::clone_tree(Path::new(path), Depth::Single)?));
        }
    }
    Ok(covers)
}

/// Opens the source of a mount, and creates source and target if they are missing.
fn take<'a>(mount: &'a NestMount, task: &Task<'_>) -> Result<Piece<'a>, Fault> {
    let links = if mount.without_links { 0 } else { MOST_LINKS };
    let source = open_or_make(&mount.source, Some(task.who), links).named("open", &mount.source)?;
    refuse_reserved(source.as_fd(), &mount.source)?;
    let hidden = mount.target.starts_with("/tmp/") && !task.nest.share_temporary;
    if mount.target != mount.source && !hidden {
        let target = open_or_make(&mount.target, Some(task.who), MOST_LINKS).named("open", &mount.target)?;
        refuse_reserved(target.as_fd(), &mount.target)?;
    }
    let tree = mounts::clone_of(source.as_fd(), Depth::Recursive).named("mount", &mount.source)?;
    Ok(Piece { mount, tree })
}

/// Links may lead anywhere, so the resolved path is checked.
fn refuse_reserved(fd: BorrowedFd<'_>, path: &str) -> Result<(), Fault> {
    let led = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).named("find", path)?;
    let reserved = RESERVED.iter().any(|reserved| led.starts_with(reserved)) || led == Path::new("/");
    if reserved {
        return Err(fault::plain(
            FaultKind::Invalid,
            "mount",
            &format!("{path}: this path is reserved for the session itself"),
        ));
    }
    Ok(())
}

/// Mounts a source at its target.
fn put(piece: &Piece<'_>, number: usize, task: &Task<'_>) -> Result<(), Fault> {
    let links =
        if piece.mount.without_links && piece.mount.target == piece.mount.source { 0 } else { MOST_LINKS };
    let target =
        open_or_make(&piece.mount.target, Some(task.who), links).named("open", &piece.mount.target)?;
    refuse_reserved(target.as_fd(), &piece.mount.target)?;
    let View::Overlay { kept } = piece.mount.view else {
        return show(piece, &target).named("mount", &piece.mount.target);
    };
    let store = if kept && task.stores.has_disk() { format!("{SCRATCH}/disk") } else { SCRATCH.to_owned() };
    overlay(piece, number, &store, &target).named("mount overlay", &piece.mount.target)
}

/// The copy has the attributes of its source, so it permits no more than that.
fn show(piece: &Piece<'_>, target: &OwnedFd) -> io::Result<()> {
    mounts::attach_on(piece.tree.as_fd(), target.as_fd())?;
    match piece.mount.view {
        View::ReadOnly => make_read_only(piece.tree.as_fd(), &[]),
        View::ReadWrite | View::Overlay { .. } => Ok(()),
    }
}

fn overlay(piece: &Piece<'_>, number: usize, store: &str, target: &OwnedFd) -> io::Result<()> {
    let lower = format!("{SCRATCH}/lower{number}");
    let (upper, work) = (format!("{store}/upper{number}"), format!("{store}/work{number}"));
    for directory in [&lower, &upper, &work] {
        fs::create_dir(directory)?;
    }
    mounts::attach(piece.tree.as_fd(), Path::new(&lower))?;
    // The root of an overlay has the owner and mode of its upper layer.
    let like = fs::metadata(&lower)?;
    if !like.is_dir() {
        return Err(Errno::NOTDIR.into());
    }
    std::os::unix::fs::chown(&upper, Some(like.uid()), Some(like.gid()))?;
    fs::set_permissions(&upper, fs::Permissions::from_mode(like.mode() & 0o7777))?;
    let target = format!("/proc/self/fd/{}", target.as_raw_fd());
    mounts::overlay(&[&lower], &upper, &work, Path::new(&target))
}

/// Opens a path and creates missing directories, which belong to `owner`, or to root. More than
/// `most_links` links are an error.
///
/// The path is walked here component by component, since a link of `/proc` would lead to
/// descriptors of this process, and openat2(2), which could forbid that, is not allowed in every
/// sandbox.
fn open_or_make(path: &str, owner: Option<&Who>, most_links: usize) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let mut here = rustix::fs::open("/", flags, Mode::empty())?;
    let mut words = words_of(path);
    let mut links = 0;
    while let Some(word) = words.pop() {
        if rustix::fs::fstatfs(&here)?.f_type == PROC {
            return Err(Errno::LOOP.into());
        }
        let next = match rustix::fs::openat(&here, word.as_str(), flags | OFlags::NOFOLLOW, Mode::empty()) {
            Err(Errno::NOENT) => make(&here, &word, owner)?,
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
        words.extend(words_of(&led));
    }
    Ok(here)
}

/// The components of a path, the last one first.
fn words_of(path: &str) -> Vec<String> {
    path.split('/').rev().filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn make(parent: &OwnedFd, word: &str, owner: Option<&Who>) -> rustix::io::Result<OwnedFd> {
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
fn give_up(place: &Place) -> io::Result<()> {
    caps::bound_to(CapSet::NONE)?;
    caps::set(CapSet::NONE)?;
    place.confine_late()
}

/// Reaps the orphans of the session. The first process of a pid namespace cannot be killed from
/// inside it.
fn watch_over() -> ! {
    let Ok(children) = Signals::watch(&[signals::CHILD]) else { spawn::exit_now(1) };
    if linux::descriptors::keep_only_these(std::iter::once(children.as_fd())).is_err() {
        spawn::exit_now(1);
    }
    loop {
        rustix::event::poll(&mut [PollFd::new(&children, PollFlags::IN)], None).ok();
        children.clear().ok();
        while matches!(spawn::reap(), Ok(Some(_))) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::namespaces::Namespaces;

    fn mount(path: &Path, target: &Path, view: View, without_links: bool) -> NestMount {
        let text = |path: &Path| path.to_str().expect("the tests write text").to_owned();
        NestMount { source: text(path), target: text(target), view, without_links }
    }

    /// Sets up a session's mounts in a thread with its own mount namespace and inspects them from
    /// inside.
    fn built(mounts: Vec<NestMount>, look: impl FnOnce(Result<(), Fault>) + Send + 'static) {
        let run = || {
            namespaces::unshare(Namespaces::MOUNT).expect("the test runs as root");
            mounts::make_private().expect("the test runs as root");
            // In a sandbox each device is a mount.
            mounts::bind(Path::new("/dev/null"), Path::new("/dev/null")).expect("the test runs as root");
            let nest = Nest { mounts, share_network: true, ..Nest::default() };
            let (_, way) = order::channel().expect("a pair");
            let who = Who {
                uid: rustix::fs::Uid::ROOT,
                gid: rustix::fs::Gid::ROOT,
                groups: Vec::new(),
                name: "root".to_owned(),
                home: "/root".to_owned(),
                shell: "/bin/sh".to_owned(),
                usual: true,
            };
            let task = Task { store: 1, nest: &nest, who: &who, stores: &Stores { aside: None }, way: &way };
            look(build(&task));
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
            mount(&own, &own, View::ReadWrite, true),
            mount(&own, &shown, View::ReadOnly, true),
            mount(&laid, &laid, View::Overlay { kept: true }, false),
        ];
        let outside = dir.path().to_owned();
        let inside = outside.clone();
        built(mounts, move |outcome| {
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
            built(vec![mount(&path, &path, View::ReadWrite, true)], |outcome| {
                assert_eq!(outcome.expect_err("the path contains a link").kind, FaultKind::Invalid);
            });
        }
        assert!(!led.join("below").exists());
        built(vec![mount(&link, &link, View::ReadWrite, false)], |outcome| outcome.expect("links pass"));
    }
}
