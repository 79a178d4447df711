//! Mounts and namespaces.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use crate::call::{call, constant, pointer, signed, text};
use crate::verdict::{Attempt, decide, first_success};

/// Mounts a new filesystem.
pub(crate) fn mount_tmpfs() -> Attempt {
    let place = make_mount_point()?;
    decide("mount", mount("tmpfs", &place, "tmpfs", 0, ""))
}

/// A fresh `/proc` would show what the masks hide.
pub(crate) fn mount_proc() -> Attempt {
    let place = make_mount_point()?;
    decide("mount", mount("proc", &place, "proc", 0, ""))
}

/// The newer mount calls, which a filter written for `mount` overlooks.
pub(crate) fn mount_by_descriptor() -> Attempt {
    let kind = text("tmpfs");
    let root = text("/");
    let clone = u64::from(libc::OPEN_TREE_CLONE);
    first_success([
        ("fsopen".to_owned(), call(libc::SYS_fsopen, &[pointer(kind.as_c_str()), 0])),
        (
            "open_tree".to_owned(),
            call(libc::SYS_open_tree, &[constant(libc::AT_FDCWD), pointer(root.as_c_str()), clone]),
        ),
    ])
}

/// Removes the read-only flag from a mount.
pub(crate) fn remount_writable(path: &str) -> Attempt {
    decide("mount", mount("none", path, "", libc::MS_REMOUNT | libc::MS_BIND, ""))
}

/// Unmounts a mask.
pub(crate) fn uncover(path: &str) -> Attempt {
    let place = text(path);
    decide("umount2", call(libc::SYS_umount2, &[pointer(place.as_c_str()), constant(libc::MNT_DETACH)]))
}

/// Mounts a v1 hierarchy whose `release_agent` the kernel would run as host root.
///
/// It only checks that the file could be written, and writes nothing.
pub(crate) fn mount_cgroup_release_agent() -> Attempt {
    let place = make_mount_point()?;
    let mounted = ["rdma", "misc", "none,name=attack", "memory"].into_iter().map(|options| {
        let result = mount("cgroup", &place, "cgroup", 0, options).and_then(|()| {
            let agent = fs::OpenOptions::new().write(true).open(PathBuf::from(&place).join("release_agent"));
            let gone = text(&place);
            call(libc::SYS_umount2, &[pointer(gone.as_c_str()), constant(libc::MNT_DETACH)])?;
            agent
        });
        (format!("mount cgroup {options}"), result)
    });
    first_success(mounted)
}

/// Changes the root; an error about the arguments would still mean that the permission was granted.
pub(crate) fn pivot_root() -> Attempt {
    let place = make_mount_point()?;
    let put = format!("{place}/old");
    let prepared = mount("tmpfs", &place, "tmpfs", 0, "").and_then(|()| fs::create_dir(&put));
    let (new, old) = (text(&place), text(&put));
    let pivoted = call(libc::SYS_pivot_root, &[pointer(new.as_c_str()), pointer(old.as_c_str())]);
    decide("pivot_root", prepared.and(pivoted))
}

/// Enters each namespace of another process.
pub(crate) fn join_namespaces(pid: &str) -> Attempt {
    let kinds = ["mnt", "pid", "net", "ipc", "uts", "cgroup", "user"];
    first_success(kinds.map(|kind| {
        let joined = File::open(format!("/proc/{pid}/ns/{kind}"))
            .and_then(|namespace| call(libc::SYS_setns, &[signed(i64::from(namespace.as_raw_fd())), 0]));
        (format!("setns {kind}"), joined)
    }))
}

pub(crate) fn unshare(kind: &str) -> Attempt {
    let flag = match kind {
        "user" => libc::CLONE_NEWUSER,
        "mount" => libc::CLONE_NEWNS,
        "net" => libc::CLONE_NEWNET,
        "pid" => libc::CLONE_NEWPID,
        "cgroup" => libc::CLONE_NEWCGROUP,
        "all" => libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWPID,
        _ => return Err(format!("no such namespace: {kind}")),
    };
    decide("unshare", call(libc::SYS_unshare, &[constant(flag)]))
}

/// The flags of `clone3` lie in memory, where no filter can look.
pub(crate) fn clone_user_namespace() -> Attempt {
    let mut arguments = [0_u64; 11];
    arguments[0] = constant(libc::CLONE_NEWUSER);
    arguments[4] = constant(libc::SIGCHLD);
    let size = 8 * arguments.len() as u64;
    match call(libc::SYS_clone3, &[pointer(&arguments), size]) {
        // The child shares nothing with its parent and exits at once.
        Ok(0) => std::process::exit(0),
        result => decide("clone3", result),
    }
}

/// A user namespace gives back every capability within it, so the next mount would succeed.
pub(crate) fn user_namespace_then_mount() -> Attempt {
    let place = make_mount_point()?;
    let chain =
        call(libc::SYS_unshare, &[constant(libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWNET)])
            .and_then(|_| mount("tmpfs", &place, "tmpfs", 0, ""));
    decide("unshare and mount", chain)
}

fn mount(source: &str, target: &str, kind: &str, flags: u64, options: &str) -> io::Result<()> {
    let [source, target, kind, options] = [source, target, kind, options].map(text);
    call(
        libc::SYS_mount,
        &[
            pointer(source.as_c_str()),
            pointer(target.as_c_str()),
            pointer(kind.as_c_str()),
            flags,
            pointer(options.as_c_str()),
        ],
    )?;
    Ok(())
}

/// Makes a directory to mount on.
fn make_mount_point() -> Result<String, String> {
    let path = std::env::temp_dir().join(format!("place-{}", std::process::id()));
    match fs::create_dir(&path) {
        // An earlier attack of this process made it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(|error| format!("mkdir: {error}"))?,
    }
    Ok(path.to_string_lossy().into_owned())
}
