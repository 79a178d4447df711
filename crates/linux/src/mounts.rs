//! Mounts: detached clones with their own attributes, and attaching them. See open_tree(2),
//! mount_setattr(2), pivot_root(2).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags,
};

use crate::check_long;

/// Attributes of a mount; they are only added, never removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountAttrs(u64);

impl MountAttrs {
    pub const READ_ONLY: Self = Self(0x1);
    pub const NO_SUID: Self = Self(0x2);
    pub const NO_DEV: Self = Self(0x4);
    pub const NO_EXEC: Self = Self(0x8);
    const IDMAP: Self = Self(0x10_0000);

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the attributes as flags of mount(2).
    fn mount_flags(self) -> MountFlags {
        let mut flags = MountFlags::empty();
        for (attribute, flag) in [
            (Self::READ_ONLY, MountFlags::RDONLY),
            (Self::NO_SUID, MountFlags::NOSUID),
            (Self::NO_DEV, MountFlags::NODEV),
            (Self::NO_EXEC, MountFlags::NOEXEC),
        ] {
            if self.0 & attribute.0 != 0 {
                flags |= flag;
            }
        }
        flags
    }
}

/// Whether submounts are included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountDepth {
    /// Only the one filesystem, without anything mounted below it.
    Single,
    Recursive,
}

/// Creates a detached copy of the mount at `path`.
pub fn clone_tree(path: &Path, depth: MountDepth) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if depth == MountDepth::Recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    rustix::mount::open_tree(CWD, path, flags).map_err(Into::into)
}

/// Creates a detached copy of the directory that `source` is open on. No path is looked up, so the
/// copy is the directory that was checked, whatever happened to its path since.
pub fn clone_tree_of(source: BorrowedFd<'_>, depth: MountDepth) -> io::Result<OwnedFd> {
    let mut flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    if depth == MountDepth::Recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    rustix::mount::open_tree(source, "", flags).map_err(Into::into)
}

/// Adds attributes to a mount and, with `owners`, shows its files through the id map of that user
/// namespace.
pub fn set_attributes(
    mount: BorrowedFd<'_>,
    attributes: MountAttrs,
    owners: Option<BorrowedFd<'_>>,
    depth: MountDepth,
) -> io::Result<()> {
    #[repr(C)]
    struct MountSetattrArgs {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let arguments = MountSetattrArgs {
        set: attributes.0 | owners.map_or(0, |_| MountAttrs::IDMAP.0),
        clear: 0,
        propagation: 0,
        user_namespace: owners.map_or(0, |fd| u64::from(fd.as_raw_fd().unsigned_abs())),
    };
    let recursive = if depth == MountDepth::Recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the kernel reads the structure of the size given and an empty C string; the
    // descriptors are borrowed for the duration of the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw const arguments,
            size_of::<MountSetattrArgs>(),
        )
    };
    check_long(result).map(drop)
}

/// Attaches a detached mount at a path.
pub fn attach_mount(mount: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", CWD, path, flags).map_err(Into::into)
}

/// Attaches a detached mount on the directory that `target` is open on.
pub fn attach_mount_on(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", target, "", flags).map_err(Into::into)
}

/// Stops mount propagation between this mount namespace and all others, in both directions.
pub fn make_private() -> io::Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(Into::into)
}

/// Mounts a filesystem with the classic call, which all supported kernels have.
pub fn mount_filesystem(kind: &str, target: &Path, attributes: MountAttrs, options: &str) -> io::Result<()> {
    let options = CString::new(options).map_err(io::Error::other)?;
    rustix::mount::mount(kind, target, kind, attributes.mount_flags(), Some(options.as_c_str()))
        .map_err(Into::into)
}

/// Mounts a device without attaching it: its files are reachable only through the descriptor, and
/// it is unmounted when the last descriptor is closed. See fsmount(2).
pub fn mount_detached(kind: &CStr, device: &Path, attributes: MountAttrs) -> io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(context.as_fd(), "source", device)?;
    rustix::mount::fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::from_bits_retain(u32::try_from(attributes.0).map_err(io::Error::other)?);
    Ok(rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Bind-mounts the file or directory `source` at `target`.
pub fn bind_mount(source: &Path, target: &Path) -> io::Result<()> {
    rustix::mount::mount_bind(source, target).map_err(Into::into)
}

/// Bind-mounts the directory `source` at `target` with exactly these attributes.
pub fn bind_mount_with(source: &Path, target: &Path, attributes: MountAttrs) -> io::Result<()> {
    bind_mount(source, target)?;
    rustix::mount::mount_remount(target, MountFlags::BIND | attributes.mount_flags(), c"").map_err(Into::into)
}

/// Mounts an overlay: `upper` and `work` are on one filesystem, `lowers` are listed from the top
/// down.
///
/// The paths are our own and contain neither `:` nor `,` nor `\`. Whiteouts and opaque marks are
/// kept in `user.` attributes, the only form that may be written in a user namespace.
pub fn mount_overlay(lowers: &[&str], upper: &str, work: &str, target: &Path) -> io::Result<()> {
    let options = format!("lowerdir={},upperdir={upper},workdir={work},userxattr", lowers.join(":"));
    mount_filesystem("overlay", target, MountAttrs::default(), &options)
}

/// Makes `root` the root of this mount namespace and unmounts the old one.
pub fn pivot_root(root: &Path) -> io::Result<()> {
    // If both arguments are the same directory, the old root is stacked on top of the new one, so
    // no directory for it has to exist inside. See pivot_root(2).
    rustix::process::chdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/").map_err(Into::into)
}

/// Unmounts the mount whose root `mount` is open on, without looking up a path. This process must
/// be in a mount namespace that contains it, and its working directory changes.
pub fn detach_mount_of(mount: BorrowedFd<'_>) -> io::Result<()> {
    rustix::process::fchdir(mount)?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(Into::into)
}

/// Unmounts a mount, even if it is still in use.
pub fn detach_mount(path: &Path) -> io::Result<()> {
    rustix::mount::unmount(path, UnmountFlags::DETACH).map_err(Into::into)
}
